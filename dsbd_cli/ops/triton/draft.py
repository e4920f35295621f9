"""Kernels that write the nodes of an iteration into one piece of memory: `begin` writes the roots, `extend` a drafted
layer. Both also write the input of the forwards that come next.

Letters: R requests, W0 roots, W beams, K drafts per layer, D layers, N = W0 + D*K nodes, C candidates per node, T
suffix window, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from dsbd_cli.ops import layout
from dsbd_cli.ops.layout import BEGIN, EXTEND, Tensors
from dsbd_cli.ops.triton.distribution import (
    COUPLED,
    NEG_INF,
    REGISTERS,
    REJECTION,
    SEARCH,
    child_path,
    child_state,
    ending_of,
    is_finite,
    largest,
    perturbed,
    pool_constants,
    pool_distribution,
    stream_key,
    value_at,
)
from dsbd_cli.ops.triton.launch import launch, operator

TOKEN, PARENT, ROOT, PATH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
STOP, DRAFTER_ID, SLOT, POSITION = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
VALID, ENDS, SAMPLED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
STREAMS, DRAFT = tl.constexpr(layout.STREAMS), tl.constexpr(layout.DRAFT)
MOST_PAIRS = 4096  # of a pool at most, padding included
TILE = 256  # slots of a mask that are written at a time


@triton.jit(do_not_specialize=["rows", "nodes", "roots", "depth", "window", "slots", "table_slots", "backlog_nodes"])
def begin_kernel(
    beam_token, beam_path, beam_stop_state, beam_valid, beam_weight, beam_ancestors, beam_depth, table_used,
    table_common_prefix, table_positions, table_tokens, state_row_key, state_iteration, forest_numbers, forest_flags,
    forest_weight, forest_path_tokens, forest_ancestors, forest_mask, noise_keys, backlog_numbers, backlog_mask, rows,
    nodes, roots, depth, window, slots, table_slots, last_position, trash, backlog_nodes, WP: tl.constexpr,
    LP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the roots, the input of their forward, and the keys of the streams. If there are `draft_backlog` tokens
    that the draft has not run, also write the input of a forward that runs them first."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, WP)
    real = w < roots
    mine = row * roots + w
    first = tl.load(table_used + row)
    base = tl.load(table_common_prefix + row)
    tokens = tl.load(beam_token + mine, mask=real, other=0)
    places = first + w
    positions = tl.minimum(tl.load(beam_depth + row) + w * 0, last_position)
    zero = w.to(tl.int64) * 0
    at = row * nodes + w
    plane = rows.to(tl.int64) * nodes
    tl.store(forest_numbers + TOKEN * plane + at, tokens, mask=real)
    tl.store(forest_numbers + PARENT * plane + at, w.to(tl.int64), mask=real)
    tl.store(forest_numbers + ROOT * plane + at, w.to(tl.int64), mask=real)
    tl.store(forest_numbers + PATH * plane + at, tl.load(beam_path + mine, mask=real, other=0), mask=real)
    tl.store(forest_numbers + STOP * plane + at, tl.load(beam_stop_state + mine, mask=real, other=1), mask=real)
    tl.store(forest_numbers + DRAFTER_ID * plane + at, zero, mask=real)
    tl.store(forest_numbers + SLOT * plane + at, places, mask=real)
    tl.store(forest_numbers + POSITION * plane + at, positions, mask=real)
    tl.store(forest_flags + VALID * plane + at, tl.load(beam_valid + mine, mask=real, other=0) != 0, mask=real)
    tl.store(forest_flags + ENDS * plane + at, w < 0, mask=real)
    tl.store(forest_flags + SAMPLED * plane + at, w < 0, mask=real)
    tl.store(forest_weight + at, tl.load(beam_weight + mine, mask=real, other=0.0), mask=real)
    for layer in range(depth):
        tl.store(forest_path_tokens + at * depth + layer, zero, mask=real)
    tl.store(table_positions + row * table_slots + places, positions, mask=real)
    tl.store(table_tokens + row * table_slots + places, tokens, mask=real)
    number = tl.arange(0, LP)
    streams = (depth + 1) * STREAMS
    keys = stream_key(tl.load(state_row_key + row), tl.load(state_iteration + row), number)
    tl.store(noise_keys + row * streams + number, keys, mask=number < streams)
    tile = tl.arange(0, TILE)
    own = first - base + w
    for start in tl.range(0, window, TILE):
        t = start + tile
        inside = real[:, None] & (t < window)[None, :]
        seen = tl.load(beam_ancestors + mine[:, None] * window + t[None, :], mask=inside, other=0) != 0
        tl.store(forest_ancestors + at[:, None] * window + t[None, :], seen | (t[None, :] == own[:, None]), mask=inside)
    draft_backlog = backlog_nodes - roots
    wide = row * backlog_nodes + draft_backlog + w
    if draft_backlog > 0:
        part = rows.to(tl.int64) * backlog_nodes
        tl.store(backlog_numbers + wide, tokens, mask=real)
        tl.store(backlog_numbers + part + wide, positions, mask=real)
        tl.store(backlog_numbers + 2 * part + wide, places, mask=real)
    for start in tl.range(0, slots, TILE):
        s = start + tile
        t = s - base
        inside = real[:, None] & ((t >= 0) & (t < window) & (s < slots))[None, :]
        seen = tl.load(beam_ancestors + mine[:, None] * window + t[None, :], mask=inside, other=0) != 0
        seen = seen | (inside & (t[None, :] == own[:, None])) | (t < 0)[None, :]
        wanted = real[:, None] & (s < slots)[None, :]
        tl.store(forest_mask + at[:, None] * slots + s[None, :], seen, mask=wanted)
        if draft_backlog > 0:
            tl.store(backlog_mask + wide[:, None] * slots + s[None, :], seen, mask=wanted)
    for j in range(draft_backlog):
        slot = first - draft_backlog + j
        read_slot = tl.maximum(slot, 0)
        to = row * backlog_nodes + j
        part = rows.to(tl.int64) * backlog_nodes
        tl.store(backlog_numbers + to, tl.load(table_tokens + row * table_slots + read_slot))
        tl.store(backlog_numbers + part + to, tl.load(table_positions + row * table_slots + read_slot))
        tl.store(backlog_numbers + 2 * part + to, tl.where(slot >= 0, slot, trash))
        bit = tl.minimum(tl.maximum(slot - base, 0), window - 1)
        holds = tl.load(beam_ancestors + mine * window + bit, mask=real, other=0) != 0
        owner = tl.min(tl.where(holds, w, WP), 0)
        owner = tl.where(owner < WP, owner, 0)
        for start in tl.range(0, slots, TILE):
            s = start + tile
            t = s - base
            inside = (t >= 0) & (t < window) & (s < slots)
            seen = tl.load(beam_ancestors + (row * roots + owner) * window + t, mask=inside, other=0) != 0
            seen = ((seen | (t < 0)) & (s <= read_slot)) | (s == read_slot)
            tl.store(backlog_mask + to * slots + s, seen, mask=s < slots)


@triton.jit
def record_distribution(
    o_q_tokens, o_log_q, o_distribution, token, log_q, chosen, exists, real, row, rows, nodes, first, layer, depth,
    candidates, count, n, c, k, flat, NP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Record the distribution that the drafts are drawn from, and what is left of it before each draw."""
    pairs = (row * nodes + first + n)[:, None] * candidates + c[None, :]
    tl.store(o_log_q + pairs, log_q, mask=real)
    tl.store(o_q_tokens + pairs, token, mask=real)
    drawn_of = (row * depth + layer) * count
    rest_of = rows.to(tl.int64) * depth * count + drawn_of
    distribution = tl.reshape(tl.where(real, log_q, NEG_INF), (NP * CP,)).to(tl.float64)
    rest = distribution
    for i in range(count):
        here = tl.sum(tl.where((k == i) & exists, chosen, -1 * (k == i).to(tl.int32)), 0)
        rest = tl.where(flat == here, NEG_INF, rest)
    top = tl.max(rest, 0)
    shift = tl.where(is_finite(top), top, 0.0)
    left_over = tl.log(tl.sum(tl.exp(rest - shift), 0)) + shift
    for i in range(count):
        j = count - 1 - i
        here = tl.sum(tl.where((k == j) & exists, chosen, -1 * (k == j).to(tl.int32)), 0)
        log_drawn = tl.max(tl.where(flat == here, distribution, NEG_INF), 0)
        high = tl.maximum(left_over, log_drawn)
        low = tl.minimum(left_over, log_drawn)
        some = high > NEG_INF
        gap = tl.where(some & (low > NEG_INF), low - tl.where(some, high, 0.0), NEG_INF)
        left_over = tl.where(some, high + tl.log(1.0 + tl.exp(gap)), NEG_INF)
        tl.store(o_distribution + drawn_of + j, log_drawn)
        tl.store(o_distribution + rest_of + j, left_over)


