"""The kernel of tail.py in numba: attention over the listed slots of a forest, joined with the settled part.

Two parts. First vectors of LANES float32 numbers, which numba lacks: each operation on them is one of IEEE 754 or a
fixed sequence of them, and nothing here may be reordered (no fastmath). So the bits are the same whatever the width of
the machine's vectors is. Then the kernel. A sum over the head goes from its first number to its last; a sum over slots
goes by depth, for values one by one, for weights in LANES partial sums that are added in a fixed order.

Addresses are int64, and nothing checks them; tail.py does. Both parts stand in one file, because numba looks at this
file alone to see whether what it has stored is still true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from dsbd_cli.engine.models.tail import ATTEND, LAYOUT, LIST

__all__ = ["LANES", "attend", "list_slots"]

LANES = 16

_F32, _I32, _I16, _I64, _I8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64), ir.IntType(8)
_V32, _VI32, _VI16 = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, _I16))

# 2^f for f in [-0.5, 0.5]: the polynomial of degree 6 through its Chebyshev nodes, relative error 3e-9
EXP2 = (1.0, 0.6931472067028327, 0.2402265092228862, 0.05550327226670292, 0.009618056678548023, 0.0013400428177566112,
        0.00015461444691139306)  # fmt: skip
ROUND = 12582912.0  # 1.5 * 2^23: a number added to it loses its fraction
LEAST_POWER = -126.0  # smaller results would be subnormal, and slow


class _Lanes(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES_TYPE = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _V32)


def _operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of what builds its LLVM code from (builder, *values)."""

    def made(build: Callable[..., Any]) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            found = build(builder, *values)
            return context.get_dummy_value() if found is None else found

        signature = result(*arguments)
        # numba asks for one parameter per argument
        names = ", ".join(f"a{place}" for place in range(len(arguments)))
        scope: dict[str, Any] = {"signature": signature, "code": code}
        exec(f"def {build.__name__}(context, {names}): return signature, code", scope)
        return intrinsic(scope[build.__name__])

    return made


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    return builder.load(_at(builder, address, kind), align=align)


def _splat(builder: Any, value: Any, kind: Any = _V32) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_VI32, [0] * LANES))


def _number(value: float) -> Any:
    return ir.Constant(_V32, [value] * LANES)


def _whole(value: int) -> Any:
    return ir.Constant(_VI32, [value] * LANES)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_V32, [_V32] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), (a, b, c))


@_operation(types.float32, types.int64)
def get_f32(builder: Any, address: Any) -> Any:
    return _load(builder, address, _F32, 4)


@_operation(types.float32, types.int64)
def get_bf16(builder: Any, address: Any) -> Any:
    wide = builder.zext(_load(builder, address, _I16, 2), _I32)
    return builder.bitcast(builder.shl(wide, ir.Constant(_I32, 16)), _F32)


@_operation(types.int64, types.int64)
def get_i32(builder: Any, address: Any) -> Any:
    return builder.sext(_load(builder, address, _I32, 4), _I64)


@_operation(types.int64, types.int64)
def get_i64(builder: Any, address: Any) -> Any:
    return _load(builder, address, _I64, 8)


@_operation(types.int64, types.int64)
def get_u8(builder: Any, address: Any) -> Any:
    return builder.zext(_load(builder, address, _I8, 1), _I64)


@_operation(types.void, types.int64, types.float32)
def put_f32(builder: Any, address: Any, value: Any) -> Any:
    builder.store(value, _at(builder, address, _F32), align=4)


@_operation(types.void, types.int64, types.int64)
def put_i32(builder: Any, address: Any, value: Any) -> Any:
    builder.store(builder.trunc(value, _I32), _at(builder, address, _I32), align=4)


@_operation(types.int64, types.int64)
def take(builder: Any, address: Any) -> Any:
    """Add one to the int64 there, at once for all threads; what it was before."""
    return builder.atomic_rmw("add", _at(builder, address, _I64), ir.Constant(_I64, 1), "monotonic")


@_operation(LANES_TYPE, types.float32)
def splat(builder: Any, value: Any) -> Any:
    return _splat(builder, value)


@_operation(LANES_TYPE, types.int64)
def load_f32(builder: Any, address: Any) -> Any:
    return _load(builder, address, _V32, 4)


def _widened(builder: Any, values: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(values, _VI32), _whole(16)), _V32)


