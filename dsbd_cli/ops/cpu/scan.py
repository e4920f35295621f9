"""CPU kernels for recurrent layers. numba, which compiles them, is imported when they are needed.

kernels/schedule.py plans a scan, kernels/scan.py computes it and the short convolutions.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections import namedtuple
from struct import Struct
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from dsbd_cli.ops.cpu.runtime import CpuKernel, fields, kernels, layout, offsets
from dsbd_cli.ops.memory import CACHE_LINE

if TYPE_CHECKING:
    from dsbd_cli.ops.cpu.kernels.schedule import ScanSchedule

Array = NDArray[Any]
_ARRAYS = (
    "state", "rows", "planes", "q", "v", "beta", "query_keys", "key_keys", "keys", "inputs", "decays",
    "lines", "counts", "order", "groups", "sources", "blocks", "sizes", "used", "uses", "y",
)  # fmt: skip


class ScanArguments(ctypes.Structure):
    """Arguments of the kernel: sizes, and addresses of arrays.

    items: pairs of row and value head. dim, width: N and P. wide: P in whole tiles. places: of a plane. most,
    most_used: groups and places in use of a row, at most. corrects: u is computed. channels: decays of a head. step:
    numbers from one token's values to the next one's.
    """

    _fields_ = fields(
        "taken", "threads", "items", "work", "work_bytes", "heads", "key_heads", "dim", "width", "wide", "places",
        "nodes", "most", "most_used", "buffers", "corrects", "channels", "keep", "step", *_ARRAYS,
    )  # fmt: skip


_names = [field[0] for field in ScanArguments._fields_]
_Offsets: Any = namedtuple("Offsets", _names)  # type: ignore[misc]
AT = _Offsets(*offsets(ScanArguments))
LAYOUT = layout(ScanArguments)
_PACKED = Struct(f"{len(_names)}q")


@functools.cache
def compiled() -> ModuleType:
    """Return the kernels, made at the first call."""
    return importlib.import_module(f"{__package__}.kernels.scan")


@functools.cache
def _kernel() -> CpuKernel:
    (kernel,) = kernels("scan", "scan_pairs")
    return kernel


def recurrent_scan(
    state: Array, rows: Array, planes: Array, q: Array, v: Array, step: int, beta: Array, query_keys: Array,
    key_keys: Array, keys: Array, inputs: Array, decays: Array, plan: ScanSchedule, y: Array,
) -> None:  # fmt: skip
    """Add the results of a plan's nodes to y [R, n, H, P], and write the states that it keeps.

    state: [., H, N, P]. keys, inputs, decays: planes [., places, ...] as `put` leaves them. rows, planes: [R] rows of
    the states and of the planes. v, step: as in `put`. beta: [R, n, H], by which u is computed from v and stored; or
    [R, n, 0] where the planes have u already. query_keys, key_keys: `pairs` of q, and of each node's own key where
    there are betas; not read where decays are per channel. All arrays are contiguous, and float32 or int64.
    """
    kernels, kernel, (heads, dim, width) = compiled(), _kernel(), state.shape[1:]
    items, corrects, places, nodes, most = (
        len(rows) * heads, beta.shape[2] > 0, keys.shape[1], plan.lines.shape[1], plan.groups.shape[1]
    )  # fmt: skip
    wide = -(-width // kernels.TILE) * kernels.TILE
    memory = kernels.memory_bytes(dim, wide, places, plan.buffers)
    memory = -(-memory // CACHE_LINE) * CACHE_LINE  # no two threads share a line of the cache
    work = items * dim * width * (nodes * (1 + corrects) + most)  # a product with a state for each node and each group
    room = torch.empty(kernel.threads(work, items) * memory, dtype=torch.uint8, device="cpu")
    addresses = kernels.addresses(
        state, rows, planes, q, v, beta, query_keys, key_keys, keys, inputs, decays, *plan[:9], y
    )
    numbers = _PACKED.pack(  # takes half as long as to write one field after the other
        0, 0, items, room.data_ptr(), memory, heads, keys.shape[2], dim, width, wide, places,
        nodes, most, plan.used.shape[1], plan.buffers, corrects, decays.shape[3], plan.keep, step, *addresses,
    )  # fmt: skip
    kernel(ScanArguments.from_buffer_copy(numbers), work, items)
