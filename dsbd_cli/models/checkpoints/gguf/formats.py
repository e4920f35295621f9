"""Block formats of GGUF: bytes of some numbers each, with their scales, unpacked by torch alone.

ggml's names. A block holds 32 numbers, or 256 in eight or sixteen parts with scales of their own. Values are computed
in the order of ggml's own code, so that they are equal to its values bit by bit.

Letters: n blocks, b bytes of a block, o outputs, i input channels, r rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dsbd_cli.errors import ModelError
from dsbd_cli.models.checkpoints.gguf.header import BLOCKS
from dsbd_cli.ops.quantized_weight import LARGEST_E8M0, Blocks, QuantizedWeight
from dsbd_cli.ops.select import unpacked_blocks

CHUNK = 1 << 17  # numbers that are unpacked at once, so that what lies between fits a cache
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL and IQ4_XS
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of E2M1

_IQ4 = torch.tensor(LEVELS, dtype=torch.float32)
_E2M1 = torch.tensor(DOUBLED, dtype=torch.float32)
_BITS = torch.arange(32, dtype=torch.int32)
_HALF_E8M0 = torch.tensor([2.0 ** (power - 128) for power in range(256)], dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A format of blocks.

    Attributes:
        unpack: writes the values of blocks [n, b] uint8 into [n, numbers] float32.
        halves: bytes of a block at which its scales in float16 begin. Empty: its first byte is one in E8M0.
    """

    unpack: Callable[[Tensor, Tensor], None]
    halves: tuple[int, ...]


