"""The tail of a packed forest in recurrent layers: the places that a forward's nodes take and see, and the move that
follows an iteration.

Letters as in models/recurrent/states.py.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.ops.interface import host_reads
from dsbd_cli.ops.select import ops_for


def scan_kernels() -> Any:
    """Return the kernels of recurrent layers on a CPU, the module that `Ops.scan` returns."""
    scan = ops_for(torch.device("cpu"), torch.float32, ("scan",)).scan
    assert scan is not None
    return scan()


class TailBuffer:
    """Places in the suffix of the current forward's nodes, and the places that each node sees. Made once per forward
    and used by every recurrent layer.

    rows: [R] int64 cache rows, None for all in order. base: [R] int64, slots of the common prefix. width: T. at: [R, n]
    int64 place of each node, T where it has none (absent nodes, and tokens that the state holds already). chain: the
    nodes follow one another and go into the state at once; `real` [R, n] bool is False for padding.
    """

    def __init__(self, batch: ForestInput, base: Tensor, width: int, trash: int) -> None:
        # base: [R] of the batch's rows
        self.batch, self.base, self.width, self.trash = batch, base, width, trash
        self.rows, self.chain = batch.rows, batch.chain
        self.count = batch.tokens.shape[0]
        self._moved: dict[torch.device, TailBuffer] = {}
        self._back: dict[int, Tensor] = {}
        self._flat: dict[int, Tensor] = {}
        self._plans: dict[int, Any] = {}
        self._taps: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def on(self, device: torch.device) -> TailBuffer:
        """Return the same for a layer on another device."""
        if device == self.base.device:
            return self
        if device not in self._moved:
            self._moved[device] = TailBuffer(self.batch.to(device), self.base.to(device), self.width, self.trash)
        return self._moved[device]

    @cached_property
    def real(self) -> Tensor:
        return self.batch.slots != self.trash

    @cached_property
    def at(self) -> Tensor:
        slots, past = self.batch.slots, self.batch.slots - self.base.unsqueeze(1)
        return torch.where(self.real & (past >= 0) & (past < self.width), slots % self.width, self.width)

    @cached_property
    def lengths(self) -> Tensor:
        """Number of real nodes of each row's chain, [R] int64."""
        return self.real.sum(1)

    def flat_in(self, lead: int) -> Tensor:
        """Return the indices [R * n] int64 of the nodes in planes [rows, lead + T + 1, ...] whose rows and places are
        flattened."""
        if lead not in self._flat:
            self._flat[lead] = (self._row_starts(lead) + lead + self.at).flatten()
        return self._flat[lead]

    def _row_starts(self, lead: int) -> Tensor:
        return self.numbers.unsqueeze(1) * (lead + self.width + 1)

    @cached_property
    def numbers(self) -> Tensor:
        """Cache rows [R] int64, the same as `rows`, never None."""
        return torch.arange(self.count, device=self.base.device) if self.rows is None else self.rows

    @cached_property
    def _slots(self) -> tuple[Tensor, Tensor]:
        """Slot of each place [R, T], and whether it is a slot that a node may see."""
        base = self.base.unsqueeze(1)
        at = base + (torch.arange(self.width, device=self.base.device) - base) % self.width
        active = self.batch.mask.shape[-1]
        return at.clamp(max=active - 1), (at < active) & (at != self.trash)

    @cached_property
    def seen(self) -> Tensor:
        """The places that each node sees, [R, n, T] bool: its ancestors in the suffix, and itself."""
        slots, held = self._slots
        index = slots.unsqueeze(1).expand(-1, self.at.shape[1], -1)
        return self.batch.mask.gather(2, index) & held.unsqueeze(1)

    @cached_property
    def seen_sum(self) -> Tensor:
        """`seen` as float64, for sums over a node's ancestors."""
        return self.seen.to(torch.float64)

    @cached_property
    def depths(self) -> Tensor:
        """Depth of the token in each place, [R, T] int64."""
        return self.batch.slot_positions.gather(1, self._slots[0])

    def back(self, taps: int) -> Tensor:
        """Return the places [taps - 1, R, n] int64 of each node's last ancestors, the oldest first. A negative number
        counts back from the beginning of the suffix."""
        before = torch.arange(1 - taps, 0, device=self.at.device)
        wanted = self.batch.positions + before.view(-1, 1, 1)
        hit = self.seen & (self.depths.unsqueeze(1) == wanted.unsqueeze(3))
        return torch.where(hit.any(3), hit.to(torch.int8).argmax(3), wanted - self.base.unsqueeze(1))

    def flat_back(self, taps: int) -> Tensor:
        """Return the places of `back` as indices [taps - 1, R * n] int64 into flattened planes whose `lead` is taps - 1
        (see `flat_in`)."""
        if taps not in self._back:
            places = (self.back(taps) + taps - 1).clamp(min=0)
            self._back[taps] = (self._row_starts(taps - 1) + places).flatten(1)
        return self._back[taps]

    @cached_property
    def scan_mask(self) -> Any:
        """`seen`, `at` and `depths` as kernels take them."""
        batch = self.batch
        parts = (as_array(part) for part in (batch.mask, batch.slots, batch.slot_positions, self.base))
        return scan_kernels().scan_mask(*parts, self.width, self.trash)

    @cached_property
    def rows_of_planes(self) -> NDArray[np.int64]:
        """`numbers` as an array for kernels."""
        return as_array(self.numbers)

    def taps(self, lead: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return `flat_in` and `flat_back` as arrays for kernels."""
        if lead not in self._taps:
            own = self.scan_mask
            positions, base = as_array(self.batch.positions), as_array(self.base)
            self._taps[lead] = scan_kernels().taps(
                own.seen, own.at, own.depths, positions, base, self.rows_of_planes, lead
            )
        return self._taps[lead]

    def plan(self, lead: int) -> Any:
        """Return the schedule of a kernel over planes [rows, lead + T + 1, ...], or for a chain over planes [R, lead +
        n, ...]."""
        if lead not in self._plans:
            base = as_array(self.base)
            if self.chain:
                plan = scan_kernels().chain(base, as_array(self.lengths), self.real.shape[1], lead)
            else:
                plan = scan_kernels().forest(*self.scan_mask[:3], base, lead)
            self._plans[lead] = plan
        return self._plans[lead]

    @cached_property
    def kin(self) -> Tensor:
        """Whether the second node is an ancestor of the first, and not the same token: [R, n, n] bool."""
        index = self.at.clamp(max=self.width - 1).unsqueeze(1).expand(-1, self.at.shape[1], -1)
        there = (self.at < self.width).unsqueeze(1) & (self.at.unsqueeze(2) != self.at.unsqueeze(1))
        return self.seen.gather(2, index) & there

    @cached_property
    def parent(self) -> Tensor:
        """Place of the parent of each place that a node sees, [R, T] int64; T where the parent is the end of the common
        prefix."""
        together = torch.matmul(self.seen.transpose(1, 2).float(), self.seen.float()) > 0  # [R, T, T]
        above = together & (self.depths.unsqueeze(1) == self.depths.unsqueeze(2) - 1)
        return torch.where(above.any(2), above.to(torch.int8).argmax(2), self.width)

    @cached_property
    def order(self) -> Tensor:
        """Places with parents first, [R, m] int64: all places that a node sees, filled up with others where rows have
        different numbers of them. On a GPU these are all T places, because counting them would make the host wait."""
        used = self.seen.any(1)
        found = torch.argsort(torch.where(used, self.depths, self.depths.max() + 1), dim=1, stable=True)
        return found[:, : int(used.sum(1).max())] if host_reads(found.device) else found


class Shift:
    """A move of the suffix, after which the first `count` [R] tokens of the suffix join the common prefix. What layers
    need of it is computed once for all of them.

    sources, targets: [m] int64, places as indices into rows of T + 1 places that are flattened. base, common_prefix:
    [R] int64, slots of the common prefix before and after. width: T. most: an upper bound of `count`.
    """

    def __init__(
        self, sources: Tensor, targets: Tensor, base: Tensor, common_prefix: Tensor, width: int, most: int
    ) -> None:
        self.sources, self.targets, self.base, self.common_prefix = sources, targets, base, common_prefix
        self.width, self.most = width, most
        # by number of places before the suffix
        self._plans: dict[int, Any] = {}
        self._moves: dict[int, tuple[Tensor, Tensor]] = {}
        self._last_tokens: dict[int, Tensor] = {}

    @classmethod
    def of(cls, src_slots: Tensor, dst_slots: Tensor, base: Tensor, common_prefix: Tensor, width: int) -> Shift:
        """Return the move of slots src_slots to slots dst_slots, [R, m] each. base, common_prefix: [R]. width: T."""
        start = base.unsqueeze(1)
        starts = torch.arange(len(src_slots), device=base.device).unsqueeze(1) * (width + 1)
        inside = [(slots >= start) & (slots < start + width) for slots in (src_slots, dst_slots)]
        # a source or a target outside the suffix becomes the last place, which nobody reads
        here, there = (
            (starts + torch.where(own, slots % width, width)).flatten()
            for own, slots in zip(inside, (src_slots, dst_slots), strict=True)
        )
        most = width
        if host_reads(base.device):
            most = int((common_prefix - base).max().clamp(0, width))
            moved = ((src_slots != dst_slots) & inside[1]).flatten().nonzero().squeeze(1)
            here, there = here.index_select(0, moved), there.index_select(0, moved)
        return cls(here, there, base.clone(), common_prefix, width, most)

    @cached_property
    def count(self) -> Tensor:
        """Number of tokens that join the common prefix, [R] int64."""
        return (self.common_prefix - self.base).clamp(0, self.width)

    @cached_property
    def joined(self) -> Tensor:
        """Places of the tokens that join the common prefix, in order, and of those that follow them: [R, most]
        int64."""
        return (self.base.unsqueeze(1) + torch.arange(self.most, device=self.base.device)) % self.width

    def plan(self, lead: int) -> Any:
        """Return the schedule by which a kernel takes the tokens that join the common prefix into states."""
        if lead not in self._plans:
            parts = (as_array(part) for part in (self.base, self.count, self.joined))
            self._plans[lead] = scan_kernels().fold(*parts, lead)
        return self._plans[lead]

    def first(self, plane: Tensor, lead: int = 0) -> Tensor:
        """Return the places `joined` of a plane [rows, lead + T + 1, ...]: [R, most, ...]."""
        rows, places = len(self.base), plane.shape[1]
        flat = torch.arange(rows, device=plane.device).unsqueeze(1) * places + lead + self.joined
        return plane.flatten(0, 1).index_select(0, flat.flatten()).view(rows, self.most, *plane.shape[2:])

    def move(self, plane: Tensor, lead: int) -> None:
        """Move the suffix of a plane [rows, lead + T + 1, ...]."""
        if not len(self.sources):
            return
        if lead not in self._moves:
            sources, targets = (
                places + lead * (places.div(self.width + 1, rounding_mode="floor") + 1)
                for places in (self.sources, self.targets)
            )
            self._moves[lead] = sources, targets
        sources, targets = self._moves[lead]
        flat = plane.flatten(0, 1)
        flat.index_copy_(0, targets, flat.index_select(0, sources))

    def join(self, plane: Tensor, lead: int) -> None:
        """Copy the last `lead` tokens of the grown common prefix to the first places of a plane."""
        if lead and self.most:
            last = plane.flatten(0, 1).index_select(0, self._last_of_prefix(lead))
            plane[: len(self.base), :lead] = last.view(len(self.base), lead, *plane.shape[2:])

    def _last_of_prefix(self, lead: int) -> Tensor:
        """Return the indices [R * lead] int64, in a flattened plane [rows, lead + T + 1, ...], of the last tokens of
        the grown common prefix, as they are before `join` copies them."""
        if lead not in self._last_tokens:
            device = self.base.device
            ahead = self.count.unsqueeze(1) + torch.arange(-lead, 0, device=device)  # from the old common prefix's end
            place = torch.where(ahead < 0, lead + ahead, lead + (self.base.unsqueeze(1) + ahead) % self.width)
            starts = torch.arange(len(self.base), device=device).unsqueeze(1) * (lead + self.width + 1)
            self._last_tokens[lead] = (starts + place).flatten()
        return self._last_tokens[lead]

    def on(self, device: torch.device) -> Shift:
        """Return the same for a layer on another device."""
        if device == self.base.device:
            return self
        sources, targets, base, common_prefix = (
            part.to(device) for part in (self.sources, self.targets, self.base, self.common_prefix)
        )
        return Shift(sources, targets, base, common_prefix, self.width, self.most)


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as a contiguous array for a kernel."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.contiguous().numpy()
