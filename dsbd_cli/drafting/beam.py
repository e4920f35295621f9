"""The drafter of the paper: beam sampling with a small model, K pairs of the draft's pool per layer (Qin et al. 2025,
section 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.core.forest import DraftLaw, Forest
from dsbd_cli.core.noise import DRAFT, stream_key
from dsbd_cli.core.pool import DraftRequest
from dsbd_cli.core.probs import NEVER, Candidates, pool_law, top_candidates
from dsbd_cli.core.protocols import ForestInput, ForestModel
from dsbd_cli.core.slots import node_slots, visible
from dsbd_cli.drafting.base import DraftContext, LayerDrafts, children, record_law, roots

__all__ = ["BeamDrafter", "NoDrafter", "draft_candidates"]


class NoDrafter:
    """No drafts: the forest is the roots alone, and decoding is plain beam sampling or beam search."""

    calls = 0
    needs_text = False

    def propose(self, context: DraftContext) -> Forest:
        """Only layer 0."""
        beams = context.beams
        return Forest(beams.token.shape[1], 0, [roots(beams, context.table, 0)])


class BeamDrafter:
    """Drafts with a model over the same slots as the target's. Others that run a model differ in `drafts` alone."""

    needs_text = False

    def __init__(self, model: ForestModel, vocab_size: int) -> None:
        """vocab_size: V of the target; draft logits past it are cut."""
        self.model = model
        self.vocab_size = vocab_size
        self.calls = 0

    def propose(self, context: DraftContext) -> Forest:
        """D draft forwards: the first takes the roots (and parents the draft has not run), each further one a layer."""
        forest = Forest(
            context.beams.token.shape[1], context.drafts_per_layer, [roots(context.beams, context.table, context.depth)]
        )
        for layer in range(context.depth):
            logits = self.forward(context, forest, layer)
            drafts, law = self.drafts(context, forest, layer, logits, context.drafts_per_layer)
            forest.layers.append(children(context, forest, layer, drafts))
            forest.laws.append(law)
        self.calls = context.depth
        return forest

    def forward(self, context: DraftContext, forest: Forest, layer: int) -> Tensor:
        """Draft logits of one layer's nodes: [R, n, V]."""
        nodes, table, beams = forest.layers[layer], context.table, context.beams
        count = nodes.token.shape[1]
        tokens, ancestors = nodes.token, nodes.ancestors
        slots = node_slots(table, count, forest.offset(layer))
        positions = table.positions.gather(1, slots)
        late = layer == 0 and context.catch_up
        if late:
            tokens = torch.cat((beams.parent_token, tokens), 1)
            slots = torch.cat((torch.where(beams.catch_up, beams.parent_slot, context.trash), slots), 1)
            positions = torch.cat((table.positions.gather(1, beams.parent_slot), positions), 1)
            ancestors = torch.cat((beams.ancestors, ancestors), 1)
        mask = visible(table, ancestors, context.slots)
        if late:
            # an absent parent sees slot 0, so that no row of the mask is empty
            mask[:, : beams.token.shape[1], 0] |= ~beams.catch_up
        batch = ForestInput(tokens, positions, slots, mask, table.positions[:, : context.slots])
        logits = run(self.model, batch, tokens.device)
        return logits[:, -count:, : self.vocab_size]

    def drafts(
        self, context: DraftContext, forest: Forest, layer: int, logits: Tensor, count: int
    ) -> tuple[LayerDrafts, DraftLaw | None]:
        """`count` draws from the draft's pool below one layer, and the law they were drawn from where one is needed.
        logits: [R, n, V] of the layer's nodes."""
        nodes, rule = forest.layers[layer], context.rule
        candidates = draft_candidates(context, forest, logits)
        live = nodes.valid & ~nodes.ends
        if rule.warps:
            law = pool_law(candidates, nodes.weight, live, context.warp)
            log_q, weight = law.log_p, law.weight
        else:
            weight = torch.where(live, nodes.weight, NEVER).unsqueeze(-1) + candidates.logprobs
            log_q = weight
        allowed = log_q
        if not rule.drafts_end:
            allowed = log_q.masked_fill(context.endings.ends(nodes.stop_state, candidates.tokens), NEVER)
        stream = stream_key(context.row_key, context.iteration, layer, DRAFT)
        index, valid = rule.draft(DraftRequest(allowed, candidates.tokens, nodes.path, stream, count))
        drafts = LayerDrafts(
            above=index // candidates.tokens.shape[2],
            token=candidates.tokens.flatten(1).gather(1, index),
            valid=valid,
            sampled=valid & rule.samples,
            weight=weight.flatten(1).gather(1, index),
        )
        return drafts, record_law(candidates, log_q, index, valid) if context.record_law else None


def draft_candidates(context: DraftContext, forest: Forest, logits: Tensor) -> Candidates:
    """Candidates of the draft's nodes, enough for K draws. A draft that returns NaN proposes nothing; the target
    decides alone."""
    size = context.rule.candidates(forest.num_beams, 1, context.warp.max_top_k, logits.shape[-1])
    candidates = top_candidates(logits, max(size, min(context.drafts_per_layer + 8, logits.shape[-1])))
    candidates.logprobs = candidates.logprobs.nan_to_num(nan=NEVER, neginf=NEVER)
    return candidates


def run(model: ForestModel, batch: ForestInput, device: torch.device) -> Tensor:
    """Logits of a model that may live on another device."""
    if model.device != device:
        names = ("tokens", "positions", "slots", "mask", "slot_positions")
        batch = ForestInput(*(getattr(batch, name).to(model.device) for name in names))
    logits = model.forward(batch)
    assert logits is not None
    return logits.to(device)
