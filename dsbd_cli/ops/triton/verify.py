"""A kernel that verifies a forest. One program per request verifies layer after layer, until one does not pass.

Letters: R requests, W0 roots, W beams, K drafts per layer, D layers, N = W0 + D*K nodes, C candidates per node, F = W
finished hypotheses kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from dsbd_cli.ops import layout
from dsbd_cli.ops.layout import COLUMNS, FIRST, VERIFY, Tensors
from dsbd_cli.ops.triton.distribution import (
    COUPLED,
    NEG_INF,
    REJECTION,
    RULES,
    SEARCH,
    child_state,
    ending_of,
    is_finite,
    kth,
    largest,
    ordered,
    perturbed,
    pool_constants,
    pool_distribution,
    uniform,
    unordered,
    value_at,
)
from dsbd_cli.ops.triton.draft import MOST_PAIRS, STREAMS
from dsbd_cli.ops.triton.launch import launch, operator
from dsbd_cli.ops.triton.rejection import completed, find, tested

MOST_BEAMS = 16
REPORT_FIRST, REPORT_COLUMNS = tl.constexpr(FIRST), tl.constexpr(COLUMNS)
ACCEPT, RESIDUAL = tl.constexpr(layout.ACCEPT), tl.constexpr(layout.RESIDUAL)
COMPLETION = tl.constexpr(layout.COMPLETION)


@triton.jit
def vector_at(x, indices, where):
    """Return the vector x[where] of a vector x. indices: those of its numbers."""
    return tl.sum(tl.where(indices[None, :] == where[:, None], x[None, :], 0), 1)


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
        column = report + REPORT_FIRST + layer * REPORT_COLUMNS
        for counter in tl.static_range(REPORT_COLUMNS):
            if counter != 1 and counter != 3 and counter != 7:  # noqa: PLR1714  # triton has no sets
                tl.store(column + counter, tl.full((), 0, tl.int64))
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


@triton.jit(do_not_specialize=["nodes", "candidates", "drafts", "roots", "depth", "beams", "draft_candidates"])
def verify_kernel(
    candidate_tokens, candidate_logprobs, node_path, node_stop_state, node_parent, node_token, node_valid,
    node_drafter_id, node_sampled, beam_valid, beam_weight, beam_logprob, beam_length, finished_score,
    finished_logprob, finished_length, finished_by_length, finished_origin, finished_node, finished_token,
    endings_eos, endings_stops, warp_temperature, warp_top_k, warp_top_p, warp_min_p, warp_greedy, state_active,
    limits_max_new, limits_length_penalty, limits_early, noise_keys, draft_tokens, draft_log_q, draft_log_left,
    live_parent, live_token, live_node, live_valid, live_weight, live_logprob, verified_before, verified_report,
    nodes, candidates, drafts, roots, depth, beams, vocabulary, draft_candidates, rows, WP: tl.constexpr,
    CP: tl.constexpr, KP: tl.constexpr, RULE: tl.constexpr, STOPS: tl.constexpr, TOP_K: tl.constexpr,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr, GREEDY: tl.constexpr, BEAM: tl.constexpr, STEPS: tl.constexpr,
    Q_STEPS: tl.constexpr,
):  # fmt: skip
    """Verify all layers of one request: write its final beams, its finished hypotheses and the counters."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, WP)
    c = tl.arange(0, CP)
    k = tl.arange(0, KP)
    flat = tl.arange(0, WP * CP)
    kept = w < beams
    base = row * nodes
    width = REPORT_FIRST + depth * REPORT_COLUMNS
    report = verified_report + row * width
    running = tl.load(state_active + row) != 0
    first_counters(report, node_valid, node_drafter_id, base, roots, drafts, depth, beams, k)
    node = tl.where(w < roots, w, -1)
    alive = tl.load(beam_valid + row * roots + w, mask=w < roots, other=0) != 0
    broken = running & is_broken(candidate_logprobs, base, node, alive, candidates, c)
    going = running & (broken == 0)
    weight = tl.load(beam_weight + row * roots + w, mask=w < roots, other=0.0)
    logprob = tl.load(beam_logprob + row * roots + w, mask=w < roots, other=0.0)
    # beams of the last step: at first the roots, which are given back where no step is taken
    n_parent = node
    n_token = tl.load(node_token + base + w, mask=w < roots, other=0)
    begun = tl.load(beam_length + row)
    limit = tl.load(limits_max_new + row)
    power = tl.load(limits_length_penalty + row).to(tl.float64)
    at_once = tl.load(limits_early + row) != 0
    mine = row * beams + w
    score = tl.load(finished_score + mine, mask=kept, other=NEG_INF)
    h_logprob = tl.load(finished_logprob + mine, mask=kept, other=NEG_INF)
    h_length = tl.load(finished_length + mine, mask=kept, other=0)
    h_by_length = tl.load(finished_by_length + mine, mask=kept, other=0).to(tl.int32)
    h_origin = tl.load(finished_origin + mine, mask=kept, other=0)
    h_node = tl.load(finished_node + mine, mask=kept, other=0)
    h_token = tl.load(finished_token + mine, mask=kept, other=0)
    steps = tl.full((), 0, tl.int32)
    total_width = tl.full((), 0, tl.int64)
    done = tl.full((), 0, tl.int32)
    layer = tl.full((), 0, tl.int32)
    while going:
        safe_node = tl.maximum(node, 0)
        real = kept[:, None] & (c < candidates)[None, :] & ((w < roots) | (layer > 0))[:, None]
        pair = (base + safe_node)[:, None] * candidates + c[None, :]
        tok = tl.load(candidate_tokens + pair, mask=real, other=0)
        lp = tl.load(candidate_logprobs + pair, mask=real & alive[:, None], other=NEG_INF)  # a dead beam may have NaN
        raw = tl.where(alive, logprob, NEG_INF)[:, None] + lp
        if RULE == SEARCH:
            log_p = raw
            joint = raw
        else:
            log_p, joint = pool_distribution(
                lp, tl.where(alive, weight, NEG_INF), tl.load(warp_temperature + row), tl.load(warp_top_k + row),
                tl.load(warp_top_p + row), tl.load(warp_min_p + row), tl.load(warp_greedy + row) != 0, TOP_K, TOP_P,
                MIN_P, GREEDY, BEAM, WP, CP,
            )  # fmt: skip
            log_p = tl.where(real, log_p, NEG_INF)
        ends = ending_of(
            endings_eos, endings_stops, node_stop_state + base + safe_node, tok, kept, real, vocabulary, STOPS
        )
        ending = tl.reshape(ends & real, (WP * CP,))
        below = roots + layer * drafts
        there = (k < drafts) & (layer < depth)
        d_parent = tl.load(node_parent + base + below + k, mask=there, other=-2)
        d_token = tl.load(node_token + base + below + k, mask=there, other=-2)
        d_valid = tl.load(node_valid + base + below + k, mask=there, other=0) != 0
        keys_at = noise_keys + (row * (depth + 1) + layer) * STREAMS
        chosen = w * 0
        drawn = w < 0
        accepted = tl.full((), 0, tl.int32)
        live = tl.full((), 0, tl.int32)
        if RULE == REJECTION:
            live_beam = alive & ((w < roots) | (layer > 0))
            hits = (d_parent[:, None] == node[None, :]) & live_beam[None, :]
            d_beam = tl.min(tl.where(hits, w[None, :], WP), 1)
            d_start = (base + tl.maximum(d_parent, 0)) * candidates
            d_column = find(candidate_tokens, d_start, candidates, d_token, STEPS)
            d_column = tl.minimum(d_column, candidates - 1)
            hit = (
                (d_beam < WP)
                & d_valid
                & (tl.load(candidate_tokens + d_start + d_column, mask=there, other=-1) == d_token)
            )
            d_index = tl.where(hit, d_beam * CP + d_column.to(tl.int32), -1)
            d_sampled = tl.load(node_sampled + base + below + k, mask=there, other=0) != 0
            d_state = tl.load(node_stop_state + base + tl.maximum(d_parent, 0), mask=there, other=1)
            _, d_ends = child_state(
                endings_eos, endings_stops, d_state, tl.maximum(d_token, 0), there, vocabulary, STOPS
            )
            distribution_at = (row * depth + layer) * drafts + k
            log_drawn = tl.load(draft_log_left + distribution_at, mask=there, other=0.0)
            log_rest = tl.load(
                draft_log_left + rows.to(tl.int64) * depth * drafts + distribution_at, mask=there, other=0.0
            )
            bound = uniform(tl.load(keys_at + ACCEPT), k) * tl.exp(log_drawn - log_rest)
            q_start = (base + safe_node)[:, None] * draft_candidates
            q_column = tl.minimum(find(draft_tokens, q_start, draft_candidates, tok, Q_STEPS), draft_candidates - 1)
            some = real & live_beam[:, None] & (layer < depth)
            q_hit = some & (tl.load(draft_tokens + q_start + q_column, mask=some, other=-1) == tok)
            log_q = tl.where(q_hit, tl.load(draft_log_q + q_start + q_column, mask=q_hit, other=NEG_INF), NEG_INF)
            log_q64 = tl.reshape(log_q, (WP * CP,)).to(tl.float64)
            left, residual, ended, chosen, drawn, drafted_as, accepted, live = tested(
                tl.reshape(log_p, (WP * CP,)).to(tl.float64), log_q64, d_index, d_sampled, d_ends, bound, log_rest,
                tl.where(layer < depth, drafts, 0), beams, w, k, flat,
            )  # fmt: skip
            chosen, drawn, ended = completed(
                left, residual, ending, tl.reshape((w.to(tl.int64) << 32)[:, None] + tok + 1, (WP * CP,)),
                tl.load(keys_at + RESIDUAL), tl.load(keys_at + COMPLETION), live, beams, chosen, drawn, ended, w,
                flat,
            )  # fmt: skip
            countable = drawn
        else:
            path_of = tl.load(node_path + base + safe_node, mask=kept, other=0)
            pairs = candidates * tl.where(layer > 0, beams, roots)
            chosen, drawn, countable, ended = ranked(
                log_p, path_of, tok, tl.load(warp_greedy + row) != 0, ending, pairs, beams, w, flat, RULE, GREEDY
            )
        beam = chosen // CP
        column = chosen % CP
        n_parent = vector_at(safe_node, w, beam)
        spot = (base + n_parent) * candidates + column
        n_token = tl.load(candidate_tokens + spot, mask=kept, other=0)
        lp_of = tl.load(candidate_logprobs + spot, mask=kept, other=0.0)
        n_logprob = vector_at(tl.where(alive, logprob, NEG_INF), w, beam) + lp_of
        if RULE == SEARCH:
            n_weight = n_logprob
        elif BEAM:
            n_weight = value_at(tl.reshape(joint, (WP * CP,)), chosen, w, flat, beams)
        else:
            n_weight = vector_at(tl.where(alive, weight, NEG_INF), w, beam) + lp_of
        # which draws are drafted nodes
        same = (d_parent[None, :] == n_parent[:, None]) & (d_token[None, :] == n_token[:, None]) & d_valid[None, :]
        draft_index = tl.min(tl.where(same, k[None, :], KP), 1)
        is_node = drawn & (draft_index < KP)
        if RULE == REJECTION:
            is_node = drawn & ((draft_index < KP) | (w < live))
            draft_index = tl.where((w < live) & drawn, drafted_as, draft_index)
        n_node = tl.where(is_node, below + draft_index, -1)
        num_nodes = tl.sum(is_node.to(tl.int32), 0)
        count = tl.sum(drawn.to(tl.int32), 0)
        passed = (num_nodes == count) & (count > 0) & (layer < depth)
        if RULE == REJECTION:
            accepted += tl.sum((is_node & (w >= live)).to(tl.int32), 0)
        else:
            accepted = num_nodes
        # counters
        if layer < depth:
            column_of = report + REPORT_FIRST + layer * REPORT_COLUMNS
            parents = (d_parent[:, None] == node[None, :]) & (alive & ((w < roots) | (layer > 0)))[None, :]
            living = (tl.max(parents.to(tl.int32), 1) > 0) & d_valid
            n_drafter_id = tl.load(node_drafter_id + base + n_node, mask=is_node, other=0)
            needed = tl.max(tl.where(is_node & (n_drafter_id != 1), draft_index + 1, 0), 0)
            tl.store(column_of + 0, tl.full((), 1, tl.int64))
            tl.store(column_of + 2, tl.sum(living.to(tl.int64), 0))
            tl.store(column_of + 4, accepted.to(tl.int64))
            tl.store(column_of + 5, passed.to(tl.int64))
            tl.store(column_of + 6, tl.where(passed, needed, 0).to(tl.int64))
            tl.store(column_of + 8, tl.sum(tl.where(is_node, n_drafter_id, 0), 0))
        tl.store(verified_before + (row * (depth + 1) + layer) * beams + w, node.to(tl.int64), mask=kept)
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
            e_node = vector_at(safe_node, w, e_index // CP)
            e_token = tl.load(candidate_tokens + (base + e_node) * candidates + e_index % CP, mask=kept, other=0)
            score, h_logprob, h_length, h_by_length, h_origin, h_node, h_token = best_finished(
                score, h_logprob, h_length, h_by_length, h_origin, h_node, h_token, e_score, e_logprob, e_node,
                e_token, cut_score, n_logprob, n_parent, n_token, reached, beams, w,
            )  # fmt: skip
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
        broken = going & is_broken(candidate_logprobs, base, node, alive, candidates, c)
        going = going & (broken == 0)
        layer += 1
    for rest in range(layer, depth + 1):
        tl.store(verified_before + (row * (depth + 1) + rest) * beams + w, w.to(tl.int64) * 0 - 1, mask=kept)
    tl.store(live_parent + mine, tl.maximum(n_parent, 0).to(tl.int64), mask=kept)
    tl.store(live_token + mine, n_token, mask=kept)
    tl.store(live_node + mine, node.to(tl.int64), mask=kept)
    tl.store(live_valid + mine, alive, mask=kept)
    tl.store(live_weight + mine, weight, mask=kept)
    tl.store(live_logprob + mine, logprob, mask=kept)
    tl.store(finished_score + mine, score, mask=kept)
    tl.store(finished_logprob + mine, h_logprob, mask=kept)
    tl.store(finished_length + mine, h_length, mask=kept)
    tl.store(finished_by_length + mine, h_by_length != 0, mask=kept)
    tl.store(finished_origin + mine, h_origin, mask=kept)
    tl.store(finished_node + mine, h_node, mask=kept)
    tl.store(finished_token + mine, h_token, mask=kept)
    tl.store(report + 0, tl.maximum(done, broken.to(tl.int32)).to(tl.int64))
    tl.store(report + 1, broken.to(tl.int64))
    tl.store(report + 2, steps.to(tl.int64))
    tl.store(report + 3, total_width)


def fits(beams: int, roots: int, candidates: int, drafts: int, rule: str) -> bool:
    """Return whether the kernel supports these numbers of beams, roots, candidates per node and drafts per layer, and
    the rule."""
    padded = triton.next_power_of_2(max(beams, roots)) * triton.next_power_of_2(candidates)
    return rule in RULES and beams <= MOST_BEAMS and roots <= beams and padded <= MOST_PAIRS and drafts <= 64


@operator(VERIFY, "int drafts, str rule, bool[] flags")
def verify(tensors: Tensors, drafts: int, rule: str, flags: Sequence[bool]) -> None:
    """Do what `verify` of ops/cpu/iteration.py does. Rule `rejection` reads the distributions `draft` that `extend`
    recorded."""
    sizes = {"draft_candidates": 1} | VERIFY.sizes(tensors) | {"drafts": drafts}
    width, own = triton.next_power_of_2(sizes["beams"]), triton.next_power_of_2(sizes["candidates"])
    token, weight = tensors["node_token"], tensors["warp_temperature"]
    launch(
        verify_kernel,
        {"draft_tokens": token, "draft_log_q": weight, "draft_log_left": weight, **tensors},
        sizes,
        WP=width,
        CP=own,
        KP=triton.next_power_of_2(max(drafts, 1)),
        STEPS=sizes["candidates"].bit_length(),
        Q_STEPS=sizes["draft_candidates"].bit_length(),
        **pool_constants(rule, flags, width * own),
    )
