"""The kernels of iteration.py in numba: they select candidates, and write, verify and commit a forest.

They compute what the tensor code of engine/ computes, whose docstrings say why. A thread works on one request (one
node, where it selects candidates), so the bits of a request do not depend on the others. Sums of shares are sums of
integers.

A tensor is its address here. `whole`, `real` and `mark` read its number at a place (int64, float32, bool), and nothing
checks the place. Arrays of numba would take twice as long to compile.

Letters: R requests, W0 roots, W beams, K drafts per layer, D layers, N nodes, C candidates per node, M pairs of a pool,
T suffix window, S slots, L history, F = W finished hypotheses kept.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from dsbd_cli.ops.cpu.iteration import (
    BEGIN,
    CANDIDATES,
    COMMIT,
    EXTEND,
    LAYOUT,
    VERIFY,
)
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.logsumexp import FOUR, row_total
from dsbd_cli.ops.cpu.kernels.simd import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    get_bf16,
    get_f32,
    get_i32,
    get_i64,
    larger,
    largest,
    load_bf16,
    load_f32,
    loaded,
    operation,
    pointer,
    splat,
    take,
)
from dsbd_cli.ops.layout import COLUMNS, FIELDS, FIRST, FLAGS, STREAMS

compiled = KernelCompiler("iterations", seconds=11, layout=LAYOUT)

TOKEN, PARENT, ROOT, PATH, STOP_STATE, DRAFTER_ID, SLOT, POSITION = range(len(FIELDS))
VALID, ENDS, SAMPLED = range(len(FLAGS))
WHOLE, REAL = 8, 4  # bytes of an int64 and of a float32
NONE, ZERO, ONE = np.float32(-math.inf), np.float32(0), np.float32(1)
# as in engine/core/noise.py
GOLDEN, MIX_A, MIX_B, MIX_TOKEN = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD1342543DE82EF95)
)
S12, S27, S30, S31 = (np.uint64(bits) for bits in (12, 27, 30, 31))
# as in engine/core/distribution.py
SHARE_UNITS, LOG_UNITS, NO_SHARE = np.float32(2.0**36), math.log(2.0**36), np.float32(-26)
SIGN, ALL_BITS = np.uint32(0x80000000), np.uint32(0xFFFFFFFF)
SLACK = 1.0001  # of a bound on a key, much more than the rounding of its parts


@operation(types.uint32, types.float32)
def bits_of(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, I32)


def _at(builder: Any, tensor: Any, place: Any, size: int) -> Any:
    return builder.add(tensor, builder.mul(place, ir.Constant(I64, size)))


@operation(types.int64, types.int64, types.int64)
def whole(builder: Any, tensor: Any, place: Any) -> Any:
    return loaded(builder, _at(builder, tensor, place, WHOLE), I64, WHOLE)


@operation(types.void, types.int64, types.int64, types.int64)
def put_whole(builder: Any, tensor: Any, place: Any, value: Any) -> Any:
    builder.store(value, pointer(builder, _at(builder, tensor, place, WHOLE), I64), align=WHOLE)


@operation(types.float32, types.int64, types.int64)
def real(builder: Any, tensor: Any, place: Any) -> Any:
    return loaded(builder, _at(builder, tensor, place, REAL), F32, REAL)


@operation(types.void, types.int64, types.int64, types.float32)
def put_real(builder: Any, tensor: Any, place: Any, value: Any) -> Any:
    builder.store(value, pointer(builder, _at(builder, tensor, place, REAL), F32), align=REAL)


@operation(types.boolean, types.int64, types.int64)
def mark(builder: Any, tensor: Any, place: Any) -> Any:
    return builder.icmp_unsigned("!=", loaded(builder, builder.add(tensor, place), I8, 1), ir.Constant(I8, 0))


@operation(types.void, types.int64, types.int64, types.boolean)
def put_mark(builder: Any, tensor: Any, place: Any, value: Any) -> Any:
    builder.store(builder.zext(value, I8), pointer(builder, builder.add(tensor, place), I8), align=1)


# numbers of engine/core/noise.py


@njit(error_model="numpy")
def mix(x):
    x = (x ^ (x >> S30)) * MIX_A
    x = (x ^ (x >> S27)) * MIX_B
    return x ^ (x >> S31)


@njit(error_model="numpy")
def child_path(path, token):
    return types.int64(mix(types.uint64(path) * MIX_TOKEN + types.uint64(token) + GOLDEN))


@njit(error_model="numpy")
def uniform(key, index):
    bits = mix(types.uint64(key) + types.uint64(index) * GOLDEN) >> S12
    return (types.float64(types.int64(bits)) + 0.5) * 2.0**-52


# distributions of engine/core/distribution.py, over the pairs [first, last) of a pool


@njit(error_model="numpy")
def highest(x, first, last):
    best = NONE
    for m in range(first, last):
        best = max(best, real(x, m))
    return best


@njit(error_model="numpy")
def ordered(x):
    """Return a float32 as an uint32 in the same order. Both zeros become one number."""
    bits = bits_of(x + ZERO)
    return bits ^ SIGN if bits & SIGN == 0 else bits ^ ALL_BITS


@njit(error_model="numpy")
def write_shares(x, share, first, last):
    """Write `_shares`, and return their sum."""
    total = types.int64(0)
    for m in range(first, last):
        units, value = types.int64(0), real(x, m)
        if value > NO_SHARE:
            units = types.int64(np.rint(types.float32(math.exp(value)) * SHARE_UNITS))
        put_whole(share, m, units)
        total += units
    return total


@njit(error_model="numpy")
def log_mass(total):
    return types.float32(math.log(types.float64(max(total, 1))) - LOG_UNITS)


@njit(error_model="numpy")
def keep_largest(x, share, first, last, wanted, by_mass):
    """Set all but the largest numbers to -inf: the `wanted` largest, or as many as have the mass `wanted`. Numbers
    equal to the last one stay. The last one is found bit by bit, so nothing is sorted."""
    bound = types.uint32(0)
    for shift in range(32):
        trial = bound | (SIGN >> types.uint32(shift))
        found = types.int64(0)
        for m in range(first, last):
            if ordered(real(x, m)) >= trial:
                found += whole(share, m) if by_mass else 1
        if types.float64(found) >= wanted:
            bound = trial
    for m in range(first, last):
        if ordered(real(x, m)) < bound:
            put_real(x, m, NONE)


@njit(error_model="numpy")
def cut(x, share, first, last, top_k, top_p, min_p):
    """Do what `_cut` does, and return the sum of the shares that stay."""
    for by_mass in range(2):
        if by_mass and top_p < 1:
            wanted = types.float64(top_p) * types.float64(write_shares(x, share, first, last))
            keep_largest(x, share, first, last, wanted, True)
        elif not by_mass and top_k > 0:
            keep_largest(x, share, first, last, types.float64(top_k), False)
    if min_p > 0:
        lowest = highest(x, first, last) + types.float32(math.log(types.float64(min_p)))
        for m in range(first, last):
            if not real(x, m) >= lowest:
                put_real(x, m, NONE)
    total = write_shares(x, share, first, last)
    mass = log_mass(total)
    for m in range(first, last):
        put_real(x, m, real(x, m) - mass)
    return total


@njit(error_model="numpy")
def from_best(x, out, first, last, temperature):
    best = highest(x, first, last)
    best = best if best > NONE else ZERO
    for m in range(first, last):
        put_real(out, m, (real(x, m) - best) / temperature)


@njit(error_model="numpy")
def pool_distribution(warp, row, weight, joint, log_p, share, nodes, candidates):
    """Do what `pool_distribution` does. joint: log-probabilities of the pairs, to which the weights [n] are added.
    Write the distribution to log_p. Return the sum of its shares.

    warp: where the addresses of temperature, top_k, top_p, min_p and greedy lie, and the number by_beam.
    """
    temperature, top_k = real(whole(warp, 0), row), whole(whole(warp, 1), row)
    top_p, min_p = real(whole(warp, 2), row), real(whole(warp, 3), row)
    greedy, by_beam = mark(whole(warp, 4), row), whole(warp, 5) != 0
    pairs, total = nodes * candidates, types.int64(0)
    # by_beam: the rows of the nodes one by one, and then the pool without cuts; else the pool alone
    for part in range(nodes + 1 if by_beam else 1):
        of_pool = not by_beam or part == nodes
        first, last = (0, pairs) if of_pool else (part * candidates, (part + 1) * candidates)
        if of_pool:
            for n in range(nodes):
                for m in range(n * candidates, (n + 1) * candidates):
                    put_real(joint, m, real(joint, m) + real(weight, n))
        else:
            from_best(joint, joint, first, last, ONE)
        if of_pool and by_beam:
            temperature, top_k, top_p, min_p = ONE, 0, ONE, ZERO
        from_best(joint, log_p, first, last, temperature)
        total = cut(log_p, share, first, last, top_k, top_p, min_p)
        for m in range(first, last):
            kept = greedy and real(log_p, m) > NONE
            if of_pool and kept:
                put_real(log_p, m, real(joint, m))
            elif not of_pool and not kept:
                put_real(joint, m, real(log_p, m))
    return total


# draws from a pool


@njit(error_model="numpy")
def insert(keys, places, held, most, key, place):
    """Insert into a descending list of which `held` of `most` places are in use. If it is full, its last number is
    dropped. Of equal keys the one that came first stays first. Return how many are in use."""
    at = min(held, most - 1)
    while at > 0 and real(keys, at - 1) < key:
        put_real(keys, at, real(keys, at - 1))
        put_whole(places, at, whole(places, at - 1))
        at -= 1
    put_real(keys, at, key)
    put_whole(places, at, place)
    return min(held + 1, most)


@njit(error_model="numpy")
def ends(endings, state, token):
    """Return whether a token ends the sequence of a node in stop state `state`.

    endings: where the addresses of the end tokens and of the stop automaton lie, and the numbers V and stopping.
    """
    if mark(whole(endings, 0), token):
        return True
    return whole(endings, 3) != 0 and get_i32(whole(endings, 1) + 4 * (state * whole(endings, 2) + token)) == 0


@njit(error_model="numpy")
def state_after(endings, state, token):
    """Return the stop state after a token. endings: as in `ends`."""
    if whole(endings, 3) == 0:
        return 1
    return get_i32(whole(endings, 1) + 4 * (state * whole(endings, 2) + token))


@njit(error_model="numpy")
def draw(
    best, place, most, key, log_p, share, total, noisy, path, tokens, node, nodes, candidates, endings, state, any_end
):  # fmt: skip
    """Draw the `most` pairs of the largest keys from a pool, live ones or, with any_end, all. Write their keys and
    places, best first, and return how many there are. Of equal keys the first is drawn first.

    key: [M], to be written; a pair below the last one drawn may have -inf, if `most` are drawn. log_p, share, total:
    the distribution. noisy: its keys are log P + G(x, v). path, tokens, state: of all nodes. node: nodes of the pool.
    """
    held, least, scale = 0, NONE, 0.0
    for n in range(nodes):
        known = whole(node, n)
        for c in range(candidates):
            m, token = n * candidates + c, whole(tokens, known * candidates + c)
            value = real(log_p, m)
            put_real(key, m, NONE)
            if not value > NONE:
                continue
            if noisy:
                u = uniform(whole(path, known), token + 1)
                # G = -log(-log(1 - u)) <= -log(u): most pairs of a large vocabulary need no logarithm
                if held == most and u > scale * types.float64(whole(share, m) + 1):
                    continue
                value += types.float32(-math.log(-math.log(1.0 - u)))
            put_real(key, m, value)
            if value > least and (any_end or not ends(endings, whole(state, known), token)):
                held = insert(best, place, held, most, value, m)
                if held == most:
                    least = real(best, held - 1)
                    scale = SLACK * math.exp(-types.float64(least)) / types.float64(max(total, 1))
    return held


# kernels


@njit(error_model="numpy")
def write_seen(ancestors, mask, above, own, base, window, slots):
    """Write which slots a node sees: those before the suffix, which begins at slot `base`, those that a node above sees
    in the suffix, and its own. own: index of its slot in the suffix."""
    for t in range(window):
        put_mark(ancestors, t, mark(above, t) or t == own)
    for s in range(slots):
        put_mark(mask, s, s < base or (s - base < window and mark(ancestors, s - base)))


@njit(error_model="numpy")
def begin_row(at, row):
    rows, roots, nodes = get_i64(at + BEGIN.items), get_i64(at + BEGIN.roots), get_i64(at + BEGIN.nodes)
    depth, window, slots = get_i64(at + BEGIN.layers), get_i64(at + BEGIN.window), get_i64(at + BEGIN.slots)
    behind, last_position = get_i64(at + BEGIN.backlog), get_i64(at + BEGIN.last_position)
    numbers, flags = get_i64(at + BEGIN.numbers), get_i64(at + BEGIN.flags)
    ancestors, mask = get_i64(at + BEGIN.node_ancestors), get_i64(at + BEGIN.mask)
    joined, joined_mask = get_i64(at + BEGIN.joined), get_i64(at + BEGIN.joined_mask)
    used, base = whole(get_i64(at + BEGIN.used), row), whole(get_i64(at + BEGIN.common_prefix), row)
    positions = get_i64(at + BEGIN.positions) + WHOLE * row * get_i64(at + BEGIN.table_slots)
    tokens = get_i64(at + BEGIN.tokens) + WHOLE * row * get_i64(at + BEGIN.table_slots)
    seen = get_i64(at + BEGIN.ancestors) + row * roots * window
    position = min(whole(get_i64(at + BEGIN.depth), row), last_position)
    plane, part, wide = rows * nodes, rows * (behind + roots), row * (behind + roots)
    for w in range(roots):
        mine, to, slot = row * roots + w, row * nodes + w, used + w
        token = whole(get_i64(at + BEGIN.token), mine)
        put_whole(numbers, TOKEN * plane + to, token)
        put_whole(numbers, PARENT * plane + to, w)
        put_whole(numbers, ROOT * plane + to, w)
        put_whole(numbers, PATH * plane + to, whole(get_i64(at + BEGIN.path), mine))
        put_whole(numbers, STOP_STATE * plane + to, whole(get_i64(at + BEGIN.stop_state), mine))
        put_whole(numbers, DRAFTER_ID * plane + to, 0)
        put_whole(numbers, SLOT * plane + to, slot)
        put_whole(numbers, POSITION * plane + to, position)
        put_mark(flags, VALID * plane + to, mark(get_i64(at + BEGIN.valid), mine))
        put_mark(flags, ENDS * plane + to, False)
        put_mark(flags, SAMPLED * plane + to, False)
        put_real(get_i64(at + BEGIN.node_weight), to, real(get_i64(at + BEGIN.weight), mine))
        for layer in range(depth):
            put_whole(get_i64(at + BEGIN.node_path), to * depth + layer, 0)
        put_whole(positions, slot, position)
        put_whole(tokens, slot, token)
        write_seen(ancestors + to * window, mask + to * slots, seen + w * window, slot - base, base, window, slots)
        if behind:
            put_whole(joined, wide + behind + w, token)
            put_whole(joined, part + wide + behind + w, position)
            put_whole(joined, 2 * part + wide + behind + w, slot)
            for s in range(slots):
                put_mark(joined_mask, (wide + behind + w) * slots + s, mark(mask, to * slots + s))
    origin = types.uint64(whole(get_i64(at + BEGIN.iteration), row)) * MIX_TOKEN
    origin = mix(types.uint64(whole(get_i64(at + BEGIN.row_key), row)) + origin)
    streams = (depth + 1) * STREAMS
    for stream in range(streams):
        key = types.int64(mix(origin + types.uint64(stream) * GOLDEN))
        put_whole(get_i64(at + BEGIN.keys), row * streams + stream, key)
    for j in range(behind):
        slot = used - behind + j
        known = max(slot, 0)
        put_whole(joined, wide + j, whole(tokens, known))
        put_whole(joined, part + wide + j, whole(positions, known))
        put_whole(joined, 2 * part + wide + j, slot if slot >= 0 else get_i64(at + BEGIN.trash))
        place, owner = min(max(slot - base, 0), window - 1), 0
        for w in range(roots - 1, -1, -1):
            owner = w if mark(seen, w * window + place) else owner
        for s in range(slots):
            before = s < base or (s - base < window and mark(seen, owner * window + s - base))
            put_mark(joined_mask, (wide + j) * slots + s, (before and s <= known) or s == known)


@njit(error_model="numpy")
def extend_row(at, row, work):
    rows, nodes, depth = get_i64(at + EXTEND.items), get_i64(at + EXTEND.nodes), get_i64(at + EXTEND.layers)
    above, candidates, count = get_i64(at + EXTEND.above), get_i64(at + EXTEND.candidates), get_i64(at + EXTEND.count)
    first, layer = row * nodes + get_i64(at + EXTEND.first), get_i64(at + EXTEND.layer)
    window, slots, plane = get_i64(at + EXTEND.window), get_i64(at + EXTEND.slots), rows * nodes
    coupled, endings = get_i64(at + EXTEND.coupled) != 0, at + EXTEND.eos
    tokens = get_i64(at + EXTEND.tokens) + WHOLE * row * above * candidates
    logprobs = get_i64(at + EXTEND.logprobs) + REAL * row * above * candidates
    numbers, flags = get_i64(at + EXTEND.numbers), get_i64(at + EXTEND.flags)
    weights, paths = get_i64(at + EXTEND.node_weight), get_i64(at + EXTEND.node_path)
    ancestors, mask = get_i64(at + EXTEND.node_ancestors), get_i64(at + EXTEND.mask)
    used, base = whole(get_i64(at + EXTEND.used), row), whole(get_i64(at + EXTEND.common_prefix), row)
    position = min(whole(get_i64(at + EXTEND.depth), row) + layer + 1, get_i64(at + EXTEND.last_position))
    pairs = above * candidates
    share, place, node = work, work + WHOLE * pairs, work + WHOLE * (pairs + count)
    joint = node + WHOLE * above
    log_p, key, best = joint + REAL * pairs, joint + 2 * REAL * pairs, joint + 3 * REAL * pairs
    weight = best + REAL * count
    for n in range(above):
        put_whole(node, n, n)
        there = mark(flags, VALID * plane + first + n) and not mark(flags, ENDS * plane + first + n)
        put_real(weight, n, real(weights, first + n) if there else NONE)
        for m in range(n * candidates, (n + 1) * candidates):
            value = real(logprobs, m)
            value = NONE if math.isnan(value) else value  # where the draft gives NaN it proposes nothing
            put_real(joint, m, value if coupled else value + real(weight, n))
            put_real(log_p, m, real(joint, m))
    total, noisy = types.int64(1), False
    if coupled:
        total = pool_distribution(at + EXTEND.temperature, row, weight, joint, log_p, share, above, candidates)
        noisy = not mark(get_i64(at + EXTEND.greedy), row)
    found = draw(
        best, place, count, key, log_p, share, total, noisy, numbers + WHOLE * (PATH * plane + first), tokens,
        node, above, candidates, endings, numbers + WHOLE * (STOP_STATE * plane + first), False,
    )  # fmt: skip
    for k in range(count):
        m = whole(place, k) if k < found else 0
        parent, to, child = first + m // candidates, first + above + k, whole(tokens, m)
        state, slot = whole(numbers, STOP_STATE * plane + parent), used + to - row * nodes
        put_whole(numbers, TOKEN * plane + to, child)
        put_whole(numbers, PARENT * plane + to, parent - row * nodes)
        put_whole(numbers, ROOT * plane + to, whole(numbers, ROOT * plane + parent))
        put_whole(numbers, PATH * plane + to, child_path(whole(numbers, PATH * plane + parent), child))
        put_whole(numbers, STOP_STATE * plane + to, state_after(endings, state, child))
        put_whole(numbers, DRAFTER_ID * plane + to, 0)
        put_whole(numbers, SLOT * plane + to, slot)
        put_whole(numbers, POSITION * plane + to, position)
        put_mark(flags, VALID * plane + to, k < found)
        put_mark(flags, ENDS * plane + to, ends(endings, state, child))
        put_mark(flags, SAMPLED * plane + to, coupled and k < found)
        put_real(weights, to, real(joint, m))
        for step in range(depth):
            put_whole(paths, to * depth + step, child if step == layer else whole(paths, parent * depth + step))
        put_whole(get_i64(at + EXTEND.positions), row * get_i64(at + EXTEND.table_slots) + slot, position)
        put_whole(get_i64(at + EXTEND.held), row * get_i64(at + EXTEND.table_slots) + slot, child)
        seen = ancestors + parent * window
        write_seen(ancestors + to * window, mask + to * slots, seen, slot - base, base, window, slots)


@njit(error_model="numpy")
def keep_finished(at, mine, width, logprob, score, length, by_length, node, token):
    """Add a hypothesis to the best finished ones of a request, behind those of the same score, and drop the last one.
    mine: place of the first of them."""
    scores, logprobs = get_i64(at + VERIFY.finished_score), get_i64(at + VERIFY.finished_logprob)
    lengths, cuts = get_i64(at + VERIFY.finished_length), get_i64(at + VERIFY.finished_by_length)
    origins, nodes = get_i64(at + VERIFY.finished_origin), get_i64(at + VERIFY.finished_node)
    tokens, f = get_i64(at + VERIFY.finished_token), mine + width - 1
    if not score > real(scores, f):
        return
    while f > mine and real(scores, f - 1) < score:
        put_real(scores, f, real(scores, f - 1))
        put_real(logprobs, f, real(logprobs, f - 1))
        put_whole(lengths, f, whole(lengths, f - 1))
        put_mark(cuts, f, mark(cuts, f - 1))
        put_whole(origins, f, whole(origins, f - 1))
        put_whole(nodes, f, whole(nodes, f - 1))
        put_whole(tokens, f, whole(tokens, f - 1))
        f -= 1
    put_real(scores, f, score)
    put_real(logprobs, f, logprob)
    put_whole(lengths, f, length)
    put_mark(cuts, f, by_length)
    put_whole(origins, f, -1)
    put_whole(nodes, f, node)
    put_whole(tokens, f, token)


@njit(error_model="numpy")
def beams_of(at, row):
    """Return W of a request, at most that of all tensors."""
    row_beams = get_i64(at + VERIFY.row_beams)
    return get_i64(at + VERIFY.width) if row_beams == 0 else whole(row_beams, row)


@njit(error_model="numpy")
def write_start(at, row):
    """Write the results of a request that takes no step: the roots as beams, and the counters of layers that were not
    reached."""
    nodes, roots = get_i64(at + VERIFY.nodes), get_i64(at + VERIFY.roots)
    width, depth, drafted = get_i64(at + VERIFY.width), get_i64(at + VERIFY.layers), get_i64(at + VERIFY.count)
    here, mine = row * nodes, row * width
    node_token = get_i64(at + VERIFY.token)
    node_valid, drafter_id = get_i64(at + VERIFY.valid) + here, get_i64(at + VERIFY.drafter_id) + WHOLE * here
    parent, token = get_i64(at + VERIFY.out_parent), get_i64(at + VERIFY.out_token)
    node, valid = get_i64(at + VERIFY.out_node), get_i64(at + VERIFY.out_valid)
    weight, logprob = get_i64(at + VERIFY.out_weight), get_i64(at + VERIFY.out_logprob)
    before = get_i64(at + VERIFY.out_before) + WHOLE * row * (depth + 1) * width
    report = get_i64(at + VERIFY.report) + WHOLE * row * (FIRST + depth * COLUMNS)
    for w in range(width):
        root, from_root = w < roots, row * roots + w
        put_whole(parent, mine + w, w if root else 0)
        put_whole(node, mine + w, w if root else -1)
        put_whole(token, mine + w, whole(node_token, here + w) if root else 0)
        put_mark(valid, mine + w, root and mark(get_i64(at + VERIFY.root_valid), from_root))
        put_real(weight, mine + w, real(get_i64(at + VERIFY.root_weight), from_root) if root else ZERO)
        put_real(logprob, mine + w, real(get_i64(at + VERIFY.root_logprob), from_root) if root else ZERO)
    for step in range((depth + 1) * width):
        put_whole(before, step, -1)
    for column in range(FIRST + depth * COLUMNS):
        put_whole(report, column, 0)
    for layer in range(depth):
        nodes_of, second = 0, 0
        for j in range(roots + layer * drafted, roots + (layer + 1) * drafted):
            if mark(node_valid, j):
                nodes_of += 1
                second += whole(drafter_id, j)
        put_whole(report, FIRST + layer * COLUMNS + 1, nodes_of)
        put_whole(report, FIRST + layer * COLUMNS + 3, beams_of(at, row))
        put_whole(report, FIRST + layer * COLUMNS + 7, second)


@njit(error_model="numpy")
def drafted_as(at, row, first, parent, token):
    """Return which of the K drafts from node `first` on is this pair; -1 for none."""
    here = row * get_i64(at + VERIFY.nodes) + first
    for k in range(here, here + get_i64(at + VERIFY.count)):
        same = whole(get_i64(at + VERIFY.parent), k) == parent and whole(get_i64(at + VERIFY.token), k) == token
        if same and mark(get_i64(at + VERIFY.valid), k):
            return k - here
    return -1


@njit(error_model="numpy")
def verify_row(at, row, work):
    nodes, candidates, roots = get_i64(at + VERIFY.nodes), get_i64(at + VERIFY.candidates), get_i64(at + VERIFY.roots)
    width, depth, drafted = get_i64(at + VERIFY.width), get_i64(at + VERIFY.layers), get_i64(at + VERIFY.count)
    coupled, endings, here, mine = get_i64(at + VERIFY.coupled) != 0, at + VERIFY.eos, row * nodes, row * width
    tokens = get_i64(at + VERIFY.tokens) + WHOLE * here * candidates
    logprobs = get_i64(at + VERIFY.logprobs) + REAL * here * candidates
    path, state = get_i64(at + VERIFY.path) + WHOLE * here, get_i64(at + VERIFY.stop_state) + WHOLE * here
    node_parent, node_valid = get_i64(at + VERIFY.parent) + WHOLE * here, get_i64(at + VERIFY.valid) + here
    drafter_id = get_i64(at + VERIFY.drafter_id) + WHOLE * here
    report = get_i64(at + VERIFY.report) + WHOLE * row * (FIRST + depth * COLUMNS)
    before = get_i64(at + VERIFY.out_before) + WHOLE * row * (depth + 1) * width
    # the beams of the present step, and at the end the results
    parent, token = get_i64(at + VERIFY.out_parent) + WHOLE * mine, get_i64(at + VERIFY.out_token) + WHOLE * mine
    node, valid = get_i64(at + VERIFY.out_node) + WHOLE * mine, get_i64(at + VERIFY.out_valid) + mine
    weight, logprob = get_i64(at + VERIFY.out_weight) + REAL * mine, get_i64(at + VERIFY.out_logprob) + REAL * mine
    # memory to work in
    pairs = width * candidates
    share, place, known = work, work + WHOLE * pairs, work + WHOLE * (pairs + width)
    e_place, n_parent = known + WHOLE * width, known + 2 * WHOLE * width
    joint = known + 3 * WHOLE * width
    log_p, key, best = joint + REAL * pairs, joint + 2 * REAL * pairs, joint + 3 * REAL * pairs
    above, e_best, n_logprob = best + REAL * width, best + 2 * REAL * width, best + 3 * REAL * width
    active = mark(get_i64(at + VERIFY.active), row)
    write_start(at, row)
    length, limit = whole(get_i64(at + VERIFY.length), row), whole(get_i64(at + VERIFY.max_new), row)
    penalty, early = types.float64(real(get_i64(at + VERIFY.penalty), row)), mark(get_i64(at + VERIFY.early), row)
    beams = beams_of(at, row)
    never = get_i64(at + VERIFY.never) != 0 and mark(get_i64(at + VERIFY.never), row)
    worst = get_i64(at + VERIFY.finished_score) + REAL * (mine + beams - 1)
    noisy = coupled and not mark(get_i64(at + VERIFY.greedy), row)
    steps, total_width, done, broken, going, layer = 0, 0, False, False, active, 0
    while going:
        count = roots if layer == 0 else width
        for n in range(count):
            at_node, alive = max(whole(node, n), 0), mark(valid, n)
            put_whole(known, n, at_node)
            put_whole(before, layer * width + n, whole(node, n))
            put_real(above, n, (real(weight, n) if coupled else real(logprob, n)) if alive else NONE)
            for c in range(candidates):
                value = real(logprobs, at_node * candidates + c) if alive else NONE
                broken = broken or math.isnan(value)
                value = value if coupled else value + real(above, n)
                put_real(joint, n * candidates + c, value)
                put_real(log_p, n * candidates + c, value)
        if broken:
            break
        total = types.int64(1)
        if coupled:
            total = pool_distribution(at + VERIFY.temperature, row, above, joint, log_p, share, count, candidates)
        # last: key of the last draw, behind which nothing ends; rule search ranks all pairs, ending ones too
        last, held = NONE, 0
        for live in range(1 if coupled else 0, 2):
            held = draw(
                best, place, beams, key, log_p, share, total, noisy, path, tokens, known, count, candidates, endings,
                state, live == 0,
            )  # fmt: skip
            if live == (1 if coupled else 0) and held == min(beams, count * candidates):
                last = real(best, held - 1)
        # what ended here, best first
        ended = 0
        for m in range(count * candidates):
            value, n = real(key, m), m // candidates
            if value < last or (coupled and value == last) or not value > NONE:
                continue
            at_pair = whole(known, n) * candidates + m % candidates
            if ends(endings, whole(state, whole(known, n)), whole(tokens, at_pair)):
                value = real(logprob, n) + real(logprobs, at_pair)
                if value > NONE and (ended < beams or value > real(e_best, ended - 1)):
                    ended = insert(e_best, e_place, ended, beams, value, m)
        steps += 1
        scale = types.float32(math.exp(penalty * math.log(types.float64(length + steps))))
        over = length + steps >= limit
        for e in range(ended):
            at_node, c = whole(known, whole(e_place, e) // candidates), whole(e_place, e) % candidates
            value, ending = real(e_best, e), whole(tokens, at_node * candidates + c)
            keep_finished(at, mine, beams, value, value / scale, length + steps, False, at_node, ending)
        # the beams of the next step, and which of them are drafted nodes
        below, accepted, second, needed, living = roots + layer * drafted, 0, 0, 0, 0
        for j in range(drafted if layer < depth else 0):
            has_parent = False
            for n in range(count):
                has_parent = has_parent or (mark(valid, n) and whole(node, n) == whole(node_parent, below + j))
            living += 1 if has_parent and mark(node_valid, below + j) else 0
        for w in range(held):
            n, at_node = whole(place, w) // candidates, whole(known, whole(place, w) // candidates)
            at_pair = at_node * candidates + whole(place, w) % candidates
            put_whole(n_parent, w, at_node)
            put_whole(token, w, whole(tokens, at_pair))
            put_real(n_logprob, w, real(logprob, n) + real(logprobs, at_pair))
        highest_live = NONE
        for w in range(width):
            drawn = w < held
            put_whole(parent, w, whole(n_parent, w) if drawn else 0)
            put_whole(token, w, whole(token, w) if drawn else 0)
            put_whole(node, w, -1)
            put_mark(valid, w, drawn)
            put_real(weight, w, real(joint, whole(place, w)) if drawn else ZERO)
            put_real(logprob, w, real(n_logprob, w) if drawn else ZERO)
            if not drawn:
                continue
            highest_live = max(highest_live, real(logprob, w))
            if over and (coupled or real(best, w) >= last):  # the length limit ends it
                value, at_node = real(logprob, w), whole(parent, w)
                keep_finished(at, mine, beams, value, value / scale, length + steps, True, at_node, whole(token, w))
            j = drafted_as(at, row, below, whole(parent, w), whole(token, w)) if layer < depth else -1
            if j >= 0:
                put_whole(node, w, below + j)
                accepted += 1
                if whole(drafter_id, below + j) == 1:
                    second += 1
                else:
                    needed = max(needed, j + 1)
        passed = layer < depth and held > 0 and accepted == held
        if layer < depth:
            column = report + WHOLE * (FIRST + layer * COLUMNS)
            put_whole(column, 0, 1)
            put_whole(column, 2, living)
            put_whole(column, 4, accepted)
            put_whole(column, 5, 1 if passed else 0)
            put_whole(column, 6, needed if passed else 0)
            put_whole(column, 8, second)
        total_width += held
        full = real(worst, 0) > NONE
        if never and penalty > 0:  # a live beam is scored at the largest length
            scale = types.float32(math.exp(penalty * math.log(types.float64(limit))))
        stop = over or held == 0 or (full and (early or highest_live / scale <= real(worst, 0)))
        done = done or stop
        going = passed and not stop
        layer += 1
    put_whole(report, 0, 1 if done or broken else 0)
    put_whole(report, 1, 1 if broken else 0)
    put_whole(report, 2, steps)
    put_whole(report, 3, total_width)


@njit(error_model="numpy")
def copy_wholes(source, target, count):
    for place in range(count):
        put_whole(target, place, whole(source, place))


@njit(error_model="numpy")
def write_path(text, begun, history, path, steps, token):
    """Write the tokens of this iteration behind the `begun` tokens of a text: steps - 1 of a path, and the last one."""
    for step in range(max(min(steps, history - begun), 0)):
        put_whole(text, begun + step, token if step == steps - 1 else whole(path, step))


@njit(error_model="numpy")
def commit_texts(at, row, work, steps):
    """Write the tokens of hypotheses that finished, then those of live beams. What is overwritten is copied first."""
    roots, width, nodes = get_i64(at + COMMIT.roots), get_i64(at + COMMIT.width), get_i64(at + COMMIT.nodes)
    depth, path_layers = get_i64(at + COMMIT.layers), get_i64(at + COMMIT.path_layers)
    history, mine = get_i64(at + COMMIT.history_length), row * width
    begun = min(whole(get_i64(at + COMMIT.length), row), history)
    end, line = min(begun + depth + 1, history), WHOLE * history
    old = get_i64(at + COMMIT.history) + row * get_i64(at + COMMIT.history_row)
    new, texts = get_i64(at + COMMIT.out_history) + mine * line, get_i64(at + COMMIT.finished_tokens) + mine * line
    root, paths = get_i64(at + COMMIT.root) + WHOLE * row * nodes, get_i64(at + COMMIT.node_path)
    origin, last_node = get_i64(at + COMMIT.finished_origin), get_i64(at + COMMIT.finished_node)
    moves = False
    for f in range(width):
        moves = moves or whole(origin, mine + f) != f
    for f in range(width if moves else 0):
        copy_wholes(texts + f * line, work + f * line, end)
    for f in range(width if moves else 0):
        node, text = min(max(whole(last_node, mine + f), 0), nodes - 1), texts + f * line
        if whole(origin, mine + f) >= 0:
            copy_wholes(work + whole(origin, mine + f) * line, text, end)
        else:
            count = whole(get_i64(at + COMMIT.finished_length), mine + f) - begun
            copy_wholes(old + whole(root, node) * line, text, begun)
            path, last = paths + WHOLE * (row * nodes + node) * path_layers, get_i64(at + COMMIT.finished_token)
            write_path(text, begun, history, path, min(max(count, 1), depth + 1), whole(last, mine + f))
        put_whole(origin, mine + f, f)
    parent = get_i64(at + COMMIT.parent)
    moves = old != new
    for w in range(width):
        moves = moves or whole(root, whole(parent, mine + w)) != w
    for r in range(roots if moves else 0):
        copy_wholes(old + r * line, work + r * line, begun)
    for w in range(width):
        node = whole(parent, mine + w)
        if moves:
            copy_wholes(work + whole(root, node) * line, new + w * line, begun)
        path = paths + WHOLE * (row * nodes + node) * path_layers
        write_path(new + w * line, begun, history, path, steps, whole(get_i64(at + COMMIT.token), mine + w))


@njit(error_model="numpy")
def commit_row(at, row, work):
    nodes, width, window = get_i64(at + COMMIT.nodes), get_i64(at + COMMIT.width), get_i64(at + COMMIT.window)
    table_slots, endings = get_i64(at + COMMIT.table_slots), at + COMMIT.eos
    mine, here, line = row * width, row * nodes, row * window
    parent, valid = get_i64(at + COMMIT.parent), get_i64(at + COMMIT.valid)
    report = get_i64(at + COMMIT.report) + WHOLE * row * (FIRST + get_i64(at + COMMIT.layers) * COLUMNS)
    steps = whole(report, 2)
    going = mark(get_i64(at + COMMIT.active), row) and whole(report, 0) == 0
    commit_texts(at, row, work, steps)
    # slots: the ancestors of live beams stay, in order
    used, prefix, drafted = get_i64(at + COMMIT.used), get_i64(at + COMMIT.common_prefix), get_i64(at + COMMIT.drafted)
    positions = get_i64(at + COMMIT.positions) + WHOLE * row * table_slots
    tokens = get_i64(at + COMMIT.tokens) + WHOLE * row * table_slots
    ancestors, seen = get_i64(at + COMMIT.node_ancestors), get_i64(at + COMMIT.out_ancestors) + mine * window
    source, target = get_i64(at + COMMIT.source), get_i64(at + COMMIT.target)
    base, run = whole(prefix, row), get_i64(at + COMMIT.ran)
    run = whole(used, row) + run if run else whole(drafted, row)
    for t in range(window):
        put_whole(source, line + t, min(base + t, table_slots - 1))
        put_whole(target, line + t, min(base + t, table_slots - 1))
    for t in range(width * window):
        put_mark(seen, t, False)
    place, common, ran, shared = 0, 0, min(run, base), True
    for t in range(window if going else 0):
        holders, lacking = False, False
        for w in range(width):
            if mark(valid, mine + w):
                holds = mark(ancestors, (here + whole(parent, mine + w)) * window + t)
                holders, lacking = holders or holds, lacking or not holds
        if not holders:
            continue
        shared = shared and not lacking
        common += 1 if shared else 0
        ran += 1 if base + t < run else 0
        put_whole(source, line + place, base + t)
        put_whole(positions, base + place, whole(positions, base + t))
        put_whole(tokens, base + place, whole(tokens, base + t))
        for w in range(0 if shared else width):
            holds = mark(valid, mine + w) and mark(ancestors, (here + whole(parent, mine + w)) * window + t)
            put_mark(seen, w * window + place - common, holds)
        place += 1
    put_whole(used, row, base + place)
    put_whole(prefix, row, base + common)
    put_whole(drafted, row, ran)
    put_whole(report, 4, base + place)
    put_whole(report, 5, base + common)
    put_whole(report, 6, ran)
    for w in range(mine, mine + width):
        above, token = here + whole(parent, w), whole(get_i64(at + COMMIT.token), w)
        state = state_after(endings, whole(get_i64(at + COMMIT.stop_state), above), token)
        put_mark(get_i64(at + COMMIT.out_valid), w, going and mark(valid, w))
        put_whole(get_i64(at + COMMIT.out_token), w, token)
        put_real(get_i64(at + COMMIT.out_weight), w, real(get_i64(at + COMMIT.weight), w))
        put_real(get_i64(at + COMMIT.out_logprob), w, real(get_i64(at + COMMIT.logprob), w))
        put_whole(get_i64(at + COMMIT.out_path), w, child_path(whole(get_i64(at + COMMIT.path), above), token))
        put_whole(get_i64(at + COMMIT.out_stop_state), w, state)
    length, depths, iteration = get_i64(at + COMMIT.length), get_i64(at + COMMIT.depth), get_i64(at + COMMIT.iteration)
    put_whole(length, row, whole(length, row) + steps)
    put_whole(depths, row, whole(depths, row) + steps)
    put_whole(iteration, row, whole(iteration, row) + 1)


@njit(error_model="numpy")
def logit(values, narrow, v):
    return get_bf16(values + 2 * v) if narrow else get_f32(values + REAL * v)


@njit(error_model="numpy")
def logits_from(values, narrow, v):
    return load_bf16(values + 2 * v) if narrow else load_f32(values + REAL * v)


@njit(error_model="numpy")
def select_row(at, item, work):
    nodes, vocabulary = get_i64(at + CANDIDATES.nodes), get_i64(at + CANDIDATES.vocabulary)
    count, narrow = get_i64(at + CANDIDATES.count), get_i64(at + CANDIDATES.narrow) != 0
    values = get_i64(at + CANDIDATES.logits) + item // nodes * get_i64(at + CANDIDATES.row)
    values += item % nodes * get_i64(at + CANDIDATES.node)
    blocks, most = vocabulary // FOUR, splat(NONE)
    place, best = work, work + WHOLE * count
    maxima = best + REAL * count
    for block in range(blocks):
        v = block * FOUR
        a = larger(logits_from(values, narrow, v), logits_from(values, narrow, v + LANES))
        b = larger(logits_from(values, narrow, v + 2 * LANES), logits_from(values, narrow, v + 3 * LANES))
        a = larger(a, b)
        put_real(maxima, block, largest(a))
        most = larger(a, most)
    top = largest(most)
    for v in range(blocks * FOUR, vocabulary):
        top = max(top, logit(values, narrow, v))
    held = 0
    for block in range((vocabulary + FOUR - 1) // FOUR):
        if held == count and block < blocks and not real(maxima, block) > real(best, count - 1):
            continue
        for v in range(block * FOUR, min((block + 1) * FOUR, vocabulary)):
            value = logit(values, narrow, v)
            if held < count or value > real(best, count - 1):
                held = insert(best, place, held, count, value, v)
    tokens = get_i64(at + CANDIDATES.tokens) + WHOLE * item * count
    found = get_i64(at + CANDIDATES.best) + REAL * item * count
    for c in range(count):  # in ascending order of the tokens
        i, token = c, whole(place, c)
        while i > 0 and whole(tokens, i - 1) > token:
            put_whole(tokens, i, whole(tokens, i - 1))
            put_real(found, i, real(found, i - 1))
            i -= 1
        put_whole(tokens, i, token)
        put_real(found, i, real(best, c))
    put_real(get_i64(at + CANDIDATES.highest), item, top)
    put_real(get_i64(at + CANDIDATES.total), item, row_total(values, narrow, vocabulary, top))


@compiled.addressed
def begin(at):
    """Write the roots of each request that no other thread has taken."""
    take(at + BEGIN.threads)
    while True:
        row = take(at + BEGIN.taken)
        if row >= get_i64(at + BEGIN.items):
            return
        begin_row(at, row)


@compiled.addressed
def extend(at):
    """Write a drafted layer of each request that no other thread has taken."""
    work = get_i64(at + EXTEND.work) + take(at + EXTEND.threads) * get_i64(at + EXTEND.work_bytes)
    while True:
        row = take(at + EXTEND.taken)
        if row >= get_i64(at + EXTEND.items):
            return
        extend_row(at, row, work)


@compiled.addressed
def verify(at):
    """Verify the forest of each request that no other thread has taken."""
    work = get_i64(at + VERIFY.work) + take(at + VERIFY.threads) * get_i64(at + VERIFY.work_bytes)
    while True:
        row = take(at + VERIFY.taken)
        if row >= get_i64(at + VERIFY.items):
            return
        verify_row(at, row, work)


@compiled.addressed
def commit(at):
    """Commit each request that no other thread has taken."""
    work = get_i64(at + COMMIT.work) + take(at + COMMIT.threads) * get_i64(at + COMMIT.work_bytes)
    while True:
        row = take(at + COMMIT.taken)
        if row >= get_i64(at + COMMIT.items):
            return
        commit_row(at, row, work)


@compiled.addressed
def candidates(at):
    """Select the candidates of each node that no other thread has taken."""
    work = get_i64(at + CANDIDATES.work) + take(at + CANDIDATES.threads) * get_i64(at + CANDIDATES.work_bytes)
    while True:
        item = take(at + CANDIDATES.taken)
        if item >= get_i64(at + CANDIDATES.items):
            return
        select_row(at, item, work)
