"""Attention of a packed forest over a long prompt, in two launches: one over parts of the prompt, one over the suffix.

The first slots of a row hold its prompt, which every node sees, so no mask is read there. They are cut into parts of
SPLIT slots, by place and not by the number of nodes, so that the bits that a part gives a node do not depend on other
nodes. The parts are joined in their order. All slots behind the prompt are the suffix, which a mask selects from. The
order of its slots depends on the drafts. Its sums are in float64, so that this order does not change the result, as in
models/attention/forest.py. Where no bits are promised they are in float32, and all slots that every node sees may count
as the prompt.

Letters: R rows, Q query heads, H kv heads, G = Q / H, n nodes, m = G n queries of a kv head, S slots, E head dim,
P parts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsbd_cli.ops.triton import Arguments, KernelCheck, tried_dtypes
from dsbd_cli.ops.triton.distribution import NEG_INF

SPLIT = 512  # slots of a part
TILE = 64  # queries of a tile over the prompt
BLOCK = 32  # slots that a tile takes at a time
SUFFIX_TILE = 16  # queries of a tile over the suffix
COLUMNS = 16  # of the values that one program of the suffix adds up
# head dims: wider heads do not fit into the registers
WIDEST = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}


@triton.jit(do_not_specialize=["heads", "queries", "slots", "parts"])
def prompt_kernel(
    q, k, v, prompt, o_sums, o_best, o_mass, scale, heads, queries, slots, dim, parts, k_row, k_head, k_slot, v_row,
    v_head, v_slot, SPLIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Compute one part of a row's prompt for a tile of the queries of one kv head: the sum of the weighted values, the
    largest score and the sum of the weights."""
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    part = tl.program_id(2)
    first = part * SPLIT
    last = tl.minimum(first + SPLIT, tl.minimum(tl.load(prompt + row), slots))  # a free row may have any number
    if first < last:
        i = tl.program_id(1) * TILE + tl.arange(0, TILE)
        e = tl.arange(0, E)
        there, wide = i < queries, e < dim
        real = there[:, None] & wide[None, :]
        asked = tl.load(q + (program * queries + i)[:, None] * dim + e[None, :], mask=real, other=0.0)
        best = tl.full((TILE,), NEG_INF, tl.float32)
        mass = tl.zeros((TILE,), tl.float32)
        sums = tl.zeros((TILE, E), tl.float32)
        for start in tl.range(first, last, BLOCK):
            s = start + tl.arange(0, BLOCK)
            inside = s < last
            keys = k + row * k_row + head * k_head + s[None, :].to(tl.int64) * k_slot + e[:, None]
            held = tl.load(keys, mask=inside[None, :] & wide[:, None], other=0.0)
            scores = tl.where(inside[None, :], tl.dot(asked, held, input_precision="ieee") * scale, NEG_INF)
            top = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp(scores - top[:, None])
            old = tl.exp(best - top)
            values = v + row * v_row + head * v_head + s[:, None].to(tl.int64) * v_slot + e[None, :]
            value = tl.load(values, mask=inside[:, None] & wide[None, :], other=0.0)
            sums = sums * old[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            mass = mass * old + tl.sum(weights, 1)
            best = top
        at = (program * parts + part) * queries + i
        tl.store(o_sums + at[:, None] * dim + e[None, :], sums, mask=real)
        tl.store(o_best + at, best, mask=there)
        tl.store(o_mass + at, mass, mask=there)


@triton.jit(do_not_specialize=["heads", "queries", "nodes", "slots", "parts"])
def suffix_kernel(
    q, k, v, seen, prompt, p_sums, p_best, p_mass, out, scale, heads, queries, nodes, slots, dim, parts, k_row, k_head,
    k_slot, v_row, v_head, v_slot, SPLIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add up the parts of the prompt, in their order, and then the suffix, for a tile of the queries of one kv head and
    some columns of the values. WIDE: type of the sums."""
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    e = tl.arange(0, E)
    there, wide = i < queries, e < dim
    real = there[:, None] & wide[None, :]
    begin = tl.minimum(tl.load(prompt + row), slots)
    best = tl.full((TILE,), NEG_INF, tl.float32)
    mass = tl.zeros((TILE,), WIDE)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    own_columns = column < dim
    mine = there[:, None] & own_columns[None, :]
    sums = tl.zeros((TILE, COLUMNS), WIDE)
    for part in tl.range(0, tl.cdiv(begin, SPLIT)):
        at = (program * parts + part) * queries + i
        highest = tl.load(p_best + at, mask=there, other=0.0)
        top = tl.maximum(best, highest)
        old = tl.exp((best - top).to(WIDE))
        share = tl.exp((highest - top).to(WIDE))
        own = tl.load(p_sums + at[:, None] * dim + column[None, :], mask=mine, other=0.0).to(WIDE)
        sums = sums * old[:, None] + own * share[:, None]
        mass = mass * old + tl.load(p_mass + at, mask=there, other=0.0).to(WIDE) * share
        best = top
    asked = tl.load(q + (program * queries + i)[:, None] * dim + e[None, :], mask=real, other=0.0)
    sight = seen + (row * nodes + i % nodes)[:, None] * slots
    for start in tl.range(begin, slots, BLOCK):
        s = start + tl.arange(0, BLOCK)
        inside = s < slots
        keys = k + row * k_row + head * k_head + s[None, :].to(tl.int64) * k_slot + e[:, None]
        held = tl.load(keys, mask=inside[None, :] & wide[:, None], other=0.0)
        sees = tl.load(sight + s[None, :], mask=there[:, None] & inside[None, :], other=0) != 0
        scores = tl.where(sees, tl.dot(asked, held, input_precision="ieee") * scale, NEG_INF)
        top = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(top > NEG_INF, top, 0.0)
        weights = tl.exp((scores - safe[:, None]).to(WIDE))
        old = tl.exp((best - safe).to(WIDE))
        values = v + row * v_row + head * v_head + s[:, None].to(tl.int64) * v_slot + column[None, :]
        value = tl.load(values, mask=inside[:, None] & own_columns[None, :], other=0.0).to(WIDE)
        sums = sums * old[:, None] + tl.sum(weights[:, :, None] * value[None, :, :], 1)
        mass = mass * old + tl.sum(weights, 1)
        best = top
    result = sums / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(out + (program * queries + i)[:, None] * dim + column[None, :], result.to(out.dtype.element_ty), mask=mine)


@torch.library.custom_op("dsbd::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, prompt: Tensor, scale: float, exact: bool
) -> Tensor:
    """Attend with query [R, Q, n, E] to key and value [R, H, S, E], whose last dimension has no gaps: [R, Q, n, E].

    prompt [R] int64: the number of leading slots, which all nodes see. seen [R, n, S] bool: which of the slots behind
    them each node sees. A node that sees nothing gets zeros. exact: sums over the suffix are in float64.
    """
    rows, query_heads, nodes, dim = query.shape
    heads, slots = key.shape[1:3]
    queries = query_heads // heads * nodes
    parts = triton.cdiv(slots, SPLIT)
    query, seen = query.contiguous(), seen.contiguous()
    out = torch.empty_like(query)
    sums = query.new_empty((rows * heads, parts, queries, dim), dtype=torch.float32)
    best, mass = query.new_empty((2, rows * heads, parts, queries), dtype=torch.float32).unbind(0)
    strides = (*key.stride()[:3], *value.stride()[:3])
    constants = {"SPLIT": SPLIT, "BLOCK": BLOCK, "E": max(16, triton.next_power_of_2(dim))}
    with torch.cuda.device_of(query):
        prompt_kernel[(rows * heads, triton.cdiv(queries, TILE), parts)](
            *(query, key, value, prompt, sums, best, mass, scale, heads, queries, slots, dim, parts, *strides),
            **constants,
            TILE=TILE,
            num_warps=8,
            num_stages=2,
            enable_fp_fusion=False,
        )
        suffix_kernel[(rows * heads, triton.cdiv(queries, SUFFIX_TILE), triton.cdiv(dim, COLUMNS))](
            *(query, key, value, seen, prompt, sums, best, mass, out, scale, heads, queries, nodes, slots, dim, parts),
            *strides,
            **constants,
            TILE=SUFFIX_TILE,
            COLUMNS=COLUMNS,
            WIDE=tl.float64 if exact else tl.float32,
            num_warps=8,
            num_stages=1,
            enable_fp_fusion=False,
        )
    return out


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, prompt: Tensor, scale: float, exact: bool) -> Tensor:
    return query.new_empty(query.shape)


def attention_reference(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, prompt: Tensor, scale: float, exact: bool
) -> Tensor:
    """Compute `attention` in plain torch: the specification. Its sums are in float64 even where not `exact`."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(groups, 1).to(torch.float64) for tensor in (key, value))
    scores = query.to(torch.float64) @ keys.transpose(2, 3) * scale  # [R, Q, n, S]
    sees = seen | (torch.arange(key.shape[2], device=key.device) < prompt.view(-1, 1, 1))
    weights = torch.softmax(scores.masked_fill(~sees.unsqueeze(1), float("-inf")), -1).nan_to_num(nan=0.0)
    return (weights @ values).to(query.dtype)


def attention_fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernel supports these tensors: one dtype, keys and values of one shape, heads not too wide."""
    same = query.dtype == key.dtype == value.dtype and query.dtype in WIDEST
    return (
        same
        and key.shape == value.shape
        and key.shape[-1] <= WIDEST[query.dtype]
        and key.stride(-1) == 1
        and value.stride(-1) == 1
    )


def _cases(generator: torch.Generator, device: torch.device) -> Iterator[Arguments]:
    for dtype in tried_dtypes(device):
        for rows, nodes, heads, kv_heads, dim, slots in (
            (1, 3, 2, 1, 16, 40),
            (2, 5, 4, 2, 48, 600),
            (2, 1, 1, 1, 64, 33),
        ):
            query, keys, values = (
                torch.randn(*shape, generator=generator).to(dtype).to(device)
                for shape in ((rows, heads, nodes, dim), *((rows, slots + 3, kv_heads, dim),) * 2)
            )
            seen = torch.rand(rows, nodes, slots, generator=generator) < 0.4
            seen[:, :, -1] = True
            prompt = torch.tensor([slots - 20, 0][:rows])
            key, value = (tensor[:, :slots].transpose(1, 2) for tensor in (keys, values))
            for exact in (True, False):
                yield query, key, value, seen.to(device), prompt.to(device), dim**-0.5, exact


KERNELS = (KernelCheck("attention", attention, attention_reference, _cases),)
