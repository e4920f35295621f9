"""Memory in pages that processors read fast: for caches, and for packed weights."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading

import torch
from torch import Tensor

from dsbd_cli.ops.ahead import HUGE, cut_touched, map_zeros

CACHE_LINE = 64  # bytes
MOST_SHARED, SHARED = 4 * HUGE, 16 * HUGE  # bytes, see `allocate_weights`


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros of this shape, on a CPU as `allocate_zeros` returns them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return allocate_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def allocate_zeros(size: int) -> Tensor:
    """Return [size] uint8 of zeros, in pages of 2 MiB where the system has them. A page takes space once it has been
    written to.

    Reading much memory in small pages takes longer, because the processor has to look up each of them.
    """
    with torch.inference_mode(False):  # a part of it may be written to outside of that mode
        if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                mapped = torch.frombuffer(map_zeros(size + 2 * HUGE), dtype=torch.uint8)
                return mapped.narrow(0, -mapped.data_ptr() % HUGE, size)
        return torch.zeros(size, dtype=torch.uint8, device="cpu")


def return_freed() -> None:
    """Return memory that was freed to the system, where the C library holds it for later (glibc does, of blocks of up
    to 32 MiB)."""
    if os.name == "posix" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class _Rest:
    """The rest of the block of memory that `allocate_weights` cuts from."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.lock = threading.Lock()


_rest = _Rest()


def allocate_weights(size: int) -> Tensor:
    """Return [size] uint8 for packed weights, in pages as `allocate_zeros` returns them.

    They are cut from memory that has been touched before, while there is some. Behind it up to MOST_SHARED bytes are
    cut from a block of SHARED bytes. A block is freed when none of its parts is used any more.
    """
    taken = -(-size // CACHE_LINE) * CACHE_LINE
    if size and (part := cut_touched(taken)) is not None:
        memory, start = part
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
    if size > MOST_SHARED:
        return allocate_zeros(size)
    with _rest.lock:
        if taken > len(_rest.memory):
            _rest.memory = allocate_zeros(SHARED)
        part_of_rest, _rest.memory = _rest.memory[:size], _rest.memory[taken:]
        return part_of_rest
