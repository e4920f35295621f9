"""The cache of a packed forest (kv_cache.py) behind the interface that transformers expects."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dsbd_cli.models.kv_cache import HIDDEN_STATES, KVCache, PlaneLayout


class ForestLayer(CacheLayerMixin):
    """One model layer's view of the cache, behind the interface that transformers expects."""

    is_sliding = False

    def __init__(self, owner: ForestCache, index: int) -> None:
        super().__init__()
        self.owner = owner
        self.index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # key_states: [R, H, n, E]
        self.owner.states_like(self.index, key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the nodes' states [R, H, n, E] to their slots; return all active slots [R, H, S, E], which are copied
        only where rows are chosen."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None, "reserve() comes before a forward"
        assert self.values is not None
        keys = self.owner.write(self.keys, key_states)
        return keys, self.owner.write(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.active, 0

    def get_seq_length(self) -> int:
        return 0  # positions are always given, so nothing may be counted from the cache's length

    def get_max_length(self) -> int:
        return self.owner.slots


class ForestCache(KVCache, Cache):
    """A KVCache that learns its layers and their shapes in the first forward."""

    def __init__(self) -> None:
        Cache.__init__(self, layers=[])
        KVCache.__init__(self)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(ForestLayer(self, len(self.layers)))
        layer: Any = self.layers[layer_idx]
        return layer.update(key_states, value_states)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.active, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def states_like(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Learn the shapes of a layer from its first states [R, H, n, E]."""
        layouts = (PlaneLayout(plane.shape[1], plane.shape[3], plane.dtype, plane.device) for plane in (keys, values))
        self.learn(layer, *layouts)

    def _bind(self) -> None:
        super()._bind()
        for number, side in self._plane_layouts:
            if number != HIDDEN_STATES:
                setattr(self.layers[number], "values" if side else "keys", self._planes.get((number, side)))
