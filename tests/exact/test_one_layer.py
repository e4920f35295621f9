"""One layer of draft and verification has exactly the distribution of plain beam sampling: every branch is enumerated.

Guards: any error in acceptance, residual, sibling removal, completion or early stop. No randomness, so no false alarms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

import pytest

from tests.oracles.rules import (
    Chooser,
    Distribution,
    LayerResult,
    Pair,
    RejectionRule,
    WithReplacementRule,
    beam_step,
    draft_layer,
    enumerate_distribution,
    total_variation,
    verify_layer_rejection,
    verify_layer_with_replacement,
    without,
)

from .cases import (
    EXACT,
    LayerCase,
    case_id,
    narrow_cases,
    random_case,
    with_replacement_cases,
    without_replacement_cases,
)


def run_layer(case: LayerCase, rule: RejectionRule, chooser: Chooser) -> LayerResult:
    drafts = draft_layer(case.draft, case.drafts, chooser, rule.replacement)
    return rule.verify(case.target, case.draft, drafts, case.ends, case.width, case.full_width, chooser, case.limit)


@pytest.mark.parametrize("case", without_replacement_cases(), ids=case_id)
def test_rejection_draws_have_the_sequential_distribution(case: LayerCase) -> None:
    distribution = enumerate_distribution(lambda chooser: run_layer(case, RejectionRule(), chooser).pairs)
    plain = enumerate_distribution(lambda chooser: beam_step(case.target, case.ends, case.full_width, chooser))
    assert total_variation(distribution, plain) < EXACT


@pytest.mark.parametrize("block", range(4))
def test_rejection_is_exact_on_random_layers(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        case = random_case(seed)
        distribution = enumerate_distribution(
            lambda chooser, case=case: run_layer(case, RejectionRule(), chooser).pairs
        )
        plain = enumerate_distribution(
            lambda chooser, case=case: beam_step(case.target, case.ends, case.full_width, chooser)
        )
        assert total_variation(distribution, plain) < EXACT, case


@pytest.mark.parametrize("case", with_replacement_cases(), ids=case_id)
def test_with_replacement_draws_are_independent(case: LayerCase) -> None:
    distribution = enumerate_distribution(lambda chooser: run_layer(case, WithReplacementRule(), chooser).pairs)
    plain = enumerate_distribution(
        lambda chooser: beam_step(case.target, case.ends, case.full_width, chooser, replacement=True, limit=case.limit)
    )
    assert total_variation(distribution, plain) < EXACT


def width_error(
    records: dict[tuple[tuple[Pair, ...], bool], float],
    target: Distribution,
    ends: Collection[int],
    width: int,
    full_width: int,
) -> float:
    """Distance from "exact given the width" of a distribution over (draws, passed).

    Two parts: the draws up to the `width`-th live one have the distribution of a step of that width; and after each
    such prefix, given that the layer stopped, the further draws have the distribution of going on. The stop must bias
    neither.
    """
    prefixes: defaultdict[tuple[Pair, ...], float] = defaultdict(float)
    stopped: defaultdict[tuple[Pair, ...], dict[tuple[Pair, ...], float]] = defaultdict(dict)
    for (pairs, passed), mass in records.items():
        cut = _live_cut(pairs, ends, width)
        prefixes[pairs[:cut]] += mass
        if not passed:
            stopped[pairs[:cut]][pairs[cut:]] = mass
    error = total_variation(prefixes, enumerate_distribution(lambda chooser: beam_step(target, ends, width, chooser)))
    for prefix, rests in stopped.items():
        rest_distribution, live = target, sum(token not in ends for _, token in prefix)
        for pair in prefix:
            rest_distribution = without(rest_distribution, pair)
        plain = enumerate_distribution(_going_on(rest_distribution, ends, full_width - live))
        mass = sum(rests.values())
        error += total_variation(rests, {rest: mass * chance for rest, chance in plain.items()})
    return error


def _going_on(distribution: Distribution, ends: Collection[int], width: int) -> Callable[[Chooser], tuple[Pair, ...]]:
    return lambda chooser: beam_step(distribution, ends, width, chooser)


def _live_cut(pairs: tuple[Pair, ...], ends: Collection[int], width: int) -> int:
    """Number of draws up to and including the width-th live one."""
    live = 0
    for number, (_, token) in enumerate(pairs):
        live += token not in ends
        if live == width:
            return number + 1
    return len(pairs)


@pytest.mark.parametrize("case", narrow_cases(), ids=case_id)
def test_narrow_layer_is_exact_given_its_width(case: LayerCase) -> None:
    def record(chooser: Chooser) -> tuple[tuple[Pair, ...], bool]:
        result = run_layer(case, RejectionRule(), chooser)
        assert len(result.live) <= (case.width if result.passed else case.full_width)
        return result.pairs, result.passed

    assert width_error(enumerate_distribution(record), case.target, case.ends, case.width, case.full_width) < EXACT


def test_sources_say_which_draft_was_drawn() -> None:
    case = next(case for case in without_replacement_cases() if case.name == "two beams, weights")

    def record(chooser: Chooser) -> int:
        drafts = draft_layer(case.draft, case.drafts, chooser)
        result = verify_layer_rejection(
            case.target, case.draft, drafts, case.ends, case.width, case.full_width, chooser
        )
        assert all(draw.source is None or drafts[draw.source] == draw.pair for draw in result.draws)
        assert result.passed == (sum(draw.source is not None for draw in result.live) == case.width)
        return sum(draw.source is not None for draw in result.draws)

    accepted = sum(count * chance for count, chance in enumerate_distribution(record).items())
    assert 0.5 < accepted < case.width  # the drafts are really used


def test_identical_models_always_pass_with_enough_drafts() -> None:
    """p == q must work: residuals are empty, no division by zero, every draft accepted."""
    case = next(case for case in without_replacement_cases() if case.name == "p = q")
    passed = enumerate_distribution(lambda chooser: run_layer(case, RejectionRule(), chooser).passed)
    assert passed.get(False, 0.0) < EXACT


def test_replacement_without_limit_needs_a_live_pair() -> None:
    distribution = {(0, 0): 1.0}
    with pytest.raises(ValueError, match="no live pair"):
        enumerate_distribution(lambda chooser: beam_step(distribution, {0}, 1, chooser, replacement=True))
    with pytest.raises(ValueError, match="no live pair"):
        enumerate_distribution(
            lambda chooser: verify_layer_with_replacement(distribution, distribution, (), {0}, 1, 1, chooser)
        )
