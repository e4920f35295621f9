"""Own ids of rows, beside a plain list for each row."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.own_ids import KEPT, OwnIds
from tests.engine.drafting.test_no_reads import NoReads
from tests.helpers.toy import HashModel

V = 90
FIXED = (0, 7, 8, 40, 89)
BELOW = 80  # tokens from here on have no row


class Trimmed(HashModel):
    """Lacks tokens, and has rows of most of them."""

    lm_head_ids = torch.tensor(FIXED)
    own_ids_below = BELOW


@dataclass
class Row:
    """What a row should have, in order."""

    room: int
    held: list[int] = field(default_factory=list)

    def take(self, tokens: list[int]) -> None:
        for token in sorted(set(tokens)):
            if token < BELOW and token not in FIXED and token not in self.held and len(self.held) < self.room:
                self.held.append(token)


@dataclass
class Said:
    """Nodes of R rows and what the target said of them."""

    valid: Tensor
    candidates: Candidates

    def best(self, row: int) -> list[int]:
        best = list[int]()
        for node in range(self.valid.shape[1]):
            ranked = sorted(
                zip(
                    self.candidates.logprobs[row, node].tolist(),
                    self.candidates.tokens[row, node].tolist(),
                    strict=True,
                ),
                key=lambda pair: (-pair[0], pair[1]),
            )
            real = [token for logprob, token in ranked[:KEPT] if logprob > float("-inf")]
            best += real if self.valid[row, node] else []
        return best

    def row(self, row: int) -> Said:
        candidates, part = self.candidates, slice(row, row + 1)
        return Said(self.valid[part], Candidates(candidates.tokens[part], candidates.logprobs[part], candidates.full))


def said(seed: int, rows: int, width: int) -> Said:
    rng = torch.Generator().manual_seed(seed)
    shape = rows, 4, width
    tokens = torch.rand(*shape[:2], V, generator=rng).argsort(-1)[..., :width].sort(-1).values
    logprobs = torch.randn(shape, generator=rng).masked_fill(torch.rand(shape, generator=rng) < 0.3, float("-inf"))
    return Said(torch.rand(rows, 4, generator=rng) < 0.6, Candidates(tokens, logprobs, full=width == V))


def own_ids(rows: int, most: int = 1000) -> OwnIds:
    made = OwnIds.of(Trimmed(V), V, rows, torch.device("cpu"), most)
    assert made is not None
    return made


def learn(own: OwnIds, heard: Said) -> None:
    nodes: Any = heard
    own.learn(nodes, heard.candidates)


def held(own: OwnIds) -> list[list[int]]:
    """Own ids of each row, which stand first, without gaps."""
    lists = []
    for row in own.tokens.tolist():
        some = [token for token in row if token != V]
        assert row[: len(some)] == some
        assert len(set(some)) == len(some)
        assert not set(some) & set(FIXED)
        lists.append(some)
    assert [len(some) for some in lists] == own.count.tolist()
    return lists


@pytest.mark.parametrize("most", [1000, 20, 1])
@pytest.mark.parametrize("width", [3, 30, V])
def test_rows_have_what_a_list_has(most: int, width: int) -> None:
    """Guards tokens that are in twice, fixed ones among them, tokens without a row, tokens of absent nodes and
    impossible ones, more than there is room for, and rows that see each other."""
    rng, rows = random.Random(width), 3
    own, lists, alone = own_ids(rows, most), [Row(most) for _ in range(rows)], [own_ids(1, most) for _ in range(rows)]
    room = own.tokens.shape[1]
    assert room == min(most, len(set(range(BELOW)) - set(FIXED)))
    for turn in range(12):
        begins = [row for row in range(rows) if turn == 0 or rng.random() < 0.2]
        prompts = {row: [rng.randrange(V) for _ in range(rng.randrange(1, 9))] for row in begins}
        if prompts:
            own.begin(prompts)
        for row, prompt in prompts.items():
            lists[row] = Row(most)
            lists[row].take(prompt)
            alone[row].begin({0: prompt})
        heard = said(100 * turn + width, rows, width)
        learn(own, heard)
        for row in range(rows):
            lists[row].take(heard.best(row))
            learn(alone[row], heard.row(row))
        assert held(own) == [listed.held for listed in lists]
        assert held(own) == [held(own)[0] for own in alone]


def test_rows_keep_theirs_where_they_go() -> None:
    own = own_ids(3, 8)
    own.begin({0: [1, 2, 1], 1: [3, 7, V - 1], 2: [BELOW - 1, BELOW, 4]})
    assert held(own) == [[1, 2], [3], [4, BELOW - 1]]
    chosen = own.select(torch.tensor([2, 0]))
    chosen.begin({1: [5]})
    assert held(chosen) == [[4, BELOW - 1], [5]]
    learn(
        chosen,
        Said(
            torch.ones(2, 1, dtype=torch.bool),
            Candidates(torch.tensor([[[4, 6]], [[1, 4]]]), torch.zeros(2, 1, 2), full=False),
        ),
    )
    assert held(chosen) == [[4, BELOW - 1, 6], [5, 1, 4]]
    assert held(own) == [[1, 2], [3], [4, BELOW - 1]]


def test_what_is_no_number_is_not_learnt() -> None:
    own = own_ids(1)
    own.begin({0: [1]})
    logprobs = torch.tensor([[[float("nan"), -1.0, float("nan")]]])
    learn(own, Said(torch.ones(1, 1, dtype=torch.bool), Candidates(torch.tensor([[[2, 3, 4]]]), logprobs, full=False)))
    assert held(own) == [[1, 3]]


def test_drafts_that_have_no_use_for_them() -> None:
    """Guards costs of a run whose draft lacks no tokens, or has no rows of them."""
    device = torch.device("cpu")
    whole, rowless, all_but_none = HashModel(V), Trimmed(V), Trimmed(V)
    rowless.own_ids_below = 0
    all_but_none.lm_head_ids = torch.arange(BELOW)
    for model in (None, whole, rowless, all_but_none):
        assert OwnIds.of(model, V, 2, device) is None
    narrow = OwnIds.of(Trimmed(V), 30, 2, device)  # the target's vocabulary is smaller
    assert narrow is not None
    narrow.begin({0: [29, 1], 1: [7]})
    assert narrow.tokens[:, :2].tolist() == [[1, 29], [30, 30]]
    assert narrow.tokens.shape[1] == 30 - 3


def test_nothing_is_read_from_the_device() -> None:
    own, heard = own_ids(2, 9), said(1, 2, 30)
    own.begin({0: [1], 1: [2]})
    with NoReads():
        learn(own, heard)
    assert all(held(own))
