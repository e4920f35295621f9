"""Weights as quantised files store them: levels of a few bits, and scales for groups of inputs.

A file's weight stays mapped. Products are packed from it without a second rounding where it has four bits
(`fourbit`, `blocks`), and from its rows in float32 (`dequantize`) otherwise.

Letters: o outputs, i input channels, g groups of inputs, r rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUP = 32  # inputs that share a scale where products are computed in four bits
AT_ONCE = 1 << 22  # weights that are dequantised at a time
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # twice the numbers of E2M1, plus 12
LARGEST_E8M0 = 251  # power of a scale; 24 times half of the next is infinite in float32; the last one means NaN


@dataclass(frozen=True, slots=True)
class FourBit:
    """A weight in four bits: weight [o, i] = scale * level + offset of its group of GROUP inputs.

    Attributes:
        words: [o, i / 8] int32. Byte k of word l has the level of input 8 l + k in its lower half, and that of input
            8 l + 4 + k in its upper half.
        scales, offsets: [o, g] float32.
        table: [16] uint8, the number that each level stands for; None: the level itself.
        order: [i] int64, the input channels in the order of the words; None: ascending.
    """

    words: Tensor
    scales: Tensor
    offsets: Tensor
    table: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[o, i]."""
        return torch.Size((len(self.words), self.words.shape[1] * 8))

    def __len__(self) -> int:
        return len(self.words)

    def like(self, other: FourBit) -> bool:
        """Return whether both have the same table and the same order of inputs, so that one product can have both."""
        pairs = (self.table, other.table), (self.order, other.order)
        return all(mine is theirs or (mine is not None and theirs is not None and torch.equal(mine, theirs))
                   for mine, theirs in pairs)  # fmt: skip

    def take(self, rows: Tensor | slice) -> FourBit:
        """Return these outputs alone."""
        return replace(self, words=self.words[rows], scales=self.scales[rows], offsets=self.offsets[rows])

    def columns(self, positions: Tensor) -> Tensor:
        """Return columns [o, k] float32 of the weight. positions [k] int64: in the order of the words."""
        within = positions % 8
        levels = (self.words[:, positions // 8] >> (within % 4 * 8 + within // 4 * 4)) & 0xF
        numbers = levels.float() if self.table is None else self.table.float()[levels]
        return self.scales[:, positions // GROUP] * numbers + self.offsets[:, positions // GROUP]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a weight in blocks of a format of ggml, where they lie in a file.

    Attributes:
        kind: ggml's name of the format.
        rows: [o] int64, their addresses.
        inputs: i.
        data: what the addresses point into.
    """

    kind: str
    rows: Tensor
    inputs: int
    data: Tensor

    @property
    def shape(self) -> torch.Size:
        """[o, i]."""
        return torch.Size((len(self.rows), self.inputs))

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Tensor | slice) -> Blocks:
        """Return these outputs alone."""
        return replace(self, rows=self.rows[rows])


class QuantizedWeight(ABC):
    """A weight [o, i] in a quantised file.

    Attributes:
        name: of the tensor, for messages.
        shape: [o, i].
        nbytes: memory of its own, beside the mapped file.
    """

    device, nbytes = torch.device("cpu"), 0

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self.name, self.shape = name, torch.Size(shape)

    @abstractmethod
    def dequantize(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Return some rows [r, i] in float32, as the format defines them. rows: indices [r] int64, or a slice."""

    def fourbit(self) -> FourBit | None:
        """Return the weight in four bits; None where the format has more, or groups that four bits cannot have, or
        where kernels unpack its blocks."""
        return None

    def blocks(self) -> Blocks | None:
        """Return the weight in blocks that kernels unpack; None where it is not."""
        return None

    def check(self) -> None:  # noqa: B027  # of forms that are checked when they are opened
        """Raise ModelError where a scale is NaN or infinite."""

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> QuantizedWeight | Tensor:
        """Return the weight dequantised in a dtype, on a device; itself where no dtype is asked for."""
        return self if dtype is None else self.plain(dtype, device)

    def plain(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Return the weight dequantised, [o, i]. Some rows at a time lie in memory in float32, too.

        Raises ModelError, as `check` does.
        """
        self.check()
        made = torch.empty(self.shape, dtype=dtype, device=device)
        step = max(1, AT_ONCE // self.shape[1])
        for first in range(0, len(self), step):
            made[first : first + step] = self.dequantize(slice(first, first + step))
        return made

    def take(self, rows: Tensor) -> QuantizedWeight:
        """Return these outputs [r] int64 alone, in this order."""
        return _TakenRows(self, rows)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [..., i] float32. ids: [...] int64."""
        return self.dequantize(ids.flatten()).view(*ids.shape, -1)

    def split(self, sizes: Sequence[int]) -> list[QuantizedWeight]:
        """Return parts of the outputs, as torch's `split` does."""
        return [self.take(rows) for rows in torch.split(torch.arange(len(self)), [*sizes])]


class _TakenRows(QuantizedWeight):
    """Some rows of a weight."""

    def __init__(self, whole: QuantizedWeight, rows: Tensor) -> None:
        super().__init__(whole.name, (len(rows), whole.shape[1]))
        self._whole, self._rows = whole, rows

    def check(self) -> None:
        self._whole.check()

    def dequantize(self, rows: Tensor | slice = slice(None)) -> Tensor:
        return self._whole.dequantize(self._rows[rows])

    def blocks(self) -> Blocks | None:
        whole = self._whole.blocks()
        return None if whole is None else whole.take(self._rows)

    def fourbit(self) -> FourBit | None:
        whole = self._whole.fourbit()
        return None if whole is None else whole.take(self._rows)
