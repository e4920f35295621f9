"""Keys and values of the sources: one row per request, however many nodes its forest has.

An encoder-decoder model asks an `EncoderDecoderCache` for two caches. That of its own tokens is the forest's, and that
of the source is here. A forward reads one row of it for all nodes of that row.

Shape letters: R rows, S source places, H kv heads, E head dim, n rows that are encoded together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from dsbd_cli.models.cache import ForestCache

STEP = 32  # source places are reserved in such steps, so that shapes repeat


class CrossLayer(CacheLayerMixin):
    """One layer's keys and values of all sources, [R, H, S, E] each. `keys` and `values` are those of the current
    forward's rows, as transformers reads them."""

    is_sliding = False

    def __init__(self, owner: CrossCache) -> None:
        self.owner = owner
        self.stored: list[Tensor] = []  # keys and values
        super().__init__()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # key_states: [n, H, S, E]
        owner = self.owner
        self.stored = [
            states.new_zeros(owner.rows, states.shape[1], owner.width, states.shape[3])
            for states in (key_states, value_states)
        ]
        self.is_initialized = True

    # transformers reads these two attributes; they are views of the rows under way
    @property
    def keys(self) -> Tensor | None:
        return self.owner.view(self.stored[0]) if self.stored else None

    @keys.setter
    def keys(self, value: object) -> None:
        """Ignore the None that the base class sets at first."""

    @property
    def values(self) -> Tensor | None:
        return self.owner.view(self.stored[1]) if self.stored else None

    @values.setter
    def values(self, value: object) -> None:
        """Ignore the None that the base class sets at first."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the states [n, H, S, E] of the rows that are encoded, and return them: this forward attends to them."""
        if not self.stored:
            self.lazy_initialization(key_states, value_states)
        assert self.owner.writing is not None, "write() comes before a source's forward"
        for stored, states in zip(self.stored, (key_states, value_states), strict=True):
            rows = self.owner.writing.to(stored.device)
            stored[rows] = 0
            stored[rows, :, : states.shape[2]] = states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.width, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.owner.width


class CrossCache(Cache):
    """Keys and values of the sources of all rows, in all layers.

    Attributes:
        rows: R.
        width: S, places per row.
        lengths: places of each row's source that hold anything; 1 for a row without a source.
        sizes: the same on the device, [R] int64.
        generation: changes whenever the memory moves.
    """

    def __init__(self, device: torch.device) -> None:
        """device: where forwards want `sizes`."""
        super().__init__(layers=[])
        self.rows = 0
        self.width = 0
        self.generation = 0
        self.lengths: list[int] = []
        self.sizes = torch.zeros(0, dtype=torch.int64, device=device)
        self.writing: Tensor | None = None  # [n] int64, rows of the forward under way whose sources are being kept
        self._reading: Tensor | int = 0  # rows of the forward under way, or how many of the first

    @property
    def bytes_per_place(self) -> int:
        """Bytes of one token or frame of a source over all layers; 0 before the first source."""
        return sum(stored[:1, :, :1].nbytes for layer in self._own for stored in layer.stored)

    @property
    def _own(self) -> list[CrossLayer]:
        return [layer for layer in self.layers if isinstance(layer, CrossLayer)]

    def reserve(self, rows: int, width: int = 0, step: int = STEP) -> None:
        """Allocate at least `rows` rows of `width` places, rounded up to steps. The memory only grows and keeps its
        contents."""
        rows, width = max(rows, self.rows), max(-(-width // step) * step, self.width)
        if (rows, width) == (self.rows, self.width):
            return
        self.lengths += [1] * (rows - self.rows)
        self.sizes = torch.nn.functional.pad(self.sizes, (0, rows - self.rows), value=1)
        self.rows, self.width = rows, width
        self.generation += 1
        for layer in self._own:
            for side, old in enumerate(layer.stored):
                fresh = old.new_zeros(rows, old.shape[1], width, old.shape[3])
                fresh[: old.shape[0], :, : old.shape[2]] = old
                layer.stored[side] = fresh

    def release(self) -> None:
        """Free all memory; the layers' shapes stay known."""
        self.rows = self.width = 0
        self.lengths, self.sizes = [], self.sizes[:0]
        self.generation += 1
        for layer in self._own:
            layer.stored = [stored.new_zeros(0, stored.shape[1], 0, stored.shape[3]) for stored in layer.stored]

    def write(self, rows: list[int], lengths: list[int]) -> None:
        """Have the next forward store the sources of these rows, which have these lengths."""
        self.writing = torch.tensor(rows, device=self.sizes.device)
        self.sizes[self.writing] = torch.tensor(lengths, device=self.sizes.device)
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length

    def read(self, rows: Tensor | int) -> None:
        """Have the next forward read the sources of these rows [n] int64, or of the first `rows` ones."""
        self.writing, self._reading = None, rows

    def view(self, stored: Tensor) -> Tensor:
        """Return the part of stored [R, H, S, E] that the current forward reads: [n, H, S, E] of its n rows."""
        rows = self._reading
        return stored[:rows] if isinstance(rows, int) else stored.index_select(0, rows.to(stored.device))

    def select_rows(self, rows: Tensor) -> None:
        """Move these rows [n] int64 to the front, in this order."""
        for layer in self._own:
            for stored in layer.stored:
                index = rows.to(stored.device)
                stored[: len(index)] = stored.index_select(0, index)
        lengths = [self.lengths[row] for row in rows.tolist()]
        self.lengths[: len(lengths)] = lengths
        self.sizes[: len(lengths)] = self.sizes[rows.to(self.sizes.device)]

    def clear(self, row: int) -> None:
        """Zero one row."""
        self.lengths[row] = 1
        self.sizes[row] = 1
        for layer in self._own:
            for stored in layer.stored:
                stored[row] = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(CrossLayer(self))
        layer: Any = self.layers[layer_idx]
        return layer.update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class ForestPairCache(EncoderDecoderCache):
    """The forest's own cache and that of the sources, as one decoder reads them."""

    def __init__(self, own: ForestCache, cross: CrossCache, *, known: bool) -> None:
        """known: the layers find their source's keys and values in the cache; otherwise they project them."""
        # the base class's constructor is not called, because it asks the caches how long they are
        self.self_attention_cache: Any = own
        self.cross_attention_cache: Any = cross
        self.is_updated = dict.fromkeys(range(len(cross.layers) or 1), known)
        self.layers = own.layers

    def __len__(self) -> int:
        return 1  # some models take an empty cache for none
