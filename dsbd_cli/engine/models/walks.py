"""Recurrent layers over a packed forest on a CPU: each node's state is made from its parent's, in float32.

`scans` sums over a node's ancestors, which a GPU does well. Here the recurrence is walked as it is written, node after
node, children after their parents:

    S_t = exp(g_t) S_parent + k_t u_t^T,   S the state of the trunk where t has no parent in the tail
    y_t = q_t S_t = (exp(g_t) q_t) S_parent + (q_t . k_t) u_t
    gated delta rule:  u_t = beta_t (v_t - (exp(g_t) k_t) S_parent)

The second form of y needs no S_t of a token without children. Where decays are strong, y is u times one number, and a
norm after the layer takes away what rounding did to that number.

A number of S_t takes the same operations in the same order wherever the trunk ends and whatever else is in the forward.
So the bits do not depend on it. A state that no later node needs is overwritten, so that few are held at once.

Letters as in `scans`, but a state is [R, H, N, P]. All arrays are float32 and contiguous. Every kernel works on the
pairs first .. last of (row, value head), so that threads can share them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["alike", "chain", "convolve", "fold", "forest", "put", "schedule", "shared", "silu"]

LANES = 16 if get_host_cpu_features().get("avx512f") else 8  # numbers of a vector
SIDE = 4  # vectors of a tile
TILE = LANES * SIDE  # columns of a state that are walked together, held in registers
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)


def compiled(function: Any) -> Any:
    """The function as a kernel that lets other threads run. Kept on disk, where there is a place for it."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # numba found no folder that it may write
        return njit(nogil=True, error_model="numpy")(function)


def shared(kernel: Any, pairs: int, *arguments: Any) -> None:
    """Run a kernel over so many pairs of row and head, with as many threads as torch has."""
    threads = min(torch.get_num_threads(), pairs)
    if threads < 2:
        kernel(*arguments, 0, pairs)
        return
    ends = [pairs * part // threads for part in range(threads + 1)]
    for done in [_threads().submit(kernel, *arguments, *part) for part in pairwise(ends)]:
        done.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "scan")


@intrinsic
def _fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), code


