"""Kernels that write the nodes of an iteration into one piece of memory: `begin` writes the roots, `extend` a drafted
layer. Both also write the input of the forwards that come next.

Letters: R requests, W0 roots, W beams, K drafts per layer, D layers, N = W0 + D*K nodes, C candidates per node, T
suffix window, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsbd_cli.ops import layout
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

TOKEN, PARENT, ROOT, PATH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
STOP, DRAFTER_ID, SLOT, POSITION = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
VALID, ENDS, SAMPLED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
STREAMS = tl.constexpr(layout.STREAMS)
MOST_PAIRS = 4096  # of a pool at most, padding included
TILE = 256  # slots of a mask that are written at a time


@triton.jit(do_not_specialize=["rows", "nodes", "roots", "depth", "window", "slots", "table_slots", "draft_backlog"])
def begin_kernel(
    token,
    path,
    stop_state,
    valid,
    weight,
    ancestors,
    position,
    used,
    common_prefix,
    table_positions,
    table_tokens,
    row_key,
    iteration,
    o_ints,
    o_flags,
    o_weight,
    o_paths,
    o_ancestors,
    o_mask,
    o_keys,
    o_joined,
    o_joined_mask,
    beam_stride,
    rows,
    nodes,
    roots,
    depth,
    window,
    slots,
    table_slots,
    last_position,
    trash,
    draft_backlog,
    WP: tl.constexpr,
    LP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the roots, the input of their forward, and the keys of the streams. If there are `draft_backlog` tokens
    that the draft has not run, also write the input of a forward that runs them first."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, WP)
    real = w < roots
    mine = row * beam_stride + w
    first = tl.load(used + row)
    base = tl.load(common_prefix + row)
    tokens = tl.load(token + mine, mask=real, other=0)
    places = first + w
    positions = tl.minimum(tl.load(position + row) + w * 0, last_position)
    zero = w.to(tl.int64) * 0
    at = row * nodes + w
    plane = rows.to(tl.int64) * nodes
    tl.store(o_ints + TOKEN * plane + at, tokens, mask=real)
    tl.store(o_ints + PARENT * plane + at, w.to(tl.int64), mask=real)
    tl.store(o_ints + ROOT * plane + at, w.to(tl.int64), mask=real)
    tl.store(o_ints + PATH * plane + at, tl.load(path + mine, mask=real, other=0), mask=real)
    tl.store(o_ints + STOP * plane + at, tl.load(stop_state + mine, mask=real, other=1), mask=real)
    tl.store(o_ints + DRAFTER_ID * plane + at, zero, mask=real)
    tl.store(o_ints + SLOT * plane + at, places, mask=real)
    tl.store(o_ints + POSITION * plane + at, positions, mask=real)
    tl.store(o_flags + VALID * plane + at, tl.load(valid + mine, mask=real, other=0) != 0, mask=real)
    tl.store(o_flags + ENDS * plane + at, w < 0, mask=real)
    tl.store(o_flags + SAMPLED * plane + at, w < 0, mask=real)
    tl.store(o_weight + at, tl.load(weight + mine, mask=real, other=0.0), mask=real)
    for layer in range(depth):
        tl.store(o_paths + at * depth + layer, zero, mask=real)
    tl.store(table_positions + row * table_slots + places, positions, mask=real)
    tl.store(table_tokens + row * table_slots + places, tokens, mask=real)
    number = tl.arange(0, LP)
    streams = (depth + 1) * STREAMS
    keys = stream_key(tl.load(row_key + row), tl.load(iteration + row), number)
    tl.store(o_keys + row * streams + number, keys, mask=number < streams)
    tile = tl.arange(0, TILE)
    own = first - base + w
    for start in tl.range(0, window, TILE):
        t = start + tile
        inside = real[:, None] & (t < window)[None, :]
        seen = tl.load(ancestors + mine[:, None] * window + t[None, :], mask=inside, other=0) != 0
        tl.store(o_ancestors + at[:, None] * window + t[None, :], seen | (t[None, :] == own[:, None]), mask=inside)
    joined = draft_backlog + roots
    wide = row * joined + draft_backlog + w
    if draft_backlog > 0:
        part = rows.to(tl.int64) * joined
        tl.store(o_joined + wide, tokens, mask=real)
        tl.store(o_joined + part + wide, positions, mask=real)
        tl.store(o_joined + 2 * part + wide, places, mask=real)
    for start in tl.range(0, slots, TILE):
        s = start + tile
        t = s - base
        inside = real[:, None] & ((t >= 0) & (t < window) & (s < slots))[None, :]
        seen = tl.load(ancestors + mine[:, None] * window + t[None, :], mask=inside, other=0) != 0
        seen = seen | (inside & (t[None, :] == own[:, None])) | (t < 0)[None, :]
        wanted = real[:, None] & (s < slots)[None, :]
        tl.store(o_mask + at[:, None] * slots + s[None, :], seen, mask=wanted)
        if draft_backlog > 0:
            tl.store(o_joined_mask + wide[:, None] * slots + s[None, :], seen, mask=wanted)
    for j in range(draft_backlog):
        place = first - draft_backlog + j
        known = tl.maximum(place, 0)
        to = row * joined + j
        part = rows.to(tl.int64) * joined
        tl.store(o_joined + to, tl.load(table_tokens + row * table_slots + known))
        tl.store(o_joined + part + to, tl.load(table_positions + row * table_slots + known))
        tl.store(o_joined + 2 * part + to, tl.where(place >= 0, place, trash))
        bit = tl.minimum(tl.maximum(place - base, 0), window - 1)
        holds = tl.load(ancestors + mine * window + bit, mask=real, other=0) != 0
        owner = tl.min(tl.where(holds, w, WP), 0)
        owner = tl.where(owner < WP, owner, 0)
        for start in tl.range(0, slots, TILE):
            s = start + tile
            t = s - base
            inside = (t >= 0) & (t < window) & (s < slots)
            seen = tl.load(ancestors + (row * beam_stride + owner) * window + t, mask=inside, other=0) != 0
            seen = ((seen | (t < 0)) & (s <= known)) | (s == known)
            tl.store(o_joined_mask + to * slots + s, seen, mask=s < slots)


@triton.jit
def record_distribution(
    o_q_tokens, o_log_q, o_distribution, token, log_q, chosen, found, real, row, rows, nodes, first, layer, depth,
    candidates, count, n, c, k, flat, NP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Record the distribution that the drafts are drawn from, and what is left of it before each draw."""
    known = (row * nodes + first + n)[:, None] * candidates + c[None, :]
    tl.store(o_log_q + known, log_q, mask=real)
    tl.store(o_q_tokens + known, token, mask=real)
    drawn_of = (row * depth + layer) * count
    rest_of = rows.to(tl.int64) * depth * count + drawn_of
    distribution = tl.reshape(tl.where(real, log_q, NEG_INF), (NP * CP,)).to(tl.float64)
    rest = distribution
    for i in range(count):
        here = tl.sum(tl.where((k == i) & found, chosen, -1 * (k == i).to(tl.int32)), 0)
        rest = tl.where(flat == here, NEG_INF, rest)
    top = tl.max(rest, 0)
    shift = tl.where(is_finite(top), top, 0.0)
    left_over = tl.log(tl.sum(tl.exp(rest - shift), 0)) + shift
    for i in range(count):
        j = count - 1 - i
        here = tl.sum(tl.where((k == j) & found, chosen, -1 * (k == j).to(tl.int32)), 0)
        log_drawn = tl.max(tl.where(flat == here, distribution, NEG_INF), 0)
        high = tl.maximum(left_over, log_drawn)
        low = tl.minimum(left_over, log_drawn)
        some = high > NEG_INF
        gap = tl.where(some & (low > NEG_INF), low - tl.where(some, high, 0.0), NEG_INF)
        left_over = tl.where(some, high + tl.log(1.0 + tl.exp(gap)), NEG_INF)
        tl.store(o_distribution + drawn_of + j, log_drawn)
        tl.store(o_distribution + rest_of + j, left_over)