@_operation(LANES_TYPE, types.int64)
def load_bf16(builder: Any, address: Any) -> Any:
    return _widened(builder, _load(builder, address, _VI16, 2))


@_operation(types.void, types.int64, LANES_TYPE)
def store_f32(builder: Any, address: Any, value: Any) -> Any:
    builder.store(value, _at(builder, address, _V32), align=4)


def _rounded(builder: Any, value: Any, whole: Any, narrow: Any, floats: Any, const: Callable[[int], Any]) -> Any:
    """float32 to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, whole)
    odd = builder.and_(builder.lshr(bits, const(16)), const(1))
    near = builder.lshr(builder.add(builder.add(bits, const(0x7FFF)), odd), const(16))
    strange = builder.fcmp_unordered("uno", value, ir.Constant(floats, None))
    return builder.trunc(builder.select(strange, const(0x7FC0), near), narrow)


@_operation(types.void, types.int64, LANES_TYPE)
def store_bf16(builder: Any, address: Any, value: Any) -> Any:
    builder.store(_rounded(builder, value, _VI32, _VI16, _V32, _whole), _at(builder, address, _VI16), align=2)


@_operation(types.void, types.int64, types.float32)
def put_bf16(builder: Any, address: Any, value: Any) -> Any:
    near = _rounded(builder, value, _I32, _I16, _F32, lambda number: ir.Constant(_I32, number))
    builder.store(near, _at(builder, address, _I16), align=2)


@_operation(LANES_TYPE, LANES_TYPE, LANES_TYPE, LANES_TYPE)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return _fma(builder, a, b, c)


@_operation(LANES_TYPE, LANES_TYPE, LANES_TYPE)
def add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


@_operation(LANES_TYPE, LANES_TYPE, LANES_TYPE)
def sub(builder: Any, a: Any, b: Any) -> Any:
    return builder.fsub(a, b)


@_operation(LANES_TYPE, LANES_TYPE, LANES_TYPE)
def mul(builder: Any, a: Any, b: Any) -> Any:
    return builder.fmul(a, b)


@_operation(LANES_TYPE, LANES_TYPE, LANES_TYPE)
def divide(builder: Any, a: Any, b: Any) -> Any:
    return builder.fdiv(a, b)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@_operation(LANES_TYPE, LANES_TYPE, LANES_TYPE)
def smaller(builder: Any, a: Any, b: Any) -> Any:
    """NaN in a gives NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), b, a)


@_operation(LANES_TYPE, LANES_TYPE, LANES_TYPE)
def larger(builder: Any, a: Any, b: Any) -> Any:
    return _larger(builder, a, b)


