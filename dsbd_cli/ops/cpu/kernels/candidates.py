"""The kernel of candidates.py in numba: the best tokens of a node, and the sum of its distribution."""

from __future__ import annotations

from numba import njit

from dsbd_cli.ops.cpu.candidates import CANDIDATES, LAYOUT
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.logsumexp import FOUR, row_total
from dsbd_cli.ops.cpu.kernels.pool import NONE, REAL, WHOLE, insert, put_real, put_whole, real, whole
from dsbd_cli.ops.cpu.kernels.simd import (
    LANES,
    get_bf16,
    get_f32,
    get_i64,
    larger,
    largest,
    load_bf16,
    load_f32,
    splat,
    take,
)

compiled = KernelCompiler("iterations", seconds=11, layout=LAYOUT)


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
    chosen, best = work, work + WHOLE * count
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
                held = insert(best, chosen, held, count, value, v)
    tokens = get_i64(at + CANDIDATES.tokens) + WHOLE * item * count
    token_logits = get_i64(at + CANDIDATES.best) + REAL * item * count
    for c in range(count):  # in ascending order of the tokens
        i, token = c, whole(chosen, c)
        while i > 0 and whole(tokens, i - 1) > token:
            put_whole(tokens, i, whole(tokens, i - 1))
            put_real(token_logits, i, real(token_logits, i - 1))
            i -= 1
        put_whole(tokens, i, token)
        put_real(token_logits, i, real(best, c))
    put_real(get_i64(at + CANDIDATES.highest), item, top)
    put_real(get_i64(at + CANDIDATES.total), item, row_total(values, narrow, vocabulary, top))


@compiled.addressed
def candidates(at):
    """Select the candidates of each node that no other thread has taken."""
    work = get_i64(at + CANDIDATES.work) + take(at + CANDIDATES.threads) * get_i64(at + CANDIDATES.work_bytes)
    while True:
        item = take(at + CANDIDATES.taken)
        if item >= get_i64(at + CANDIDATES.items):
            return
        select_row(at, item, work)
