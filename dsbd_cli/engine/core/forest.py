"""The forest of one iteration: flat arrays over nodes, layer after layer.

Node order in a target forward is fixed: W roots (the beams' pending tokens), then K nodes for each of D layers; N = W
+ D*K. Absent nodes
are invalid, never compacted away. T is the tail window, Vd the candidates of a draft node.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dsbd_cli.engine.core.forest_buffer import ForestBuffer

from dsbd_cli.engine.core.nodes import DraftLaw, LayerNodes

__all__ = ["Forest"]


@dataclass(slots=True)
class Forest:
    """Layers 0 (roots) to D, and the law each drafted layer came from (laws[l] is the law of layer l + 1).

    sheet: where kernels have written the nodes; None where tensor code made them.
    """

    num_beams: int
    drafts_per_layer: int
    layers: list[LayerNodes]
    laws: list[DraftLaw | None] = field(default_factory=list)
    sheet: ForestBuffer | None = None
    _flat: LayerNodes | None = field(default=None, init=False, repr=False)

    @property
    def depth(self) -> int:
        """D, drafted layers."""
        return len(self.layers) - 1

    def offset(self, layer: int) -> int:
        """Index of the first node of a layer."""
        return 0 if layer == 0 else self.num_beams + (layer - 1) * self.drafts_per_layer

    @property
    def flat(self) -> LayerNodes:
        """The nodes of all layers, n = N. They are joined once, so the forest must be complete."""
        if self._flat is None and self.sheet is not None:
            self._flat = self.sheet.nodes
        elif self._flat is None:
            names = [item.name for item in fields(LayerNodes) if getattr(self.layers[0], item.name) is not None]
            self._flat = LayerNodes(
                **{name: torch.cat([getattr(one, name) for one in self.layers], 1) for name in names}
            )
        assert self._flat is not None
        return self._flat
