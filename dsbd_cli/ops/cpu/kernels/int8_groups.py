"""The kernels of int8_groups.py in numba: they make groups of bytes, and multiply them.

A block of COLUMNS outputs is stored group by group. A group of GROUP inputs has eight lines of words. A word of line l
holds the inputs 4 l .. 4 l + 3 of its column, as bytes. Scales and offsets of the columns follow, in float16.

Addresses are int64. Nothing checks them here; int8_groups.py does.
"""

from __future__ import annotations

from numba import njit, types

from dsbd_cli.ops.cpu.blocks import SPARE
from dsbd_cli.ops.cpu.int8 import LEVELS as MOST
from dsbd_cli.ops.cpu.int8 import SMALLEST
from dsbd_cli.ops.cpu.int8_groups import GROUP_BYTES, LAYOUT, ZERO
from dsbd_cli.ops.cpu.kernels.blocks import unpack_row
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.int4 import adding_up, finish, store_factors
from dsbd_cli.ops.cpu.kernels.int8 import (
    OUTLIER_WORDS,
    W_FORMS,
    W_INPUTS,
    W_ITEMS,
    W_KEPT,
    W_NARROW,
    W_OUT,
    W_OUTLIER_COUNT,
    W_OUTLIER_WEIGHTS,
    W_OUTLIERS,
    W_ROWS,
    W_SCALES,
    W_SPARE,
    W_SPARE_BYTES,
    W_TAKEN,
    W_THREADS,
    add_up_outliers,
    magnitude,
    store_bytes,
)
from dsbd_cli.ops.cpu.kernels.simd import (
    CHUNK,
    COLUMNS,
    LANES,
    LINE,
    ROUND,
    WORD,
    add,
    divide,
    fma,
    get_f32,
    get_i64,
    larger,
    largest,
    load_bf16,
    load_f32,
    mul,
    pack_lines,
    product,
    put_f32,
    put_i64,
    splat,
    sub,
    take,
    total,
)
from dsbd_cli.ops.quantized_weight import GROUP

compiled = KernelCompiler("layers of bytes in groups", seconds=3, layout=LAYOUT)

add_up = adding_up("bytes")


@njit(error_model="numpy")
def add_up_and_finish(at, block, first, count, sums):
    outlier_sums = sums + get_i64(at + CHUNK) * LINE
    add_up(at, block, first, count, sums)
    add_up_outliers(at, block, first, count, get_i64(at + OUTLIER_WORDS), outlier_sums)
    finish(at, block, first, count, sums, outlier_sums)


share_out = product(add_up_and_finish)


@compiled.addressed
def multiply(at):
    """Compute [rows, outputs] as int4's kernel does."""
    share_out(at)


@njit(error_model="numpy")
def quantize_group(row, narrow, kept, levels):
    """Quantize a group of a row to bytes 1 .. 255, rounded half to even. Return its scale, NaN if a weight is NaN or
    infinite."""
    unit = types.int64(2) if narrow else types.int64(WORD)
    largest_magnitude = nan_sum = splat(types.float32(0))
    for i in range(0, GROUP, LANES):
        value = load_bf16(row + i * unit) if narrow else load_f32(row + i * unit)
        largest_magnitude = larger(magnitude(mul(value, load_f32(kept + i * WORD))), largest_magnitude)
        nan_sum = fma(value, splat(types.float32(0)), nan_sum)
    scale = max(largest(largest_magnitude) / types.float32(MOST), types.float32(SMALLEST))
    wide, nearest, zero = splat(scale), splat(types.float32(ROUND)), splat(types.float32(ZERO))
    for i in range(0, GROUP, LANES):
        value = load_bf16(row + i * unit) if narrow else load_f32(row + i * unit)
        whole = sub(add(divide(mul(value, load_f32(kept + i * WORD)), wide), nearest), nearest)
        store_bytes(levels + i, add(whole, zero))
    return scale + total(nan_sum)


@njit(error_model="numpy")
def unpacked(at, number, row, spare):
    """Return a row in float32, which is unpacked if it is in blocks of a GGUF file. Then the weights of its outliers
    are written."""
    forms, count = get_i64(at + W_FORMS), get_i64(at + W_OUTLIER_COUNT)
    if forms == 0 or row == 0:
        return row
    out = spare + SPARE
    unpack_row(row, get_i64(forms + number * 8), get_i64(at + W_INPUTS), spare, out)
    for j in range(count):
        value = get_f32(out + get_i64(get_i64(at + W_OUTLIERS) + j * 8) * WORD)
        put_f32(get_i64(at + W_OUTLIER_WEIGHTS) + (number * count + j) * WORD, value)
    return out


@compiled.addressed
def quantize_weights(at):
    """Quantize weights, a block of COLUMNS rows at a time, and pack them as groups."""
    inputs, narrow, kept = get_i64(at + W_INPUTS), get_i64(at + W_NARROW), get_i64(at + W_KEPT)
    groups, unit = inputs // GROUP, types.int64(2) if narrow else types.int64(WORD)
    # memory of this thread: bytes of COLUMNS rows, scales and offsets [groups, 2, COLUMNS], and a row that is unpacked
    spare = get_i64(at + W_SPARE) + take(at + W_THREADS) * get_i64(at + W_SPARE_BYTES)
    factors = spare + COLUMNS * inputs
    while True:
        block = take(at + W_TAKEN)
        if block >= get_i64(at + W_ITEMS):
            return
        rows, out = get_i64(at + W_ROWS) + block * COLUMNS * 8, get_i64(at + W_OUT) + block * groups * GROUP_BYTES
        for column in range(COLUMNS):
            target = spare + column * inputs
            row = unpacked(at, block * COLUMNS + column, get_i64(rows + column * 8), factors + groups * 2 * LINE)
            for group in range(groups):
                scale, first = types.float32(0), group * GROUP
                if row != 0:
                    scale = quantize_group(row + first * unit, narrow, kept + first * WORD, target + first)
                factor = factors + group * 2 * LINE + column * WORD
                put_f32(factor, scale)
                put_f32(factor + LINE, scale * types.float32(-ZERO))
            put_i64(rows + column * 8, target)
        for group in range(groups):
            pack_lines(rows, GROUP // 4, out + group * GROUP_BYTES)
            for column in range(COLUMNS):
                put_i64(rows + column * 8, get_i64(rows + column * 8) + GROUP)
        store_factors(factors, groups, out, get_i64(at + W_SCALES) + block * LINE, GROUP_BYTES)
