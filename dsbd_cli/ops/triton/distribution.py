"""Device functions that several kernels share: noise, the order of numbers, the pool distribution.

They compute the same numbers as engine/core/noise.py and engine/core/distribution.py, two of them in another way.
log(1 - u) replaces log1p(-u): u has 52 bits and a half, so 1 - u is exact and the two are equal to the last bit. The
k-th largest number, and the one at which the mass reaches top_p, are found bit by bit, without a sort.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl

from dsbd_cli.ops import layout

GOLDEN, TOKEN = tl.constexpr(layout.GOLDEN), tl.constexpr(layout.MIX_TOKEN)
MIX_A, MIX_B = tl.constexpr(layout.MIX_A), tl.constexpr(layout.MIX_B)
NEG_INF = tl.constexpr(float("-inf"))
SHARE_UNITS, LOG_UNITS = tl.constexpr(layout.SHARE_UNITS), tl.constexpr(math.log(layout.SHARE_UNITS))
NO_SHARE = tl.constexpr(layout.NO_SHARE)
REGISTERS = 255  # of a thread at most; without this limit ptxas stops at 128 and spills
COUPLED, SEARCH, REJECTION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
RULES = {"coupled": COUPLED.value, "search": SEARCH.value, "rejection": REJECTION.value}


def pool_constants(rule: str, flags: Sequence[bool], pairs: int) -> dict[str, int | bool]:
    """Return the launch options of a kernel with a pool of `pairs` pairs, padding included. flags: whether there are
    stop strings, top-k, top-p, min-p, greedy rows, and a warp of each beam."""
    names = ("STOPS", "TOP_K", "TOP_P", "MIN_P", "GREEDY", "BEAM")
    warps = 4 if pairs <= 1024 else 8
    return {
        "RULE": RULES[rule],
        **dict(zip(names, flags, strict=True)),
        "num_warps": warps,
        "enable_fp_fusion": False,
        "maxnreg": REGISTERS,
    }


@triton.jit
def mix(x):
    """Apply the finaliser of SplitMix64 to uint64."""
    x = (x ^ (x >> 30)) * tl.full((), MIX_A, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), MIX_B, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def child_path(path, token):
    """Return int64 keys of paths with one more token, as `extend_path` of engine/core/noise.py does."""
    golden = tl.full((), GOLDEN, tl.uint64)
    x = path.to(tl.uint64) * tl.full((), TOKEN, tl.uint64) + token.to(tl.uint64) + golden
    return mix(x).to(tl.int64)


@triton.jit
def stream_key(row_key, iteration, number):
    """Return int64 keys of the streams with numbers layer * STREAMS + stream: `stream_keys` of engine/core/noise.py."""
    base = mix(row_key.to(tl.uint64) + iteration.to(tl.uint64) * tl.full((), TOKEN, tl.uint64))
    return mix(base + number.to(tl.uint64) * tl.full((), GOLDEN, tl.uint64)).to(tl.int64)


@triton.jit
def uniform(key, index):
    """Return float64 from int64, as `uniform` of engine/core/noise.py does."""
    bits = mix(key.to(tl.uint64) + index.to(tl.uint64) * tl.full((), GOLDEN, tl.uint64)) >> 12
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def gumbel(key, index):
    """Return float64 from int64, as `gumbel` of engine/core/noise.py does."""
    return -tl.log(-tl.log(1.0 - uniform(key, index)))


@triton.jit
def perturbed(logs, key, index):
    """Return logs plus Gumbel noise. The largest ones are draws without replacement from the distribution exp(logs)."""
    return logs + gumbel(key, index).to(logs.dtype)


@triton.jit
def passes(bound, level):
    """Test a draft. bound: a uniform number times the probability of the draft under its own distribution. level: its
    probability under the target's."""
    return bound < level


@triton.jit
def ending_of(eos, stops, stop_state, token, mine, real, vocabulary, STOPS: tl.constexpr):
    """Return which children `token` [A, B] of nodes end: end tokens, and with STOPS tokens that complete a stop string.
    stop_state: pointers [A] to the nodes' stop states, which are read where `mine`."""
    ends = tl.load(eos + token, mask=real, other=0) != 0
    if STOPS:
        state = tl.load(stop_state, mask=mine, other=1)
        ends = ends | (tl.load(stops + state[:, None] * vocabulary + token, mask=real, other=1) == 0)
    return ends


@triton.jit
def child_state(eos, stops, state, token, mine, vocabulary, STOPS: tl.constexpr):
    """Return the stop states of children `token` [A] of nodes in stop states `state`, and which of them end."""
    ends = tl.load(eos + token, mask=mine, other=0) != 0
    if STOPS:
        after = tl.load(stops + state * vocabulary + token, mask=mine, other=1).to(tl.int64)
        ends = ends | (after == 0)
    else:
        after = state * 0 + 1
    return after, ends


@triton.jit
def value_at(x, chosen, k, flat, count):
    """Return x[chosen] for the first `count` of the numbers `k`, else -inf. x: a pool at the places `flat`."""
    values = tl.full(k.shape, NEG_INF, tl.float32)
    for i in range(count):
        here = tl.sum(tl.where(k == i, chosen, 0), 0)
        values = tl.where(k == i, tl.max(tl.where(flat == here, x, NEG_INF), 0), values)
    return values


