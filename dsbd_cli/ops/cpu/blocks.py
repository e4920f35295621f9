"""Blocks of GGUF files, unpacked by a kernel of our own. Formats are described here once, as the kernels read them.

A block has numbers of a few bits, and scales for groups of its numbers, [groups] each. A number is
scale * (level - shift) + offset of its group, or a byte of a table in place of the level. The order of operations is
that of ggml, so values are equal to those of models/checkpoints/gguf/formats.py, which says it in torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsbd_cli.ops.cpu.runtime import CpuKernel, fields, kernels, layout, offsets
from dsbd_cli.ops.quantized_weight import E2M1, GROUP, LARGEST_E8M0, Blocks

MOST = 256  # numbers of a block
ROWS = 16  # that a thread unpacks at a time


class Bits(NamedTuple):
    """Bits of all levels, in some bytes of a block.

    Attributes:
        at: the first byte. bits: of a level. to: the place of the lowest of them in a level.
        span: of so many bytes at a time the lowest bits belong to as many levels, the next bits to as many further
            ones. 0: bit k of four bytes belongs to level k.
    """

    at: int
    bits: int
    span: int
    to: int = 0


class BlockLayout(NamedTuple):
    """A format of blocks.

    Attributes:
        numbers: of a block. size: its bytes.
        scales: how they are stored, one of SCALES. groups: of numbers that have a scale.
        shift: see above. start: what the bits of levels are added to, without a carry.
    """

    numbers: int
    size: int
    scales: str
    groups: int
    levels: tuple[Bits, ...]
    shift: int = 0
    start: int = 0
    table: tuple[int, ...] = ()


SCALES = ("half", "halves", "six_bits", "q6_k", "q2_k", "q3_k", "iq4_xs", "e8m0")
_IQ4 = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)
_FIFTH = Bits(16, 1, 32, 4)
FORMATS = {
    "Q4_0": BlockLayout(32, 18, "half", 1, (Bits(2, 4, 16),), 8),
    "Q4_1": BlockLayout(32, 20, "halves", 1, (Bits(4, 4, 16),)),
    "Q5_0": BlockLayout(32, 22, "half", 1, (Bits(6, 4, 16), Bits(2, 1, 0, 4)), 16),
    "Q5_1": BlockLayout(32, 24, "halves", 1, (Bits(8, 4, 16), Bits(4, 1, 0, 4))),
    "Q8_0": BlockLayout(32, 34, "half", 1, (Bits(2, 8, 32),), 128, start=128),
    "Q2_K": BlockLayout(256, 84, "q2_k", 16, (Bits(16, 2, 32),)),
    "Q3_K": BlockLayout(256, 110, "q3_k", 16, (Bits(32, 2, 32), Bits(0, 1, 32, 2)), 4),
    "Q4_K": BlockLayout(256, 144, "six_bits", 8, (Bits(16, 4, 32),)),
    "Q5_K": BlockLayout(256, 176, "six_bits", 8, (Bits(48, 4, 32), _FIFTH)),
    "Q6_K": BlockLayout(256, 210, "q6_k", 16, (Bits(0, 4, 64), Bits(128, 2, 32, 4)), 32),
    "IQ4_NL": BlockLayout(32, 18, "half", 1, (Bits(2, 4, 16),), 128, table=_IQ4),
    "IQ4_XS": BlockLayout(256, 136, "iq4_xs", 8, (Bits(8, 4, 16),), 128, table=_IQ4),
    "MXFP4": BlockLayout(32, 17, "e8m0", 1, (Bits(1, 4, 16),), 12, table=E2M1),
}


class FormatFields(ctypes.Structure):
    """A BlockLayout as the kernels read it. table: its address; 0 without one. The second part of the levels has no
    bits where there is none."""

    _fields_ = fields(
        "numbers", "size", "scales", "groups", "shift", "start", "table", "at", "bits", "span", "to", "second_at",
        "second_bits", "second_span", "second_to",
    )  # fmt: skip


class UnpackArguments(ctypes.Structure):
    """Arguments of the kernel that unpacks rows into float32. rows: the address of `row_addresses`. share: rows that a
    thread takes at a time. spare: memory of the threads, `spare_bytes` of each."""

    _fields_ = fields("taken", "threads", "items", "rows", "count", "share", "inputs", "out", "spare", "spare_bytes")


FIELDS, UNPACK = offsets(FormatFields), offsets(UnpackArguments)
LAYOUT = layout(FormatFields, UnpackArguments, constants=(SCALES, MOST, LARGEST_E8M0))
SPARE = MOST + 2 * MOST // 16 * 4  # bytes: levels of a block, scales and offsets of its groups


def are_four_bits(kinds: Sequence[str]) -> bool:
    """Return whether one product can have weights in these formats in four bits: all have levels of four bits, scales
    of GROUP numbers, and the same table."""
    forms = [FORMATS[kind] for kind in kinds]
    fit = all([part.bits for part in form.levels] == [4] and form.numbers // form.groups == GROUP for form in forms)
    return fit and len({form.table for form in forms}) == 1


@functools.cache
def table(kind: str) -> Tensor | None:
    """Return the table [16] uint8 of a format; None without one."""
    numbers = FORMATS[kind].table
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.uint8) if numbers else None


@functools.cache
def _fields(kind: str) -> FormatFields:
    form, numbers = FORMATS[kind], table(kind)
    first, second = (*form.levels, Bits(0, 0, 0))[:2]
    address = 0 if numbers is None else numbers.data_ptr()
    scales = SCALES.index(form.scales)
    return FormatFields(form.numbers, form.size, scales, form.groups, form.shift, form.start, address, *first, *second)


def row_addresses(weights: Sequence[Blocks]) -> Tensor:
    """Return the address of each row of all weights, and that of the fields of its format, [o, 2] int64."""
    formats = [torch.full((len(weight),), ctypes.addressof(_fields(weight.kind))) for weight in weights]
    return torch.stack([torch.cat([weight.rows for weight in weights]), torch.cat(formats)], 1)


def dequantize(weight: Blocks) -> Tensor:
    """Return the rows of a weight, [o, i] float32."""
    count, inputs = weight.shape
    made, rows = torch.empty(count, inputs), row_addresses([weight])
    spare = torch.empty(torch.get_num_threads(), SPARE, dtype=torch.uint8)
    items = -(-count // ROWS)
    arguments = UnpackArguments(
        0, 0, items, rows.data_ptr(), count, ROWS, inputs, made.data_ptr(), spare.data_ptr(), SPARE
    )
    compiled()[0](arguments, made.numel(), items)
    return made


@functools.cache
def compiled() -> list[CpuKernel]:
    """Return the kernel, made at the first call."""
    return kernels("blocks", "unpack_rows")
