"""Products of rows with lines of weights by the matrix units of Intel's processors (AMX, Sapphire Rapids and later).

A tile register holds up to SIDES rows of 64 bytes. One instruction adds to [rows, LANES] sums the product of [rows,
SIDES words] of x with [SIDES, LANES words] of weights; a word is two bfloat16 or four integers. The lines that simd.py
describes have just this layout. The processor sums each row by itself, from the first word to the last, so the bits of
a row do not depend on the other rows (Intel SDM, TDPBF16PS and TDPBUSD).

Each thread has its own tile registers. A product shapes them, and releases them when it is done. Registers 0 to 3 hold
sums, 4 and 5 x, 6 and 7 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from dsbd_cli.ops.cpu.kernels.simd import (
    I8,
    I16,
    I64,
    LANES,
    LINE,
    LINE_VECTORS,
    WORD,
    get_i64,
    operation,
    pointer,
    prefetch,
    transpose_f32,
    transpose_some,
)
from dsbd_cli.ops.cpu.linear import SIDES
from dsbd_cli.ops.processor import Processor, current

ROW = SIDES * WORD  # bytes
REGISTERS = 8
INSTRUCTIONS = {"bfloat16": "llvm.x86.tdpbf16ps", "int8": "llvm.x86.tdpbusd"}
VOID, ADDRESS = ir.VoidType(), I8.as_pointer()


def _intrinsic(builder: Any, name: str, *arguments: Any) -> None:
    """Emit a call of an instruction, but nothing for a processor without matrix units.

    Such a processor compiles this code, too, though it never runs it, and LLVM ends the process when it has to compile
    an instruction that the processor lacks.
    """
    if current() != Processor.AMX:
        return
    kind = ir.FunctionType(VOID, [value.type for value in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _register(number: int) -> Any:
    return ir.Constant(I8, number)


def _load(number: int) -> Any:
    def load(builder: Any, address: Any, stride: Any) -> None:
        source = builder.inttoptr(address, ADDRESS)
        _intrinsic(builder, "llvm.x86.tileloadd64", _register(number), source, stride)

    return operation(types.void, types.int64, types.int64)(load)


def _store(number: int) -> Any:
    def store(builder: Any, address: Any, stride: Any) -> None:
        target = builder.inttoptr(address, ADDRESS)
        _intrinsic(builder, "llvm.x86.tilestored64", _register(number), target, stride)

    return operation(types.void, types.int64, types.int64)(store)


def _multiply(name: str, sums: int, x: int, weights: int) -> Any:
    def multiply(builder: Any) -> None:
        _intrinsic(builder, name, _register(sums), _register(x), _register(weights))

    return operation(types.void)(multiply)


def _configure(builder: Any, rows: list[Any], widths: list[Any]) -> None:
    """Set the number of rows and the bytes of a row of each register, and clear all registers."""
    config = cgutils.alloca_once(builder, ir.ArrayType(I64, 8))
    start = builder.ptrtoint(config, I64)
    for offset in range(0, 64, 8):
        builder.store(ir.Constant(I64, 0), pointer(builder, builder.add(start, ir.Constant(I64, offset)), I64))
    builder.store(_register(1), pointer(builder, start, I8))  # the palette, of which there is one
    for number in range(REGISTERS):
        at = builder.add(start, ir.Constant(I64, 16 + 2 * number))
        builder.store(builder.trunc(widths[number], I16), pointer(builder, at, I16), align=1)
        at = builder.add(start, ir.Constant(I64, 48 + number))
        builder.store(builder.trunc(rows[number], I8), pointer(builder, at, I8), align=1)
    _intrinsic(builder, "llvm.x86.ldtilecfg", builder.bitcast(config, ADDRESS))


@operation(types.void, types.int64, types.int64, types.int64)
def shape(builder: Any, upper: Any, lower: Any, words: Any) -> None:
    """Shape the registers. x has `upper` rows in register 4 and `lower` in register 5 (0: not used), of `words` words.

    Registers 0 and 1 hold the sums of the upper rows, 2 and 3 those of the lower rows. With lower 0, registers 2 and 3
    hold sums of the upper rows, too.
    """
    none = builder.icmp_signed("==", lower, ir.Constant(I64, 0))
    other = builder.select(none, upper, lower)
    width, whole = builder.mul(words, ir.Constant(I64, WORD)), ir.Constant(I64, ROW)
    _configure(
        builder,
        [upper, upper, other, other, upper, other, words, words],
        [whole, whole, whole, whole, width, width, whole, whole],
    )


@operation(types.void, types.int64)
def shape_of_rows(builder: Any, width: Any) -> None:
    """Shape the registers for weights in rows: sums, and x in register 5, have `width` bytes in a row."""
    whole = ir.Constant(I64, ROW)
    _configure(builder, [ir.Constant(I64, SIDES)] * REGISTERS, [*[width] * 4, whole, width, whole, whole])


@operation(types.void)
def release(builder: Any) -> None:
    """Release the registers, so that a switch of threads need not save them."""
    _intrinsic(builder, "llvm.x86.tilerelease")


@operation(types.void, types.int64)
def prefetch_lines(builder: Any, line: Any) -> None:
    """Prefetch the SIDES lines behind the SIDES lines at `line`."""
    for offset in range(0, SIDES * LINE, ROW):
        prefetch(builder, builder.add(line, ir.Constant(I64, SIDES * LINE + offset)))


@operation(types.void, types.int64, types.int64)
def prefetch_rows(builder: Any, address: Any, row: Any) -> None:
    """Prefetch ROW bytes of each of SIDES rows, which are `row` bytes apart."""
    for _ in range(SIDES):
        prefetch(builder, address)
        address = builder.add(address, row)


def _clear(number: int) -> Any:
    def clear(builder: Any) -> None:
        _intrinsic(builder, "llvm.x86.tilezero", _register(number))

    return operation(types.void)(clear)


clear_0, clear_1, clear_2, clear_3 = map(_clear, range(4))
load_0, load_1, load_2, load_3, load_4, load_5, load_6, load_7 = map(_load, range(REGISTERS))
store_0, store_1, store_2, store_3 = map(_store, range(4))


def matrix_tile(kind: str) -> Callable[..., Any]:
    """Return a function of numba, as `simd.tile` does: sums [count, COLUMNS] += x [count, ..] times `steps` lines of
    weights. kind: bfloat16 or int8."""
    name = INSTRUCTIONS[kind]
    add_0, add_1, add_2, add_3 = (_multiply(name, sums, 4, 6 + sums % 2) for sums in range(4))
    lower_2, lower_3 = _multiply(name, 2, 5, 6), _multiply(name, 3, 5, 7)
    side = types.int64(LANES * WORD)
    line_bytes, chunk = types.int64(LINE), types.int64(SIDES * LINE)

    @njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def up_to_one_tile(x: Any, x_row: Any, weights: Any, steps: Any, sums: Any) -> None:
        """Multiply up to SIDES rows by the whole block at once, so that the weights are read once."""
        load_0(sums, line_bytes)
        load_1(sums + side, line_bytes)
        load_2(sums + 2 * side, line_bytes)
        load_3(sums + 3 * side, line_bytes)
        step = types.int64(0)
        while step < steps:
            line = weights + step * LINE
            prefetch_lines(line)
            load_4(x + step * WORD, x_row)
            load_6(line, line_bytes)
            add_0()
            load_7(line + side, line_bytes)
            add_1()
            load_6(line + 2 * side, line_bytes)
            add_2()
            load_7(line + 3 * side, line_bytes)
            add_3()
            step += SIDES
        store_0(sums, line_bytes)
        store_1(sums + side, line_bytes)
        store_2(sums + 2 * side, line_bytes)
        store_3(sums + 3 * side, line_bytes)

    @njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def up_to_two_tiles(x: Any, x_row: Any, weights: Any, steps: Any, sums: Any, fresh: Any) -> None:
        """Multiply up to 2 * SIDES rows by half of the block at a time, each tile of weights twice. fresh: the weights
        come from memory, and not from the cache."""
        below = SIDES * x_row
        for half in range(2):
            to = sums + half * 2 * side
            low = to + chunk
            load_0(to, line_bytes)
            load_1(to + side, line_bytes)
            load_2(low, line_bytes)
            load_3(low + side, line_bytes)
            step = types.int64(0)
            while step < steps:
                line = weights + step * LINE + half * 2 * side
                if fresh and half == 0:
                    prefetch_lines(line)
                load_4(x + step * WORD, x_row)
                load_5(x + step * WORD + below, x_row)
                load_6(line, line_bytes)
                load_7(line + side, line_bytes)
                add_0()
                add_1()
                lower_2()
                lower_3()
                step += SIDES
            store_0(to, line_bytes)
            store_1(to + side, line_bytes)
            store_2(low, line_bytes)
            store_3(low + side, line_bytes)

    def add_up(count, x, x_row, weights, steps, sums):  # type: ignore[no-untyped-def]
        whole = steps // SIDES * SIDES
        for part in range(2):
            first = types.int64(0) if part == 0 else whole
            length = whole if part == 0 else steps - whole
            words = types.int64(SIDES) if part == 0 else length  # a last tile may have fewer
            low = types.int64(0)
            while length > 0 and low < count:
                upper = min(SIDES, count - low)
                lower = min(SIDES, count - low - upper)
                at, line, to = x + low * x_row + first * WORD, weights + first * LINE, sums + low * LINE
                shape(upper, lower, words)
                if lower > 0:
                    up_to_two_tiles(at, x_row, line, length, to, low == 0)
                else:
                    up_to_one_tile(at, x_row, line, length, to)
                low += upper + lower
        release()

    made: Callable[..., Any] = njit(error_model="numpy")(add_up)
    return made


# Weights in rows, as a checkpoint has them. Here SIDES rows of weights are the left factor of a product, and transposed
# words of x the right one. Two int64 describe a group of SIDES rows: where it begins, and how many bytes its rows are
# apart.

GROUP = 16  # bytes of these two
BEGIN = 256  # bytes of a row that are prefetched
_name = INSTRUCTIONS["bfloat16"]
upper_0, lower_1 = _multiply(_name, 0, 4, 5), _multiply(_name, 1, 6, 5)
rows_0, rows_1, rows_2, rows_3 = (_multiply(_name, sums, 4, x) for sums, x in enumerate((5, 6, 7, 5)))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def transpose_rows(x: Any, x_row: Any, count: Any, steps: Any, transposed: Any) -> None:
    """Transpose `count` rows of x into [count / SIDES, steps, SIDES] words, or into [steps, count] where count is less
    than SIDES. The last row is repeated to fill up the last SIDES. Up to ROW bytes behind the last word are written."""
    line = min(count, SIDES) * WORD
    for low in range(0, count, SIDES):
        for step in range(0, steps, SIDES):
            transpose_some(x + low * x_row + step * WORD, x_row, transposed, line, count - low - 1)
            transposed += SIDES * line


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def pack_groups(groups: Any, first: Any, steps: Any, lines: Any) -> None:
    """Write words first .. first + steps of COLUMNS rows, which `groups` describes, as lines."""
    for v in range(LINE_VECTORS):
        source, row = get_i64(groups + v * GROUP) + first * WORD, get_i64(groups + v * GROUP + 8)
        for step in range(0, steps, SIDES):
            prefetch_rows(source + SIDES * row + step * WORD, row)
            transpose_f32(source + step * WORD, row, lines + step * LINE + v * ROW, types.int64(LINE))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _up_to_one_tile(line: Any, transposed: Any, groups: Any, steps: Any, spare: Any, sums: Any) -> None:
    """Multiply up to SIDES rows of x by 2 * SIDES rows of weights at a time. line: bytes of a line of the transposed x.

    Only the beginnings of the next rows are prefetched, because prefetching all of them took up to a fifth longer.
    """
    side = types.int64(ROW)
    for v in range(0, LINE_VECTORS, 2):
        upper, upper_row = get_i64(groups + v * GROUP), get_i64(groups + v * GROUP + 8)
        lower, lower_row = get_i64(groups + (v + 1) * GROUP), get_i64(groups + (v + 1) * GROUP + 8)
        clear_0()
        clear_1()
        step = types.int64(0)
        while step < steps:
            load_5(transposed + step * line, line)
            load_4(upper + step * WORD, upper_row)
            upper_0()
            load_6(lower + step * WORD, lower_row)
            lower_1()
            step += SIDES
        for further in range(0, BEGIN, ROW):
            prefetch_rows(upper + 2 * SIDES * upper_row + further, upper_row)
            prefetch_rows(lower + 2 * SIDES * lower_row + further, lower_row)
        store_0(spare, side)
        transpose_f32(spare, side, sums + v * ROW, types.int64(LINE))
        store_1(spare, side)
        transpose_f32(spare, side, sums + (v + 1) * ROW, types.int64(LINE))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _up_to_four_tiles(count: Any, transposed: Any, groups: Any, steps: Any, spare: Any, sums: Any) -> None:
    """Multiply more than SIDES rows of x, up to 4 * SIDES, by SIDES rows of weights at a time."""
    side, part, chunk = types.int64(ROW), steps * ROW, types.int64(SIDES * LINE)
    for v in range(LINE_VECTORS):
        weights, row = get_i64(groups + v * GROUP), get_i64(groups + v * GROUP + 8)
        clear_0()
        clear_1()
        clear_2()
        clear_3()
        step = types.int64(0)
        while step < steps:
            prefetch_rows(weights + SIDES * row + step * WORD, row)
            x = transposed + step * ROW
            load_4(weights + step * WORD, row)
            load_5(x, side)
            rows_0()
            load_6(x + part, side)
            rows_1()
            if count > 2 * SIDES:
                load_7(x + 2 * part, side)
                rows_2()
            if count > 3 * SIDES:
                load_5(x + 3 * part, side)
                rows_3()
            step += SIDES
        to = sums + v * ROW
        store_0(spare, side)
        transpose_f32(spare, side, to, types.int64(LINE))
        store_1(spare, side)
        transpose_f32(spare, side, to + chunk, types.int64(LINE))
        if count > 2 * SIDES:
            store_2(spare, side)
            transpose_f32(spare, side, to + 2 * chunk, types.int64(LINE))
        if count > 3 * SIDES:
            store_3(spare, side)
            transpose_f32(spare, side, to + 3 * chunk, types.int64(LINE))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def multiply_rows(count: Any, transposed: Any, groups: Any, steps: Any, spare: Any, sums: Any) -> None:
    """Multiply up to 4 * SIDES rows of x, as `transpose_rows` wrote them, by COLUMNS rows of weights, which are read
    once.

    sums: [count, COLUMNS], filled up to a multiple of SIDES rows. spare: room for SIDES rows of sums.
    """
    line = min(count, SIDES) * WORD
    shape_of_rows(line)
    if count <= SIDES:
        _up_to_one_tile(line, transposed, groups, steps, spare, sums)
    else:
        _up_to_four_tiles(count, transposed, groups, steps, spare, sums)
    release()
