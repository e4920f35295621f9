"""What layers on the CPU do, recorded as steps that can be repeated: kernels with their arguments, operations of torch.

As in a CUDA graph addresses are fixed: results lie in an arena, and whoever repeats the steps writes inputs to the
places that were recorded. Kernels are not run while they are recorded. Operations of torch are, on what lies there.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dsbd_cli.engine.models.native import Kernel, fields, kernels, loadable, offsets, team_address

__all__ = ["Arena", "Recorder", "Step", "UnrecordableError", "serves"]

aten = torch.ops.aten
EMPTY = {aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default}
REFUSED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
# tagged as random because of their dropout; a model in evaluation mode drops nothing
ATTENTION = {aten.scaled_dot_product_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default}
Step = Callable[[], object]


class Run(ctypes.Structure):
    """Arguments of the kernel that runs kernels: `calls` is [count, 3] int64, address, arguments and threads."""

    _fields_ = fields("count", "calls", "team")


RUN = offsets(Run)
LAYOUT = zlib.crc32(repr([RUN, *(one[0] for one in Run._fields_)]).encode())


class UnrecordableError(Exception):
    """An operation goes by data, or writes to memory that is not the recording's."""


class Arena:
    """Memory for the results of layers, used again by the layer after next: a layer reads what the one before it left.

    Recordings of one arena share it, and are not repeated at the same time.
    """

    def __init__(self) -> None:
        self._parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._part: list[Tensor] = self._parts[0]
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it holds. A block that was too small for a later recording is held by the earlier ones alone."""
        return sum(block.nbytes for part in self._parts for block in part)

    def begin(self, layer: int) -> None:
        """A layer begins, of this number."""
        self._part, self._next = self._parts[layer % 2], 0

    def block(self, nbytes: int) -> Tensor:
        """[nbytes] uint8 or more, the layer's own."""
        if self._next == len(self._part):
            self._part.append(torch.empty(0, dtype=torch.uint8))
        if self._part[self._next].nbytes < nbytes:
            self._part[self._next] = torch.empty(nbytes, dtype=torch.uint8)
        self._next += 1
        return self._part[self._next - 1]


class Recorder(TorchDispatchMode):
    """Records what runs inside.

    Attributes:
        steps: what to repeat, in order, once `close` was called. blocks: the memory that the steps use.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self._calls: list[tuple[int, int, int]] = []
        self._arguments: list[ctypes.Structure] = []
        self.steps: list[Step] = []
        self.blocks: list[Tensor] = []

    def record_kernel(self, kernel: Kernel, arguments: ctypes.Structure, threads: int) -> None:
        """For native.intercept."""
        self._calls.append((kernel.address, ctypes.addressof(arguments), threads))
        self._arguments.append(arguments)

    def close(self) -> None:
        """The kernels since the last step become a step."""
        if self._calls:
            self.steps.append(functools.partial(_run_kernels, torch.tensor(self._calls), self._arguments))
            self._calls, self._arguments = [], []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in EMPTY:
            return self._take(func(*args, **kwargs))
        if REFUSED & set(func.tags) and func not in ATTENTION:
            raise UnrecordableError(str(func))
        writes = func._schema.is_mutable
        if writes and not any(args[0].untyped_storage().data_ptr() == block.data_ptr() for block in self.blocks):
            raise UnrecordableError(str(func))
        found = func(*args, **kwargs)
        if func.is_view and _views(found, args[0]):
            return found
        self.close()
        if writes:
            self.steps.append(functools.partial(func, *args, **kwargs))
            return found
        results = tree_map_only(Tensor, self._take, found)
        self.steps.append(functools.partial(_compute_into, results, func, args, kwargs))
        return results

    def _take(self, like: Tensor) -> Tensor:
        """A tensor of the arena with this shape, dtype and strides."""
        nbytes = like.untyped_storage().nbytes()
        block = self._arena.block(nbytes)
        self.blocks.append(block)
        return block[:nbytes].view(like.dtype).as_strided(like.shape, like.stride())


def _views(found: object, source: Tensor) -> bool:
    """All results lie in the memory of the source. `contiguous` and `reshape` are called views, and may copy."""
    address = source.untyped_storage().data_ptr()
    return all(one.untyped_storage().data_ptr() == address for one in tree_leaves(found) if isinstance(one, Tensor))


def _compute_into(results: Any, func: Any, args: Any, kwargs: Any) -> None:
    for result, one in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(result, Tensor):
            result.copy_(one)


def _run_kernels(calls: Tensor, arguments: Sequence[ctypes.Structure]) -> None:
    """One after another. arguments: held, because `calls` has their addresses."""
    _runner().run_here(Run(len(calls), calls.data_ptr(), team_address()))


@functools.cache
def _runner() -> Kernel:
    (found,) = kernels("recorder_kernel", "run")
    return found


@functools.cache
def serves() -> bool:
    """Whether recordings can be repeated here."""
    return loadable(_runner, "layers are called one by one")
