"""Plans of scans: which nodes of a forward read which state, and which tokens they read one by one.

Letters as in models/recurrent/scans.py. What is computed by a plan, and why, is said in scan.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler

BLOCK = 8  # tokens that go into a state at once
LEAST_ONE_BY_ONE = 16  # tokens that a token reads one by one, at least
LEAD = LEAST_ONE_BY_ONE + BLOCK - 1  # tokens of the common prefix whose inputs are kept

compiled = KernelCompiler("recurrent layers", seconds=21)
_I1, _I2, _I3 = types.int64[::1], types.int64[:, ::1], types.int64[:, :, ::1]
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
        state_numbers = np.full(size, -1, np.int64)
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
                if state_numbers[name] < 0:
                    state_numbers[name] = made
                    parent[made], level[made] = above, level[above] + 1
                    for past in range(BLOCK):
                        last[made, past] = path[end - BLOCK - start + past]
                        needed[last[made, past]] = True
                    made += 1
                above = state_numbers[name]
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
            number = stack[high]
            group = sizes[r]
            sizes[r] = group + 1
            groups[r, group, 0], sources[r, group] = level[number] - 1, level[number] - 2
            blocks[r, group] = last[number]
            groups[r, group, 1] = done
            for i in range(nodes):
                if state[i] != number:
                    continue
                here = done
                while here > groups[r, group, 1] and depth[order[r, here - 1]] > depth[i]:
                    order[r, here] = order[r, here - 1]
                    here -= 1
                order[r, here] = i
                done += 1
            groups[r, group, 2] = done
            buffers = max(buffers, level[number])
            for child in range(made - 1, 0, -1):
                if parent[child] == number:
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
