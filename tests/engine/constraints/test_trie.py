"""The trie as one sorted array, and several tries side by side in a table.

Guards: a search that finds an edge of another node or trie, a gap that is filled out of order, a list of legal tokens
that differs from the mask.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from dsbd_cli.engine.constraints.legal import DEAD, FREE, NodePaths, acting
from dsbd_cli.engine.constraints.trie import Trie, TrieTable, build_trie
from dsbd_cli.engine.core.candidates import CandidateCount, top_candidates
from dsbd_cli.engine.core.nodes import LayerNodes
from dsbd_cli.engine.core.topk import NEG_INF

V = 9
Tokens = tuple[int, ...]


def trie_of(answers: list[Tokens]) -> Trie:
    flat = np.array([token for answer in answers for token in answer], dtype=np.int64)
    return build_trie(flat, np.array([len(answer) for answer in answers], dtype=np.int64), V)


def some(seed: int, count: int) -> list[Tokens]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(V) for _ in range(rng.randint(1, 5))) for _ in range(count)]


def following(answers: list[Tokens], path: Tokens) -> set[int]:
    return {answer[len(path)] for answer in answers if len(answer) > len(path) and answer[: len(path)] == path}


def nodes_of(states: torch.Tensor) -> NodePaths:
    """Nodes of which only the states matter."""
    empty = torch.zeros_like(states)
    values = dict.fromkeys(LayerNodes.__slots__, empty)
    return NodePaths(LayerNodes(**{**values, "legal_state": states}), empty[0], None)  # type: ignore[arg-type]


def test_a_trie_holds_its_answers_and_no_others() -> None:
    for seed in range(20):
        answers = some(seed, 40)
        trie = trie_of(answers)
        paths = {answer[:at] for answer in answers for at in range(len(answer) + 1)}
        assert len(trie.keys) == len(paths)
        assert np.all(np.diff(trie.keys) > 0)
        nodes = {path: trie.find(path) for path in paths}
        assert None not in nodes.values()
        assert len(set(nodes.values())) == len(paths)
        assert [nodes[answer] for answer in answers] == trie.last.tolist()
        for path, node in nodes.items():
            assert set(trie.children(node)) == following(answers, path)  # type: ignore[arg-type]
        assert trie.longest == max(map(len, answers))
        assert trie.fanout[0] == len(following(answers, ()))
        assert trie.find((*answers[0], V - 1, V - 1, V - 1, V - 1, V - 1)) is None


def test_tries_come_and_go_without_touching_each_other() -> None:
    rng, table = random.Random(3), TrieTable(V, torch.device("cpu"))
    held: dict[int, list[Tokens]] = {}
    reused = 0
    for round_ in range(60):
        if held and rng.random() < 0.45:
            start = rng.choice(list(held))
            table.remove(start)
            del held[start]
        else:
            answers, size = some(round_, rng.randint(1, 30)), len(table.keys)
            start = table.add(trie_of(answers))
            reused += len(table.keys) == size
            held[start] = answers
        assert torch.all(table.keys.diff() > 0)
        legal = acting([table], [None, *held], 0)
        if not held:
            assert legal is None
            continue
        assert legal is not None
        for start, answers in held.items():
            level: dict[Tokens, int] = {(): start}
            while level:
                states = torch.tensor(list(level.values())).repeat_interleave(V)
                children = legal.step(states[None], torch.arange(V).repeat(len(level))[None]).view(-1, V).tolist()
                below = dict[Tokens, int]()
                for path, each in zip(level, children, strict=True):
                    alive = {token: state for token, state in enumerate(each) if state != DEAD}
                    assert alive.keys() == following(answers, path)
                    below |= {(*path, token): state for token, state in alive.items()}
                level = below
    assert reused > 5


def test_other_states_stay_as_they_are() -> None:
    table = TrieTable(V, torch.device("cpu"))
    start = table.add(trie_of(some(1, 10)))
    legal = acting([table], [start, FREE, -7], 0)
    assert legal is not None
    state = torch.tensor([[FREE, -7, DEAD, start]])
    for token in range(V):
        children = legal.step(state, torch.full_like(state, token))
        assert children[0, :3].tolist() == [FREE, -7, DEAD]


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("own", [False, True])
def test_listed_and_masked_candidates_are_the_best_legal_ones(count: int, own: bool) -> None:
    """The list of legal tokens and the mask give the same, which is: normalise over all, then the best legal ones."""
    answers = some(5, 30)
    table = TrieTable(V, torch.device("cpu"))
    start = table.add(trie_of(answers))
    paths: list[Tokens] = [(), *sorted({answer[:1] for answer in answers})]
    legal = acting([table], [start], 0)
    assert legal is not None
    states = []
    for path in paths:
        state = torch.tensor([[start]])
        for token in path:
            state = legal.step(state, torch.tensor([[token]]))
        states.append(int(state))
    logits = torch.randn(1, len(paths) + 1, V, generator=torch.Generator().manual_seed(1))
    nodes = nodes_of(torch.tensor([[*states, DEAD]]))
    room = CandidateCount(count, torch.tensor([[max(1, count - 1)]]), count) if own else CandidateCount(count)
    listed = top_candidates(logits, room, legal.of(nodes))
    mixed = acting([table], [start, FREE], 0)  # a row without a trie: nothing is listed
    assert mixed is not None
    assert mixed.of(nodes).listed(slice(0, 1)) is None
    masked = top_candidates(logits, room, mixed.of(nodes))
    raw = torch.log_softmax(logits, -1)
    for at, path in enumerate([*paths, None]):
        allowed = sorted(following(answers, path), key=lambda t, at=at: -raw[0, at, t]) if path is not None else []
        want = {token: float(raw[0, at, token]) for token in allowed[: count - own if count > 1 else 1]}
        for candidates in (listed, masked):
            pairs = zip(candidates.tokens[0, at].tolist(), candidates.logprobs[0, at].tolist(), strict=True)
            assert {t: p for t, p in pairs if p > NEG_INF} == pytest.approx(want, abs=1e-6)
    free = nodes_of(torch.full((1, len(paths) + 1), FREE))
    assert torch.allclose(top_candidates(logits, room, mixed.of(free)).logprobs, top_candidates(logits, room).logprobs)


def test_later_layers_are_listed_narrowly() -> None:
    """The root has many children, deeper nodes few: what is gathered follows."""
    answers = [(first, second, 0) for first in range(1, V) for second in range(1, 1 + first % 3)]
    table = TrieTable(V, torch.device("cpu"))
    start = table.add(trie_of(answers))
    widths = [legal.key[0][1] for at in range(4) if (legal := acting([table], [start], at)) is not None]  # type: ignore[index]
    assert widths == [8, 2, 1, 1]
