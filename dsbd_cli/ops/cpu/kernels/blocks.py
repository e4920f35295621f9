"""The kernels of blocks.py in numba: they unpack the blocks of GGUF files.

Addresses are int64. Nothing checks them here; blocks.py does.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from dsbd_cli.ops.cpu.blocks import FIELDS, LAYOUT, MOST, SCALES, UNPACK
from dsbd_cli.ops.cpu.kernels.compiler import KernelCompiler
from dsbd_cli.ops.cpu.kernels.simd import (
    F32,
    I8,
    I32,
    LANES,
    LANES_TYPE,
    VECTOR,
    WHOLES,
    WORD,
    add,
    get_f32,
    get_i32,
    get_i64,
    get_u8,
    loaded,
    mul,
    operation,
    pointer,
    put_f32,
    put_i32,
    splat,
    store_f32,
    sub,
    take,
)
from dsbd_cli.ops.quantized_weight import LARGEST_E8M0

compiled = KernelCompiler("blocks of GGUF files", seconds=2, layout=LAYOUT)

# `at` is the address of a blocks.UnpackArguments, `form` that of a blocks.FormatFields.
(NUMBERS, SIZE, KIND, GROUPS, SHIFT, START, BLOCK_TABLE, PART_AT, PART_BITS, PART_SPAN, PART_TO, SECOND, *_) = FIELDS
U_TAKEN, U_THREADS, U_ITEMS, U_ROWS, U_COUNT, U_SHARE, U_INPUTS, U_OUT, U_SPARE, U_SPARE_BYTES = UNPACK
HALF, HALVES, SIX_BITS, Q6_K, Q2_K, Q3_K, IQ4_XS, E8M0 = range(len(SCALES))
BLOCK_SCALES, BLOCK_OFFSETS = MOST, MOST + MOST // 16 * WORD  # behind the levels of a block
QUAD, BYTES = ir.VectorType(I32, 4), ir.VectorType(I8, LANES)


@operation(types.void, types.int64, types.int64)
def put_u8(builder: Any, address: Any, value: Any) -> Any:
    builder.store(builder.trunc(value, I8), pointer(builder, address, I8))


@operation(types.float32, types.int64)
def get_f16(builder: Any, address: Any) -> Any:
    return builder.fpext(loaded(builder, address, ir.HalfType(), 1), F32)


@operation(types.void, *(types.int64,) * 5)
def add_bits(builder: Any, source: Any, shift: Any, mask: Any, to: Any, target: Any) -> Any:
    """Add bits of 16 bytes to 16 levels, without a carry. shift: places of the bits below them. mask: of four bytes."""

    def each(value: Any) -> Any:
        vector = builder.insert_element(ir.Constant(QUAD, ir.Undefined), builder.trunc(value, I32), ir.Constant(I32, 0))
        return builder.shuffle_vector(vector, vector, ir.Constant(QUAD, [0] * 4))

    bits = builder.and_(builder.lshr(loaded(builder, source, QUAD, 1), each(shift)), each(mask))
    added = builder.xor(loaded(builder, target, QUAD, 1), builder.shl(bits, each(to)))
    builder.store(added, pointer(builder, target, QUAD), align=1)


@operation(types.void, types.int64, types.int64)
def clear_bytes(builder: Any, address: Any, value: Any) -> Any:
    """Store a byte LANES times."""
    vector = builder.insert_element(ir.Constant(BYTES, ir.Undefined), builder.trunc(value, I8), ir.Constant(I32, 0))
    repeated = builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))
    builder.store(repeated, pointer(builder, address, BYTES), align=1)


@operation(LANES_TYPE, types.int64)
def load_bytes(builder: Any, address: Any) -> Any:
    """Load LANES bytes 0 .. 255 as float32."""
    return builder.sitofp(builder.zext(loaded(builder, address, BYTES, 1), WHOLES), VECTOR)


@njit(error_model="numpy")
def add_part(source, bits, span, to, levels, numbers):
    """Add a part of the bits of all levels."""
    if span == 0:
        word = get_i32(source)
        for k in range(numbers):
            put_u8(levels + k, get_u8(levels + k) ^ (((word >> k) & 1) << to))
        return
    mask, done = ((types.int64(1) << bits) - 1) * 0x01010101, types.int64(0)
    while done < numbers:
        for shift in range(0, 8, bits):
            for k in range(0, span, 16):
                add_bits(source + k, shift, mask, to, levels + done + k)
            done += span
        source += span


@njit(error_model="numpy")
def unpack_levels(block, form, levels):
    """Write the levels of a block as bytes."""
    numbers = get_i64(form + NUMBERS)
    for k in range(0, numbers, LANES):
        clear_bytes(levels + k, get_i64(form + START))
    for part in (form, form + SECOND - PART_AT):
        if get_i64(part + PART_BITS):
            source = block + get_i64(part + PART_AT)
            add_part(
                source, get_i64(part + PART_BITS), get_i64(part + PART_SPAN), get_i64(part + PART_TO), levels, numbers
            )


@njit(error_model="numpy")
def six_bits(block, scales, offsets):
    """Write the eight scales and offsets of Q4_K and Q5_K. Numbers behind both are overwritten."""
    first, second, third = get_i32(block + 4), get_i32(block + 8), get_i32(block + 12)
    put_i32(scales, first & 0x3F3F3F3F)
    put_i32(scales + WORD, (third & 0x0F0F0F0F) | ((first >> 2) & 0x30303030))
    put_i32(scales + 2 * WORD, second & 0x3F3F3F3F)
    put_i32(scales + 3 * WORD, ((third >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030))
    units = load_bytes(scales)  # eight of the scales, and then eight of the offsets
    store_f32(offsets - 8 * WORD, mul(units, splat(-get_f16(block + 2))))
    store_f32(scales, mul(units, splat(get_f16(block))))


@njit(error_model="numpy")
def unpack_scales(block, form, scales, offsets):
    """Write scales and offsets of the groups of a block, float32."""
    kind, zero = get_i64(form + KIND), types.float32(0)
    if kind == SIX_BITS:
        six_bits(block, scales, offsets)
        return
    for k in range(get_i64(form + GROUPS)):
        scale, offset = zero, -zero  # which changes no sum
        if kind == HALF:
            scale = get_f16(block)
        elif kind == HALVES:
            scale, offset = get_f16(block), get_f16(block + 2)
        elif kind == Q6_K:
            scale = get_f16(block + 208) * types.float32((get_u8(block + 192 + k) ^ 128) - 128)
        elif kind == Q2_K:
            units = get_u8(block + k)
            scale = get_f16(block + 80) * types.float32(units & 15)
            offset = -(get_f16(block + 82) * types.float32(units >> 4))
        elif kind == Q3_K:
            low = (get_u8(block + 96 + k % 8) >> (k // 8 * 4)) & 15
            high = (get_u8(block + 104 + k % 4) >> (k // 4 * 2)) & 3
            scale = get_f16(block + 108) * types.float32((low | (high << 4)) - 32)
        elif kind == IQ4_XS:
            low = (get_u8(block + 4 + k // 2) >> (k % 2 * 4)) & 15
            high = (get_u8(block + 2 + k // 4) >> (k % 4 * 2)) & 3
            scale = get_f16(block) * types.float32((low | (high << 4)) - 32)
        put_f32(scales + k * WORD, scale)
        put_f32(offsets + k * WORD, offset)
    if kind == E8M0:  # 2 to the power of the byte - 128, whose smallest two are subnormal, and the largest are NaN
        power = get_u8(block)
        bits = (power - 1) << 23 if power > 1 else types.int64(0x200000) << power
        put_i32(scales, bits if power <= LARGEST_E8M0 else types.int64(0x7FC00000))


@njit(error_model="numpy")
def unpack_row(row, form, inputs, spare, out):
    """Write a row as float32. spare: memory of blocks.SPARE bytes."""
    numbers, table, shift = (
        get_i64(form + NUMBERS),
        get_i64(form + BLOCK_TABLE),
        splat(types.float32(get_i64(form + SHIFT))),
    )
    group = numbers // get_i64(form + GROUPS)
    for _ in range(inputs // numbers):
        unpack_levels(row, form, spare)
        unpack_scales(row, form, spare + BLOCK_SCALES, spare + BLOCK_OFFSETS)
        if table:
            for k in range(numbers):
                put_u8(spare + k, get_u8(table + get_u8(spare + k)))
        for k in range(0, numbers, LANES):
            at = k // group * WORD
            scale, offset = splat(get_f32(spare + BLOCK_SCALES + at)), splat(get_f32(spare + BLOCK_OFFSETS + at))
            store_f32(out + k * WORD, add(mul(sub(load_bytes(spare + k), shift), scale), offset))
        row, out = row + get_i64(form + SIZE), out + numbers * WORD


@compiled.addressed
def unpack_rows(at):
    """Write rows as float32, those that no other thread has taken."""
    spare = get_i64(at + U_SPARE) + take(at + U_THREADS) * get_i64(at + U_SPARE_BYTES)
    rows, inputs, share = get_i64(at + U_ROWS), get_i64(at + U_INPUTS), get_i64(at + U_SHARE)
    while True:
        item = take(at + U_TAKEN)
        if item >= get_i64(at + U_ITEMS):
            return
        for row in range(item * share, min((item + 1) * share, get_i64(at + U_COUNT))):
            out = get_i64(at + U_OUT) + row * inputs * WORD
            unpack_row(get_i64(rows + row * 16), get_i64(rows + row * 16 + 8), inputs, spare, out)
