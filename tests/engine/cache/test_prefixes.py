"""Prompts that begin alike are read once, and nothing of an answer shows it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.cache.prefix_index import PrefixIndex
from dsbd_cli.engine.core.slots import PREFIX_STEP
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.planning.planner import Shape
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.requests import Request, RequestResult
from tests.helpers.toy import HashModel
from tests.helpers.toys import NumberCodec

V = 40
NGRAM = {"drafted": False, "drafter": "ngram", "depth": 2}


class Reader(HashModel):
    """Counts the tokens of prompts that it reads; fails as it is told.

    room: most rows of a forward before memory is short. bad: a token and a depth, whose logits are NaN.
    """

    read = 0
    room: int | None = None
    bad: tuple[int, int] | None = None

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        if self.room is not None and len(batch.tokens) > self.room:
            raise MemoryError
        if batch.chain:
            self.read += int((batch.slots != self._tokens.shape[1] - 1).sum())
        output = super().forward(batch, logits=logits)
        if output is not None and self.bad is not None:
            at = (batch.tokens == self.bad[0]) & (batch.positions == self.bad[1])
            output = torch.where(at.unsqueeze(-1), torch.nan, output)
        return output


def engine(batch_size: int, *, drafted: bool = True, share: bool = True, **method: Any) -> Engine:
    target = Reader(V, seed=1)
    draft = Reader(V, seed=1, noise=0.3) if drafted else None
    config = MethodConfig(**{"num_beams": 3, "depth": 2 if drafted else 0, "adaptive_depth": False, **method})
    made = Engine(target, draft, NumberCodec(V, (2,)), config, batch_size=batch_size)
    made.share_prefixes = share
    return made


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Two families of prompts that begin alike, of several lengths, and some that share nothing."""
    rng = random.Random(seed)

    def tokens(size: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(3, V), k=size))

    shots = [tokens(3 * PREFIX_STEP + 7), tokens(PREFIX_STEP)]
    middle = tokens(PREFIX_STEP)
    heads: Sequence[tuple[int, ...]] = [shots[0], shots[1], (*shots[0], *middle), ()]
    return [(*rng.choice(heads), *tokens(rng.choice((1, 2, 30, 90)))) for _ in range(count)]


def requests(wanted: list[tuple[int, ...]]) -> list[Request]:
    return [
        Request(id=str(i), prompt_ids=ids, sampling=SamplingConfig(max_new_tokens=(3, 6, 4)[i % 3], n_best=3))
        for i, ids in enumerate(wanted)
    ]


def signature(results: list[RequestResult]) -> list[object]:
    assert not [result.error for result in results if result.error is not None]
    return [[(beam.token_ids, beam.logprob, beam.score) for beam in result.hypotheses] for result in results]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize(
    "method",
    [{"drafted": False, "rule": "search"}, {"rule": "coupled"}, {"memory_saving": True}, NGRAM],
    ids=["search", "coupled", "memory-saving", "ngram"],
)
def test_answers_are_those_of_prompts_read_whole(batch_size: int, method: dict[str, Any]) -> None:
    """Guards slots that are copied from the wrong row, too many of them, overwritten before they are copied, or lost
    when rows are refilled and dropped: the logits of the toy depend on every token and its position."""
    rows = requests(prompts(20))
    plain = engine(batch_size, share=False, **method)
    expected = list(plain.run(rows))
    sharing = engine(batch_size, **method)
    results = list(sharing.run(rows))
    assert signature(results) == signature(expected)
    reused = [result.stats.prompt_tokens_reused for result in results]
    assert not any(result.stats.prompt_tokens_reused for result in expected)
    assert sum(reused) > 5 * PREFIX_STEP
    assert all(count % PREFIX_STEP == 0 for count in reused)
    target, whole = sharing.target, plain.target
    assert isinstance(target, Reader)
    assert isinstance(whole, Reader)
    assert whole.read == sum(len(row.prompt_ids or ()) - 1 for row in rows)
    assert target.read == whole.read - sum(reused)


def test_one_batch_reads_a_beginning_once() -> None:
    """Guards the first batch, whose rows all come at once; the draft, which reads later; and a run after it, which must
    not use what an earlier one has read: a model may have been trained in between."""
    shots = tuple(range(3, V)) * 6
    wanted = [(*shots, 5 + i, 7) for i in range(8)]
    decoder = engine(8)
    for _ in range(2):
        assert isinstance(decoder.target, Reader)
        assert isinstance(decoder.draft, Reader)
        decoder.target.read = decoder.draft.read = 0
        reused = [result.stats.prompt_tokens_reused for result in decoder.run(requests(wanted))]
        shared = len(shots) // PREFIX_STEP * PREFIX_STEP
        assert reused == [0, *[shared] * 7]
        assert decoder.target.read == decoder.draft.read == len(shots) + 1 + 7 * (len(shots) + 1 - shared)


def test_a_run_that_is_short_of_memory_starts_again() -> None:
    """Guards rows that are taken to hold what was given back."""
    rows = requests(prompts(12, seed=3))
    expected = signature(list(engine(1, share=False).run(rows)))
    decoder = engine(8)
    assert isinstance(decoder.target, Reader)
    decoder.target.room = 3
    results = list(decoder.run(rows))
    assert signature(results) == expected
    assert sum(result.stats.prompt_tokens_reused for result in results) > PREFIX_STEP


