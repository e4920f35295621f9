"""Recursive speculative decoding (Jeon et al. 2024, arXiv 2402.14160): children are drawn without replacement below
each node, from the node's own distribution, instead of from the pool of a layer.

Letters: R requests, n nodes of the layer above, C candidates, K drafts per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.config.variants import BRANCHING
from dsbd_cli.engine.core.distribution import log_normalise, row_distribution
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.nodes import DraftDistribution, LayerNodes
from dsbd_cli.engine.core.noise import DRAFT
from dsbd_cli.engine.core.pool import DraftRequest, live_draws
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.base import (
    DraftContext,
    DrafterInputs,
    LayerDrafts,
    pair_confidence,
    record_distribution,
)
from dsbd_cli.engine.drafting.beam import BeamDrafter, draft_candidates
from dsbd_cli.engine.drafting.logits import DraftLogits
from dsbd_cli.engine.protocols import ForestModel


class RowDraws:
    """Draws from each node's own distribution, for the nodes of one layer.

    Attributes:
        log_q: [R, n, C] float32, each node's own warped distribution; raw log-probabilities where the rule does not
            sample.
        noise: [R, n, C], the noise that the rule's sampler adds.
        allowed: [R, n, C] bool, pairs that may be drafted.
    """

    def __init__(self, context: DraftContext, forest: Forest, layer: int, logits: DraftLogits) -> None:
        self._context, self.nodes = context, forest.layers[layer]
        self.candidates = draft_candidates(context, forest, layer, logits)
        nodes, sampler, tokens = self.nodes, context.sampler, self.candidates.tokens
        self.log_q = row_distribution(self.candidates, context.warp) if sampler.random else self.candidates.logprobs
        self.allowed = (nodes.valid & ~nodes.ends).unsqueeze(-1) & (self.log_q > NEG_INF)
        if not context.drafts_end:
            self.allowed = self.allowed & ~context.endings.ends(nodes.stop_state, tokens)
        stream = context.keys[:, layer, DRAFT]
        count, greedy_rows = context.drafts_per_layer, context.warp.greedy_rows
        self.noise: Tensor = sampler.noise(DraftRequest(self.log_q, tokens, nodes.path, stream, count, greedy_rows))

    @property
    def keys(self) -> Tensor:
        """Sum of log q and noise: [R, n, C], -inf where a pair must not be drafted. The largest of a node, in order,
        are its draws."""
        return (self.log_q + self.noise).masked_fill(~self.allowed, NEG_INF)

    def drafts(
        self, index: Tensor, valid: Tensor, sampled: bool = True
    ) -> tuple[LayerDrafts, DraftDistribution | None]:
        """Return the pairs with these flat indices [R, m] as drafts, in draw order, and the distributions of their
        parents where one is recorded. sampled: False for pairs that were chosen by rank."""
        candidates, nodes, context = self.candidates, self.nodes, self._context
        warped = context.sampler.random and context.warp.scope == "beam"  # weights are sums of warped logs
        weight = nodes.weight.unsqueeze(-1) + (self.log_q if warped else candidates.logprobs)
        sampled = sampled and context.sampler.random
        drafts = LayerDrafts(
            above=index // candidates.tokens.shape[2],
            token=candidates.tokens.flatten(1).gather(1, index),
            valid=valid,
            sampled=valid & sampled,
            weight=weight.flatten(1).gather(1, index),
            confidence=pair_confidence(context, nodes, nodes.weight.unsqueeze(-1) + candidates.logprobs),
        )
        recorded = sampled and context.record_distribution
        return drafts, record_distribution(candidates, self.log_q, index, valid, "parent") if recorded else None


def root_log_probs(context: DraftContext, nodes: LayerNodes) -> Tensor:
    """Return the log of each root's share in the distribution that beams are drawn from: [R, W] float64."""
    weight = torch.where(nodes.valid, nodes.weight, NEG_INF).to(torch.float64)
    if context.sampler.random and context.warp.scope == "pool":
        weight = weight / context.warp.temperature.unsqueeze(1)
    return log_normalise(weight)


def node_values(value: Tensor | None, nodes: LayerNodes, layer: int, log_mass: Tensor) -> Tensor:
    """Return the value that a drafter has for every node of a layer: [R, n] float64.

    value: the values that it kept for its own nodes, which come first in the layer. A node that another drafter added
    has its running weight less `log_mass` [R, 1], the log of the mass of the roots. So have all nodes of layer 0.
    """
    own = (nodes.weight - log_mass).to(torch.float64)
    if layer == 0 or value is None:
        return own
    return torch.cat((value, own[:, value.shape[1] :]), 1)


