"""The kernel of logsumexp.py in numba: the sum of exp over a row of logits.

Each lane sums up over PIECE numbers in float32, and the pieces are summed in float64, always in the same order.

Addresses are int64. Nothing checks them here; logsumexp.py does.
"""

from __future__ import annotations

from numba import njit, types

from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.simd import (
    LANES,
    add,
    exp2,
    first,
    get_bf16,
    get_f32,
    get_i64,
    load_bf16,
    load_f32,
    mul,
    put_f32,
    splat,
    sub,
    take,
    total,
)
from dsbd_cli.ops.cpu.logsumexp import LAYOUT, TOTAL

compiled = KernelCompiler("sums over the vocabulary", seconds=1, layout=LAYOUT)

# `at` is the address of a logsumexp.LogsumexpArguments, whose fields have these offsets.

(TAKEN, THREADS, ITEMS, VALUES, VALUES_ROW, COUNT, HIGHEST, OUT, NARROW) = TOTAL
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