@triton.jit(do_not_specialize=["rows", "nodes", "first", "above", "layer", "depth", "drafts", "window", "slots"])
def extend_kernel(
    candidate_tokens, candidate_logprobs, forest_numbers, forest_flags, forest_weight, forest_path_tokens,
    forest_ancestors, forest_mask, table_positions, table_tokens, table_used, table_common_prefix, beam_depth,
    noise_keys, endings_eos, endings_stops, warp_temperature, warp_top_k, warp_top_p, warp_min_p, warp_greedy,
    draft_tokens, draft_log_q, draft_log_left, rows, nodes, first, above, layer, depth, candidates, drafts, window,
    slots, table_slots, vocabulary, last_position, NP: tl.constexpr, CP: tl.constexpr, KP: tl.constexpr,
    TILE: tl.constexpr, RULE: tl.constexpr, STOPS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    MIN_P: tl.constexpr, GREEDY: tl.constexpr, BEAM: tl.constexpr, DISTRIBUTION: tl.constexpr,
):  # fmt: skip
    """Draw `count` drafts below the `above` nodes from `first` on, and write them as the nodes behind those."""
    row = tl.program_id(0).to(tl.int64)
    plane = rows.to(tl.int64) * nodes
    n = tl.arange(0, NP)
    c = tl.arange(0, CP)
    flat = tl.arange(0, NP * CP)
    upper = row * nodes + first + n
    there = n < above
    live = tl.load(forest_flags + VALID * plane + upper, mask=there, other=0) != 0
    live = live & (tl.load(forest_flags + ENDS * plane + upper, mask=there, other=0) == 0)
    weight = tl.where(live, tl.load(forest_weight + upper, mask=there, other=0.0), NEG_INF)
    real = there[:, None] & (c < candidates)[None, :]
    at = (row * above + n)[:, None] * candidates + c[None, :]
    token = tl.load(candidate_tokens + at, mask=real, other=0)
    logprob = tl.load(candidate_logprobs + at, mask=real, other=NEG_INF)
    logprob = tl.where(logprob == logprob, logprob, NEG_INF)  # where the draft gives NaN it proposes nothing
    if RULE == SEARCH:
        log_q = weight[:, None] + logprob
    else:
        log_q, joint = pool_distribution(
            logprob, weight, tl.load(warp_temperature + row), tl.load(warp_top_k + row), tl.load(warp_top_p + row),
            tl.load(warp_min_p + row), tl.load(warp_greedy + row) != 0, TOP_K, TOP_P, MIN_P, GREEDY, BEAM, NP, CP,
        )  # fmt: skip
    allowed = tl.where(real, log_q, NEG_INF)
    if RULE != REJECTION:  # the only rule that uses drafts that end
        ends = ending_of(
            endings_eos, endings_stops, forest_numbers + STOP * plane + upper, token, there, real, vocabulary, STOPS
        )
        allowed = tl.where(ends, NEG_INF, allowed)
    if RULE == COUPLED:  # the target's own noise
        path = tl.load(forest_numbers + PATH * plane + upper, mask=there, other=0)
        noisy = perturbed(allowed, path[:, None], token + 1)
        if GREEDY:
            noisy = tl.where(tl.load(warp_greedy + row) != 0, allowed, noisy)
        allowed = noisy
    if RULE == REJECTION:  # noise of the draft's own stream
        key = tl.load(noise_keys + (row * (depth + 1) + layer) * STREAMS + DRAFT)
        left = allowed.to(tl.float64)
        pool = tl.reshape(perturbed(left, key, (n.to(tl.int64)[:, None] << 32) + token + 1), (NP * CP,))
    else:
        pool = tl.reshape(allowed, (NP * CP,))
    k = tl.arange(0, KP)
    chosen, exists, _, _ = largest(pool, drafts, k, flat)
    beam = chosen // CP
    column = chosen % CP
    mine = k < drafts
    parent = row * nodes + first + beam
    drawn = (row * above + beam) * candidates + column
    child = tl.load(candidate_tokens + drawn, mask=mine, other=0)
    own = tl.sum(tl.where(n[None, :] == beam[:, None], weight[None, :], 0.0), 1)
    lp = tl.load(candidate_logprobs + drawn, mask=mine, other=0.0)
    lp = tl.where(lp == lp, lp, NEG_INF)
    if BEAM:
        own = value_at(tl.reshape(joint, (NP * CP,)), chosen, k, flat, drafts)
    else:
        own = own + lp
    below = first + above + k
    to = row * nodes + below
    state = tl.load(forest_numbers + STOP * plane + parent, mask=mine, other=1)
    state, last = child_state(endings_eos, endings_stops, state, child, mine, vocabulary, STOPS)
    slot = tl.load(table_used + row) + below
    base = tl.load(table_common_prefix + row)
    depths = tl.minimum(tl.load(beam_depth + row) + layer + 1 + k * 0, last_position)
    path = child_path(tl.load(forest_numbers + PATH * plane + parent, mask=mine, other=0), child)
    tl.store(forest_numbers + TOKEN * plane + to, child, mask=mine)
    tl.store(forest_numbers + PARENT * plane + to, (first + beam).to(tl.int64), mask=mine)
    tl.store(
        forest_numbers + ROOT * plane + to,
        tl.load(forest_numbers + ROOT * plane + parent, mask=mine, other=0),
        mask=mine,
    )
    tl.store(forest_numbers + PATH * plane + to, path, mask=mine)
    tl.store(forest_numbers + STOP * plane + to, state, mask=mine)
    tl.store(forest_numbers + DRAFTER_ID * plane + to, state * 0, mask=mine)
    tl.store(forest_numbers + SLOT * plane + to, slot, mask=mine)
    tl.store(forest_numbers + POSITION * plane + to, depths, mask=mine)
    tl.store(forest_flags + VALID * plane + to, exists, mask=mine)
    tl.store(forest_flags + ENDS * plane + to, last, mask=mine)
    tl.store(forest_flags + SAMPLED * plane + to, exists & (RULE != SEARCH), mask=mine)
    tl.store(forest_weight + to, own, mask=mine)
    tl.store(table_positions + row * table_slots + slot, depths, mask=mine)
    tl.store(table_tokens + row * table_slots + slot, child, mask=mine)
    for step in range(depth):
        before = tl.load(forest_path_tokens + parent * depth + step, mask=mine, other=0)
        tl.store(forest_path_tokens + to * depth + step, tl.where(step == layer, child, before), mask=mine)
    tile = tl.arange(0, TILE)
    bit = slot - base
    for start in tl.range(0, window, TILE):
        t = start + tile
        inside = mine[:, None] & (t < window)[None, :]
        seen = tl.load(forest_ancestors + parent[:, None] * window + t[None, :], mask=inside, other=0) != 0
        tl.store(forest_ancestors + to[:, None] * window + t[None, :], seen | (t[None, :] == bit[:, None]), mask=inside)
    for start in tl.range(0, slots, TILE):
        s = start + tile
        t = s - base
        inside = mine[:, None] & ((t >= 0) & (t < window) & (s < slots))[None, :]
        seen = tl.load(forest_ancestors + parent[:, None] * window + t[None, :], mask=inside, other=0) != 0
        seen = seen | (inside & (t[None, :] == bit[:, None])) | (t < 0)[None, :]
        tl.store(forest_mask + to[:, None] * slots + s[None, :], seen, mask=mine[:, None] & (s < slots)[None, :])
    if DISTRIBUTION:
        record_distribution(
            draft_tokens, draft_log_q, draft_log_left, token, log_q, chosen, exists, real, row, rows, nodes, first,
            layer, depth, candidates, drafts, n, c, k, flat, NP, CP,
        )  # fmt: skip


