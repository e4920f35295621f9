"""Two drafters in one forest, joined by longest prefix (RASD, arXiv 2503.03434). The second drafter reads text. Its
paths run along the first one's tree while their tokens agree, and branch off as deterministic nodes where they do not.

Everything is decided layer by layer from the layers above, so that what is kept of a layer never depends on draws below
it. A draft model runs the nodes of both drafters once. So its cache is complete, and it can judge what the second
drafter looked up. In an iteration that is `looked_up` the second drafter drafts alone, and the model rests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsbd_cli.engine.core.beams import Beams
from dsbd_cli.engine.core.candidates import CandidateCount, Candidates, top_candidates
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.report import SECOND
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.base import DraftContext, Drafter, LayerDrafts, children, goes_on, merge_nodes
from dsbd_cli.engine.drafting.beam import BeamDrafter, draft_calls
from dsbd_cli.engine.drafting.paths import PathDrafter, PathTree
from dsbd_cli.engine.drafting.text import PromptTable
from dsbd_cli.engine.planning.planner import Prospects


class FusionDrafter(Drafter):
    """A drafter that drafts nodes of a first drafter, then nodes of a second one, in every layer."""

    needs_text = True

    def __init__(
        self, first: BeamDrafter | PathDrafter, second: PathDrafter, share: int, top_k: int, *, turns: bool = False
    ) -> None:
        """share: nodes per layer of the second drafter at most; the first has at least one.

        top_k: a looked-up node of the second drafter is kept only if it is among the draft model's k likeliest tokens
        below its parent; 0 keeps all. It has no effect without a draft model.

        turns: the second drafter drafts some iterations alone, and learns from all.
        """
        self._first, self._second, self._share, self._top_k = first, second, share, top_k
        self._turns = turns
        self.model = first.model
        self.on_host = first.on_host or second.on_host
        self.learns_rows = first.learns_rows or second.learns_rows

    def row_ended(self, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Tell both drafters."""
        self._first.row_ended(prompt, texts)
        self._second.row_ended(prompt, texts)

    def run_ended(self) -> None:
        """Tell both drafters."""
        self._first.run_ended()
        self._second.run_ended()

    def prospects(self, beams: Beams, prompts: PromptTable | None, depth: int, count: int) -> Prospects:
        """Return those of the second drafter."""
        return self._second.prospects(beams, prompts, depth, count)

    def learn(self, forest: Forest, candidates: Candidates) -> None:
        """Teach the second drafter, if it drafts alone at times."""
        if self._turns:
            self._second.learn(forest, candidates)

    def select(self, rows: Tensor) -> None:
        """Keep what the second drafter knows of these rows."""
        self._second.select(rows)

    def release(self) -> None:
        """Free what the second drafter keeps."""
        self._second.release()

    def propose(self, context: DraftContext) -> Forest:
        """Draft one forest, with the second drafter alone or with both. Of both at least K - share nodes of a layer are
        the first one's."""
        first, count = self._first, context.drafts_per_layer
        self.calls = 0
        if context.looked_up:
            forest = self._second.propose(context)
            for drafted in forest.layers[1:]:
                drafted.drafter_id.fill_(SECOND)
            return forest
        forest = Forest(context.buffer)
        if context.depth == 0:
            return forest
        own = max(1, count - self._share)
        tree = PathTree(first.paths(context)) if isinstance(first, PathDrafter) else None
        other = PathTree(self._second.paths(context))
        for layer in range(context.depth):
            looked_up = other.drafts(context, forest, layer, 2 * count)
            if isinstance(first, BeamDrafter):
                logits = first.forward(context, forest, layer)
                drafts, distribution = first.drafts(context, forest, layer, logits, own)
                looked_up, priority = _judge(forest, layer, looked_up, logits.wide(), self._top_k)
            else:
                assert tree is not None
                drafts, distribution, priority = tree.drafts(context, forest, layer, own), None, looked_up.weight
                tree.follow()
                assert drafts.confidence is not None
                assert looked_up.confidence is not None
                drafts.confidence = torch.maximum(drafts.confidence, looked_up.confidence)
            if not goes_on(context, forest, drafts.confidence):
                break
            fused, column = merge_nodes(drafts, looked_up, priority, count)
            other.follow(column)
            children(context, forest, layer, fused, distribution).drafter_id[:, own:] = SECOND
        if isinstance(first, BeamDrafter):
            self.calls = draft_calls(context, forest)
        return forest


def _judge(forest: Forest, layer: int, drafts: LayerDrafts, logits: Tensor, top_k: int) -> tuple[LayerDrafts, Tensor]:
    """Drop looked-up nodes that the draft model does not expect. Return the others with their running weight under the
    draft model, and their priority [R, m]: the log of their share of the hits times q along the path."""
    nodes = forest.layers[layer]
    vocabulary = logits.shape[-1]
    total = torch.logsumexp(logits.to(torch.float32), -1)
    in_vocabulary = drafts.token < vocabulary
    flat = drafts.above * vocabulary + drafts.token.clamp(max=vocabulary - 1)
    logit = logits.flatten(1).gather(1, flat).to(torch.float32)
    logprob = (logit - total.gather(1, drafts.above)).nan_to_num(nan=NEG_INF, neginf=NEG_INF)
    weight = nodes.weight.gather(1, drafts.above) + logprob
    valid = drafts.valid
    if top_k:
        candidates = top_candidates(logits, CandidateCount(min(top_k, vocabulary - 1)))
        least = candidates.logprobs.amin(-1).gather(1, drafts.above)
        valid = valid & in_vocabulary & (logprob >= least - 1e-6)
    # the root's share is in the hits already
    root = forest.layers[0].weight.gather(1, nodes.root.gather(1, drafts.above))
    priority = torch.where(in_vocabulary, drafts.weight + weight - root, NEG_INF)
    weight = torch.where(torch.isfinite(weight), weight, drafts.weight.clamp(min=-1e4))
    return LayerDrafts(drafts.above, drafts.token, valid, drafts.sampled, weight), priority