@triton.jit(do_not_specialize=["rows", "nodes", "first", "above", "layer", "depth", "count", "window", "slots"])
def extend_kernel(
    c_tokens,
    c_logprobs,
    ints,
    flags,
    weights,
    paths,
    ancestors,
    mask,
    table_positions,
    table_tokens,
    used,
    common_prefix,
    position,
    keys,
    eos,
    stops,
    temperature,
    top_k,
    top_p,
    min_p,
    greedy,
    o_q_tokens,
    o_log_q,
    o_distribution,
    rows,
    nodes,
    first,
    above,
    layer,
    depth,
    candidates,
    count,
    window,
    slots,
    table_slots,
    vocabulary,
    last_position,
    NP: tl.constexpr,
    CP: tl.constexpr,
    KP: tl.constexpr,
    TILE: tl.constexpr,
    RULE: tl.constexpr,
    STOPS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    GREEDY: tl.constexpr,
    BEAM: tl.constexpr,
    DISTRIBUTION: tl.constexpr,
):
    """Draw `count` drafts below the `above` nodes from `first` on, and write them as the nodes behind those."""
    row = tl.program_id(0).to(tl.int64)
    plane = rows.to(tl.int64) * nodes
    n = tl.arange(0, NP)
    c = tl.arange(0, CP)
    flat = tl.arange(0, NP * CP)
    upper = row * nodes + first + n
    there = n < above
    live = tl.load(flags + VALID * plane + upper, mask=there, other=0) != 0
    live = live & (tl.load(flags + ENDS * plane + upper, mask=there, other=0) == 0)
    weight = tl.where(live, tl.load(weights + upper, mask=there, other=0.0), NEG_INF)
    real = there[:, None] & (c < candidates)[None, :]
    at = (row * above + n)[:, None] * candidates + c[None, :]
    token = tl.load(c_tokens + at, mask=real, other=0)
    logprob = tl.load(c_logprobs + at, mask=real, other=NEG_INF)
    logprob = tl.where(logprob == logprob, logprob, NEG_INF)  # where the draft gives NaN it proposes nothing
    if RULE == SEARCH:
        log_q = weight[:, None] + logprob
    else:
        log_q, joint = pool_distribution(
            logprob,
            weight,
            tl.load(temperature + row),
            tl.load(top_k + row),
            tl.load(top_p + row),
            tl.load(min_p + row),
            tl.load(greedy + row) != 0,
            TOP_K,
            TOP_P,
            MIN_P,
            GREEDY,
            BEAM,
            NP,
            CP,
        )
    allowed = tl.where(real, log_q, NEG_INF)
    if RULE != REJECTION:  # the only rule that uses drafts that end
        ends = ending_of(eos, stops, ints + STOP * plane + upper, token, there, real, vocabulary, STOPS)
        allowed = tl.where(ends, NEG_INF, allowed)
    if RULE == COUPLED:  # the target's own noise
        path = tl.load(ints + PATH * plane + upper, mask=there, other=0)
        noisy = perturbed(allowed, path[:, None], token + 1)
        if GREEDY:
            noisy = tl.where(tl.load(greedy + row) != 0, allowed, noisy)
        allowed = noisy
    if RULE == REJECTION:  # noise of the draft's own stream
        key = tl.load(keys + (row * (depth + 1) + layer) * STREAMS + 1)
        left = allowed.to(tl.float64)
        pool = tl.reshape(perturbed(left, key, (n.to(tl.int64)[:, None] << 32) + token + 1), (NP * CP,))
    else:
        pool = tl.reshape(allowed, (NP * CP,))
    k = tl.arange(0, KP)
    chosen, found, _, _ = largest(pool, count, k, flat)
    beam = chosen // CP
    column = chosen % CP
    mine = k < count
    parent = row * nodes + first + beam
    drawn = (row * above + beam) * candidates + column
    child = tl.load(c_tokens + drawn, mask=mine, other=0)
    own = tl.sum(tl.where(n[None, :] == beam[:, None], weight[None, :], 0.0), 1)
    lp = tl.load(c_logprobs + drawn, mask=mine, other=0.0)
    lp = tl.where(lp == lp, lp, NEG_INF)
    if BEAM:
        own = value_at(tl.reshape(joint, (NP * CP,)), chosen, k, flat, count)
    else:
        own = own + lp
    below = first + above + k
    to = row * nodes + below
    state = tl.load(ints + STOP * plane + parent, mask=mine, other=1)
    state, last = child_state(eos, stops, state, child, mine, vocabulary, STOPS)
    place = tl.load(used + row) + below
    base = tl.load(common_prefix + row)
    depths = tl.minimum(tl.load(position + row) + layer + 1 + k * 0, last_position)
    path = child_path(tl.load(ints + PATH * plane + parent, mask=mine, other=0), child)
    tl.store(ints + TOKEN * plane + to, child, mask=mine)
    tl.store(ints + PARENT * plane + to, (first + beam).to(tl.int64), mask=mine)
    tl.store(ints + ROOT * plane + to, tl.load(ints + ROOT * plane + parent, mask=mine, other=0), mask=mine)
    tl.store(ints + PATH * plane + to, path, mask=mine)
    tl.store(ints + STOP * plane + to, state, mask=mine)
    tl.store(ints + DRAFTER_ID * plane + to, state * 0, mask=mine)
    tl.store(ints + SLOT * plane + to, place, mask=mine)
    tl.store(ints + POSITION * plane + to, depths, mask=mine)
    tl.store(flags + VALID * plane + to, found, mask=mine)
    tl.store(flags + ENDS * plane + to, last, mask=mine)
    tl.store(flags + SAMPLED * plane + to, found & (RULE != SEARCH), mask=mine)
    tl.store(weights + to, own, mask=mine)
    tl.store(table_positions + row * table_slots + place, depths, mask=mine)
    tl.store(table_tokens + row * table_slots + place, child, mask=mine)
    for step in range(depth):
        before = tl.load(paths + parent * depth + step, mask=mine, other=0)
        tl.store(paths + to * depth + step, tl.where(step == layer, child, before), mask=mine)
    tile = tl.arange(0, TILE)
    bit = place - base
    for start in tl.range(0, window, TILE):
        t = start + tile
        inside = mine[:, None] & (t < window)[None, :]
        seen = tl.load(ancestors + parent[:, None] * window + t[None, :], mask=inside, other=0) != 0
        tl.store(ancestors + to[:, None] * window + t[None, :], seen | (t[None, :] == bit[:, None]), mask=inside)
    for start in tl.range(0, slots, TILE):
        s = start + tile
        t = s - base
        inside = mine[:, None] & ((t >= 0) & (t < window) & (s < slots))[None, :]
        seen = tl.load(ancestors + parent[:, None] * window + t[None, :], mask=inside, other=0) != 0
        seen = seen | (inside & (t[None, :] == bit[:, None])) | (t < 0)[None, :]
        tl.store(mask + to[:, None] * slots + s[None, :], seen, mask=mine[:, None] & (s < slots)[None, :])
    if DISTRIBUTION:
        record_distribution(
            o_q_tokens, o_log_q, o_distribution, token, log_q, chosen, found, real, row, rows, nodes, first, layer,
            depth, candidates, count, n, c, k, flat, NP, CP,
        )  # fmt: skip


