"""Two drafters in one forest, joined by longest prefix (RASD, arXiv 2503.03434): the second one's paths run along the
first one's tree while their tokens agree, and branch off as deterministic nodes where they do not.

Everything is decided layer by layer from the layers above, so that what is kept of a layer never depends on draws
below it. A draft model runs the nodes of both, which keeps its cache whole and lets it judge the second one's nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.core.forest import DraftLaw, Forest
from dsbd_cli.core.probs import NEVER, top_candidates
from dsbd_cli.drafting.base import DraftContext, LayerDrafts, children, fuse, roots
from dsbd_cli.drafting.beam import BeamDrafter
from dsbd_cli.drafting.logits import DraftLogits
from dsbd_cli.drafting.paths import PathDrafter, PathTree

__all__ = ["FusionDrafter"]


class FusionDrafter:
    """Nodes of the first drafter, then of the second."""

    needs_text = True

    def __init__(self, first: BeamDrafter | PathDrafter, second: PathDrafter, share: int, top_k: int) -> None:
        """share: nodes per layer of the second one at most (K - 1 and less go to it).

        top_k: a node of the second one is kept only if it is among the draft model's k likeliest below its parent; 0
        keeps all. Of no meaning without a draft model.
        """
        self.first, self.second = first, second
        self._share, self._top_k = share, top_k
        self.calls = 0

    def propose(self, context: DraftContext) -> Forest:
        """Both forests in one; the first has at least K - share nodes of a layer to itself."""
        beams, count = context.beams, context.drafts_per_layer
        forest = Forest(beams.token.shape[1], count, [roots(beams, context.table, context.depth)])
        self.calls = 0
        if context.depth == 0:
            return forest
        own = max(1, count - self._share)
        trees = [PathTree(self.second.source.paths(context))]
        if isinstance(self.first, PathDrafter):
            trees.append(PathTree(self.first.source.paths(context)))
        for layer in range(context.depth):
            logits, law = None, None
            if isinstance(self.first, PathDrafter):
                drafts = trees[1].drafts(context, forest, layer, own)
                trees[1].follow()
            else:
                logits = self.first.forward(context, forest, layer)
                drafts, law = self.first.drafts(context, forest, layer, logits, own)
                self.calls += 1
            self._add(context, forest, layer, drafts, law, trees[0], logits)
        return forest

    def _add(
        self,
        context: DraftContext,
        forest: Forest,
        layer: int,
        first: LayerDrafts,
        law: DraftLaw | None,
        tree: PathTree,
        logits: DraftLogits | None,
    ) -> None:
        """The layer of both. logits: of the draft model at the layer above."""
        second = tree.drafts(context, forest, layer, 2 * context.drafts_per_layer)
        weight = second.weight
        if logits is not None:
            second, weight = _judge(forest, layer, second, logits.wide(), self._top_k)
        fused, place = fuse(first, second, context.drafts_per_layer)
        tree.follow(place)
        own = first.token.shape[1]
        added = torch.where(place >= own, place, context.drafts_per_layer)
        wide = torch.nn.functional.pad(fused.weight, (0, 1)).scatter(1, added, weight)
        fused.weight = wide[:, : context.drafts_per_layer]
        forest.layers.append(children(context, forest, layer, fused))
        forest.laws.append(law)


def _judge(forest: Forest, layer: int, second: LayerDrafts, logits: Tensor, top_k: int) -> tuple[LayerDrafts, Tensor]:
    """The second drafter's nodes without those that the draft model does not expect, ordered by probability along the
    path times share of the hits; and their running weight under the draft."""
    nodes = forest.layers[layer]
    vocabulary = logits.shape[-1]
    total = torch.logsumexp(logits.to(torch.float32), -1)
    known = second.token < vocabulary
    flat = second.above * vocabulary + second.token.clamp(max=vocabulary - 1)
    logit = logits.flatten(1).gather(1, flat).to(torch.float32)
    logprob = (logit - total.gather(1, second.above)).nan_to_num(nan=NEVER, neginf=NEVER)
    weight = nodes.weight.gather(1, second.above) + logprob
    valid = second.valid
    if top_k:
        least = top_candidates(logits, min(top_k, vocabulary - 1)).logprobs[:, :, -1].gather(1, second.above)
        valid = valid & known & (logprob >= least - 1e-6)
    root = forest.layers[0].weight.gather(1, nodes.root.gather(1, second.above))  # its share is in the hits already
    priority = torch.where(known, second.weight + weight - root, NEVER)
    judged = LayerDrafts(second.above, second.token, valid, second.sampled, priority)
    return judged, torch.where(torch.isfinite(weight), weight, second.weight.clamp(min=-1e4))
