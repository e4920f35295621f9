"""The width recursion against enumeration of what it predicts. Exact, no false alarms."""

from __future__ import annotations

import pytest

from tests.oracles.rules import Chooser, WithReplacementRule, draft_layer, enumerate_distribution
from tests.oracles.width import acceptance_counts, expected_width

from .cases import EXACT, LayerCase, case_id, with_replacement_cases


@pytest.mark.parametrize("case", with_replacement_cases(), ids=case_id)
@pytest.mark.parametrize("drafts", [1, 3])
def test_counts_equal_enumeration_for_independent_drafts(case: LayerCase, drafts: int) -> None:
    """Guards, among others, subtracting Q twice per rejection."""

    def accepted(chooser: Chooser) -> int:
        nodes = draft_layer(case.draft, drafts, chooser, replacement=True)
        # every draft is tested, ends count too, nothing is completed
        return len(
            WithReplacementRule().verify(case.target, case.draft, nodes, (), drafts + 1, 0, chooser, drafts).draws
        )

    distribution = enumerate_distribution(accepted)
    counts = acceptance_counts(case.target, case.draft, drafts)
    assert max(abs(distribution.get(k, 0.0) - counts[k]) for k in range(drafts + 1)) < EXACT


def test_identical_distributions_accept_everything() -> None:
    distribution = {(0, 0): 0.5, (0, 1): 0.3, (0, 2): 0.2}
    assert acceptance_counts(distribution, distribution, 3) == pytest.approx([0, 0, 0, 1])
    assert expected_width(distribution, distribution, 3, 0.9, 1, 2) == 2


def test_disjoint_distributions_accept_nothing() -> None:
    p, q = {(0, 0): 1.0}, {(0, 1): 1.0}
    assert acceptance_counts(p, q, 2) == [1.0, 0.0, 0.0]
    assert expected_width(p, q, 2, 0.7, 1, 3) == 1


def test_width_is_clamped_and_falls_with_the_threshold() -> None:
    p, q = {(0, 0): 0.6, (0, 1): 0.4}, {(0, 0): 0.3, (0, 1): 0.7}
    widths = [expected_width(p, q, 4, t / 20, 1, 4) for t in range(1, 21)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]
    assert expected_width(p, q, 4, 1.0, 3, 4) == 3
    assert expected_width({}, {}, 2, 0.7, 1, 4) == 1