class GgufWeight(QuantizedWeight):
    """A weight [o, i] of a GGUF file in blocks, over the bytes of the file."""

    def __init__(self, name: str, data: Tensor, kind: str, origin: str, rows: Tensor | None = None) -> None:
        """data: rows [r, bytes of a row] uint8. kind: ggml's name of the format. origin: model and file, for messages.
        rows: indices [o] int64 of the rows that the weight has; None: all."""
        self._numbers, self._size = BLOCKS[kind]
        outputs = len(data) if rows is None else len(rows)
        super().__init__(name, (outputs, data.shape[1] // self._size * self._numbers))
        self.kind, self._origin, self._data, self._rows = kind, origin, data, rows

    def dequantize(self, rows: Tensor | slice = slice(None)) -> Tensor:
        values = unpacked_blocks(self.blocks().take(rows))
        return self.dequantize_by_torch(rows) if values is None else values

    def dequantize_by_torch(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Do what `dequantize` does, by operators of torch alone."""
        data = self._packed(rows)
        values = torch.empty(len(data), self.shape[1], dtype=torch.float32)
        for part, blocks in self._chunks(data):
            FORMATS[self.kind].unpack(blocks, values.view(-1, self._numbers)[part])
        return values

    @cached_property
    def _blocks(self) -> Blocks:
        data = self._data if self._data.stride(1) == 1 else self._data.contiguous()
        addresses = torch.arange(len(data)) * data.stride(0) + data.data_ptr()
        return Blocks(self.kind, addresses if self._rows is None else addresses[self._rows], self.shape[1], data)

    def blocks(self) -> Blocks:
        return self._blocks

    def check(self) -> None:
        """Raise ModelError where a scale is NaN or infinite."""
        blocks, halves = self._packed().reshape(-1, self._size), FORMATS[self.kind].halves
        sound = all(bool(_half(blocks, at).isfinite().all()) for at in halves)
        if not halves and len(blocks):
            sound = int(blocks[:, 0].max()) <= LARGEST_E8M0
        if not sound:
            raise ModelError(f"{self._origin} has scales in {self.name} that are NaN or infinite: get it again")

    def take(self, rows: Tensor) -> GgufWeight:
        return GgufWeight(
            self.name, self._data, self.kind, self._origin, rows if self._rows is None else self._rows[rows]
        )

    def split(self, sizes: Sequence[int]) -> list[QuantizedWeight]:
        if self._rows is not None:
            return super().split(sizes)
        return [GgufWeight(self.name, data, self.kind, self._origin) for data in self._data.split([*sizes])]

    def _packed(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Return rows as they are packed: [r, bytes of a row] uint8. Rows that are not indexed are not copied."""
        return self._data[rows] if self._rows is None else self._data[self._rows[rows]]

    def _chunks(self, data: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the blocks [n, b] of rows, and which they are, some at a time."""
        blocks = data.reshape(-1, self._size)
        step = CHUNK // self._numbers
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            yield part, blocks[part]


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte of each block as [n, 1] float32."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _integers(data: Tensor) -> Tensor:
    """Return bytes [n, b] uint8 as [n, b / 4] int32. They are copied, because they need not be aligned."""
    return data.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _nibbles(levels: Tensor, span: int) -> Tensor:
    """Return the levels [n, 2 b] uint8 of bytes [n, b]. span: bytes whose lower halves come before their upper ones."""
    whole = levels.unflatten(1, (-1, 1, span))
    return torch.cat((whole & 15, whole >> 4), 2).view(len(levels), -1)


def _scaled(values: Tensor, levels: Tensor, scales: Tensor, offsets: Tensor | None = None, shift: int = 0) -> None:
    """Write scale * (level - shift) + offset into values [n, numbers]. scales, offsets: [n, groups]."""
    values.copy_(levels.view(values.shape))
    if shift:
        values.sub_(shift)
    groups = values.view(len(values), scales.shape[1], -1)
    groups.mul_(scales[:, :, None])
    if offsets is not None:
        groups.add_(offsets[:, :, None])


def _q4_0(blocks: Tensor, values: Tensor) -> None:
    _scaled(values, _nibbles(blocks[:, 2:], 16), _half(blocks, 0), shift=8)


def _q4_1(blocks: Tensor, values: Tensor) -> None:
    _scaled(values, _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return the bits of 4 bytes of each block as [n, 32] uint8, 0 or 16."""
    return ((_integers(blocks[:, at : at + 4]) >> _BITS) & 1).to(torch.uint8) << 4


def _q5_0(blocks: Tensor, values: Tensor) -> None:
    _scaled(values, _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2), _half(blocks, 0), shift=16)


def _q5_1(blocks: Tensor, values: Tensor) -> None:
    _scaled(values, _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor, values: Tensor) -> None:
    _scaled(values, blocks[:, 2:].view(torch.int8), _half(blocks, 0))


def _pairs(levels: Tensor) -> Tensor:
    """Return numbers of two bits [n, 4 b] uint8 of bytes [n, b]: of 32 bytes the lowest bits first."""
    whole = levels.unflatten(1, (-1, 32))
    return torch.stack([(whole >> shift) & 3 for shift in (0, 2, 4, 6)], 2).view(len(levels), -1)


def _bits(levels: Tensor) -> Tensor:
    """Return the bits [n, 256] uint8 of bytes [n, 32]: the lowest bits first."""
    return torch.cat([(levels >> shift) & 1 for shift in range(8)], 1)


def _q2_k(blocks: Tensor, values: Tensor) -> None:
    scales, least = blocks[:, :16] & 15, blocks[:, :16] >> 4
    _scaled(values, _pairs(blocks[:, 16:80]), _half(blocks, 80) * scales, -(_half(blocks, 82) * least))


def _q3_k(blocks: Tensor, values: Tensor) -> None:
    packed = blocks[:, 96:108]  # scales of six bits: four of each in the first 8 bytes, two in the last 4
    low, high = _nibbles(packed[:, :8], 8), packed[:, 8:]
    upper = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 1)
    scales = (low | (upper << 4)).float() - 32
    _scaled(values, _pairs(blocks[:, 32:96]) | (_bits(blocks[:, :32]) << 2), _half(blocks, 108) * scales, shift=4)


def _k_parts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets [n, 8] of Q4_K and Q5_K, which pack them in six bits."""
    first, second, third = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), 1)
    least = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), 1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * least)


def _q4_k(blocks: Tensor, values: Tensor) -> None:
    _scaled(values, _nibbles(blocks[:, 16:], 32), *_k_parts(blocks))


def _q5_k(blocks: Tensor, values: Tensor) -> None:
    _scaled(values, _nibbles(blocks[:, 48:], 32) | (_bits(blocks[:, 16:48]) << 4), *_k_parts(blocks))


def _q6_k(blocks: Tensor, values: Tensor) -> None:
    levels = _nibbles(blocks[:, :128], 64) | (_pairs(blocks[:, 128:192]) << 4)
    _scaled(values, levels, _half(blocks, 208) * blocks[:, 192:208].view(torch.int8), shift=32)


def _looked_up(values: Tensor, levels: Tensor, table: Tensor, scales: Tensor) -> None:
    """Write scale * table[level]. values, levels: [n, numbers]. table: [16] float32. scales: [n, groups]."""
    torch.index_select(table, 0, levels.view(-1).int(), out=values.view(-1))
    values.view(len(values), scales.shape[1], -1).mul_(scales[:, :, None])


def _iq4_scales(blocks: Tensor) -> Tensor:
    """Return the scales [n, 8] of IQ4_XS, of six bits: four of each in bytes 4 to 7, two in bytes 2 and 3."""
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2).flatten(1)
    high = torch.cat([(blocks[:, 2:4] >> shift) & 3 for shift in (0, 2, 4, 6)], 1).unflatten(1, (4, 2))
    return _half(blocks, 0) * ((low | (high.transpose(1, 2).flatten(1) << 4)).float() - 32)


def _iq4_nl(blocks: Tensor, values: Tensor) -> None:
    _looked_up(values, _nibbles(blocks[:, 2:], 16), _IQ4, _half(blocks, 0))


def _iq4_xs(blocks: Tensor, values: Tensor) -> None:
    _looked_up(values, _nibbles(blocks[:, 8:], 16), _IQ4, _iq4_scales(blocks))


def _e8m0_scales(blocks: Tensor) -> Tensor:
    """Return half of the scales [n, 1] of MXFP4."""
    return _HALF_E8M0[blocks[:, :1].int()]


def _mxfp4(blocks: Tensor, values: Tensor) -> None:
    _looked_up(values, _nibbles(blocks[:, 1:], 16), _E2M1, _e8m0_scales(blocks))


FORMATS = {
    "Q4_0": BlockFormat(_q4_0, (0,)),
    "Q4_1": BlockFormat(_q4_1, (0, 2)),
    "Q5_0": BlockFormat(_q5_0, (0,)),
    "Q5_1": BlockFormat(_q5_1, (0, 2)),
    "Q8_0": BlockFormat(_q8_0, (0,)),
    "Q2_K": BlockFormat(_q2_k, (80, 82)),
    "Q3_K": BlockFormat(_q3_k, (108,)),
    "Q4_K": BlockFormat(_q4_k, (0, 2)),
    "Q5_K": BlockFormat(_q5_k, (0, 2)),
    "Q6_K": BlockFormat(_q6_k, (208,)),
    "IQ4_NL": BlockFormat(_iq4_nl, (0,)),
    "IQ4_XS": BlockFormat(_iq4_xs, (0,)),
    "MXFP4": BlockFormat(_mxfp4, ()),
}
