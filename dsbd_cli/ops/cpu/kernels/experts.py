"""The kernels of experts.py in numba.

One thread chooses the experts of all tokens, because it also counts the rows of each expert. Addresses are int64.
Nothing checks them here; experts.py does.
"""

from __future__ import annotations

from numba import njit, types

from dsbd_cli.ops.cpu.experts import COMBINE, LAYOUT, ROUTE, SPREAD
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.layer import MOST_POWER, TO_BASE_2, load, store
from dsbd_cli.ops.cpu.kernels.simd import (
    LANES,
    WORD,
    add,
    divide,
    exp2,
    get_bf16,
    get_f32,
    get_i64,
    larger,
    load_f32,
    mul,
    put_f32,
    put_i64,
    smaller,
    splat,
    store_f32,
    sub,
    take,
)

compiled = KernelCompiler("mixtures of experts", seconds=2, layout=LAYOUT)

# `at` is the address of an experts.RouteArguments, SpreadArguments or CombineArguments, with these offsets.
(_, _, _, R_TOKENS, R_EXPERTS, R_LOGITS, R_LOGITS_ROW, R_NARROW, R_CHOSEN, R_SIGMOID, R_CORRECTION, R_GROUPS,
 R_CHOSEN_GROUPS, R_GROUP_SIZE, R_NORMALISED, R_TABLE, R_ROWS, R_WEIGHTS, R_SPARE, R_LANES, R_LEAST_SUM,
 R_SUM_EPS, R_SCALE) = ROUTE  # fmt: skip
S_TAKEN, _, S_ITEMS, S_TOKENS, S_SHARE, S_X, S_X_ROW, S_WIDTH, S_CHOSEN, S_ROWS, S_OUT = SPREAD
(C_TAKEN, _, C_ITEMS, C_TOKENS, C_SHARE, C_OUTPUTS, C_OUTPUTS_ROW, C_WIDTH, C_CHOSEN, C_ROWS, C_WEIGHTS, C_SHARED,
 C_SHARED_ROW, C_GATE, C_GATE_ROW, C_OUT, C_NARROW) = COMBINE  # fmt: skip

LEAST = -3e38  # of a score of an expert that cannot be chosen
ENTRY = 3 * 8  # bytes of the table for an expert: its number, its first row, the end of its rows


@njit(error_model="numpy")
def sigmoid(value):
    power = smaller(mul(value, splat(types.float32(TO_BASE_2))), splat(types.float32(MOST_POWER)))
    return divide(splat(types.float32(1)), add(splat(types.float32(1)), exp2(power)))


@njit(error_model="numpy")
def score(at, token, scores, lanes):
    """Write the scores [E] of a token's experts."""
    count, narrow = get_i64(at + R_EXPERTS), get_i64(at + R_NARROW)
    logits, highest = get_i64(at + R_LOGITS) + token * get_i64(at + R_LOGITS_ROW), types.float32(LEAST)
    for expert in range(count):
        value = get_bf16(logits + expert * 2) if narrow else get_f32(logits + expert * WORD)
        put_f32(scores + expert * WORD, value)
        highest = max(highest, value)
    for expert in range(count, lanes):
        put_f32(scores + expert * WORD, types.float32(0))
    if get_i64(at + R_SIGMOID):
        for i in range(0, lanes * WORD, LANES * WORD):
            store_f32(scores + i, sigmoid(load_f32(scores + i)))
        return
    summed = types.float32(0)
    for i in range(0, lanes * WORD, LANES * WORD):
        power = mul(sub(load_f32(scores + i), splat(highest)), splat(types.float32(-TO_BASE_2)))
        store_f32(scores + i, exp2(larger(power, splat(types.float32(-MOST_POWER)))))
    for expert in range(count):
        summed += get_f32(scores + expert * WORD)
    for i in range(0, lanes * WORD, LANES * WORD):
        store_f32(scores + i, divide(load_f32(scores + i), splat(summed)))


@njit(error_model="numpy")
def highest_of(values, count, taken):
    """Return the place of the highest of `count` values that is not taken, of equal ones the first, and take it."""
    best = types.int64(-1)
    for place in range(count):
        if get_f32(taken + place * WORD) == types.float32(0) and (
            best < 0 or get_f32(values + place * WORD) > get_f32(values + best * WORD)
        ):
            best = place
    put_f32(taken + best * WORD, types.float32(1))
    return best


@njit(error_model="numpy")
def clear(values, count):
    for place in range(count):
        put_f32(values + place * WORD, types.float32(0))


@njit(error_model="numpy")
def keep_groups(at, ranked, of_groups, taken):
    """Give experts of groups that are not chosen the least score."""
    groups, size = get_i64(at + R_GROUPS), get_i64(at + R_EXPERTS) // get_i64(at + R_GROUPS)
    for group in range(groups):
        own, summed = ranked + group * size * WORD, types.float32(0)
        clear(taken, size)
        for _ in range(get_i64(at + R_GROUP_SIZE)):
            summed += get_f32(own + highest_of(own, size, taken) * WORD)
        put_f32(of_groups + group * WORD, summed)
    clear(taken, groups)
    for _ in range(get_i64(at + R_CHOSEN_GROUPS)):
        highest_of(of_groups, groups, taken)
    for group in range(groups):
        if get_f32(taken + group * WORD) == types.float32(0):
            for place in range(group * size, (group + 1) * size):
                put_f32(ranked + place * WORD, types.float32(LEAST))


