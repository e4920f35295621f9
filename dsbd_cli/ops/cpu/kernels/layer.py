"""The kernels of layer.py and program.py in numba: one row at a time, in vectors of LANES numbers, computed in float32.

A number is rounded to the dtype of the model where transformers' modules round it. Addresses are int64. Nothing checks
them here; layer.py does.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import njit, types

from dsbd_cli.ops.cpu import layer as layer_ops
from dsbd_cli.ops.cpu import program
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.simd import (
    I32,
    I64,
    LANES,
    add,
    divide,
    exp2,
    fma,
    get_bf16,
    get_f32,
    get_i64,
    larger,
    load_bf16,
    load_f32,
    mul,
    nearest_bf16,
    operation,
    pointer,
    put_f32,
    put_i64,
    root,
    smaller,
    splat,
    store_bf16,
    store_f32,
    sub,
    take,
    total,
)
from dsbd_cli.ops.cpu.layer import DELTA, GATED, GATED_NORM, LAYOUT, NORM, OUTPUT_GATE, ROTATE, STEPS

compiled = KernelCompiler("norms, rotations and activations", seconds=5, layout=LAYOUT + program.LAYOUT)

# `at` is the address of the arguments that layer.py declares for a kernel, whose fields have these offsets.
assert layer_ops.STEP == LANES
P_COUNT, P_CALLS, P_TEAM = program.RUN
P_CALL, P_WORD = 24, 8  # bytes of an entry of the table, and of its numbers
(N_TAKEN, _, N_ITEMS, N_ROWS, N_SHARE, N_WIDTH, N_X, N_X_ROW, N_MORE, N_MORE_ROW, N_WEIGHT, N_OUT, N_SUMMED,
 N_UNIT_OFFSET, N_WIDE, N_NARROW, N_EPS) = NORM  # fmt: skip
(
    G_TAKEN,
    _,
    G_ITEMS,
    G_ROWS,
    G_SHARE,
    G_WIDTH,
    G_GATE_UP,
    G_GATE_UP_ROW,
    G_OUT,
    G_GELU,
    G_NARROW,
    G_CLAMPED,
    G_LIMIT,
    G_ALPHA,
) = GATED
(R_TAKEN, _, R_ITEMS, R_ROWS, R_SHARE, R_NODES, R_HEADS, R_KV_HEADS, R_DIM, R_QKV, R_QKV_ROW, R_COS, R_SIN,
 R_ANGLE_ROW, R_SLOTS, R_OUT, R_KEYS, R_VALUES, R_QUERY_NORM, R_KEY_NORM, R_UNIT_OFFSET, R_NARROW,
 R_EPS) = ROTATE  # fmt: skip

(O_TAKEN, _, O_ITEMS, O_ROWS, O_SHARE, O_HEADS, O_DIM, O_X, O_GATE, O_GATE_ROW, O_EACH, O_OUT, O_NARROW) = OUTPUT_GATE
(M_TAKEN, _, M_ITEMS, M_ROWS, M_SHARE, M_GROUPS, M_WIDTH, M_X, M_X_ROW, M_GATE, M_GATE_ROW, M_WEIGHT, M_OUT,
 M_GATE_FIRST, M_NARROW, M_EPS) = GATED_NORM  # fmt: skip
(D_TAKEN, _, D_ITEMS, D_ROWS, D_SHARE, D_GROUPS, D_DIM, D_HEADS, D_X, D_X_ROW, D_BETAS, D_BETAS_ROW, D_STEPS,
 D_STEPS_ROW, D_DECAY, D_BIAS, D_QUERY, D_KEY, D_DECAYS, D_OUT, D_FACTOR) = DELTA  # fmt: skip
(S_TAKEN, _, S_ITEMS, S_ROWS, S_SHARE, S_HEADS, S_STEPS, S_STEPS_ROW, S_DECAY, S_BIAS, S_SIZES, S_DECAYS, S_LEAST,
 S_MOST) = STEPS  # fmt: skip

TO_BASE_2 = -math.log2(math.e)
MOST_POWER = 120.0  # of two: a number divided by a larger power is practically zero
MOST_EXPONENT = 87.0
LOG2E, LOG2E_REST, LN2 = 1.44269502, 1.92596299e-8, 0.693147181
CUBIC, TWICE_ROOT = 0.044715, 2 * math.sqrt(2 / math.pi)


@njit(error_model="numpy")
def load(address, narrow):
    return load_bf16(address) if narrow else load_f32(address)


@njit(error_model="numpy")
def store(address, value, narrow):
    if narrow:
        store_bf16(address, value)
    else:
        store_f32(address, value)


@njit(error_model="numpy")
def near(value, narrow):
    return nearest_bf16(value) if narrow else value


@njit(error_model="numpy")
def scale_of(squares, width, eps):
    return types.float32(1) / root(squares / types.float32(width) + eps)


@njit(error_model="numpy")
def scaled(value, scale, weight, unit_offset, narrow):
    """Return normalised numbers times their weights, which the caller stores or rounds."""
    if unit_offset:
        return mul(mul(value, scale), add(splat(types.float32(1)), weight))
    return mul(weight, near(mul(value, scale), narrow))


@compiled.addressed
def norm(at):
    """Divide rows (plus what is added to them) by their root mean squares and multiply them by weights."""
    width, narrow, unit_offset = get_i64(at + N_WIDTH), get_i64(at + N_NARROW), get_i64(at + N_UNIT_OFFSET)
    unit = types.int64(2) if narrow else types.int64(4)
    weight, eps = get_i64(at + N_WEIGHT), get_f32(at + N_EPS)
    rounds = narrow and not get_i64(at + N_WIDE)  # before the product with the weight
    while True:
        item = take(at + N_TAKEN)
        if item >= get_i64(at + N_ITEMS):
            return
        share = get_i64(at + N_SHARE)
        for row in range(item * share, min((item + 1) * share, get_i64(at + N_ROWS))):
            x = get_i64(at + N_X) + row * get_i64(at + N_X_ROW)
            out = get_i64(at + N_OUT) + row * width * unit
            squares = splat(types.float32(0))
            i = types.int64(0)
            if get_i64(at + N_MORE) != 0:
                more = get_i64(at + N_MORE) + row * get_i64(at + N_MORE_ROW)
                summed = get_i64(at + N_SUMMED) + row * width * unit
                while i < width:
                    value = near(add(load(x + i * unit, narrow), load(more + i * unit, narrow)), narrow)
                    store(summed + i * unit, value, narrow)
                    squares = fma(value, value, squares)
                    i += LANES
                x = summed
            else:
                while i < width:
                    value = load(x + i * unit, narrow)
                    squares = fma(value, value, squares)
                    i += LANES
            scale = splat(scale_of(total(squares), width, eps))
            i = types.int64(0)
            while i < width:
                value = scaled(load(x + i * unit, narrow), scale, load(weight + i * unit, narrow), unit_offset, rounds)
                store(out + i * unit, value, narrow)
                i += LANES


@compiled.addressed
def gated(at):
    """Multiply silu, gelu or a clamped gate of the first half of each row by the second half."""
    width, narrow, gelu = get_i64(at + G_WIDTH), get_i64(at + G_NARROW), get_i64(at + G_GELU)
    clamped, limit, alpha = get_i64(at + G_CLAMPED), splat(get_f32(at + G_LIMIT)), splat(get_f32(at + G_ALPHA))
    least = sub(splat(types.float32(0)), limit)
    unit = types.int64(2) if narrow else types.int64(4)
    one, most = splat(types.float32(1)), splat(types.float32(MOST_POWER))
    while True:
        item = take(at + G_TAKEN)
        if item >= get_i64(at + G_ITEMS):
            return
        share = get_i64(at + G_SHARE)
        for row in range(item * share, min((item + 1) * share, get_i64(at + G_ROWS))):
            gate = get_i64(at + G_GATE_UP) + row * get_i64(at + G_GATE_UP_ROW)
            up, out = gate + width * unit, get_i64(at + G_OUT) + row * width * unit
            i = types.int64(0)
            while i < width:
                value, other = load(gate + i * unit, narrow), load(up + i * unit, narrow)
                if clamped:
                    value, other = smaller(value, limit), larger(smaller(other, limit), least)
                    power = smaller(mul(mul(value, alpha), splat(types.float32(TO_BASE_2))), most)
                    active = divide(value, add(one, exp2(power)))
                    store(out + i * unit, mul(active, add(other, one)), narrow)
                    i += LANES
                    continue
                inner = value
                if gelu:
                    cube = mul(mul(value, value), value)
                    inner = mul(splat(types.float32(TWICE_ROOT)), fma(splat(types.float32(CUBIC)), cube, value))
                power = smaller(mul(inner, splat(types.float32(TO_BASE_2))), most)
                active = near(divide(value, add(one, exp2(power))), narrow)
                store(out + i * unit, mul(active, other), narrow)
                i += LANES


@njit(error_model="numpy")
def rotate_head(source, target, cos, sin, dim, unit, weight, eps, unit_offset, narrow):
    """Rotate a head, whose halves are the two coordinates. weight: of a norm that comes first; 0 for none."""
    half = dim // 2 * unit
    scale = splat(types.float32(1))
    if weight != 0:
        squares = splat(types.float32(0))
        i = types.int64(0)
        while i < 2 * half:
            value = load(source + i, narrow)
            squares = fma(value, value, squares)
            i += LANES * unit
        scale = splat(scale_of(total(squares), dim, eps))
    i = types.int64(0)
    while i < half:
        first, second = load(source + i, narrow), load(source + half + i, narrow)
        if weight != 0:
            first = near(scaled(first, scale, load(weight + i, narrow), unit_offset, narrow), narrow)
            second = near(scaled(second, scale, load(weight + half + i, narrow), unit_offset, narrow), narrow)
        left, right = near(mul(first, load(cos + i, narrow)), narrow), near(mul(second, load(sin + i, narrow)), narrow)
        store(target + i, sub(left, right), narrow)
        left = near(mul(second, load(cos + half + i, narrow)), narrow)
        right = near(mul(first, load(sin + half + i, narrow)), narrow)
        store(target + half + i, add(left, right), narrow)
        i += LANES * unit


@compiled.addressed
def rotate(at):
    """Rotate queries and keys, and write keys and values to their slots."""
    narrow, dim, nodes = get_i64(at + R_NARROW), get_i64(at + R_DIM), get_i64(at + R_NODES)
    unit = types.int64(2) if narrow else types.int64(4)
    heads, kv_heads, size = get_i64(at + R_HEADS), get_i64(at + R_KV_HEADS), dim * unit
    query_norm, key_norm = get_i64(at + R_QUERY_NORM), get_i64(at + R_KEY_NORM)
    eps, unit_offset = get_f32(at + R_EPS), get_i64(at + R_UNIT_OFFSET)
    while True:
        item = take(at + R_TAKEN)
        if item >= get_i64(at + R_ITEMS):
            return
        share = get_i64(at + R_SHARE)
        for row in range(item * share, min((item + 1) * share, get_i64(at + R_ROWS))):
            source = get_i64(at + R_QKV) + row * get_i64(at + R_QKV_ROW)
            request, node = row // nodes, row % nodes
            angle = request * get_i64(at + R_ANGLE_ROW) + node * size
            cos, sin = get_i64(at + R_COS) + angle, get_i64(at + R_SIN) + angle
            for head in range(heads):
                target = get_i64(at + R_OUT) + ((request * heads + head) * nodes + node) * size
                rotate_head(source, target, cos, sin, dim, unit, query_norm, eps, unit_offset, narrow)
                source += size
            offset = get_i64(get_i64(at + R_SLOTS) + row * 8) * kv_heads * size
            for head in range(kv_heads):
                target = get_i64(at + R_KEYS) + offset + head * size
                rotate_head(source, target, cos, sin, dim, unit, key_norm, eps, unit_offset, narrow)
                source += size
            target, i = get_i64(at + R_VALUES) + offset, types.int64(0)
            while i < kv_heads * size:
                store(target + i, load(source + i, narrow), narrow)
                i += LANES * unit


@njit(error_model="numpy")
def sigmoid(value):
    """Return 1 / (1 + exp(-x)), within a few units in the last place."""
    one, minus = (
        splat(types.float32(1)),
        smaller(sub(splat(types.float32(0)), value), splat(types.float32(MOST_EXPONENT))),
    )
    minus = larger(splat(types.float32(-MOST_EXPONENT)), minus)  # in this order NaN stays
    power = mul(minus, splat(types.float32(LOG2E)))
    rest = fma(minus, splat(types.float32(LOG2E)), sub(splat(types.float32(0)), power))  # the rounding of that product
    rest = fma(minus, splat(types.float32(LOG2E_REST)), rest)
    grown = exp2(power)
    return divide(one, add(one, fma(grown, mul(rest, splat(types.float32(LN2))), grown)))


@njit(error_model="numpy")
def number(address, narrow):
    return get_bf16(address) if narrow else get_f32(address)


@njit(error_model="numpy")
def silu(value):
    return mul(value, sigmoid(value))


@compiled.addressed
def output_gate(at):
    """Multiply attention by the sigmoid of a gate, of each number or of each head."""
    heads, dim, narrow, each = get_i64(at + O_HEADS), get_i64(at + O_DIM), get_i64(at + O_NARROW), get_i64(at + O_EACH)
    unit = types.int64(2) if narrow else types.int64(4)
    while True:
        item = take(at + O_TAKEN)
        if item >= get_i64(at + O_ITEMS):
            return
        share = get_i64(at + O_SHARE)
        for row in range(item * share, min((item + 1) * share, get_i64(at + O_ROWS))):
            gate, past = get_i64(at + O_GATE) + row * get_i64(at + O_GATE_ROW), row * heads * dim * unit
            x, out = get_i64(at + O_X) + past, get_i64(at + O_OUT) + past
            for head in range(heads):
                factor = near(sigmoid(splat(number(gate + head * unit, narrow))), narrow)
                for i in range(head * dim * unit, (head + 1) * dim * unit, LANES * unit):
                    if each:
                        factor = near(sigmoid(load(gate + i, narrow)), narrow)
                    store(out + i, mul(load(x + i, narrow), factor), narrow)


@compiled.addressed
def gated_norm(at):
    """Normalise groups of numbers and multiply them by silu of a gate, in either order."""
    groups, width, narrow = get_i64(at + M_GROUPS), get_i64(at + M_WIDTH), get_i64(at + M_NARROW)
    gate_first, weight, eps = get_i64(at + M_GATE_FIRST), get_i64(at + M_WEIGHT), get_f32(at + M_EPS)
    unit = types.int64(2) if narrow else types.int64(4)
    size = width * unit
    while True:
        item = take(at + M_TAKEN)
        if item >= get_i64(at + M_ITEMS):
            return
        share = get_i64(at + M_SHARE)
        for row in range(item * share, min((item + 1) * share, get_i64(at + M_ROWS))):
            x, gate = (
                get_i64(at + M_X) + row * get_i64(at + M_X_ROW),
                get_i64(at + M_GATE) + row * get_i64(at + M_GATE_ROW),
            )
            out = get_i64(at + M_OUT) + row * groups * size
            for start in range(0, groups * size, size):
                scale = splat(types.float32(1))
                if weight != 0:
                    squares = splat(types.float32(0))
                    for i in range(start, start + size, LANES * unit):
                        value = load(x + i, narrow)
                        if gate_first:
                            value = mul(value, silu(load(gate + i, narrow)))
                        squares = fma(value, value, squares)
                    scale = splat(scale_of(total(squares), width, eps))
                for i in range(start, start + size, LANES * unit):
                    value, factor = load(x + i, narrow), silu(load(gate + i, narrow))
                    if gate_first or weight == 0:
                        value = mul(value, factor)
                    if weight != 0:
                        value = scaled(value, scale, load(weight + i, narrow), False, narrow)
                        if not gate_first:
                            value = mul(near(value, narrow), factor)
                    store(out + i, value, narrow)


@njit(error_model="numpy")
def softplus(x):
    """Return log(1 + exp(x)), in float64, so that it is rounded once."""
    wide = types.float64(x)
    return types.float32(wide if wide > 20.0 else math.log1p(math.exp(wide)))


@njit(error_model="numpy")
def write_unit(source, target, dim, scale):
    """Write a head divided by its norm, times `scale`."""
    squares = splat(types.float32(0))
    for i in range(0, dim * 4, LANES * 4):
        value = load_f32(source + i)
        squares = fma(value, value, squares)
    factor = splat(scale / root(total(squares) + types.float32(1e-6)))
    for i in range(0, dim * 4, LANES * 4):
        store_f32(target + i, mul(load_f32(source + i), factor))


@compiled.addressed
def delta_inputs(at):
    """Normalise queries and keys of the gated delta rule, and compute its betas and log-decays."""
    groups, dim, heads = get_i64(at + D_GROUPS), get_i64(at + D_DIM), get_i64(at + D_HEADS)
    scale, size = types.float32(1) / root(types.float32(dim)), dim * 4
    while True:
        item = take(at + D_TAKEN)
        if item >= get_i64(at + D_ITEMS):
            return
        share = get_i64(at + D_SHARE)
        for row in range(item * share, min((item + 1) * share, get_i64(at + D_ROWS))):
            x = get_i64(at + D_X) + row * get_i64(at + D_X_ROW)
            for group in range(groups):
                past = (row * groups + group) * size
                write_unit(x + group * size, get_i64(at + D_QUERY) + past, dim, scale)
                write_unit(x + (groups + group) * size, get_i64(at + D_KEY) + past, dim, types.float32(1))
            betas = get_i64(at + D_BETAS) + row * get_i64(at + D_BETAS_ROW)
            steps = get_i64(at + D_STEPS) + row * get_i64(at + D_STEPS_ROW)
            for past in range(0, heads * 4, 4):
                out = row * heads * 4 + past
                beta = types.float32(1 / (1 + math.exp(-types.float64(get_f32(betas + past)))))
                put_f32(get_i64(at + D_OUT) + out, beta * get_f32(at + D_FACTOR))
                size_of_step = softplus(get_f32(steps + past) + get_f32(get_i64(at + D_BIAS) + past))
                put_f32(get_i64(at + D_DECAYS) + out, get_f32(get_i64(at + D_DECAY) + past) * size_of_step)


@compiled.addressed
def steps(at):
    """Compute step sizes and log-decays of a Mamba-2 scan."""
    heads, least, most = get_i64(at + S_HEADS), get_f32(at + S_LEAST), get_f32(at + S_MOST)
    while True:
        item = take(at + S_TAKEN)
        if item >= get_i64(at + S_ITEMS):
            return
        share = get_i64(at + S_SHARE)
        for row in range(item * share, min((item + 1) * share, get_i64(at + S_ROWS))):
            source = get_i64(at + S_STEPS) + row * get_i64(at + S_STEPS_ROW)
            for past in range(0, heads * 4, 4):
                size = softplus(get_f32(source + past) + get_f32(get_i64(at + S_BIAS) + past))
                size = least if size < least else most if size > most else size  # NaN stays
                put_f32(get_i64(at + S_SIZES) + row * heads * 4 + past, size)
                decay = get_f32(get_i64(at + S_DECAY) + past) * size
                put_f32(get_i64(at + S_DECAYS) + row * heads * 4 + past, decay)


# The loop of program.py: it runs kernels, one after another, each on its number of threads.


@operation(types.void, types.int64, types.int64)
def call(builder: Any, kernel: Any, arguments: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [I64])
    builder.call(pointer(builder, kernel, kind), [arguments])


@operation(types.void, types.int64, types.int64, types.int64, types.int64)
def call_together(builder: Any, team: Any, kernel: Any, arguments: Any, threads: Any) -> Any:
    """Call a kernel on several threads. team: the address of GOMP_parallel."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I32, I32])
    call_arguments = [kernel, arguments, builder.trunc(threads, I32), ir.Constant(I32, 0)]
    builder.call(pointer(builder, team, kind), call_arguments)


@compiled.addressed
def run(at):
    """Run the kernels of the table. The two counters that begin a kernel's arguments are set to 0 before it runs."""
    entry = get_i64(at + P_CALLS)
    for _ in range(get_i64(at + P_COUNT)):
        kernel, arguments, threads = get_i64(entry), get_i64(entry + P_WORD), get_i64(entry + 2 * P_WORD)
        put_i64(arguments, 0)
        put_i64(arguments + P_WORD, 0)
        if threads == 1:
            call(kernel, arguments)
        else:
            call_together(get_i64(at + P_TEAM), kernel, arguments, threads)
        entry += P_CALL
