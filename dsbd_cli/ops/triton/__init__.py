"""Triton kernels that stand in for tensor functions, and the list of them.

The tensor function, the reference, stays the specification: it says what a kernel computes, and it runs on other
devices and for settings that a kernel does not fit. This package knows torch and triton only; a kernel is called where
its reference stands, behind an operator of torch.library, so that engines run on fake tensors too. triton launches on
the current device, so each operator makes that of its tensors the current one.

Importing this module needs no triton; the modules with kernels do.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Arguments = tuple[object, ...]
# Largest difference, absolute and relative: of sums in another order; for half types one rounding of bfloat16, because
# what follows such a sum may round the other way.
CLOSE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """A kernel and the tensor function it stands in for.

    Attributes:
        name: what users read in lines, in `dsbd doctor` and in the summary.
        op, reference: take the same arguments and give the same tensors, or a tuple of them. Neither changes an
            argument: where the kernel works in place, `op` is a function that copies first and returns what was
                changed.
        cases: arguments of a few random calls, made with a generator of the CPU and moved to the device. What they
            hold is small; the first one is the smallest.
    """

    name: str
    op: Callable[..., Tensor | tuple[Tensor, ...]]
    reference: Callable[..., Tensor | tuple[Tensor, ...]]
    cases: Callable[[torch.Generator, torch.device], Iterator[Arguments]]


def available() -> bool:
    """triton can be imported. torch's builds for CUDA bring it."""
    return importlib.util.find_spec("triton") is not None


def differences(kernel: KernelCheck, device: torch.device, seed: int = 0) -> Iterator[str]:
    """Yield what a kernel gives otherwise than its reference, one text per case that differs; nothing where they agree.

    Floats may differ by CLOSE; all other numbers must be equal.

    An error of the kernel (it does not compile, it cannot be launched) is raised as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    for number, case in enumerate(kernel.cases(generator, device)):
        found, wanted = kernel.op(*case), kernel.reference(*case)
        for place, (mine, other) in enumerate(zip(_tuple(found), _tuple(wanted), strict=True)):
            if fault := _difference(mine, other):
                yield f"case {number}, result {place}: {fault}"
                break


def _tuple(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found


def _difference(found: Tensor, wanted: Tensor) -> str:
    """How two tensors differ, "" where they do not. NaN equals NaN."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype} {list(found.shape)} in place of {wanted.dtype} {list(wanted.shape)}"
    if found.is_floating_point():
        close = CLOSE[found.dtype]
        same = torch.isclose(found, wanted, rtol=close, atol=close, equal_nan=True)
    else:
        same = found == wanted
    if bool(same.all()):
        return ""
    first = int((~same).flatten().to(torch.int8).argmax())
    return (
        f"{int((~same).sum())} of {same.numel()} numbers differ, the first {found.flatten()[first].item()} "
        f"in place of {wanted.flatten()[first].item()}"
    )