@intrinsic
def _power(context: Any, x: Any) -> Any:
    """2 to a whole number between -126 and 127, by its bits."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer = ir.IntType(32)
        exponent = builder.add(builder.fptosi(arguments[0], integer), integer(127))
        return builder.bitcast(builder.shl(exponent, integer(23)), _FLOAT)

    return types.float32(types.float32), code


def _tile(*, kept: bool, read: bool) -> Callable[..., None]:
    """One tile of a node, over all N rows of its parent's state s: if read, out = sum of q s; if kept, the target is
    k u + e s. Rows of the source are `step` numbers apart, those of the target `stride`; offsets count numbers
    of the flat arrays.

    Written in vectors by hand: left to itself, the compiler reads and writes `out` once per row of the state.
    """

    @intrinsic
    def tile(context: Any, source: Any, source_at: Any, step: Any, target: Any, target_at: Any, stride: Any,
             e: Any, k: Any, k_at: Any, u: Any, u_at: Any, q: Any, q_at: Any, out: Any, out_at: Any,
             count: Any) -> Any:  # fmt: skip
        given = (source, source_at, step, target, target_at, stride, e, k, k_at, u, u_at, q, q_at, out, out_at, count)
        signature = types.void(*[types.intp if isinstance(one, types.Integer) else one for one in given])

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source, source_at, step, target, target_at, stride, e, k, k_at, u, u_at, q, q_at, out, out_at, count = (
                value if kind == types.intp else context.make_array(kind)(context, builder, value).data
                for kind, value in zip(signature.args, arguments, strict=True)
            )
            integer = count.type
            multiply_add = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
            )

            def place(base: Any, at: Any, lane: int) -> Any:
                where = builder.gep(base, [builder.add(at, integer(lane * LANES))])
                return builder.bitcast(where, _VECTOR.as_pointer())

            def wide(base: Any, at: Any) -> Any:
                number = builder.load(builder.gep(base, [at]))
                one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.IntType(32)(0))
                zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
                return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), zeros)

            inputs = [builder.load(place(u, u_at, lane), align=4) for lane in range(SIDE)] if kept else []
            before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.branch(loop)
            builder.position_at_end(loop)
            row = builder.phi(integer)
            row.add_incoming(integer(0), before)
            sums = [builder.phi(_VECTOR) for _ in range(SIDE if read else 0)]
            for total in sums:
                total.add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), before)
            offset, own = builder.mul(row, step), builder.mul(row, stride)
            decay = wide(e, row) if kept else None
            key = wide(k, builder.add(k_at, row)) if kept else None
            query = wide(q, builder.add(q_at, row)) if read else None
            totals = []
            for lane in range(SIDE):
                held = builder.load(place(source, builder.add(source_at, offset), lane), align=4)
                if read:
                    totals.append(builder.call(multiply_add, [query, held, sums[lane]]))
                if kept:
                    held = builder.call(multiply_add, [key, inputs[lane], builder.fmul(decay, held)])
                    builder.store(held, place(target, builder.add(target_at, own), lane), align=4)
            following = builder.add(row, integer(1))
            row.add_incoming(following, loop)
            for total, later in zip(sums, totals, strict=True):
                total.add_incoming(later, loop)
            builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
            builder.position_at_end(after)
            for lane, total in enumerate(totals):
                builder.store(total, place(out, out_at, lane), align=4)
            return context.get_dummy_value()

        return signature, code

    return tile


_read_tile = _tile(kept=False, read=True)
_keep_tile = _tile(kept=True, read=False)
_both_tile = _tile(kept=True, read=True)


@compiled
def _read(source, source_at, step, columns, q, out):
    """out [columns] = q S."""
    count = len(q)
    if columns == TILE:
        _read_tile(source, source_at, step, source, 0, 0, q, q, 0, source, 0, q, 0, out, 0, count)
        return
    for at in range(columns):
        total = np.float32(0)
        for n in range(count):
            total = _fma(q[n], source[source_at + n * step + at], total)
        out[at] = total


@compiled
def _keep(source, source_at, step, target, target_at, stride, columns, e, k, k_at, u, u_at):
    """target = e S + k u^T; the two may be the same. Rows of S are `step` numbers apart, those of the target
    `stride`."""
    count = len(e)
    if columns == TILE:
        _keep_tile(source, source_at, step, target, target_at, stride, e, k, k_at, u, u_at, k, 0, u, 0, count)
        return
    for at in range(columns):
        for n in range(count):
            held = e[n] * source[source_at + n * step + at]
            target[target_at + n * stride + at] = _fma(k[k_at + n], u[u_at + at], held)


@compiled
def _both(source, source_at, step, target, target_at, columns, e, k, k_at, u, u_at, q, out):
    """Both: out = q S, and then the target."""
    if columns == TILE:
        _both_tile(source, source_at, step, target, target_at, TILE, e, k, k_at, u, u_at, q, 0, out, 0, len(e))
        return
    _read(source, source_at, step, columns, q, out)
    _keep(source, source_at, step, target, target_at, TILE, columns, e, k, k_at, u, u_at)


@compiled
def alike(q, k):
    """q . k of each node and key head, [R, n, G]."""
    found = np.zeros(q.shape[:3], np.float32)
    for r in range(q.shape[0]):
        for i in range(q.shape[1]):
            for n in range(q.shape[3]):
                for g in range(q.shape[2]):
                    found[r, i, g] = _fma(q[r, i, g, n], k[r, i, g, n], found[r, i, g])
    return found


@compiled
def schedule(seen, at, depths):
    """The order in which nodes are walked, parents first: steps [R, T + n, 4], how many of each row [R], and the number
    of states that are held at once.

    seen: [R, n, T] bool. at: [R, n] places, -1 where the trunk's state holds the token already, T where a node is
    absent. depths: [R, T]. A step is (place, node or -1, state of the parent, state to make): -1 as the parent's is the
    trunk's, and -1 as the last means that no one needs it.
    """
    rows, nodes, places = seen.shape
    steps, counts, most = np.full((rows, places + nodes, 4), -1, np.int64), np.zeros(rows, np.int64), 1
    for r in range(rows):
        parent, children = np.full(places, -1, np.int64), np.zeros(places, np.int64)
        node_of, used = np.full(places, -1, np.int64), np.zeros(places, np.bool_)
        line = np.empty(places + 1, np.int64)
        for i in range(nodes):
            own = at[r, i]
            if own < 0:
                steps[r, counts[r], 1] = i
                counts[r] += 1
            if own < 0 or own >= places:
                continue
            if node_of[own] < 0:
                node_of[own] = i
            line[:] = -1
            for place in range(places):
                if seen[r, i, place]:
                    used[place] = True
                    line[depths[r, own] - depths[r, place]] = place
            for back in range(places):
                if line[back] >= 0:
                    parent[line[back]] = line[back + 1]
        for place in range(places):
            if used[place] and parent[place] >= 0:
                children[parent[place]] += 1
        left = children.copy()
        state, free, top = np.full(places, -1, np.int64), np.empty(places, np.int64), 0
        stack, high = np.empty(places, np.int64), 0
        for place in range(places - 1, -1, -1):
            if used[place] and parent[place] < 0:
                stack[high], high = place, high + 1
        made = 0
        while high:
            high -= 1
            place = stack[high]
            above = parent[place]
            source, target = np.int64(-1), np.int64(-1)
            last = False
            if above >= 0:
                source, left[above] = state[above], left[above] - 1
                last = left[above] == 0
            if children[place] and last:
                target = source
            elif children[place] and top:
                top -= 1
                target = free[top]
            elif children[place]:
                target, made = made, made + 1
            elif last:
                free[top], top = source, top + 1
            state[place] = target
            step = counts[r]
            steps[r, step, 0], steps[r, step, 1] = place, node_of[place]
            steps[r, step, 2], steps[r, step, 3] = source, target
            counts[r] = step + 1
            for child in range(places - 1, -1, -1):
                if used[child] and parent[child] == place:
                    stack[high], high = child, high + 1
        most = max(most, made)
    return steps, counts, most


@compiled
def put(rows, at, lead, k, u, g, keys, inputs, decays):
    """Store k [R, n, G, N], u [R, n, H, P] and exp of g [R, n, H, 1 or N] in planes [rows, lead + T + 1, ...]."""
    places = keys.shape[1] - lead - 1
    for r in range(len(rows)):
        for i in range(at.shape[1]):
            if 0 <= at[r, i] < places:
                place = lead + at[r, i]
                keys[rows[r], place] = k[r, i]
                inputs[rows[r], place] = u[r, i]
                for h in range(g.shape[2]):
                    for n in range(g.shape[3]):
                        decays[rows[r], place, h, n] = np.exp(g[r, i, h, n])


@compiled
def _spread(decay, e):
    """A decay per key channel, from one per head or per channel."""
    if len(decay) == 1:
        e[:] = decay[0]
    else:
        e[:] = decay


@compiled
def forest(state, rows, q, v, beta, same, keys, inputs, decays, lead, steps, counts, most, y, first, last):
    """y [R, n, H, P] of the nodes of `steps` (see `schedule`) from the trunk's state [rows, H, N, P] and planes as
    `put` has left them; 0 of absent nodes, and of later nodes in a place. beta: [R, n, H], or [R, n, 0] where u is
    given as it is; else u is made of v and stored. same: [R, n, G], see `alike`.
    """
    heads, dim, width = state.shape[1:]
    groups, places = keys.shape[2], keys.shape[1]
    corrects = beta.shape[2] > 0
    flat, k, u = state.ravel(), keys.ravel(), inputs.ravel()
    size = dim * TILE
    held, found = np.empty(most * size, np.float32), np.empty(TILE, np.float32)
    e, wanted = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for pair in range(first, last):
        r, h = pair // heads, pair % heads
        group = h // (heads // groups)
        trunk = (rows[r] * heads + h) * dim * width
        for begin in range(0, width, TILE):
            columns = min(TILE, width - begin)
            for index in range(counts[r]):
                place, node, above, own = steps[r, index]
                if place < 0:  # what the state says of its last token, without a decay
                    _read(flat, trunk + begin, width, columns, q[r, node, group], found)
                    y[r, node, h, begin : begin + columns] = found[:columns]
                    continue
                here = rows[r] * places + lead + place
                k_at, u_at = (here * groups + group) * dim, (here * heads + h) * width + begin
                _spread(decays[rows[r], lead + place, h], e)
                source, source_at, step = (flat, trunk + begin, width) if above < 0 else (held, above * size, TILE)
                if node < 0:
                    _keep(source, source_at, step, held, own * size, TILE, columns, e, k, k_at, u, u_at)
                    continue
                if corrects:
                    for n in range(dim):
                        wanted[n] = k[k_at + n] * e[n]
                    _read(source, source_at, step, columns, wanted, found)
                    for p in range(columns):
                        u[u_at + p] = beta[r, node, h] * (v[r, node, h, begin + p] - found[p])
                for n in range(dim):
                    wanted[n] = q[r, node, group, n] * e[n]
                if own < 0:
                    _read(source, source_at, step, columns, wanted, found)
                else:
                    _both(source, source_at, step, held, own * size, columns, e, k, k_at, u, u_at, wanted, found)
                for p in range(columns):
                    y[r, node, h, begin + p] = _fma(same[r, node, group], u[u_at + p], found[p])


@compiled
def _load(state, at, width, columns, tile):
    """Columns of a state, side by side."""
    for n in range(len(tile) // TILE):
        for p in range(columns):
            tile[n * TILE + p] = state[at + n * width + p]


@compiled
def _store(state, at, width, columns, tile):
    """And back."""
    for n in range(len(tile) // TILE):
        for p in range(columns):
            state[at + n * width + p] = tile[n * TILE + p]


@compiled
def chain(state, rows, lengths, q, k, v, g, beta, same, y, first, last):
    """y [R, n, H, P] of tokens that follow one another, the first `lengths` [R] of each row; they go into the state."""
    heads, dim, width = state.shape[1:]
    groups, nodes = k.shape[2], k.shape[1]
    corrects = beta.shape[2] > 0
    flat, keys = state.ravel(), k.ravel()
    held, u, decay = np.empty(dim * TILE, np.float32), np.empty(TILE, np.float32), np.empty(g.shape[3], np.float32)
    e, wanted, found = np.empty(dim, np.float32), np.empty(dim, np.float32), np.empty(TILE, np.float32)
    for pair in range(first, last):
        r, h = pair // heads, pair % heads
        at, group = (rows[r] * heads + h) * dim * width, h // (heads // groups)
        for begin in range(0, width, TILE):
            columns = min(TILE, width - begin)
            _load(flat, at + begin, width, columns, held)
            for i in range(lengths[r]):
                for n in range(len(decay)):
                    decay[n] = np.exp(g[r, i, h, n])
                _spread(decay, e)
                k_at = ((r * nodes + i) * groups + group) * dim
                for p in range(columns):
                    u[p] = v[r, i, h, begin + p]
                if corrects:
                    for n in range(dim):
                        wanted[n] = keys[k_at + n] * e[n]
                    _read(held, 0, TILE, columns, wanted, found)
                    for p in range(columns):
                        u[p] = beta[r, i, h] * (u[p] - found[p])
                for n in range(dim):
                    wanted[n] = q[r, i, group, n] * e[n]
                _both(held, 0, TILE, held, 0, columns, e, keys, k_at, u, 0, wanted, found)
                for p in range(columns):
                    y[r, i, h, begin + p] = _fma(same[r, i, group], u[p], found[p])
            _store(flat, at + begin, width, columns, held)


@compiled
def fold(state, keys, inputs, decays, lead, order, count, first, last):
    """Take the places order[r, :count[r]] of planes, parents first, into the states of the first rows."""
    heads, dim, width = state.shape[1:]
    groups, places = keys.shape[2], keys.shape[1]
    flat, k, u = state.ravel(), keys.ravel(), inputs.ravel()
    e = np.empty(dim, np.float32)
    for pair in range(first, last):
        r, h = pair // heads, pair % heads
        at = (r * heads + h) * dim * width
        for begin in range(0, width if count[r] else 0, TILE):
            columns = min(TILE, width - begin)
            for index in range(count[r]):
                here = lead + order[r, index]
                place = r * places + here
                _spread(decays[r, here, h], e)
                k_at = (place * groups + h // (heads // groups)) * dim
                u_at = (place * heads + h) * width + begin
                _keep(flat, at + begin, width, flat, at + begin, width, columns, e, k, k_at, u, u_at)


@compiled
def convolve(plane, back, x, weight, bias, out):
    """As `scans.convolve`, for inputs that lie in a plane [places, C]: back [J - 1, n] says where, x [n, C] are the
    nodes' own. weight: [J, C]. bias: [C], or [0]. out: [n, C]."""
    taps, channels = weight.shape
    for i in range(len(x)):
        total = out[i]
        for tap in range(taps):
            values = x[i] if tap == taps - 1 else plane[back[tap, i]]
            factors = weight[tap]
            if tap == 0:
                for c in range(channels):
                    total[c] = values[c] * factors[c]
            else:
                for c in range(channels):
                    total[c] += values[c] * factors[c]
        for c in range(len(bias)):
            total[c] += bias[c]


@njit(inline="always")
def _exp(x):
    """exp in float32, within 2 units in the last place, in operations that a vector has as well: the library's own
    differ between the vectors and the numbers that are left over. (Cephes.)"""
    x = np.float32(-87) if x < np.float32(-87) else x
    x = np.float32(88) if x > np.float32(88) else x
    whole = np.floor(_fma(x, np.float32(1.44269504088896341), np.float32(0.5)))
    rest = _fma(whole, np.float32(-0.693359375), x)
    rest = _fma(whole, np.float32(2.12194440e-4), rest)
    total = np.float32(1.9875691500e-4)
    total = _fma(total, rest, np.float32(1.3981999507e-3))
    total = _fma(total, rest, np.float32(8.3334519073e-3))
    total = _fma(total, rest, np.float32(4.1665795894e-2))
    total = _fma(total, rest, np.float32(1.6666665459e-1))
    total = _fma(total, rest, np.float32(5.0000001201e-1))
    total = _fma(total, rest * rest, rest) + np.float32(1)
    return total * _power(whole)


@compiled
def silu(x):
    """x / (1 + exp(-x)) of a flat array, in place."""
    for i in range(len(x)):
        x[i] = x[i] / (np.float32(1) + _exp(-x[i]))
