"""The kernels of attention.py in numba: they list the slots of a forest, attend to them, and join the prompt's part.

A sum over the head goes from its first number to its last. A sum over slots goes in order of depth: values are added
one by one, weights in LANES partial sums that are added in a fixed order.

Addresses are int64. Nothing checks them here; attention.py does.
"""

from __future__ import annotations

from numba import njit, types

from dsbd_cli.ops.cpu.attention import ATTEND, LAYOUT, LIST
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.simd import (
    LANES,
    add,
    divide,
    exp2,
    first,
    fma,
    get_bf16,
    get_f32,
    get_i32,
    get_i64,
    get_u8,
    larger,
    largest,
    load_bf16,
    load_f32,
    mul,
    put_bf16,
    put_f32,
    put_i32,
    smaller,
    splat,
    store_bf16,
    store_f32,
    sub,
    take,
    total,
    transpose_bf16,
    transpose_f32,
)

compiled = KernelCompiler("attention", seconds=3, layout=LAYOUT)

# `at` is the address of an attention.AttentionArguments, whose fields have these offsets.

(
    TAKEN, THREADS, ITEMS, HEADS, GROUPS, NODES, DIM, OUT_DIM, BLOCKS, BLOCK, QUERY, QUERY_ROW, QUERY_HEAD, QUERY_NODE,
    KEY, KEY_ROW, KEY_HEAD, KEY_SLOT, VALUE, VALUE_ROW, VALUE_HEAD, VALUE_SLOT, OUT, SLOTS, COUNTS, BOUNDS, LIST_WIDTH,
    PROMPT_PART, PROMPT_PART_ROW, PROMPT_PART_HEAD, PROMPT_PART_QUERY, SUMS, SUMS_ROW, SUMS_HEAD, SUMS_QUERY, SINKS,
    BIAS, BIAS_ROW, BIAS_HEAD, BIAS_NODE, SCRATCH, SCRATCH_BYTES, NARROW, SCALE, CAP,
) = ATTEND  # fmt: skip
LOG2_E = 1.4426950408889634
LEAST = -3.0e38  # a score below all others
WORD = 4  # bytes of a float32 and of an int32
ROW = LANES * WORD  # bytes of a vector
FOUR = 4 * LANES  # numbers that are worked on at once: their sums stay in registers


@njit(error_model="numpy")
def multiply(queries, keys, stride, width, dim, scores):
    """Compute scores [2, stride] of queries [2, dim] and keys [dim, stride], of which the first `width` count."""
    line, other = stride * WORD, dim * WORD
    t = 0
    while t < width:
        key = keys + t * WORD
        out = scores + t * WORD
        zero = splat(types.float32(0))
        if width - t >= FOUR:
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
            for e in range(dim):
                a = splat(get_f32(queries + e * WORD))
                b = splat(get_f32(queries + other + e * WORD))
                k0, k1 = load_f32(key), load_f32(key + ROW)
                k2, k3 = load_f32(key + 2 * ROW), load_f32(key + 3 * ROW)
                a0, a1, a2, a3 = fma(a, k0, a0), fma(a, k1, a1), fma(a, k2, a2), fma(a, k3, a3)
                b0, b1, b2, b3 = fma(b, k0, b0), fma(b, k1, b1), fma(b, k2, b2), fma(b, k3, b3)
                key += line
            store_four(out, a0, a1, a2, a3)
            store_four(out + line, b0, b1, b2, b3)
            t += FOUR
        else:
            a0 = b0 = zero
            for e in range(dim):
                k0 = load_f32(key)
                a0 = fma(splat(get_f32(queries + e * WORD)), k0, a0)
                b0 = fma(splat(get_f32(queries + other + e * WORD)), k0, b0)
                key += line
            store_f32(out, a0)
            store_f32(out + line, b0)
            t += LANES


