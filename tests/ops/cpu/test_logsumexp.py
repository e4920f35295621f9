"""Sums over the vocabulary by the kernel. Guards: a row whose bits depend on its neighbours or on threads, a rest of
the vocabulary that is left out, NaN that gets lost, memory past a row's end."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.engine.core.candidates import CandidateCount, top_candidates
from dsbd_cli.ops.cpu import logsumexp
from dsbd_cli.ops.cpu.logsumexp import log_total
from dsbd_cli.ops.interface import Ops
from tests.helpers.kernels import serves

needs_kernel = pytest.mark.skipif(not serves("log_total"), reason="kernels of numba do not run here")


def rows(vocabulary: int, dtype: torch.dtype, count: int = 5) -> torch.Tensor:
    made = 4 * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    made[1] -= 3e4
    made[2, 3:] = float("-inf")
    return made.to(dtype)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 16, 64, 67, 4096, 4096 + 64 + 21, 58101])
def test_it_is_the_log_of_the_sum(vocabulary: int, dtype: torch.dtype) -> None:
    values = rows(vocabulary, dtype)
    highest = values.float().amax(-1, keepdim=True)
    found = log_total(values, highest)
    assert found is not None
    exact = torch.logsumexp(values.double() - highest.double(), -1, keepdim=True)
    torch.testing.assert_close(found.double(), exact, rtol=3e-7, atol=3e-7)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_keeps_its_bits(dtype: torch.dtype) -> None:
    """In other company, with other threads, and where it stands between other numbers in memory."""
    values = rows(70_001, dtype, count=7)
    highest = values.float().amax(-1, keepdim=True)
    together = log_total(values, highest)
    wide = torch.full((7, 70_080), 50.0, dtype=dtype)
    wide[:, :70_001] = values
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        shared = log_total(wide[:, :70_001], highest)
    finally:
        torch.set_num_threads(threads)
    assert together is not None
    assert shared is not None
    assert torch.equal(shared, together)
    for row in range(7):
        alone = log_total(values[row : row + 1], highest[row : row + 1])
        assert alone is not None
        assert torch.equal(alone[0], together[row])


@needs_kernel
@pytest.mark.parametrize("place", [0, 63, 64, 98])
def test_nan_stays(place: int) -> None:
    values = torch.zeros(2, 99)
    values[1, place] = float("nan")
    found = log_total(values, values.amax(-1, keepdim=True))
    assert found is not None
    assert found.isnan().flatten().tolist() == [False, True]


def test_other_numbers_are_left_to_torch() -> None:
    wide = torch.zeros(2, 64, dtype=torch.float64)
    assert log_total(wide, wide.amax(-1, keepdim=True)) is None
    turned = torch.zeros(64, 2).t()
    assert log_total(turned, turned.amax(-1, keepdim=True)) is None


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [9, 5000])
def test_candidates_are_those_of_torch(count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order and log-probabilities; and the kernel is asked."""
    logits = rows(5000, dtype, count=6).view(2, 3, 5000)
    plain = top_candidates(logits, CandidateCount(count), ops=Ops())
    asked = []

    def asking(values: torch.Tensor, highest: torch.Tensor) -> torch.Tensor | None:
        asked.append(len(values))
        return log_total(values, highest)

    monkeypatch.setattr(logsumexp, "log_total", asking)
    found = top_candidates(logits, CandidateCount(count))
    assert sum(asked) == 6
    assert torch.equal(found.tokens, plain.tokens)
    torch.testing.assert_close(found.logprobs, plain.logprobs, rtol=1e-6, atol=1e-6)