def _halved(builder: Any, value: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    count = LANES
    while count > 1:
        count //= 2
        kind = ir.VectorType(_I32, count)
        low = builder.shuffle_vector(value, value, ir.Constant(kind, list(range(count))))
        high = builder.shuffle_vector(value, value, ir.Constant(kind, list(range(count, 2 * count))))
        value = join(builder, low, high)
    return builder.extract_element(value, ir.Constant(_I32, 0))


@_operation(types.float32, LANES_TYPE)
def total(builder: Any, value: Any) -> Any:
    """Sum of the lanes, always in the same order: first and last half, and so on."""
    return _halved(builder, value, lambda builder, a, b: builder.fadd(a, b))


@_operation(types.float32, LANES_TYPE)
def largest(builder: Any, value: Any) -> Any:
    return _halved(builder, value, _larger)


@_operation(types.float32, LANES_TYPE)
def first(builder: Any, value: Any) -> Any:
    return builder.extract_element(value, ir.Constant(_I32, 0))


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """LANES vectors of LANES numbers: blocks of half the size change places, and so on."""
    step = LANES // 2
    while step:
        for place in range(LANES):
            if place & step:
                continue
            a, b = rows[place], rows[place + step]
            kept = [LANES + lane - step if lane & step else lane for lane in range(LANES)]
            other = [LANES + lane if lane & step else lane + step for lane in range(LANES)]
            rows[place], rows[place + step] = (
                builder.shuffle_vector(a, b, ir.Constant(_VI32, order)) for order in (kept, other)
            )
        step //= 2
    return rows


def _turned(narrow: bool) -> Callable[..., Any]:
    def build(builder: Any, source: Any, step: Any, target: Any, line: Any) -> None:
        rows = []
        for _ in range(LANES):
            row = _load(builder, source, _VI16 if narrow else _V32, 2 if narrow else 4)
            rows.append(_widened(builder, row) if narrow else row)
            source = builder.add(source, step)
        for row in _transpose(builder, rows):
            builder.store(row, _at(builder, target, _V32), align=4)
            target = builder.add(target, line)

    return build


turn_f32 = _operation(types.void, *(types.int64,) * 4)(_turned(False))
turn_bf16 = _operation(types.void, *(types.int64,) * 4)(_turned(True))


@_operation(LANES_TYPE, LANES_TYPE)
def exp2(builder: Any, x: Any) -> Any:
    """2^x of numbers up to 126; those below -126 give 2^-126, NaN gives NaN."""
    least = _number(LEAST_POWER)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    shifted = builder.fadd(x, _number(ROUND))
    rest = builder.fsub(x, builder.fsub(shifted, _number(ROUND)))
    power = _number(EXP2[-1])
    for factor in EXP2[-2::-1]:
        power = _fma(builder, power, rest, _number(factor))
    whole = builder.add(builder.bitcast(shifted, _VI32), _whole(127 - 0x4B400000))
    return builder.fmul(power, builder.bitcast(builder.shl(whole, _whole(23)), _V32))


# The kernel. `at` is the address of a tail.Attend, whose fields have these offsets. numba keeps what it compiled until
# this file changes, so a change of the fields has to change it: by this number.
assert LAYOUT == 0xECCC6C7E, f"the fields in tail.py have changed: write {LAYOUT:#x} here"

(
    TAKEN, THREADS, ITEMS, HEADS, GROUPS, NODES, DIM, OUT_DIM, BLOCKS, BLOCK, QUERY, QUERY_ROW, QUERY_HEAD, QUERY_NODE,
    KEY, KEY_ROW, KEY_HEAD, KEY_SLOT, VALUE, VALUE_ROW, VALUE_HEAD, VALUE_SLOT, OUT, SLOTS, COUNTS, BOUNDS, LIST_WIDTH,
    SETTLED, SETTLED_ROW, SETTLED_HEAD, SETTLED_QUERY, SUMS, SUMS_ROW, SUMS_HEAD, SUMS_QUERY, SINKS, BIAS, BIAS_ROW,
    BIAS_HEAD, BIAS_NODE, SCRATCH, SCRATCH_BYTES, NARROW, SCALE, CAP,
) = ATTEND  # fmt: skip
LOG2_E = 1.4426950408889634
LEAST = -3.0e38  # a score below all others
WORD = 4  # bytes of a float32 and of an int32
ROW = LANES * WORD  # bytes of a vector
FOUR = 4 * LANES  # numbers that are worked on at once, so that they stay in registers


def _compiled(kernel: Callable[..., Any]) -> Any:
    """Kept for later runs where numba finds a folder that it may write to."""
    signature = types.void(types.int64)
    try:
        return cfunc(signature, cache=True, error_model="numpy")(kernel)
    except (OSError, RuntimeError):
        return cfunc(signature, error_model="numpy")(kernel)


@njit(error_model="numpy")
def multiply(queries, keys, stride, width, dim, scores):
    """Scores [2, stride] of queries [2, dim] and keys [dim, stride], of which width count."""
    line, other = stride * WORD, dim * WORD
    t = 0
    while t < width:
        key = keys + t * WORD
        out = scores + t * WORD
        zero = splat(types.float32(0))
        if width - t >= FOUR:
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
            for e in range(dim):
                a = splat(get_f32(queries + e * WORD))
                b = splat(get_f32(queries + other + e * WORD))
                k0, k1 = load_f32(key), load_f32(key + ROW)
                k2, k3 = load_f32(key + 2 * ROW), load_f32(key + 3 * ROW)
                a0, a1, a2, a3 = fma(a, k0, a0), fma(a, k1, a1), fma(a, k2, a2), fma(a, k3, a3)
                b0, b1, b2, b3 = fma(b, k0, b0), fma(b, k1, b1), fma(b, k2, b2), fma(b, k3, b3)
                key += line
            store_four(out, a0, a1, a2, a3)
            store_four(out + line, b0, b1, b2, b3)
            t += FOUR
        else:
            a0 = b0 = zero
            for e in range(dim):
                k0 = load_f32(key)
                a0 = fma(splat(get_f32(queries + e * WORD)), k0, a0)
                b0 = fma(splat(get_f32(queries + other + e * WORD)), k0, b0)
                key += line
            store_f32(out, a0)
            store_f32(out + line, b0)
            t += LANES


@njit(error_model="numpy")
def add_up(weights, line, slots, count, values, wide, sums):
    """Sums [2, wide] of values [.., wide] at the listed slots [count], by weights [2, line bytes]."""
    e = 0
    while e < wide:
        value = values + e * WORD
        out = sums + e * WORD
        zero = splat(types.float32(0))
        if wide - e >= FOUR:
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
            for j in range(count):
                v = value + get_i32(slots + j * WORD) * wide * WORD
                a = splat(get_f32(weights + j * WORD))
                b = splat(get_f32(weights + line + j * WORD))
                v0, v1, v2, v3 = load_f32(v), load_f32(v + ROW), load_f32(v + 2 * ROW), load_f32(v + 3 * ROW)
                a0, a1, a2, a3 = fma(a, v0, a0), fma(a, v1, a1), fma(a, v2, a2), fma(a, v3, a3)
                b0, b1, b2, b3 = fma(b, v0, b0), fma(b, v1, b1), fma(b, v2, b2), fma(b, v3, b3)
            store_four(out, a0, a1, a2, a3)
            store_four(out + wide * WORD, b0, b1, b2, b3)
            e += FOUR
        else:
            a0 = b0 = zero
            for j in range(count):
                v0 = load_f32(value + get_i32(slots + j * WORD) * wide * WORD)
                a0 = fma(splat(get_f32(weights + j * WORD)), v0, a0)
                b0 = fma(splat(get_f32(weights + line + j * WORD)), v0, b0)
            store_f32(out, a0)
            store_f32(out + wide * WORD, b0)
            e += LANES


@njit(error_model="numpy")
def store_four(out, a, b, c, d):
    store_f32(out, a)
    store_f32(out + ROW, b)
    store_f32(out + 2 * ROW, c)
    store_f32(out + 3 * ROW, d)


@njit(error_model="numpy")
def widen(source, dim, narrow, target):
    """dim numbers as float32."""
    e = 0
    while e + LANES <= dim:
        store_f32(target + e * WORD, load_bf16(source + e * 2) if narrow else load_f32(source + e * WORD))
        e += LANES
    while e < dim:
        put_f32(target + e * WORD, get_bf16(source + e * 2) if narrow else get_f32(source + e * WORD))
        e += 1


@njit(error_model="numpy")
def turn(source, step, count, dim, narrow, target, stride):
    """Keys of count slots, step bytes apart, as float32 [dim, stride]; zeros up to a multiple of LANES slots."""
    line, unit = stride * WORD, 2 if narrow else WORD
    t = 0
    while t < count:
        e = 0
        if t + LANES <= count:
            while e + LANES <= dim:
                if narrow:
                    turn_bf16(source + e * unit, step, target + e * line + t * WORD, line)
                else:
                    turn_f32(source + e * unit, step, target + e * line + t * WORD, line)
                e += LANES
        while e < dim:
            for i in range(LANES):
                x = types.float32(0)
                if t + i < count:
                    key = source + i * step + e * unit
                    x = get_bf16(key) if narrow else get_f32(key)
                put_f32(target + e * line + (t + i) * WORD, x)
            e += 1
        source += LANES * step
        t += LANES


@njit(error_model="numpy")
def cap_scores(scores, width, factor):
    """tanh(score * factor), as 1 - 2 / (1 + e^(2 score factor))."""
    one, two = splat(types.float32(1)), splat(types.float32(2))
    inner = splat(factor * types.float32(2 * LOG2_E))
    most = splat(types.float32(126))
    t = 0
    while t < width:
        x = mul(load_f32(scores + t * WORD), inner)
        store_f32(scores + t * WORD, sub(one, divide(two, add(exp2(smaller(x, most)), one))))
        t += LANES


@njit(error_model="numpy")
def weigh(scores, slots, count, factor, bias, mass, weights):
    """Weights [count] of the listed slots to base 2, zeros up to a multiple of LANES, and the largest exponent, which
    they lack. mass: an exponent that takes part in it."""
    full = (count + LANES - 1) // LANES * LANES
    base = types.float32(LOG2_E)
    for j in range(count):
        slot = get_i32(slots + j * WORD)
        x = get_f32(scores + slot * WORD) * factor
        if bias != 0:
            x += get_f32(bias + slot * WORD) * base
        put_f32(weights + j * WORD, x)
    for j in range(count, full):
        put_f32(weights + j * WORD, types.float32(LEAST))
    best = splat(types.float32(LEAST))
    t = 0
    while t < full:
        best = larger(load_f32(weights + t * WORD), best)
        t += LANES
    top = max(largest(best), mass)
    t = 0
    while t < full:
        store_f32(weights + t * WORD, exp2(sub(load_f32(weights + t * WORD), splat(top))))
        t += LANES
    for j in range(count, full):
        put_f32(weights + j * WORD, types.float32(0))
    return top


@njit(error_model="numpy")
def add_weights(weights, count):
    sums = splat(types.float32(0))
    t = 0
    while t < count:
        sums = add(sums, load_f32(weights + t * WORD))
        t += LANES
    return total(sums)


@njit(error_model="numpy")
def write_out(sums, dim, narrow, settled, share, whole, out):
    """(sums + settled * share) / whole; no settled part where its address is 0."""
    e = 0
    unit = 2 if narrow else WORD
    while e < dim:
        vector = e + LANES <= dim
        x = load_f32(sums + e * WORD) if vector else splat(get_f32(sums + e * WORD))
        if settled != 0:
            part = settled + e * unit
            if vector:
                old = load_bf16(part) if narrow else load_f32(part)
            else:
                old = splat(get_bf16(part) if narrow else get_f32(part))
            x = fma(old, splat(share), x)
        x = divide(x, splat(whole))
        if vector:
            if narrow:
                store_bf16(out + e * unit, x)
            else:
                store_f32(out + e * unit, x)
            e += LANES
        else:
            if narrow:
                put_bf16(out + e * unit, first(x))
            else:
                put_f32(out + e * unit, first(x))
            e += 1


@_compiled
def attend(at):
    """What tail.attend says, for as many (row, kv head, block of nodes) as no other thread has taken."""
    heads, groups, nodes = get_i64(at + HEADS), get_i64(at + GROUPS), get_i64(at + NODES)
    dim, out_dim = get_i64(at + DIM), get_i64(at + OUT_DIM)
    blocks, block = get_i64(at + BLOCKS), get_i64(at + BLOCK)
    narrow = get_i64(at + NARROW) != 0
    unit = 2 if narrow else WORD
    scale, cap, base = get_f32(at + SCALE), get_f32(at + CAP), types.float32(LOG2_E)
    factor = scale * base if cap == 0 else cap * base
    settled, sinks, bias = get_i64(at + SETTLED), get_i64(at + SINKS), get_i64(at + BIAS)
    wide = (out_dim + LANES - 1) // LANES * LANES
    keys = get_i64(at + SCRATCH) + take(at + THREADS) * get_i64(at + SCRATCH_BYTES)
    held = types.int64(-1)
    while True:
        item = take(at + TAKEN)
        if item >= get_i64(at + ITEMS):
            return
        pair = item // blocks
        row = pair // heads
        head = pair - row * heads
        low = get_i32(get_i64(at + BOUNDS) + row * 2 * WORD)
        used = get_i32(get_i64(at + BOUNDS) + row * 2 * WORD + WORD) - low
        width = (used + LANES - 1) // LANES * LANES
        stride = width | LANES  # no power of two: columns would share a set of the cache
        line = stride * WORD
        values = keys + dim * line
        query = values + width * wide * WORD
        scores = query + (2 * dim + LANES - 1) // LANES * ROW
        weights = scores + 2 * line
        sums = weights + 2 * line
        if held != pair:
            held = pair
            step = get_i64(at + KEY_SLOT)
            source = get_i64(at + KEY) + row * get_i64(at + KEY_ROW) + head * get_i64(at + KEY_HEAD) + low * step
            turn(source, step, used, dim, narrow, keys, stride)
            step = get_i64(at + VALUE_SLOT)
            source = get_i64(at + VALUE) + row * get_i64(at + VALUE_ROW) + head * get_i64(at + VALUE_HEAD) + low * step
            for t in range(used):
                widen(source + t * step, out_dim, narrow, values + t * wide * WORD)
                for e in range(out_dim, wide):
                    put_f32(values + (t * wide + e) * WORD, types.float32(0))
        start = (item - pair * blocks) * block
        for node in range(start, min(start + block, nodes)):
            count = get_i32(get_i64(at + COUNTS) + (row * nodes + node) * WORD)
            slots = get_i64(at + SLOTS) + (row * nodes + node) * get_i64(at + LIST_WIDTH) * WORD
            for group in range(0, groups, 2):
                pairs = min(groups - group, 2)
                for i in range(2):  # the last of an odd number stands twice
                    of = head * groups + group + min(i, pairs - 1)
                    source = get_i64(at + QUERY) + row * get_i64(at + QUERY_ROW) + of * get_i64(at + QUERY_HEAD)
                    widen(source + node * get_i64(at + QUERY_NODE), dim, narrow, query + i * dim * WORD)
                multiply(query, keys, stride, width, dim, scores)
                for i in range(pairs):
                    mine = scores + i * line
                    of = head * groups + group + i
                    if cap != 0:
                        cap_scores(mine, width, scale / cap)
                    biased = types.int64(0)
                    if bias != 0:
                        biased = bias + row * get_i64(at + BIAS_ROW) + of * get_i64(at + BIAS_HEAD) + low * WORD
                        biased += node * get_i64(at + BIAS_NODE)
                    mass = types.float32(LEAST)
                    if settled != 0:
                        source = get_i64(at + SUMS) + row * get_i64(at + SUMS_ROW) + head * get_i64(at + SUMS_HEAD)
                        mass = get_f32(source + ((group + i) * nodes + node) * get_i64(at + SUMS_QUERY)) * base
                    sink = types.float32(LEAST)
                    if sinks != 0:
                        sink = get_f32(sinks + of * WORD) * base
                    top = weigh(mine, slots, count, factor, biased, max(mass, sink), weights + i * line)
                    whole, share = add_weights(weights + i * line, count), types.float32(0)
                    if settled != 0:
                        share = first(exp2(splat(mass - top)))
                        whole += share
                    if sinks != 0:
                        whole += first(exp2(splat(sink - top)))
                    if whole == 0:  # a node that is not real may see nothing
                        whole = types.float32(1)
                    put_f32(mine, whole)
                    put_f32(mine + WORD, share)
                add_up(weights, line, slots, count, values, wide, sums)
                for i in range(pairs):
                    mine, of = scores + i * line, head * groups + group + i
                    old = settled
                    if settled != 0:
                        old += row * get_i64(at + SETTLED_ROW) + head * get_i64(at + SETTLED_HEAD)
                        old += ((group + i) * nodes + node) * get_i64(at + SETTLED_QUERY)
                    out = get_i64(at + OUT) + ((row * nodes + node) * heads * groups + of) * out_dim * unit
                    whole, share = get_f32(mine), get_f32(mine + WORD)
                    write_out(sums + i * wide * WORD, out_dim, narrow, old, share, whole, out)


(
    L_TAKEN, L_ROWS, L_NODES, L_WIDTH, L_TOTAL, L_SEEN, L_SEEN_ROW, L_SEEN_NODE, L_STARTS, L_ORDER, L_SLOTS, L_COUNTS,
    L_BOUNDS,
) = LIST  # fmt: skip


@_compiled
def list_slots(at):
    """What tail.Paths says, for as many rows as no other thread has taken."""
    nodes, width = get_i64(at + L_NODES), get_i64(at + L_WIDTH)
    while True:
        row = take(at + L_TAKEN)
        if row >= get_i64(at + L_ROWS):
            return
        start = get_i64(get_i64(at + L_STARTS) + row * 8)
        order = get_i64(at + L_ORDER) + row * width * 8
        low, high = get_i64(at + L_TOTAL), types.int64(0)
        for node in range(nodes):
            seen = get_i64(at + L_SEEN) + row * get_i64(at + L_SEEN_ROW) + node * get_i64(at + L_SEEN_NODE)
            out = get_i64(at + L_SLOTS) + (row * nodes + node) * width * WORD
            count = types.int64(0)
            for j in range(width):
                slot = start + get_i64(order + j * 8)
                if slot < get_i64(at + L_TOTAL) and get_u8(seen + slot) != 0:
                    put_i32(out + count * WORD, slot)
                    count += 1
                    low, high = min(low, slot), max(high, slot + 1)
            put_i32(get_i64(at + L_COUNTS) + (row * nodes + node) * WORD, count)
        low = min(low, high)
        put_i32(get_i64(at + L_BOUNDS) + row * 2 * WORD, low)
        put_i32(get_i64(at + L_BOUNDS) + row * 2 * WORD + WORD, high)
        for node in range(nodes):
            out = get_i64(at + L_SLOTS) + (row * nodes + node) * width * WORD
            for j in range(get_i32(get_i64(at + L_COUNTS) + (row * nodes + node) * WORD)):
                put_i32(out + j * WORD, get_i32(out + j * WORD) - low)
