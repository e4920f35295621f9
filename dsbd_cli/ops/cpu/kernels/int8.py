"""The kernels of int8.py in numba: they quantize inputs and weights, and multiply integers and outliers.

A product reads the weights once for a few rows, in the tiles of simd.py: lines of four integers per word, and lines of
the outliers, in float32 or in pairs of bfloat16. With matrix units amx.py has the tiles of integers. Sums of integers
are exact, and those of outliers go from the first to the last in float32. So the bits of a row do not depend on the
other rows, on the threads or on the processor.

Addresses are int64. Nothing checks them here; int8.py does.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from dsbd_cli.ops.cpu.int8 import LAYOUT, MULTIPLY, QUANTIZE_ROWS, QUANTIZE_WEIGHTS, SMALLEST, ZERO
from dsbd_cli.ops.cpu.int8 import LEVELS as MOST
from dsbd_cli.ops.cpu.kernels.amx import matrix_tile
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.simd import (
    BLOCKS,
    CHUNK,
    COLUMNS,
    LANES,
    LANES_TYPE,
    LINE,
    LINE_VECTORS,
    ROUND,
    VECTOR,
    WHOLES,
    WORD,
    add,
    clear_line,
    copy_line,
    divide,
    fma,
    get_bf16,
    get_f32,
    get_i64,
    larger,
    largest,
    load_bf16,
    load_f32,
    loaded,
    mul,
    operation,
    pack_lines,
    pointer,
    product,
    put_bf16,
    put_f32,
    put_i32,
    put_i64,
    splat,
    store_bf16,
    store_f32,
    sub,
    take,
    tile,
    total,
)
from dsbd_cli.ops.cpu.runtime import PRODUCT
from dsbd_cli.ops.processor import int8_tile
from dsbd_cli.ops.quantized_weight import GROUP

compiled = KernelCompiler("int8 layers", seconds=3, layout=LAYOUT)

# `at` is the address of an int8.QuantizeRowArguments, Int8Arguments or QuantizeWeightArguments, whose fields have these
# offsets.
(R_TAKEN, _, R_ITEMS, R_ROWS, R_SHARE, R_X, R_X_ROW, R_NARROW, R_INPUTS, R_KEPT, R_LEVELS, R_LEVELS_ROW, R_STEPS,
 R_OUTLIERS, R_OUTLIER_X, R_OUTLIER_ROW, R_OUTLIER_COUNT, R_ZERO, R_SUMS) = QUANTIZE_ROWS  # fmt: skip
(LEVELS, LEVELS_ROW, WEIGHTS, QUADS, PIECE, OFFSETS, SCALES, STEPS, OUTLIER_X, OUTLIER_WEIGHTS, OUTLIER_WORDS, BIAS,
 OUT, OUT_ROW, NARROW, TABLE) = MULTIPLY[len(PRODUCT) :]  # fmt: skip
(W_TAKEN, W_THREADS, W_ITEMS, W_ROWS, W_INPUTS, W_NARROW, W_KEPT, W_SCALES, W_SUMS, W_OUT, W_SPARE,
 W_SPARE_BYTES, W_FORMS, W_OUTLIERS, W_OUTLIER_COUNT, W_OUTLIER_WEIGHTS) = QUANTIZE_WEIGHTS  # fmt: skip
whole_tile = matrix_tile("int8") if int8_tile() == "amx" else tile(int8_tile() or "signs")
# outliers of bfloat16 lie in pairs, and are widened, which gives the same bits on all processors
float_tile, pair_tile = tile("float32"), tile("widened")


@operation(LANES_TYPE, types.int64)
def load_whole(builder: Any, address: Any) -> Any:
    """Load int32 numbers as float32."""
    return builder.sitofp(loaded(builder, address, WHOLES, WORD), VECTOR)


@operation(LANES_TYPE, LANES_TYPE)
def magnitude(builder: Any, value: Any) -> Any:
    clear = ir.Constant(WHOLES, [0x7FFFFFFF] * LANES)
    return builder.bitcast(builder.and_(builder.bitcast(value, WHOLES), clear), VECTOR)


@operation(types.void, types.int64, LANES_TYPE)
def store_bytes(builder: Any, address: Any, value: Any) -> Any:
    """Store whole numbers in -127 .. 255 as bytes."""
    kind = ir.VectorType(ir.IntType(8), LANES)
    builder.store(builder.trunc(builder.fptosi(value, WHOLES), kind), pointer(builder, address, kind), align=1)


@operation(LANES_TYPE, LANES_TYPE)
def whole_part(builder: Any, value: Any) -> Any:
    """Return positive numbers without their fractions."""
    return builder.sitofp(builder.fptosi(value, WHOLES), VECTOR)


@njit(error_model="numpy")
def quantize_inputs(x, narrow, kept, inputs, zero, levels):
    """Quantize inputs of a row with one step. Return the step and the sum of the integers."""
    unit = types.int64(2) if narrow else types.int64(WORD)
    half, shift = splat(types.float32(ZERO + 0.5)), splat(types.float32(ZERO - zero))
    largest_magnitude = nan_sum = summed = splat(types.float32(0))
    i = types.int64(0)
    while i < inputs:
        value = load_bf16(x + i * unit) if narrow else load_f32(x + i * unit)
        # NaN and infinity times 0 are NaN, which makes the whole row NaN
        nan_sum = fma(value, splat(types.float32(0)), nan_sum)
        largest_magnitude = larger(magnitude(mul(value, load_f32(kept + i * WORD))), largest_magnitude)
        i += LANES
    step = max(largest(largest_magnitude) / types.float32(MOST), types.float32(SMALLEST))
    step += total(nan_sum)
    wide, i = splat(step), types.int64(0)
    while i < inputs:
        value = load_bf16(x + i * unit) if narrow else load_f32(x + i * unit)
        level = whole_part(add(divide(mul(value, load_f32(kept + i * WORD)), wide), half))
        store_bytes(levels + i, sub(level, shift))
        summed = add(summed, level)
        i += LANES
    return step, total(summed) - types.float32(inputs * ZERO)


@compiled.addressed
def quantize_rows(at):
    """Quantize rows, and write their outliers. Zeros must fill up the inputs to a multiple of LANES."""
    inputs, narrow, kept = get_i64(at + R_INPUTS), get_i64(at + R_NARROW), get_i64(at + R_KEPT)
    unit, zero = types.int64(2) if narrow else types.int64(WORD), get_i64(at + R_ZERO)
    while True:
        item = take(at + R_TAKEN)
        if item >= get_i64(at + R_ITEMS):
            return
        share = get_i64(at + R_SHARE)
        for row in range(item * share, min((item + 1) * share, get_i64(at + R_ROWS))):
            x = get_i64(at + R_X) + row * get_i64(at + R_X_ROW)
            levels = get_i64(at + R_LEVELS) + row * get_i64(at + R_LEVELS_ROW)
            groups, step = inputs // GROUP, types.float32(1)
            if get_i64(at + R_SUMS) == 0:
                step, _ = quantize_inputs(x, narrow, kept, inputs, zero, levels)
                groups = types.int64(0)
            for group in range(groups):
                first = group * GROUP
                own, summed = quantize_inputs(
                    x + first * unit, narrow, kept + first * WORD, GROUP, zero, levels + first
                )
                pair = get_i64(at + R_SUMS) + (row * groups + group) * 2 * WORD
                put_f32(pair, summed * own)
                put_f32(pair + WORD, own)
            put_f32(get_i64(at + R_STEPS) + row * WORD, step)
            outlier_x = get_i64(at + R_OUTLIER_X) + row * get_i64(at + R_OUTLIER_ROW)
            for j in range(get_i64(at + R_OUTLIER_COUNT)):
                address = x + get_i64(get_i64(at + R_OUTLIERS) + j * 8) * unit
                if narrow:
                    put_bf16(outlier_x + j * unit, get_bf16(address))
                else:
                    put_f32(outlier_x + j * WORD, get_f32(address))


@njit(error_model="numpy")
def add_up_outliers(at, block, first, count, words, outlier_sums):
    """Compute the sums [count, COLUMNS] of outliers."""
    for r in range(count):
        clear_line(outlier_sums + r * LINE)
    x, x_row = get_i64(at + OUTLIER_X) + first * words * WORD, words * WORD
    weights = get_i64(at + OUTLIER_WEIGHTS) + block * words * LINE
    if words == 0:
        return
    if get_i64(at + NARROW):
        pair_tile(count, x, x_row, weights, words, outlier_sums)
    else:
        float_tile(count, x, x_row, weights, words, outlier_sums)


@njit(error_model="numpy")
def add_up(at, block, first, count, quads, words, sums, outlier_sums):
    """Compute the sums [count, COLUMNS] of integers, and in `outlier_sums` those of outliers."""
    for r in range(count):
        copy_line(get_i64(at + OFFSETS) + block * LINE, sums + r * LINE)
    x, x_row = get_i64(at + LEVELS) + first * get_i64(at + LEVELS_ROW), get_i64(at + LEVELS_ROW)
    weights = get_i64(at + WEIGHTS) + block * quads * LINE
    done = types.int64(0)
    while done < quads:
        steps = min(get_i64(at + PIECE), quads - done)
        whole_tile(count, x + done * WORD, x_row, weights + done * LINE, steps, sums)
        done += steps
    add_up_outliers(at, block, first, count, words, outlier_sums)


def finishing(load):
    """Return a function of numba that stores results. load: loads sums as float32."""

    @njit(error_model="numpy")
    def finish(at, block, first, count, sums, outlier_sums):
        narrow = get_i64(at + NARROW)
        scales, bias = get_i64(at + SCALES) + block * LINE, get_i64(at + BIAS) + block * LINE
        column = block % get_i64(at + BLOCKS) * COLUMNS
        for r in range(count):
            step = splat(get_f32(get_i64(at + STEPS) + (first + r) * WORD))
            out = get_i64(at + OUT) + (first + r) * get_i64(at + OUT_ROW) + column * (2 if narrow else WORD)
            for v in range(LINE_VECTORS):
                offset = v * LANES * WORD
                value = mul(mul(load(sums + r * LINE + offset), load_f32(scales + offset)), step)
                value = add(value, add(load_f32(outlier_sums + r * LINE + offset), load_f32(bias + offset)))
                if narrow:
                    store_bf16(out + v * LANES * 2, value)
                else:
                    store_f32(out + offset, value)

    return finish


finish = finishing(load_whole)


@njit(error_model="numpy")
def add_up_and_finish(at, block, first, count, sums):
    outlier_sums = sums + get_i64(at + CHUNK) * LINE
    add_up(at, block, first, count, get_i64(at + QUADS), get_i64(at + OUTLIER_WORDS), sums, outlier_sums)
    finish(at, block, first, count, sums, outlier_sums)


share_out = product(add_up_and_finish)


@compiled.addressed
def multiply(at):
    """Compute [rows, outputs], the sums of integers times scale and step, plus outliers, plus bias, for the items that
    no other thread has taken."""
    share_out(at)


@njit(error_model="numpy")
def quantize_weight_row(row, inputs, narrow, kept, target, scale_at, sum_at):
    """Quantize a row of weights to integers in -127 .. 127, rounded half to even. Write its scale and their sum."""
    unit = types.int64(2) if narrow else types.int64(WORD)
    largest_magnitude, i = splat(types.float32(0)), types.int64(0)
    nan_sum = largest_magnitude
    while row != 0 and i < inputs:
        value = load_bf16(row + i * unit) if narrow else load_f32(row + i * unit)
        largest_magnitude = larger(magnitude(mul(value, load_f32(kept + i * WORD))), largest_magnitude)
        nan_sum = fma(value, splat(types.float32(0)), nan_sum)
        i += LANES
    scale = max(largest(largest_magnitude) / types.float32(MOST), types.float32(SMALLEST))
    put_f32(scale_at, scale + total(nan_sum))  # NaN if a weight is NaN or infinite
    wide, nearest = splat(scale), splat(types.float32(ROUND))
    summed, i = splat(types.float32(0)), types.int64(0)
    while i < inputs:
        whole = splat(types.float32(0))
        if row != 0:
            value = load_bf16(row + i * unit) if narrow else load_f32(row + i * unit)
            whole = sub(add(divide(mul(value, load_f32(kept + i * WORD)), wide), nearest), nearest)
        store_bytes(target + i, whole)
        summed = add(summed, whole)
        i += LANES
    put_i32(sum_at, types.int64(total(summed)))


@compiled.addressed
def quantize_weights(at):
    """Quantize weights, a block of COLUMNS rows at a time, and pack them as lines."""
    inputs, narrow, kept = get_i64(at + W_INPUTS), get_i64(at + W_NARROW), get_i64(at + W_KEPT)
    # memory of this thread: integers of COLUMNS rows
    spare = get_i64(at + W_SPARE) + take(at + W_THREADS) * get_i64(at + W_SPARE_BYTES)
    while True:
        block = take(at + W_TAKEN)
        if block >= get_i64(at + W_ITEMS):
            return
        for column in range(COLUMNS):
            weight_row = block * COLUMNS + column
            row, target = get_i64(get_i64(at + W_ROWS) + weight_row * 8), spare + column * inputs
            quantize_weight_row(
                row, inputs, narrow, kept, target, get_i64(at + W_SCALES) + weight_row * WORD,
                get_i64(at + W_SUMS) + weight_row * WORD,
            )  # fmt: skip
            put_i64(get_i64(at + W_ROWS) + weight_row * 8, target)
        steps = inputs // 4
        pack_lines(get_i64(at + W_ROWS) + block * COLUMNS * 8, steps, get_i64(at + W_OUT) + block * steps * LINE)
