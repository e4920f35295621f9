"""Known ways to get the rule wrong, each of which the exact-law comparison must catch by a margin.

Guards the tests themselves: a comparison that passes for a wrong rule proves nothing about the right one. Each mutant
must be off by a total variation above 1e-3 on some case, where the right rule is within 1e-12 on all of them. Exact
numbers, so no false alarms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.oracles.rules import (
    Chooser,
    Distribution,
    Pair,
    RejectionRule,
    WithReplacementRule,
    beam_step,
    draft_layer,
    enumerate_distribution,
    normalise,
    total_variation,
    without,
)

from .cases import EXACT, LayerCase, with_replacement_cases, without_replacement_cases

VISIBLE = 1e-3


class AlwaysAccept(RejectionRule):
    def accept_probability(self, residual: Distribution, draft_distribution: Distribution, draft: Pair) -> float:
        return 1.0


class WrongQ(RejectionRule):
    """Tests against a uniform distribution, not the one the drafts were drawn from."""

    def first_draft_distribution(self, target: Distribution, draft_distribution: Distribution) -> Distribution:
        return normalise(dict.fromkeys(draft_distribution, 1.0))


class UnnormalisedResidual(RejectionRule):
    def after_rejection(
        self, target: Distribution, residual: Distribution, draft_distribution: Distribution
    ) -> Distribution:
        rest = {pair: max(0.0, mass - draft_distribution.get(pair, 0.0)) for pair, mass in residual.items()}
        return rest if sum(rest.values()) > 0.0 else target


class NoResidual(RejectionRule):
    """P' = P after a rejection."""

    def after_rejection(
        self, target: Distribution, residual: Distribution, draft_distribution: Distribution
    ) -> Distribution:
        return target


class SiblingNotRemoved(RejectionRule):
    """The authors' code: drafts without replacement, tested by the rule for i.i.d. drafts."""

    def next_draft_distribution(self, draft_distribution: Distribution, draft: Pair) -> Distribution:
        return draft_distribution


class OnlyLiveParents(RejectionRule):
    """Q' restricted to the live parents and renormalised."""

    def first_draft_distribution(self, target: Distribution, draft_distribution: Distribution) -> Distribution:
        parents = {beam for beam, _ in target}
        return normalise({pair: mass for pair, mass in draft_distribution.items() if pair[0] in parents})


class CompletionFromDraft(RejectionRule):
    """The missing draw comes from what is left of q."""

    def first_missing_distribution(
        self, target: Distribution, residual: Distribution, draft_distribution: Distribution
    ) -> Distribution:
        return draft_distribution or target


class CompletionFromTarget(RejectionRule):
    """The first missing draw comes from P, not from P'."""

    def first_missing_distribution(
        self, target: Distribution, residual: Distribution, draft_distribution: Distribution
    ) -> Distribution:
        return target


class AcceptedNotTaken(RejectionRule):
    """P keeps what is drawn, so duplicates appear."""

    def take(self, target: Distribution, pair: Pair) -> Distribution:
        return target


class ResidualKeptAfterAcceptance(RejectionRule):
    """After an acceptance P' is the old P' without the draft, not P without what is taken."""

    def __init__(self) -> None:
        self.residual: Distribution = {}

    def accept_probability(self, residual: Distribution, draft_distribution: Distribution, draft: Pair) -> float:
        self.residual = residual
        return super().accept_probability(residual, draft_distribution, draft)

    def take(self, target: Distribution, pair: Pair) -> Distribution:
        return without(self.residual, pair) or without(target, pair)


class RejectedSiblingStays(RejectionRule):
    """Q' loses only accepted drafts: a rejected one stays in it."""

    def next_draft_distribution(self, draft_distribution: Distribution, draft: Pair) -> Distribution:
        return without(draft_distribution, draft) if self.accepted == draft else draft_distribution

    accepted: Pair | None = None

    def take(self, target: Distribution, pair: Pair) -> Distribution:
        self.accepted = pair
        return super().take(target, pair)


@dataclass
class ReusedUniform:
    """One uniform number for all tests of a layer: each test narrows the interval that it lies in."""

    inner: Chooser
    low: float = 0.0
    high: float = 1.0

    def accept(self, probability: float, index: int) -> bool:
        cut = min(max(probability, self.low), self.high)
        accepted = self.inner.accept((cut - self.low) / (self.high - self.low), index)
        self.low, self.high = (self.low, cut) if accepted else (cut, self.high)
        return accepted

    def draw(self, distribution: Distribution, stream: str) -> Pair:
        return self.inner.draw(distribution, stream)