@triton.jit
def largest(pool, count, k, flat):
    """Select the `count` largest numbers of a pool at the places `flat`, in descending order, at the numbers `k`.
    Return their places, which of them exist, their values, and the value of the last one."""
    chosen = k * 0
    exists = k < 0
    values = tl.full(k.shape, NEG_INF, pool.dtype)
    last = tl.full((), NEG_INF, pool.dtype)
    for i in range(count):
        value, index = tl.max(pool, 0, return_indices=True)
        got = is_some(value)
        chosen = tl.where((k == i) & got, index, chosen)
        exists = exists | ((k == i) & got)
        pool = tl.where(flat == index, NEG_INF, pool)
        values = tl.where(k == i, value, values)
        last = value
    return chosen, exists, values, last


@triton.jit
def ordered(x):
    """Map float32 to uint32 in the same order. Both zeros become one number."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 0, bits ^ 0x80000000, bits ^ 0xFFFFFFFF)


@triton.jit
def unordered(x):
    """Map the uint32 of `ordered` back to float32."""
    bits = tl.where((x >> 31) == 1, x ^ 0x80000000, x ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def is_finite(x):
    """Return whether numbers are neither infinite nor NaN."""
    return (x == x) & (x > NEG_INF) & (x < float("inf"))


@triton.jit
def is_some(x):
    """Return whether a number is above -inf. An integer comes between, because triton's interpreter cannot broadcast
    the comparison of a float."""
    return (x > NEG_INF).to(tl.int32) != 0


@triton.jit
def shares(x):
    """Compute `_shares` of engine/core/distribution.py, int64."""
    units = tl.full((), SHARE_UNITS, tl.float64)
    return tl.floor(tl.exp(tl.maximum(x, NO_SHARE)).to(tl.float64) * units + 0.5).to(tl.int64)


@triton.jit
def log_mass(x):
    """Compute `_log_mass` of engine/core/distribution.py for [A, B] over B: [A, 1]."""
    units = tl.maximum(tl.sum(shares(x), 1), 1)[:, None].to(tl.float64)
    return (tl.log(units) - tl.full((), LOG_UNITS, tl.float64)).to(tl.float32)


@triton.jit
def kth(keys, k):
    """Return the k-th largest of ordered numbers [A, B] over B: [A]. 0 where there are fewer. k: [A] or a number."""
    bound = tl.max(keys, 1) * 0
    for bit in range(32):
        trial = bound | (tl.full((), 0x80000000, tl.uint32) >> bit)
        count = tl.sum((keys >= trial[:, None]).to(tl.int32), 1)
        bound = tl.where(count >= k, trial, bound)
    return bound


@triton.jit
def cut(x, top_k, top_p, min_p, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr):
    """Compute `_cut` of engine/core/distribution.py for [A, B] over B, whose largest number is 0.

    top_k, top_p, min_p: of the request.
    """
    if TOP_K:
        if top_k > 0:
            lowest = kth(ordered(x), top_k)
            x = tl.where(ordered(x) >= lowest[:, None], x, NEG_INF)
    if TOP_P:
        if top_p < 1:
            share = shares(x)
            wanted = top_p.to(tl.float64) * tl.sum(share, 1).to(tl.float64)
            keys = ordered(x)
            bound = tl.max(keys, 1) * 0
            for bit in range(32):
                trial = bound | (tl.full((), 0x80000000, tl.uint32) >> bit)
                mass = tl.sum(tl.where(keys >= trial[:, None], share, 0), 1)
                bound = tl.where(mass.to(tl.float64) >= wanted, trial, bound)
            x = tl.where(keys >= bound[:, None], x, NEG_INF)
    if MIN_P:
        x = tl.where(x >= tl.max(x, 1)[:, None] + tl.log(min_p), x, NEG_INF)
    return x - log_mass(x)


@triton.jit
def from_best(x):
    """Compute `_from_best` of engine/core/distribution.py for [A, B] over B."""
    best = tl.max(x, 1)[:, None]
    return tl.where(is_finite(best), x - best, x)


@triton.jit
def pool_distribution(
    logprobs, weight, temperature, top_k, top_p, min_p, greedy, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    MIN_P: tl.constexpr, GREEDY: tl.constexpr, BEAM: tl.constexpr, NP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Compute `pool_distribution` of engine/core/distribution.py for one request: log_p and weight [NP, CP].

    logprobs: [NP, CP], -inf in the padding. weight: [NP], -inf for dead beams. BEAM: each beam's row is warped by
    itself.
    """
    if BEAM:
        best = from_best(logprobs)
        distribution = cut(tl.div_rn(best, temperature), top_k, top_p, min_p, TOP_K, TOP_P, MIN_P)
        if GREEDY:
            distribution = tl.where(greedy & (distribution > NEG_INF), best, distribution)
        joint = weight[:, None] + distribution
        below = from_best(tl.reshape(joint, (1, NP * CP)))
        log_p = tl.reshape(below - log_mass(below), (NP, CP))
    else:
        joint = weight[:, None] + logprobs
        scaled = tl.div_rn(from_best(tl.reshape(joint, (1, NP * CP))), temperature)
        log_p = tl.reshape(cut(scaled, top_k, top_p, min_p, TOP_K, TOP_P, MIN_P), (NP, CP))
    if GREEDY:
        log_p = tl.where(greedy & (log_p > NEG_INF), joint, log_p)
    return log_p, joint
