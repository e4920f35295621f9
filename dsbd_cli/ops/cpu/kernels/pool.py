"""Parts of the kernels of an iteration: tensors as addresses, noise, the distribution of a pool of pairs (node, token),
and draws from it.

A tensor is its address here. `whole`, `real` and `mark` read its number at a place (int64, float32, bool), and nothing
checks the place. Arrays of numba would take twice as long to compile. `at` is the address of the kernel's Arguments
(ops/cpu/iteration.py), whose fields have the offsets AT.

The functions compute what those of engine/core compute, whose docstrings say why. Sums of shares are sums of integers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from dsbd_cli.ops import layout
from dsbd_cli.ops.cpu.iteration import AT
from dsbd_cli.ops.cpu.kernels.simd import F32, I8, I32, I64, get_i32, get_i64, loaded, operation, pointer

WHOLE, REAL = 8, 4  # bytes of an int64 and of a float32
NONE, ZERO, ONE = np.float32(-math.inf), np.float32(0), np.float32(1)
GOLDEN, MIX_A, MIX_B, MIX_TOKEN = (
    np.uint64(number) for number in (layout.GOLDEN, layout.MIX_A, layout.MIX_B, layout.MIX_TOKEN)
)
S12, S27, S30, S31 = (np.uint64(bits) for bits in (12, 27, 30, 31))
SHARE_UNITS, LOG_UNITS = np.float32(layout.SHARE_UNITS), math.log(layout.SHARE_UNITS)
NO_SHARE = np.float32(layout.NO_SHARE)
SIGN, ALL_BITS = np.uint32(0x80000000), np.uint32(0xFFFFFFFF)
SLACK = 1.0001  # of a bound on a key, much more than the rounding of its parts


@operation(types.uint32, types.float32)
def bits_of(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, I32)


def _at(builder: Any, tensor: Any, index: Any, size: int) -> Any:
    return builder.add(tensor, builder.mul(index, ir.Constant(I64, size)))


@operation(types.int64, types.int64, types.int64)
def whole(builder: Any, tensor: Any, index: Any) -> Any:
    return loaded(builder, _at(builder, tensor, index, WHOLE), I64, WHOLE)


@operation(types.void, types.int64, types.int64, types.int64)
def put_whole(builder: Any, tensor: Any, index: Any, value: Any) -> Any:
    builder.store(value, pointer(builder, _at(builder, tensor, index, WHOLE), I64), align=WHOLE)


@operation(types.float32, types.int64, types.int64)
def real(builder: Any, tensor: Any, index: Any) -> Any:
    return loaded(builder, _at(builder, tensor, index, REAL), F32, REAL)


@operation(types.void, types.int64, types.int64, types.float32)
def put_real(builder: Any, tensor: Any, index: Any, value: Any) -> Any:
    builder.store(value, pointer(builder, _at(builder, tensor, index, REAL), F32), align=REAL)


@operation(types.boolean, types.int64, types.int64)
def mark(builder: Any, tensor: Any, index: Any) -> Any:
    return builder.icmp_unsigned("!=", loaded(builder, builder.add(tensor, index), I8, 1), ir.Constant(I8, 0))


@operation(types.void, types.int64, types.int64, types.boolean)
def put_mark(builder: Any, tensor: Any, index: Any, value: Any) -> Any:
    builder.store(builder.zext(value, I8), pointer(builder, builder.add(tensor, index), I8), align=1)


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
        total = types.int64(0)
        for m in range(first, last):
            if ordered(real(x, m)) >= trial:
                total += whole(share, m) if by_mass else 1
        if types.float64(total) >= wanted:
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
def pool_distribution(at, row, weight, joint, log_p, share, nodes, candidates):
    """Do what `pool_distribution` does. joint: log-probabilities of the pairs, to which the weights [n] are added.
    Write the distribution to log_p. Return the sum of its shares."""
    temperature, top_k = real(get_i64(at + AT.warp_temperature), row), whole(get_i64(at + AT.warp_top_k), row)
    top_p, min_p = real(get_i64(at + AT.warp_top_p), row), real(get_i64(at + AT.warp_min_p), row)
    greedy, by_beam = mark(get_i64(at + AT.warp_greedy), row), get_i64(at + AT.by_beam) != 0
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
def state_after(at, state, token):
    """Return the stop state after a token."""
    if get_i64(at + AT.stopping) == 0:
        return 1
    return get_i32(get_i64(at + AT.endings_stops) + 4 * (state * get_i64(at + AT.vocabulary) + token))


@njit(error_model="numpy")
def ends(at, state, token):
    """Return whether a token ends the sequence of a node in stop state `state`."""
    if mark(get_i64(at + AT.endings_eos), token):
        return True
    return get_i64(at + AT.stopping) != 0 and state_after(at, state, token) == 0


@njit(error_model="numpy")
def draw(
    at, best, chosen, most, key, log_p, share, total, noisy, path, tokens, node, nodes, candidates, state, any_end
):  # fmt: skip
    """Draw the `most` pairs of the largest keys from a pool, live ones or, with any_end, all. Write their keys and
    places, best first, and return how many there are. Of equal keys the first is drawn first.

    key: [M], to be written; a pair below the last one drawn may have -inf, if `most` are drawn. log_p, share, total:
    the distribution. noisy: its keys are log P + G(x, v). path, tokens, state: of all nodes. node: nodes of the pool.
    """
    held, least, scale = 0, NONE, 0.0
    for n in range(nodes):
        at_node = whole(node, n)
        for c in range(candidates):
            m, token = n * candidates + c, whole(tokens, at_node * candidates + c)
            value = real(log_p, m)
            put_real(key, m, NONE)
            if not value > NONE:
                continue
            if noisy:
                u = uniform(whole(path, at_node), token + 1)
                # G = -log(-log(1 - u)) <= -log(u): most pairs of a large vocabulary need no logarithm
                if held == most and u > scale * types.float64(whole(share, m) + 1):
                    continue
                value += types.float32(-math.log(-math.log(1.0 - u)))
            put_real(key, m, value)
            if value > least and (any_end or not ends(at, whole(state, at_node), token)):
                held = insert(best, chosen, held, most, value, m)
                if held == most:
                    least = real(best, held - 1)
                    scale = SLACK * math.exp(-types.float64(least)) / types.float64(max(total, 1))
    return held