def test_nothing_is_copied_from_a_row_that_failed() -> None:
    """Guards the next prompt against NaN of a row before it."""
    shots = tuple(range(4, V)) * 5
    decoder = engine(1)
    assert isinstance(decoder.target, Reader)
    decoder.target.bad = 3, len(shots)
    wanted = [(*shots, 5), (*shots, 3), (*shots, 6), (*shots, 7)]
    outcomes = [
        (result.error is not None, result.stats.prompt_tokens_reused > 0) for result in decoder.run(requests(wanted))
    ]
    assert outcomes == [(False, False), (True, True), (False, False), (False, True)]


def test_a_model_that_keeps_more_than_slots_reads_every_prompt() -> None:
    """Guards recurrent layers and decoders of a source."""
    decoder = engine(2)
    decoder.target.copies_prefixes = False  # type: ignore[misc]
    rows = requests(prompts(6))
    results = list(decoder.run(rows))
    assert not any(result.stats.prompt_tokens_reused for result in results)
    assert signature(results) == signature(list(engine(2, share=False).run(rows)))


class Planned:
    """A planner that drafts in some iterations."""

    foresees = False

    def __init__(self, drafting: set[int]) -> None:
        self._drafting, self._asked = drafting, 0

    def choose(self, *_: object) -> Shape:
        self._asked += 1
        return Shape(2 if self._asked in self._drafting else 0, 4)

    def gate(self, *_: object) -> None: ...

    def observe(self, *_: object) -> None: ...


def test_the_draft_copies_no_slots_that_were_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a row that ended before the draft read its prompt: there it holds the prompt before, and writes over that
    when it catches up with a neighbour."""
    target, draft = Reader(V, seed=1), Reader(V, seed=1, noise=0.3)
    method = MethodConfig(num_beams=3, depth=2, adaptive_depth=False)
    decoder = Engine(target, draft, NumberCodec(V, ()), method, batch_size=2)
    monkeypatch.setattr(decoder, "_planner", Planned({1, 12, *range(20, 90)}))
    read, seen = decoder._caches.prefill_draft, []

    def watched(new: dict[int, tuple[int, ...]]) -> None:
        read(new)
        for row, prompt in new.items():
            assert draft._tokens[row, : len(prompt) - 1].tolist() == list(prompt[:-1])
            seen.append(tuple(prompt))

    monkeypatch.setattr(decoder._caches, "prefill_draft", watched)
    first_tokens, second_tokens = (tuple(range(start, start + PREFIX_STEP // 4)) * 4 for start in (3, 20))
    asked = [((*first_tokens, 5), 3), ((4, 5), 60), ((*second_tokens, 5), 2), ((*first_tokens, 6), 8)]
    rows = [
        Request(id=str(number), prompt_ids=ids, sampling=SamplingConfig(max_new_tokens=count))
        for number, (ids, count) in enumerate(asked)
    ]
    slow = [*rows[:2], *[None] * 4, rows[2], *[None] * 8, rows[3]]  # None: nothing is there in this iteration
    assert not any(result.error for result in decoder.run(slow))
    assert seen == [asked[0][0], asked[1][0], asked[3][0]]


def whole_blocks(prompt: Sequence[int], other: Sequence[int]) -> int:
    """Tokens, in whole blocks, that two prompts begin with alike, the last of each left out."""
    same = 0
    for token, other_token in zip(prompt[:-1], other[:-1], strict=False):
        if token != other_token:
            break
        same += 1
    return same // PREFIX_STEP * PREFIX_STEP


def test_the_index_finds_the_longest_beginning() -> None:
    """Guards the tree of blocks against a slow search over random prompts, and every wave against a source that was
    not there."""
    rng = random.Random(2)
    index, held = PrefixIndex(), dict[int, tuple[int, ...]]()
    waves_seen = 0
    for round_ in range(200):
        new = dict(zip(rng.sample(range(8), rng.randrange(1, 6)), prompts(5, seed=round_ % 9), strict=False))
        waves = index.plan(new)
        waves_seen = max(waves_seen, len(waves))
        assert sorted(row for wave in waves for row in wave) == sorted(new)
        order, ready = list(new), dict[int, tuple[int, ...]]()
        for number, wave in enumerate(waves):
            for row, copy in wave.items():
                before = order[: order.index(row)]
                candidates = [*held.values(), *(new[other] for other in before)]
                best = max((whole_blocks(new[row], other) for other in candidates), default=0)
                source = (ready if number else held).get(copy.src_row, ())
                assert copy.count == best
                assert not best or whole_blocks(new[row], source) == best
            ready |= {row: new[row] for row in wave}
        for row, prompt in new.items():
            index.put(row, prompt)
        held |= new
        row = rng.randrange(8)
        match rng.randrange(4):
            case 0:
                index.drop(row)
                held.pop(row, None)
            case 1 if row in held:
                slots = rng.randrange(200)
                index.keep(row, slots)
                held[row] = held[row][: slots // PREFIX_STEP * PREFIX_STEP + 1] if slots < len(held[row]) else held[row]
            case 2:
                rows = rng.sample(range(8), 4)
                index.select(rows)
                held = {new_row: held[row] for new_row, row in enumerate(rows) if row in held}
    assert waves_seen > 1
