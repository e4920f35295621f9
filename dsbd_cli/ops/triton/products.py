"""Products x W^T whose rows do not depend on each other: the tiles and the order of every sum are fixed by the weight.

A library chooses tiles, and the number of parts that a sum over K is split into, by the number of rows as well. So the
last bits of a row change with the other rows. Here a tile always has ROWS rows, of which some may be missing. The
number of parts depends on the weight alone, and the parts are summed in their order.

Letters: M rows (nodes of all requests), K inner width, N outer width, P parts of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsbd_cli.ops.triton import Arguments, KernelCheck, tried_dtypes

ROWS = 64  # of a tile, however many rows there are: a usual forest fits into one tile, which reads the weights once
COLUMNS = 64
INNER = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
PROGRAMS = 256  # wanted per tile of rows: the largest GPUs run some 130 blocks at a time
LEAST_STEPS = 8  # of INNER numbers in a part
MOST_ROWS = 2048  # at a time, because the partial sums of a long prompt would fill the memory
SUMMED = 1024  # numbers that one program adds up


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, weight, bias, out, rows, outer, inner, steps, BIASED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one part of the product. WHOLE: it is the only part, so add the bias and round the result."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    k = part * steps * INNER + tl.arange(0, INNER)
    there, kept = row < rows, column < outer
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in tl.range(0, steps):
        inside = k < inner
        a = tl.load(x + row[:, None] * inner + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight + column[None, :] * inner + k[:, None], mask=kept[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        k += INNER
    real = there[:, None] & kept[None, :]
    offset = row[:, None] * outer + column[None, :]
    if WHOLE:
        if BIASED:
            total += tl.load(bias + column, mask=kept, other=0.0).to(tl.float32)[None, :]
        tl.store(out + offset, total.to(out.dtype.element_ty), mask=real)
    else:
        tl.store(out + part.to(tl.int64) * rows * outer + offset, total, mask=real)


@triton.jit(do_not_specialize=["count"])
def summed_kernel(parts, bias, out, count, outer, PARTS: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the parts of `count` numbers, the first part first, and the bias."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(parts + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * count.to(tl.int64) + at, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + at % outer, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def parts(outer: int, inner: int, dtype: torch.dtype) -> int:
    """Return the number of parts P for a weight [N, K], with which one tile of rows keeps a GPU busy."""
    steps = triton.cdiv(inner, INNER[dtype])
    wanted = triton.cdiv(PROGRAMS, triton.cdiv(outer, COLUMNS))
    return max(1, min(wanted, steps // LEAST_STEPS))


@torch.library.custom_op("dsbd::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + bias: x [..., K], weight [N, K], bias [N] -> [..., N]."""
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    flat, result = x.reshape(-1, weight.shape[1]).contiguous(), out.view(-1, weight.shape[0])
    with torch.cuda.device_of(x):
        for first in range(0, len(flat), MOST_ROWS):
            _launch(flat[first : first + MOST_ROWS], weight, bias, result[first : first + MOST_ROWS])
    return out


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Compute `linear` of x [M, K] into out [M, N]."""
    (rows, inner), outer = x.shape, len(weight)
    count, step = parts(outer, inner, x.dtype), INNER[x.dtype]
    partial = out if count == 1 else x.new_empty((count, rows, outer), dtype=torch.float32)
    bias_or_weight = weight if bias is None else bias
    linear_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(outer, COLUMNS), count)](
        *(x, weight, bias_or_weight, partial, rows, outer, inner, triton.cdiv(triton.cdiv(inner, step), count)),
        BIASED=bias is not None,
        WHOLE=count == 1,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        INNER=step,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )
    if count > 1:
        summed_kernel[(triton.cdiv(rows * outer, SUMMED),)](
            *(partial, bias_or_weight, out, rows * outer, outer),
            PARTS=count,
            BIASED=bias is not None,
            BLOCK=SUMMED,
            num_warps=4,
            enable_fp_fusion=False,
        )


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `linear` in plain torch: the specification."""
    return torch.nn.functional.linear(x, weight, bias)


def linear_fits(weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the kernel supports this weight [N, K] and bias [N]. K must be a multiple of 16, so that rows
    are read in steps of 16 bytes."""
    same = bias is None or (bias.dtype == weight.dtype and bias.is_contiguous())
    whole = weight.ndim == 2 and weight.is_contiguous() and weight.shape[1] % 16 == 0
    return whole and weight.dtype in INNER and same


def _cases(generator: torch.Generator, device: torch.device) -> Iterator[Arguments]:
    for dtype in tried_dtypes(device):
        for rows, inner, outer, biased in ((3, 64, 48, False), (70, 608, 130, True), (5, 1104, 40, True)):
            x = torch.randn(rows, inner, generator=generator)
            weight = torch.randn(outer, inner, generator=generator) / inner**0.5
            bias = torch.randn(outer, generator=generator).to(dtype).to(device) if biased else None
            yield x.to(dtype).to(device), weight.to(dtype).to(device), bias


KERNELS = (KernelCheck("linear", linear, linear_reference, _cases),)
