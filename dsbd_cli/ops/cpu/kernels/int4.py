"""The kernels of int4.py in numba: they make groups of four-bit weights, and multiply them.

A block of COLUMNS outputs is stored group by group. A group of GROUP inputs has four lines of words. A word of line l
holds the inputs 8 l .. 8 l + 7 of its column: the first four in the lower halves of its bytes, the others in the upper
halves. Scales and offsets of the columns follow, in float16.

A product multiplies levels by the integers of x, exactly, or the bytes of a table that stand in their place. Each
group of x has a step of its own. Scale times (sum * step) and offset times (sum of x * step) are added to a float32
sum, group by group from the first to the last. So the bits of a row do not depend on the other rows, on the threads or
on the processor.

Addresses are int64. Nothing checks them here; int4.py does.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from llvmlite import ir
from numba import njit, types

from dsbd_cli.ops.cpu.blocks import MOST, SPARE
from dsbd_cli.ops.cpu.int4 import GROUP_BYTES, LAYOUT, MOST_LEVEL, PACK_BLOCKS, SHRINKS
from dsbd_cli.ops.cpu.int8 import SMALLEST
from dsbd_cli.ops.cpu.kernels.blocks import (
    BLOCK_OFFSETS,
    BLOCK_SCALES,
    BLOCK_TABLE,
    NUMBERS,
    SHIFT,
    SIZE,
    unpack_levels,
    unpack_scales,
)
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.int8 import (
    LEVELS,
    LEVELS_ROW,
    OFFSETS,
    OUTLIER_WORDS,
    PIECE,
    QUADS,
    TABLE,
    W_INPUTS,
    W_ITEMS,
    W_KEPT,
    W_NARROW,
    W_OUT,
    W_ROWS,
    W_SCALES,
    W_SPARE,
    W_SPARE_BYTES,
    W_TAKEN,
    W_THREADS,
    WEIGHTS,
    add_up_outliers,
    finishing,
    magnitude,
)
from dsbd_cli.ops.cpu.kernels.simd import (
    AHEAD,
    CHUNK,
    COLUMNS,
    F32,
    I32,
    I64,
    INSTRUCTIONS,
    LANES,
    LANES_TYPE,
    LINE,
    ROUND,
    VECTOR,
    WHOLES,
    WIDE,
    WORD,
    add,
    called,
    clear_line,
    divide,
    fma,
    get_f32,
    get_i64,
    get_u8,
    halves,
    larger,
    load_f32,
    loaded,
    mul,
    operation,
    pack_lines,
    pointer,
    prefetch,
    product,
    put_f32,
    put_i32,
    smaller,
    splat,
    splatted,
    store_f32,
    sub,
    take,
)
from dsbd_cli.ops.memory import CACHE_LINE
from dsbd_cli.ops.processor import int8_tile
from dsbd_cli.ops.quantized_weight import GROUP

compiled = KernelCompiler("int4 layers", seconds=3, layout=LAYOUT)

LINES = GROUP // 8  # of a group
Numbers = Literal["levels", "table", "bytes"]  # of weights: u4, the bytes of a table that u4 stand for, bytes
MOST_ROWS = 4  # of a tile
PAIR = 2 * WORD  # of a group of x: the sum of its integers times its step, and the step
HALVES, VECTOR_BYTES = ir.VectorType(ir.HalfType(), LANES), LANES * WORD
HALF = ir.VectorType(I32, LANES // 2)
BYTES, SHORTS = ir.VectorType(ir.IntType(8), 2 * LANES), ir.VectorType(ir.IntType(16), LANES)
# `at` is the address of an int4.PackBlocksArguments, whose fields have these offsets.
(B_TAKEN, B_THREADS, B_ITEMS, B_ROWS, B_INPUTS, B_SCALES, B_OUT, B_SPARE, B_SPARE_BYTES, B_OUTLIERS, B_OUTLIER_COUNT,
 B_OUTLIER_WEIGHTS) = PACK_BLOCKS  # fmt: skip
KIND = "dpbusd" if int8_tile() == "amx" else int8_tile() or "signs"


def _plus(builder: Any, address: Any, distance: int) -> Any:
    return builder.add(address, ir.Constant(I64, distance))


def _joined(builder: Any, parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else builder.shuffle_vector(*parts, ir.Constant(WHOLES, [*range(LANES)]))


def _looked_up(builder: Any, table: Any, levels: Any) -> Any:
    """Return the bytes of a table in place of levels. table: its 16 bytes, repeated."""
    name, size = ("llvm.x86.avx512.pshuf.b.512", 4 * LANES) if WIDE else ("llvm.x86.avx2.pshuf.b", 2 * LANES)
    kind, words = ir.VectorType(ir.IntType(8), size), ir.VectorType(I32, size // 4)
    pairs = zip(*([side] if WIDE else halves(builder, side) for side in (table, levels)), strict=True)
    parts = [called(builder, name, kind, *(builder.bitcast(side, kind) for side in pair)) for pair in pairs]
    return _joined(builder, [builder.bitcast(part, words) for part in parts])


class _Sums:
    """Sums of LANES products of levels with x: int32, or with AVX2 alone int16, which a group cannot overflow:
    GROUP / 4 * (2 * 15 * 127) = 30,480. large: levels are 0 .. 255, with AVX2 alone multiplied in 16 bits."""

    def __init__(self, builder: Any, large: bool) -> None:
        self._builder, self._kind = builder, "words" if large and KIND == "signs" else KIND
        kinds = {"dpbusd": [WHOLES], "signs": [SHORTS] * 2}.get(self._kind, [HALF] * 2)
        self._parts = [ir.Constant(kind, [0] * kind.count) for kind in kinds]

    def multiply(self, levels: Any, x: Any) -> None:
        """Add the products of four levels and four integers of x in each word."""
        sides = (
            [(levels, x)]
            if self._kind == "dpbusd"
            else zip(*(halves(self._builder, side) for side in (levels, x)), strict=True)
        )
        self._parts = [self._added(part, *pair) for part, pair in zip(self._parts, sides, strict=True)]

    def _added(self, part: Any, levels: Any, x: Any) -> Any:
        builder = self._builder
        if self._kind == "signs":
            pairs = (builder.bitcast(side, BYTES) for side in (levels, x))
            return builder.add(part, called(builder, "llvm.x86.avx2.pmadd.ub.sw", SHORTS, *pairs))
        if self._kind != "words":
            return called(builder, INSTRUCTIONS[self._kind], part.type, part, levels, x)
        byte, (levels, x) = ir.Constant(SHORTS, [8] * LANES), (builder.bitcast(side, SHORTS) for side in (levels, x))
        lower = builder.and_(levels, ir.Constant(SHORTS, [255] * LANES)), builder.ashr(builder.shl(x, byte), byte)
        for pair in (lower, (builder.lshr(levels, byte), builder.ashr(x, byte))):
            part = builder.add(part, called(builder, "llvm.x86.avx2.pmadd.wd", HALF, *pair))
        return part

    def floats(self) -> Any:
        """Return the sums as float32."""
        builder, parts = self._builder, self._parts
        if self._kind == "signs":
            ones = ir.Constant(SHORTS, [1] * LANES)
            parts = [called(builder, "llvm.x86.avx2.pmadd.wd", HALF, part, ones) for part in parts]
        return builder.sitofp(_joined(builder, parts), VECTOR)


def _fence(builder: Any) -> None:
    """Keep LLVM from moving loads to before this. Else LLVM loads the scales of all columns early, and for want of
    registers keeps sums on the stack: 96 rows took a fifth longer."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def group_bytes(numbers: Numbers) -> int:
    """Return the bytes of a group of COLUMNS outputs."""
    return COLUMNS * GROUP + 4 * COLUMNS if numbers == "bytes" else GROUP_BYTES


