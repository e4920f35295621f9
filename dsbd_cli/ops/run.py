"""How the kernels of a forward run: at once, or recorded as a program, to be run again and again.

A kernel asks here for the memory of its results and is launched here. While a thread has a recorder, what it calls is
recorded, as a CUDA graph records a stream; so neither a model nor an operation hands anything on.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Results = TypeVar("Results", bound=Tensor | tuple[Tensor, ...])
Made = TypeVar("Made")


class Kernel(Protocol):
    """A compiled kernel of the CPU, at an address."""

    address: int

    def __call__(self, arguments: ctypes.Structure, work: int, items: int) -> None:
        """Run the kernel. work: multiplications, about. items: parts that threads can take."""
        ...

    def threads(self, work: int, items: int) -> int:
        """Return how many threads a call uses."""
        ...


class Recorder(Protocol):
    """A program that is being recorded. Its methods stand in for the functions of this module of the same names."""

    def begin(self, layer: int) -> None: ...
    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor: ...
    def launch(self, kernel: Kernel, arguments: ctypes.Structure, work: int, items: int, *kept: Tensor) -> None: ...
    def compute(self, function: Callable[[], Results]) -> Results: ...
    def copy(self, value: Tensor) -> Tensor: ...


class Program(Protocol):
    """The kernels of one forward, with fixed memory. Before each run the caller writes the inputs to the same memory as
    before."""

    def renew(self, result: Tensor) -> None:
        """Have each run return `result`, which the kernel of a product wrote last, in memory of its own."""
        ...

    def run(self) -> Tensor | None:
        """Run all kernels in order. Return the result that `renew` named, if any. Other results are in the memory that
        the function returned when it was recorded."""
        ...


class Programs(Protocol):
    """The memory that all programs of a model share, because no two run at a time."""

    def record(self, function: Callable[[], Made]) -> tuple[Program, Made]:
        """Record the operations that a function calls. Return the program and what the function returns, whose contents
        are undefined until the program runs."""
        ...


class _Thread(threading.local):
    recorder: Recorder | None = None


_thread = _Thread()


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Record what this thread calls; None: let it run at once."""
    before, _thread.recorder = _thread.recorder, recorder
    try:
        yield
    finally:
        _thread.recorder = before


def begin(layer: int) -> None:
    """Begin layer number `layer`. From now on the memory of the layer before the last may be reused."""
    if _thread.recorder is not None:
        _thread.recorder.begin(layer)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return memory of the CPU for a result of this shape."""
    recorder = _thread.recorder
    return torch.empty(shape, dtype=dtype, device="cpu") if recorder is None else recorder.empty(*shape, dtype=dtype)


def launch(kernel: Kernel, arguments: ctypes.Structure, work: int, items: int, *kept: Tensor) -> None:
    """Run a kernel. work, items: as in `Kernel`. kept: tensors to which only `arguments` points."""
    if _thread.recorder is None:
        kernel(arguments, work, items)
    else:
        _thread.recorder.launch(kernel, arguments, work, items, *kept)


def compute(function: Callable[[], Results]) -> Results:
    """Call a function of torch operations and return its result, a tensor or a tuple of tensors. Kernels that the
    function calls are a part of it."""
    if (recorder := _thread.recorder) is None:
        return function()
    with recording(None):
        return recorder.compute(function)


def copy(value: Tensor) -> Tensor:
    """Return a copy that no later layer writes to."""
    return value.clone() if _thread.recorder is None else _thread.recorder.copy(value)