@njit(error_model="numpy")
def add_up(weights, line, slots, count, values, wide, sums):
    """Compute sums [2, wide] of values [.., wide] at the listed slots [count]. weights: 2 rows, `line` bytes apart."""
    e = 0
    while e < wide:
        value = values + e * WORD
        out = sums + e * WORD
        zero = splat(types.float32(0))
        if wide - e >= FOUR:
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
            for j in range(count):
                v = value + get_i32(slots + j * WORD) * wide * WORD
                a = splat(get_f32(weights + j * WORD))
                b = splat(get_f32(weights + line + j * WORD))
                v0, v1, v2, v3 = load_f32(v), load_f32(v + ROW), load_f32(v + 2 * ROW), load_f32(v + 3 * ROW)
                a0, a1, a2, a3 = fma(a, v0, a0), fma(a, v1, a1), fma(a, v2, a2), fma(a, v3, a3)
                b0, b1, b2, b3 = fma(b, v0, b0), fma(b, v1, b1), fma(b, v2, b2), fma(b, v3, b3)
            store_four(out, a0, a1, a2, a3)
            store_four(out + wide * WORD, b0, b1, b2, b3)
            e += FOUR
        else:
            a0 = b0 = zero
            for j in range(count):
                v0 = load_f32(value + get_i32(slots + j * WORD) * wide * WORD)
                a0 = fma(splat(get_f32(weights + j * WORD)), v0, a0)
                b0 = fma(splat(get_f32(weights + line + j * WORD)), v0, b0)
            store_f32(out, a0)
            store_f32(out + wide * WORD, b0)
            e += LANES


@njit(error_model="numpy")
def store_four(out, a, b, c, d):
    store_f32(out, a)
    store_f32(out + ROW, b)
    store_f32(out + 2 * ROW, c)
    store_f32(out + 3 * ROW, d)


@njit(error_model="numpy")
def to_float32(source, dim, narrow, target):
    """Write `dim` numbers as float32."""
    e = 0
    while e + LANES <= dim:
        store_f32(target + e * WORD, load_bf16(source + e * 2) if narrow else load_f32(source + e * WORD))
        e += LANES
    while e < dim:
        put_f32(target + e * WORD, get_bf16(source + e * 2) if narrow else get_f32(source + e * WORD))
        e += 1


@njit(error_model="numpy")
def transpose_keys(source, step, count, dim, narrow, target, stride):
    """Write the keys of `count` slots, `step` bytes apart, as float32 [dim, stride]; zeros fill up LANES slots."""
    line, unit = stride * WORD, 2 if narrow else WORD
    t = 0
    while t < count:
        e = 0
        if t + LANES <= count:
            while e + LANES <= dim:
                if narrow:
                    transpose_bf16(source + e * unit, step, target + e * line + t * WORD, line)
                else:
                    transpose_f32(source + e * unit, step, target + e * line + t * WORD, line)
                e += LANES
        while e < dim:
            for i in range(LANES):
                x = types.float32(0)
                if t + i < count:
                    key = source + i * step + e * unit
                    x = get_bf16(key) if narrow else get_f32(key)
                put_f32(target + e * line + (t + i) * WORD, x)
            e += 1
        source += LANES * step
        t += LANES


@njit(error_model="numpy")
def cap_scores(scores, width, factor):
    """Replace scores by tanh(score * factor), computed as 1 - 2 / (1 + e^(2 score factor))."""
    one, two = splat(types.float32(1)), splat(types.float32(2))
    inner = splat(factor * types.float32(2 * LOG2_E))
    most = splat(types.float32(126))
    t = 0
    while t < width:
        x = mul(load_f32(scores + t * WORD), inner)
        store_f32(scores + t * WORD, sub(one, divide(two, add(exp2(smaller(x, most)), one))))
        t += LANES


@njit(error_model="numpy")
def softmax_weights(scores, slots, count, factor, bias, other_exponent, weights):
    """Write the weights [count] of the listed slots, which are powers of 2; zeros fill up a multiple of LANES.

    Return the largest exponent, which is subtracted from all of them. other_exponent: that of what else takes part in
    the softmax.
    """
    full = (count + LANES - 1) // LANES * LANES
    base = types.float32(LOG2_E)
    for j in range(count):
        slot = get_i32(slots + j * WORD)
        x = get_f32(scores + slot * WORD) * factor
        if bias != 0:
            x += get_f32(bias + slot * WORD) * base
        put_f32(weights + j * WORD, x)
    for j in range(count, full):
        put_f32(weights + j * WORD, types.float32(LEAST))
    best = splat(types.float32(LEAST))
    t = 0
    while t < full:
        best = larger(load_f32(weights + t * WORD), best)
        t += LANES
    top = max(largest(best), other_exponent)
    t = 0
    while t < full:
        store_f32(weights + t * WORD, exp2(sub(load_f32(weights + t * WORD), splat(top))))
        t += LANES
    for j in range(count, full):
        put_f32(weights + j * WORD, types.float32(0))
    return top


@njit(error_model="numpy")
def add_weights(weights, count):
    sums = splat(types.float32(0))
    t = 0
    while t < count:
        sums = add(sums, load_f32(weights + t * WORD))
        t += LANES
    return total(sums)


