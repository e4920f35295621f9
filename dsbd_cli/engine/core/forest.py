"""The forest of one iteration: nodes layer after layer, views of one `ForestBuffer`.

Node order in a target forward is fixed: W roots (the beams' pending tokens), then K nodes for each of D layers; N = W
+ D*K nodes. Absent nodes are invalid, never compacted away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dsbd_cli.engine.core.forest_buffer import ForestBuffer
from dsbd_cli.engine.core.nodes import DraftDistribution, LayerNodes


@dataclass(slots=True)
class Forest:
    """Layers 0 (roots) to D, and the distribution each drafted layer came from (distributions[l] is the distribution of
    layer l + 1). cut: a layer below the last one was drafted too, but does not go to the target."""

    buffer: ForestBuffer
    layers: list[LayerNodes] = field(init=False)
    distributions: list[DraftDistribution | None] = field(default_factory=list)
    cut: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.layers = [self.buffer.layer(0)]

    @property
    def num_beams(self) -> int:
        """W0, roots."""
        return self.buffer.sizes.roots

    @property
    def drafts_per_layer(self) -> int:
        """K."""
        return self.buffer.sizes.drafts

    @property
    def depth(self) -> int:
        """D, layers that are drafted by now."""
        return len(self.layers) - 1

    @property
    def layers_run(self) -> int:
        """Layers, from the roots down, whose nodes a draft model has run: all above the last one that it drafted."""
        return self.depth + self.cut

    def end(self) -> None:
        """Leave out the layers that are not there yet: the forest is complete, and the last one drafted was in vain."""
        self.cut = True
        self.buffer.end(self.depth)

    def offset(self, layer: int) -> int:
        """Index of the first node of a layer."""
        return self.buffer.sizes.offset(layer)

    def add(self, distribution: DraftDistribution | None) -> LayerNodes:
        """Take the next layer, which is in the buffer now, and the distribution that it came from; return its nodes."""
        self.distributions.append(distribution)
        self.layers.append(self.buffer.layer(len(self.layers)))
        return self.layers[-1]

    @property
    def flat(self) -> LayerNodes:
        """The nodes of all layers, n = N. The forest must be complete."""
        return self.buffer.nodes
