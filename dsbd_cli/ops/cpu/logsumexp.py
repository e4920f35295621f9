"""Sums over a vocabulary by a kernel for the CPU: the log of the sum of exp of each row of logits, which is read once.
torch's exp takes most of the time of a log-softmax (benchmarks/LOG.md).

The kernel itself is kernels/logsumexp.py; numba, which compiles it, is imported when the first model is loaded. Core,
which stands above, asks `cpu_kernels` for it, and `provide` puts it there.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.ops.cpu.runtime import Kernel, fields, kernels, loadable, offsets

__all__ = ["cpu_kernels", "log_totals", "provide"]


WORK = 4  # multiplications or so of each number


class Total(ctypes.Structure):
    """Arguments of the kernel."""

    _fields_ = fields("taken", "threads", "items", "values", "values_row", "count", "highest", "out", "narrow")


TOTAL = offsets(Total)
LAYOUT = zlib.crc32(repr([TOTAL, [field[0] for field in Total._fields_]]).encode())


def log_totals(values: Tensor, highest: Tensor) -> Tensor | None:
    """log of the sum over v of exp(values[:, v] - highest): [n, 1] float32. None for what the kernel does not serve.

    values [n, V], float32 or bfloat16; highest [n, 1] float32. A row's bits are its own.
    """
    narrow = values.dtype == torch.bfloat16
    if not (narrow or values.dtype == torch.float32) or values.device.type != "cpu" or values.stride(1) != 1:
        return None
    rows, count = values.shape
    highest, out = highest.contiguous(), torch.empty(rows, 1, dtype=torch.float32, device="cpu")
    assert (highest.shape, highest.dtype) == (out.shape, out.dtype)
    arguments = Total(
        0, 0, rows, values.data_ptr(), values.stride(0) * values.element_size(), count, highest.data_ptr(),
        out.data_ptr(), narrow,
    )  # fmt: skip
    _kernel()(arguments, WORK * rows * count, rows)
    # in float64: in float32 the last few numbers of a tensor may take another log than the others
    return out.to(torch.float64).log_().to(torch.float32)


@functools.cache
def _kernel() -> Kernel:
    (found,) = kernels("logsumexp", "totals")
    return found


@functools.cache
def provide() -> bool:
    """Put the kernel into `cpu_kernels`, where it can be loaded."""
    found = loadable(_kernel, "torch computes the sums over the vocabulary")
    if found:
        cpu_kernels.log_totals = log_totals
    return found


@dataclass(slots=True)
class CpuKernels:
    """Kernels that were loaded, for all of the process; None: torch serves.

    log_totals: log of the sum of exp of a few rows [n, V] less the largest of each row [n, 1]: [n, 1] float32, or None
    where it does not serve such rows.
    """

    log_totals: Callable[[Tensor, Tensor], Tensor | None] | None = None


cpu_kernels = CpuKernels()