@njit(error_model="numpy")
def write_out(sums, dim, narrow, prompt_part, share, total_weight, out):
    """Write (sums + prompt_part * share) / total_weight. There is no prompt part where its address is 0."""
    e = 0
    unit = 2 if narrow else WORD
    while e < dim:
        vector = e + LANES <= dim
        x = load_f32(sums + e * WORD) if vector else splat(get_f32(sums + e * WORD))
        if prompt_part != 0:
            part = prompt_part + e * unit
            if vector:
                value = load_bf16(part) if narrow else load_f32(part)
            else:
                value = splat(get_bf16(part) if narrow else get_f32(part))
            x = fma(value, splat(share), x)
        x = divide(x, splat(total_weight))
        if vector:
            if narrow:
                store_bf16(out + e * unit, x)
            else:
                store_f32(out + e * unit, x)
            e += LANES
        else:
            if narrow:
                put_bf16(out + e * unit, first(x))
            else:
                put_f32(out + e * unit, first(x))
            e += 1


@compiled.addressed
def attend(at):
    """Compute `attend` of ops/cpu/attention.py, for each (row, kv head, block of nodes) that no other thread has
    taken."""
    heads, groups, nodes = get_i64(at + HEADS), get_i64(at + GROUPS), get_i64(at + NODES)
    dim, out_dim = get_i64(at + DIM), get_i64(at + OUT_DIM)
    blocks, block = get_i64(at + BLOCKS), get_i64(at + BLOCK)
    narrow = get_i64(at + NARROW) != 0
    unit = 2 if narrow else WORD
    scale, cap, base = get_f32(at + SCALE), get_f32(at + CAP), types.float32(LOG2_E)
    factor = scale * base if cap == 0 else cap * base
    prompt_part, sinks, bias = get_i64(at + PROMPT_PART), get_i64(at + SINKS), get_i64(at + BIAS)
    wide = (out_dim + LANES - 1) // LANES * LANES
    keys = get_i64(at + SCRATCH) + take(at + THREADS) * get_i64(at + SCRATCH_BYTES)
    held = types.int64(-1)
    while True:
        item = take(at + TAKEN)
        if item >= get_i64(at + ITEMS):
            return
        pair = item // blocks
        row = pair // heads
        head = pair - row * heads
        low = get_i32(get_i64(at + BOUNDS) + row * 2 * WORD)
        used = get_i32(get_i64(at + BOUNDS) + row * 2 * WORD + WORD) - low
        width = (used + LANES - 1) // LANES * LANES
        stride = width | LANES  # not a power of two, for which columns would share a set of the cache
        line = stride * WORD
        values = keys + dim * line
        query = values + width * wide * WORD
        scores = query + (2 * dim + LANES - 1) // LANES * ROW
        weights = scores + 2 * line
        sums = weights + 2 * line
        if held != pair:
            held = pair
            step = get_i64(at + KEY_SLOT)
            source = get_i64(at + KEY) + row * get_i64(at + KEY_ROW) + head * get_i64(at + KEY_HEAD) + low * step
            transpose_keys(source, step, used, dim, narrow, keys, stride)
            step = get_i64(at + VALUE_SLOT)
            source = get_i64(at + VALUE) + row * get_i64(at + VALUE_ROW) + head * get_i64(at + VALUE_HEAD) + low * step
            for t in range(used):
                to_float32(source + t * step, out_dim, narrow, values + t * wide * WORD)
                for e in range(out_dim, wide):
                    put_f32(values + (t * wide + e) * WORD, types.float32(0))
        start = (item - pair * blocks) * block
        for node in range(start, min(start + block, nodes)):
            count = get_i32(get_i64(at + COUNTS) + (row * nodes + node) * WORD)
            slots = get_i64(at + SLOTS) + (row * nodes + node) * get_i64(at + LIST_WIDTH) * WORD
            for group in range(0, groups, 2):
                pairs = min(groups - group, 2)
                for i in range(2):  # the last of an odd number is computed twice
                    of = head * groups + group + min(i, pairs - 1)
                    source = get_i64(at + QUERY) + row * get_i64(at + QUERY_ROW) + of * get_i64(at + QUERY_HEAD)
                    to_float32(source + node * get_i64(at + QUERY_NODE), dim, narrow, query + i * dim * WORD)
                multiply(query, keys, stride, width, dim, scores)
                for i in range(pairs):
                    mine = scores + i * line
                    of = head * groups + group + i
                    if cap != 0:
                        cap_scores(mine, width, scale / cap)
                    biased = types.int64(0)
                    if bias != 0:
                        biased = bias + row * get_i64(at + BIAS_ROW) + of * get_i64(at + BIAS_HEAD) + low * WORD
                        biased += node * get_i64(at + BIAS_NODE)
                    prompt_log = types.float32(LEAST)
                    if prompt_part != 0:
                        source = get_i64(at + SUMS) + row * get_i64(at + SUMS_ROW) + head * get_i64(at + SUMS_HEAD)
                        prompt_log = get_f32(source + ((group + i) * nodes + node) * get_i64(at + SUMS_QUERY)) * base
                    sink = types.float32(LEAST)
                    if sinks != 0:
                        sink = get_f32(sinks + of * WORD) * base
                    top = softmax_weights(mine, slots, count, factor, biased, max(prompt_log, sink), weights + i * line)
                    total_weight, share = add_weights(weights + i * line, count), types.float32(0)
                    if prompt_part != 0:
                        share = first(exp2(splat(prompt_log - top)))
                        total_weight += share
                    if sinks != 0:
                        total_weight += first(exp2(splat(sink - top)))
                    if total_weight == 0:  # an absent node may see nothing
                        total_weight = types.float32(1)
                    put_f32(mine, total_weight)
                    put_f32(mine + WORD, share)
                add_up(weights, line, slots, count, values, wide, sums)
                for i in range(pairs):
                    mine, of = scores + i * line, head * groups + group + i
                    part = prompt_part
                    if prompt_part != 0:
                        part += row * get_i64(at + PROMPT_PART_ROW) + head * get_i64(at + PROMPT_PART_HEAD)
                        part += ((group + i) * nodes + node) * get_i64(at + PROMPT_PART_QUERY)
                    out = get_i64(at + OUT) + ((row * nodes + node) * heads * groups + of) * out_dim * unit
                    total_weight, share = get_f32(mine), get_f32(mine + WORD)
                    write_out(sums + i * wide * WORD, out_dim, narrow, part, share, total_weight, out)


