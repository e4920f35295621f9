"""The kernels of ops/cpu/iteration.py in numba: they write, verify and commit a forest.

They compute what the tensor code of engine/ computes, whose docstrings say why. A thread works on one request, so the
bits of a request do not depend on the others. Tensors are addresses, as in pool.py.

Letters: R requests, W0 roots, W beams, K drafts per layer, D layers, N nodes, C candidates per node, M pairs of a pool,
T suffix window, S slots, L history, F = W finished hypotheses kept.
"""

from __future__ import annotations

import math

from numba import njit, types

from dsbd_cli.ops.cpu.iteration import AT, LAYOUT
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.pool import (
    GOLDEN,
    MIX_TOKEN,
    NONE,
    REAL,
    WHOLE,
    ZERO,
    child_path,
    draw,
    ends,
    insert,
    mark,
    mix,
    pool_distribution,
    put_mark,
    put_real,
    put_whole,
    real,
    state_after,
    whole,
)
from dsbd_cli.ops.cpu.kernels.simd import get_i64, take
from dsbd_cli.ops.layout import COLUMNS, FIELDS, FIRST, FLAGS, STREAMS

compiled = KernelCompiler("iterations", seconds=11, layout=LAYOUT)

TOKEN, PARENT, ROOT, PATH, STOP_STATE, DRAFTER_ID, SLOT, POSITION = range(len(FIELDS))
VALID, ENDS, SAMPLED = range(len(FLAGS))


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
    rows, roots, nodes = get_i64(at + AT.rows), get_i64(at + AT.roots), get_i64(at + AT.nodes)
    depth, window, slots = get_i64(at + AT.depth), get_i64(at + AT.window), get_i64(at + AT.slots)
    behind, last_position = get_i64(at + AT.backlog_nodes) - roots, get_i64(at + AT.last_position)
    numbers, flags = get_i64(at + AT.forest_numbers), get_i64(at + AT.forest_flags)
    ancestors, mask = get_i64(at + AT.forest_ancestors), get_i64(at + AT.forest_mask)
    joined, joined_mask = get_i64(at + AT.backlog_numbers), get_i64(at + AT.backlog_mask)
    used, base = whole(get_i64(at + AT.table_used), row), whole(get_i64(at + AT.table_common_prefix), row)
    positions = get_i64(at + AT.table_positions) + WHOLE * row * get_i64(at + AT.table_slots)
    tokens = get_i64(at + AT.table_tokens) + WHOLE * row * get_i64(at + AT.table_slots)
    seen = get_i64(at + AT.beam_ancestors) + row * roots * window
    position = min(whole(get_i64(at + AT.beam_depth), row), last_position)
    plane, part, wide = rows * nodes, rows * (behind + roots), row * (behind + roots)
    for w in range(roots):
        mine, to, slot = row * roots + w, row * nodes + w, used + w
        token = whole(get_i64(at + AT.beam_token), mine)
        put_whole(numbers, TOKEN * plane + to, token)
        put_whole(numbers, PARENT * plane + to, w)
        put_whole(numbers, ROOT * plane + to, w)
        put_whole(numbers, PATH * plane + to, whole(get_i64(at + AT.beam_path), mine))
        put_whole(numbers, STOP_STATE * plane + to, whole(get_i64(at + AT.beam_stop_state), mine))
        put_whole(numbers, DRAFTER_ID * plane + to, 0)
        put_whole(numbers, SLOT * plane + to, slot)
        put_whole(numbers, POSITION * plane + to, position)
        put_mark(flags, VALID * plane + to, mark(get_i64(at + AT.beam_valid), mine))
        put_mark(flags, ENDS * plane + to, False)
        put_mark(flags, SAMPLED * plane + to, False)
        put_real(get_i64(at + AT.forest_weight), to, real(get_i64(at + AT.beam_weight), mine))
        for layer in range(depth):
            put_whole(get_i64(at + AT.forest_path_tokens), to * depth + layer, 0)
        put_whole(positions, slot, position)
        put_whole(tokens, slot, token)
        write_seen(ancestors + to * window, mask + to * slots, seen + w * window, slot - base, base, window, slots)
        if behind:
            put_whole(joined, wide + behind + w, token)
            put_whole(joined, part + wide + behind + w, position)
            put_whole(joined, 2 * part + wide + behind + w, slot)
            for s in range(slots):
                put_mark(joined_mask, (wide + behind + w) * slots + s, mark(mask, to * slots + s))
    origin = types.uint64(whole(get_i64(at + AT.state_iteration), row)) * MIX_TOKEN
    origin = mix(types.uint64(whole(get_i64(at + AT.state_row_key), row)) + origin)
    streams = (depth + 1) * STREAMS
    for stream in range(streams):
        key = types.int64(mix(origin + types.uint64(stream) * GOLDEN))
        put_whole(get_i64(at + AT.noise_keys), row * streams + stream, key)
    for j in range(behind):
        slot = used - behind + j
        read_slot = max(slot, 0)
        put_whole(joined, wide + j, whole(tokens, read_slot))
        put_whole(joined, part + wide + j, whole(positions, read_slot))
        put_whole(joined, 2 * part + wide + j, slot if slot >= 0 else get_i64(at + AT.trash))
        bit, owner = min(max(slot - base, 0), window - 1), 0
        for w in range(roots - 1, -1, -1):
            owner = w if mark(seen, w * window + bit) else owner
        for s in range(slots):
            before = s < base or (s - base < window and mark(seen, owner * window + s - base))
            put_mark(joined_mask, (wide + j) * slots + s, (before and s <= read_slot) or s == read_slot)