@njit(error_model="numpy")
def choose(at, token, scores, ranked, taken, of_groups):
    """Write a token's experts, in ascending order, and their weights."""
    count, chosen, correction = get_i64(at + R_EXPERTS), get_i64(at + R_CHOSEN), get_i64(at + R_CORRECTION)
    for expert in range(count):
        more = get_f32(correction + expert * WORD) if correction != 0 else types.float32(0)
        put_f32(ranked + expert * WORD, get_f32(scores + expert * WORD) + more)
    if get_i64(at + R_GROUPS) > 1:
        keep_groups(at, ranked, of_groups, taken)
    clear(taken, count)
    for _ in range(chosen):
        highest_of(ranked, count, taken)
    experts, weights = get_i64(at + R_ROWS) + token * chosen * 8, get_i64(at + R_WEIGHTS) + token * chosen * WORD
    summed, done = types.float32(0), types.int64(0)
    for expert in range(count):
        if get_f32(taken + expert * WORD) != types.float32(0):
            put_i64(experts + done * 8, expert)
            put_f32(weights + done * WORD, get_f32(scores + expert * WORD))
            summed += get_f32(scores + expert * WORD)
            done += 1
    divisor = types.float32(1)
    if get_i64(at + R_NORMALISED):
        divisor = max(summed, get_f32(at + R_LEAST_SUM)) + get_f32(at + R_SUM_EPS)
    for place in range(chosen):
        put_f32(weights + place * WORD, get_f32(weights + place * WORD) / divisor * get_f32(at + R_SCALE))


@compiled.addressed
def route(at):
    """Choose the experts of all tokens, and order their rows by expert."""
    take(at)
    tokens, count, chosen = get_i64(at + R_TOKENS), get_i64(at + R_EXPERTS), get_i64(at + R_CHOSEN)
    lanes, scores = get_i64(at + R_LANES), get_i64(at + R_SPARE)
    ranked, taken, of_groups = scores + lanes * WORD, scores + 2 * lanes * WORD, scores + 3 * lanes * WORD
    for token in range(tokens):
        score(at, token, scores, lanes)
        choose(at, token, scores, ranked, taken, of_groups)
    # the rows of each expert are counted where the end of its rows will be
    table, rows = get_i64(at + R_TABLE), get_i64(at + R_ROWS)
    entries = table + 8
    for expert in range(count):
        put_i64(entries + expert * ENTRY + 16, 0)
    for place in range(tokens * chosen):
        counter = entries + get_i64(rows + place * 8) * ENTRY + 16
        put_i64(counter, get_i64(counter) + 1)
    begin = types.int64(0)
    for expert in range(count):
        entry = entries + expert * ENTRY
        put_i64(entry + 8, begin)
        begin += get_i64(entry + 16)
        put_i64(entry + 16, get_i64(entry + 8))
    for place in range(tokens * chosen):
        end = entries + get_i64(rows + place * 8) * ENTRY + 16
        put_i64(rows + place * 8, get_i64(end))
        put_i64(end, get_i64(end) + 1)
    active = types.int64(0)
    for expert in range(count):
        entry, target = entries + expert * ENTRY, entries + active * ENTRY
        begin, end = get_i64(entry + 8), get_i64(entry + 16)
        if begin < end:
            put_i64(target, expert)
            put_i64(target + 8, begin)
            put_i64(target + 16, end)
            active += 1
    put_i64(table, active)


@compiled.addressed
def spread(at):
    """Copy each token's row to the rows of its experts."""
    chosen, width = get_i64(at + S_CHOSEN), get_i64(at + S_WIDTH)
    while True:
        item = take(at + S_TAKEN)
        if item >= get_i64(at + S_ITEMS):
            return
        share = get_i64(at + S_SHARE)
        for token in range(item * share, min((item + 1) * share, get_i64(at + S_TOKENS))):
            x = get_i64(at + S_X) + token * get_i64(at + S_X_ROW)
            for place in range(token * chosen, (token + 1) * chosen):
                out = get_i64(at + S_OUT) + get_i64(get_i64(at + S_ROWS) + place * 8) * width
                i = types.int64(0)
                while i + LANES * WORD <= width:
                    store_f32(out + i, load_f32(x + i))
                    i += LANES * WORD
                while i < width:
                    put_f32(out + i, get_f32(x + i))
                    i += WORD


@compiled.addressed
def combine(at):
    """Add up the outputs of each token's experts, and that of a shared one."""
    chosen, width, narrow = get_i64(at + C_CHOSEN), get_i64(at + C_WIDTH), get_i64(at + C_NARROW)
    unit, one = types.int64(2) if narrow else types.int64(WORD), splat(types.float32(1))
    while True:
        item = take(at + C_TAKEN)
        if item >= get_i64(at + C_ITEMS):
            return
        share = get_i64(at + C_SHARE)
        for token in range(item * share, min((item + 1) * share, get_i64(at + C_TOKENS))):
            rows, weights = get_i64(at + C_ROWS) + token * chosen * 8, get_i64(at + C_WEIGHTS) + token * chosen * WORD
            shared, gate, by = get_i64(at + C_SHARED), get_i64(at + C_GATE), one
            if shared != 0:
                shared += token * get_i64(at + C_SHARED_ROW)
                if gate != 0:
                    gate += token * get_i64(at + C_GATE_ROW)
                    by = sigmoid(splat(get_bf16(gate) if narrow else get_f32(gate)))
            out, i = get_i64(at + C_OUT) + token * width * unit, types.int64(0)
            while i < width:
                summed = splat(types.float32(0))
                for place in range(chosen):
                    row = get_i64(at + C_OUTPUTS) + get_i64(rows + place * 8) * get_i64(at + C_OUTPUTS_ROW)
                    weight = splat(get_f32(weights + place * WORD))
                    summed = add(summed, mul(load(row + i * unit, narrow), weight))
                if shared != 0:
                    summed = add(summed, mul(load(shared + i * unit, narrow), by))
                store(out + i * unit, summed, narrow)
                i += LANES