(
    L_TAKEN, _, L_ROWS, L_NODES, L_WIDTH, L_TOTAL, L_SEEN, L_SEEN_ROW, L_SEEN_NODE, L_STARTS, L_DEPTHS,
    L_DEPTHS_ROW, L_SLOTS, L_COUNTS, L_BOUNDS,
) = LIST  # fmt: skip


@njit(error_model="numpy")
def deeper(depths, slot, other):
    return get_i64(depths + slot * 8) > get_i64(depths + other * 8)


@compiled.addressed
def list_slots(at):
    """List the slots of `SlotPaths` of ops/cpu/attention.py, for each row that no other thread has taken."""
    nodes, width = get_i64(at + L_NODES), get_i64(at + L_WIDTH)
    while True:
        row = take(at + L_TAKEN)
        if row >= get_i64(at + L_ROWS):
            return
        start = get_i64(get_i64(at + L_STARTS) + row * 8)
        depths = get_i64(at + L_DEPTHS)  # 0, and no distance between rows, where slots are in order of depth
        depths += row * get_i64(at + L_DEPTHS_ROW)
        low, high = get_i64(at + L_TOTAL), types.int64(0)
        for node in range(nodes):
            seen = get_i64(at + L_SEEN) + row * get_i64(at + L_SEEN_ROW) + node * get_i64(at + L_SEEN_NODE)
            out = get_i64(at + L_SLOTS) + (row * nodes + node) * width * WORD
            count = types.int64(0)
            for slot in range(start, min(start + width, get_i64(at + L_TOTAL))):
                if get_u8(seen + slot) != 0:
                    end = count
                    # most slots are in order of depth already
                    while depths != 0 and end > 0 and deeper(depths, get_i32(out + (end - 1) * WORD), slot):
                        put_i32(out + end * WORD, get_i32(out + (end - 1) * WORD))
                        end -= 1
                    put_i32(out + end * WORD, slot)
                    count += 1
                    low, high = min(low, slot), max(high, slot + 1)
            put_i32(get_i64(at + L_COUNTS) + (row * nodes + node) * WORD, count)
        low = min(low, high)
        put_i32(get_i64(at + L_BOUNDS) + row * 2 * WORD, low)
        put_i32(get_i64(at + L_BOUNDS) + row * 2 * WORD + WORD, high)
        for node in range(nodes):
            out = get_i64(at + L_SLOTS) + (row * nodes + node) * width * WORD
            for j in range(get_i32(get_i64(at + L_COUNTS) + (row * nodes + node) * WORD)):
                put_i32(out + j * WORD, get_i32(out + j * WORD) - low)
