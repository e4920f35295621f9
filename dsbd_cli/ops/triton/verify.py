"""A kernel that verifies a forest. One program per request verifies layer after layer, until one does not pass.

Letters: R requests, W0 roots, W beams, K drafts per layer, D layers, N = W0 + D*K nodes, C candidates per node, F = W
finished hypotheses kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsbd_cli.ops.layout import COLUMNS, FIRST
from dsbd_cli.ops.triton.distribution import (
    COUPLED,
    NEG_INF,
    REJECTION,
    RULES,
    SEARCH,
    child_state,
    ending_of,
    is_finite,
    is_some,
    kth,
    largest,
    ordered,
    passes,
    perturbed,
    pool_constants,
    pool_distribution,
    uniform,
    unordered,
    value_at,
)
from dsbd_cli.ops.triton.draft import MOST_PAIRS, STREAMS

MOST_BEAMS = 16
HEAD, WIDE = tl.constexpr(FIRST), tl.constexpr(COLUMNS)
ACCEPT, RESIDUAL, COMPLETION = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
TINY = tl.constexpr(1e-300)


@triton.jit
def scalar_at(x, place, where):
    """Return the number x[where] of a vector x whose indices are `place`."""
    return tl.sum(tl.where(place == where, x, 0), 0)


@triton.jit
def vector_at(x, place, where):
    """Return the vector x[where] of a vector x whose indices are `place`."""
    return tl.sum(tl.where(place[None, :] == where[:, None], x[None, :], 0), 1)


@triton.jit
def find(tokens, start, count, wanted, STEPS: tl.constexpr):
    """Return the place of `wanted` among the ascending tokens [start, start + count), or of the next larger one."""
    low = start * 0 + wanted * 0
    high = low + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        less = (low < high) & (tl.load(tokens + start + middle, mask=low < high, other=0) < wanted)
        low = tl.where(less, middle + 1, low)
        high = tl.where(less, high, tl.where(low < high, middle, high))
    return low


@triton.jit
def tested(left, log_q, index_of, sampled, ends, bound, log_rest, count, beams, w, k, flat):
    """Test `count` drafts in turn. left: log P of the pool, float64. log_q: log Q, the distribution that the drafts are
    drawn from. index_of, sampled, ends, bound, log_rest: of each draft, its place in the pool (-1: none), whether it
    was sampled, whether it ends, the bound of its test, and the log of what is left of Q when it is drawn.

    Return log P of what is left, the distribution of the next draw, which pairs ended, and the live draws: their
    places, which exist, and their drafts. Then how many drafts were accepted, and how many of these are live.
    """
    share = tl.exp(left)
    residual = share
    gone = flat < 0
    ended = flat < 0
    drafted_as = w * 0
    chosen = w * 0
    drawn = w < 0
    accepted = tl.full((), 0, tl.int32)
    live = tl.full((), 0, tl.int32)
    for j in range(count):
        index = scalar_at(index_of, k, j)
        this_pair = flat == index
        if (scalar_at(sampled.to(tl.int32), k, j) > 0) & (live < beams):
            level = tl.sum(tl.where(this_pair, residual, 0.0), 0)
            if (index >= 0) & passes(scalar_at(bound, k, j), level):
                left = tl.where(this_pair, NEG_INF, left)
                shares = tl.exp(left - tl.max(left, 0))
                share = shares / tl.sum(shares, 0)
                residual = share
                accepted += 1
                if scalar_at(ends.to(tl.int32), k, j) > 0:
                    ended = ended | this_pair
                else:
                    chosen = tl.where(w == live, index, chosen)
                    drawn = drawn | (w == live)
                    drafted_as = tl.where(w == live, j, drafted_as)
                    live += 1
            else:
                rest_of_q = scalar_at(log_rest, k, j)
                q = tl.exp(log_q - rest_of_q)
                q = tl.where(gone | (q != q), 0.0, q)
                over_q = tl.maximum(residual - q, 0.0)
                mass = tl.sum(over_q, 0)
                residual = tl.where(mass > TINY, over_q / mass, share)
        gone = gone | this_pair
    return left, residual, ended, chosen, drawn, drafted_as, accepted, live


@triton.jit
def completed(
    left, residual, ending, entry, residual_key, completion_key, live, beams, chosen, drawn, ended, w, flat
):  # fmt: skip
    """Make the draws that the drafts did not give: the first one from `residual`, the others from what is left of P.

    Return the places of the live draws, which of them exist, and which pairs ended.
    """
    may_draw = (live < beams) & ((live == 0) | (tl.max(left, 0) > NEG_INF))
    level_of = tl.log(tl.where(residual == residual, residual, 0.0))
    highest, first = tl.max(perturbed(level_of, residual_key, entry), 0, return_indices=True)
    first_real = is_some(highest) & may_draw
    this_pair = (flat == first) & first_real
    first_ends = tl.max((this_pair & ending).to(tl.int32), 0) > 0
    left = tl.where(this_pair, NEG_INF, left)
    ended = ended | (this_pair & ending)
    first_live = first_real & (first_ends == 0)
    chosen = tl.where((w == live) & first_live, first, chosen)
    drawn = drawn | ((w == live) & first_live)
    placed = live + first_live.to(tl.int32)
    missing = tl.where(may_draw, beams - placed, 0)
    pool = perturbed(left, completion_key, entry)
    free = tl.where(ending, NEG_INF, pool)
    last_key = tl.full((), float("inf"), tl.float64)
    for i in range(missing):
        highest, index = tl.max(free, 0, return_indices=True)
        got = is_some(highest)
        chosen = tl.where((w == placed + i) & got, index, chosen)
        drawn = drawn | ((w == placed + i) & got)
        free = tl.where(flat == index, NEG_INF, free)
        last_key = highest
    ended = ended | (ending & (pool > last_key))
    return chosen, drawn, ended


@triton.jit
def best_finished(
    score, h_logprob, h_length, h_by_length, h_origin, h_node, h_token, e_score, e_logprob, e_node, e_token,
    cut_score, n_logprob, n_parent, n_token, reached, beams, w,
):  # fmt: skip
    """Return the best of three lists of hypotheses: the finished ones (h_) and those that end here (e_), both sorted,
    and the live draws that the length limit ends (cut_score, n_). Of equal scores the earlier list comes first."""
    m_score, m_logprob, m_length = score, h_logprob, h_length
    m_by_length, m_origin, m_node, m_token = h_by_length, h_origin, h_node, h_token
    old = tl.full((), 0, tl.int32)
    ended_here = tl.full((), 0, tl.int32)
    cuts = cut_score
    for i in range(beams):
        by_old = tl.max(tl.where(w == old, score, NEG_INF), 0)
        by_end = tl.max(tl.where(w == ended_here, e_score, NEG_INF), 0)
        by_cut, at_cut = tl.max(cuts, 0, return_indices=True)
        is_old = by_old >= tl.maximum(by_end, by_cut)
        is_end = (by_old < tl.maximum(by_end, by_cut)) & (by_end >= by_cut)
        is_new = is_old == 0
        is_cut = is_new & (is_end == 0)
        spot_of = tl.where(is_old, old, tl.where(is_end, ended_here, at_cut))
        here = w == spot_of
        now = w == i
        best = tl.maximum(by_old, tl.maximum(by_end, by_cut))
        m_score = tl.where(now, best, m_score)
        of_lp = tl.where(is_old, h_logprob, tl.where(is_end, e_logprob, n_logprob))
        m_logprob = tl.where(now, tl.max(tl.where(here, of_lp, NEG_INF), 0), m_logprob)
        of_length = tl.where(is_old, h_length, reached)
        m_length = tl.where(now, tl.sum(tl.where(here, of_length, 0), 0), m_length)
        of_by = tl.where(is_old, h_by_length, is_cut.to(tl.int32))
        m_by_length = tl.where(now, tl.sum(tl.where(here, of_by, 0), 0), m_by_length)
        of_origin = tl.where(is_old, h_origin, -1)
        m_origin = tl.where(now, tl.sum(tl.where(here, of_origin, 0), 0), m_origin)
        of_node = tl.where(is_old, h_node, tl.where(is_end, e_node, n_parent).to(tl.int64))
        m_node = tl.where(now, tl.sum(tl.where(here, of_node, 0), 0), m_node)
        of_token = tl.where(is_old, h_token, tl.where(is_end, e_token, n_token))
        m_token = tl.where(now, tl.sum(tl.where(here, of_token, 0), 0), m_token)
        old += is_old.to(tl.int32)
        ended_here += is_end.to(tl.int32)
        cuts = tl.where(is_cut & (w == at_cut), NEG_INF, cuts)
    return m_score, m_logprob, m_length, m_by_length, m_origin, m_node, m_token


@triton.jit
def is_broken(logprobs, base, node, alive, candidates, c):
    """Return whether a live beam stands on a node with a logit that is NaN."""
    inside = alive[:, None] & (c < candidates)[None, :]
    x = tl.load(logprobs + (base + tl.maximum(node, 0))[:, None] * candidates + c[None, :], mask=inside, other=0.0)
    return tl.max(tl.max(((x != x) & inside).to(tl.int32), 1), 0) > 0


@triton.jit
def first_counters(report, valid, drafter_id, base, roots, drafted, depth, beams, k):
    """Write the first counters of all layers, reached or not: their valid nodes, their width, and 0 elsewhere."""
    for layer in range(depth):
        below = base + roots + layer * drafted + k
        there = k < drafted
        real = tl.load(valid + below, mask=there, other=0) != 0
        second = tl.load(drafter_id + below, mask=there, other=0)
        column = report + HEAD + layer * WIDE
        for place in tl.static_range(WIDE):
            if place != 1 and place != 3 and place != 7:  # noqa: PLR1714  # triton has no sets
                tl.store(column + place, tl.full((), 0, tl.int64))
        tl.store(column + 1, tl.sum(real.to(tl.int64), 0))
        tl.store(column + 3, beams.to(tl.int64))
        tl.store(column + 7, tl.sum(tl.where(real, second, 0), 0))


@triton.jit
def ranked(log_p, path, token, greedy, ending, pairs, beams, w, flat, RULE: tl.constexpr, GREEDY: tl.constexpr):
    """Make the live draws of the rules that draw all at once: the largest of log P plus noise, or of the scores alone.
    pairs: number of pairs in the pool, at most.

    Return their places, which of them exist, which count as hypotheses at the length limit, and which pairs ended.
    """
    pool = tl.reshape(log_p, flat.shape)
    if RULE == COUPLED:
        noisy = perturbed(log_p, path[:, None], token + 1)
        if GREEDY:
            noisy = tl.where(greedy, log_p, noisy)
        pool = tl.reshape(noisy, flat.shape)
    chosen, drawn, _, last = largest(tl.where(ending, NEG_INF, pool), beams, w, flat)
    countable = drawn
    if RULE == SEARCH:  # an end counts among the best of all pairs
        smallest = unordered(kth(tl.reshape(ordered(pool), (1, flat.shape[0])), tl.minimum(beams, pairs)))
        last = tl.max(smallest, 0)
        ended = ending & (pool >= last) & is_finite(pool)
        countable = drawn & (value_at(pool, chosen, w, flat, beams) >= last)
    else:
        ended = ending & (pool > last)
    return chosen, drawn, countable, ended


@triton.jit(do_not_specialize=["nodes", "candidates", "drafted", "roots", "depth", "beams", "beam_stride", "q_count"])
def verify_kernel(
    tokens,
    logprobs,
    path,
    stop_state,
    parent,
    token,
    valid,
    drafter_id,
    sampled,
    root_valid,
    root_weight,
    root_logprob,
    length,
    f_score,
    f_logprob,
    f_length,
    f_by_length,
    f_origin,
    f_node,
    f_token,
    eos,
    stops,
    temperature,
    top_k,
    top_p,
    min_p,
    greedy,
    active,
    max_new,
    penalty,
    early,
    keys,
    q_tokens,
    q_logs,
    q_distribution,
    o_parent,
    o_token,
    o_node,
    o_valid,
    o_weight,
    o_logprob,
    o_before,
    o_report,
    nodes,
    candidates,
    drafted,
    roots,
    depth,
    beams,
    beam_stride,
    vocabulary,
    q_count,
    rows,
    WP: tl.constexpr,
    CP: tl.constexpr,
    KP: tl.constexpr,
    RULE: tl.constexpr,
    STOPS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    GREEDY: tl.constexpr,
    BEAM: tl.constexpr,
    STEPS: tl.constexpr,
    Q_STEPS: tl.constexpr,
):
    """Verify all layers of one request: write its final beams, its finished hypotheses and the counters."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, WP)
    c = tl.arange(0, CP)
    k = tl.arange(0, KP)
    flat = tl.arange(0, WP * CP)
    kept = w < beams
    base = row * nodes
    width = HEAD + depth * WIDE
    report = o_report + row * width
    running = tl.load(active + row) != 0
    first_counters(report, valid, drafter_id, base, roots, drafted, depth, beams, k)
    node = tl.where(w < roots, w, -1)
    alive = tl.load(root_valid + row * beam_stride + w, mask=w < roots, other=0) != 0
    broken = running & is_broken(logprobs, base, node, alive, candidates, c)
    going = running & (broken == 0)
    weight = tl.load(root_weight + row * beam_stride + w, mask=w < roots, other=0.0)
    logprob = tl.load(root_logprob + row * beam_stride + w, mask=w < roots, other=0.0)
    # beams of the last step: at first the roots, which are given back where no step is taken
    n_parent = node
    n_token = tl.load(token + base + w, mask=w < roots, other=0)
    begun = tl.load(length + row)
    limit = tl.load(max_new + row)
    power = tl.load(penalty + row).to(tl.float64)
    at_once = tl.load(early + row) != 0
    mine = row * beams + w
    score = tl.load(f_score + mine, mask=kept, other=NEG_INF)
    h_logprob = tl.load(f_logprob + mine, mask=kept, other=NEG_INF)
    h_length = tl.load(f_length + mine, mask=kept, other=0)
    h_by_length = tl.load(f_by_length + mine, mask=kept, other=0).to(tl.int32)
    h_origin = tl.load(f_origin + mine, mask=kept, other=0)
    h_node = tl.load(f_node + mine, mask=kept, other=0)
    h_token = tl.load(f_token + mine, mask=kept, other=0)
    steps = tl.full((), 0, tl.int32)
    total_width = tl.full((), 0, tl.int64)
    done = tl.full((), 0, tl.int32)
    layer = tl.full((), 0, tl.int32)
    while going:
        known = tl.maximum(node, 0)
        real = kept[:, None] & (c < candidates)[None, :] & ((w < roots) | (layer > 0))[:, None]
        place = (base + known)[:, None] * candidates + c[None, :]
        tok = tl.load(tokens + place, mask=real, other=0)
        lp = tl.load(logprobs + place, mask=real & alive[:, None], other=NEG_INF)  # a dead beam may have NaN
        raw = tl.where(alive, logprob, NEG_INF)[:, None] + lp
        if RULE == SEARCH:
            log_p = raw
            joint = raw
        else:
            log_p, joint = pool_distribution(
                lp,
                tl.where(alive, weight, NEG_INF),
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
                WP,
                CP,
            )
            log_p = tl.where(real, log_p, NEG_INF)
        ends = ending_of(eos, stops, stop_state + base + known, tok, kept, real, vocabulary, STOPS)
        ending = tl.reshape(ends & real, (WP * CP,))
        below = roots + layer * drafted
        there = (k < drafted) & (layer < depth)
        d_parent = tl.load(parent + base + below + k, mask=there, other=-2)
        d_token = tl.load(token + base + below + k, mask=there, other=-2)
        d_valid = tl.load(valid + base + below + k, mask=there, other=0) != 0
        keys_at = keys + (row * (depth + 1) + layer) * STREAMS
        chosen = w * 0
        drawn = w < 0
        accepted = tl.full((), 0, tl.int32)
        live = tl.full((), 0, tl.int32)
        if RULE == REJECTION:
            live_beam = alive & ((w < roots) | (layer > 0))
            hits = (d_parent[:, None] == node[None, :]) & live_beam[None, :]
            d_beam = tl.min(tl.where(hits, w[None, :], WP), 1)
            d_start = (base + tl.maximum(d_parent, 0)) * candidates
            d_column = find(tokens, d_start, candidates, d_token, STEPS)
            d_column = tl.minimum(d_column, candidates - 1)
            hit = (d_beam < WP) & d_valid & (tl.load(tokens + d_start + d_column, mask=there, other=-1) == d_token)
            d_index = tl.where(hit, d_beam * CP + d_column.to(tl.int32), -1)
            d_sampled = tl.load(sampled + base + below + k, mask=there, other=0) != 0
            d_state = tl.load(stop_state + base + tl.maximum(d_parent, 0), mask=there, other=1)
            _, d_ends = child_state(eos, stops, d_state, tl.maximum(d_token, 0), there, vocabulary, STOPS)
            distribution_at = (row * depth + layer) * drafted + k
            log_drawn = tl.load(q_distribution + distribution_at, mask=there, other=0.0)
            log_rest = tl.load(
                q_distribution + rows.to(tl.int64) * depth * drafted + distribution_at, mask=there, other=0.0
            )
            bound = uniform(tl.load(keys_at + ACCEPT), k) * tl.exp(log_drawn - log_rest)
            q_start = (base + known)[:, None] * q_count
            q_column = tl.minimum(find(q_tokens, q_start, q_count, tok, Q_STEPS), q_count - 1)
            some = real & live_beam[:, None] & (layer < depth)
            q_hit = some & (tl.load(q_tokens + q_start + q_column, mask=some, other=-1) == tok)
            log_q = tl.where(q_hit, tl.load(q_logs + q_start + q_column, mask=q_hit, other=NEG_INF), NEG_INF)
            log_q64 = tl.reshape(log_q, (WP * CP,)).to(tl.float64)
            left, residual, ended, chosen, drawn, drafted_as, accepted, live = tested(
                tl.reshape(log_p, (WP * CP,)).to(tl.float64),
                log_q64,
                d_index,
                d_sampled,
                d_ends,
                bound,
                log_rest,
                tl.where(layer < depth, drafted, 0),
                beams,
                w,
                k,
                flat,
            )
            chosen, drawn, ended = completed(
                left,
                residual,
                ending,
                tl.reshape((w.to(tl.int64) << 32)[:, None] + tok + 1, (WP * CP,)),
                tl.load(keys_at + RESIDUAL),
                tl.load(keys_at + COMPLETION),
                live,
                beams,
                chosen,
                drawn,
                ended,
                w,
                flat,
            )
            countable = drawn
        else:
            path_of = tl.load(path + base + known, mask=kept, other=0)
            pairs = candidates * tl.where(layer > 0, beams, roots)
            chosen, drawn, countable, ended = ranked(
                log_p, path_of, tok, tl.load(greedy + row) != 0, ending, pairs, beams, w, flat, RULE, GREEDY
            )
        beam = chosen // CP
        column = chosen % CP
        n_parent = vector_at(known, w, beam)
        spot = (base + n_parent) * candidates + column
        n_token = tl.load(tokens + spot, mask=kept, other=0)
        lp_of = tl.load(logprobs + spot, mask=kept, other=0.0)
        n_logprob = vector_at(tl.where(alive, logprob, NEG_INF), w, beam) + lp_of
        if RULE == SEARCH:
            n_weight = n_logprob
        elif BEAM:
            n_weight = value_at(tl.reshape(joint, (WP * CP,)), chosen, w, flat, beams)
        else:
            n_weight = vector_at(tl.where(alive, weight, NEG_INF), w, beam) + lp_of
        # which draws are drafted nodes
        same = (d_parent[None, :] == n_parent[:, None]) & (d_token[None, :] == n_token[:, None]) & d_valid[None, :]
        found = tl.min(tl.where(same, k[None, :], KP), 1)
        is_node = drawn & (found < KP)
        if RULE == REJECTION:
            is_node = drawn & ((found < KP) | (w < live))
            found = tl.where((w < live) & drawn, drafted_as, found)
        n_node = tl.where(is_node, below + found, -1)
        num_nodes = tl.sum(is_node.to(tl.int32), 0)
        count = tl.sum(drawn.to(tl.int32), 0)
        passed = (num_nodes == count) & (count > 0) & (layer < depth)
        if RULE == REJECTION:
            accepted += tl.sum((is_node & (w >= live)).to(tl.int32), 0)
        else:
            accepted = num_nodes
        # counters
        if layer < depth:
            column_of = report + HEAD + layer * WIDE
            parents = (d_parent[:, None] == node[None, :]) & (alive & ((w < roots) | (layer > 0)))[None, :]
            living = (tl.max(parents.to(tl.int32), 1) > 0) & d_valid
            n_drafter_id = tl.load(drafter_id + base + n_node, mask=is_node, other=0)
            needed = tl.max(tl.where(is_node & (n_drafter_id != 1), found + 1, 0), 0)
            tl.store(column_of + 0, tl.full((), 1, tl.int64))
            tl.store(column_of + 2, tl.sum(living.to(tl.int64), 0))
            tl.store(column_of + 4, accepted.to(tl.int64))
            tl.store(column_of + 5, passed.to(tl.int64))
            tl.store(column_of + 6, tl.where(passed, needed, 0).to(tl.int64))
            tl.store(column_of + 8, tl.sum((is_node & (n_drafter_id == 1)).to(tl.int64), 0))
        tl.store(o_before + (row * (depth + 1) + layer) * beams + w, node.to(tl.int64), mask=kept)
        # what ended here, best first, and live draws that the length limit ends
        steps += 1
        reached = begun + steps
        scale = tl.exp(power * tl.log(reached.to(tl.float64))).to(tl.float32)
        over = reached >= limit
        e_logprob = tl.full((WP,), NEG_INF, tl.float32)
        e_index = w * 0
        finished = tl.where(ended, tl.reshape(raw, (WP * CP,)), NEG_INF)
        if tl.max(finished, 0) > NEG_INF:
            e_index, _found, e_logprob, _last = largest(finished, beams, w, flat)
        cut_score = tl.where(countable & over, tl.div_rn(n_logprob, scale + w * 0.0), NEG_INF)
        e_score = tl.div_rn(e_logprob, scale + w * 0.0)
        if tl.maximum(tl.max(e_score, 0), tl.max(cut_score, 0)) > NEG_INF:
            e_node = vector_at(known, w, e_index // CP)
            e_token = tl.load(tokens + (base + e_node) * candidates + e_index % CP, mask=kept, other=0)
            score, h_logprob, h_length, h_by_length, h_origin, h_node, h_token = best_finished(
                score,
                h_logprob,
                h_length,
                h_by_length,
                h_origin,
                h_node,
                h_token,
                e_score,
                e_logprob,
                e_node,
                e_token,
                cut_score,
                n_logprob,
                n_parent,
                n_token,
                reached,
                beams,
                w,
            )
        # the end test
        node = n_node
        alive = drawn
        weight = n_weight
        logprob = n_logprob
        total_width += count.to(tl.int64)
        worst = tl.min(tl.where(kept, score, float("inf")), 0)
        full = worst > NEG_INF
        best_live = tl.div_rn(tl.max(tl.where(drawn, n_logprob, NEG_INF), 0), scale)
        stop = over | (full & (best_live <= worst)) | (at_once & full) | (count == 0)
        done = tl.where(stop, 1, done)
        going = passed & (stop == 0)
        broken = going & is_broken(logprobs, base, node, alive, candidates, c)
        going = going & (broken == 0)
        layer += 1
    for rest in range(layer, depth + 1):
        tl.store(o_before + (row * (depth + 1) + rest) * beams + w, w.to(tl.int64) * 0 - 1, mask=kept)
    tl.store(o_parent + mine, tl.maximum(n_parent, 0).to(tl.int64), mask=kept)
    tl.store(o_token + mine, n_token, mask=kept)
    tl.store(o_node + mine, node.to(tl.int64), mask=kept)
    tl.store(o_valid + mine, alive, mask=kept)
    tl.store(o_weight + mine, weight, mask=kept)
    tl.store(o_logprob + mine, logprob, mask=kept)
    tl.store(f_score + mine, score, mask=kept)
    tl.store(f_logprob + mine, h_logprob, mask=kept)
    tl.store(f_length + mine, h_length, mask=kept)
    tl.store(f_by_length + mine, h_by_length != 0, mask=kept)
    tl.store(f_origin + mine, h_origin, mask=kept)
    tl.store(f_node + mine, h_node, mask=kept)
    tl.store(f_token + mine, h_token, mask=kept)
    tl.store(report + 0, tl.maximum(done, broken.to(tl.int32)).to(tl.int64))
    tl.store(report + 1, broken.to(tl.int64))
    tl.store(report + 2, steps.to(tl.int64))
    tl.store(report + 3, total_width)


def fits(beams: int, roots: int, candidates: int, drafts: int, rule: str) -> bool:
    """Return whether the kernel supports these numbers of beams, roots, candidates per node and drafts per layer, and
    the rule."""
    padded = triton.next_power_of_2(max(beams, roots)) * triton.next_power_of_2(candidates)
    return rule in RULES and beams <= MOST_BEAMS and roots <= beams and padded <= MOST_PAIRS and drafts <= 64


@torch.library.custom_op("dsbd::verify", mutates_args="unknown")
def verify(
    candidates: Sequence[Tensor],
    nodes: Sequence[Tensor],
    beams: Sequence[Tensor],
    finished: Sequence[Tensor],
    endings: Sequence[Tensor],
    warp: Sequence[Tensor],
    limits: Sequence[Tensor],
    keys: Tensor,
    distribution: Sequence[Tensor],
    out: Sequence[Tensor],
    drafts: int,
    rule: str,
    flags: Sequence[bool],
) -> None:
    """Do what `verify_forest` does. Finished hypotheses change in place; the rest is written to `out`.

    candidates: tokens, logprobs [R, N, C]. nodes: path, stop_state, parent, token, valid, drafter_id, sampled [R, N].
    beams: valid, weight, logprob [R, W0], length [R]. finished: score, logprob, length, by_length, origin, node, token
    [R, F]. endings: eos [V], table of the stop automaton. warp: temperature, top_k, top_p, min_p, greedy. limits:
    active, max_new, length_penalty, early [R]. keys [R, D + 1, STREAMS]. distribution: tokens, log_q [R, N, Cq],
    log_drawn and log_rest [2, R, D, K]; or nothing. out: parent, token, node, valid, weight, logprob [R, W]; before
    [R, D + 1, W]; report [R, FIRST + D * COLUMNS] int64, of which 0 to 3 are done, invalid, steps and the sum of
    widths. flags: of distribution.pool_constants.
    """
    rows, count, own = candidates[0].shape
    width, roots = out[0].shape[1], beams[0].shape[1]
    pairs = triton.next_power_of_2(width) * triton.next_power_of_2(own)
    given = distribution or (nodes[3], warp[0], warp[0])
    q_count = given[0].shape[2] if distribution else 1
    with torch.cuda.device_of(keys):
        verify_kernel[(rows,)](
            *(*candidates, *nodes, *beams, *finished, *endings, *warp, *limits, keys, *given, *out),
            *(
                count,
                own,
                drafts,
                roots,
                keys.shape[1] - 1,
                width,
                beams[0].stride(0),
                endings[1].shape[1],
                q_count,
                rows,
            ),
            WP=triton.next_power_of_2(width),
            CP=triton.next_power_of_2(own),
            KP=triton.next_power_of_2(max(drafts, 1)),
            STEPS=own.bit_length(),
            Q_STEPS=q_count.bit_length(),
            **pool_constants(rule, flags, pairs),
        )


@verify.register_fake
def _(*arguments: object) -> None:
    return None
