"""Vectors of LANES float32 numbers, and tiles of products, for kernels of numba, which lacks both.

Each operation is one of IEEE 754 or a fixed sequence of them, and nothing here may be reordered (no fastmath). So the
bits are the same whatever the width of the machine's vectors is. A tile sums from the first input to the last, one sum
for each row and output, so the bits of a row do not depend on other rows. Addresses are int64, and nothing checks them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from dsbd_cli.ops.cpu.runtime import PRODUCT
from dsbd_cli.ops.memory import CACHE_LINE
from dsbd_cli.ops.processor import Processor, current, on_amd

LANES = 16
WIDE = current() >= Processor.AVX512  # 32 registers of LANES numbers; otherwise 16 of half as many

F32, I32, I16, I64, I8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64), ir.IntType(8)
VECTOR, WHOLES, HALVES = (ir.VectorType(kind, LANES) for kind in (F32, I32, I16))

# 2^f for f in [-0.5, 0.5]: the polynomial of degree 6 through its Chebyshev nodes, relative error 3e-9
EXP2 = (1.0, 0.6931472067028327, 0.2402265092228862, 0.05550327226670292, 0.009618056678548023, 0.0013400428177566112,
        0.00015461444691139306)  # fmt: skip
ROUND = 12582912.0  # 1.5 * 2^23: a number added to it loses its fraction
LEAST_POWER = -126.0  # 2 to a smaller power is subnormal, and slow


class _Lanes(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES_TYPE = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


def operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes an intrinsic of a function which builds its LLVM code from (builder, *values).

    result, arguments: their types in numba.
    """

    def made(build: Callable[..., Any]) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            # LLVM turns the sum of two integers into an offset from a pointer, which may be the smaller one, such as 0.
            # numba optimizes a kernel's functions twice, and the second time LLVM drops stores to offsets from null.
            set.add(builder.function.attributes, "null_pointer_is_valid")  # llvmlite does not know it
            value = build(builder, *values)
            return context.get_dummy_value() if value is None else value

        signature = result(*arguments)
        # numba asks for one parameter per argument
        names = ", ".join(f"a{number}" for number in range(len(arguments)))
        scope: dict[str, Any] = {"signature": signature, "code": code}
        exec(f"def {build.__name__}(context, {names}): return signature, code", scope)
        return intrinsic(scope[build.__name__])

    return made


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def loaded(builder: Any, address: Any, kind: Any, align: int) -> Any:
    return builder.load(pointer(builder, address, kind), align=align)


def splatted(builder: Any, value: Any, kind: Any = VECTOR) -> Any:
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), ir.Constant(WHOLES, [0] * LANES))


def _number(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def _whole(value: int) -> Any:
    return ir.Constant(WHOLES, [value] * LANES)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return called(builder, f"llvm.fma.v{LANES}f32", VECTOR, a, b, c)


@operation(types.float32, types.int64)
def get_f32(builder: Any, address: Any) -> Any:
    return loaded(builder, address, F32, 4)


@operation(types.float32, types.int64)
def get_bf16(builder: Any, address: Any) -> Any:
    wide = builder.zext(loaded(builder, address, I16, 2), I32)
    return builder.bitcast(builder.shl(wide, ir.Constant(I32, 16)), F32)


@operation(types.int64, types.int64)
def get_i32(builder: Any, address: Any) -> Any:
    return builder.sext(loaded(builder, address, I32, 4), I64)


@operation(types.int64, types.int64)
def get_i64(builder: Any, address: Any) -> Any:
    return loaded(builder, address, I64, 8)


@operation(types.int64, types.int64)
def get_u8(builder: Any, address: Any) -> Any:
    return builder.zext(loaded(builder, address, I8, 1), I64)


@operation(types.void, types.int64, types.float32)
def put_f32(builder: Any, address: Any, value: Any) -> Any:
    builder.store(value, pointer(builder, address, F32), align=4)


@operation(types.void, types.int64, types.int64)
def put_i32(builder: Any, address: Any, value: Any) -> Any:
    builder.store(builder.trunc(value, I32), pointer(builder, address, I32), align=4)


@operation(types.void, types.int64, types.int64)
def put_i64(builder: Any, address: Any, value: Any) -> Any:
    builder.store(value, pointer(builder, address, I64), align=8)


@operation(types.int64, types.int64)
def take(builder: Any, address: Any) -> Any:
    """Add one to the int64 at an address, atomically, and return what it was before."""
    return builder.atomic_rmw("add", pointer(builder, address, I64), ir.Constant(I64, 1), "monotonic")


@operation(LANES_TYPE, types.float32)
def splat(builder: Any, value: Any) -> Any:
    return splatted(builder, value)


@operation(LANES_TYPE, types.int64)
def load_f32(builder: Any, address: Any) -> Any:
    return loaded(builder, address, VECTOR, 4)


def _widened(builder: Any, values: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(values, WHOLES), _whole(16)), VECTOR)


