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
their ScanSchedule.

Letters as in models/recurrent/scans.py, but a state is [R, H, N, P]. All arrays are contiguous, and float32 or int64.
`recurrent_scan` works on the pairs first .. last of (row, value head), so that threads can share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from dsbd_cli.ops.cpu.kernels import simd as lanes
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.processor import Processor, current

BLOCK = 8  # tokens that go into a state at once
LEAST_ONE_BY_ONE = 16  # tokens that a token reads one by one, at least
LEAD = LEAST_ONE_BY_ONE + BLOCK - 1  # tokens of the common prefix whose inputs are kept

LANES = 16 if current() >= Processor.AVX512 else 8  # numbers of a vector
SIDE = 4  # vectors of a tile
TILE = LANES * SIDE  # columns of a state that are worked on together
MOST_ROWS, LESS_ROWS = (6, 3) if LANES == 16 else (3, 2)  # rows of a product whose sums fit into the registers
AHEAD = 512  # numbers ahead of those in use at which a state is prefetched
compiled = KernelCompiler("recurrent layers", seconds=15)

_LOG2E, _LOG2E_REST, _LN2 = np.float32(1.44269502), np.float32(1.92596299e-8), np.float32(0.693147181)
_SIDE = 4 * lanes.LANES  # channels of a convolution at a time
_NEAR = 16 * _SIDE  # channels whose weights stay in the cache

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)


def shared(kernel: Any, count: int, *arguments: Any) -> None:
    """Run a kernel over `count` pairs of row and head, with as many threads as torch has."""
    threads = min(torch.get_num_threads(), count)
    if threads < 2:
        kernel(*arguments, 0, count)
        return
    ends = [count * part // threads for part in range(threads + 1)]
    pool = _threads(torch.get_num_threads())
    for done in [pool.submit(kernel, *arguments, *part) for part in pairwise(ends)]:
        done.result()


@cache  # for each number of threads that torch has had: two engines of one process may differ
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "scan")


@intrinsic
def _fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a b + c, rounded once."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), code


class _Vectors:
    """A builder of LLVM code over vectors of LANES numbers, which numba lacks."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self._fma, [a, b, c])

    def place(self, base: Any, at: Any, lane: int = 0) -> Any:
        where = self.builder.gep(base, [self.builder.add(at, at.type(lane * LANES))])
        return self.builder.bitcast(where, _VECTOR.as_pointer())

    def load(self, base: Any, at: Any, lane: int = 0) -> Any:
        return self.builder.load(self.place(base, at, lane), align=4)

    def ahead(self, base: Any, at: Any, lane: int, distance: int) -> None:
        """Prefetch the vector `distance` numbers further on, because a row's state comes from main memory."""
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(ir.IntType(8)), _INT, _INT, _INT])
        prefetch = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        where = self.builder.gep(base, [self.builder.add(at, at.type(lane * LANES + distance))])
        where = self.builder.bitcast(where, kind.args[0])
        self.builder.call(prefetch, [where, _INT(0), _INT(3), _INT(1)])

    def wide(self, base: Any, at: Any) -> Any:
        """Load one number into all lanes."""
        number = self.builder.load(self.builder.gep(base, [at]))
        one = self.builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, _INT(0))
        zeros = ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES)
        return self.builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), zeros)

    def total(self, value: Any) -> Any:
        """Return the sum of the lanes: add both halves, then the halves of that, and so on."""
        count = LANES
        while count > 1:
            count //= 2
            kind = ir.VectorType(_INT, count)
            halves = [
                self.builder.shuffle_vector(value, value, ir.Constant(kind, list(range(first, first + count))))
                for first in (0, count)
            ]
            value = self.builder.fadd(*halves)
        return self.builder.extract_element(value, _INT(0))

    @contextmanager
    def loop(self, count: Any, sums: list[Any]) -> Iterator[Any]:
        """Build a loop of the code inside, which runs for each number below `count`, at least once. The code replaces
        the items of `sums`; after the loop they are those of the last round."""
        builder, before = self.builder, self.builder.block
        body, after = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(body)
        builder.position_at_end(body)
        number = builder.phi(count.type)
        number.add_incoming(count.type(0), before)
        held = [builder.phi(_VECTOR) for _ in sums]
        for one, start in zip(held, sums, strict=True):
            one.add_incoming(start, before)
        sums[:] = held
        yield number
        following = builder.add(number, count.type(1))
        number.add_incoming(following, builder.block)
        for one, last in zip(held, sums, strict=True):
            one.add_incoming(last, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), body, after)
        builder.position_at_end(after)


