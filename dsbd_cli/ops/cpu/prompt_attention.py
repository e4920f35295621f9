"""A CPU kernel for attention to the first slots of a row: to the prompt while tokens are generated, and while a prompt
is read.

The slots are visited in chunks, and the softmax is rescaled from chunk to chunk (FlashAttention, Dao et al. 2022). Keys
and values of a chunk are packed as lines, so that the tiles of kernels/simd.py multiply them. A query is computed by
itself, chunk by chunk from slot 0 on, so its bits depend neither on the other queries nor on the threads. The torch
code of models/attention/forest.py is the specification. The kernel itself is in kernels/prompt_attention.py; numba,
which compiles it, is imported at its first call.

Letters: R rows, H kv heads, G query heads per kv head, n nodes, m = G * n queries, S slots, E head dim.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dsbd_cli.ops import recording
from dsbd_cli.ops.cpu.linear import COLUMNS
from dsbd_cli.ops.cpu.runtime import FLOATS, CpuKernel, fields, kernels, layout, offsets

SLOTS = 2 * COLUMNS  # of a chunk
QUERIES = 64  # that a thread works on at most: they share the packed keys and values
FEW = 12  # queries are not divided into smaller blocks: packing would take as long as the products
STEP = 16  # head dims must be multiples of it
TYPICAL = 512  # slots by which it is decided whether threads share a call: a program serves prompts of any length


class PromptArguments(ctypes.Structure):
    """Arguments of the kernel `attend`: sizes, addresses and strides in bytes."""

    _fields_ = (
        *fields(
            "taken", "threads", "items", "heads", "queries", "dim", "blocks", "block", "query",
            "key", "key_row", "key_head", "key_slot", "value", "value_row", "value_head", "value_slot",
            "rows", "counts", "nodes", "out", "sums", "scratch", "scratch_bytes", "narrow",
        ),
        ("scale", ctypes.c_float),
    )  # fmt: skip


ATTEND = offsets(PromptArguments)
LAYOUT = layout(PromptArguments, constants=(SLOTS, QUERIES))


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernel supports these tensors. Only dtype and layout decide it, never the number of nodes,
    rows or slots, which would change bits in the middle of a text."""
    same = query.dtype in FLOATS and query.dtype == key.dtype == value.dtype
    dim = query.shape[-1]
    sizes = dim == key.shape[-1] == value.shape[-1] and dim % STEP == 0
    return same and sizes and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1


def attend(
    query: Tensor, key: Tensor, value: Tensor, counts: Tensor, scale: float, *, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend with query [R, H * G, n, E] to the first slots of key and value [R', H, S, E].

    counts: [R, n or 1] int64, how many slots a node sees. rows: [R] int64, rows of key and value; None: the first ones.
    Returns attention [R, H, m, E] and natural log-sums [R, H, m] float32, which are the lowest float32 where a node
    sees nothing.
    """
    count, query_heads, nodes, dim = query.shape
    heads, unit = key.shape[1], query.element_size()
    queries = query_heads // heads * nodes
    grouped = query.reshape(count, heads, queries, dim)
    if not query.is_contiguous():  # a program must copy it at every run
        grouped = recording.compute(lambda: query.reshape(count, heads, queries, dim).contiguous())
    # the kernel checks none of this
    assert (value.shape[1], key.shape[3], value.shape[3]) == (heads, dim, dim)
    assert counts.dtype == torch.int64
    assert counts.is_contiguous()
    assert counts.shape in ((count, 1), (count, nodes))
    assert rows is None or (rows.shape, rows.dtype, rows.is_contiguous()) == ((count,), torch.int64, True)
    threads = torch.get_num_threads()
    blocks = -(-queries // QUERIES)
    if count * heads * blocks < 2 * threads:
        blocks = max(blocks, min(-(-2 * threads // (count * heads)), queries // FEW))
    block = -(-queries // blocks)
    out = recording.empty(count, heads, queries, dim, dtype=query.dtype)
    sums = recording.empty(count, heads, queries, dtype=torch.float32)
    scratch = recording.empty(threads, scratch_bytes(dim, unit, block), dtype=torch.uint8)
    arguments = PromptArguments(
        0, 0, count * heads * blocks, heads, queries, dim, blocks, block, grouped.data_ptr(),
        key.data_ptr(), *(step * unit for step in key.stride()[:3]),
        value.data_ptr(), *(step * unit for step in value.stride()[:3]),
        0 if rows is None else rows.data_ptr(), counts.data_ptr(), counts.shape[1], out.data_ptr(), sums.data_ptr(),
        scratch.data_ptr(), scratch.stride(0), unit == 2, scale,
    )  # fmt: skip
    kept = [counts] if rows is None else [counts, rows]
    work = 2 * count * query_heads * nodes * TYPICAL * dim
    recording.launch(compiled()[0], arguments, work, count * heads * blocks, *kept)
    return out, sums


def scratch_bytes(dim: int, unit: int, block: int) -> int:
    """Return the bytes that a thread needs: kernels/prompt_attention.py says for what."""
    line, wide = COLUMNS * 4, -(-dim // COLUMNS)
    addresses, empty_row = COLUMNS * 8, wide * line
    keys, values = 2 * (dim * unit // 4) * line, SLOTS * unit // 4 * wide * line
    scores, weights, sums = 2 * block * line, block * SLOTS * unit, wide * block * line
    return addresses + empty_row + keys + values + scores + weights + sums + -(-block * 8 // 64) * 64


@functools.cache
def compiled() -> list[CpuKernel]:
    """Return the kernel, made at the first call."""
    return kernels("prompt_attention", "attend")
