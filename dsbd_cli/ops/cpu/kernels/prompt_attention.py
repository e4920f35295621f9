"""The kernel of prompt_attention.py in numba.

A product goes from its first number to its last (bfloat16 on AMD: pair by pair), a sum over slots from the first to the
last of a chunk. bfloat16 models multiply values by weights that are rounded to bfloat16, as torch's attention does.

Addresses are int64. Nothing checks them here; prompt_attention.py does.
"""

from __future__ import annotations

import math
from typing import Any

from numba import njit, types

from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.simd import (
    COLUMNS,
    HALVES,
    LANES,
    LINE,
    WHOLES,
    WORD,
    add,
    clear_line,
    divide,
    exp2,
    first,
    get_f32,
    get_i64,
    larger,
    largest,
    load_f32,
    loaded,
    mul,
    nearest_bf16,
    operation,
    pack_lines,
    pointer,
    put_f32,
    put_i64,
    splat,
    store_bf16,
    store_f32,
    sub,
    take,
    tile,
    total,
)
from dsbd_cli.ops.cpu.prompt_attention import ATTEND, LAYOUT, SLOTS
from dsbd_cli.ops.processor import bfloat16_tile

compiled = KernelCompiler("attention to prompts", seconds=3, layout=LAYOUT)

# `at` is the address of a prompt_attention.PromptArguments, whose fields have these offsets.
(TAKEN, THREADS, ITEMS, HEADS, QUERIES, DIM, NUM_BLOCKS, BLOCK, QUERY, KEY, KEY_ROW, KEY_HEAD, KEY_SLOT, VALUE,
 VALUE_ROW, VALUE_HEAD, VALUE_SLOT, ROWS, COUNTS, NODES, OUT, OUT_SUMS, SCRATCH, SCRATCH_BYTES, NARROW,
 SCALE) = ATTEND  # fmt: skip
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
LEAST = -3.0e38  # a score below all others
NO_SUM = -3.4028234663852886e38  # the lowest float32
ROW = LANES * WORD  # bytes of a vector
float_tile = tile("float32")
# with matrix units torch serves, and a second float32 tile is compiled that never runs
kind = bfloat16_tile()
pair_tile = tile(kind if kind in ("bfloat16", "widened") else "float32")


@operation(types.void, *(types.int64,) * 3)
def store_pairs(builder: Any, a: Any, b: Any, target: Any) -> Any:
    """Store LANES words, each of which has a number of 16 bits of `a` and below it one of `b` at its upper end."""
    low, high = (builder.zext(loaded(builder, address, HALVES, 2), WHOLES) for address in (a, b))
    word = builder.or_(low, builder.shl(high, WHOLES([16] * LANES)))
    builder.store(word, pointer(builder, target, WHOLES), align=WORD)


