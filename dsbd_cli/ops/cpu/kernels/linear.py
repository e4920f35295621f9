"""The kernel of linear.py in numba: a product of float32 or bfloat16 with weights that are read from memory once.

For a few rows of x the tiles of simd.py read the weights directly from memory. For more rows they read a piece of the
weights at a time, which stays in the cache, and the sums are kept in float32 from piece to piece. Where the weights are
stored in rows, they are turned into lines piece by piece for many rows of x; a few rows of x are transposed instead.
Each sum goes from the first input to the last (bfloat16 on AMD: pair by pair). So the bits of a row do not depend on
the other rows or on the threads.

Addresses are int64. Nothing checks them here; linear.py does.
"""

from __future__ import annotations

from numba import njit, types

from dsbd_cli.ops.cpu import linear as packing
from dsbd_cli.ops.cpu.kernels.amx import GROUP, ROW, matrix_tile, multiply_rows, pack_groups, transpose_rows
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.simd import (
    BLOCKS,
    COLUMNS,
    LANES,
    LINE,
    LINE_VECTORS,
    ROWS,
    WORD,
    add,
    clear_line,
    get_i64,
    load_f32,
    pack_lines,
    product,
    store_bf16,
    store_f32,
    take,
    tile,
)
from dsbd_cli.ops.cpu.linear import LAYOUT, MULTIPLY, PACK, ROWS_AT_ONCE, SIDES
from dsbd_cli.ops.cpu.runtime import PRODUCT
from dsbd_cli.ops.processor import bfloat16_tile

compiled = KernelCompiler("linear layers", seconds=3, layout=LAYOUT)

# `at` is the address of a linear.LinearArguments, whose fields have these offsets.
assert packing.COLUMNS == COLUMNS
(P_TAKEN, _, P_ITEMS, P_ROWS, P_STEPS, P_OUT) = PACK
X, X_ROW, WEIGHTS, STEPS, PIECE, IN_ROWS, ROOM, BIAS, OUT, OUT_ROW, NARROW = MULTIPLY[len(PRODUCT) :]

float_tile = tile("float32")
# where torch multiplies bfloat16, a second float32 tile is compiled in its place and never runs
pair_tile = matrix_tile("bfloat16") if bfloat16_tile() == "amx" else tile(bfloat16_tile() or "float32")


@njit(error_model="numpy")
def prepare(at, sums):
    """Transpose the rows of x if the weights are stored in rows and read once."""
    count = get_i64(at + ROWS)
    if get_i64(at + IN_ROWS) and count <= ROWS_AT_ONCE:
        transpose_rows(get_i64(at + X), get_i64(at + X_ROW), count, get_i64(at + STEPS), sums + get_i64(at + ROOM))


@njit(error_model="numpy")
def add_up(at, block, first, count, sums):
    """Compute the sums [count, COLUMNS] of a block of outputs."""
    steps, x_row, narrow, in_rows = (
        get_i64(at + STEPS),
        get_i64(at + X_ROW),
        get_i64(at + NARROW),
        get_i64(at + IN_ROWS),
    )
    room = sums + get_i64(at + ROOM)
    if in_rows:
        weights = get_i64(at + WEIGHTS) + block * LINE_VECTORS * GROUP
        if get_i64(at + ROWS) <= ROWS_AT_ONCE:
            multiply_rows(count, room, weights, steps, room - SIDES * ROW, sums)
            return
    else:
        weights = get_i64(at + WEIGHTS) + block * steps * LINE
    for r in range(count):
        clear_line(sums + r * LINE)
    x = get_i64(at + X) + first * x_row
    done = types.int64(0)
    while done < steps:
        part = min(get_i64(at + PIECE), steps - done)
        lines = weights + done * LINE
        if in_rows:
            lines = room
            pack_groups(weights, done, part, lines)
        if narrow:
            pair_tile(count, x + done * WORD, x_row, lines, part, sums)
        else:
            float_tile(count, x + done * WORD, x_row, lines, part, sums)
        done += part


@njit(error_model="numpy")
def finish(at, block, first, count, sums):
    narrow, bias = get_i64(at + NARROW), get_i64(at + BIAS)
    unit = types.int64(2) if narrow else types.int64(WORD)
    column = block % get_i64(at + BLOCKS) * COLUMNS
    out = get_i64(at + OUT) + first * get_i64(at + OUT_ROW) + column * unit
    for r in range(count):
        for v in range(LINE_VECTORS):
            value = load_f32(sums + r * LINE + v * LANES * WORD)
            if bias != 0:
                value = add(value, load_f32(bias + block * LINE + v * LANES * WORD))
            if narrow:
                store_bf16(out + v * LANES * 2, value)
            else:
                store_f32(out + v * LANES * WORD, value)
        out += get_i64(at + OUT_ROW)


@njit(error_model="numpy")
def add_up_and_finish(at, block, first, count, sums):
    add_up(at, block, first, count, sums)
    finish(at, block, first, count, sums)


share_out = product(add_up_and_finish, prepare)


@compiled.addressed
def multiply(at):
    """Compute [rows, outputs], for the items that no other thread has taken."""
    share_out(at)


@compiled.addressed
def pack_rows(at):
    """Write blocks of rows, whose addresses are given, as lines of words."""
    while True:
        block = take(at + P_TAKEN)
        if block >= get_i64(at + P_ITEMS):
            return
        steps = get_i64(at + P_STEPS)
        pack_lines(get_i64(at + P_ROWS) + block * COLUMNS * 8, steps, get_i64(at + P_OUT) + block * steps * LINE)