def root_log_mass(nodes: LayerNodes) -> Tensor:
    """Return the log of the mass of the roots: [R, 1] float32, 0 where there is no live root."""
    total = torch.logsumexp(torch.where(nodes.valid, nodes.weight, NEG_INF), 1, keepdim=True)
    return torch.where(torch.isfinite(total), total, 0.0)


class ConstantBranching(BeamDrafter):
    """Drafter RSD-C: every node of a layer gets the same number of children by Gumbel-top-k."""

    def __init__(self, model: ForestModel, vocab_size: int, branching: int = 0) -> None:
        """branching: children per node at most; 0: as many as K nodes allow. Where a layer has more than K parents, the
        first K of them get one child each."""
        super().__init__(model, vocab_size)
        self.branching = branching

    def drafts(
        self, context: DraftContext, forest: Forest, layer: int, logits: DraftLogits, count: int
    ) -> tuple[LayerDrafts, DraftDistribution | None]:
        """Draft every node's first draw, then every node's second draw, and so on."""
        rows = RowDraws(context, forest, layer, logits)
        parents = rows.nodes.valid & ~rows.nodes.ends
        number = parents.sum(1, keepdim=True).clamp(min=1)
        most = self.branching or count
        branches = torch.div(count, number, rounding_mode="floor").clamp(1, most).unsqueeze(-1)
        keys, index = rows.keys.topk(min(count, rows.keys.shape[2]), dim=2)  # [R, n, J]
        draw = torch.arange(index.shape[2], device=index.device)
        column = draw * number.unsqueeze(-1) + (parents.cumsum(1) - 1).unsqueeze(-1)
        kept = (keys > NEG_INF) & (draw < branches) & (column < count)
        flat = index + torch.arange(index.shape[1], device=index.device).unsqueeze(-1) * rows.keys.shape[2]
        at = torch.where(kept, column, count).flatten(1)
        chosen = flat.new_zeros(flat.shape[0], count + 1).scatter(1, at, flat.flatten(1))[:, :count]
        valid = torch.zeros_like(chosen, dtype=torch.bool)
        valid = torch.nn.functional.pad(valid, (0, 1)).scatter(1, at, True)[:, :count]
        return rows.drafts(torch.where(valid, chosen, 0), valid)


class StochasticBeams(BeamDrafter):
    """Drafter RSD-S, stochastic beam search (Kool et al. 2019): it drafts the K nodes of a layer with the largest
    perturbed log-probability.

    A node's best child has the same perturbed log-probability as its parent, so a layer is a sample without replacement
    of whole paths. Cutting the layer to K is unbiased, because the maximum of Gumbel numbers is independent of which of
    them it is.

    Several beams count as the children of one common root. The phi of a beam is the log of its share, and its
    perturbation is 0.
    """

    def __init__(self, model: ForestModel, vocab_size: int) -> None:
        super().__init__(model, vocab_size)
        self._phi: Tensor | None = None
        self._perturbed: Tensor | None = None

    def drafts(
        self, context: DraftContext, forest: Forest, layer: int, logits: DraftLogits, count: int
    ) -> tuple[LayerDrafts, DraftDistribution | None]:
        """Draft the pairs with the largest perturbed log-probabilities G' of the layer, in that order."""
        rows = RowDraws(context, forest, layer, logits)
        log_mass = root_log_mass(forest.layers[0])
        phi = node_values(self._phi, rows.nodes, layer, log_mass)
        above = node_values(self._perturbed, rows.nodes, layer, log_mass)
        if layer == 0:
            phi = above = root_log_probs(context, rows.nodes)
        below = phi.unsqueeze(-1) + rows.log_q
        key = (below + rows.noise).masked_fill(~rows.allowed, NEG_INF)
        if context.sampler.random:
            key = _conditioned(key, above.unsqueeze(-1))
        flat = torch.where(rows.allowed & ~torch.isnan(key), key, NEG_INF).flatten(1)
        best = live_draws(flat, None, count)
        self._phi, self._perturbed = below.flatten(1).gather(1, best.index), best.key
        return rows.drafts(best.index, best.valid)


def _conditioned(key: Tensor, above: Tensor) -> Tensor:
    """Return the Gumbel numbers of siblings [R, n, C], transformed so that their largest is the parent's [R, n, 1].
    Their order stays."""
    largest = key.amax(-1, keepdim=True)
    v = above - key + torch.log(-torch.expm1(key - largest))
    return above - v.clamp(min=0) - torch.log1p(torch.exp(-v.abs()))


def constant_branching(inputs: DrafterInputs) -> ConstantBranching:
    """Make drafter `rsd-c`."""
    return ConstantBranching(inputs.draft(), inputs.vocab_size, inputs.method.value(BRANCHING))


def stochastic_beams(inputs: DrafterInputs) -> StochasticBeams:
    """Make drafter `rsd-s`."""
    return StochasticBeams(inputs.draft(), inputs.vocab_size)
