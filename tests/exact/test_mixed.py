"""Rule `rejection` over every kind of node, every branch enumerated: drawn from the pool, drawn per parent (RSD,
DySpec), deterministic, and both in one layer. Two or three steps have exactly the distribution of plain beam sampling.

Guards: a distribution recorded in the wrong scope, nodes out of draw order, a deterministic node tested as if it were
drawn. No randomness, so no false alarms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.oracles.choice import without
from tests.oracles.mixed import MixedRule, Node, pool_nodes
from tests.oracles.rules import Chooser, Distribution, enumerate_distribution, total_variation

from .cases import EXACT
from .forests import (
    DraftSetting,
    Propose,
    Record,
    best,
    by_value,
    constant,
    decode,
    dynamic,
    mixed,
    plain,
    pool,
    stochastic,
)
from .test_mutants import VISIBLE
from .trees import Beam, Model

P3, Q3 = Model(1, 3), Model(2, 3)
CUT = Model(3, 3, warp={"temperature": 0.7, "top_k": 2})
TWO = {0: Beam((0,), -0.3), 1: Beam((1, 2), -1.9)}
END = frozenset({0})


def measure(setting: DraftSetting) -> tuple[float, float]:
    """Total variation from plain beam sampling, and the mean number of layers that passed."""
    distribution: dict[Record, float] = {}
    passed = 0.0
    for (record, layers), mass in enumerate_distribution(lambda chooser: decode(setting, chooser)).items():
        distribution[record] = distribution.get(record, 0.0) + mass
        passed += layers * mass
    return total_variation(distribution, enumerate_distribution(lambda chooser: plain(setting, chooser))), passed


DRAFTERS: dict[str, Propose] = {
    "pool": pool(2),
    "rsd-c": constant(2),
    "rsd-s": stochastic(2),
    "dynamic-tree": by_value(3),
    "deterministic": best(3),
    "mixed, duplicates dropped": mixed(2, 2),
    "mixed, duplicates kept": mixed(1, 2, drop=False),
    "deterministic first": mixed(1, 2, last=False),
}
SETTINGS: dict[str, Callable[[Propose], DraftSetting]] = {
    "W=1": lambda propose: DraftSetting(P3, Q3, 1, 2, propose),
    "W=2": lambda propose: DraftSetting(P3, Q3, 2, 2, propose),
    "W=2, end token": lambda propose: DraftSetting(P3, Q3, 2, 1, propose, steps=1, ends=END),
    "W=2, warped": lambda propose: DraftSetting(CUT, Q3, 2, 2, propose),
    "W=2, two roots": lambda propose: DraftSetting(P3, Q3, 2, 1, propose, steps=1, start=TWO),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_have_the_distribution_of_plain_beam_sampling(drafter: str, name: str) -> None:
    error, passed = measure(SETTINGS[name](DRAFTERS[drafter]))
    assert error < EXACT
    assert passed > 0.05  # the drafts are really used


@pytest.mark.parametrize("propose", [constant(1), stochastic(1), dynamic(4), mixed(1, 1)])
def test_three_steps_of_one_beam(propose: Propose) -> None:
    assert measure(DraftSetting(P3, Q3, 1, 3, propose, steps=3))[0] < EXACT


@pytest.mark.parametrize("seed", range(6))
def test_one_heap_over_all_layers_is_exact_for_one_beam_only(seed: int) -> None:
    """DySpec as published. Whether a node has a second child depends on what was drawn below the first one. With one
    beam the second child is looked at only where the first is dead; with two both are, and then the draws below have
    another distribution."""
    setting = DraftSetting(Model(seed, 3), Model(100 + seed, 3), 1, 2, dynamic(4))
    assert measure(setting)[0] < EXACT
    if seed == 4:
        assert measure(replace(setting, full_width=2))[0] > VISIBLE


def test_stochastic_beam_search_needs_the_order_of_its_values() -> None:
    """That a node was kept says something about the tokens of nodes with larger values: one parent after another is not
    the order of the draws. With one live parent it does not matter."""
    target = Model(2, 3, warp={"top_k": 3})
    right, wrong = stochastic(3), stochastic(3, "parent")
    assert measure(DraftSetting(target, Q3, 2, 2, right))[0] < EXACT
    assert measure(DraftSetting(target, Q3, 2, 2, wrong))[0] > VISIBLE
    assert measure(DraftSetting(target, Q3, 1, 2, wrong))[0] < EXACT


def ranked_as_drawn(count: int) -> Propose:
    """The likeliest pairs, recorded as if they were drawn."""

    def propose(model: Model, beams: dict[int, Beam], depth: int, chooser: Chooser) -> list[list[Node]]:
        (nodes,) = best(count)(model, beams, 1, chooser)
        return [pool_nodes(model.pool(beams).distribution, [node.pair for node in nodes])]

    return propose


class QWithoutDeterministic(MixedRule):
    """Q' loses the deterministic nodes that stand before a sampled one."""

    def distribution_of(self, node: Node, before: Sequence[Node]) -> Distribution | None:
        distribution = super().distribution_of(node, before)
        for other in before:
            distribution = (
                without(distribution, other.pair) if distribution and other.distribution is None else distribution
            )
        return distribution