def _values(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Any]:
    """Return the values of the arguments: numbers as they are, arrays as pointers."""
    return [
        value if kind == types.intp else context.make_array(kind)(context, builder, value).data
        for kind, value in zip(signature.args, arguments, strict=True)
    ]


def _given(kinds: tuple[Any, ...]) -> list[Any]:
    return [types.intp if isinstance(kind, types.Integer) else kind for kind in kinds]


@intrinsic
def _dot_vectors(context: Any, a: Any, a_at: Any, b: Any, b_at: Any, count: Any) -> Any:
    """Return the dot product over `count` vectors, in LANES sums that are added at the end."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, a_at, b, b_at, count = _values(context, builder, signature, arguments)
        vectors, sums = _Vectors(builder), [_ZERO]
        with vectors.loop(count, sums) as number:
            past = builder.mul(number, count.type(LANES))
            left, right = (vectors.load(base, builder.add(at, past)) for base, at in ((a, a_at), (b, b_at)))
            sums[0] = vectors.multiply_add(left, right, sums[0])
        return vectors.total(sums[0])

    return types.float32(*_given((a, a_at, b, b_at, count))), code


def _product(rows: int) -> Any:
    """Return an intrinsic that computes out[m] = sum_j a[m, j] b[j] for `rows` rows m of TILE columns, j from 0 up.

    Rows of a are `a_step` numbers apart, rows of b `b_step`, and rows of out TILE. Offsets count numbers of the flat
    arrays. The code is written in vectors by hand, because otherwise the compiler reads and writes `out` at every j.
    """

    @intrinsic
    def product(context: Any, a: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, count: Any, out: Any,
                first: Any) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_step, b, b_at, b_step, count, out, first = _values(context, builder, signature, arguments)
            vectors, number = _Vectors(builder), count.type
            sums = [_ZERO] * (rows * SIDE)
            lines = [builder.mul(a_step, builder.add(first, number(m))) for m in range(rows)]
            with vectors.loop(count, sums) as j:
                line = builder.add(b_at, builder.mul(b_step, j))
                held = [vectors.load(b, line, lane) for lane in range(SIDE)]
                for m in range(rows):
                    factor = vectors.wide(a, builder.add(lines[m], j))
                    for lane in range(SIDE):
                        sums[m * SIDE + lane] = vectors.multiply_add(factor, held[lane], sums[m * SIDE + lane])
            for m in range(rows):
                line = builder.mul(builder.add(first, number(m)), number(TILE))
                for lane in range(SIDE):
                    builder.store(sums[m * SIDE + lane], vectors.place(out, line, lane), align=4)
            return context.get_dummy_value()

        return types.void(*_given((a, a_step, b, b_at, b_step, count, out, first))), code

    return product


_product_of_many, _product_of_some, _product_of_one = _product(MOST_ROWS), _product(LESS_ROWS), _product(1)


def _addition(rows: int) -> Any:
    """Return an intrinsic that computes out[m] = e[m] source[m] + sum_j a[j, m] b[listed[j]] for `rows` rows m of TILE
    columns, j from 0 up. Offsets (`_at`) and steps between rows (`_step`) are as in `_product`."""

    @intrinsic
    def addition(context: Any, e: Any, source: Any, source_at: Any, source_step: Any, a: Any, a_at: Any, a_step: Any,
                 b: Any, b_at: Any, b_step: Any, listed: Any, listed_at: Any, count: Any, out: Any, out_at: Any,
                 out_step: Any, first: Any) -> Any:  # fmt: skip
        given = (e, source, source_at, source_step, a, a_at, a_step, b, b_at, b_step, listed, listed_at, count, out,
                 out_at, out_step, first)  # fmt: skip

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (e, source, source_at, source_step, a, a_at, a_step, b, b_at, b_step, listed, listed_at, count, out,
             out_at, out_step, first) = _values(context, builder, signature, arguments)  # fmt: skip
            vectors, number = _Vectors(builder), count.type
            own = [builder.add(first, number(m)) for m in range(rows)]
            sums = []
            for m in range(rows):
                factor, line = vectors.wide(e, own[m]), builder.add(source_at, builder.mul(source_step, own[m]))
                sums += [builder.fmul(factor, vectors.load(source, line, lane)) for lane in range(SIDE)]
                if rows > 1:
                    for lane in range(SIDE):
                        vectors.ahead(source, line, lane, AHEAD)
            with vectors.loop(count, sums) as j:
                place = builder.load(builder.gep(listed, [builder.add(listed_at, j)]))
                line = builder.add(b_at, builder.mul(b_step, place))
                held = [vectors.load(b, line, lane) for lane in range(SIDE)]
                left = builder.add(a_at, builder.mul(a_step, j))
                for m in range(rows):
                    factor = vectors.wide(a, builder.add(left, own[m]))
                    for lane in range(SIDE):
                        sums[m * SIDE + lane] = vectors.multiply_add(factor, held[lane], sums[m * SIDE + lane])
            for m in range(rows):
                line = builder.add(out_at, builder.mul(out_step, own[m]))
                for lane in range(SIDE):
                    builder.store(sums[m * SIDE + lane], vectors.place(out, line, lane), align=4)
            return context.get_dummy_value()

        return types.void(*_given(given)), code

    return addition


_addition_of_many, _addition_of_one = _addition(MOST_ROWS), _addition(1)


@njit(error_model="numpy", nogil=True)
def _dot(a, a_at, b, b_at, count):
    """Return a . b over `count` numbers, always summed in the same order."""
    whole = count // LANES
    total = np.float32(0)
    if whole:
        total = _dot_vectors(a, a_at, b, b_at, whole)
    for n in range(whole * LANES, count):
        total = _fma(a[a_at + n], b[b_at + n], total)
    return total


@njit(error_model="numpy", nogil=True)
def _read(a, rows, b, b_at, b_step, count, out):
    """Compute out [rows, TILE] = a [rows, count] b."""
    first = 0
    while rows - first >= MOST_ROWS:
        _product_of_many(a, count, b, b_at, b_step, count, out, first)
        first += MOST_ROWS
    while rows - first >= LESS_ROWS:
        _product_of_some(a, count, b, b_at, b_step, count, out, first)
        first += LESS_ROWS
    while first < rows:
        _product_of_one(a, count, b, b_at, b_step, count, out, first)
        first += 1


@njit(error_model="numpy", nogil=True)
def _advance(e, source, source_at, source_step, keys, u, u_at, u_step, listed, listed_at, out, out_at, out_step):
    """Compute out = e source + the sum of keys [BLOCK, N] times the listed u, in TILE columns. out may be source."""
    dim, n = len(e), 0
    while dim - n >= MOST_ROWS:
        _addition_of_many(e, source, source_at, source_step, keys, 0, dim, u, u_at, u_step, listed, listed_at, BLOCK,
                          out, out_at, out_step, n)  # fmt: skip
        n += MOST_ROWS
    while n < dim:
        _addition_of_one(e, source, source_at, source_step, keys, 0, dim, u, u_at, u_step, listed, listed_at, BLOCK,
                         out, out_at, out_step, n)  # fmt: skip
        n += 1


_I1, _I2, _I3 = types.int64[::1], types.int64[:, ::1], types.int64[:, :, ::1]
_F1, _F2, _F3, _F4 = types.float32[::1], types.float32[:, ::1], types.float32[:, :, ::1], types.float32[:, :, :, ::1]
_B3 = types.boolean[:, :, ::1]


class ScanMask(NamedTuple):
    """The places of a forward's nodes in the suffix, and what they see of it.

    seen: [R, n, T] bool, ancestors and the node itself. at: [R, n] place of each node, T where it has none. depths:
    [R, T] of the token in each place. first: [R, n] the first node with the same place as each node, the node itself
    where it has no place. alone: no two nodes have the same place.
    """

    seen: NDArray[np.bool_]
    at: NDArray[np.int64]
    depths: NDArray[np.int64]
    first: NDArray[np.int64]
    alone: bool


@compiled(types.Tuple((_B3, _I2, _I2, _I2, types.boolean))(_B3, _I2, _I2, _I1, types.int64, types.int64))
def _scan_mask(mask, slots, slot_positions, base, width, trash):
    rows, nodes, active = mask.shape
    seen, at = np.zeros((rows, nodes, width), np.bool_), np.empty((rows, nodes), np.int64)
    depths, first = np.empty((rows, width), np.int64), np.empty((rows, nodes), np.int64)
    alone = True
    for r in range(rows):
        for place in range(width):
            slot = base[r] + (place - base[r]) % width
            depths[r, place] = slot_positions[r, min(slot, active - 1)]
            if slot < active and slot != trash:
                for i in range(nodes):
                    seen[r, i, place] = mask[r, i, slot]
        for i in range(nodes):
            past = slots[r, i] - base[r]
            at[r, i], first[r, i] = width, i
            if slots[r, i] != trash and 0 <= past < width:
                at[r, i] = slots[r, i] % width
                for other in range(i):
                    if at[r, other] == at[r, i]:
                        first[r, i], alone = other, False
                        break
    return seen, at, depths, first, alone


def scan_mask(
    mask: NDArray[np.bool_], slots: NDArray[np.int64], slot_positions: NDArray[np.int64], base: NDArray[np.int64],
    width: int, trash: int,
) -> ScanMask:  # fmt: skip
    """Return the ScanMask of a ForestInput with mask [R, n, S], slots [R, n] and slot_positions [R, S], after common
    prefixes of base [R] tokens, in `width` places."""
    return ScanMask._make(_scan_mask(mask, slots, slot_positions, base, width, trash))


@compiled(types.Tuple((_I1, _I2))(_B3, _I2, _I2, _I2, _I1, _I1, types.int64))
def taps(seen, at, depths, positions, base, numbers, lead):
    """Return the places of the nodes [R * n], and of the last `lead` tokens before each node [lead, R * n], the oldest
    first. Places count through planes [rows, lead + T + 1, ...] with flattened rows. numbers: [R] rows of the planes.
    """
    rows, nodes, width = seen.shape
    own, back = np.empty(rows * nodes, np.int64), np.empty((lead, rows * nodes), np.int64)
    for r in range(rows):
        start = numbers[r] * (lead + width + 1)
        for i in range(nodes):
            node = r * nodes + i
            own[node] = start + lead + at[r, i]
            for tap in range(lead):  # in the common prefix, if they are not seen in the suffix
                place = lead + positions[r, i] - lead + tap - base[r]
                back[tap, node] = start + min(max(place, 0), lead + width)
            for place in range(width):
                past = positions[r, i] - depths[r, place]
                if seen[r, i, place] and 0 < past <= lead:
                    back[lead - past, node] = start + lead + place
    return own, back


class ScanSchedule(NamedTuple):
    """The plan of a scan: which nodes of each row read which state, and which tokens they read one by one. Places count
    from the start of a row of the planes.

    lines: [R, n, LEAD + 1] places of the tokens that a node reads one by one, the oldest first and its own last.
    counts: [R, n] how many, 0 for a node that is not computed. groups: [R, g, 3], a group per state: its buffer, -1 for
    the row's own state, and the first and one past the last of `order` [R, n] whose nodes read it. sources: [R, g] the
    buffer that the state is made from, -1 for the row's own, if it is made. blocks: [R, g, BLOCK] places of the tokens
    that go into it then. sizes: [R] groups of each row. used: [R, places] places that are needed, and uses: [R] how
    many. buffers: states held at a time. keep: each new state of a row replaces the row's own, whatever its buffer.
    """

    lines: NDArray[np.int64]
    counts: NDArray[np.int64]
    order: NDArray[np.int64]
    groups: NDArray[np.int64]
    sources: NDArray[np.int64]
    blocks: NDArray[np.int64]
    sizes: NDArray[np.int64]
    used: NDArray[np.int64]
    uses: NDArray[np.int64]
    buffers: int
    keep: bool


@njit(error_model="numpy", nogil=True)
def _anchor(position):
    """Return the position of the state that the token of a position reads."""
    return max(0, (position - LEAST_ONE_BY_ONE) // BLOCK * BLOCK)


@compiled(types.Tuple((_I3, _I2, _I2, _I3, _I2, _I3, _I1, _I2, _I1, types.int64))(_B3, _I2, _I2, _I1, types.int64))
def _forest(seen, at, depths, base, lead):
    rows, nodes, places = seen.shape
    size = lead + places + 1
    most = size + 1
    lines, counts = np.zeros((rows, nodes, LEAD + 1), np.int64), np.zeros((rows, nodes), np.int64)
    order = np.zeros((rows, nodes), np.int64)
    groups, sources = np.zeros((rows, most, 3), np.int64), np.zeros((rows, most), np.int64)
    blocks = np.zeros((rows, most, BLOCK), np.int64)
    sizes = np.zeros(rows, np.int64)
    used, uses = np.zeros((rows, size), np.int64), np.zeros(rows, np.int64)
    buffers = 1
    path = np.empty(lead + places + 1, np.int64)
    for r in range(rows):
        start = _anchor(base[r])
        # numbers of the states that are needed, by the place of their last token; state 0 is the row's own
        known = np.full(size, -1, np.int64)
        parent, level, last = np.full(most, -1, np.int64), np.zeros(most, np.int64), np.zeros((most, BLOCK), np.int64)
        made = 1
        state, depth = np.full(nodes, -1, np.int64), np.zeros(nodes, np.int64)
        taken, needed = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        for i in range(nodes):
            own = at[r, i]
            if own >= places or taken[lead + own]:
                continue
            before = base[r] - start
            for past in range(before):
                path[past] = lead - before + past
            length = before
            taken[lead + own] = True
            # the tokens that it sees are its path, one per depth
            path[before : before + places] = -1
            for place in range(places):
                if seen[r, i, place]:
                    path[before + places - 1 - (depths[r, own] - depths[r, place])] = lead + place
            for back in range(places):
                if path[before + back] >= 0:
                    path[length] = path[before + back]
                    length += 1
            position = start + length - 1
            anchor = max(start, _anchor(position))
            above = 0
            for end in range(start + BLOCK, anchor + 1, BLOCK):
                name = path[end - 1 - start]
                if known[name] < 0:
                    known[name] = made
                    parent[made], level[made] = above, level[above] + 1
                    for past in range(BLOCK):
                        last[made, past] = path[end - BLOCK - start + past]
                        needed[last[made, past]] = True
                    made += 1
                above = known[name]
            state[i], depth[i] = above, position
            counts[r, i] = position + 1 - anchor
            for past in range(counts[r, i]):
                lines[r, i, past] = path[anchor - start + past]
                needed[lines[r, i, past]] = True
        # depth first: the nodes that read a state, then the states that are made from it
        stack, high = np.zeros(most, np.int64), 1
        done = 0
        while high:
            high -= 1
            one = stack[high]
            group = sizes[r]
            sizes[r] = group + 1
            groups[r, group, 0], sources[r, group] = level[one] - 1, level[one] - 2
            blocks[r, group] = last[one]
            groups[r, group, 1] = done
            for i in range(nodes):
                if state[i] != one:
                    continue
                here = done
                while here > groups[r, group, 1] and depth[order[r, here - 1]] > depth[i]:
                    order[r, here] = order[r, here - 1]
                    here -= 1
                order[r, here] = i
                done += 1
            groups[r, group, 2] = done
            buffers = max(buffers, level[one])
            for child in range(made - 1, 0, -1):
                if parent[child] == one:
                    stack[high] = child
                    high += 1
        for place in range(size):
            if needed[place]:
                used[r, uses[r]] = place
                uses[r] += 1
    return lines, counts, order, groups, sources, blocks, sizes, used, uses, buffers


def forest(
    seen: NDArray[np.bool_], at: NDArray[np.int64], depths: NDArray[np.int64], base: NDArray[np.int64], lead: int
) -> ScanSchedule:
    """Plan the scan of a forest's nodes, in planes [rows, lead + T + 1, ...]. seen, at, depths: as in ScanMask.
    base: [R] tokens of the common prefixes."""
    return ScanSchedule._make((*_forest(seen, at, depths, base, lead), False))


def chain(base: NDArray[np.int64], lengths: NDArray[np.int64], count: int, lead: int) -> ScanSchedule:
    """Plan the scan of tokens that follow the common prefix and become part of it: `lengths` [R] of `count` in each
    row, in planes [R, lead + count + 1, ...]."""
    return _joined(base, lengths, count, np.tile(lead + np.arange(count), (len(base), 1)), lead)


def fold(base: NDArray[np.int64], counts: NDArray[np.int64], joined: NDArray[np.int64], lead: int) -> ScanSchedule:
    """Plan the scan of a common prefix that takes in the first `counts` [R] of the places `joined` [R, m] of the
    suffix. No node is computed."""
    return _joined(base, counts, 0, lead + joined, lead)


def _joined(
    base: NDArray[np.int64], counts: NDArray[np.int64], nodes: int, joined: NDArray[np.int64], lead: int
) -> ScanSchedule:
    return ScanSchedule._make((*_line(base, counts, nodes, joined, lead, lead + joined.shape[1]), True))


@compiled(
    types.Tuple((_I3, _I2, _I2, _I3, _I2, _I3, _I1, _I2, _I1, types.int64))(
        _I1, _I1, types.int64, _I2, types.int64, types.int64
    )
)
def _line(base, lengths, nodes, joined, lead, size):
    rows = len(base)
    most = size // BLOCK + 2
    lines, counts = np.zeros((rows, nodes, LEAD + 1), np.int64), np.zeros((rows, nodes), np.int64)
    order = np.zeros((rows, nodes), np.int64)
    groups, sources = np.zeros((rows, most, 3), np.int64), np.zeros((rows, most), np.int64)
    blocks = np.zeros((rows, most, BLOCK), np.int64)
    sizes = np.zeros(rows, np.int64)
    used, uses = np.zeros((rows, size), np.int64), np.zeros(rows, np.int64)
    path = np.empty(size, np.int64)
    for r in range(rows):
        start, end = _anchor(base[r]), base[r] + lengths[r]
        before = base[r] - start
        for past in range(before):
            path[past] = lead - before + past
        for past in range(lengths[r]):
            path[before + past] = joined[r, past]
        node = 0
        for anchor in range(start, _anchor(end) + 1, BLOCK):
            group = sizes[r]
            sizes[r] = group + 1
            groups[r, group, 0] = -1 if anchor == start else 0
            sources[r, group] = -1 if anchor == start + BLOCK else 0
            if anchor > start:
                for past in range(BLOCK):
                    blocks[r, group, past] = path[anchor - BLOCK - start + past]
            groups[r, group, 1] = node
            while node < min(nodes, lengths[r]) and _anchor(base[r] + node) == anchor:
                order[r, node] = node
                counts[r, node] = base[r] + node + 1 - anchor
                for past in range(counts[r, node]):
                    lines[r, node, past] = path[anchor - start + past]
                node += 1
            groups[r, group, 2] = node
        if nodes or sizes[r] > 1:
            uses[r] = before + lengths[r] if nodes else (sizes[r] - 1) * BLOCK
            used[r, : uses[r]] = path[: uses[r]]
    return lines, counts, order, groups, sources, blocks, sizes, used, uses, 1


@compiled(_F4(_F4, _F4, _I1, _I3, _I2))
def pairs(q, keys, rows, lines, counts):
    """Return q . k of each node with the tokens that it reads one by one, [R, n, G, LEAD + 1].

    q: [R, n, G, N]. keys: planes [rows, places, G, N]. rows: [R] of the planes. lines, counts: of a ScanSchedule.
    """
    nodes, groups, dim = q.shape[1:]
    found = np.zeros((len(rows), nodes, groups, LEAD + 1), np.float32)
    flat, held = q.ravel(), keys.ravel()
    for r in range(len(rows)):
        for i in range(nodes):
            for group in range(groups):
                q_at = ((r * nodes + i) * groups + group) * dim
                for past in range(counts[r, i]):
                    k_at = ((rows[r] * keys.shape[1] + lines[r, i, past]) * groups + group) * dim
                    found[r, i, group, past] = _dot(flat, q_at, held, k_at, dim)
    return found


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
    width, area = places - lead - 1, lanes.LANES * lanes.WORD
    for r in range(len(base)):
        for place in range(lead if counts[r] else 0):
            past = place + counts[r] - lead  # from the end of the common prefix as it was
            source = past + lead if past < 0 else lead + (base[r] + past) % width
            start = plane.ctypes.data + (r * places + source) * size * lanes.WORD
            target = plane.ctypes.data + (r * places + place) * size * lanes.WORD
            for at in range(0, size // lanes.LANES * area, area):
                lanes.store_f32(target + at, lanes.load_f32(start + at))
            for c in range(size // lanes.LANES * lanes.LANES, size):
                plane[r, place, c] = plane[r, source, c]


@njit(error_model="numpy", nogil=True)
def _decay_products(decays, plane, h, line, factors):
    """Write to `factors` the product of the decays after each token of a line, and return the product of all decays.

    A decay is one number here.
    """
    factor = np.float32(1)
    for past in range(len(line) - 1, -1, -1):
        factors[past] = factor
        factor *= decays[plane, line[past], h, 0]
    return factor


@njit(error_model="numpy", nogil=True)
def _decayed_keys(keys, group, decays, plane, h, places, block, e):
    """Write the keys of the tokens at `places`, each times the decays after it, to block [BLOCK, N], and the product of
    all decays to e [N]."""
    e[:] = 1
    for past in range(BLOCK - 1, -1, -1):
        place = places[past]
        for n in range(len(e)):
            block[past, n] = keys[plane, place, group, n] * e[n]
        if decays.shape[3] == 1:
            decay = decays[plane, place, h, 0]
            for n in range(len(e)):
                e[n] *= decay
        else:
            for n in range(len(e)):
                e[n] *= decays[plane, place, h, n]


@njit(error_model="numpy", nogil=True)
def _line_weights(x, keys, group, decays, plane, h, line, weights):
    """Write the weights of the tokens of a line where decays are per channel. x [N], a query or key, is multiplied by
    all decays, so that it can read the state."""
    places, groups, dim = keys.shape[1:]
    flat = keys.ravel()
    for past in range(len(line) - 1, -1, -1):
        place = line[past]
        weights[past] = _dot(x, 0, flat, ((plane * places + place) * groups + group) * dim, dim)
        for n in range(dim):
            x[n] *= decays[plane, place, h, n]


@compiled(types.void(_F4, _I1, _I1, _F4, _F1, types.int64, _F3, _F4, _F4, _F4, _F4, _F4, _I3, _I2, _I2, _I3,
                     _I2, _I3, _I1, _I2, _I1, types.int64, types.boolean, _F4, types.int64, types.int64))  # fmt: skip
def recurrent_scan(state, rows, planes, q, v, step, beta, query_keys, key_keys, keys, inputs, decays, lines, counts,
         order, groups, sources, blocks, sizes, used, uses, buffers, keep, y, first, last):  # fmt: skip
    """Add the results of the nodes of a ScanSchedule to y [R, n, H, P], and write the states that it keeps.

    state: [., H, N, P]. keys, inputs, decays: planes [., places, ...] as `put` leaves them. rows, planes: [R] rows of
    the states and of the planes. v, step: as in `put`. beta: [R, n, H], by which u is computed from v and stored; or
    [R, n, 0] where the planes have u already. query_keys, key_keys: `pairs` of q, and of each node's own key where
    there are betas; not read where decays are per channel.
    """
    heads, dim, width = state.shape[1:]
    places, key_heads = keys.shape[1:3]
    nodes, most = lines.shape[1], groups.shape[1]
    corrects, single = beta.shape[2] > 0, decays.shape[3] == 1
    wide = (width + TILE - 1) // TILE * TILE
    area = dim * wide
    # of one row and head: states, u of the tokens that are read, and what makes a state
    held, u = np.zeros((buffers, dim, wide), np.float32), np.zeros((places, wide), np.float32)
    common_prefix = np.zeros((dim, wide if wide != width else 0), np.float32)
    e, block = np.empty(dim, np.float32), np.empty((BLOCK, dim), np.float32)
    # of up to MOST_ROWS nodes: queries and keys that read the state, the results, and weights of the tokens since then
    x, x_key = np.empty((MOST_ROWS, dim), np.float32), np.empty((MOST_ROWS, dim), np.float32)
    found, found_key = np.empty((MOST_ROWS, TILE), np.float32), np.empty((MOST_ROWS, TILE), np.float32)
    weights, weights_key = np.zeros((MOST_ROWS, LEAD + 1), np.float32), np.zeros((MOST_ROWS, LEAD + 1), np.float32)
    factors, one = np.empty(LEAD + 1, np.float32), np.ones(1, np.float32)
    # the same arrays, flat, for products, which take offsets
    flat_state, flat_held, flat_common_prefix, flat_u = state.ravel(), held.ravel(), common_prefix.ravel(), u.ravel()
    flat_x, flat_x_key, flat_block = x.ravel(), x_key.ravel(), block.ravel()
    flat_found, flat_found_key = found.ravel(), found_key.ravel()
    flat_weights, flat_weights_key = weights.ravel(), weights_key.ravel()
    flat_lines, flat_blocks = lines.ravel(), blocks.ravel()
    for pair in range(first, last):
        r, h = pair // heads, pair % heads
        if not uses[r]:
            continue
        row, plane, group = rows[r], planes[r], h // (heads // key_heads)
        for index in range(uses[r]):
            place = used[r, index]
            for p in range(width):
                u[place, p] = inputs[plane, place, h, p]
        own, own_at, own_step = flat_state, (row * heads + h) * dim * width, width
        if wide != width:
            for n in range(dim):
                for p in range(width):
                    common_prefix[n, p] = state[row, h, n, p]
            own, own_at, own_step = flat_common_prefix, 0, wide
        for number in range(sizes[r]):
            target, source = groups[r, number, 0], sources[r, number]
            read, read_at, read_step = own, own_at, own_step
            if target >= 0:
                _decayed_keys(keys, group, decays, plane, h, blocks[r, number], block, e)
                made, made_at, made_step = own, own_at, own_step
                if not keep:
                    made, made_at, made_step = flat_held, target * area, wide
                    if source >= 0:
                        read, read_at, read_step = flat_held, source * area, wide
                for tile in range(0, wide, TILE):
                    _advance(e, read, read_at + tile, read_step, flat_block, flat_u, tile, wide, flat_blocks,
                             (r * most + number) * BLOCK, made, made_at + tile, made_step)  # fmt: skip
                read, read_at, read_step = made, made_at, made_step
            for begin in range(groups[r, number, 1], groups[r, number, 2], MOST_ROWS):
                count = min(MOST_ROWS, groups[r, number, 2] - begin)
                for m in range(count):
                    i = order[r, begin + m]
                    line = lines[r, i, : counts[r, i]]
                    factor = np.float32(1)
                    if single:
                        factor = _decay_products(decays, plane, h, line, factors)
                        for past in range(len(line)):
                            weights[m, past] = factors[past] * query_keys[r, i, group, past]
                    for n in range(dim):
                        x[m, n] = q[r, i, group, n] * factor
                    if not single:
                        _line_weights(x[m], keys, group, decays, plane, h, line, weights[m])
                    if not corrects:
                        continue
                    place = line[-1]
                    for n in range(dim):
                        x_key[m, n] = keys[plane, place, group, n] * factor
                    if single:
                        for past in range(len(line)):
                            weights_key[m, past] = factors[past] * key_keys[r, i, group, past]
                    else:
                        _line_weights(x_key[m], keys, group, decays, plane, h, line, weights_key[m])
                for tile in range(0, wide, TILE):
                    _read(flat_x, count, read, read_at + tile, read_step, dim, flat_found)
                    if corrects:
                        _read(flat_x_key, count, read, read_at + tile, read_step, dim, flat_found_key)
                    columns = min(TILE, width - tile)
                    for m in range(count):
                        i = order[r, begin + m]
                        terms, line_at, here = counts[r, i], (r * nodes + i) * (LEAD + 1), m * TILE
                        if corrects:
                            if terms > 1:
                                _addition_of_one(one, flat_found_key, here, 0, flat_weights_key, m * (LEAD + 1), 1,
                                                 flat_u, tile, wide, flat_lines, line_at, terms - 1, flat_found_key,
                                                 here, 0, 0)  # fmt: skip
                            place, scale = lines[r, i, terms - 1], beta[r, i, h]
                            given = v[(r * nodes + i) * step + h * width + tile :]
                            for p in range(columns):
                                corrected = scale * (given[p] - found_key[m, p])
                                u[place, tile + p] = corrected
                                inputs[plane, place, h, tile + p] = corrected
                        _addition_of_one(one, flat_found, here, 0, flat_weights, m * (LEAD + 1), 1, flat_u, tile, wide,
                                         flat_lines, line_at, terms, flat_found, here, 0, 0)  # fmt: skip
                        for p in range(columns):
                            y[r, i, h, tile + p] += found[m, p]
        if keep and wide != width:
            for n in range(dim):
                for p in range(width):
                    state[row, h, n, p] = common_prefix[n, p]


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
    whole, line, area = channels // _SIDE * _SIDE, channels * lanes.WORD, lanes.LANES * lanes.WORD
    for first in range(0, whole, _NEAR):
        count = min(_NEAR, whole - first) // _SIDE
        for i in range(len(at)):
            source = x.ctypes.data + (i * step + first) * lanes.WORD
            target = plane.ctypes.data + at[i] * line + first * lanes.WORD
            for past in range(0, count * 4 * area, area):
                lanes.store_f32(target + past, lanes.load_f32(source + past))
        for i in range(len(at)):
            for tap in range(taps):
                place = back[tap, i] if tap < taps - 1 else at[i]
                starts[tap] = plane.ctypes.data + place * line + first * lanes.WORD
            for number in range(count):
                past = number * 4 * area
                factors = turned.ctypes.data + first * lanes.WORD + past
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
                    here = bias.ctypes.data + first * lanes.WORD + past
                    a, b = lanes.add(a, lanes.load_f32(here)), lanes.add(b, lanes.load_f32(here + area))
                    c = lanes.add(c, lanes.load_f32(here + 2 * area))
                    d = lanes.add(d, lanes.load_f32(here + 3 * area))
                if smooth:
                    a, b, c, d = _silu(a), _silu(b), _silu(c), _silu(d)
                here = out.ctypes.data + i * line + first * lanes.WORD + past
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
