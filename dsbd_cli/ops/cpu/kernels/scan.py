"""Recurrent layers over a packed forest on a CPU, in float32, with the same bits wherever the common prefix ends.

A token reads a state some tokens back, and the tokens since then one by one, as in models/recurrent/scans.py:

    y_t = f_t q_t S_a + sum_s f_ts (q_t . k_s) u_s,      s on the path from a to t, t included
    gated delta rule:  u_t = beta_t (v_t - f_t k_t S_a - sum_{s != t} f_ts (k_t . k_s) u_s)
    next state:        S_{a + BLOCK} = f S_a + sum_s f_s k_s u_s^T

where f are products of the decays in between. The *anchor* a depends on the position p of a token alone: the last
multiple of BLOCK that is at least LEAST_ONE_BY_ONE tokens before it, or 0. So a number is computed by the same
operations in the same order wherever the common prefix ends and whatever else is in the forward.

A row keeps the state at the anchor of the token that would follow its common prefix. It also keeps the inputs of the
last LEAD tokens of the common prefix, in front of those of the suffix. The anchors of a branch's first LEAST_ONE_BY_ONE
tokens are still in the common prefix: nodes at the same distance read the same state, all of them in one product.
Longer branches get states of their own, which are overwritten when their nodes are done.

One kernel, `recurrent_scan`, serves the nodes of a forest, a prompt, and a common prefix that grows. They differ in
their ScanSchedule (schedule.py). Threads share the pairs of row and value head.

Letters as in models/recurrent/scans.py, but a state is [R, H, N, P]. All arrays are contiguous, and float32 or int64.
The functions of a pair take addresses, as int64, and distances between rows in bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from dsbd_cli.ops.cpu.kernels import simd as lanes
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.schedule import (
    BLOCK,
    LEAD,
    LEAST_ONE_BY_ONE,
    ScanMask,
    ScanSchedule,
    chain,
    fold,
    forest,
    scan_mask,
    taps,
)
from dsbd_cli.ops.cpu.kernels.simd import (
    F32,
    I64,
    LANES,
    VECTOR,
    WORD,
    add,
    first,
    fma,
    get_f32,
    get_i64,
    load_f32,
    loaded,
    mul,
    operation,
    pointer,
    prefetch,
    put_f32,
    splat,
    splatted,
    store_f32,
    sub,
    take,
    total,
)
from dsbd_cli.ops.cpu.scan import AT, LAYOUT, recurrent_scan
from dsbd_cli.ops.processor import Processor, current

__all__ = (
    "BLOCK", "LEAD", "LEAST_ONE_BY_ONE", "TILE", "ScanMask", "ScanSchedule", "chain", "convolve", "fold", "forest",
    "join", "memory_bytes", "pairs", "put", "recurrent_scan", "scan_mask", "scan_pairs", "taps",
)  # fmt: skip

compiled = KernelCompiler("recurrent layers", seconds=21, layout=LAYOUT)

# vectors of a tile, and rows of a product whose sums fit into the registers
SIDE, MOST_ROWS, LESS_ROWS = (4, 6, 3) if current() >= Processor.AVX512 else (2, 3, 2)
TILE = LANES * SIDE  # columns of a state that are worked on together
TILE_BYTES, TERMS = TILE * WORD, LEAD + 1
AHEAD = 512 * WORD  # bytes ahead of those in use at which a state is prefetched: it comes from main memory
WHOLE = 8  # bytes of an int64

_I1, _I2, _I3 = types.int64[::1], types.int64[:, ::1], types.int64[:, :, ::1]
_F1, _F2 = types.float32[::1], types.float32[:, ::1]
_F3, _F4 = types.float32[:, :, ::1], types.float32[:, :, :, ::1]
_LOG2E, _LOG2E_REST, _LN2 = np.float32(1.44269502), np.float32(1.92596299e-8), np.float32(0.693147181)
_CHANNELS = 4 * lanes.LANES  # channels of a convolution at a time
_NEAR = 16 * _CHANNELS  # channels whose weights stay in the cache


@njit(error_model="numpy", nogil=True)
def _silu(x):
    """Return x / (1 + exp(-x)), within a few units in the last place."""
    least = lanes.larger(lanes.splat(-87), lanes.smaller(lanes.sub(lanes.splat(0), x), lanes.splat(87)))
    power = lanes.mul(least, lanes.splat(_LOG2E))
    rest = lanes.fma(least, lanes.splat(_LOG2E), lanes.sub(lanes.splat(0), power))  # the rounding error of that product
    rest = lanes.fma(least, lanes.splat(_LOG2E_REST), rest)
    grown = lanes.exp2(power)
    grown = lanes.fma(grown, lanes.mul(rest, lanes.splat(_LN2)), grown)
    return lanes.divide(x, lanes.add(lanes.splat(1), grown))


@compiled(types.void(_F1, types.int64, _F2, _I1, _I2, _F2, _F1, types.boolean, _F2))
def convolve(x, step, plane, at, back, weight, bias, smooth, out):
    """Convolve as `scans.convolve` does, and apply silu if `smooth` is set.

    x: inputs of n nodes, `step` numbers apart, which are stored in plane [places, C] at the places `at` [n]. back:
    [J - 1, n] places of the tokens before each node, the oldest first. weight: [C, J]. bias: [C], or [0] for none.
    out: [n, C].
    """
    channels, taps = weight.shape
    turned, starts = np.empty((taps, channels), np.float32), np.empty(taps, np.int64)
    for tap in range(taps):
        for c in range(channels):
            turned[tap, c] = weight[c, tap]
    whole, line, area = channels // _CHANNELS * _CHANNELS, channels * lanes.WORD, lanes.LANES * lanes.WORD
    for start in range(0, whole, _NEAR):
        count = min(_NEAR, whole - start) // _CHANNELS
        for i in range(len(at)):
            source = x.ctypes.data + (i * step + start) * lanes.WORD
            target = plane.ctypes.data + at[i] * line + start * lanes.WORD
            for past in range(0, count * 4 * area, area):
                lanes.store_f32(target + past, lanes.load_f32(source + past))
        for i in range(len(at)):
            for tap in range(taps):
                place = back[tap, i] if tap < taps - 1 else at[i]
                starts[tap] = plane.ctypes.data + place * line + start * lanes.WORD
            for number in range(count):
                past = number * 4 * area
                factors = turned.ctypes.data + start * lanes.WORD + past
                here = starts[0] + past
                a = lanes.mul(lanes.load_f32(here), lanes.load_f32(factors))
                b = lanes.mul(lanes.load_f32(here + area), lanes.load_f32(factors + area))
                c = lanes.mul(lanes.load_f32(here + 2 * area), lanes.load_f32(factors + 2 * area))
                d = lanes.mul(lanes.load_f32(here + 3 * area), lanes.load_f32(factors + 3 * area))
                for tap in range(1, taps):
                    factors += line
                    here = starts[tap] + past
                    a = lanes.add(a, lanes.mul(lanes.load_f32(here), lanes.load_f32(factors)))
                    b = lanes.add(b, lanes.mul(lanes.load_f32(here + area), lanes.load_f32(factors + area)))
                    c = lanes.add(c, lanes.mul(lanes.load_f32(here + 2 * area), lanes.load_f32(factors + 2 * area)))
                    d = lanes.add(d, lanes.mul(lanes.load_f32(here + 3 * area), lanes.load_f32(factors + 3 * area)))
                if len(bias):
                    here = bias.ctypes.data + start * lanes.WORD + past
                    a, b = lanes.add(a, lanes.load_f32(here)), lanes.add(b, lanes.load_f32(here + area))
                    c = lanes.add(c, lanes.load_f32(here + 2 * area))
                    d = lanes.add(d, lanes.load_f32(here + 3 * area))
                if smooth:
                    a, b, c, d = _silu(a), _silu(b), _silu(c), _silu(d)
                here = out.ctypes.data + i * line + start * lanes.WORD + past
                lanes.store_f32(here, a)
                lanes.store_f32(here + area, b)
                lanes.store_f32(here + 2 * area, c)
                lanes.store_f32(here + 3 * area, d)
    for i in range(len(at)):
        plane[at[i], whole:] = x[i * step + whole : i * step + channels]
    for i in range(len(at)):
        for c in range(whole, channels):
            total = plane[back[0, i] if taps > 1 else at[i], c] * turned[0, c]
            for tap in range(1, taps):
                total += plane[back[tap, i] if tap < taps - 1 else at[i], c] * turned[tap, c]
            if len(bias):
                total += bias[c]
            out[i, c] = lanes.first(_silu(lanes.splat(total))) if smooth else total


def _sums(rows: int, *, listed: bool) -> Any:
    """Return an operation that computes out[m] = sum_j a[m, j] b[j] for `rows` rows m of TILE columns, j from 0 up.

    listed: it begins with e[m] source[m], and reads b[places[j]]. a_row, a_step: from a row of a to the next one, and
    from j to j + 1. The sums stay in registers.
    """

    def build(
        builder: Any, a: Any, a_row: Any, a_step: Any, b: Any, b_row: Any, count: Any, out: Any, out_row: Any,
        e: Any = None, source: Any = None, source_row: Any = None, places: Any = None,
    ) -> None:  # fmt: skip
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
        multiply_add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")

        def plus(address: Any, step: Any, number: Any) -> Any:
            return builder.add(address, builder.mul(step, number))

        def const(value: int) -> Any:
            return ir.Constant(I64, value)

        def vectors(line: Any) -> list[Any]:
            return [loaded(builder, builder.add(line, const(v * LANES * WORD)), VECTOR, WORD) for v in range(SIDE)]

        def factor(address: Any) -> Any:
            return splatted(builder, loaded(builder, address, F32, WORD))

        before = [ir.Constant(VECTOR, [0.0] * LANES)] * (rows * SIDE)
        for m in range(rows if listed else 0):
            scale, line = factor(builder.add(e, const(m * WORD))), plus(source, source_row, const(m))
            before[m * SIDE : (m + 1) * SIDE] = [builder.fmul(scale, value) for value in vectors(line)]
            for v in range(SIDE if rows > 1 else 0):
                prefetch(builder, builder.add(line, const(v * LANES * WORD + AHEAD)))
        entry, loop, done = builder.basic_block, builder.append_basic_block("term"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        term, sums = builder.phi(I64), [builder.phi(VECTOR) for _ in before]
        place = loaded(builder, plus(places, const(WHOLE), term), I64, WHOLE) if listed else term
        side, start, after = vectors(plus(b, b_row, place)), plus(a, a_step, term), list[Any]()
        for m in range(rows):
            weight = factor(plus(start, a_row, const(m)))
            after += [builder.call(multiply_add, (weight, side[v], sums[m * SIDE + v])) for v in range(SIDE)]
        following = builder.add(term, const(1))
        builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
        for value, begun, last in zip((term, *sums), (const(0), *before), (following, *after), strict=True):
            value.add_incoming(begun, entry)
            value.add_incoming(last, loop)
        builder.position_at_end(done)
        for m in range(rows):
            line = plus(out, out_row, const(m))
            for v in range(SIDE):
                to = pointer(builder, builder.add(line, const(v * LANES * WORD)), VECTOR)
                builder.store(after[m * SIDE + v], to, align=WORD)

    return operation(types.void, *(types.int64,) * (12 if listed else 8))(build)


_product_of_many, _product_of_some, _product_of_one = (_sums(rows, listed=False) for rows in (MOST_ROWS, LESS_ROWS, 1))
_addition_to_many, _addition_to_one = (_sums(rows, listed=True) for rows in (MOST_ROWS, 1))


@njit(error_model="numpy")
def dot(a, b, count):
    """Return a . b over `count` numbers, always summed in the same order."""
    whole, sums = count - count % LANES, splat(types.float32(0))
    for n in range(0, whole, LANES):
        sums = fma(load_f32(a + n * WORD), load_f32(b + n * WORD), sums)
    result = total(sums)
    for n in range(whole, count):
        result = first(fma(splat(get_f32(a + n * WORD)), splat(get_f32(b + n * WORD)), splat(result)))
    return result


@njit(error_model="numpy")
def scaled(x, factor, out, count):
    """Write `factor` times each number of x."""
    whole = count - count % LANES
    for n in range(0, whole * WORD, LANES * WORD):
        store_f32(out + n, mul(load_f32(x + n), splat(factor)))
    for n in range(whole * WORD, count * WORD, WORD):
        put_f32(out + n, get_f32(x + n) * factor)


def _each(operate: Any) -> Any:
    """Return a function that writes the result of an operation on each number of x and y."""

    def compute(x, y, out, count):
        whole = count - count % LANES
        for n in range(0, whole * WORD, LANES * WORD):
            store_f32(out + n, operate(load_f32(x + n), load_f32(y + n)))
        for n in range(whole * WORD, count * WORD, WORD):
            put_f32(out + n, first(operate(splat(get_f32(x + n)), splat(get_f32(y + n)))))

    return njit(error_model="numpy")(compute)


multiplied, added, subtracted = _each(mul), _each(add), _each(sub)


@njit(error_model="numpy")
def padded(source, target, width, wide):
    """Copy `width` numbers, and write zeros up to `wide`."""
    scaled(source, types.float32(1), target, width)
    for n in range(width * WORD, wide * WORD, WORD):
        put_f32(target + n, types.float32(0))


@njit(error_model="numpy")
def read_state(x, dim, rows, state, state_row, out):
    """Compute out [rows, TILE] = x [rows, N] times TILE columns of a state."""
    row = 0
    while rows - row >= MOST_ROWS:
        _product_of_many(
            x + row * dim * WORD, dim * WORD, WORD, state, state_row, dim, out + row * TILE_BYTES, TILE_BYTES
        )
        row += MOST_ROWS
    while rows - row >= LESS_ROWS:
        _product_of_some(
            x + row * dim * WORD, dim * WORD, WORD, state, state_row, dim, out + row * TILE_BYTES, TILE_BYTES
        )
        row += LESS_ROWS
    while row < rows:
        _product_of_one(
            x + row * dim * WORD, dim * WORD, WORD, state, state_row, dim, out + row * TILE_BYTES, TILE_BYTES
        )
        row += 1


@njit(error_model="numpy")
def advance(e, dim, source, source_row, keys, u, u_row, places, out, out_row):
    """Compute out = e source + the sum of keys [BLOCK, N] times the u of the places, in TILE columns. out may be
    source."""
    n = 0
    while dim - n >= MOST_ROWS:
        _addition_to_many(
            keys + n * WORD, WORD, dim * WORD, u, u_row, BLOCK, out + n * out_row, out_row, e + n * WORD,
            source + n * source_row, source_row, places,
        )  # fmt: skip
        n += MOST_ROWS
    while n < dim:
        _addition_to_one(
            keys + n * WORD, WORD, dim * WORD, u, u_row, BLOCK, out + n * out_row, out_row, e + n * WORD,
            source + n * source_row, source_row, places,
        )  # fmt: skip
        n += 1


@njit(error_model="numpy")
def write_decayed_keys(keys, keys_row, decays, decays_row, channels, places, dim, block, e):
    """Write the keys of the tokens at BLOCK places, each times the decays after it, to block [BLOCK, N], and the
    product of all decays to e [N]."""
    for n in range(dim):
        put_f32(e + n * WORD, types.float32(1))
    for past in range(BLOCK - 1, -1, -1):
        place = get_i64(places + past * WHOLE)
        multiplied(keys + place * keys_row, e, block + past * dim * WORD, dim)
        decay = decays + place * decays_row
        if channels == 1:
            scaled(e, get_f32(decay), e, dim)
        else:
            multiplied(e, decay, e, dim)


@njit(error_model="numpy")
def weigh(source, alike, keys, keys_row, decays, decays_row, channels, line, terms, dim, x, weights):
    """Write the weights of the tokens of a line for a query or key `source` [N], and to x the source times all decays,
    so that it can read the state. alike: its products with the keys, of use where a decay is one number."""
    factor = types.float32(1)
    scaled(source, factor, x, dim)
    for past in range(terms - 1, -1, -1):
        place = get_i64(line + past * WHOLE)
        if channels == 1:
            put_f32(weights + past * WORD, factor * get_f32(alike + past * WORD))
            factor *= get_f32(decays + place * decays_row)
        else:
            put_f32(weights + past * WORD, dot(x, keys + place * keys_row, dim))
            multiplied(x, decays + place * decays_row, x, dim)
    if channels == 1:
        scaled(source, factor, x, dim)


@njit(error_model="numpy")
def add_line(sums, weights, u, u_row, line, terms, one):
    """Add to `sums` [TILE] the u of the first `terms` tokens of a line, each times its weight."""
    if terms:
        _addition_to_one(weights, 0, WORD, u, u_row, terms, sums, 0, one, sums, 0, line)


@compiled(_F4(_F4, _F4, _I1, _I3, _I2))
def pairs(q, keys, rows, lines, counts):
    """Return q . k of each node with the tokens that it reads one by one, [R, n, G, LEAD + 1].

    q: [R, n, G, N]. keys: planes [rows, places, G, N]. rows: [R] of the planes. lines, counts: of a ScanSchedule.
    """
    nodes, groups, dim = q.shape[1:]
    products = np.zeros((len(rows), nodes, groups, LEAD + 1), np.float32)
    size = dim * WORD
    for r in range(len(rows)):
        for i in range(nodes):
            for group in range(groups):
                query = q.ctypes.data + ((r * nodes + i) * groups + group) * size
                for past in range(counts[r, i]):
                    key = ((rows[r] * keys.shape[1] + lines[r, i, past]) * groups + group) * size
                    products[r, i, group, past] = dot(query, keys.ctypes.data + key, dim)
    return products


@compiled(types.void(_I1, _I2, types.int64, _F4, _F1, types.int64, _F3, _F4, _F1, _F4, _F4, _F4, _F4))
def put(rows, at, lead, k, v, step, scales, g, skip, keys, inputs, decays, y):
    """Store k [R, n, G, N], u [R, n, H, P] and exp of g [R, n, H, 1 or N] in planes [rows, lead + T + 1, ...], whose
    last place belongs to no token.

    u is v times scales [R, n, H], or v where scales are [R, n, 0]. v: the [H, P] of a token begin `step` numbers after
    those of the token before it. y [R, n, H, P] becomes skip [H] times v, or 0 where skip is [0].
    """
    places = keys.shape[1] - lead - 1
    heads, width = inputs.shape[2:]
    for r in range(len(rows)):
        for i in range(at.shape[1]):
            own, place = (r * at.shape[1] + i) * step, lead + at[r, i]
            for h in range(heads):
                source, result = v[own + h * width : own + (h + 1) * width], y[r, i, h]
                factor = skip[h] if len(skip) else np.float32(0)
                for p in range(width):
                    result[p] = factor * source[p] if len(skip) else np.float32(0)
            if at[r, i] >= places:
                continue
            keys[rows[r], place] = k[r, i]
            for h in range(heads):
                source, target = v[own + h * width : own + (h + 1) * width], inputs[rows[r], place, h]
                scale = scales[r, i, h] if scales.shape[2] else np.float32(1)
                for p in range(width):
                    target[p] = source[p] * scale
                for n in range(g.shape[3]):
                    decays[rows[r], place, h, n] = np.exp(g[r, i, h, n])


@compiled(types.void(_F3, types.int64, _I1, _I1))
def join(plane, lead, base, counts):
    """Copy the last `lead` tokens of a common prefix that grew by `counts` [R] to the front of a plane
    [rows, lead + T + 1, size]. base: [R] tokens that the common prefix had before."""
    places, size = plane.shape[1:]
    width, area = places - lead - 1, LANES * WORD
    for r in range(len(base)):
        for place in range(lead if counts[r] else 0):
            past = place + counts[r] - lead  # from the end of the common prefix as it was
            source = past + lead if past < 0 else lead + (base[r] + past) % width
            start = plane.ctypes.data + (r * places + source) * size * WORD
            target = plane.ctypes.data + (r * places + place) * size * WORD
            for at in range(0, size // LANES * area, area):
                store_f32(target + at, load_f32(start + at))
            for c in range(size // LANES * LANES, size):
                plane[r, place, c] = plane[r, source, c]


@njit(error_model="numpy")
def scan_pair(at, pair, work):
    """Scan a pair of row and value head."""
    heads, key_heads = get_i64(at + AT.heads), get_i64(at + AT.key_heads)
    dim, width, wide = get_i64(at + AT.dim), get_i64(at + AT.width), get_i64(at + AT.wide)
    places, nodes, most = get_i64(at + AT.places), get_i64(at + AT.nodes), get_i64(at + AT.most)
    channels, corrects, keep = get_i64(at + AT.channels), get_i64(at + AT.corrects) != 0, get_i64(at + AT.keep) != 0
    r, h = pair // heads, pair % heads
    uses, group = get_i64(get_i64(at + AT.uses) + r * WHOLE), h // (heads // key_heads)
    if not uses:
        return
    # the planes of this head: its first place, and the distance from a place to the next one
    plane, node = get_i64(get_i64(at + AT.planes) + r * WHOLE) * places, r * nodes
    keys_row, inputs_row, decays_row = key_heads * dim * WORD, heads * width * WORD, heads * channels * WORD
    keys = get_i64(at + AT.keys) + plane * keys_row + group * dim * WORD
    inputs = get_i64(at + AT.inputs) + plane * inputs_row + h * width * WORD
    decays = get_i64(at + AT.decays) + plane * decays_row + h * channels * WORD
    # memory: states, u of the tokens that are read, the row's state in whole tiles, and what makes a state
    u_row, area = wide * WORD, dim * wide * WORD
    held = work
    u = held + get_i64(at + AT.buffers) * area
    prefix = u + places * u_row
    e = prefix + area
    block = e + dim * WORD
    # of up to MOST_ROWS nodes: queries and keys that read the state, the results, and weights of the tokens since then
    x, x_key = block + BLOCK * dim * WORD, block + (BLOCK + MOST_ROWS) * dim * WORD
    sums = x_key + MOST_ROWS * dim * WORD
    sums_key = sums + MOST_ROWS * TILE_BYTES
    weights = sums_key + MOST_ROWS * TILE_BYTES
    weights_key = weights + MOST_ROWS * TERMS * WORD
    one = weights_key + MOST_ROWS * TERMS * WORD
    put_f32(one, types.float32(1))
    for index in range(uses):
        place = get_i64(get_i64(at + AT.used) + (r * get_i64(at + AT.most_used) + index) * WHOLE)
        padded(inputs + place * inputs_row, u + place * u_row, width, wide)
    state = get_i64(at + AT.state) + (get_i64(get_i64(at + AT.rows) + r * WHOLE) * heads + h) * dim * width * WORD
    own, own_row = state, width * WORD
    if wide != width:
        own, own_row = prefix, u_row
        for n in range(dim):
            padded(state + n * width * WORD, prefix + n * u_row, width, wide)
    for number in range(r * most, r * most + get_i64(get_i64(at + AT.sizes) + r * WHOLE)):
        of_group = get_i64(at + AT.groups) + number * 3 * WHOLE
        target, source = get_i64(of_group), get_i64(get_i64(at + AT.sources) + number * WHOLE)
        read, read_row = own, own_row
        if target >= 0:
            joined = get_i64(at + AT.blocks) + number * BLOCK * WHOLE
            write_decayed_keys(keys, keys_row, decays, decays_row, channels, joined, dim, block, e)
            made, made_row = own, own_row
            if not keep:
                made, made_row = held + target * area, u_row
                if source >= 0:
                    read, read_row = held + source * area, u_row
            for tile in range(0, wide * WORD, TILE_BYTES):
                advance(e, dim, read + tile, read_row, block, u + tile, u_row, joined, made + tile, made_row)
            read, read_row = made, made_row
        last = get_i64(of_group + 2 * WHOLE)
        for begin in range(get_i64(of_group + WHOLE), last, MOST_ROWS):
            count = min(MOST_ROWS, last - begin)
            for m in range(count):
                i = node + get_i64(get_i64(at + AT.order) + (node + begin + m) * WHOLE)
                line, terms = get_i64(at + AT.lines) + i * TERMS * WHOLE, get_i64(get_i64(at + AT.counts) + i * WHOLE)
                of_node = i * key_heads + group
                weigh(
                    get_i64(at + AT.q) + of_node * dim * WORD, get_i64(at + AT.query_keys) + of_node * TERMS * WORD,
                    keys, keys_row, decays, decays_row, channels, line, terms, dim, x + m * dim * WORD,
                    weights + m * TERMS * WORD,
                )  # fmt: skip
                if corrects:
                    weigh(
                        keys + get_i64(line + (terms - 1) * WHOLE) * keys_row,
                        get_i64(at + AT.key_keys) + of_node * TERMS * WORD, keys, keys_row, decays, decays_row,
                        channels, line, terms, dim, x_key + m * dim * WORD, weights_key + m * TERMS * WORD,
                    )  # fmt: skip
            for tile in range(0, wide * WORD, TILE_BYTES):
                read_state(x, dim, count, read + tile, read_row, sums)
                if corrects:
                    read_state(x_key, dim, count, read + tile, read_row, sums_key)
                columns = min(TILE, width - tile // WORD)
                for m in range(count):
                    i = node + get_i64(get_i64(at + AT.order) + (node + begin + m) * WHOLE)
                    line, here = get_i64(at + AT.lines) + i * TERMS * WHOLE, sums + m * TILE_BYTES
                    terms = get_i64(get_i64(at + AT.counts) + i * WHOLE)
                    if corrects:
                        of_key = sums_key + m * TILE_BYTES
                        add_line(of_key, weights_key + m * TERMS * WORD, u + tile, u_row, line, terms - 1, one)
                        place = get_i64(line + (terms - 1) * WHOLE)
                        value = get_i64(at + AT.v) + (i * get_i64(at + AT.step) + h * width) * WORD + tile
                        subtracted(value, of_key, of_key, columns)
                        scale = get_f32(get_i64(at + AT.beta) + (i * heads + h) * WORD)
                        scaled(of_key, scale, u + place * u_row + tile, columns)
                        scaled(of_key, scale, inputs + place * inputs_row + tile, columns)
                    add_line(here, weights + m * TERMS * WORD, u + tile, u_row, line, terms, one)
                    y = get_i64(at + AT.y) + (i * heads + h) * width * WORD + tile
                    added(y, here, y, columns)
    if keep and wide != width:
        for n in range(dim):
            scaled(prefix + n * u_row, types.float32(1), state + n * width * WORD, width)


_PLAN = (_I3, _I2, _I2, _I3, _I2, _I3, _I1, _I2, _I1)  # arrays of a ScanSchedule


@compiled(types.UniTuple(types.int64, 21)(_F4, _I1, _I1, _F4, _F1, _F3, *(_F4,) * 5, *_PLAN, _F4))
def addresses(state, rows, planes, q, v, beta, query_keys, key_keys, keys, inputs, decays,
              lines, counts, order, groups, sources, blocks, sizes, used, uses, y):  # fmt: skip
    """Return the addresses of the arrays of a ScanArguments. Raises TypeError for another dtype, or gaps."""
    return (
        state.ctypes.data, rows.ctypes.data, planes.ctypes.data, q.ctypes.data, v.ctypes.data, beta.ctypes.data,
        query_keys.ctypes.data, key_keys.ctypes.data, keys.ctypes.data, inputs.ctypes.data, decays.ctypes.data,
        lines.ctypes.data, counts.ctypes.data, order.ctypes.data, groups.ctypes.data, sources.ctypes.data,
        blocks.ctypes.data, sizes.ctypes.data, used.ctypes.data, uses.ctypes.data, y.ctypes.data,
    )  # fmt: skip


def memory_bytes(dim: int, wide: int, places: int, buffers: int) -> int:
    """Return the bytes that a thread works in. wide: P in whole tiles. places: of a plane."""
    of_rows = (BLOCK + 1 + 2 * MOST_ROWS) * dim + 2 * MOST_ROWS * (TILE + TERMS) + 1
    return WORD * ((buffers + 1) * dim * wide + places * wide + of_rows)


@compiled.addressed
def scan_pairs(at):
    """Scan each pair of row and value head that no other thread has taken. at: a ScanArguments of ops/cpu/scan.py."""
    work = get_i64(at + AT.work) + take(at + AT.threads) * get_i64(at + AT.work_bytes)
    pair = take(at + AT.taken)
    while pair < get_i64(at + AT.items):
        scan_pair(at, pair, work)
        pair = take(at + AT.taken)
