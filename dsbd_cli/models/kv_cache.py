"""Keys and values of a packed forest: one row per request, one slot per token, written and moved by slot.

Shape letters: R rows, S slots, n nodes of a forward, H kv heads, E head dim, T moved slots, P planes (keys and values
of all layers that have one shape). Layers of one shape and device share one slab [P, R, S, H * E], so that one gather
and one scatter move the slots of all of them. A layer sees its own keys as a view [R, S, H, E].
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.memory import zeros

HIDDEN_STATES = -1  # used as the layer number of the plane of hidden states that a draft head reads


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """Shape, dtype and device of the keys (or the values) of one layer, known from the config or learnt from the first
    forward."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's keys (or values) in one layer."""
        return self.heads * self.dim * self.dtype.itemsize


class WritePositions:
    """Cache positions that the nodes of the current forward are written to. They are computed once per forward and used
    by every layer on its own device."""

    def __init__(self, slots: Tensor, rows: Tensor | None, active: int, capacity: int) -> None:
        # slots: [R, n] int64; rows: [R] int64 or None
        count = slots.shape[0]
        base = torch.arange(count, device=slots.device) if rows is None else rows
        self.flat = (base[:, None] * capacity + slots).flatten()  # [R * n] into rows x slots
        self.rows = rows
        self.count = count
        self.active = active
        self._moved: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return (flat, rows) on the device of a layer, because a device map may spread the layers over several."""
        if device == self.flat.device:
            return self.flat, self.rows
        if device not in self._moved:
            rows = None if self.rows is None else self.rows.to(device)
            self._moved[device] = (self.flat.to(device), rows)
        return self._moved[device]


class KVCache:
    """Keys and values of all layers of one model. `learn` sets the shapes of a layer, `reserve` allocates the memory.

    Attributes:
        generation: changes whenever memory is allocated or freed. An address is valid within one generation.
        ops: operations that move slots.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.slots = 0
        self.generation = 0
        self._plane_layouts: dict[tuple[int, int], PlaneLayout] = {}  # (layer, 0 keys / 1 values)
        self._slabs: dict[PlaneLayout, Tensor] = {}  # [P, R, S, H * E]
        self._write: WritePositions | None = None
        self._planes: dict[tuple[int, int], Tensor] = {}  # (layer, side): [R, S, H, E]
        self.ops = Ops()

    @property
    def active(self) -> int:
        """S, the number of active slots of the current forward, or of the last one; 0 before the first."""
        return self._write.active if self._write else 0

    @property
    def under_way(self) -> WritePositions | None:
        """Write positions of the current forward, or of the last one; None before the first."""
        return self._write

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys, and so of attention scores; known after the first forward."""
        return next(iter(self._plane_layouts.values())).dtype

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's keys and values over all layers, and of its hidden state where there is one; 0 while no
        shapes are known."""
        return sum(layout.bytes_per_slot for layout in self._plane_layouts.values())

    @property
    def attending(self) -> int:
        """Number of layers that hold keys and values."""
        return len({layer for layer, _ in self._plane_layouts} - {HIDDEN_STATES})

    def recurrent_bytes(self, window: int) -> int:
        """Return the bytes that a row holds in addition to keys and values, whatever its length
        (recurrent/states.py)."""
        return 0

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """Allocate at least rows x slots; the memory only grows and keeps its contents. A layer whose shapes are not
        known yet gets its memory in the first forward.

        window: most slots that a row may hold past its common prefix, None for all. Keys and values do not depend on
        it.
        """
        rows, slots = max(rows, self.rows), max(slots, self.slots)
        if (rows, slots) == (self.rows, self.slots):
            return
        self.rows, self.slots = rows, slots
        for layout in dict.fromkeys(self._plane_layouts.values()):
            self._grow(layout)
        self._bind()

    def release(self) -> None:
        """Free all memory; the shapes of the layers stay known."""
        self.rows = self.slots = 0
        self.generation += 1
        self._slabs.clear()
        self._write = None
        self._bind()

    def begin(self, slots: Tensor, rows: Tensor | None, active: int) -> None:
        """Set where the next forward writes, slots [R, n] and rows [R] or None, and how many slots its mask covers."""
        assert slots.shape[0] <= self.rows, "more rows than reserved"
        assert active <= self.slots, "more slots than reserved"
        self._write = WritePositions(slots, rows, active, self.slots)

    @contextlib.contextmanager
    def running(self, batch: ForestInput) -> Iterator[None]:
        """Enclose a forward over a batch."""
        self.begin(batch.slots, batch.rows, batch.mask.shape[-1])
        yield

    def advance(self, src_slots: Tensor, dst_slots: Tensor, common_prefix: Tensor) -> None:
        """Move slots as `move` does. common_prefix [R]: leading slots that never move again. Keys and values do not
        depend on it."""
        self.move(src_slots, dst_slots)

    def move(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Copy slots within each row: src_slots, dst_slots [R, T] int64. All reads happen before any write."""
        if not src_slots.shape[0]:
            return
        for layout, slab in self._slabs.items():
            self.ops.move(slab, src_slots.to(layout.device), dst_slots.to(layout.device))

    def select_rows(self, rows: Tensor) -> None:
        """Move these rows [n] int64 to the front, in this order. Each plane is copied by itself, so that little memory
        is needed."""
        for layout, slab in self._slabs.items():
            index = rows.to(layout.device)
            for plane in slab:
                plane[: len(index)] = plane.index_select(0, index)

    def clear(self, row: int, start: int = 0) -> None:
        """Zero one row from a slot on."""
        for slab in self._slabs.values():
            slab[:, row, start:].zero_()

    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy leading slots between rows: (source, target, slots) each. All reads happen before any write. Each plane
        is copied by itself, so that little memory is needed."""
        for slab in self._slabs.values():
            for plane in slab:
                read = [plane[src_row, :count].clone() for src_row, _, count in copies]
                for part, (_, dst_row, count) in zip(read, copies, strict=True):
                    plane[dst_row, :count] = part

    def learn(self, layer: int, keys: PlaneLayout, values: PlaneLayout) -> None:
        """Record the shapes of a layer's keys and values, and allocate their memory."""
        for side, layout in enumerate((keys, values)):
            self._plane_layouts[(layer, side)] = layout
            self._grow(layout)
        self._bind()

    def learn_all(self, layers: Mapping[int, tuple[PlaneLayout, PlaneLayout]]) -> None:
        """Record the shapes of the keys and values of all layers that attend, by number, before any memory is
        allocated."""
        assert not self.slots
        self._plane_layouts = {(number, side): pair[side] for number, pair in layers.items() for side in (0, 1)}

    def add_hidden_states(self, layout: PlaneLayout) -> None:
        """Add one more vector to each slot: a state, which is moved and copied with the slot's keys and values."""
        replaced = self._plane_layouts.get((HIDDEN_STATES, 0))
        self._plane_layouts[HIDDEN_STATES, 0] = layout
        if replaced is not None and not self._members(replaced):
            self._slabs.pop(replaced, None)
        self._grow(layout)
        self._bind()

    @property
    def hidden_states(self) -> Tensor:
        """The hidden states of all slots [R', S', H], a view."""
        return self._planes[HIDDEN_STATES, 0].flatten(2)

    def write(self, plane: Tensor, states: Tensor) -> Tensor:
        """Write states [R, H, n, E] to the nodes' slots of a plane [R', S', H, E]; return its active slots [R, H, S,
        E], a view if rows is None."""
        step = self._write
        assert step is not None, "begin() comes before a forward"
        flat, rows = step.on(plane.device)
        plane.flatten(0, 1).index_copy_(0, flat, states.transpose(1, 2).flatten(0, 1))
        seen = plane[:, : step.active]
        seen = seen[: step.count] if rows is None else seen.index_select(0, rows)
        return seen.transpose(1, 2)

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [R', S', H, E] of a layer."""
        return self._planes[layer, 0], self._planes[layer, 1]

    def _members(self, layout: PlaneLayout) -> list[tuple[int, int]]:
        return [key for key, value in self._plane_layouts.items() if value == layout]

    def _grow(self, layout: PlaneLayout) -> None:
        """Make the slab of one kind of plane cover all its planes, rows and slots. New memory is zero, because 0 * NaN
        is NaN."""
        self.generation += 1
        width = layout.heads * layout.dim
        shape = (len(self._members(layout)), self.rows, self.slots, width)
        fresh = zeros(shape, layout.dtype, layout.device)
        old = self._slabs.pop(layout, None)
        if old is not None:
            planes, rows, slots, _ = old.shape
            fresh[:planes, :rows, :slots] = old
        self._slabs[layout] = fresh

    def _bind(self) -> None:
        """Point every layer at its planes."""
        self._planes.clear()
        for layout, slab in self._slabs.items():
            for plane, key in enumerate(self._members(layout)):
                self._planes[key] = slab[plane].unflatten(-1, (layout.heads, layout.dim))