def fits(nodes: int, count: int, candidates: int) -> bool:
    """Return whether the kernel `extend` supports these numbers of nodes, drafts and candidates."""
    padded = triton.next_power_of_2(nodes) * triton.next_power_of_2(candidates)
    return padded <= MOST_PAIRS and count <= 64


@operator(BEGIN, "int trash, int last_position")
def begin(tensors: Tensors, trash: int, last_position: int) -> None:
    """Do what `begin` of ops/cpu/iteration.py does."""
    sizes = BEGIN.sizes(tensors)
    roots = sizes["roots"]
    launch(
        begin_kernel, tensors, sizes | {"trash": trash, "last_position": last_position},
        WP=triton.next_power_of_2(roots), LP=triton.next_power_of_2((sizes["depth"] + 1) * STREAMS.value),
        TILE=TILE if roots < 8 else 64, num_warps=4, enable_fp_fusion=False, maxnreg=REGISTERS,
    )  # fmt: skip


@operator(EXTEND, "int first, int layer, int drafts, int last_position, str rule, bool[] flags")
def extend(
    tensors: Tensors, first: int, layer: int, drafts: int, last_position: int, rule: str, flags: Sequence[bool]
) -> None:
    """Do what `extend` of ops/cpu/iteration.py does. It also records the draft's distribution in `draft`, if that is
    given: tokens and log_q of the nodes that were drafted from, log_drawn and log_rest."""
    sizes, recorded = EXTEND.sizes(tensors), "draft_log_q" in tensors
    sizes |= {"first": first, "layer": layer, "drafts": drafts, "last_position": last_position}
    nodes, own = triton.next_power_of_2(sizes["above"]), triton.next_power_of_2(sizes["candidates"])
    numbers, weight = tensors["forest_numbers"], tensors["forest_weight"]
    launch(
        extend_kernel,
        {"draft_tokens": numbers, "draft_log_q": weight, "draft_log_left": weight, **tensors},
        sizes,
        NP=nodes,
        CP=own,
        KP=triton.next_power_of_2(drafts),
        TILE=64,
        DISTRIBUTION=recorded,
        **pool_constants(rule, flags, nodes * own),
    )