@njit(error_model="numpy")
def extend_row(at, row, work):
    rows, nodes, depth = get_i64(at + AT.rows), get_i64(at + AT.nodes), get_i64(at + AT.depth)
    above, candidates, count = get_i64(at + AT.above), get_i64(at + AT.candidates), get_i64(at + AT.drafts)
    first, layer = row * nodes + get_i64(at + AT.first), get_i64(at + AT.layer)
    window, slots, plane = get_i64(at + AT.window), get_i64(at + AT.slots), rows * nodes
    coupled = get_i64(at + AT.coupled) != 0
    tokens = get_i64(at + AT.candidate_tokens) + WHOLE * row * above * candidates
    logprobs = get_i64(at + AT.candidate_logprobs) + REAL * row * above * candidates
    numbers, flags = get_i64(at + AT.forest_numbers), get_i64(at + AT.forest_flags)
    weights, paths = get_i64(at + AT.forest_weight), get_i64(at + AT.forest_path_tokens)
    ancestors, mask = get_i64(at + AT.forest_ancestors), get_i64(at + AT.forest_mask)
    used, base = whole(get_i64(at + AT.table_used), row), whole(get_i64(at + AT.table_common_prefix), row)
    position = min(whole(get_i64(at + AT.beam_depth), row) + layer + 1, get_i64(at + AT.last_position))
    pairs = above * candidates
    share, chosen, node = work, work + WHOLE * pairs, work + WHOLE * (pairs + count)
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
        total = pool_distribution(at, row, weight, joint, log_p, share, above, candidates)
        noisy = not mark(get_i64(at + AT.warp_greedy), row)
    drawn = draw(
        at, best, chosen, count, key, log_p, share, total, noisy, numbers + WHOLE * (PATH * plane + first), tokens,
        node, above, candidates, numbers + WHOLE * (STOP_STATE * plane + first), False,
    )  # fmt: skip
    for k in range(count):
        m = whole(chosen, k) if k < drawn else 0
        parent, to, child = first + m // candidates, first + above + k, whole(tokens, m)
        state, slot = whole(numbers, STOP_STATE * plane + parent), used + to - row * nodes
        put_whole(numbers, TOKEN * plane + to, child)
        put_whole(numbers, PARENT * plane + to, parent - row * nodes)
        put_whole(numbers, ROOT * plane + to, whole(numbers, ROOT * plane + parent))
        put_whole(numbers, PATH * plane + to, child_path(whole(numbers, PATH * plane + parent), child))
        put_whole(numbers, STOP_STATE * plane + to, state_after(at, state, child))
        put_whole(numbers, DRAFTER_ID * plane + to, 0)
        put_whole(numbers, SLOT * plane + to, slot)
        put_whole(numbers, POSITION * plane + to, position)
        put_mark(flags, VALID * plane + to, k < drawn)
        put_mark(flags, ENDS * plane + to, ends(at, state, child))
        put_mark(flags, SAMPLED * plane + to, coupled and k < drawn)
        put_real(weights, to, real(joint, m))
        for step in range(depth):
            put_whole(paths, to * depth + step, child if step == layer else whole(paths, parent * depth + step))
        put_whole(get_i64(at + AT.table_positions), row * get_i64(at + AT.table_slots) + slot, position)
        put_whole(get_i64(at + AT.table_tokens), row * get_i64(at + AT.table_slots) + slot, child)
        seen = ancestors + parent * window
        write_seen(ancestors + to * window, mask + to * slots, seen, slot - base, base, window, slots)