@operation(LANES_TYPE, types.int64)
def load_bf16(builder: Any, address: Any) -> Any:
    return _widened(builder, loaded(builder, address, HALVES, 2))


@operation(types.void, types.int64, LANES_TYPE)
def store_f32(builder: Any, address: Any, value: Any) -> Any:
    builder.store(value, pointer(builder, address, VECTOR), align=4)


def _rounded(builder: Any, value: Any, whole: Any, narrow: Any, floats: Any, const: Callable[[int], Any]) -> Any:
    """Round float32 to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, whole)
    odd = builder.and_(builder.lshr(bits, const(16)), const(1))
    near = builder.lshr(builder.add(builder.add(bits, const(0x7FFF)), odd), const(16))
    strange = builder.fcmp_unordered("uno", value, ir.Constant(floats, None))
    return builder.trunc(builder.select(strange, const(0x7FC0), near), narrow)


@operation(types.void, types.int64, LANES_TYPE)
def store_bf16(builder: Any, address: Any, value: Any) -> Any:
    builder.store(_rounded(builder, value, WHOLES, HALVES, VECTOR, _whole), pointer(builder, address, HALVES), align=2)


@operation(LANES_TYPE, LANES_TYPE)
def nearest_bf16(builder: Any, value: Any) -> Any:
    """Round to bfloat16, and return that as float32."""
    return _widened(builder, _rounded(builder, value, WHOLES, HALVES, VECTOR, _whole))


@operation(types.void, types.int64, types.float32)
def put_bf16(builder: Any, address: Any, value: Any) -> Any:
    near = _rounded(builder, value, I32, I16, F32, lambda number: ir.Constant(I32, number))
    builder.store(near, pointer(builder, address, I16), align=2)


@operation(LANES_TYPE, LANES_TYPE, LANES_TYPE, LANES_TYPE)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return _fma(builder, a, b, c)


add, sub, mul, divide = (
    operation(LANES_TYPE, LANES_TYPE, LANES_TYPE)(instruction)
    for instruction in (ir.IRBuilder.fadd, ir.IRBuilder.fsub, ir.IRBuilder.fmul, ir.IRBuilder.fdiv)
)


@operation(types.float32, types.float32)
def root(builder: Any, value: Any) -> Any:
    """Return the square root, rounded once, as IEEE 754 says."""
    return called(builder, "llvm.sqrt.f32", F32, value)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@operation(LANES_TYPE, LANES_TYPE, LANES_TYPE)
def smaller(builder: Any, a: Any, b: Any) -> Any:
    """Return the smaller number of each lane; NaN in `a` gives NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), b, a)


larger = operation(LANES_TYPE, LANES_TYPE, LANES_TYPE)(_larger)


