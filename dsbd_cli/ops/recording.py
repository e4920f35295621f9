"""How the kernels of a forward are launched: at once, or recorded as a program, which one compiled loop repeats.

A kernel asks here for the memory of its results and is launched here. While a thread records a program, what it calls
is recorded, as a CUDA graph records a stream; so neither a model nor an operation hands anything on. With few nodes a
kernel between two products takes some microseconds, and Python takes several times as long to call it.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

Results = TypeVar("Results", bound=Tensor | tuple[Tensor, ...])
Made = TypeVar("Made")
Step = Callable[[], object]
Loop = Callable[[Tensor], Step]
"""The operation `Ops.program`: it takes a table of kernels [count, 3] int64."""


class Launchable(Protocol):
    """A compiled kernel of the CPU, at an address. work: multiplications, about. items: parts that threads can take."""

    address: int

    def __call__(self, arguments: ctypes.Structure, work: int, items: int) -> None: ...
    def threads(self, work: int, items: int) -> int: ...


class Arena:
    """Memory for the results of layers. A layer reads the results of the layer before it, and reuses the memory of the
    layer before that. All programs of a model share one arena, because no two run at a time."""

    def __init__(self) -> None:
        self._parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._part: list[Tensor] = self._parts[0]
        self._next = 0

    @property
    def nbytes(self) -> int:
        """The bytes of its blocks, without blocks that a larger one has replaced, which only earlier programs keep."""
        return sum(block.nbytes for part in self._parts for block in part)

    def begin(self, layer: int) -> None:
        """Begin layer number `layer`."""
        self._part, self._next = self._parts[layer % 2], 0

    def block(self, nbytes: int) -> Tensor:
        """Return at least [nbytes] uint8 that no other result of this layer uses. Sizes are powers of two, because
        earlier programs keep the blocks that were too small."""
        if self._next == len(self._part):
            self._part.append(torch.empty(0, dtype=torch.uint8))
        if self._part[self._next].nbytes < nbytes:
            self._part[self._next] = torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8)
        self._next += 1
        return self._part[self._next - 1]

    def record(self, loop: Loop, function: Callable[[], Made]) -> tuple[Program, Made]:
        """Record the operations that a function calls. Return the program and what the function returns, whose contents
        are undefined until the program runs. loop: `Ops.program`."""
        program = Program(self, loop)
        with _recording(program):
            made = function()
        program.close()
        return program, made


class Program:
    """The kernels that the operations of a forward have called, to be run again and again. Before each run the caller
    writes the inputs to the same memory.

    Operations of torch (`compute`) also run once while the program is built, on whatever its memory contains, which
    shows the shapes of their results. At each run they write their results to the program's memory.
    """

    def __init__(self, arena: Arena, loop: Loop) -> None:
        self._arena, self._loop = arena, loop
        self._calls: list[tuple[int, int, int]] = []
        self._kept: list[object] = []  # objects that addresses in the calls point to
        self._steps: list[Step] = []
        self._last: Any = None  # arguments of the kernel that was recorded last
        self._result: Tensor | None = None

    def begin(self, layer: int) -> None:
        self._arena.begin(layer)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        block = self._arena.block(count * dtype.itemsize)
        self._kept.append(block)
        return block[: count * dtype.itemsize].view(dtype).view(shape)

    def launch(self, kernel: Launchable, arguments: ctypes.Structure, work: int, items: int, *kept: Tensor) -> None:
        self._calls.append((kernel.address, ctypes.addressof(arguments), kernel.threads(work, items)))
        self._kept.append((arguments, kept))
        self._last = arguments

    def compute(self, function: Callable[[], Results]) -> Results:
        self.close()
        results = function()
        buffers = [self.empty(*result.shape, dtype=result.dtype) for result in _several(results)]

        def step() -> None:
            for buffer, result in zip(buffers, _several(function()), strict=True):
                buffer.copy_(result)

        self._steps.append(step)
        return cast(Results, buffers[0] if isinstance(results, Tensor) else tuple(buffers))

    def postpone(self, shape: tuple[int, ...], dtype: torch.dtype, function: Callable[[], Tensor]) -> Tensor:
        self.close()
        buffer = self.empty(*shape, dtype=dtype)
        self._steps.append(lambda: buffer.copy_(function()))
        return buffer

    def copy(self, value: Tensor) -> Tensor:
        self.close()
        buffer = torch.empty(value.shape, dtype=value.dtype)
        self._steps.append(lambda: buffer.copy_(value))
        return buffer

    def close(self) -> None:
        """End a sequence of kernels: they become one step."""
        if self._calls:
            calls = torch.tensor(self._calls)
            self._kept.append(calls)
            self._steps.append(self._loop(calls))
            self._calls = []

    def renew(self, result: Tensor) -> None:
        """Have each run return `result`, which the kernel of a product has just written, in memory of its own."""
        assert self._last.out == result.data_ptr(), "a kernel has written it"
        self._result = result

    def run(self) -> Tensor | None:
        """Run all calls in order. Return the result that `renew` named, if any. Other results are in the memory that
        the operations were given while the program was built."""
        result = self._result
        if result is not None:
            count = self._last.rows * self._last.out_row  # bytes; the kernel fills up rows that the result cuts
            fresh = torch.empty(count // result.itemsize, dtype=result.dtype, device="cpu")
            self._last.out, result = fresh.data_ptr(), fresh.as_strided(result.shape, result.stride())
        for step in self._steps:
            step()
        return result


def _several(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


class _Thread(threading.local):
    program: Program | None = None


_thread = _Thread()


@contextmanager
def _recording(program: Program | None) -> Iterator[None]:
    """Record what this thread calls in a program; None: let it run at once."""
    before, _thread.program = _thread.program, program
    try:
        yield
    finally:
        _thread.program = before


def begin(layer: int) -> None:
    """Begin layer number `layer`. From now on the memory of the layer before the last may be reused."""
    if _thread.program is not None:
        _thread.program.begin(layer)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return memory of the CPU for a result of this shape."""
    program = _thread.program
    return torch.empty(shape, dtype=dtype, device="cpu") if program is None else program.empty(*shape, dtype=dtype)


def launch(kernel: Launchable, arguments: ctypes.Structure, work: int, items: int, *kept: Tensor) -> None:
    """Run a kernel. work, items: as in `Launchable`. kept: tensors to which only `arguments` points."""
    if _thread.program is None:
        kernel(arguments, work, items)
    else:
        _thread.program.launch(kernel, arguments, work, items, *kept)


def compute(function: Callable[[], Results]) -> Results:
    """Call a function of torch operations and return its result, a tensor or a tuple of tensors. Kernels that the
    function calls are a part of it."""
    if (program := _thread.program) is None:
        return function()
    with _recording(None):
        return program.compute(function)


def postpone(shape: tuple[int, ...], dtype: torch.dtype, function: Callable[[], Tensor]) -> Tensor:
    """Call a function that changes states, or needs the contents of its inputs, and return its result, which has this
    shape and dtype. While a program is built it is not called."""
    program = _thread.program
    return function() if program is None else program.postpone(shape, dtype, function)


def copy(value: Tensor) -> Tensor:
    """Return a copy that no later layer writes to."""
    return value.clone() if _thread.program is None else _thread.program.copy(value)
