"""Sums over the vocabulary by the kernel. Guards: a row whose bits depend on its neighbours or on threads, a rest of
the vocabulary that is left out, NaN that gets lost, memory past a row's end."""

from __future__ import annotations

import ctypes

import pytest
import torch

from dsbd_cli.engine.core.candidates import CandidateCount, top_candidates
from dsbd_cli.ops import reference
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


def test_other_numbers_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logsumexp, "compiled", lambda: pytest.fail("the kernel is asked"))
    for values in (torch.zeros(2, 64, dtype=torch.float64), torch.zeros(64, 2).t()):
        highest = values.amax(-1, keepdim=True)
        assert torch.equal(log_total(values, highest), reference.log_total(values, highest))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [9, 5000])
def test_candidates_are_those_of_torch(count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order and log-probabilities; and the kernel is asked."""
    logits = rows(5000, dtype, count=6).view(2, 3, 5000)
    plain = top_candidates(logits, CandidateCount(count), ops=Ops())
    asked: list[int] = []
    kernel = logsumexp.compiled()

    def asking(arguments: ctypes.Structure, work: int, items: int) -> None:
        asked.append(items)
        kernel(arguments, work, items)

    monkeypatch.setattr(logsumexp, "compiled", lambda: asking)
    candidates = top_candidates(logits, CandidateCount(count))
    assert sum(asked) == 6
    assert torch.equal(candidates.tokens, plain.tokens)
    torch.testing.assert_close(candidates.logprobs, plain.logprobs, rtol=1e-6, atol=1e-6)