@njit(error_model="numpy")
def keep_finished(at, mine, width, logprob, score, length, by_length, node, token):
    """Add a hypothesis to the best finished ones of a request, behind those of the same score, and drop the last one.
    mine: place of the first of them."""
    scores, logprobs = get_i64(at + AT.finished_score), get_i64(at + AT.finished_logprob)
    lengths, cuts = get_i64(at + AT.finished_length), get_i64(at + AT.finished_by_length)
    origins, nodes = get_i64(at + AT.finished_origin), get_i64(at + AT.finished_node)
    tokens, f = get_i64(at + AT.finished_token), mine + width - 1
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
    row_beams = get_i64(at + AT.own_beams)
    return get_i64(at + AT.beams) if row_beams == 0 else whole(row_beams, row)


@njit(error_model="numpy")
def write_start(at, row):
    """Write the results of a request that takes no step: the roots as beams, and the counters of layers that were not
    reached."""
    nodes, roots = get_i64(at + AT.nodes), get_i64(at + AT.roots)
    width, depth, drafted = get_i64(at + AT.beams), get_i64(at + AT.layers), get_i64(at + AT.drafts)
    here, mine = row * nodes, row * width
    node_token = get_i64(at + AT.node_token)
    node_valid, drafter_id = get_i64(at + AT.node_valid) + here, get_i64(at + AT.node_drafter_id) + WHOLE * here
    parent, token = get_i64(at + AT.live_parent), get_i64(at + AT.live_token)
    node, valid = get_i64(at + AT.live_node), get_i64(at + AT.live_valid)
    weight, logprob = get_i64(at + AT.live_weight), get_i64(at + AT.live_logprob)
    before = get_i64(at + AT.verified_before) + WHOLE * row * (depth + 1) * width
    report = get_i64(at + AT.verified_report) + WHOLE * row * (FIRST + depth * COLUMNS)
    for w in range(width):
        root, from_root = w < roots, row * roots + w
        put_whole(parent, mine + w, w if root else 0)
        put_whole(node, mine + w, w if root else -1)
        put_whole(token, mine + w, whole(node_token, here + w) if root else 0)
        put_mark(valid, mine + w, root and mark(get_i64(at + AT.beam_valid), from_root))
        put_real(weight, mine + w, real(get_i64(at + AT.beam_weight), from_root) if root else ZERO)
        put_real(logprob, mine + w, real(get_i64(at + AT.beam_logprob), from_root) if root else ZERO)
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
    here = row * get_i64(at + AT.nodes) + first
    for k in range(here, here + get_i64(at + AT.drafts)):
        same = whole(get_i64(at + AT.node_parent), k) == parent and whole(get_i64(at + AT.node_token), k) == token
        if same and mark(get_i64(at + AT.node_valid), k):
            return k - here
    return -1


