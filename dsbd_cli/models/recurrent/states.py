"""States of recurrent layers over a packed forest: one state per row, of the common prefix, and inputs of the suffix by
slot.

A layer that carries a state would need one state per beam and per drafted node. Instead each row keeps one state, after
the last token that all its live beams share, and the inputs of the tokens after it. They have one *place* per slot of
the tail: place = slot % T, so that a token stays where it is when the common prefix grows. `advance` takes the tokens
that joined the common prefix into the state. So memory does not grow with W or with the text. models/recurrent/scans.py
has the sums.

CPU kernels (kernels/scan.py) read states at multiples of 8 tokens. With them the kept state lies 16 to 23 tokens before
the token that follows the common prefix, and the inputs of the last 23 tokens of the common prefix are kept, too.

Letters: R rows, n nodes of a forward, S active slots, T places, G key heads, H value heads, N key dim, P value dim, C
channels, J taps of a convolution, I channels of a Mamba-1 layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.recurrent.memory import LayerMemory, TailCache
from dsbd_cli.models.recurrent.tail import Shift, TailBuffer


class RecurrentCache(TailCache):
    """A cache with the memory of recurrent layers.

    base: [R] int64, leading slots whose tokens the states hold. memories: by layer and kind.
    """

    def __init__(self, device: torch.device, *, kernels: bool = True) -> None:
        super().__init__(kernels=kernels)
        self.base = torch.zeros(0, dtype=torch.int64, device=device)
        self.memories: dict[tuple[Any, ...], LayerMemory] = {}

    def keep_in(self, precision: torch.dtype) -> None:
        """Hold states, and sum over them, in this dtype. It is called before `reserve`."""
        self.precision = precision
        for memory in self.memories.values():
            memory.keep_in(precision)

    def recurrent_bytes(self, window: int) -> int:
        """Return the bytes of a row, without keys and values, with `window` places. They do not grow with the text."""
        return sum(memory.bytes_of_row(window) for memory in self.memories.values())

    @contextlib.contextmanager
    def running(self, batch: ForestInput) -> Iterator[None]:
        """Enclose a forward over a batch. After it the tokens of a chain are part of the states."""
        count = batch.tokens.shape[0]
        base = self.base[:count] if batch.rows is None else self.base[batch.rows]
        if not batch.chain:
            # while other rows catch up, a row may be asked for tokens that its states hold: these are not stored
            held = batch.slots < base.unsqueeze(1)
            batch = dataclasses.replace(batch, slots=torch.where(held, self.slots - 1, batch.slots))
        self.begin(batch.slots, batch.rows, batch.mask.shape[-1])
        places = self.places = TailBuffer(batch, base, self.window, self.slots - 1)
        try:
            yield
        finally:
            self.places = None
        if not places.chain:
            return
        end = torch.where(places.real, places.batch.slots + 1, 0).amax(1)
        base = torch.where(places.lengths > 0, end, places.base)
        if places.rows is None:
            self.base[: places.count] = base
        else:
            self.base.index_copy_(0, places.rows, base)

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """Reserve as KVCache does. window: most slots that a row may hold past its common prefix; None: all."""
        super().reserve(rows, slots)
        wanted = max(self.window, self.slots if window is None else window)
        if (self.rows, wanted) == (len(self.base), self.window):
            return
        self.window = wanted
        self.generation += 1
        more = self.rows - len(self.base)
        self.base = torch.nn.functional.pad(self.base, (0, more))
        for memory in self.memories.values():
            memory.resize(self.rows, wanted, self.base)

    def release(self) -> None:
        super().release()
        self.window = 0
        self.base = self.base[:0]
        for memory in self.memories.values():
            memory.resize(0, 0, self.base)

    def advance(self, src_slots: Tensor, dst_slots: Tensor, common_prefix: Tensor) -> None:
        """Move keys, values and the suffix's inputs, [R, m] slots each. Take the tokens that joined the common prefix
        into the states."""
        self.move(src_slots, dst_slots)
        rows = len(src_slots)
        base = self.base[:rows]
        common_prefix = torch.maximum(common_prefix, base)
        shift = Shift.of(src_slots, dst_slots, base, common_prefix, self.window)
        for memory in self.memories.values():
            memory.advance(shift.on(memory.device))
        self.base[:rows] = common_prefix

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        for memory in self.memories.values():
            index = rows.to(memory.device)
            for tensor in memory.tensors():
                tensor[: len(index)] = tensor.index_select(0, index)
        self.base[: len(rows)] = self.base[rows]

    def clear(self, row: int, start: int = 0) -> None:
        super().clear(row, start)
        for memory in self.memories.values():
            for tensor in memory.tensors():
                tensor[row].zero_()
        self.base[row] = 0