def most_probable(
    distribution: Distribution, count: int, chooser: Chooser, replacement: bool = False
) -> tuple[Pair, ...]:
    """Nodes chosen by rank: nothing was drawn from Q, so ordinary rejection does not apply to them."""
    return tuple(sorted(normalise(distribution), key=lambda pair: distribution[pair], reverse=True)[:count])


@dataclass(frozen=True)
class Mutant:
    """`finite`: draws end although end tokens do not count as live."""

    rule: Callable[[], RejectionRule] = RejectionRule
    draft: Callable[[Distribution, int, Chooser, bool], tuple[Pair, ...]] = draft_layer
    wrap: Callable[[Chooser], Chooser] = lambda chooser: chooser
    finite: bool = True

    def pairs(self, case: LayerCase, chooser: Chooser) -> tuple[Pair, ...]:
        rule, chooser = self.rule(), self.wrap(chooser)
        drafts = self.draft(case.draft, case.drafts, chooser, rule.replacement)
        return rule.verify(
            case.target, case.draft, drafts, case.ends, case.width, case.full_width, chooser, case.limit
        ).pairs


class RepeatedSubtraction(WithReplacementRule):
    """The with-replacement rule with siblings removed from Q', though they can be drawn again."""

    def next_draft_distribution(self, draft_distribution: Distribution, draft: Pair) -> Distribution:
        return without(draft_distribution, draft)


class NoDuplicates(WithReplacementRule):
    def take(self, target: Distribution, pair: Pair) -> Distribution:
        return without(target, pair)


MUTANTS = {
    "always accept": Mutant(AlwaysAccept),
    "wrong Q": Mutant(WrongQ),
    "unnormalised residual": Mutant(UnnormalisedResidual),
    "no residual": Mutant(NoResidual),
    "sibling not removed": Mutant(SiblingNotRemoved),
    "rejected sibling stays": Mutant(RejectedSiblingStays),
    "Q restricted to live parents": Mutant(OnlyLiveParents),
    "completion from q": Mutant(CompletionFromDraft),
    "completion from P": Mutant(CompletionFromTarget),
    "accepted not taken": Mutant(AcceptedNotTaken, finite=False),
    "residual kept after acceptance": Mutant(ResidualKeptAfterAcceptance, finite=False),
    "reused uniform": Mutant(wrap=ReusedUniform),
    "deterministic nodes": Mutant(draft=most_probable),
}
REPLACEMENT_MUTANTS = {
    "siblings removed": Mutant(RepeatedSubtraction),
    "no duplicates": Mutant(NoDuplicates),
    "reused uniform": Mutant(WithReplacementRule, wrap=ReusedUniform),
}


def errors(mutant: Mutant, cases: list[LayerCase]) -> dict[str, float]:
    replacement = mutant.rule().replacement
    distances = {}
    for case in (case for case in cases if mutant.finite or not case.ends):
        distribution = enumerate_distribution(lambda chooser, case=case: mutant.pairs(case, chooser))
        plain = enumerate_distribution(
            lambda chooser, case=case: beam_step(
                case.target, case.ends, case.full_width, chooser, replacement, case.limit
            )
        )
        distances[case.name] = total_variation(distribution, plain)
    return distances


def test_the_right_rules_are_exact_on_the_same_cases() -> None:
    assert max(errors(Mutant(), without_replacement_cases()).values()) < EXACT
    assert max(errors(Mutant(WithReplacementRule), with_replacement_cases()).values()) < EXACT


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    assert max(errors(MUTANTS[name], without_replacement_cases()).values()) > VISIBLE


@pytest.mark.parametrize("name", REPLACEMENT_MUTANTS)
def test_replacement_mutant_is_caught(name: str) -> None:
    assert max(errors(REPLACEMENT_MUTANTS[name], with_replacement_cases()).values()) > VISIBLE


def test_dead_parents_matter_only_where_there_are_some() -> None:
    """Restricting Q' to live parents is wrong exactly where drafts have dead parents beside live ones."""
    distances = errors(MUTANTS["Q restricted to live parents"], without_replacement_cases())
    wrong = {name for name, error in distances.items() if error > VISIBLE}
    assert wrong == {"dead parent in the draft", "one of three parents live"}
