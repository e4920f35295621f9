"""Two steps of speculative decoding have exactly the distribution of two steps of plain beam sampling, every branch
enumerated.

Guards what one layer cannot show: drafts below rejected nodes, stops in the middle of a forest, redrafting, the bonus
layer, weights carried from step to step, and widths that depend on what was drafted. No randomness, so no false alarms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest

from tests.oracles.rules import WithReplacementRule, enumerate_distribution, total_variation
from tests.oracles.width import expected_width

from .cases import EXACT
from .test_one_layer import width_error
from .trees import ROOT, Beam, Forest, Model, Setting, Step, plain_steps, speculative_steps

P3, Q3 = Model(1, 3), Model(2, 3)
ENDS = frozenset({0})

FIXED = {
    "D=2 K=2 W=2": Setting(P3, Q3, 2, 2, 2),
    "D=2 K=3 W=2": Setting(P3, Q3, 2, 3, 2),
    "D=1 K=3 W=2: the bonus layer": Setting(P3, Q3, 2, 3, 1),
    "D=2 K=2 W=1, drafted ahead": Setting(P3, Q3, 1, 2, 2, eager=True),
    "D=0": Setting(P3, Q3, 2, 1, 0),
    "D=2 K=3 W=2, end token": Setting(P3, Q3, 2, 3, 2, ENDS),
    "D=2 K=2 W=2 V=4, zeros": Setting(Model(3, 4, zeros=2), Model(4, 4, zeros=1), 2, 2, 2),
    "D=2 K=2 W=1 multi-draft": Setting(Model(5, 4), Model(6, 4), 1, 2, 2),
    "D=2 K=2 W=2, p = q": Setting(P3, P3, 2, 2, 2),
    "D=2 K=4 W=3, top-k": Setting(Model(1, 4, warp={"top_k": 4}), Model(9, 4, warp={"top_k": 4}), 3, 4, 2),
    "D=2 K=2 W=2, temperature, top-k": Setting(
        Model(7, 5, warp={"temperature": 0.7, "top_k": 3}), Model(8, 5, warp={"top_k": 3}), 2, 2, 2
    ),
    "D=2 K=2 W=2, per beam": Setting(
        Model(7, 4, warp={"scope": "beam", "top_k": 2}), Model(8, 4, warp={"scope": "beam", "top_p": 0.7}), 2, 2, 2
    ),
    "with replacement D=2 K=2 W=2": Setting(P3, Q3, 2, 2, 2, rule=WithReplacementRule()),
    "with replacement D=2 K=2 W=1, end token": Setting(P3, Q3, 1, 2, 2, ENDS, WithReplacementRule(), limit=2),
}

THREE_STEPS = {
    "D=2 K=2 W=1": Setting(P3, Q3, 1, 2, 2),
    "D=2 K=2 W=2, top-k": Setting(Model(1, 3, warp={"top_k": 3}), Model(2, 3, warp={"top_k": 3}), 2, 2, 2),
}


def drawn(steps: tuple[Step, ...]) -> tuple[tuple[Beam, ...], ...]:
    """Ordered draws of every step with their weights; stronger than the ordered live beams and the finished set."""
    return tuple(step.drawn for step in steps)


def distribution_error(setting: Setting, steps: int) -> float:
    distribution = enumerate_distribution(lambda chooser: drawn(speculative_steps(setting, steps, chooser)))
    return total_variation(
        distribution, enumerate_distribution(lambda chooser: drawn(plain_steps(setting, steps, chooser)))
    )


@pytest.mark.parametrize("name", FIXED)
def test_two_steps_have_the_distribution_of_plain_beam_sampling(name: str) -> None:
    assert distribution_error(FIXED[name], 2) < EXACT


@pytest.mark.parametrize("name", THREE_STEPS)
def test_three_steps_reach_the_bonus_layer(name: str) -> None:
    assert distribution_error(THREE_STEPS[name], 3) < EXACT


def confidence(forest: Forest, layer: int) -> float:
    """The mass of the W likeliest pairs of what a layer is drawn from."""
    return sum(sorted(forest.layer(layer)[0].values())[-forest.setting.full_width :])


def mass_of_drafts(forest: Forest, layer: int) -> float:
    distribution, drafts = forest.layer(layer)
    return sum(map(distribution.__getitem__, drafts))


GATES = {
    "by what the layer is drawn from": lambda forest, layer: confidence(forest, layer) > 0.5,
    "by what was drawn above": lambda forest, layer: layer == 0 or (0, 0) in forest.layer(layer - 1)[1],
}
WRONG_GATES = {
    "by the layer's own draws": lambda forest, layer: mass_of_drafts(forest, layer) > 0.5,
    "by what is drawn below": lambda forest, layer: layer == 1 or confidence(forest, 1) > 0.5,
}
GATED = {
    "D=2 K=1 W=1": Setting(P3, Q3, 1, 1, 2),
    "D=2 K=2 W=1": Setting(P3, Q3, 1, 2, 2),
    "D=2 K=2 W=2": FIXED["D=2 K=2 W=2"],
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", GATED)
def test_a_layer_may_be_kept_from_the_target_by_what_was_known_before_its_draws(name: str, gate: str) -> None:
    said = set[bool]()

    def watched(forest: Forest, layer: int) -> bool:
        said.add(GATES[gate](forest, layer))
        return GATES[gate](forest, layer)

    assert distribution_error(replace(GATED[name], gate=watched), 2) < EXACT
    assert said == {False, True}


@pytest.mark.parametrize("gate", WRONG_GATES)
def test_a_gate_that_looks_at_the_draws_is_found(gate: str) -> None:
    assert distribution_error(replace(GATED["D=2 K=1 W=1"], gate=WRONG_GATES[gate]), 2) > 1e-3


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ends", [frozenset(), ENDS], ids=["no end", "end token"])
@pytest.mark.parametrize("policy", ["w=1", "threshold"])
def test_dynamic_width_is_exact_given_the_widths(policy: str, ends: frozenset[int], depth: int) -> None:
    """Given the beams and the w of a layer, its draws have the distribution of plain ones, up to the w-th live one and
    beyond.

    In the second layer w depends on the drafted nodes, so this also checks that choosing w from P and Q biases nothing.
    """
    widths = {"w=1": lambda p, q: 1, "threshold": lambda p, q: expected_width(p, q, 2, 0.4, 1, 2)}
    setting = Setting(P3, Q3, 2, 2, depth, ends, policy=widths[policy])
    records = enumerate_distribution(lambda chooser: speculative_steps(setting, 2, chooser))
    groups: defaultdict[tuple[Step, int], dict[Step, float]] = defaultdict(dict)
    firsts: defaultdict[Step, float] = defaultdict(float)
    for (first, second), mass in records.items():
        groups[first, second.width][second] = mass
        firsts[first] += mass
    error = given_width_error(setting, tuple(ROOT.values()), firsts)
    for (first, _), distribution in groups.items():
        live = tuple(beam for beam in first.drawn if beam.path[-1] not in ends)
        error += given_width_error(setting, live, distribution)
    assert error < EXACT
    if policy == "threshold" and depth == 2 and not ends:
        assert {width for (first, width) in groups if first.passed} == {1, 2}  # it does adapt


def given_width_error(setting: Setting, live: tuple[Beam, ...], distribution: dict[Step, float]) -> float:
    """Error of the distribution of one step after these live beams; all its outcomes have the same width."""
    number = {beam.path: index for index, beam in enumerate(live)}
    total = math.fsum(distribution.values())
    records = {
        (tuple((number[beam.path[:-1]], beam.path[-1]) for beam in step.drawn), step.passed): mass / total
        for step, mass in distribution.items()
    }
    (width,) = {step.width for step in distribution}
    target = setting.target.pool(dict(enumerate(live))).distribution
    return total * width_error(records, target, setting.ends, width, setting.full_width)
