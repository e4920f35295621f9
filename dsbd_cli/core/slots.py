"""Where tokens stand in a packed cache row, apart from the cache tensors themselves.

A row holds `used` slots. The first `trunk` of them are common to all live beams; the others are the tail, in which a
beam sees only its
ancestors. A beam's ancestors are a row of bools over the tail window (T slots from the trunk on). Slots stand in
order of depth, so what is
common to all beams is always a prefix of the tail, and the trunk only grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Compaction", "SlotTable", "compact", "node_slots", "visible"]


@dataclass(slots=True)
class SlotTable:
    """Slots of every row.

    Attributes:
        used: [R] int64, slots taken. trunk: [R] int64, slots common to all live beams.
        positions: [R, S] int64, depth of the token in each slot.
    """

    used: Tensor
    trunk: Tensor
    positions: Tensor

    @classmethod
    def empty(cls, rows: int, slots: int, device: torch.device) -> SlotTable:
        """A table without tokens."""
        zero = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(zero, zero.clone(), torch.zeros(rows, slots, dtype=torch.int64, device=device))

    def grow(self, slots: int) -> None:
        """More slots per row; contents stay."""
        more = slots - self.positions.shape[1]
        self.positions = torch.nn.functional.pad(self.positions, (0, more))


def node_slots(table: SlotTable, count: int, offset: int = 0) -> Tensor:
    """Slots that the nodes offset .. offset+count of an iteration take: [R, count]."""
    return table.used.unsqueeze(1) + torch.arange(offset, offset + count, device=table.used.device)


def visible(table: SlotTable, ancestors: Tensor, slots: int) -> Tensor:
    """Attention mask of nodes from their ancestors in the tail: [R, n, T] bool -> [R, n, S] bool over the first
    `slots` slots."""
    window = ancestors.shape[-1]
    index = torch.arange(slots, device=ancestors.device)
    relative = index.unsqueeze(0) - table.trunk.unsqueeze(1)
    in_tail = (relative >= 0) & (relative < window)
    wide = relative.clamp(0, window - 1).unsqueeze(1).expand(-1, ancestors.shape[1], -1)
    tail = ancestors.gather(2, wide) & in_tail.unsqueeze(1)
    return tail | (relative < 0).unsqueeze(1)


@dataclass(slots=True)
class Compaction:
    """Result of a commit.

    Attributes:
        source, target: [R, T] int64 absolute slots to copy; equal where nothing moves.
        ancestors: [R, W, T] bool, the beams' ancestors in the new tail window.
        where: [R, T] int64, for each slot of the old window its new absolute slot (meaningless for dropped ones).
    """

    source: Tensor
    target: Tensor
    ancestors: Tensor
    where: Tensor


def compact(table: SlotTable, ancestors: Tensor, valid: Tensor) -> Compaction:
    """Keep the ancestors of the live beams, in order, and advance the trunk. Updates the table in place.

    ancestors: [R, W, T] bool over the tail window; valid: [R, W] bool.
    """
    window = ancestors.shape[-1]
    ancestors = ancestors & valid.unsqueeze(-1)
    keep = ancestors.any(1)
    order = torch.argsort((~keep).to(torch.int8), dim=1, stable=True)
    count = keep.sum(1)
    steps = torch.arange(window, device=keep.device).unsqueeze(0)
    target = table.trunk.unsqueeze(1) + steps
    moved = steps < count.unsqueeze(1)
    source = torch.where(moved, table.trunk.unsqueeze(1) + order, target)
    last = table.positions.shape[1] - 1
    source, target = source.clamp(max=last), target.clamp(max=last)
    table.positions.scatter_(1, target, table.positions.gather(1, source))
    where = (table.trunk.unsqueeze(1) + keep.cumsum(1) - 1).clamp(min=0)
    packed = ancestors.gather(2, order.unsqueeze(1).expand_as(ancestors)) & moved.unsqueeze(1)
    common = ((packed | ~valid.unsqueeze(-1)).all(1) & moved).to(torch.int64).cumprod(1).sum(1)
    shifted = (steps + common.unsqueeze(1)).clamp(max=window - 1)
    inside = steps + common.unsqueeze(1) < window
    packed = packed.gather(2, shifted.unsqueeze(1).expand_as(packed)) & inside.unsqueeze(1)
    table.used = table.trunk + count
    table.trunk = table.trunk + common
    return Compaction(source, target, packed, where)