def _columns(rows: int) -> int:
    """Return how many columns a tile of so many rows works on: as many as the registers have room for."""
    return COLUMNS if WIDE or rows == 1 else 2 * LANES if rows == 2 else LANES


def _tile(rows: int, numbers: Numbers) -> Any:
    """Return an operation that adds the products of rows of x, `x_row` bytes apart, with `groups` groups of weights to
    float32 sums [rows, COLUMNS], in `_columns` of them from `first` on. x_sums: of groups of x, `x_sums_row` bytes
    apart. table: address of the table of levels. later: where it prefetches as many bytes as it reads."""
    vectors, has_table, whole = _columns(rows) // LANES, numbers == "table", numbers == "bytes"
    lines = GROUP // 4 if whole else LINES
    scales_at, size = lines * LINE, group_bytes(numbers)
    share = size * vectors * LANES // COLUMNS

    def build(
        builder: Any, x: Any, x_row: Any, x_sums: Any, x_sums_row: Any, table: Any, weights: Any, groups: Any,
        sums: Any, first: Any, later: Any,
    ) -> None:  # fmt: skip
        def at(base: Any, number: Any, size: int) -> Any:
            return builder.add(base, builder.mul(number, ir.Constant(I64, size)))

        places = [ir.Constant(I64, r) for r in range(rows)]
        rows_of_x = [builder.add(x, builder.mul(x_row, r)) for r in places]
        sums_of_x = [builder.add(x_sums, builder.mul(x_sums_row, r)) for r in places]
        results = [[_plus(builder, at(sums, first, WORD), r * LINE + v * VECTOR_BYTES) for v in range(vectors)]
                   for r in range(rows)]  # fmt: skip
        if has_table:
            table = loaded(builder, table, ir.VectorType(I32, 4), 1)
            table = builder.shuffle_vector(table, table, ir.Constant(WHOLES, [*range(4)] * (LANES // 4)))
        entry, loop, done = builder.basic_block, *map(builder.append_basic_block, ("group", "done"))
        builder.branch(loop)
        builder.position_at_end(loop)
        group = builder.phi(I64)
        base = at(weights, group, size)
        words, factors = at(base, first, WORD), at(_plus(builder, base, scales_at), first, 2)
        if vectors * LANES < COLUMNS:
            for distance in range(0, share, CACHE_LINE):
                prefetch(builder, _plus(builder, at(later, group, share), distance), cache=2)
        elif AHEAD:
            for distance in range(AHEAD, AHEAD + size, CACHE_LINE):
                prefetch(builder, _plus(builder, base, distance))
        low, shift = (ir.Constant(WHOLES, [number] * LANES) for number in (0x0F0F0F0F, 4))
        products = [[_Sums(builder, numbers != "levels") for _ in range(vectors)] for _ in range(rows)]
        for line in range(lines):
            sides = []
            for v in range(vectors):
                word = loaded(builder, _plus(builder, words, line * LINE + v * VECTOR_BYTES), WHOLES, CACHE_LINE)
                levels = (word,) if whole else (builder.and_(word, low), builder.and_(builder.lshr(word, shift), low))
                sides.append([_looked_up(builder, table, half) for half in levels] if has_table else levels)
            for row, row_products in zip(rows_of_x, products, strict=True):
                quads = _plus(builder, at(row, group, GROUP), line * len(levels) * WORD)
                for half in range(len(levels)):
                    quad = splatted(builder, loaded(builder, _plus(builder, quads, half * WORD), I32, 1), WHOLES)
                    for side, part in zip(sides, row_products, strict=True):
                        part.multiply(side[half], quad)
        of_x, steps = (
            [
                splatted(builder, loaded(builder, _plus(builder, at(row, group, PAIR), far), F32, WORD))
                for row in sums_of_x
            ]
            for far in (0, WORD)
        )
        for v in range(vectors):
            _fence(builder)
            scale, offset = (
                builder.fpext(loaded(builder, _plus(builder, factors, far + v * LANES * 2), HALVES, 2), VECTOR)
                for far in (0, 2 * COLUMNS)
            )
            for r in range(rows):
                value = loaded(builder, results[r][v], VECTOR, WORD)
                for factor, number in ((scale, builder.fmul(products[r][v].floats(), steps[r])), (offset, of_x[r])):
                    value = called(builder, INSTRUCTIONS["float32"], VECTOR, factor, number, value)
                builder.store(value, pointer(builder, results[r][v], VECTOR), align=WORD)
        following = _plus(builder, group, 1)
        builder.cbranch(builder.icmp_signed("<", following, groups), loop, done)
        group.add_incoming(ir.Constant(I64, 0), entry)
        group.add_incoming(following, loop)
        builder.position_at_end(done)

    return operation(types.void, *(types.int64,) * 10)(build)


def _strips(rows: int, numbers: Numbers) -> Any:
    """Return a function of numba that multiplies so many rows by whole groups, one strip of columns after another."""
    multiply, columns, size = _tile(rows, numbers), _columns(rows), group_bytes(numbers)
    share = size * columns // COLUMNS

    def strips(x, x_row, x_sums, x_sums_row, table, weights, groups, sums):
        later = weights + groups * size
        for first in range(0, COLUMNS, columns):
            multiply(x, x_row, x_sums, x_sums_row, table, weights, groups, sums, first, later)
            later += groups * share

    return njit(error_model="numpy")(strips)


def adding_up(numbers: Numbers) -> Any:
    """Return a function of numba that computes the sums [count, COLUMNS] of a block of outputs, float32."""
    one, two, three, four = (_strips(rows, numbers) for rows in range(1, MOST_ROWS + 1))
    size = group_bytes(numbers)

    def add_up(at, block, first, count, sums):
        groups, x_row, table = get_i64(at + QUADS), get_i64(at + LEVELS_ROW), get_i64(at + TABLE)
        for r in range(count):
            clear_line(sums + r * LINE)
        weights, done = get_i64(at + WEIGHTS) + block * groups * size, types.int64(0)
        tiles = (count + MOST_ROWS - 1) // MOST_ROWS
        while done < groups:
            steps, here = min(get_i64(at + PIECE), groups - done), weights + done * size
            for number in range(tiles):
                low = number * count // tiles
                rows = (number + 1) * count // tiles - low
                x = get_i64(at + LEVELS) + (first + low) * x_row + done * GROUP
                x_sums = get_i64(at + OFFSETS) + ((first + low) * groups + done) * PAIR
                out = sums + low * LINE
                if rows == 4:
                    four(x, x_row, x_sums, groups * PAIR, table, here, steps, out)
                elif rows == 3:
                    three(x, x_row, x_sums, groups * PAIR, table, here, steps, out)
                elif rows == 2:
                    two(x, x_row, x_sums, groups * PAIR, table, here, steps, out)
                else:
                    one(x, x_row, x_sums, groups * PAIR, table, here, steps, out)
            done += steps

    return njit(error_model="numpy")(add_up)


add_up, add_up_by_table = adding_up("levels"), adding_up("table")
finish = finishing(load_f32)


@njit(error_model="numpy")
def add_up_and_finish(at, block, first, count, sums):
    outlier_sums = sums + get_i64(at + CHUNK) * LINE
    if get_i64(at + TABLE):
        add_up_by_table(at, block, first, count, sums)
    else:
        add_up(at, block, first, count, sums)
    add_up_outliers(at, block, first, count, get_i64(at + OUTLIER_WORDS), outlier_sums)
    finish(at, block, first, count, sums, outlier_sums)


share_out = product(add_up_and_finish)


@compiled.addressed
def multiply(at):
    """Compute [rows, outputs], the sums times scale and step, plus outliers, plus bias, for the items that no other
    thread has taken."""
    share_out(at)


@operation(LANES_TYPE, LANES_TYPE)
def roots(builder: Any, values: Any) -> Any:
    """Return the square root of each lane, rounded once, as IEEE 754 says."""
    return called(builder, f"llvm.sqrt.v{LANES}f32", VECTOR, values)


@operation(LANES_TYPE, *(LANES_TYPE,) * 4)
def where_larger(builder: Any, a: Any, b: Any, yes: Any, no: Any) -> Any:
    """Return the lanes of `yes` where a > b, and those of `no` elsewhere."""
    return builder.select(builder.fcmp_ordered(">", a, b), yes, no)


@operation(types.void, types.int64, LANES_TYPE)
def store_f16(builder: Any, address: Any, value: Any) -> Any:
    builder.store(builder.fptrunc(value, HALVES), pointer(builder, address, HALVES), align=2)


@operation(types.void, types.int64, *(LANES_TYPE,) * 4)
def store_words(builder: Any, address: Any, *values: Any) -> Any:
    """Store a word of each lane, of four bytes 0 .. 255."""
    word = ir.Constant(WHOLES, [0] * LANES)
    for number, value in enumerate(values):
        byte = builder.shl(builder.fptosi(value, WHOLES), ir.Constant(WHOLES, [8 * number] * LANES))
        word = builder.or_(word, byte)
    builder.store(word, pointer(builder, address, WHOLES), align=WORD)


@operation(LANES_TYPE, types.int64, types.int64)
def load_half(builder: Any, address: Any, upper: Any) -> Any:
    """Load the lower or upper bfloat16 of each word."""
    words = loaded(builder, address, WHOLES, WORD)
    shifted = builder.shl(words, ir.Constant(WHOLES, [16] * LANES))
    masked = builder.and_(words, ir.Constant(WHOLES, [-65536] * LANES))
    is_upper = builder.icmp_signed("!=", upper, ir.Constant(I64, 0))
    return builder.bitcast(builder.select(is_upper, masked, shifted), VECTOR)


@njit(error_model="numpy")
def nearest_level(value, lowest, inverse):
    """Return the nearest levels 0 .. MOST_LEVEL. inverse: of the step between two levels."""
    nearest = splat(types.float32(ROUND))
    level = sub(add(mul(sub(value, lowest), inverse), nearest), nearest)
    return smaller(larger(level, splat(types.float32(0))), splat(types.float32(MOST_LEVEL)))


@njit(error_model="numpy")
def fit(tile, factors, ranges):
    """Find scale and offset of a group of LANES outputs, whose weights are [GROUP, LANES] float32 at `tile`.

    Of several ranges of levels, each a little narrower, the one serves whose least squares are least. An error counts
    by the weight's magnitude plus the group's root mean square. factors: where scales are written, and behind a line
    the offsets. ranges: where the lowest weight and the inverse step of the range are.
    """
    zero, one = splat(types.float32(0)), splat(types.float32(1))
    low = high = load_f32(tile)
    squares = zero
    for i in range(GROUP):
        value = load_f32(tile + i * VECTOR_BYTES)
        low, high, squares = smaller(low, value), larger(high, value), fma(value, value, squares)
    mean = roots(mul(squares, splat(types.float32(1 / GROUP))))
    w = v = vv = zero
    for i in range(GROUP):
        value = load_f32(tile + i * VECTOR_BYTES)
        by = add(magnitude(value), mean)
        w, v, vv = add(w, by), fma(by, value, v), fma(mul(by, value), value, vv)
    least = splat(types.float32(math.inf))
    store_f32(factors, sub(vv, vv))  # NaN if a weight is NaN or infinite: no range serves then
    store_f32(factors + LINE, sub(vv, vv))
    middle, width = mul(add(low, high), splat(types.float32(0.5))), sub(high, low)
    for number in range(len(SHRINKS)):
        shrink = splat(types.float32(SHRINKS[number]))
        step = larger(mul(mul(width, shrink), splat(types.float32(1 / MOST_LEVEL))), splat(types.float32(SMALLEST)))
        lowest, inverse = add(middle, mul(sub(low, middle), shrink)), divide(one, step)
        q = qq = qv = zero
        for i in range(GROUP):
            value = load_f32(tile + i * VECTOR_BYTES)
            level = nearest_level(value, lowest, inverse)
            by = mul(add(magnitude(value), mean), level)
            q, qq, qv = add(q, by), fma(by, level, qq), fma(by, value, qv)
        below = sub(mul(w, qq), mul(q, q))
        some = mul(mul(w, qq), splat(types.float32(1e-6)))  # less is rounding: all levels are the same
        scale = where_larger(below, some, divide(sub(mul(w, qv), mul(q, v)), below), step)
        offset = where_larger(below, some, divide(sub(mul(qq, v), mul(q, qv)), below), lowest)
        # sum of w (scale q + offset - v)^2
        error = add(mul(scale, sub(mul(scale, qq), add(qv, qv))), mul(offset, sub(mul(offset, w), add(v, v))))
        error = add(add(error, vv), mul(mul(add(scale, scale), offset), q))
        store_f32(factors, where_larger(least, error, scale, load_f32(factors)))
        store_f32(factors + LINE, where_larger(least, error, offset, load_f32(factors + LINE)))
        store_f32(ranges, where_larger(least, error, lowest, load_f32(ranges)))
        store_f32(ranges + VECTOR_BYTES, where_larger(least, error, inverse, load_f32(ranges + VECTOR_BYTES)))
        least = smaller(least, error)


@njit(error_model="numpy")
def load_tile(lines, group, narrow, kept, tile):
    """Load the weights of a group of LANES outputs as [GROUP, LANES] float32, with zeros for outliers."""
    for i in range(GROUP):
        number = group * GROUP + i
        value = load_half(lines + number // 2 * LINE, number % 2) if narrow else load_f32(lines + number * LINE)
        store_f32(tile + i * VECTOR_BYTES, mul(value, splat(get_f32(kept + number * WORD))))


@njit(error_model="numpy")
def store_levels(tile, ranges, out):
    """Store the levels of a group of LANES outputs."""
    lowest, inverse = load_f32(ranges), load_f32(ranges + VECTOR_BYTES)
    for i in range(GROUP):
        store_f32(tile + i * VECTOR_BYTES, nearest_level(load_f32(tile + i * VECTOR_BYTES), lowest, inverse))
    upper = splat(types.float32(16))
    for number in range(LINES):
        at = tile + number * 8 * VECTOR_BYTES
        store_words(
            out + number * LINE,
            fma(load_f32(at + 4 * VECTOR_BYTES), upper, load_f32(at)),
            fma(load_f32(at + 5 * VECTOR_BYTES), upper, load_f32(at + VECTOR_BYTES)),
            fma(load_f32(at + 6 * VECTOR_BYTES), upper, load_f32(at + 2 * VECTOR_BYTES)),
            fma(load_f32(at + 7 * VECTOR_BYTES), upper, load_f32(at + 3 * VECTOR_BYTES)),
        )


@njit(error_model="numpy")
def store_factors(factors, groups, out, scales, size):
    """Store the largest factor of each of COLUMNS outputs, and over it their scales and offsets in float16.

    factors: [groups, 2, COLUMNS] float32. out: the groups, of `size` bytes, at whose ends scales and offsets are.
    """
    for strip in range(0, LINE, VECTOR_BYTES):
        most, nan_sum = splat(types.float32(SMALLEST)), splat(types.float32(0))
        for group in range(groups):
            of_group = factors + group * 2 * LINE + strip
            scale, offset = load_f32(of_group), load_f32(of_group + LINE)
            nan_sum = fma(add(scale, offset), splat(types.float32(0)), nan_sum)
            least = mul(magnitude(offset), splat(types.float32(1 / MOST_LEVEL)))
            most = larger(magnitude(scale), larger(least, most))
        most = add(most, nan_sum)  # NaN if a number is NaN or infinite
        store_f32(scales + strip, most)
        for group in range(groups):
            of_group, end = factors + group * 2 * LINE + strip, out + (group + 1) * size + strip // 2
            store_f16(end - 4 * COLUMNS, divide(load_f32(of_group), most))
            store_f16(end - 2 * COLUMNS, divide(load_f32(of_group + LINE), most))


@compiled.addressed
def quantize_weights(at):
    """Quantize weights, a block of COLUMNS rows at a time, and pack them as groups."""
    inputs, narrow, kept = get_i64(at + W_INPUTS), get_i64(at + W_NARROW), get_i64(at + W_KEPT)
    groups, steps = inputs // GROUP, inputs // 2 if narrow else inputs
    # memory of this thread: a tile, its ranges, scales and offsets [groups, 2, COLUMNS], the weights as lines
    tile = get_i64(at + W_SPARE) + take(at + W_THREADS) * get_i64(at + W_SPARE_BYTES)
    ranges = tile + GROUP * VECTOR_BYTES
    factors = ranges + 2 * VECTOR_BYTES
    lines = factors + groups * 2 * LINE
    while True:
        block = take(at + W_TAKEN)
        if block >= get_i64(at + W_ITEMS):
            return
        pack_lines(get_i64(at + W_ROWS) + block * COLUMNS * 8, steps, lines)
        out, scales = get_i64(at + W_OUT) + block * groups * GROUP_BYTES, get_i64(at + W_SCALES) + block * LINE
        for strip in range(0, LINE, VECTOR_BYTES):
            for group in range(groups):
                load_tile(lines + strip, group, narrow, kept, tile)
                fit(tile, factors + group * 2 * LINE + strip, ranges)
                store_levels(tile, ranges, out + group * GROUP_BYTES + strip)
        store_factors(factors, groups, out, scales, GROUP_BYTES)


@operation(types.void, types.int64, types.int64)
def store_group(builder: Any, levels: Any, out: Any) -> None:
    """Store the levels of a group of one output, bytes, as a word in each line."""
    whole = loaded(builder, levels, HALF, 1)
    sides = [builder.shuffle_vector(whole, whole, ir.Constant(ir.VectorType(I32, LINES), [*range(side, GROUP // 4, 2)]))
             for side in range(2)]  # fmt: skip
    words = builder.or_(sides[0], builder.shl(sides[1], ir.Constant(sides[1].type, [4] * LINES)))
    for line in range(LINES):
        word = builder.extract_element(words, ir.Constant(I32, line))
        builder.store(word, pointer(builder, _plus(builder, out, line * LINE), I32), align=WORD)


@njit(error_model="numpy")
def pack_levels(block, form, first, column, spare, factors, out):
    """Pack a block of a row, whose numbers begin with input `first`. Its levels stay at `spare`."""
    unpack_levels(block, form, spare)
    unpack_scales(block, form, spare + BLOCK_SCALES, spare + BLOCK_OFFSETS)
    shift, group = types.float32(get_i64(form + SHIFT)), first // GROUP
    for k in range(get_i64(form + NUMBERS) // GROUP):
        store_group(spare + k * GROUP, out + (group + k) * GROUP_BYTES + column * WORD)
        at = factors + (group + k) * 2 * LINE + column * WORD
        scale, offset = get_f32(spare + BLOCK_SCALES + k * WORD), get_f32(spare + BLOCK_OFFSETS + k * WORD)
        put_f32(at, scale)
        put_f32(at + LINE, scale * -shift if shift else offset)


@njit(error_model="numpy")
def clear_column(column, groups, factors, out):
    """Write zeros, where there are no outputs any more."""
    for group in range(groups):
        for line in range(LINES):
            put_i32(out + group * GROUP_BYTES + line * LINE + column * WORD, 0)
        for line in range(2):
            put_f32(factors + (2 * group + line) * LINE + column * WORD, types.float32(0))


@compiled.addressed
def pack_blocks(at):
    """Pack rows of blocks of GGUF files, COLUMNS rows at a time, as groups, and write the weights of outliers."""
    inputs, count, outliers = get_i64(at + B_INPUTS), get_i64(at + B_OUTLIER_COUNT), get_i64(at + B_OUTLIERS)
    groups = inputs // GROUP
    spare = get_i64(at + B_SPARE) + take(at + B_THREADS) * get_i64(at + B_SPARE_BYTES)
    factors = spare + SPARE
    while True:
        item = take(at + B_TAKEN)
        if item >= get_i64(at + B_ITEMS):
            return
        out, scales = get_i64(at + B_OUT) + item * groups * GROUP_BYTES, get_i64(at + B_SCALES) + item * LINE
        done = taken = types.int64(0)
        while done < inputs:  # some inputs of all rows at a time, whose groups the first cache holds
            end, passed = min(done + MOST, inputs), taken
            for column in range(COLUMNS):
                row = item * COLUMNS + column
                address, form = get_i64(get_i64(at + B_ROWS) + row * 16), get_i64(get_i64(at + B_ROWS) + row * 16 + 8)
                if address == 0:
                    if done == 0:
                        clear_column(column, groups, factors, out)
                    continue
                passed = taken
                block = address + done // get_i64(form + NUMBERS) * get_i64(form + SIZE)
                for first in range(done, end, get_i64(form + NUMBERS)):
                    pack_levels(block, form, first, column, spare, factors, out)
                    block += get_i64(form + SIZE)
                    last = first + get_i64(form + NUMBERS)
                    while passed < count and get_i64(outliers + passed * 8) < last:
                        number = get_i64(outliers + passed * 8)
                        level = get_u8(spare + number - first)
                        if get_i64(form + BLOCK_TABLE):
                            level = get_u8(get_i64(form + BLOCK_TABLE) + level)
                        factor = factors + number // GROUP * 2 * LINE + column * WORD
                        value = get_f32(factor) * types.float32(level) + get_f32(factor + LINE)
                        put_f32(get_i64(at + B_OUTLIER_WEIGHTS) + (row * count + passed) * WORD, value)
                        passed += 1
            done, taken = end, passed
        store_factors(factors, groups, out, scales, GROUP_BYTES)
