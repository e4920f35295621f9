"""The kernels of quantize.py in numba: inputs made integers, and the product of integers with the outliers beside it.

A product streams the weights once for up to SIX rows, in blocks of COLUMNS outputs that lie one after another:
[outputs / COLUMNS, inputs / 4, COLUMNS, 4] bytes, so that one instruction multiplies four inputs with 16 outputs
(vpdpbusd, which AVX-512 VNNI has). Sums of integers are exact. The outliers are float32, [outputs / COLUMNS, k,
COLUMNS], and are summed from the first to the last. So a row's bits are its own, whatever rows and threads there are.

Addresses are int64, and nothing checks them; quantize.py does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from dsbd_cli.engine.models.lanes import (
    I32,
    I64,
    LANES,
    LANES_TYPE,
    SOURCE,
    VECTOR,
    WHOLES,
    add,
    compiled,
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
    pointer,
    put_f32,
    splat,
    splatted,
    store_bf16,
    store_f32,
    take,
    total,
)
from dsbd_cli.engine.models.quantize import COLUMNS, LAYOUT, LEVELIZE, MULTIPLY

__all__ = ["TITLE", "levelize", "multiply"]

TITLE = "the kernels of int8 layers"

# `at` is the address of a quantize.Levelize or Multiply, whose fields have these offsets. numba keeps what it compiled
# until this file changes, so a change of the fields or of lanes.py has to change it: by these numbers.
assert (LAYOUT, SOURCE) == (0x9099818D, 0x268CB22D), (
    f"quantize.py's fields or lanes.py changed: write {LAYOUT:#x}, {SOURCE:#x}"
)
(L_TAKEN, _, L_ITEMS, L_ROWS, L_SHARE, L_X, L_X_ROW, L_NARROW, L_INPUTS, L_KEPT, L_LEVELS, L_LEVELS_ROW, L_STEPS,
 L_OUTLIERS, L_FEW, L_FEW_INPUTS) = LEVELIZE  # fmt: skip
(TAKEN, THREADS, ITEMS, ROWS, CHUNK, BLOCKS, SHARE, LEVELS, LEVELS_ROW, WEIGHTS, QUADS, PIECE, OFFSETS, SCALES, STEPS,
 FEW, FEW_WEIGHTS, FEW_INPUTS, BIAS, OUT, OUT_ROW, NARROW, SCRATCH, SCRATCH_BYTES) = MULTIPLY  # fmt: skip
WORD = 4
SIDE = COLUMNS // LANES
LINE = COLUMNS * WORD  # bytes of a row of sums, and of the weights of four inputs
SIX = 6  # rows whose sums fit into the registers
LEVELS_HALF, ZERO = 127.0, 128


def _tile(rows: int, whole: bool) -> Any:
    """Adds to sums [rows, COLUMNS] the products of x [rows, .., 4 bytes], x_row bytes apart, with steps lines of
    weights: of four integers each, or of one float32."""
    kind, single = (WHOLES, I32) if whole else (VECTOR, ir.FloatType())
    name = f"llvm.x86.avx512.vpdpbusd.{LANES * 32}" if whole else f"llvm.fma.v{LANES}f32"

    def build(builder: Any, x: Any, x_row: Any, weights: Any, steps: Any, sums: Any) -> None:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
        places = [[builder.add(sums, _whole(r * LINE + v * LANES * WORD)) for v in range(SIDE)] for r in range(rows)]
        starts = [builder.add(x, builder.mul(x_row, _whole(r))) for r in range(rows)]
        before = [[loaded(builder, place, kind, WORD) for place in row] for row in places]
        entry, loop = builder.basic_block, builder.append_basic_block("step")
        done = builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(I64)
        found = [[builder.phi(kind) for _ in row] for row in places]
        line, place = builder.add(weights, builder.mul(step, _whole(LINE))), builder.mul(step, _whole(WORD))
        side = [loaded(builder, builder.add(line, _whole(v * LANES * WORD)), kind, LANES * WORD) for v in range(SIDE)]
        after = []
        for start, row in zip(starts, found, strict=True):
            one = splatted(builder, loaded(builder, builder.add(start, place), single, 1), kind)
            triples = ((total, one, w) if whole else (one, w, total) for total, w in zip(row, side, strict=True))
            after.append([builder.call(function, triple) for triple in triples])
        following = builder.add(step, _whole(1))
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)
        step.add_incoming(_whole(0), entry)
        step.add_incoming(following, loop)
        builder.position_at_end(done)
        for r in range(rows):
            for v in range(SIDE):
                found[r][v].add_incoming(before[r][v], entry)
                found[r][v].add_incoming(after[r][v], loop)
                builder.store(after[r][v], pointer(builder, places[r][v], kind), align=WORD)

    return operation(types.void, *(types.int64,) * 5)(build)


def _whole(value: int) -> Any:
    return ir.Constant(I64, value)


def _tiles(whole: bool) -> Callable[..., None]:
    one, two, three, four, five, six = (_tile(rows, whole) for rows in range(1, SIX + 1))

    def tile(rows, x, x_row, weights, steps, sums):
        if rows == 6:
            six(x, x_row, weights, steps, sums)
        elif rows == 5:
            five(x, x_row, weights, steps, sums)
        elif rows == 4:
            four(x, x_row, weights, steps, sums)
        elif rows == 3:
            three(x, x_row, weights, steps, sums)
        elif rows == 2:
            two(x, x_row, weights, steps, sums)
        else:
            one(x, x_row, weights, steps, sums)

    made: Callable[..., None] = njit(error_model="numpy")(tile)
    return made


whole_tile, float_tile = _tiles(True), _tiles(False)


@operation(LANES_TYPE, types.int64)
def load_whole(builder: Any, address: Any) -> Any:
    """int32 as float32."""
    return builder.sitofp(loaded(builder, address, WHOLES, WORD), VECTOR)


@operation(LANES_TYPE, LANES_TYPE)
def magnitude(builder: Any, value: Any) -> Any:
    clear = ir.Constant(WHOLES, [0x7FFFFFFF] * LANES)
    return builder.bitcast(builder.and_(builder.bitcast(value, WHOLES), clear), VECTOR)


@operation(types.void, types.int64, LANES_TYPE)
def store_bytes(builder: Any, address: Any, value: Any) -> Any:
    """The whole part of numbers in 0 .. 255."""
    kind = ir.VectorType(ir.IntType(8), LANES)
    builder.store(builder.trunc(builder.fptosi(value, WHOLES), kind), pointer(builder, address, kind), align=1)


@operation(types.void, types.int64, types.int64)
def copy_line(builder: Any, source: Any, target: Any) -> Any:
    """COLUMNS numbers of four bytes."""
    for v in range(SIDE):
        shift = _whole(v * LANES * WORD)
        value = loaded(builder, builder.add(source, shift), WHOLES, WORD)
        builder.store(value, pointer(builder, builder.add(target, shift), WHOLES), align=WORD)


@operation(types.void, types.int64)
def clear_line(builder: Any, target: Any) -> Any:
    for v in range(SIDE):
        place = pointer(builder, builder.add(target, _whole(v * LANES * WORD)), WHOLES)
        builder.store(ir.Constant(WHOLES, [0] * LANES), place, align=WORD)


@compiled
def levelize(at):
    """Rows made integers, and their outliers as float32. Inputs are filled up to a multiple of LANES with zeros."""
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
                # of what is no number, or endless, the product is no number, and so is the whole row then
                strange = fma(value, splat(types.float32(0)), strange)
                best = larger(magnitude(mul(value, load_f32(kept + i * WORD))), best)
                i += LANES
            step = max(largest(best) / types.float32(LEVELS_HALF), types.float32(1.1754943508222875e-38))
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
    """Sums [count, COLUMNS] of integers and, in few, of outliers."""
    for r in range(count):
        copy_line(get_i64(at + OFFSETS) + block * LINE, sums + r * LINE)
        clear_line(few + r * LINE)
    x, x_row = get_i64(at + LEVELS) + first * get_i64(at + LEVELS_ROW), get_i64(at + LEVELS_ROW)
    weights = get_i64(at + WEIGHTS) + block * quads * LINE
    groups = (count + SIX - 1) // SIX
    done = types.int64(0)
    while done < quads:
        steps = min(get_i64(at + PIECE), quads - done)
        for group in range(groups):
            low, high = group * count // groups, (group + 1) * count // groups
            whole_tile(high - low, x + low * x_row + done * WORD, x_row, weights + done * LINE, steps,
                       sums + low * LINE)  # fmt: skip
        done += steps
    x, x_row = get_i64(at + FEW) + first * few_inputs * WORD, few_inputs * WORD
    weights = get_i64(at + FEW_WEIGHTS) + block * few_inputs * LINE
    for group in range(groups):
        low, high = group * count // groups, (group + 1) * count // groups
        float_tile(high - low, x + low * x_row, x_row, weights, few_inputs, few + low * LINE)


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


@compiled
def multiply(at):
    """[rows, outputs]: integers times scale and step, plus outliers, plus bias, for the shares of outputs that no
    other thread has taken."""
    sums = get_i64(at + SCRATCH) + take(at + THREADS) * get_i64(at + SCRATCH_BYTES)
    rows, chunk, quads = get_i64(at + ROWS), get_i64(at + CHUNK), get_i64(at + QUADS)
    few, few_inputs, share = sums + chunk * LINE, get_i64(at + FEW_INPUTS), get_i64(at + SHARE)
    chunks = (rows + chunk - 1) // chunk
    while True:
        item = take(at + TAKEN)
        if item >= get_i64(at + ITEMS):
            return
        first = item % chunks * chunk
        count = min(chunk, rows - first)
        start = item // chunks * share
        for block in range(start, min(start + share, get_i64(at + BLOCKS))):
            add_up(at, block, first, count, quads, few_inputs, sums, few)
            finish(at, block, first, count, sums, few)
