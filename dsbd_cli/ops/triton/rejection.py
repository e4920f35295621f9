"""Device functions of rule `rejection`: drafts are tested in turn against the target's distribution."""

from __future__ import annotations

import triton
import triton.language as tl

from dsbd_cli.ops.triton.distribution import NEG_INF, is_some, passes, perturbed

TINY = tl.constexpr(1e-300)


@triton.jit
def scalar_at(x, indices, where):
    """Return the number x[where] of a vector x. indices: those of its numbers."""
    return tl.sum(tl.where(indices == where, x, 0), 0)


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
