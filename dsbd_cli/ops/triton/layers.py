"""Kernels for what comes between the products of a decoder layer: norms, rotation with the write to the cache, and
gated activation. ops/reference.py specifies what they compute.

Every program computes one row, or one head of one row, in an order that is fixed by the width of the row. So its bits
do not depend on how many rows there are.

Letters: m rows (nodes of all requests), H hidden width, I inner width, Q query heads, K kv heads, E head dim, P width
of a row or of half a head, padded to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsbd_cli.ops import reference
from dsbd_cli.ops.reference import Norm
from dsbd_cli.ops.triton import Arguments, KernelCheck, tried_dtypes

WIDEST = 16384  # numbers of a row, which one program normalises
GATE_BLOCK = 1024
MOST_POWER = tl.constexpr(80.0)  # of e: a number divided by a larger power is practically zero
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# Root mean square norm


@triton.jit
def norm_kernel(
    x, more, weight, out, summed, width, eps, ADDS: tl.constexpr, UNIT_OFFSET: tl.constexpr, P: tl.constexpr
):
    """Divide a row of x (+ more) by its root mean square, multiply by weight. UNIT_OFFSET: by 1 + weight in float32."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, P)
    inside = at < width
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if ADDS:
        value = (value.to(tl.float32) + tl.load(more + row + at, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(summed + row + at, value, mask=inside)
    wide = value.to(tl.float32)
    mean = tl.div_rn(tl.sum(wide * wide, 0), width.to(tl.float32))
    wide = wide * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    scale = tl.load(weight + at, mask=inside, other=0.0)
    if UNIT_OFFSET:
        result = (wide * (1.0 + scale.to(tl.float32))).to(value.dtype)
    else:
        result = (scale.to(tl.float32) * wide.to(value.dtype).to(tl.float32)).to(value.dtype)
    tl.store(out + row + at, result, mask=inside)


def norm(rms: Norm, x: Tensor, more: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute reference.norm by a kernel, or a wide norm by torch."""
    if rms.wide:
        return reference.norm(rms, x, more)
    made: tuple[Tensor, Tensor] = norm_op(x, more, rms.weight, rms.eps, rms.unit_offset)
    return made


@torch.library.custom_op("dsbd::norm", mutates_args=())
def norm_op(x: Tensor, more: Tensor | None, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor]:
    """Compute `norm` with the parts of a norm."""
    width = x.shape[-1]
    x = x.contiguous()
    more = None if more is None else more.contiguous()
    out, summed = torch.empty_like(x), x.new_empty(0) if more is None else torch.empty_like(x)
    padded = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        norm_kernel[(x.numel() // width,)](
            *(x, x if more is None else more, weight, out, summed, width, eps),
            ADDS=more is not None,
            UNIT_OFFSET=unit_offset,
            P=padded,
            num_warps=min(16, max(4, padded // 512)),
            enable_fp_fusion=False,
        )
    return out, summed


@norm_op.register_fake
def _(x: Tensor, more: Tensor | None, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if more is None else torch.empty_like(x)


# Gated activation


@triton.jit
def gated_kernel(gate_up, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply silu of the first half of a row by the second half. GELU: gelu, whose tanh is computed as a logistic."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    inner = wide
    if GELU:
        inner = 1.5957691216057308 * (wide + 0.044715 * (wide * wide * wide))  # twice the root of 2 / pi
    active = tl.div_rn(wide, 1.0 + tl.exp(tl.minimum(-inner, MOST_POWER))).to(gate.dtype)
    tl.store(out + row * width + at, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


@torch.library.custom_op("dsbd::gated", mutates_args=())
def gated(gate_up: Tensor, gelu: bool) -> Tensor:
    """Compute reference.gated by a kernel."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    grid = (out.numel() // width, triton.cdiv(width, GATE_BLOCK))
    with torch.cuda.device_of(gate_up):
        gated_kernel[grid](gate_up, out, width, GELU=gelu, BLOCK=GATE_BLOCK, num_warps=4, enable_fp_fusion=False)
    return out


@gated.register_fake
def _(gate_up: Tensor, gelu: bool) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


# Rotation of queries and keys, and the write of keys and values to their slots


@triton.jit
def rotate_kernel(
    qkv, cos, sin, slots, out, keys, values, query_norm, key_norm, nodes, angle_row, eps, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr, UNIT_OFFSET: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Process one head of one row: rotate a query, rotate a key and write it to its slot, or write a value. NORMS:
    queries and keys are normalised first, as by norm_kernel."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim: tl.constexpr = 2 * HALF
    at = tl.arange(0, P)
    inside = at < HALF
    start = qkv + (row * (QUERIES + 2 * KEYS) + head) * dim + at
    first = tl.load(start, mask=inside, other=0.0)
    second = tl.load(start + HALF, mask=inside, other=0.0)
    if head < QUERIES + KEYS:
        angle = (row // nodes) * angle_row + (row % nodes) * dim + at
        kind = first.dtype
        c1 = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        c2 = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        s1 = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        s2 = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        x1, x2 = first.to(tl.float32), second.to(tl.float32)
        if NORMS:
            root = tl.sqrt_rn(tl.div_rn(tl.sum(x1 * x1, 0) + tl.sum(x2 * x2, 0), 2.0 * HALF) + eps)
            scale = tl.div_rn(1.0, root)
            if head < QUERIES:
                w1 = tl.load(query_norm + at, mask=inside, other=0.0).to(tl.float32)
                w2 = tl.load(query_norm + HALF + at, mask=inside, other=0.0).to(tl.float32)
            else:
                w1 = tl.load(key_norm + at, mask=inside, other=0.0).to(tl.float32)
                w2 = tl.load(key_norm + HALF + at, mask=inside, other=0.0).to(tl.float32)
            if UNIT_OFFSET:
                x1 = (x1 * scale * (1.0 + w1)).to(kind).to(tl.float32)
                x2 = (x2 * scale * (1.0 + w2)).to(kind).to(tl.float32)
            else:
                x1 = (w1 * (x1 * scale).to(kind).to(tl.float32)).to(kind).to(tl.float32)
                x2 = (w2 * (x2 * scale).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        turned_one = ((x1 * c1).to(kind).to(tl.float32) + (-x2 * s1).to(kind).to(tl.float32)).to(kind)
        turned_two = ((x2 * c2).to(kind).to(tl.float32) + (x1 * s2).to(kind).to(tl.float32)).to(kind)
        if head < QUERIES:
            to = out + (((row // nodes) * QUERIES + head) * nodes + row % nodes) * dim + at
            tl.store(to, turned_one, mask=inside)
            tl.store(to + HALF, turned_two, mask=inside)
        else:
            target = keys + (tl.load(slots + row) * KEYS + head - QUERIES) * dim + at
            tl.store(target, turned_one, mask=inside)
            tl.store(target + HALF, turned_two, mask=inside)
    else:
        target = values + (tl.load(slots + row) * KEYS + head - QUERIES - KEYS) * dim + at
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)


def rotate(*tensors: Tensor, norms: tuple[Norm, Norm] | None = None) -> Tensor:
    """Compute reference.rotate by a kernel."""
    parts = () if norms is None else (*(norm.weight for norm in norms), norms[0].eps, norms[0].unit_offset)
    made: Tensor = rotate_op(*tensors, *parts)
    return made


@torch.library.custom_op("dsbd::rotate", mutates_args=("keys", "values"))
def rotate_op(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
) -> Tensor:
    """Compute `rotate` with the parts of its norms."""
    rows, nodes, width = qkv.shape
    kv_heads, dim = keys.shape[-2:]
    heads = width // dim - 2 * kv_heads
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    out = qkv.new_empty(rows, heads, nodes, dim)
    with torch.cuda.device_of(qkv):
        rotate_kernel[(rows * nodes, heads + 2 * kv_heads)](
            *(qkv, cos, sin, slots, out, keys, values, qkv if query_norm is None else query_norm),
            *(qkv if key_norm is None else key_norm, nodes, 0 if cos.shape[0] == 1 else nodes * dim, eps),
            QUERIES=heads,
            KEYS=kv_heads,
            HALF=dim // 2,
            NORMS=query_norm is not None,
            UNIT_OFFSET=unit_offset,
            P=triton.next_power_of_2(dim // 2),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out


@rotate_op.register_fake
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor, *more: object, **named: object
) -> Tensor:
    kv_heads, dim = keys.shape[-2:]
    return qkv.new_empty(qkv.shape[0], qkv.shape[-1] // dim - 2 * kv_heads, qkv.shape[1], dim)


# Random calls


def _real(generator: torch.Generator, device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def _norm_cases(generator: torch.Generator, device: torch.device) -> Iterator[Arguments]:
    for dtype in tried_dtypes(device):
        for rows, width, adds, unit_offset in ((3, 64, True, False), (1, 96, False, False), (5, 640, True, True)):
            x = _real(generator, device, dtype, rows, width) * 3
            more = _real(generator, device, dtype, rows, width) if adds else None
            yield Norm(_real(generator, device, dtype, width), 1e-5, unit_offset), x, more


def _gated_cases(generator: torch.Generator, device: torch.device) -> Iterator[Arguments]:
    for dtype in tried_dtypes(device):
        for rows, width in ((2, 48), (4, 1400)):
            for gelu in (False, True):
                yield _real(generator, device, dtype, rows, 2 * width) * 4, gelu


def _rotate_cases(generator: torch.Generator, device: torch.device) -> Iterator[Arguments]:
    for dtype in tried_dtypes(device):
        for rows, nodes, heads, kv_heads, dim in ((1, 3, 2, 1, 16), (2, 5, 4, 2, 80), (3, 1, 4, 4, 64)):
            qkv = _real(generator, device, dtype, rows, nodes, (heads + 2 * kv_heads) * dim)
            angles = torch.randn(1 if rows == 2 else rows, nodes, dim, generator=generator)
            cos, sin = angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)
            slots = torch.randperm(rows * 11, generator=generator)[: rows * nodes].to(device)
            planes = [_real(generator, device, dtype, rows, 11, kv_heads, dim) for _ in range(2)]
            yield qkv, cos, sin, slots, *planes
            norms = [Norm(_real(generator, device, dtype, dim), 1e-5, rows == 2) for _ in range(2)]
            yield qkv, cos, sin, slots, *planes, (norms[0], norms[1])


def _rotated(
    how: Callable[..., Tensor],
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Norm, Norm] | None = None,
) -> tuple[Tensor, ...]:
    keys, values = keys.clone(), values.clone()
    return how(qkv, cos, sin, slots, keys, values, norms=norms), keys, values


KERNELS = (
    KernelCheck("norm", norm, reference.norm, _norm_cases),
    KernelCheck("gated", gated, reference.gated, _gated_cases),
    KernelCheck("rotate", partial(_rotated, rotate), partial(_rotated, reference.rotate), _rotate_cases),
)
