"""Two drafters in one forest, joined by longest prefix (RASD, arXiv 2503.03434): the second one's paths run along the
first one's tree while their tokens agree, and branch off as deterministic nodes where they do not.

Everything is decided layer by layer from the layers above, so that what is kept of a layer never depends on draws
below it. A draft model runs the nodes of both, once, which keeps its cache whole and lets it judge what the second one
looked up; two drafters with the model choose from the same logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.probs import NEVER, Room, top_candidates
from dsbd_cli.engine.drafting.base import DraftContext, LayerDrafts, children, fuse, roots
from dsbd_cli.engine.drafting.beam import BeamDrafter, draft_calls
from dsbd_cli.engine.drafting.logits import DraftLogits
from dsbd_cli.engine.drafting.paths import PathDrafter, PathTree

__all__ = ["FusionDrafter"]


class _Lookups:
    """Nodes of a second drafter that reads text. `drafts` gives them with the order in which they are to be kept as
    their weight, and their running weight under the draft."""

    def __init__(self, drafter: PathDrafter, context: DraftContext, top_k: int) -> None:
        self._tree, self._top_k = PathTree(drafter.source.paths(context)), top_k

    def drafts(
        self, context: DraftContext, forest: Forest, layer: int, logits: DraftLogits | None
    ) -> tuple[LayerDrafts, Tensor]:
        """Heaviest first. logits: of the draft model at the layer above, where there is one."""
        drafts = self._tree.drafts(context, forest, layer, 2 * context.drafts_per_layer)
        return (drafts, drafts.weight) if logits is None else _judge(forest, layer, drafts, logits.wide(), self._top_k)

    def follow(self, place: Tensor) -> None:
        """The layer is made; place: [R, m] where each of the drafts stands in it, -1 where it does not."""
        self._tree.follow(place)


class _Drawn:
    """Nodes of a second drafter that shares the draft model, from the same logits. They are not tested against the law
    they were drawn from, so they count as deterministic."""

    def __init__(self, drafter: BeamDrafter) -> None:
        self._drafter = drafter

    def drafts(
        self, context: DraftContext, forest: Forest, layer: int, logits: DraftLogits | None
    ) -> tuple[LayerDrafts, Tensor]:
        """In draw order."""
        assert logits is not None
        count = context.drafts_per_layer
        drafts, _ = self._drafter.drafts(context, forest, layer, logits, count)
        weight = drafts.weight
        drafts.weight = -torch.arange(count, device=weight.device, dtype=weight.dtype).expand_as(weight)
        return drafts, weight

    def follow(self, place: Tensor) -> None:
        """The layer is made."""
        self._drafter.follow(place)


class FusionDrafter:
    """Nodes of the first drafter, then of the second."""

    def __init__(
        self, first: BeamDrafter | PathDrafter, second: BeamDrafter | PathDrafter, share: int, top_k: int
    ) -> None:
        """share: nodes per layer of the second one at most (K - 1 and less go to it).

        top_k: a looked-up node of the second one is kept only if it is among the draft model's k likeliest below its
        parent; 0 keeps all. Of no meaning without a draft model.
        """
        self.first, self.second = first, second
        self._share, self._top_k = share, top_k
        self.calls, self.needs_text = 0, first.needs_text or second.needs_text

    def propose(self, context: DraftContext) -> Forest:
        """Both forests in one; the first has at least K - share nodes of a layer to itself."""
        if context.drafters != "all":
            return self._alone(context)
        beams, count = context.beams, context.drafts_per_layer
        forest = Forest(beams.token.shape[1], count, [roots(context)])
        self.calls = 0
        if context.depth == 0:
            return forest
        own = forest.firsts = max(1, count - self._share)
        first, second = self.first, self.second
        tree = PathTree(first.source.paths(context)) if isinstance(first, PathDrafter) else None
        other = _Lookups(second, context, self._top_k) if isinstance(second, PathDrafter) else _Drawn(second)
        for layer in range(context.depth):
            logits, law = None, None
            if isinstance(first, PathDrafter):
                assert tree is not None
                drafts = tree.drafts(context, forest, layer, own)
                tree.follow()
            else:
                logits = first.forward(context, forest, layer)
                drafts, law = first.drafts(context, forest, layer, logits, own)
                self.calls = draft_calls(context)
            self._add(context, forest, layer, drafts, other, logits)
            forest.laws.append(law)
        return forest

    def _alone(self, context: DraftContext) -> Forest:
        """One of the two has the layers to itself."""
        drafter = self.first if context.drafters == "first" else self.second
        forest = drafter.propose(context)
        forest.firsts = context.drafts_per_layer if context.drafters == "first" else 0
        self.calls = drafter.calls
        return forest

    def _add(
        self,
        context: DraftContext,
        forest: Forest,
        layer: int,
        first: LayerDrafts,
        other: _Lookups | _Drawn,
        logits: DraftLogits | None,
    ) -> None:
        """The layer of both. logits: of the draft model at the layer above."""
        second, weight = other.drafts(context, forest, layer, logits)
        fused, place = fuse(first, second, context.drafts_per_layer)
        other.follow(place)
        own = first.token.shape[1]
        added = torch.where(place >= own, place, context.drafts_per_layer)
        wide = torch.nn.functional.pad(fused.weight, (0, 1)).scatter(1, added, weight)
        fused.weight = wide[:, : context.drafts_per_layer]
        nodes = children(context, forest, layer, fused)
        at = torch.where(place >= 0, place, context.drafts_per_layer)
        nodes.second = torch.zeros_like(wide, dtype=torch.bool).scatter(1, at, True)[:, : context.drafts_per_layer]
        forest.layers.append(nodes)


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
        found = top_candidates(logits, Room(min(top_k, vocabulary - 1)))
        least = found.logprobs.amin(-1).gather(1, second.above)
        valid = valid & known & (logprob >= least - 1e-6)
    root = forest.layers[0].weight.gather(1, nodes.root.gather(1, second.above))  # its share is in the hits already
    priority = torch.where(known, second.weight + weight - root, NEVER)
    judged = LayerDrafts(second.above, second.token, valid, second.sampled, priority)
    return judged, torch.where(torch.isfinite(weight), weight, second.weight.clamp(min=-1e4))
