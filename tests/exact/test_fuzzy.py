"""The fuzzy rule's oracle against the rule as published, computed another way. Exact, no false alarms."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import pytest

from dsbd_cli.config.variants import DIVERGENCE
from tests.oracles.fuzzy import divergence, fuzzy_layer
from tests.oracles.rules import Chooser, enumerate_distribution, total_variation

from .cases import EXACT
from .forests import pool
from .trees import ROOT, Beam, Model, Path, child

P3, Q3 = Model(1, 3), Model(2, 3)
STEPS, DEPTH = 3, 2


def row(model: Model, path: Path) -> dict[int, float]:
    return {token: mass for (_, token), mass in model.pool({0: Beam(path, 0.0)}).distribution.items()}


def distance(path: Path) -> float:
    """KL(q || p) at one position."""
    p, q = row(P3, path), row(Q3, path)
    return sum(q[token] * math.log(q[token] / p[token]) for token in q)


def published(threshold: float) -> dict[Path, float]:
    """Distribution of the text: a position takes the draft's token where Div <= T; else, and as the bonus, one from
    p."""

    @cache
    def distribution(path: Path, drafted: int) -> dict[Path, float]:
        if len(path) == STEPS:
            return {path: 1.0}
        take = drafted < DEPTH and distance(path) <= threshold
        masses: dict[Path, float] = {}
        for token, mass in row(Q3 if take else P3, path).items():
            for text, chance in distribution((*path, token), drafted + 1 if take else 0).items():
                masses[text] = masses.get(text, 0.0) + mass * chance
        return masses

    return distribution((), 0)


def decode(threshold: float, chooser: Chooser) -> Path:
    """W=1, K=1 through the oracle; a layer is drafted when it is reached."""
    live, record = dict(ROOT), []
    while len(record) < STEPS:
        for layer in range(DEPTH + 1):
            (beam,) = live.values()
            distribution = P3.pool(live)
            nodes = pool(1)(Q3, live, 1, chooser)[0] if layer < DEPTH else []
            draft_distribution = dict(nodes[0].distribution or ()) if nodes else {}
            apart = distance(beam.path) if nodes else math.inf
            pairs = [node.pair for node in nodes]
            result = fuzzy_layer(
                distribution.distribution, draft_distribution, pairs, apart, threshold, "target", [0], (), 1, chooser
            )
            (draw,) = result.draws
            live = {0: child(live, distribution, draw.pair)}
            record.append(draw.pair[1])
            if not result.passed or len(record) == STEPS:
                break
    return tuple(record)


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 100.0])
def test_one_beam_is_the_published_rule(threshold: float) -> None:
    distribution = enumerate_distribution(lambda chooser: decode(threshold, chooser))
    assert total_variation(distribution, published(threshold)) < EXACT


def test_the_thresholds_above_say_different_things() -> None:
    distributions = [published(threshold) for threshold in (0.0, 0.2, 0.5, 100.0)]
    assert all(total_variation(a, b) > 1e-3 for a, b in pairwise(distributions))


def test_zero_is_the_target_and_without_bound_the_draft() -> None:
    def text_distribution(model: Model) -> dict[Path, float]:
        distribution: dict[Path, float] = {(): 1.0}
        for _ in range(DEPTH):
            distribution = {(*path, t): m * c for path, m in distribution.items() for t, c in row(model, path).items()}
        return distribution

    def prefix(threshold: float) -> dict[Path, float]:
        masses: dict[Path, float] = {}
        for path, mass in published(threshold).items():
            masses[path[:DEPTH]] = masses.get(path[:DEPTH], 0.0) + mass
        return masses

    assert total_variation(prefix(0.0), text_distribution(P3)) < EXACT
    assert total_variation(prefix(100.0), text_distribution(Q3)) < EXACT


@pytest.mark.parametrize("name", DIVERGENCE.choices)
def test_divergences_by_hand(name: str) -> None:
    p, q = {(0, 0): 0.5, (0, 1): 0.5}, {(0, 0): 0.9, (0, 1): 0.1}
    m = (0.7, 0.3)
    expected = {
        "kl": 0.9 * math.log(1.8) + 0.1 * math.log(0.2),
        "kl_reversed": 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5),
        "tv": 0.4,
        "js": 0.5
        * (
            0.5 * math.log(0.5 / 0.7)
            + 0.5 * math.log(0.5 / 0.3)
            + 0.9 * math.log(0.9 / 0.7)
            + 0.1 * math.log(0.1 / 0.3)
        ),
        "js_authors": 0.5
        * (m[0] * math.log(m[0] / 0.9) + m[1] * math.log(m[1] / 0.1) + m[0] * math.log(1.4) + m[1] * math.log(0.6)),
    }
    assert divergence(p, q, name) == pytest.approx(expected[name], abs=EXACT)
    assert divergence(p, p, name) == 0.0
    apart = divergence({(0, 0): 1.0}, {(0, 1): 1.0}, name)
    assert apart == pytest.approx({"js": math.log(2), "tv": 1.0}.get(name, math.inf))


def test_beams_take_the_first_drafts_with_live_parents() -> None:
    target = {(0, 0): 0.4, (0, 1): 0.2, (2, 1): 0.3, (2, 0): 0.1}
    drafts = [(1, 0), (2, 2), (0, 1), (2, 1)]

    def records(distance: float, fallback: str) -> set[tuple[object, ...]]:
        def run(chooser: Chooser) -> tuple[object, ...]:
            draft_distribution = dict.fromkeys(drafts, 0.25)
            result = fuzzy_layer(target, draft_distribution, drafts, distance, 0.3, fallback, [0, 2], {0}, 2, chooser)
            return result.passed, tuple((draw.pair, draw.source) for draw in result.live)

        return set(enumerate_distribution(run))

    assert records(0.3, "target") == {(True, (((2, 2), 1), ((0, 1), 2)))}  # (2, 2) is outside the target's support
    assert all(not passed for passed, _ in records(0.31, "target"))
    assert {passed for passed, _ in records(0.31, "strict")} == {True}  # all of the support that lives on is drafted
