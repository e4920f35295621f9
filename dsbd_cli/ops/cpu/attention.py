"""A CPU kernel for attention over the suffix: each node visits the slots that it sees, in order of depth.

So neither the other nodes nor the places of the ancestors' slots change a result, and sums in float32 suffice. The
torch code of models/attention/forest.py is the specification, and serves what the kernel does not support. The kernel
itself is in kernels/attention.py; numba, which compiles it, is imported at its first call.

Letters: R rows, H kv heads, G query heads per kv head, n nodes, S slots, T suffix slots, E head dim.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dsbd_cli.ops import recording
from dsbd_cli.ops.cpu.runtime import FLOATS, SMALL, CpuKernel, fields, kernels, layout, offsets
from dsbd_cli.ops.layout import SlotPaths

LANES = 16
FEW = 32  # fewer queries of a kv head are not divided among threads, because each thread would read all keys


class AttentionArguments(ctypes.Structure):
    """Arguments of the kernel `attend`: sizes, addresses and strides in bytes."""

    _fields_ = (
        *fields(
            "taken", "threads", "items", "heads", "groups", "nodes", "dim", "out_dim", "blocks", "block",
            "query", "query_row", "query_head", "query_node", "key", "key_row", "key_head", "key_slot",
            "value", "value_row", "value_head", "value_slot", "out", "slots", "counts", "bounds", "list_width",
            "prompt_part", "prompt_part_row", "prompt_part_head", "prompt_part_query",
            "sums", "sums_row", "sums_head", "sums_query",
            "sinks", "bias", "bias_row", "bias_head", "bias_node", "scratch", "scratch_bytes", "narrow",
        ),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )  # fmt: skip


class SlotListArguments(ctypes.Structure):
    """Arguments of the kernel `list_slots`."""

    _fields_ = fields(
        "taken", "threads", "rows", "nodes", "width", "total", "seen", "seen_row", "seen_node", "starts", "depths",
        "depths_row", "slots", "counts", "bounds",
    )  # fmt: skip


ATTEND, LIST = offsets(AttentionArguments), offsets(SlotListArguments)
LAYOUT = layout(AttentionArguments, SlotListArguments)


def list_slots(seen: Tensor, starts: Tensor, width: int, depths: Tensor | None) -> SlotPaths:
    """Return the suffix slots that each node sees, in order of depth.

    seen [R, n, S] bool; starts [R] int64, the slot where each suffix begins; width: T, its slots; depths [R, S] int64,
    the depth of the token in each slot; None: slots are in order of depth.
    """
    rows, nodes, total = seen.shape
    assert (seen.dtype, starts.dtype, starts.numel()) == (torch.bool, torch.int64, rows)
    if seen.stride(2) != 1:
        seen = seen.contiguous()
    ordered = 0, 0
    if depths is not None:
        assert (depths.dtype, depths.stride(1), len(depths)) == (torch.int64, 1, rows)
        assert depths.shape[1] >= total
        ordered = depths.data_ptr(), depths.stride(0) * 8
    slots = torch.empty(rows, nodes, width, dtype=torch.int32, device="cpu")
    counts = slots.new_empty(rows, nodes)
    bounds = slots.new_empty(rows, 2)
    arguments = SlotListArguments(
        0, 0, rows, nodes, width, total, seen.data_ptr(), seen.stride(0), seen.stride(1), starts.data_ptr(),
        *ordered, slots.data_ptr(), counts.data_ptr(), bounds.data_ptr(),
    )  # fmt: skip
    compiled()[1](arguments, rows * nodes * width, rows)
    return SlotPaths(slots, counts, bounds, max(end - first for first, end in bounds.tolist()), total)


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernel supports these tensors. Only dtype and layout decide it, never the number of nodes,
    rows or slots, which would change bits in the middle of a text."""
    same = query.dtype in FLOATS and query.dtype == key.dtype == value.dtype
    return same and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1


def attend(
    paths: SlotPaths,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    prompt_part: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend with query [R, H * G, n, E] to the listed slots of key and value [R, H, S, E]. Return [R, n, H * G, E].

    prompt_part: the result of attention over other slots, [R, H, m, E] with m at least G * n, and its natural log-sums
    [R, H, m] float32. sinks: [H * G]. bias: [R or 1, H * G, n, S].
    """
    rows, query_heads, nodes, dim = query.shape
    heads, out_dim, unit = key.shape[1], value.shape[3], query.element_size()
    groups = query_heads // heads
    # the kernel checks none of this
    assert (len(key), len(value), value.shape[1], key.shape[3]) == (rows, rows, heads, dim)
    assert paths.slots.shape[:2] == (rows, nodes)
    assert paths.total <= min(key.shape[2], value.shape[2])
    out = recording.empty(rows, nodes, query_heads, out_dim, dtype=query.dtype)
    work = rows * query_heads * nodes * paths.span * (dim + out_dim)
    threads = torch.get_num_threads()
    blocks = 1
    if work > SMALL and rows * heads < 2 * threads and groups * nodes >= FEW:
        blocks = min(nodes, -(-2 * threads // (rows * heads)))
    block = -(-nodes // blocks)
    width = -(-paths.span // LANES) * LANES
    wide, stride = -(-out_dim // LANES) * LANES, width | LANES
    numbers = dim * stride + width * wide + -(-2 * dim // LANES) * LANES + 4 * stride + 2 * wide
    scratch = recording.empty(threads, numbers, dtype=torch.float32)
    joined: tuple[int, ...] = (0,) * 8
    if prompt_part is not None:
        part, sums = prompt_part
        assert (part.dtype, part.stride(-1), sums.dtype) == (query.dtype, 1, torch.float32)
        assert (part.shape[:2], part.shape[3], sums.shape) == ((rows, heads), out_dim, part.shape[:3])
        assert part.shape[2] >= groups * nodes
        joined = (
            part.data_ptr(), *(step * unit for step in part.stride()[:3]),
            sums.data_ptr(), *(step * 4 for step in sums.stride()),
        )  # fmt: skip
    sinks = None if sinks is None else sinks.to(torch.float32).reshape(query_heads).contiguous()
    biased: tuple[int, ...] = (0,) * 4
    if bias is not None:
        assert len(bias) in (1, rows)
        bias = bias.to(torch.float32).expand(-1, query_heads, nodes, -1).contiguous()
        assert bias.shape[3] >= paths.total
        step = bias.stride()
        biased = bias.data_ptr(), step[0] * 4 * (len(bias) > 1), step[1] * 4, step[2] * 4
    arguments = AttentionArguments(
        0, 0, rows * heads * blocks, heads, groups, nodes, dim, out_dim, blocks, block,
        query.data_ptr(), *(step * unit for step in query.stride()[:3]),
        key.data_ptr(), *(step * unit for step in key.stride()[:3]),
        value.data_ptr(), *(step * unit for step in value.stride()[:3]),
        out.data_ptr(), paths.slots.data_ptr(), paths.counts.data_ptr(), paths.bounds.data_ptr(), paths.slots.shape[2],
        *joined, 0 if sinks is None else sinks.data_ptr(), *biased,
        scratch.data_ptr(), scratch.stride(0) * 4, unit == 2, scale, softcap or 0.0,
    )  # fmt: skip
    kept = [tensor for tensor in (sinks, bias) if tensor is not None]
    recording.launch(compiled()[0], arguments, work, rows * heads * blocks, *kept)
    return out


@functools.cache
def compiled() -> list[CpuKernel]:
    """Return the kernels, made at the first call."""
    return kernels("attention", "attend", "list_slots")