def fits(nodes: int, count: int, candidates: int) -> bool:
    """Return whether the kernel `extend` supports these numbers of nodes, drafts and candidates."""
    padded = triton.next_power_of_2(nodes) * triton.next_power_of_2(candidates)
    return padded <= MOST_PAIRS and count <= 64


@torch.library.custom_op("dsbd::begin", mutates_args="unknown")
def begin(
    beams: Sequence[Tensor],
    table: Sequence[Tensor],
    noise: Sequence[Tensor],
    buffer: Sequence[Tensor],
    keys: Tensor,
    joined: Sequence[Tensor],
    trash: int,
    last_position: int,
) -> None:
    """Write the roots, their slots, positions and mask, and the keys of the streams, as a `TensorBuffer` does.

    beams: token, path, stop_state, valid, weight, ancestors, depth. table: used, common_prefix, positions, tokens.
    noise: row_key, iteration. buffer: the tensors of a KernelBuffer. keys [R, D + 1, STREAMS]. joined: tokens,
    positions and slots [3, R, L + W0] and mask [R, L + W0, S] of the forward that runs L tokens of the backlog first; L
    may be 0. trash: a slot for tokens of the backlog that do not exist.
    """
    ints, _, _, _, ancestors, mask = buffer
    token, window = beams[0], ancestors.shape[2]
    rows, roots = token.shape
    depth = keys.shape[1] - 1
    with torch.cuda.device_of(token):
        begin_kernel[(rows,)](
            *(
                *beams,
                *table,
                *noise,
                *buffer,
                keys,
                *joined,
                token.stride(0),
                rows,
                ints.shape[2],
                roots,
                depth,
                window,
            ),
            *(mask.shape[2], table[2].shape[1], last_position, trash, joined[0].shape[2] - roots),
            WP=triton.next_power_of_2(roots),
            LP=triton.next_power_of_2((depth + 1) * STREAMS.value),
            TILE=TILE if roots < 8 else 64,
            num_warps=4,
            enable_fp_fusion=False,
            maxnreg=REGISTERS,
        )


