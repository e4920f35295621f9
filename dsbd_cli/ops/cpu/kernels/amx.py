"""Products of rows with lines of weights by the matrix units of Intel's processors (AMX, Sapphire Rapids and later).

A tile register holds up to SIDES rows of 64 bytes. One instruction adds to [rows, LANES] sums the product of [rows,
SIDES words] of x with [SIDES, LANES words] of weights; a word is two bfloat16 or four integers. The lines that simd.py
describes are such weights as they lie. The processor sums each row by itself, from the first word to the last, so a
row's bits are its own, whatever rows there are beside it (Intel SDM, TDPBF16PS and TDPBUSD).

The tile registers belong to a thread. A product shapes them, and gives them back when it is done. Registers 0 to 3 hold
sums, 4 and 5 x, 6 and 7 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from dsbd_cli.ops.cpu.kernels.simd import I8, I16, I64, LANES, LINE, WORD, ask_for, operation, pointer

SIDES = 16  # rows of a tile register, and words of one row
ROW = SIDES * WORD  # bytes
REGISTERS = 8
INSTRUCTIONS = {"bfloat16": "llvm.x86.tdpbf16ps", "int8": "llvm.x86.tdpbusd"}
VOID, ADDRESS = ir.VoidType(), I8.as_pointer()


def _intrinsic(builder: Any, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(VOID, [value.type for value in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _register(number: int) -> Any:
    return ir.Constant(I8, number)


def _load(number: int) -> Any:
    def load(builder: Any, address: Any, stride: Any) -> None:
        place = builder.inttoptr(address, ADDRESS)
        _intrinsic(builder, "llvm.x86.tileloadd64", _register(number), place, stride)

    return operation(types.void, types.int64, types.int64)(load)


def _store(number: int) -> Any:
    def store(builder: Any, address: Any, stride: Any) -> None:
        place = builder.inttoptr(address, ADDRESS)
        _intrinsic(builder, "llvm.x86.tilestored64", _register(number), place, stride)

    return operation(types.void, types.int64, types.int64)(store)


def _multiply(name: str, sums: int, x: int, weights: int) -> Any:
    def multiply(builder: Any) -> None:
        _intrinsic(builder, name, _register(sums), _register(x), _register(weights))

    return operation(types.void)(multiply)


@operation(types.void, types.int64, types.int64, types.int64)
def shape(builder: Any, upper: Any, lower: Any, words: Any) -> None:
    """Give the registers their shapes and clear them: x has `upper` rows in register 4, `lower` in 5 (0: not used),
    sums in 0 and 1 and in 2 and 3 alike, and each row of x `words` words.

    lower 0: registers 2 and 3 belong to the upper rows, too.
    """
    none = builder.icmp_signed("==", lower, ir.Constant(I64, 0))
    other = builder.select(none, upper, lower)
    rows = [upper, upper, other, other, upper, other, words, words]
    width = builder.mul(words, ir.Constant(I64, WORD))
    widths = [ir.Constant(I64, ROW)] * REGISTERS
    widths[4] = widths[5] = width
    config = cgutils.alloca_once(builder, ir.ArrayType(I64, 8))
    start = builder.ptrtoint(config, I64)
    for place in range(0, 64, 8):
        builder.store(ir.Constant(I64, 0), pointer(builder, builder.add(start, ir.Constant(I64, place)), I64))
    builder.store(_register(1), pointer(builder, start, I8))  # the palette, of which there is one
    for number in range(REGISTERS):
        at = builder.add(start, ir.Constant(I64, 16 + 2 * number))
        builder.store(builder.trunc(widths[number], I16), pointer(builder, at, I16), align=1)
        at = builder.add(start, ir.Constant(I64, 48 + number))
        builder.store(builder.trunc(rows[number], I8), pointer(builder, at, I8), align=1)
    _intrinsic(builder, "llvm.x86.ldtilecfg", builder.bitcast(config, ADDRESS))


@operation(types.void)
def release(builder: Any) -> None:
    """Give the registers back, which a switch of threads need not keep then."""
    _intrinsic(builder, "llvm.x86.tilerelease")


@operation(types.void, types.int64)
def ask_for_lines(builder: Any, line: Any) -> None:
    """Bring the SIDES lines behind these into the cache."""
    for place in range(0, SIDES * LINE, ROW):
        ask_for(builder, builder.add(line, ir.Constant(I64, SIDES * LINE + place)))


load_0, load_1, load_2, load_3, load_4, load_5, load_6, load_7 = map(_load, range(REGISTERS))
store_0, store_1, store_2, store_3 = map(_store, range(4))


def matrix_tile(kind: str) -> Callable[..., Any]:
    """A function of numba as `simd.tile` makes: sums [count, COLUMNS] += x [count, ..] times steps lines of weights.
    kind: bfloat16 or int8."""
    name = INSTRUCTIONS[kind]
    add_0, add_1, add_2, add_3 = (_multiply(name, sums, 4, 6 + sums % 2) for sums in range(4))
    lower_2, lower_3 = _multiply(name, 2, 5, 6), _multiply(name, 3, 5, 7)
    side = types.int64(LANES * WORD)
    line_bytes, chunk = types.int64(LINE), types.int64(SIDES * LINE)

    @njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def few(x: Any, x_row: Any, weights: Any, steps: Any, sums: Any) -> None:
        """Up to SIDES rows: the whole block at once, so that the weights are read once."""
        load_0(sums, line_bytes)
        load_1(sums + side, line_bytes)
        load_2(sums + 2 * side, line_bytes)
        load_3(sums + 3 * side, line_bytes)
        step = types.int64(0)
        while step < steps:
            line = weights + step * LINE
            ask_for_lines(line)
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
    def more(x: Any, x_row: Any, weights: Any, steps: Any, sums: Any, fresh: Any) -> None:
        """Up to 2 * SIDES rows, half of the block at a time: a tile of weights is multiplied twice. fresh: the weights
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
                    ask_for_lines(line)
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
                    more(at, x_row, line, length, to, low == 0)
                else:
                    few(at, x_row, line, length, to)
                low += upper + lower
        release()

    made: Callable[..., Any] = njit(error_model="numpy")(add_up)
    return made
