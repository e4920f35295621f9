"""The drafter of the paper (Qin et al. 2025, section 3.1): beam sampling with a small model, which draws K pairs from
its own pool in each layer."""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.engine.constraints.legal import NodePaths
from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.distribution import pool_distribution
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.forest_buffer import KernelBuffer, TensorBuffer
from dsbd_cli.engine.core.nodes import DraftDistribution
from dsbd_cli.engine.core.pool import DraftRequest
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.base import (
    DraftContext,
    Drafter,
    DrafterInputs,
    LayerDrafts,
    children,
    extend,
    goes_on,
    pair_confidence,
    record_distribution,
)
from dsbd_cli.engine.drafting.logits import DraftLogits, lm_head_ids
from dsbd_cli.engine.protocols import ForestInput, ForestModel
from dsbd_cli.ops.interface import host_reads
from dsbd_cli.ops.layout import DRAFT

MERGED_BACKLOG = 16  # tokens; a longer backlog gets a forward of its own, without the LM head


class NoDrafter(Drafter):
    """A drafter without drafts: the forest is the roots alone, and decoding is plain beam sampling or beam search."""

    by_kernel = True

    def propose(self, context: DraftContext) -> Forest:
        """Return a forest of layer 0 alone."""
        return Forest(context.buffer)


class BeamDrafter(Drafter):
    """A drafter that runs a model over the same slots as the target's. Other drafters that run a model inherit from it
    and replace `drafts` alone."""

    model: ForestModel

    def __init__(self, model: ForestModel, vocab_size: int) -> None:
        """vocab_size: V of the target; draft logits past it are cut."""
        self.model = model
        self.vocab_size = vocab_size
        self._ids = lm_head_ids(model, vocab_size)
        self.by_kernel = type(self).drafts is BeamDrafter.drafts  # subclasses draw in another way

    def propose(self, context: DraftContext) -> Forest:
        """Draft D layers, or fewer where the gate ends the forest. Each layer takes one draft forward: the first reads
        the roots (and tokens that the draft has not run), each further one the layer drafted last."""
        forest = Forest(context.buffer)
        for layer in range(context.depth):
            logits = self.forward(context, forest, layer)
            if isinstance(context.buffer, KernelBuffer):
                candidates = draft_candidates(context, forest, layer, logits)
                if not extend(context, context.buffer, forest, layer, candidates):
                    break
            else:
                drafts, distribution = self.drafts(context, forest, layer, logits, context.drafts_per_layer)
                if not goes_on(context, forest, drafts.confidence):
                    break
                children(context, forest, layer, drafts, distribution)
        self.calls = draft_calls(context, forest)
        return forest

    def forward(self, context: DraftContext, forest: Forest, layer: int) -> DraftLogits:
        """Return the draft's logits of one layer's nodes."""
        nodes, buffer = forest.layers[layer], context.buffer
        device, count = nodes.token.device, nodes.token.shape[1]
        with_backlog = layer == 0 and context.draft_backlog > 0
        if with_backlog and context.draft_backlog > MERGED_BACKLOG:
            assert isinstance(buffer, TensorBuffer), "no kernel drafts behind a long backlog"
            run(self.model, buffer.draft_backlog(), device, logits=False)
            with_backlog = False
        batch = buffer.backlog_and_roots() if with_backlog else buffer.input(layer)
        batch.own_ids = context.own_ids
        if context.prompt_slots is not None and host_reads(self.model.device):
            # the backlog may hold the last tokens of a prompt, which do not see the ones after them
            batch.prompt_slots = tuple(max(0, slots - context.draft_backlog) for slots in context.prompt_slots)
            batch.suffix = context.suffix + context.draft_backlog
        logits = run(self.model, batch, device)
        assert logits is not None
        return DraftLogits.of(logits[:, -count:], self._ids, self.vocab_size, context.own_ids)

    def drafts(
        self, context: DraftContext, forest: Forest, layer: int, logits: DraftLogits, count: int
    ) -> tuple[LayerDrafts, DraftDistribution | None]:
        """Draw `count` pairs from the draft's pool below one layer. Return them, and the distribution that they were
        drawn from where one is needed. logits: of the layer's nodes."""
        nodes, sampler = forest.layers[layer], context.sampler
        candidates = draft_candidates(context, forest, layer, logits)
        live = nodes.valid & ~nodes.ends
        if sampler.random:
            distribution = pool_distribution(candidates, nodes.weight, live, context.warp)
            log_q, weight = distribution.log_p, distribution.weight
        else:
            weight = torch.where(live, nodes.weight, NEG_INF).unsqueeze(-1) + candidates.logprobs
            log_q = weight
        allowed = log_q
        if not context.drafts_end:
            allowed = log_q.masked_fill(context.endings.ends(nodes.stop_state, candidates.tokens), NEG_INF)
        stream, greedy_rows = context.keys[:, layer, DRAFT], context.warp.greedy_rows
        index, valid = sampler.draw(DraftRequest(allowed, candidates.tokens, nodes.path, stream, count, greedy_rows))
        drafts = LayerDrafts(
            above=index // candidates.tokens.shape[2],
            token=candidates.tokens.flatten(1).gather(1, index),
            valid=valid,
            sampled=valid & sampler.random,
            weight=weight.flatten(1).gather(1, index),
            confidence=pair_confidence(context, nodes, weight),
        )
        return drafts, record_distribution(candidates, log_q, index, valid) if context.record_distribution else None


def draft_calls(context: DraftContext, forest: Forest) -> int:
    """Return the draft forwards of an iteration: one per layer that was drafted, and one more where the backlog is
    long."""
    return forest.layers_run + (context.depth > 0 and context.draft_backlog > MERGED_BACKLOG)


def draft_candidates(context: DraftContext, forest: Forest, layer: int, logits: DraftLogits) -> Candidates:
    """Return the candidates of the draft's nodes in one layer, enough for K draws. Where the draft returns NaN it
    proposes nothing, and the target decides alone."""
    wanted = context.sampler.candidates(forest.num_beams, 1, context.warp, logits.width)
    wanted = wanted.at_least(min(context.drafts_per_layer + 8, logits.width))
    legal = None if context.legal is None else context.legal.of(NodePaths.of(forest, context.beams, layer))
    candidates = logits.candidates(wanted, legal, context.ops)
    if isinstance(context.buffer, TensorBuffer):  # the kernel `extend` takes NaN for impossible by itself
        candidates.logprobs = candidates.logprobs.nan_to_num(nan=NEG_INF, neginf=NEG_INF)
    return candidates


def run(model: ForestModel, batch: ForestInput, device: torch.device, *, logits: bool = True) -> Tensor | None:
    """Run a model that may be on another device, and return its logits on `device`; None with logits=False."""
    result = model.forward(batch if model.device == device else batch.to(model.device), logits=logits)
    return None if result is None else result.to(device)


def make(inputs: DrafterInputs) -> BeamDrafter:
    """Make drafter `beam`."""
    return BeamDrafter(inputs.draft(), inputs.vocab_size)