@torch.library.custom_op("dsbd::extend", mutates_args="unknown")
def extend(
    tokens: Tensor,
    logprobs: Tensor,
    buffer: Sequence[Tensor],
    table: Sequence[Tensor],
    position: Tensor,
    keys: Tensor,
    endings: Sequence[Tensor],
    warp: Sequence[Tensor],
    distribution: Sequence[Tensor],
    shape: Sequence[int],
    rule: str,
    flags: Sequence[bool],
    last_position: int,
) -> None:
    """Draft one layer as `BeamDrafter.drafts` and drafting.base.children do, and write the slots, positions and mask of
    the new nodes.

    tokens, logprobs [R, n, C]. endings: eos [V], table of the stop automaton. warp: temperature, top_k, top_p, min_p,
    greedy. distribution: tokens and log_q [R, N, C] of the nodes that were drafted from, log_drawn and log_rest
    [2, R, D, K] float64, to be written; or nothing. shape: the first of the nodes above, layer, K.
    flags: of distribution.pool_constants.
    """
    rows, above, candidates = tokens.shape
    first, layer, count = shape
    ints, _, weights, _, ancestors, mask = buffer
    used, common_prefix, positions, held = table
    eos, automaton = endings
    pairs = triton.next_power_of_2(above) * triton.next_power_of_2(candidates)
    with torch.cuda.device_of(tokens):
        extend_kernel[(rows,)](
            *(tokens, logprobs, *buffer, positions, held, used, common_prefix, position, keys, eos, automaton, *warp),
            *(distribution if distribution else (ints, weights, weights)),
            *(rows, ints.shape[2], first, above, layer, keys.shape[1] - 1, candidates, count, ancestors.shape[2]),
            *(mask.shape[2], positions.shape[1], automaton.shape[1], last_position),
            NP=triton.next_power_of_2(above),
            CP=triton.next_power_of_2(candidates),
            KP=triton.next_power_of_2(count),
            TILE=64,
            DISTRIBUTION=bool(distribution),
            **pool_constants(rule, flags, pairs),
        )


@begin.register_fake
def _(*arguments: object) -> None:
    return None


@extend.register_fake
def _(*arguments: object) -> None:
    return None
