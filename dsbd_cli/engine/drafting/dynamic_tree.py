"""Trees whose shape follows the draft's certainty: DySpec (arXiv 2410.11744), layer by layer so that the draft runs
once per layer, and the deterministic top-k tree of EAGLE-2 (arXiv 2406.16858) and OPT-Tree."""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.config.variants import TREE, TreeName
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.nodes import DraftDistribution
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.base import DraftContext, DrafterInputs, LayerDrafts, padded_top
from dsbd_cli.engine.drafting.beam import BeamDrafter
from dsbd_cli.engine.drafting.logits import DraftLogits
from dsbd_cli.engine.drafting.rsd import RowDraws, node_values, root_log_mass, root_log_probs
from dsbd_cli.engine.protocols import ForestModel


class DynamicTree(BeamDrafter):
    """A drafter that puts nodes where an acceptance is likeliest. `tree` says how it chooses them.

    greedy: the K draws of largest value. The value of a draw is the chance that it is reached: the product of q along
    the path to its parent, times the mass of the parent's distribution that earlier siblings have left. It is known
    before the draw, so the choice says nothing about the tokens that are drawn.
    top-k: the K pairs with the largest product of q along the path. They are deterministic nodes.
    """

    def __init__(self, model: ForestModel, vocab_size: int, tree: TreeName) -> None:
        super().__init__(model, vocab_size)
        self._tree = tree
        self._value: Tensor | None = None

    def drafts(
        self, context: DraftContext, forest: Forest, layer: int, logits: DraftLogits, count: int
    ) -> tuple[LayerDrafts, DraftDistribution | None]:
        """Draft the `count` best draws of the layer, best first."""
        rows = RowDraws(context, forest, layer, logits)
        if self._tree == "top-k":
            weight = rows.nodes.weight.unsqueeze(-1) + rows.candidates.logprobs
            best, index = padded_top(weight.masked_fill(~rows.allowed, NEG_INF).flatten(1), count, NEG_INF)
            return rows.drafts(index, best > NEG_INF, sampled=False)
        value = node_values(self._value, rows.nodes, layer, root_log_mass(forest.layers[0]))
        if layer == 0:
            value = root_log_probs(context, rows.nodes)
        keys, column = rows.keys.topk(min(count, rows.keys.shape[2]), dim=2)  # [R, n, J] in draw order
        log_q = rows.log_q.gather(2, column).to(torch.float64)
        before = log_q.exp().cumsum(2) - log_q.exp()
        worth = value.unsqueeze(-1) + torch.log1p(-before.clamp(max=1.0))
        worth = torch.where(keys > NEG_INF, worth.clamp(min=-1e30), NEG_INF)  # a real draw may find no mass left
        # ties go to the earlier sibling, which must be drawn first
        best, position = padded_top(worth.flatten(1), count, NEG_INF)
        above = position // worth.shape[2]
        index = above * rows.keys.shape[2] + column.flatten(1).gather(1, position)
        self._value = value.gather(1, above) + log_q.flatten(1).gather(1, position)
        return rows.drafts(index, best > NEG_INF)


def make(inputs: DrafterInputs) -> DynamicTree:
    """Make drafter `dynamic-tree`."""
    return DynamicTree(inputs.draft(), inputs.vocab_size, inputs.method.value(TREE))
