"""Deterministic beam search: the rank rule, and speculation that changes nothing but the number of target calls."""

from __future__ import annotations

import random

from tests.oracles.rules import search_layer

from .trees import ROOT, Beam, Model, child


def test_an_ending_pair_finishes_only_among_the_best_w() -> None:
    scores = {(0, 1): -1.0, (0, 0): -2.0, (1, 2): -3.0, (1, 0): -4.0, (1, 1): -5.0}
    result = search_layer(scores, [], {0}, 2)
    assert [draw.pair for draw in result.live] == [(0, 1), (1, 2)]
    assert [draw.pair for draw in result.finished] == [(0, 0)]  # rank 1 < 2; (1, 0) has rank 3
    draft_backlog = search_layer({(0, 1): -1.0, (0, 2): -2.0, (0, 0): -2.5, (0, 3): -3.0}, [], {0}, 2)
    assert not draft_backlog.finished
    third = search_layer({(0, 1): -1.0, (0, 0): -2.0, (1, 0): -2.5, (0, 3): -3.0}, [], {0}, 2)
    assert [draw.pair for draw in third.finished] == [(0, 0)]
    assert third.pairs == ((0, 1), (0, 0), (0, 3))


def test_passes_only_if_all_live_ones_are_drafted() -> None:
    scores = {(0, 1): -1.0, (0, 0): -2.0, (1, 2): -3.0}
    assert search_layer(scores, [(1, 2), (0, 1)], {0}, 2).passed
    assert not search_layer(scores, [(0, 0), (0, 1)], {0}, 2).passed
    assert [draw.source for draw in search_layer(scores, [(1, 2), (0, 1)], {0}, 2).draws] == [1, None, 0]


def plain_search(model: Model, width: int, steps: int, ends: frozenset[int]) -> list[list[Beam]]:
    live, record = ROOT, []
    for _ in range(steps):
        pool = model.pool(live)
        best = sorted(pool.weights.items(), key=lambda item: item[1], reverse=True)
        beams = [child(live, pool, pair) for pair, _ in best if pair[1] not in ends][:width]
        ended = [child(live, pool, pair) for pair, _ in best[:width] if pair[1] in ends]
        record.append(beams + ended)
        live = dict(enumerate(beams))
    return record


def speculative_search(
    target: Model, draft: Model, width: int, drafts: int, depth: int, ends: frozenset[int]
) -> tuple[list[list[Beam]], int]:
    """Beams of three steps and how many layers passed."""
    live, record, passed = ROOT, [], 0
    while len(record) < 3:
        nodes = live
        for layer in range(depth + 1):
            pool, drafted = target.pool(live), draft.pool(nodes)
            ranked = sorted(drafted.weights, key=lambda pair: drafted.weights[pair], reverse=True)
            pairs = ranked[:drafts] if layer < depth else []
            result = search_layer(pool.weights, pairs, ends, width)
            record.append([child(live, pool, draw.pair) for draw in (*result.live, *result.finished)])
            keys = [draw.source if result.passed else number for number, draw in enumerate(result.live)]
            live = {key: beam for key, beam in zip(keys, record[-1], strict=False) if key is not None}
            passed += result.passed
            if not result.passed or len(record) == 3:
                break
            children = {number: child(nodes, drafted, pair) for number, pair in enumerate(pairs)}
            nodes = {number: beam for number, beam in children.items() if beam.path[-1] not in ends}
        live = dict(enumerate(live.values()))
    return record, passed


def test_speculative_search_finds_the_same_beams() -> None:
    rng, passed = random.Random(0), 0
    for case in range(300):
        target, other = Model(rng.randrange(10**6), 5), Model(rng.randrange(10**6), 5)
        width, drafts, depth = rng.randint(1, 3), rng.randint(1, 8), rng.randint(0, 2)
        ends = frozenset(rng.sample(range(5), rng.randint(0, 2)))
        draft = target if case % 3 == 0 else other
        record, layers = speculative_search(target, draft, width, drafts, depth, ends)
        assert record == plain_search(target, width, 3, ends)
        passed += layers
    assert passed > 100  # the fast path was taken
