"""Triton kernels that take the place of tensor functions, and their comparison with these functions.

The tensor function, the *reference*, stays the specification: it defines what a kernel computes, and it runs on other
devices and for settings that the kernel does not support. This package depends on torch and triton only. A kernel is
called in place of its reference through an operator of torch.library, so that engines also run on fake tensors. triton
launches on the current device, so each operator makes the device of its tensors the current one.

Importing this module needs no triton; importing the modules with kernels does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Arguments = tuple[object, ...]
# Largest absolute and relative difference that is allowed, because sums are in another order. For half types it is one
# rounding of bfloat16, because a number that is computed from such a sum may be rounded the other way.
CLOSE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """A kernel and the tensor function whose place it takes.

    Attributes:
        name: the name that users read in messages, in `dsbd doctor` and in the summary.
        op, reference: take the same arguments and return the same tensor, or tuple of tensors. Neither changes an
            argument: where the kernel works in place, `op` is a function that copies first and returns what was
                changed.
        cases: yields the arguments of a few random calls, made with a generator of the CPU and moved to the device.
            The tensors are small; those of the first call are the smallest.
    """

    name: str
    op: Callable[..., Tensor | tuple[Tensor, ...]]
    reference: Callable[..., Tensor | tuple[Tensor, ...]]
    cases: Callable[[torch.Generator, torch.device], Iterator[Arguments]]


def available() -> bool:
    """Return whether triton can be imported. torch's builds for CUDA bring it."""
    return importlib.util.find_spec("triton") is not None


def tried_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes that are tried: triton's interpreter truncates to bfloat16 where everything else rounds."""
    return torch.float32, torch.bfloat16 if device.type == "cuda" else torch.float16


def differences(kernel: KernelCheck, device: torch.device, seed: int = 0) -> Iterator[str]:
    """Compare a kernel with its reference, and yield a text per case in which their results differ.

    Floats may differ by CLOSE; all other numbers must be equal.

    An error of the kernel (it does not compile, it cannot be launched) is raised as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    for number, case in enumerate(kernel.cases(generator, device)):
        result, wanted = kernel.op(*case), kernel.reference(*case)
        for index, (mine, other) in enumerate(zip(_tuple(result), _tuple(wanted), strict=True)):
            if fault := _difference(mine, other):
                yield f"case {number}, result {index}: {fault}"
                break


def _tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def _difference(result: Tensor, wanted: Tensor) -> str:
    """Return how two tensors differ; "" where they do not. NaN equals NaN."""
    if result.shape != wanted.shape or result.dtype != wanted.dtype:
        return f"{result.dtype} {list(result.shape)} in place of {wanted.dtype} {list(wanted.shape)}"
    if result.is_floating_point():
        close = CLOSE[result.dtype]
        same = torch.isclose(result, wanted, rtol=close, atol=close, equal_nan=True)
    else:
        same = result == wanted
    if bool(same.all()):
        return ""
    first = int((~same).flatten().to(torch.int8).argmax())
    return (
        f"{int((~same).sum())} of {same.numel()} numbers differ, the first {result.flatten()[first].item()} "
        f"in place of {wanted.flatten()[first].item()}"
    )
