"""The loop that runs a program (ops/recording.py): a table of kernels, their arguments and their threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from torch import Tensor

from dsbd_cli.ops.cpu.runtime import CpuKernel, fields, kernels, layout, offsets, team_address


class ProgramArguments(ctypes.Structure):
    """Arguments of the loop. calls: [count, 3] int64, each kernel's address, that of its arguments, and its threads."""

    _fields_ = fields("count", "calls", "team")


RUN = offsets(ProgramArguments)
LAYOUT = layout(ProgramArguments)


def loop(calls: Tensor) -> Callable[[], object]:
    """Return a function that runs the calls [count, 3] int64 of `ProgramArguments`. It does not keep the tensor."""
    return functools.partial(compiled().run_here, ProgramArguments(len(calls), calls.data_ptr(), team_address()))


@functools.cache
def compiled() -> CpuKernel:
    """Return the loop, made at the first call."""
    (kernel,) = kernels("layer", "run")
    return kernel
