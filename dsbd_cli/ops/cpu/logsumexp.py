"""A CPU kernel for sums over the vocabulary: the log of the sum of exp of each row of logits, which is read once.
Without it torch's exp takes most of the time of a log-softmax (benchmarks/LOG.md).

The kernel itself is in kernels/candidates.py; numba, which compiles it, is imported when the kernel is first needed.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dsbd_cli.ops import reference
from dsbd_cli.ops.cpu.runtime import FLOATS, CpuKernel, fields, kernels, layout, offsets

WORK = 4  # multiplications per number, about


class LogsumexpArguments(ctypes.Structure):
    """Arguments of the kernel."""

    _fields_ = fields("taken", "threads", "items", "values", "values_row", "count", "highest", "out", "narrow")


TOTAL = offsets(LogsumexpArguments)
LAYOUT = layout(LogsumexpArguments)


def log_total(values: Tensor, highest: Tensor) -> Tensor:
    """Do what `reference.log_total` does, by the kernel for float32 and bfloat16 values whose rows have no gaps. The
    bits of a row do not depend on the other rows."""
    if values.dtype not in FLOATS or values.device.type != "cpu" or values.stride(1) != 1:
        return reference.log_total(values, highest)
    rows, count = values.shape
    highest, out = highest.contiguous(), torch.empty(rows, 1, dtype=torch.float32, device="cpu")
    assert (highest.shape, highest.dtype) == (out.shape, out.dtype)
    arguments = LogsumexpArguments(
        0, 0, rows, values.data_ptr(), values.stride(0) * values.element_size(), count, highest.data_ptr(),
        out.data_ptr(), values.dtype == torch.bfloat16,
    )  # fmt: skip
    compiled()(arguments, WORK * rows * count, rows)
    # in float64, because in float32 torch may compute the log of the last few numbers of a tensor in another way
    return out.to(torch.float64).log_().to(torch.float32)


@functools.cache
def compiled() -> CpuKernel:
    """Return the kernel, made at the first call."""
    (kernel,) = kernels("candidates", "totals")
    return kernel
