"""Recurrent layers over a packed forest on a CPU: each node's state is made from its parent's, in float32.

`scans` sums over a node's ancestors, which a GPU does well. Here the recurrence is walked as it is written, node after
node, children after their parents:

    S_t = exp(g_t) S_parent + k_t u_t^T,   y_t = q_t S_t,   S the state of the trunk where t has no parent in the tail
    gated delta rule:  u_t = beta_t (v_t - k_t (exp(g_t) S_parent))

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
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["chain", "convolve", "fold", "forest", "put", "schedule", "shared", "silu"]

LANES, SIDE = 8, 4  # numbers of a vector, vectors of a tile
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


def _tile(*, new: bool, kept: bool, read: bool) -> Callable[..., None]:
    """One tile of a node, over all N rows of its state: s = source; if new, s = k u + e s; if kept, s is stored; if
    read, out = sum of q s. Rows of the source are `step` numbers apart, those of the target TILE; offsets count numbers
    of the flat arrays.

    Written in vectors by hand: left to itself, the compiler reads and writes `out` once per row of the state.
    """

    @intrinsic
    def tile(context: Any, source: Any, source_at: Any, step: Any, target: Any, target_at: Any, e: Any, k: Any,
             k_at: Any, u: Any, u_at: Any, q: Any, q_at: Any, out: Any, out_at: Any, count: Any) -> Any:  # fmt: skip
        given = (source, source_at, step, target, target_at, e, k, k_at, u, u_at, q, q_at, out, out_at, count)
        signature = types.void(*[types.intp if isinstance(one, types.Integer) else one for one in given])

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source, source_at, step, target, target_at, e, k, k_at, u, u_at, q, q_at, out, out_at, count = (
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

            inputs = [builder.load(place(u, u_at, lane), align=4) for lane in range(SIDE)] if new else []
            before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.branch(loop)
            builder.position_at_end(loop)
            row = builder.phi(integer)
            row.add_incoming(integer(0), before)
            sums = [builder.phi(_VECTOR) for _ in range(SIDE if read else 0)]
            for total in sums:
                total.add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), before)
            offset, own = builder.mul(row, step), builder.mul(row, integer(TILE))
            decay = wide(e, row) if new else None
            key = wide(k, builder.add(k_at, row)) if new else None
            query = wide(q, builder.add(q_at, row)) if read else None
            totals = []
            for lane in range(SIDE):
                held = builder.load(place(source, builder.add(source_at, offset), lane), align=4)
                if new:
                    held = builder.call(multiply_add, [key, inputs[lane], builder.fmul(decay, held)])
                if kept:
                    builder.store(held, place(target, builder.add(target_at, own), lane), align=4)
                if read:
                    totals.append(builder.call(multiply_add, [query, held, sums[lane]]))
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


_recall_tile = _tile(new=False, kept=False, read=True)
_keep_tile = _tile(new=True, kept=True, read=False)
_both_tile = _tile(new=True, kept=True, read=True)
_read_tile = _tile(new=True, kept=False, read=True)


@compiled
def _recall(source, source_at, step, columns, keys, out):
    """out [columns] = keys S."""
    count = len(keys)
    if columns == TILE:
        _recall_tile(source, source_at, step, source, 0, keys, keys, 0, source, 0, keys, 0, out, 0, count)
        return
    for at in range(columns):
        total = np.float32(0)
        for n in range(count):
            total = _fma(keys[n], source[source_at + n * step + at], total)
        out[at] = total


@compiled
def _keep(source, source_at, step, target, target_at, columns, e, k, k_at, u, u_at):
    """target = e S + k u^T; the two may be the same. Rows of S are `step` numbers apart, those of the target TILE."""
    count = len(e)
    if columns == TILE:
        _keep_tile(source, source_at, step, target, target_at, e, k, k_at, u, u_at, k, 0, u, 0, count)
        return
    for at in range(columns):
        for n in range(count):
            held = e[n] * source[source_at + n * step + at]
            target[target_at + n * TILE + at] = _fma(k[k_at + n], u[u_at + at], held)


@compiled
def _step(source, source_at, step, target, target_at, kept, columns, e, k, k_at, u, u_at, q, q_at, out, out_at):
    """The same, and out = q target; the state is stored where kept says so."""
    count = len(e)
    if columns == TILE:
        if kept:
            _both_tile(source, source_at, step, target, target_at, e, k, k_at, u, u_at, q, q_at, out, out_at, count)
        else:
            _read_tile(source, source_at, step, target, 0, e, k, k_at, u, u_at, q, q_at, out, out_at, count)
        return
    for at in range(columns):
        total = np.float32(0)
        for n in range(count):
            held = _fma(k[k_at + n], u[u_at + at], e[n] * source[source_at + n * step + at])
            if kept:
                target[target_at + n * TILE + at] = held
            total = _fma(q[q_at + n], held, total)
        out[out_at + at] = total


@compiled
def schedule(seen, at, depths):
    """The order in which nodes are walked, parents first: steps [R, T, 4], how many of each row [R], and the number of
    states that are held at once.

    seen: [R, n, T] bool. at: [R, n] places, T where a node is absent. depths: [R, T]. A step is (place, node or -1,
    state of the parent, state to make): -1 as the parent's is the trunk's, and -1 as the last means that no one
    needs it.
    """
    rows, nodes, places = seen.shape
    steps, counts, most = np.full((rows, places, 4), -1, np.int64), np.zeros(rows, np.int64), 1
    for r in range(rows):
        parent, children = np.full(places, -1, np.int64), np.zeros(places, np.int64)
        node_of, used = np.full(places, -1, np.int64), np.zeros(places, np.bool_)
        line = np.empty(places + 1, np.int64)
        for i in range(nodes):
            own = at[r, i]
            if own >= places:
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
            if at[r, i] < places:
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
def forest(state, rows, q, v, beta, keys, inputs, decays, lead, steps, counts, most, y, first, last):
    """y [R, n, H, P] of the nodes of `steps` (see `schedule`) from the trunk's state [rows, H, N, P] and planes as
    `put` has left them; 0 of absent nodes, and of later nodes in a place. beta: [R, n, H], or [R, n, 0] where u is
    given as it is; else u is made of v and stored.
    """
    heads, dim, width = state.shape[1:]
    groups, places, nodes = keys.shape[2], keys.shape[1], q.shape[1]
    corrects = beta.shape[2] > 0
    flat, k, u, q, out = state.ravel(), keys.ravel(), inputs.ravel(), q.ravel(), y.ravel()
    size = dim * TILE
    held, recalled = np.empty(most * size, np.float32), np.empty(TILE, np.float32)
    e, room = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for pair in range(first, last):
        r, h = pair // heads, pair % heads
        group = h // (heads // groups)
        trunk = (rows[r] * heads + h) * dim * width
        for begin in range(0, width, TILE):
            columns = min(TILE, width - begin)
            for index in range(counts[r]):
                place, node, above, own = steps[r, index]
                here = rows[r] * places + lead + place
                k_at, u_at = (here * groups + group) * dim, (here * heads + h) * width + begin
                _spread(decays[rows[r], lead + place, h], e)
                source, source_at, step = (flat, trunk + begin, width) if above < 0 else (held, above * size, TILE)
                if node < 0:
                    _keep(source, source_at, step, held, own * size, columns, e, k, k_at, u, u_at)
                    continue
                if corrects:
                    for n in range(dim):
                        room[n] = k[k_at + n] * e[n]
                    _recall(source, source_at, step, columns, room, recalled)
                    for p in range(columns):
                        u[u_at + p] = beta[r, node, h] * (v[r, node, h, begin + p] - recalled[p])
                y_at, q_at = ((r * nodes + node) * heads + h) * width, ((r * nodes + node) * groups + group) * dim
                _step(source, source_at, step, held, own * size, own >= 0, columns, e, k, k_at, u, u_at,
                      q, q_at, out, y_at + begin)  # fmt: skip


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
def chain(state, rows, lengths, q, k, v, g, beta, y, first, last):
    """y [R, n, H, P] of tokens that follow one another, the first `lengths` [R] of each row; they go into the state."""
    heads, dim, width = state.shape[1:]
    groups, nodes = k.shape[2], k.shape[1]
    corrects = beta.shape[2] > 0
    flat, keys, q, out = state.ravel(), k.ravel(), q.ravel(), y.ravel()
    held, u, decay = np.empty(dim * TILE, np.float32), np.empty(TILE, np.float32), np.empty(g.shape[3], np.float32)
    e, room = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for pair in range(first, last):
        r, h = pair // heads, pair % heads
        at = (rows[r] * heads + h) * dim * width
        for begin in range(0, width, TILE):
            columns = min(TILE, width - begin)
            _load(flat, at + begin, width, columns, held)
            for i in range(lengths[r]):
                for n in range(len(decay)):
                    decay[n] = np.exp(g[r, i, h, n])
                _spread(decay, e)
                k_at = ((r * nodes + i) * groups + h // (heads // groups)) * dim
                if corrects:
                    for n in range(dim):
                        room[n] = keys[k_at + n] * e[n]
                    _recall(held, 0, TILE, columns, room, u)
                    for p in range(columns):
                        u[p] = beta[r, i, h] * (v[r, i, h, begin + p] - u[p])
                else:
                    for p in range(columns):
                        u[p] = v[r, i, h, begin + p]
                out_at = ((r * nodes + i) * heads + h) * width + begin
                _step(held, 0, TILE, held, 0, True, columns, e, keys, k_at, u, 0, q, k_at, out, out_at)
            _store(flat, at + begin, width, columns, held)


@compiled
def fold(state, keys, inputs, decays, lead, order, count, first, last):
    """Take the places order[r, :count[r]] of planes, parents first, into the states of the first rows."""
    heads, dim, width = state.shape[1:]
    groups, places = keys.shape[2], keys.shape[1]
    flat, k, u = state.ravel(), keys.ravel(), inputs.ravel()
    held, e = np.empty(dim * TILE, np.float32), np.empty(dim, np.float32)
    for pair in range(first, last):
        r, h = pair // heads, pair % heads
        at = (r * heads + h) * dim * width
        for begin in range(0, width if count[r] else 0, TILE):
            columns = min(TILE, width - begin)
            _load(flat, at + begin, width, columns, held)
            for index in range(count[r]):
                here = lead + order[r, index]
                place = r * places + here
                _spread(decays[r, here, h], e)
                k_at = (place * groups + h // (heads // groups)) * dim
                _keep(held, 0, TILE, held, 0, columns, e, k, k_at, u, (place * heads + h) * width + begin)
            _store(flat, at + begin, width, columns, held)


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
