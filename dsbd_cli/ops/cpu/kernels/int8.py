"""The kernels of int8.py in numba: they quantize inputs and weights, and multiply integers and outliers.

A product reads the weights once for up to SIX rows, in the tiles of simd.py: lines of four integers per word, and lines
of the outliers in float32. With matrix units amx.py has the tiles of integers. Sums of integers are exact. So the bits
of a row do not depend on the other rows or on the threads.

Addresses are int64. Nothing checks them here; int8.py does.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from dsbd_cli.ops.cpu.int8 import CONVERT, LAYOUT, LEVELIZE, MULTIPLY, SMALLEST, ZERO
from dsbd_cli.ops.cpu.int8 import LEVELS as MOST
from dsbd_cli.ops.cpu.kernels.amx import matrix_tile
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.simd import (
    CHUNK,
    COLUMNS,
    LANES,
    LANES_TYPE,
    LINE,
    ROUND,
    SIDE,
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
from dsbd_cli.ops.cpu.runtime import PRODUCT, matrix_units

compiled = KernelCompiler("int8 layers", seconds=3, layout=LAYOUT)

# `at` is the address of an int8.QuantizeRowArguments, Int8Arguments or QuantizeWeightArguments, whose fields have these
# offsets.
(L_TAKEN, _, L_ITEMS, L_ROWS, L_SHARE, L_X, L_X_ROW, L_NARROW, L_INPUTS, L_KEPT, L_LEVELS, L_LEVELS_ROW, L_STEPS,
 L_OUTLIERS, L_FEW, L_FEW_INPUTS) = LEVELIZE  # fmt: skip
(LEVELS, LEVELS_ROW, WEIGHTS, QUADS, PIECE, OFFSETS, SCALES, STEPS, FEW, FEW_WEIGHTS, FEW_INPUTS, BIAS, OUT, OUT_ROW,
 NARROW) = MULTIPLY[len(PRODUCT) :]  # fmt: skip
(C_TAKEN, C_THREADS, C_ITEMS, C_ROWS, C_INPUTS, C_NARROW, C_KEPT, C_SCALES, C_SUMS, C_OUT, C_SPARE,
 C_SPARE_BYTES) = CONVERT  # fmt: skip
whole_tile, float_tile = matrix_tile("int8") if matrix_units() else tile("int8"), tile("float32")


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
    """Store the whole parts of numbers in 0 .. 255, or whole numbers in -127 .. 127, as bytes."""
    kind = ir.VectorType(ir.IntType(8), LANES)
    builder.store(builder.trunc(builder.fptosi(value, WHOLES), kind), pointer(builder, address, kind), align=1)


@compiled.addressed
def levelize(at):
    """Quantize rows, and write their outliers as float32. Zeros must fill up the inputs to a multiple of LANES."""
    inputs, narrow = get_i64(at + L_INPUTS), get_i64(at + L_NARROW)
    kept, unit = get_i64(at + L_KEPT), types.int64(2) if narrow else types.int64(WORD)
    half = splat(types.float32(ZERO + 0.5))
    while True:
        item = take(at + L_TAKEN)
        if item >= get_i64(at + L_ITEMS):
            return
        share = get_i64(at + L_SHARE)
        for row in range(item * share, min((item + 1) * share, get_i64(at + L_ROWS))):
            x = get_i64(at + L_X) + row * get_i64(at + L_X_ROW)
            best = strange = splat(types.float32(0))
            i = types.int64(0)
            while i < inputs:
                value = load_bf16(x + i * unit) if narrow else load_f32(x + i * unit)
                # NaN and infinity times 0 are NaN, which makes the whole row NaN
                strange = fma(value, splat(types.float32(0)), strange)
                best = larger(magnitude(mul(value, load_f32(kept + i * WORD))), best)
                i += LANES
            step = max(largest(best) / types.float32(MOST), types.float32(SMALLEST))
            step += total(strange)
            put_f32(get_i64(at + L_STEPS) + row * WORD, step)
            levels, wide = get_i64(at + L_LEVELS) + row * get_i64(at + L_LEVELS_ROW), splat(step)
            i = types.int64(0)
            while i < inputs:
                value = load_bf16(x + i * unit) if narrow else load_f32(x + i * unit)
                store_bytes(levels + i, add(divide(mul(value, load_f32(kept + i * WORD)), wide), half))
                i += LANES
            few = get_i64(at + L_FEW) + row * get_i64(at + L_FEW_INPUTS) * WORD
            for j in range(get_i64(at + L_FEW_INPUTS)):
                place = x + get_i64(get_i64(at + L_OUTLIERS) + j * 8) * unit
                put_f32(few + j * WORD, get_bf16(place) if narrow else get_f32(place))


@njit(error_model="numpy")
def add_up(at, block, first, count, quads, few_inputs, sums, few):
    """Compute the sums [count, COLUMNS] of integers, and in `few` those of outliers."""
    for r in range(count):
        copy_line(get_i64(at + OFFSETS) + block * LINE, sums + r * LINE)
        clear_line(few + r * LINE)
    x, x_row = get_i64(at + LEVELS) + first * get_i64(at + LEVELS_ROW), get_i64(at + LEVELS_ROW)
    weights = get_i64(at + WEIGHTS) + block * quads * LINE
    done = types.int64(0)
    while done < quads:
        steps = min(get_i64(at + PIECE), quads - done)
        whole_tile(count, x + done * WORD, x_row, weights + done * LINE, steps, sums)
        done += steps
    x, x_row = get_i64(at + FEW) + first * few_inputs * WORD, few_inputs * WORD
    weights = get_i64(at + FEW_WEIGHTS) + block * few_inputs * LINE
    float_tile(count, x, x_row, weights, few_inputs, few)


@njit(error_model="numpy")
def finish(at, block, first, count, sums, few):
    narrow = get_i64(at + NARROW)
    scales, bias = get_i64(at + SCALES) + block * LINE, get_i64(at + BIAS) + block * LINE
    for r in range(count):
        step = splat(get_f32(get_i64(at + STEPS) + (first + r) * WORD))
        out = get_i64(at + OUT) + (first + r) * get_i64(at + OUT_ROW) + block * COLUMNS * (2 if narrow else WORD)
        for v in range(SIDE):
            place = v * LANES * WORD
            whole = mul(mul(load_whole(sums + r * LINE + place), load_f32(scales + place)), step)
            value = add(whole, add(load_f32(few + r * LINE + place), load_f32(bias + place)))
            if narrow:
                store_bf16(out + v * LANES * 2, value)
            else:
                store_f32(out + place, value)


@njit(error_model="numpy")
def add_up_and_finish(at, block, first, count, sums):
    few = sums + get_i64(at + CHUNK) * LINE
    add_up(at, block, first, count, get_i64(at + QUADS), get_i64(at + FEW_INPUTS), sums, few)
    finish(at, block, first, count, sums, few)


share_out = product(add_up_and_finish)


@compiled.addressed
def multiply(at):
    """Compute [rows, outputs], the sums of integers times scale and step, plus outliers, plus bias, for the items that
    no other thread has taken."""
    share_out(at)


@njit(error_model="numpy")
def convert_row(row, inputs, narrow, kept, target, scale_at, sum_at):
    """Quantize a row of weights to integers in -127 .. 127, rounded half to even. Write its scale and their sum."""
    unit = types.int64(2) if narrow else types.int64(WORD)
    best, i = splat(types.float32(0)), types.int64(0)
    while row != 0 and i < inputs:
        value = load_bf16(row + i * unit) if narrow else load_f32(row + i * unit)
        best = larger(magnitude(mul(value, load_f32(kept + i * WORD))), best)
        i += LANES
    scale = max(largest(best) / types.float32(MOST), types.float32(SMALLEST))
    put_f32(scale_at, scale)
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
def convert(at):
    """Quantize weights, a block of COLUMNS rows at a time, and pack them as lines."""
    inputs, narrow, kept = get_i64(at + C_INPUTS), get_i64(at + C_NARROW), get_i64(at + C_KEPT)
    spare = get_i64(at + C_SPARE) + take(at + C_THREADS) * get_i64(at + C_SPARE_BYTES)
    while True:
        block = take(at + C_TAKEN)
        if block >= get_i64(at + C_ITEMS):
            return
        for column in range(COLUMNS):
            place = block * COLUMNS + column
            row, target = get_i64(get_i64(at + C_ROWS) + place * 8), spare + column * inputs
            convert_row(
                row, inputs, narrow, kept, target, get_i64(at + C_SCALES) + place * WORD,
                get_i64(at + C_SUMS) + place * WORD,
            )  # fmt: skip
            put_i64(get_i64(at + C_ROWS) + place * 8, target)
        steps = inputs // 4
        pack_lines(get_i64(at + C_ROWS) + block * COLUMNS * 8, steps, get_i64(at + C_OUT) + block * steps * LINE)