@njit(error_model="numpy")
def verify_row(at, row, work):
    nodes, candidates, roots = get_i64(at + AT.nodes), get_i64(at + AT.candidates), get_i64(at + AT.roots)
    width, depth, drafted = get_i64(at + AT.beams), get_i64(at + AT.layers), get_i64(at + AT.drafts)
    coupled, here, mine = get_i64(at + AT.coupled) != 0, row * nodes, row * width
    tokens = get_i64(at + AT.candidate_tokens) + WHOLE * here * candidates
    logprobs = get_i64(at + AT.candidate_logprobs) + REAL * here * candidates
    path, state = get_i64(at + AT.node_path) + WHOLE * here, get_i64(at + AT.node_stop_state) + WHOLE * here
    node_parent, node_valid = get_i64(at + AT.node_parent) + WHOLE * here, get_i64(at + AT.node_valid) + here
    drafter_id = get_i64(at + AT.node_drafter_id) + WHOLE * here
    report = get_i64(at + AT.verified_report) + WHOLE * row * (FIRST + depth * COLUMNS)
    before = get_i64(at + AT.verified_before) + WHOLE * row * (depth + 1) * width
    # the beams of the present step, and at the end the results
    parent, token = get_i64(at + AT.live_parent) + WHOLE * mine, get_i64(at + AT.live_token) + WHOLE * mine
    node, valid = get_i64(at + AT.live_node) + WHOLE * mine, get_i64(at + AT.live_valid) + mine
    weight, logprob = get_i64(at + AT.live_weight) + REAL * mine, get_i64(at + AT.live_logprob) + REAL * mine
    # memory to work in
    pairs = width * candidates
    share, chosen, pool_node = work, work + WHOLE * pairs, work + WHOLE * (pairs + width)
    e_place, n_parent = pool_node + WHOLE * width, pool_node + 2 * WHOLE * width
    joint = pool_node + 3 * WHOLE * width
    log_p, key, best = joint + REAL * pairs, joint + 2 * REAL * pairs, joint + 3 * REAL * pairs
    above, e_best, n_logprob = best + REAL * width, best + 2 * REAL * width, best + 3 * REAL * width
    active = mark(get_i64(at + AT.state_active), row)
    write_start(at, row)
    length, limit = whole(get_i64(at + AT.beam_length), row), whole(get_i64(at + AT.limits_max_new), row)
    penalty = types.float64(real(get_i64(at + AT.limits_length_penalty), row))
    early = mark(get_i64(at + AT.limits_early), row)
    beams = beams_of(at, row)
    never = get_i64(at + AT.own_never) != 0 and mark(get_i64(at + AT.own_never), row)
    worst = get_i64(at + AT.finished_score) + REAL * (mine + beams - 1)
    noisy = coupled and not mark(get_i64(at + AT.warp_greedy), row)
    steps, total_width, done, broken, going, layer = 0, 0, False, False, active, 0
    while going:
        count = roots if layer == 0 else width
        for n in range(count):
            at_node, alive = max(whole(node, n), 0), mark(valid, n)
            put_whole(pool_node, n, at_node)
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
            total = pool_distribution(at, row, above, joint, log_p, share, count, candidates)
        # last: key of the last draw, behind which nothing ends; rule search ranks all pairs, ending ones too
        last, held = NONE, 0
        for live in range(1 if coupled else 0, 2):
            held = draw(
                at, best, chosen, beams, key, log_p, share, total, noisy, path, tokens, pool_node, count, candidates,
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
            at_pair = whole(pool_node, n) * candidates + m % candidates
            if ends(at, whole(state, whole(pool_node, n)), whole(tokens, at_pair)):
                value = real(logprob, n) + real(logprobs, at_pair)
                if value > NONE and (ended < beams or value > real(e_best, ended - 1)):
                    ended = insert(e_best, e_place, ended, beams, value, m)
        steps += 1
        scale = types.float32(math.exp(penalty * math.log(types.float64(length + steps))))
        over = length + steps >= limit
        for e in range(ended):
            at_node, c = whole(pool_node, whole(e_place, e) // candidates), whole(e_place, e) % candidates
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
            n, at_node = whole(chosen, w) // candidates, whole(pool_node, whole(chosen, w) // candidates)
            at_pair = at_node * candidates + whole(chosen, w) % candidates
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
            put_real(weight, w, real(joint, whole(chosen, w)) if drawn else ZERO)
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
                second += whole(drafter_id, below + j)
                if whole(drafter_id, below + j) != 1:
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
    for index in range(count):
        put_whole(target, index, whole(source, index))


@njit(error_model="numpy")
def write_path(text, begun, history, path, steps, token):
    """Write the tokens of this iteration behind the `begun` tokens of a text: steps - 1 of a path, and the last one."""
    for step in range(max(min(steps, history - begun), 0)):
        put_whole(text, begun + step, token if step == steps - 1 else whole(path, step))


@njit(error_model="numpy")
def commit_texts(at, row, work, steps):
    """Write the tokens of hypotheses that finished, then those of live beams. What is overwritten is copied first."""
    roots, width, nodes = get_i64(at + AT.roots), get_i64(at + AT.beams), get_i64(at + AT.nodes)
    depth, path_layers = get_i64(at + AT.layers), get_i64(at + AT.depth)
    history, mine = get_i64(at + AT.history), row * width
    begun = min(whole(get_i64(at + AT.beam_length), row), history)
    end, line = min(begun + depth + 1, history), WHOLE * history
    old = get_i64(at + AT.beam_history) + WHOLE * row * get_i64(at + AT.history_row)
    new, texts = get_i64(at + AT.next_history) + mine * line, get_i64(at + AT.finished_tokens) + mine * line
    root, paths = get_i64(at + AT.node_root) + WHOLE * row * nodes, get_i64(at + AT.node_path_tokens)
    origin, last_node = get_i64(at + AT.finished_origin), get_i64(at + AT.finished_node)
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
            count = whole(get_i64(at + AT.finished_length), mine + f) - begun
            copy_wholes(old + whole(root, node) * line, text, begun)
            path, last = paths + WHOLE * (row * nodes + node) * path_layers, get_i64(at + AT.finished_token)
            write_path(text, begun, history, path, min(max(count, 1), depth + 1), whole(last, mine + f))
        put_whole(origin, mine + f, f)
    parent = get_i64(at + AT.live_parent)
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
        write_path(new + w * line, begun, history, path, steps, whole(get_i64(at + AT.live_token), mine + w))


@njit(error_model="numpy")
def commit_row(at, row, work):
    nodes, width, window = get_i64(at + AT.nodes), get_i64(at + AT.beams), get_i64(at + AT.window)
    table_slots = get_i64(at + AT.table_slots)
    mine, here, line = row * width, row * nodes, row * window
    parent, valid = get_i64(at + AT.live_parent), get_i64(at + AT.live_valid)
    report = get_i64(at + AT.verified_report) + WHOLE * row * (FIRST + get_i64(at + AT.layers) * COLUMNS)
    steps = whole(report, 2)
    going = mark(get_i64(at + AT.state_active), row) and whole(report, 0) == 0
    commit_texts(at, row, work, steps)
    # slots: the ancestors of live beams stay, in order
    used, prefix = get_i64(at + AT.table_used), get_i64(at + AT.table_common_prefix)
    drafted = get_i64(at + AT.table_drafted)
    positions = get_i64(at + AT.table_positions) + WHOLE * row * table_slots
    tokens = get_i64(at + AT.table_tokens) + WHOLE * row * table_slots
    ancestors, seen = get_i64(at + AT.node_ancestors), get_i64(at + AT.next_ancestors) + mine * window
    source, target = get_i64(at + AT.moved_source), get_i64(at + AT.moved_target)
    base, run = whole(prefix, row), get_i64(at + AT.ran)
    run = whole(used, row) + run if run else whole(drafted, row)
    for t in range(window):
        put_whole(source, line + t, min(base + t, table_slots - 1))
        put_whole(target, line + t, min(base + t, table_slots - 1))
    for t in range(width * window):
        put_mark(seen, t, False)
    kept, common, ran, shared = 0, 0, min(run, base), True
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
        put_whole(source, line + kept, base + t)
        put_whole(positions, base + kept, whole(positions, base + t))
        put_whole(tokens, base + kept, whole(tokens, base + t))
        for w in range(0 if shared else width):
            holds = mark(valid, mine + w) and mark(ancestors, (here + whole(parent, mine + w)) * window + t)
            put_mark(seen, w * window + kept - common, holds)
        kept += 1
    put_whole(used, row, base + kept)
    put_whole(prefix, row, base + common)
    put_whole(drafted, row, ran)
    put_whole(report, 4, base + kept)
    put_whole(report, 5, base + common)
    put_whole(report, 6, ran)
    for w in range(mine, mine + width):
        above, token = here + whole(parent, w), whole(get_i64(at + AT.live_token), w)
        state = state_after(at, whole(get_i64(at + AT.node_stop_state), above), token)
        put_mark(get_i64(at + AT.next_valid), w, going and mark(valid, w))
        put_whole(get_i64(at + AT.next_token), w, token)
        put_real(get_i64(at + AT.next_weight), w, real(get_i64(at + AT.live_weight), w))
        put_real(get_i64(at + AT.next_logprob), w, real(get_i64(at + AT.live_logprob), w))
        put_whole(get_i64(at + AT.next_path), w, child_path(whole(get_i64(at + AT.node_path), above), token))
        put_whole(get_i64(at + AT.next_stop_state), w, state)
    for counter in (get_i64(at + AT.beam_length), get_i64(at + AT.beam_depth)):
        put_whole(counter, row, whole(counter, row) + steps)
    put_whole(get_i64(at + AT.state_iteration), row, whole(get_i64(at + AT.state_iteration), row) + 1)


@njit(error_model="numpy")
def next_row(at):
    """Return a request that no thread has taken, -1 where there is none."""
    row = take(at + AT.taken)
    return row if row < get_i64(at + AT.items) else -1


@njit(error_model="numpy")
def memory(at):
    """Return the memory that this thread alone works in."""
    return get_i64(at + AT.work) + take(at + AT.threads) * get_i64(at + AT.work_bytes)


@compiled.addressed
def begin(at):
    """Write the roots of each request."""
    row = next_row(at)
    while row >= 0:
        begin_row(at, row)
        row = next_row(at)


@compiled.addressed
def extend(at):
    """Write a drafted layer of each request."""
    work, row = memory(at), next_row(at)
    while row >= 0:
        extend_row(at, row, work)
        row = next_row(at)


@compiled.addressed
def verify(at):
    """Verify the forest of each request."""
    work, row = memory(at), next_row(at)
    while row >= 0:
        verify_row(at, row, work)
        row = next_row(at)


@compiled.addressed
def commit(at):
    """Commit each request."""
    work, row = memory(at), next_row(at)
    while row >= 0:
        commit_row(at, row, work)
        row = next_row(at)
