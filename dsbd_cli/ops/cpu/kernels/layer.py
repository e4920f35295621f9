"""The kernels of layer.py in numba: one row at a time, in vectors of LANES numbers, computed in float32.

A number is rounded to the dtype of the model where transformers' modules round it. Addresses are int64. Nothing checks
them here; layer.py does.
"""

from __future__ import annotations

import math

from numba import njit, types

from dsbd_cli.ops.cpu import layer as layer_ops
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.simd import (
    LANES,
    add,
    divide,
    exp2,
    fma,
    get_f32,
    get_i64,
    larger,
    load_bf16,
    load_f32,
    mul,
    nearest_bf16,
    root,
    smaller,
    splat,
    store_bf16,
    store_f32,
    sub,
    take,
    total,
)
from dsbd_cli.ops.cpu.layer import GATED, LAYOUT, NORM, ROTATE

compiled = KernelCompiler("norms, rotations and activations", seconds=2, layout=LAYOUT)

# `at` is the address of a layer.NormArguments, GatedArguments or RotateArguments, whose fields have these offsets.
assert layer_ops.STEP == LANES
(N_TAKEN, _, N_ITEMS, N_ROWS, N_SHARE, N_WIDTH, N_X, N_X_ROW, N_MORE, N_MORE_ROW, N_WEIGHT, N_OUT, N_SUMMED,
 N_UNIT_OFFSET, N_NARROW, N_EPS) = NORM  # fmt: skip
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

TO_BASE_2 = -math.log2(math.e)
MOST_POWER = 120.0  # of two: a number divided by a larger power is practically zero
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
                value = scaled(load(x + i * unit, narrow), scale, load(weight + i * unit, narrow), unit_offset, narrow)
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
