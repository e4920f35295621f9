"""The forest of one iteration: nodes layer after layer, views of one `ForestBuffer`.

Node order in a target forward is fixed: W roots (the beams' pending tokens), then K nodes for each of D layers; N = W
+ D*K nodes. Absent nodes are invalid, never compacted away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsbd_cli.engine.core.forest_buffer import ForestBuffer
from dsbd_cli.engine.core.nodes import DraftDistribution, LayerNodes, at_nodes


@dataclass(slots=True)
class Forest:
    """Layers 0 (roots) to D, and the distribution that each drafted layer was drawn from: distributions[l] is that of
    layer l + 1. cut: one more layer was drafted below the last one, but does not go to the target."""

    buffer: ForestBuffer
    layers: list[LayerNodes] = field(init=False)
    distributions: list[DraftDistribution | None] = field(default_factory=list)
    cut: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.layers = [self.buffer.layer(0)]

    @property
    def num_beams(self) -> int:
        """W0, number of roots."""
        return self.buffer.sizes.roots

    @property
    def drafts_per_layer(self) -> int:
        """K, drafts of a layer."""
        return self.buffer.sizes.drafts

    @property
    def depth(self) -> int:
        """D, layers drafted so far."""
        return len(self.layers) - 1

    @property
    def layers_run(self) -> int:
        """Number of layers, counted from the roots, whose nodes a draft model has run: all above the last one that it
        drafted."""
        return self.depth + self.cut

    def end(self) -> None:
        """Complete the forest with the layers that it has. The layer that was just drafted is left out."""
        self.cut = True
        self.buffer.end(self.depth)

    def offset(self, layer: int) -> int:
        """Return the index of the first node of a layer."""
        return self.buffer.sizes.offset(layer)

    def add(self, distribution: DraftDistribution | None) -> LayerNodes:
        """Add the next layer, which is already in the buffer, with the distribution that it was drawn from. Return its
        nodes."""
        self.distributions.append(distribution)
        self.layers.append(self.buffer.layer(len(self.layers)))
        return self.layers[-1]

    def path_to(self, parent: Tensor, token: Tensor, steps: Tensor) -> Tensor:
        """Return the tokens of this iteration down to pairs (parent node, token): [R, m, D + 1]. parent, token, steps:
        [R, m] int64; a pair has `steps` tokens, and entries behind them are meaningless."""
        paths = self.flat.path_tokens[:, :, : self.depth]  # a gate may have ended the forest early
        paths = torch.nn.functional.pad(at_nodes(paths, parent), (0, 1))
        return paths.scatter(2, (steps - 1).clamp(min=0).unsqueeze(2), token.unsqueeze(2))

    @property
    def flat(self) -> LayerNodes:
        """The nodes of all layers, n = N. The forest must be complete."""
        return self.buffer.nodes
