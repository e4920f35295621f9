"""Tensor operations of an iteration outside the forwards: what a GPU launches without kernels, and a CPU with them.
Counts, which no machine changes. Guards work per layer, draft or vocabulary entry that slips into the iteration."""

from __future__ import annotations

import pytest

from benchmarks.operations import count
from dsbd_cli import MethodConfig
from tests.helpers.kernels import serves

# a twentieth above what was counted on 2026-11-21 at W=4, K=8, D=4: 1360, 1036, 2670
MOST = {"coupled": 1428, "search": 1088, "rejection": 2804}


@pytest.mark.parametrize("rule", MOST)
def test_an_iteration_launches_no_more_than_it_did(rule: str) -> None:
    method = MethodConfig(rule=rule, num_beams=4, drafts_per_layer=8, depth=4, width="fixed")  # type: ignore[arg-type]
    operations = [counting.outside.total() for counting in count(method, 2)]
    assert len(operations) == 2
    assert MOST[rule] // 2 < max(operations) <= MOST[rule]


@pytest.mark.skipif(not serves("verify"), reason="kernels of numba do not run here")
@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_with_kernels_few_operations_are_left(rule: str) -> None:
    """A twentieth above 115, counted on 2026-11-26."""
    method = MethodConfig(rule=rule, num_beams=4, drafts_per_layer=8, depth=4, width="fixed")  # type: ignore[arg-type]
    operations = [counting.outside.total() for counting in count(method, 2, kernels=True)]
    assert 60 < max(operations) <= 121
