"""Slots of tokens in a packed cache row, without the cache tensors themselves.

A row has `used` slots in use. The first `common_prefix` of them are common to all live beams. The others are the
suffix, in which a beam sees only its ancestors. A beam's ancestors are a row of bools over the suffix window (T slots
from the common prefix on). Slots are in order of depth, so the slots that all beams share are always at the beginning
of the suffix, and the common prefix only grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PREFIX_STEP = 64  # tokens of a prompt whose queries attend together; shared prefixes are counted in these blocks


@dataclass(slots=True)
class SlotTable:
    """Slots of every row.

    Attributes:
        used: [R] int64, slots in use. common_prefix: [R] int64, slots common to all live beams.
        drafted: [R] int64, leading slots that the draft's cache holds too; the draft runs the others at its next call.
        positions, tokens: [R, S] int64, depth and id of the token in each slot.
    """

    used: Tensor
    common_prefix: Tensor
    drafted: Tensor
    positions: Tensor
    tokens: Tensor

    @classmethod
    def empty(cls, rows: int, slots: int, device: torch.device) -> SlotTable:
        """Return a table without tokens."""
        zero = torch.zeros(rows, dtype=torch.int64, device=device)
        wide = torch.zeros(rows, slots, dtype=torch.int64, device=device)
        return cls(zero, zero.clone(), zero.clone(), wide, wide.clone())

    def grow(self, slots: int) -> None:
        """Extend the table to `slots` slots per row. Contents stay."""
        more = slots - self.positions.shape[1]
        self.positions = torch.nn.functional.pad(self.positions, (0, more))
        self.tokens = torch.nn.functional.pad(self.tokens, (0, more))


def node_slots(table: SlotTable, count: int, offset: int = 0) -> Tensor:
    """Return the slots of the nodes offset .. offset + count of an iteration: [R, count]."""
    return table.used.unsqueeze(1) + torch.arange(offset, offset + count, device=table.used.device)


@dataclass(slots=True)
class Layout:
    """Slots of the nodes of one iteration, and the slots that they may see, computed once for all its layers.

    Attributes:
        slots: [R, N] int64, of each node. own: [R, N, T] bool, each node's own slot in the suffix window.
        suffix: [R, 1, S] int64, index in the suffix window of each of the first S slots, valid where `inside` [R, 1, S]
            bool holds.
        before: [R, 1, S] bool, slots before the window, which every node sees.
    """

    slots: Tensor
    own: Tensor
    suffix: Tensor
    inside: Tensor
    before: Tensor

    @classmethod
    def of(cls, table: SlotTable, nodes: int, window: int, slots: int) -> Layout:
        """Compute the layout of N nodes, a suffix window of T slots and S active slots."""
        common_prefix = table.common_prefix.view(-1, 1, 1)
        relative = torch.arange(slots, device=common_prefix.device) - common_prefix
        at = node_slots(table, nodes)
        return cls(
            slots=at,
            own=(at.unsqueeze(2) - common_prefix) == torch.arange(window, device=common_prefix.device),
            suffix=relative.clamp(0, window - 1),
            inside=(relative >= 0) & (relative < window),
            before=relative < 0,
        )

    def mask(self, ancestors: Tensor) -> Tensor:
        """Return the attention mask of nodes from their ancestors in the suffix window: [R, n, T] bool -> [R, n, S]
        bool."""
        seen = ancestors.gather(2, self.suffix.expand(-1, ancestors.shape[1], -1))
        return (seen & self.inside) | self.before


def backlog_slots(table: SlotTable, layout: Layout, ancestors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the last `count` slots in use, [R, count], and the attention mask of their tokens, [R, count, S] bool.

    Each suffix slot is an ancestor of some live beam, and sees that beam's ancestors up to itself. Where a row has
    fewer slots, the missing ones are negative and see slot 0 alone. ancestors: [R, W, T], of the live beams.
    """
    window = ancestors.shape[-1]
    wanted = node_slots(table, count, -count)
    relative = (wanted - table.common_prefix.unsqueeze(1)).clamp(0, window - 1)
    holds = ancestors.gather(2, relative.unsqueeze(1).expand(-1, ancestors.shape[1], -1))  # [R, W, count]
    owner = holds.to(torch.int8).argmax(1).unsqueeze(-1).expand(-1, -1, window)
    seen = layout.mask(ancestors.gather(1, owner))
    index = torch.arange(seen.shape[2], device=ancestors.device)
    at = wanted.clamp(min=0).unsqueeze(-1)
    return wanted, (seen & (index <= at)) | (index == at)


@dataclass(slots=True)
class Compaction:
    """Slots that a commit copies, and the beams' ancestors afterwards.

    Attributes:
        src_slots, dst_slots: [R, T] int64 absolute slots to copy; equal where nothing moves.
        ancestors: [R, W, T] bool, the beams' ancestors in the new suffix window.
    """

    src_slots: Tensor
    dst_slots: Tensor
    ancestors: Tensor


def compact(table: SlotTable, ancestors: Tensor, valid: Tensor, drafted: Tensor) -> Compaction:
    """Keep the ancestors of the live beams, in order, and advance the common prefix. Updates the table in place.

    ancestors: [R, W, T] bool over the suffix window; valid: [R, W] bool. drafted: [R] int64, leading slots that the
    draft has run, counted before anything moves.
    """
    window = ancestors.shape[-1]
    ancestors = ancestors & valid.unsqueeze(-1)
    keep = ancestors.any(1)
    order = torch.argsort((~keep).to(torch.int8), dim=1, stable=True)
    count = keep.sum(1)
    steps = torch.arange(window, device=keep.device).unsqueeze(0)
    dst_slots = table.common_prefix.unsqueeze(1) + steps
    moved = steps < count.unsqueeze(1)
    src_slots = torch.where(moved, table.common_prefix.unsqueeze(1) + order, dst_slots)
    last = table.positions.shape[1] - 1
    src_slots, dst_slots = src_slots.clamp(max=last), dst_slots.clamp(max=last)
    for contents in (table.positions, table.tokens):
        contents.scatter_(1, dst_slots, contents.gather(1, src_slots))
    run = keep & (table.common_prefix.unsqueeze(1) + steps < drafted.unsqueeze(1))
    table.drafted = torch.minimum(drafted, table.common_prefix) + run.sum(1)
    packed = ancestors.gather(2, order.unsqueeze(1).expand_as(ancestors)) & moved.unsqueeze(1)
    common = ((packed | ~valid.unsqueeze(-1)).all(1) & moved).to(torch.int64).cumprod(1).sum(1)
    shifted = (steps + common.unsqueeze(1)).clamp(max=window - 1)
    inside = steps + common.unsqueeze(1) < window
    packed = packed.gather(2, shifted.unsqueeze(1).expand_as(packed)) & inside.unsqueeze(1)
    table.used = table.common_prefix + count
    table.common_prefix = table.common_prefix + common
    return Compaction(src_slots, dst_slots, packed)
