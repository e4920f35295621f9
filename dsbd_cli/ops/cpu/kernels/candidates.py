"""The kernels of candidates.py and logsumexp.py in numba: the best tokens of a node, and the sum of exp over a row of
logits.

In the sum each lane sums up over PIECE numbers in float32, and the pieces are summed in float64, always in the same
order. Addresses are int64. Nothing checks them here; the two modules do.
"""

from __future__ import annotations

from numba import njit, types

from dsbd_cli.ops.cpu import logsumexp
from dsbd_cli.ops.cpu.candidates import CANDIDATES, LAYOUT
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.pool import NONE, REAL, WHOLE, insert, put_real, put_whole, real, whole
from dsbd_cli.ops.cpu.kernels.simd import (
    LANES,
    add,
    exp2,
    first,
    get_bf16,
    get_f32,
    get_i64,
    larger,
    largest,
    load_bf16,
    load_f32,
    mul,
    put_f32,
    splat,
    sub,
    take,
    total,
)

compiled = KernelCompiler("iterations", seconds=11, layout=LAYOUT + logsumexp.LAYOUT)

# `at` is the address of a logsumexp.LogsumexpArguments, whose fields have these offsets.

(TAKEN, THREADS, ITEMS, VALUES, VALUES_ROW, COUNT, HIGHEST, OUT, NARROW) = logsumexp.TOTAL
LOG2_E = 1.4426950408889634
WORD = 4  # bytes of a float32
FOUR = 4 * LANES  # numbers that are worked on at once: their sums stay in registers
PIECE = 64 * FOUR


@njit(error_model="numpy")
def shares(values, narrow, start, highest):
    """Return exp(x - highest) of the LANES numbers x from `start` on."""
    vector = load_bf16(values + start * 2) if narrow else load_f32(values + start * WORD)
    return exp2(mul(sub(vector, highest), splat(types.float32(LOG2_E))))


@njit(error_model="numpy")
def row_total(values, narrow, count, highest):
    """Return the sum of exp(x - highest) over all numbers x of a row."""
    sum_of_row, start = types.float64(0), types.int64(0)
    most = splat(highest)
    whole = count - count % FOUR
    while start < whole:
        end = min(start + PIECE, whole)
        a = b = c = d = splat(types.float32(0))
        while start < end:
            a = add(a, shares(values, narrow, start, most))
            b = add(b, shares(values, narrow, start + LANES, most))
            c = add(c, shares(values, narrow, start + 2 * LANES, most))
            d = add(d, shares(values, narrow, start + 3 * LANES, most))
            start += FOUR
        sum_of_row += total(add(add(a, b), add(c, d)))
    while start < count:
        number = get_bf16(values + start * 2) if narrow else get_f32(values + start * WORD)
        sum_of_row += first(exp2(mul(sub(splat(number), most), splat(types.float32(LOG2_E)))))
        start += 1
    return types.float32(sum_of_row)


@compiled.addressed
def totals(at):
    """Write the sum of each row that no other thread has taken."""
    take(at + THREADS)
    while True:
        row = take(at + TAKEN)
        if row >= get_i64(at + ITEMS):
            return
        values = get_i64(at + VALUES) + row * get_i64(at + VALUES_ROW)
        highest = get_f32(get_i64(at + HIGHEST) + row * WORD)
        total_of_row = row_total(values, get_i64(at + NARROW), get_i64(at + COUNT), highest)
        put_f32(get_i64(at + OUT) + row * WORD, total_of_row)


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
