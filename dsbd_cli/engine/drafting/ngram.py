"""Prompt lookup: what followed the last tokens the last time they stood in the prompt or the output (the retrieval
store of the prompt in RASD, arXiv 2503.03434; prompt lookup decoding). No model, no state; everything is a comparison
of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.engine.drafting.base import DraftContext, DrafterInputs
from dsbd_cli.engine.drafting.paths import PathDrafter, Paths, beam_share
from dsbd_cli.engine.drafting.text import contexts, suffix
from dsbd_cli.variants import NGRAM

__all__ = ["NgramSource", "make"]


class NgramSource:
    """Paths behind earlier places that end as the beam does: the longest match first, of equal ones the latest."""

    def __init__(self, longest: int) -> None:
        """longest: n, most tokens of a match that count."""
        self.longest = longest

    def paths(self, context: DraftContext) -> Paths:
        """K places of every beam; each weighs half of the one before it, so the best match keeps its whole path.

        A path that reaches the end of the text goes on from its own beginning: the text has repeated itself so far.
        """
        assert context.prompts is not None
        tokens, length = contexts(context.prompts, context.beams)
        rank, start = _matches(tokens, length, self.longest).topk(min(context.drafts_per_layer, tokens.shape[2]), 2)
        rows, beams, places = start.shape
        steps = torch.arange(context.depth, device=tokens.device)
        period = (length.view(-1, 1, 1) - start).clamp(min=1).unsqueeze(-1)
        at = start.unsqueeze(-1) + steps % period  # [R, W, c, D]
        found = tokens.gather(2, at.flatten(2)).view(rows, beams, places, context.depth)
        weight = beam_share(context.beams).unsqueeze(-1) * 0.5 ** torch.arange(places, device=tokens.device)
        real = (rank >= 0) & context.beams.valid.unsqueeze(-1)
        return Paths(
            root=torch.arange(beams, device=tokens.device).view(1, -1, 1).expand_as(start).flatten(1),
            tokens=found.flatten(1, 2).clamp(min=0),
            length=torch.where(real, context.depth, 0).flatten(1),
            weight=weight.flatten(1),
        )


def _matches(tokens: Tensor, length: Tensor, longest: int) -> Tensor:
    """For every place: how good it is to go on there, or -1: [R, W, X] int64. Match length first, then lateness.

    tokens: [R, W, X]; length: [R].
    """
    width = tokens.shape[2]
    place = torch.arange(width, device=tokens.device)
    last = suffix(tokens, length, longest)
    alive = ((place >= 1) & (place < length.unsqueeze(1))).unsqueeze(1).expand_as(tokens)
    match = torch.zeros_like(tokens)
    for back in range(1, longest + 1):
        before = torch.nn.functional.pad(tokens, (back, 0), value=-1)[:, :, :width]
        wanted = last[:, :, longest - back].unsqueeze(-1)
        alive = alive & (before == wanted) & (wanted >= 0)
        match = match + alive
    return torch.where(match > 0, match * width + place, -1)


def make(of: DrafterInputs) -> PathDrafter:
    """Drafter `ngram`."""
    return PathDrafter(NgramSource(of.method.value(NGRAM)))