@njit(error_model="numpy")
def pack_values(source, step, used, dim, narrow, empty, out, lines):
    """Write the values of `used` slots, `step` bytes apart, as `lines` lines for each COLUMNS of their numbers. A line
    has a number of a slot, or of two slots in bfloat16, for each column. empty: a row of zeros."""
    unit = types.int64(2) if narrow else types.int64(WORD)
    for number in range((used + 1) // 2 if narrow else used):
        a = source + (2 * number if narrow else number) * step
        b = a + step if 2 * number + 1 < used else empty
        e = types.int64(0)
        while e < dim:
            target = out + (e // COLUMNS * lines + number) * LINE + e % COLUMNS * WORD
            if narrow:
                store_pairs(a + e * unit, b + e * unit, target)
            else:
                store_f32(target, load_f32(a + e * unit))
            e += LANES
        while e % COLUMNS != 0:
            store_f32(out + (e // COLUMNS * lines + number) * LINE + e % COLUMNS * WORD, splat(types.float32(0)))
            e += LANES


@njit(error_model="numpy")
def weigh(scores, further, seen, factor, narrow, before, weights):
    """Turn the scores of a chunk, COLUMNS of which are `further` bytes on, into weights: powers of 2, less than the
    largest exponent so far. Slots from `seen` on get 0. Return that exponent and the sum of the weights."""
    full = (seen + LANES - 1) // LANES
    if seen % LANES != 0:
        for j in range(seen, full * LANES):
            put_f32(scores + (j // COLUMNS) * further + j % COLUMNS * WORD, types.float32(LEAST))
    best, wide = splat(types.float32(LEAST)), splat(factor)
    for v in range(full):
        address = scores + v // 4 * further + v % 4 * ROW
        x = mul(load_f32(address), wide)
        store_f32(address, x)
        best = larger(x, best)
    top = max(largest(best), before)
    sums, most = splat(types.float32(0)), splat(top)
    for v in range(SLOTS // LANES):
        weight = splat(types.float32(0))
        if v < full:
            address = scores + v // 4 * further + v % 4 * ROW
            weight = exp2(sub(load_f32(address), most))
            if v == full - 1 and seen % LANES != 0:
                store_f32(address, weight)
                for j in range(seen, full * LANES):
                    put_f32(scores + (j // COLUMNS) * further + j % COLUMNS * WORD, types.float32(0))
                weight = load_f32(address)
        if narrow:
            weight = nearest_bf16(weight)
            store_bf16(weights + v * LANES * 2, weight)
        else:
            store_f32(weights + v * ROW, weight)
        sums = add(sums, weight)
    return top, total(sums)


@compiled.addressed
def attend(at):
    """Compute `attend` of ops/cpu/prompt_attention.py, for each (row, kv head, block of queries) that no other thread
    has taken."""
    heads, queries, dim = get_i64(at + HEADS), get_i64(at + QUERIES), get_i64(at + DIM)
    blocks, block, nodes = get_i64(at + NUM_BLOCKS), get_i64(at + BLOCK), get_i64(at + NODES)
    narrow = get_i64(at + NARROW) != 0
    unit = types.int64(2) if narrow else types.int64(WORD)
    factor = get_f32(at + SCALE) * types.float32(LOG2_E)
    steps, wide, lines = dim * unit // WORD, (dim + COLUMNS - 1) // COLUMNS, SLOTS * unit // WORD
    # memory of this thread: addresses of keys, a row of zeros, lines of keys and values, scores [2, block, COLUMNS],
    # weights [block, SLOTS], sums [wide, block, COLUMNS], largest exponents [block], sums of weights [block]
    places = get_i64(at + SCRATCH) + take(at + THREADS) * get_i64(at + SCRATCH_BYTES)
    empty = places + COLUMNS * 8
    keys = empty + wide * LINE
    values = keys + 2 * steps * LINE
    scores = values + lines * wide * LINE
    weights = scores + 2 * block * LINE
    sums = weights + block * SLOTS * unit
    tops = sums + wide * block * LINE
    totals = tops + block * WORD
    for number in range(wide):
        clear_line(empty + number * LINE)
    while True:
        item = take(at + TAKEN)
        if item >= get_i64(at + ITEMS):
            return
        pair = item // blocks
        row, head = pair // heads, pair % heads
        start = item % blocks * block
        count = min(block, queries - start)
        counts = get_i64(at + COUNTS) + row * nodes * 8
        most = types.int64(0)
        for q in range(count):
            most = max(most, get_i64(counts + (start + q) % nodes * 8))
            put_f32(tops + q * WORD, types.float32(LEAST))
            put_f32(totals + q * WORD, types.float32(0))
        for number in range(wide * block):
            clear_line(sums + number * LINE)
        own = get_i64(get_i64(at + ROWS) + row * 8) if get_i64(at + ROWS) != 0 else row
        key = get_i64(at + KEY) + own * get_i64(at + KEY_ROW) + head * get_i64(at + KEY_HEAD)
        value = get_i64(at + VALUE) + own * get_i64(at + VALUE_ROW) + head * get_i64(at + VALUE_HEAD)
        key_step, value_step = get_i64(at + KEY_SLOT), get_i64(at + VALUE_SLOT)
        query = get_i64(at + QUERY) + (pair * queries + start) * dim * unit
        begin = types.int64(0)
        while begin < most:
            used = min(SLOTS, most - begin)
            for half in range((used + COLUMNS - 1) // COLUMNS):
                for t in range(COLUMNS):
                    slot = begin + half * COLUMNS + t
                    put_i64(places + t * 8, key + slot * key_step if slot < most else empty)
                packed, tile_sums = keys + half * steps * LINE, scores + half * block * LINE
                pack_lines(places, steps, packed)
                for q in range(count):
                    clear_line(tile_sums + q * LINE)
                if narrow:
                    pair_tile(count, query, dim * unit, packed, steps, tile_sums)
                else:
                    float_tile(count, query, dim * unit, packed, steps, tile_sums)
            pack_values(value + begin * value_step, value_step, used, dim, narrow, empty, values, lines)
            for q in range(count):
                seen = min(max(get_i64(counts + (start + q) % nodes * 8) - begin, 0), SLOTS)
                before = get_f32(tops + q * WORD)
                top, weight = weigh(
                    scores + q * LINE, block * LINE, seen, factor, narrow, before, weights + q * SLOTS * unit
                )
                share = first(exp2(splat(before - top)))
                put_f32(tops + q * WORD, top)
                put_f32(totals + q * WORD, get_f32(totals + q * WORD) * share + weight)
                if begin > 0 and share != 1:
                    again = splat(share)
                    for b in range(wide):
                        address = sums + (b * block + q) * LINE
                        for v in range(LINE // ROW):
                            store_f32(address + v * ROW, mul(load_f32(address + v * ROW), again))
            for b in range(wide):
                packed, tile_sums = values + b * lines * LINE, sums + b * block * LINE
                if narrow:
                    pair_tile(count, weights, SLOTS * unit, packed, (used + 1) // 2, tile_sums)
                else:
                    float_tile(count, weights, SLOTS * unit, packed, used, tile_sums)
            begin += SLOTS
        for q in range(count):
            weight = get_f32(totals + q * WORD)
            address = get_i64(at + OUT_SUMS) + (pair * queries + start + q) * WORD
            if weight == 0:  # it sees nothing
                weight = types.float32(1)
                put_f32(address, types.float32(NO_SUM))
            else:
                exponent = types.float64(get_f32(tops + q * WORD)) * LN_2
                put_f32(address, types.float32(exponent + math.log(types.float64(weight))))
            out, whole = get_i64(at + OUT) + (pair * queries + start + q) * dim * unit, splat(weight)
            e = types.int64(0)
            while e < dim:
                x = divide(load_f32(sums + (e // COLUMNS * block + q) * LINE + e % COLUMNS * WORD), whole)
                if narrow:
                    store_bf16(out + e * unit, x)
                else:
                    store_f32(out + e * unit, x)
                e += LANES