class QNotUpdated(MixedRule):
    """Every node is tested against the distribution of the first one."""

    def distribution_of(self, node: Node, before: Sequence[Node]) -> Distribution | None:
        return super().distribution_of(next((item for item in before if item.distribution is not None), node), ())


class OtherRow(MixedRule):
    """A node drawn below one parent also takes mass from the others."""

    def distribution_of(self, node: Node, before: Sequence[Node]) -> Distribution | None:
        distribution = super().distribution_of(node, before)
        return distribution and {
            **{(1 - pair[0], pair[1]): mass for pair, mass in distribution.items()},
            **distribution,
        }


MUTANTS = {
    "deterministic tested as sampled": DraftSetting(P3, Q3, 2, 1, ranked_as_drawn(2), steps=1),
    "Q' without deterministic nodes": DraftSetting(
        P3, Q3, 2, 1, mixed(2, 1, drop=False, last=False), steps=1, rule=QWithoutDeterministic()
    ),
    "Q' not updated": DraftSetting(P3, Q3, 2, 1, pool(2), steps=1, rule=QNotUpdated()),
    "Q' not updated, per parent": DraftSetting(P3, Q3, 2, 1, constant(2), steps=1, rule=QNotUpdated(), start=TWO),
    "parent distribution takes from other rows": DraftSetting(
        P3, Q3, 2, 1, constant(1), steps=1, rule=OtherRow(), start=TWO
    ),
    "parent distribution recorded as pool distribution": DraftSetting(P3, Q3, 2, 2, stochastic(2, nodes_of=pool_nodes)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    assert measure(MUTANTS[name])[0] > VISIBLE


class NothingTested(MixedRule):
    """All nodes as if they were deterministic."""

    def distribution_of(self, node: Node, before: Sequence[Node]) -> Distribution | None:
        return None


@pytest.mark.parametrize("width", [1, 2])
def test_a_sampled_node_taken_for_a_deterministic_one_costs_passes_but_no_distribution(width: int) -> None:
    """The other mix-up cannot bias: the target's draws never look at the nodes. It only wastes what Q says."""
    tested = DraftSetting(P3, Q3, width, 1, pool(2), steps=1)
    error, passed = measure(replace(tested, rule=NothingTested()))
    assert error < EXACT
    assert passed < measure(tested)[1] - 0.03


def test_point_mass_acceptance_is_the_probability_of_the_node() -> None:
    """W=1: one node v passes with probability P(v), a set of nodes with its mass, in any order."""
    distribution = P3.pool({0: Beam((), 0.0)}).distribution
    for count in (1, 2):
        nodes = sorted(distribution, key=lambda pair: -Q3.pool({0: Beam((), 0.0)}).distribution[pair])[:count]
        passed = measure(DraftSetting(P3, Q3, 1, 1, best(count), steps=1))[1]
        assert passed == pytest.approx(sum(distribution[pair] for pair in nodes), abs=EXACT)