def _halved(builder: Any, value: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    count = LANES
    while count > 1:
        count //= 2
        kind = ir.VectorType(I32, count)
        low = builder.shuffle_vector(value, value, ir.Constant(kind, list(range(count))))
        high = builder.shuffle_vector(value, value, ir.Constant(kind, list(range(count, 2 * count))))
        value = join(builder, low, high)
    return builder.extract_element(value, ir.Constant(I32, 0))


@operation(types.float32, LANES_TYPE)
def total(builder: Any, value: Any) -> Any:
    """Return the sum of the lanes, always in the same order: add both halves, then the halves of that, and so on."""
    return _halved(builder, value, lambda builder, a, b: builder.fadd(a, b))


@operation(types.float32, LANES_TYPE)
def largest(builder: Any, value: Any) -> Any:
    return _halved(builder, value, _larger)


@operation(types.float32, LANES_TYPE)
def first(builder: Any, value: Any) -> Any:
    return builder.extract_element(value, ir.Constant(I32, 0))


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose LANES vectors of LANES numbers: two blocks of half the size change places, then smaller ones."""
    step = LANES // 2
    while step:
        for index in range(LANES):
            if index & step:
                continue
            a, b = rows[index], rows[index + step]
            kept = [LANES + lane - step if lane & step else lane for lane in range(LANES)]
            other = [LANES + lane if lane & step else lane + step for lane in range(LANES)]
            rows[index], rows[index + step] = (
                builder.shuffle_vector(a, b, ir.Constant(WHOLES, order)) for order in (kept, other)
            )
        step //= 2
    return rows


def _transposed(narrow: bool) -> Callable[..., Any]:
    def build(builder: Any, source: Any, step: Any, target: Any, line: Any, last: Any = None) -> None:
        rows = []
        for lane in range(LANES):
            row = loaded(builder, source, HALVES if narrow else VECTOR, 2 if narrow else 4)
            rows.append(_widened(builder, row) if narrow else row)
            further = builder.add(source, step)
            if last is not None:
                further = builder.select(builder.icmp_signed("<", ir.Constant(I64, lane), last), further, source)
            source = further
        for row in _transpose(builder, rows):
            builder.store(row, pointer(builder, target, VECTOR), align=4)
            target = builder.add(target, line)

    return build


transpose_f32 = operation(types.void, *(types.int64,) * 4)(_transposed(False))
transpose_bf16 = operation(types.void, *(types.int64,) * 4)(_transposed(True))
# like transpose_f32, but only rows 0 .. last are read, and the last one is repeated in place of the others
transpose_some = operation(types.void, *(types.int64,) * 5)(_transposed(False))


@operation(LANES_TYPE, LANES_TYPE)
def exp2(builder: Any, x: Any) -> Any:
    """Return 2^x for numbers up to 126. Numbers below -126 give 2^-126, and NaN gives NaN."""
    least = _number(LEAST_POWER)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    shifted = builder.fadd(x, _number(ROUND))
    rest = builder.fsub(x, builder.fsub(shifted, _number(ROUND)))
    power = _number(EXP2[-1])
    for factor in EXP2[-2::-1]:
        power = _fma(builder, power, rest, _number(factor))
    whole = builder.add(builder.bitcast(shifted, WHOLES), _whole(127 - 0x4B400000))
    return builder.fmul(power, builder.bitcast(builder.shl(whole, _whole(23)), VECTOR))


# A tile multiplies x [rows, inputs] by weights [inputs, COLUMNS], COLUMNS outputs at once. Weights are stored in lines.
# A line has a word of four bytes per output, with u inputs: [inputs / u, COLUMNS, u]. So weights are read from the
# first to the last byte.
COLUMNS, MOST_ROWS = 64, 6  # outputs, and rows: their sums fit into the registers of AVX-512
WORD = 4  # bytes of a float32 and of an int32
LINE = COLUMNS * WORD
TAKEN, THREADS, ITEMS, ROWS, CHUNK, BLOCKS, SHARE, SUMS, SUMS_BYTES, ROUTES = range(0, 8 * len(PRODUCT), 8)
LINE_VECTORS = COLUMNS // LANES
# Bytes ahead of those in use at which weights are prefetched. Without it an Emerald Rapids computes four rows slower
# than it reads the weights for one (benchmarks/LOG.md). On AMD's processors it brought no steady gain.
AHEAD = 0 if on_amd() else 3072
# instruction that multiplies a line by a word of x: fma takes (x, weights, sums), the others take (sums, x, weights)
INSTRUCTIONS = {
    "float32": f"llvm.fma.v{LANES}f32",
    "bfloat16": f"llvm.x86.avx512bf16.dpbf16ps.{LANES * 32}",  # pairs; needs AVX-512 BF16
    "widened": f"llvm.fma.v{LANES}f32",  # pairs of bfloat16, each widened first
    "dpbusd": "llvm.x86.avx512.vpdpbusd.512",  # four unsigned ones with four signed ones
    "half_dpbusd": "llvm.x86.avx512.vpdpbusd.256",  # the same for half of the lanes
    "signs": "",  # the same of signed ones, by three instructions of AVX2
}
# Rows of x that a tile multiplies at once; widened ones and signs take more registers.
TILE_ROWS = dict.fromkeys(INSTRUCTIONS, MOST_ROWS) | ({"widened": 5} if WIDE else {"widened": 4, "signs": 4})


def _columns(kind: str, rows: int) -> int:
    """Return how many columns of a line a tile of so many rows works on: as many as the registers have room for."""
    if WIDE or rows == 1 or (kind == "float32" and rows == 2):
        return COLUMNS
    return 2 * LANES if rows <= (2 if kind == "widened" else 3) else LANES


def halves(builder: Any, value: Any) -> list[Any]:
    """Return the two halves of LANES words, as vectors of words."""
    half = LANES // 2
    orders = (ir.Constant(ir.VectorType(I32, half), [*range(first, first + half)]) for first in (0, half))
    return [builder.shuffle_vector(value, value, order) for order in orders]


def called(builder: Any, name: str, result: Any, *values: Any) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _add_signed(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    """Add the products of four signed bytes in each word to int32 sums. None is -128, so two of the products fit into
    16 bits: |w| * (x with the sign of w)."""
    byte, short = ir.VectorType(I8, 2 * LANES), ir.VectorType(I16, LANES)
    x, weights = builder.bitcast(x, byte), builder.bitcast(weights, byte)
    size = called(builder, f"llvm.abs.v{2 * LANES}i8", byte, weights, ir.Constant(ir.IntType(1), 0))
    signed = called(builder, "llvm.x86.avx2.psign.b", byte, x, weights)
    pairs = called(builder, "llvm.x86.avx2.pmadd.ub.sw", short, size, signed)
    ones = ir.Constant(short, [1] * LANES)
    return builder.add(sums, called(builder, "llvm.x86.avx2.pmadd.wd", sums.type, pairs, ones))


def _multiplied(builder: Any, kind: str, sums: Any, x: Any, weights: Any) -> Any:
    """Return LANES sums plus the products of the words of x and of the weights."""
    if kind in ("float32", "widened"):
        return called(builder, INSTRUCTIONS[kind], VECTOR, x, weights, sums)
    if kind in ("bfloat16", "dpbusd"):
        return called(builder, INSTRUCTIONS[kind], sums.type, sums, x, weights)
    parts = [
        _add_signed(builder, *three) if kind == "signs" else called(builder, INSTRUCTIONS[kind], three[0].type, *three)
        for three in zip(*(halves(builder, value) for value in (sums, x, weights)), strict=True)
    ]
    return builder.shuffle_vector(*parts, ir.Constant(WHOLES, [*range(LANES)]))


def _tile(kind: str, rows: int, ahead: int = 0) -> Any:
    """Return an operation that adds the products of rows of x, `x_row` bytes apart, with `steps` lines of weights to
    sums [rows, COLUMNS], float32 or int32, in the first `_columns(kind, rows)` of them.

    ahead: it takes one address more, and prefetches so many bytes a step from there on into the second cache.
    """
    vectors = _columns(kind, rows) // LANES
    floats = kind in ("float32", "widened")  # the factors are float32
    sum_kind = VECTOR if floats or kind == "bfloat16" else WHOLES
    read_kind, single = (VECTOR, F32) if kind == "float32" else (WHOLES, I32)

    def split(builder: Any, read: Any) -> list[Any]:
        """Return the factors in a word of each lane, which are multiplied one after another."""
        if kind != "widened":
            return [read]
        pair = builder.shl(read, _whole(16)), builder.and_(read, _whole(-65536))
        return [builder.bitcast(number, VECTOR) for number in pair]

    def build(builder: Any, x: Any, x_row: Any, weights: Any, steps: Any, sums: Any, later: Any = None) -> None:
        places = [[_plus(builder, sums, r * LINE + v * LANES * WORD) for v in range(vectors)] for r in range(rows)]
        starts = [builder.add(x, builder.mul(x_row, ir.Constant(I64, r))) for r in range(rows)]
        before = [[loaded(builder, address, sum_kind, WORD) for address in row] for row in places]
        entry, loop = builder.basic_block, builder.append_basic_block("step")
        done = builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(I64)
        sums_so_far = [[builder.phi(sum_kind) for _ in row] for row in places]
        line = builder.add(weights, builder.mul(step, ir.Constant(I64, LINE)))
        for distance in range(AHEAD, AHEAD + LINE, CACHE_LINE) if AHEAD else ():
            prefetch(builder, _plus(builder, line, distance))
        if ahead:
            later = builder.add(later, builder.mul(step, ir.Constant(I64, ahead)))
            for distance in range(0, ahead, CACHE_LINE):
                prefetch(builder, _plus(builder, later, distance), cache=2)
        align = LANES * WORD
        side = [
            split(builder, loaded(builder, _plus(builder, line, v * align), read_kind, align)) for v in range(vectors)
        ]
        offset = builder.mul(step, ir.Constant(I64, WORD))
        after = []
        for start, row in zip(starts, sums_so_far, strict=True):
            words = split(builder, splatted(builder, loaded(builder, builder.add(start, offset), single, 1), read_kind))
            row_sums: list[Any] = list(row)
            for half, word in enumerate(words):
                for v, parts in enumerate(side):
                    row_sums[v] = _multiplied(builder, kind, row_sums[v], word, parts[half])
            after.append(row_sums)
        following = _plus(builder, step, 1)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)
        step.add_incoming(ir.Constant(I64, 0), entry)
        step.add_incoming(following, loop)
        builder.position_at_end(done)
        for r in range(rows):
            for v in range(vectors):
                sums_so_far[r][v].add_incoming(before[r][v], entry)
                sums_so_far[r][v].add_incoming(after[r][v], loop)
                builder.store(after[r][v], pointer(builder, places[r][v], sum_kind), align=WORD)

    return operation(types.void, *(types.int64,) * (6 if ahead else 5))(build)


def prefetch(builder: Any, address: Any, cache: int = 1) -> None:
    """Prefetch the cache line at an address for reading, into the first or the second cache. The address need not be
    valid."""
    read, locality, data = (ir.Constant(I32, what) for what in (0, 4 - cache, 1))
    called(builder, "llvm.prefetch.p0i8", ir.VoidType(), pointer(builder, address, I8), read, locality, data)


def _plus(builder: Any, address: Any, distance: int) -> Any:
    return builder.add(address, ir.Constant(I64, distance))


def tile(kind: str) -> Callable[..., Any]:
    """Return a function of numba: sums [count, COLUMNS] += x [count, ..] times `steps` lines of weights.

    More rows than fit into the registers are multiplied group by group. The first group waits for the weights from
    memory. The others find them in a cache, and memory would wait for them. So each of the last two groups prefetches
    half of the lines that come next: the same number, right behind these. Measured on AMD's processors alone.
    """
    most, group_of_rows = TILE_ROWS[kind], _group(kind)
    last_groups = _prefetching_group(kind) if on_amd() and WIDE else group_of_rows

    def add_up(count, x, x_row, weights, steps, sums):  # type: ignore[no-untyped-def]
        groups = (count + most - 1) // most
        for group in range(groups):
            low, rows = group * count // groups, (group + 1) * count // groups - group * count // groups
            at, to = x + low * x_row, sums + low * LINE
            if groups > 1 and group >= groups - 2:
                later = weights + steps * LINE + (group - groups + 2) * steps * (LINE // 2)
                last_groups(rows, at, x_row, weights, steps, to, later)
            else:
                group_of_rows(rows, at, x_row, weights, steps, to, weights)

    made: Callable[..., Any] = njit(error_model="numpy")(add_up)
    return made


def _strips(kind: str, rows: int) -> Any:
    """Return what multiplies so many rows by whole lines: an operation, or one for each strip of columns in turn."""
    width = _columns(kind, rows) * WORD
    if width == LINE:
        return _tile(kind, rows)
    multiply = _tile(kind, rows, ahead=width)

    def strips(x, x_row, weights, steps, sums):  # type: ignore[no-untyped-def]
        for strip in range(0, LINE, width):  # each prefetches its share of the lines that come next
            multiply(x, x_row, weights + strip, steps, sums + strip, weights + (LINE + strip) * steps)

    return njit(error_model="numpy")(strips)


def _group(kind: str) -> Callable[..., Any]:
    """Return a function of numba that multiplies 1 to MOST_ROWS rows."""
    one, two, three, four, five, six = (_strips(kind, rows) for rows in range(1, MOST_ROWS + 1))

    def multiply(rows, x, x_row, weights, steps, sums, _later):  # type: ignore[no-untyped-def]
        if rows == 6:
            six(x, x_row, weights, steps, sums)
        elif rows == 5:
            five(x, x_row, weights, steps, sums)
        elif rows == 4:
            four(x, x_row, weights, steps, sums)
        elif rows == 3:
            three(x, x_row, weights, steps, sums)
        elif rows == 2:
            two(x, x_row, weights, steps, sums)
        else:
            one(x, x_row, weights, steps, sums)

    made: Callable[..., Any] = njit(error_model="numpy")(multiply)
    return made


def _prefetching_group(kind: str) -> Callable[..., Any]:
    """Return a function of numba that multiplies 3 to MOST_ROWS rows, as each of several groups has, and prefetches
    half as many bytes from `later` on."""
    three, four, five, six = (_tile(kind, rows, ahead=LINE // 2) for rows in range(3, MOST_ROWS + 1))

    def multiply(rows, x, x_row, weights, steps, sums, later):  # type: ignore[no-untyped-def]
        if rows == 6:
            six(x, x_row, weights, steps, sums, later)
        elif rows == 5:
            five(x, x_row, weights, steps, sums, later)
        elif rows == 4:
            four(x, x_row, weights, steps, sums, later)
        else:
            three(x, x_row, weights, steps, sums, later)

    made: Callable[..., Any] = njit(error_model="numpy")(multiply)
    return made


@operation(types.void, *(types.int64,) * 3)
def _transpose_rows(builder: Any, rows: Any, offset: Any, target: Any) -> None:
    """Transpose LANES words of LANES rows, from `place` bytes on, into LANES lines: a line has a word of each row, side
    by side. rows: where the addresses of the rows are stored."""
    words = []
    for lane in range(LANES):
        row = loaded(builder, _plus(builder, rows, 8 * lane), I64, 8)
        words.append(loaded(builder, builder.add(row, offset), WHOLES, 1))
    for line in _transpose(builder, words):
        builder.store(line, pointer(builder, target, WHOLES), align=WORD)
        target = _plus(builder, target, LINE)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def pack_lines(rows: Any, steps: Any, out: Any) -> None:
    """Write COLUMNS rows of `steps` words as `steps` lines: a line has a word of each row, side by side. rows: where
    the addresses of the rows are stored."""
    done = types.int64(0)
    while done + LANES <= steps:  # a cache line of each row
        for v in range(LINE_VECTORS):
            _transpose_rows(rows + v * LANES * 8, done * WORD, out + done * LINE + v * LANES * WORD)
        done += LANES
    while done < steps:
        for column in range(COLUMNS):
            put_i32(out + done * LINE + column * WORD, get_i32(get_i64(rows + column * 8) + done * WORD))
        done += 1


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _nothing(at: Any, sums: Any) -> None:
    pass


def product(block: Callable[..., None], prepare: Callable[..., None] = _nothing) -> Callable[..., Any]:
    """Return a function of numba that computes the items of a product that no other thread has taken.

    It calls prepare(at, sums) once, then block(at, number, first, count, sums) for each block of COLUMNS outputs and
    each chunk of rows first .. first + count. sums: memory of this thread alone. at: arguments that begin with
    runtime.PRODUCT. Where rows have experts, only the blocks of a row's expert are computed, and rows of one expert are
    next to each other.
    """

    def multiply(at):  # type: ignore[no-untyped-def]
        sums = get_i64(at + SUMS) + take(at + THREADS) * get_i64(at + SUMS_BYTES)
        prepare(at, sums)
        rows, chunk, share = get_i64(at + ROWS), get_i64(at + CHUNK), get_i64(at + SHARE)
        routes, blocks = get_i64(at + ROUTES), get_i64(at + BLOCKS)
        chunks, shares = (rows + chunk - 1) // chunk, (blocks + share - 1) // share
        while True:
            item = take(at + TAKEN)
            if routes == 0:
                if item >= get_i64(at + ITEMS):
                    return
                first = item % chunks * chunk
                count = min(chunk, rows - first)
                start = item // chunks * share
                for number in range(start, min(start + share, blocks)):
                    block(at, number, first, count, sums)
            else:
                if item >= get_i64(routes) * shares:
                    return
                of_expert = routes + 8 + item // shares * 3 * 8  # number, first row, end of rows
                start, first, end = item % shares * share, get_i64(of_expert + 8), get_i64(of_expert + 16)
                before = get_i64(of_expert) * blocks
                while first < end:
                    count = min(chunk, end - first)
                    for number in range(start, min(start + share, blocks)):
                        block(at, before + number, first, count, sums)
                    first += count

    made: Callable[..., Any] = njit(error_model="numpy")(multiply)
    return made


@operation(types.void, types.int64, types.int64)
def copy_line(builder: Any, source: Any, target: Any) -> Any:
    for v in range(LINE_VECTORS):
        value = loaded(builder, _plus(builder, source, v * LANES * WORD), WHOLES, WORD)
        builder.store(value, pointer(builder, _plus(builder, target, v * LANES * WORD), WHOLES), align=WORD)


@operation(types.void, types.int64)
def clear_line(builder: Any, target: Any) -> Any:
    for v in range(LINE_VECTORS):
        part = pointer(builder, _plus(builder, target, v * LANES * WORD), WHOLES)
        builder.store(ir.Constant(WHOLES, [0] * LANES), part, align=WORD)
