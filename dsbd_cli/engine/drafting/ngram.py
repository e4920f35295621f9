"""Prompt lookup: what followed the last tokens, or tokens much like them, where they stood before in the prompt or the
output (the retrieval store of the prompt in RASD, arXiv 2503.03434; prompt lookup decoding). No model, no state;
everything is a comparison of tensors.

Tokens are compared one by one with those behind an earlier place, so a beam that has changed a token of what it copies
goes on behind the place it came from. Most beams of a search are such: they differ from the best one in a token or two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.engine.drafting.base import DraftContext, DrafterInputs
from dsbd_cli.engine.drafting.paths import PathDrafter, Paths, beam_share
from dsbd_cli.engine.drafting.text import NO_TOKEN, contexts, suffix
from dsbd_cli.variants import NGRAM

__all__ = ["NgramSource", "make"]

UNIT, DECAY = 1000, 0.85  # worth of the last token where it is equal, and of each token before it, of the next


class NgramSource:
    """Paths behind earlier places that end much as the beam does: the most alike first, of equal ones the latest."""

    def __init__(self, longest: int) -> None:
        """longest: n, last tokens that are compared."""
        self.longest = longest

    def paths(self, context: DraftContext) -> Paths:
        """K places of every beam, the best one of each beam before any beam's second: a layer passes where every beam
        goes on as drafted. Of places of one rank those of likelier beams weigh more.

        A path that reaches the end of the text goes on from its own beginning: the text has repeated itself so far.
        """
        assert context.prompts is not None
        tokens, length = contexts(context.prompts, context.beams)
        rank, start = _alike(tokens, length, self.longest).topk(min(context.drafts_per_layer, tokens.shape[2]), 2)
        rows, beams, places = start.shape
        steps = torch.arange(context.depth, device=tokens.device)
        period = (length.view(-1, 1, 1) - start).clamp(min=1).unsqueeze(-1)
        at = start.unsqueeze(-1) + steps % period  # [R, W, c, D]
        found = tokens.gather(2, at.flatten(2)).view(rows, beams, places, context.depth)
        weight = (1 + beam_share(context.beams)).unsqueeze(-1) * 0.25 ** torch.arange(places, device=tokens.device)
        real = (rank >= 0) & context.beams.valid.unsqueeze(-1)
        return Paths(
            root=torch.arange(beams, device=tokens.device).view(1, -1, 1).expand_as(start).flatten(1),
            tokens=found.flatten(1, 2).clamp(min=0),
            length=torch.where(real, context.depth, 0).flatten(1),
            weight=weight.flatten(1),
        )


def _alike(tokens: Tensor, length: Tensor, longest: int) -> Tensor:
    """For every place: how good it is to go on there, or -1: [R, W, X] int64. First how much the tokens before it are
    like the last ones, then lateness.

    tokens: [R, W, X]; length: [R].
    """
    width = tokens.shape[2]
    place = torch.arange(width, device=tokens.device)
    last = suffix(tokens, length, longest)
    last = torch.where(last == NO_TOKEN, NO_TOKEN - 1, last)  # equal to nothing
    before = torch.nn.functional.pad(tokens, (longest, 0), value=NO_TOKEN)
    worth = torch.zeros_like(tokens)
    for back in range(1, longest + 1):
        at = longest - back
        equal = before[:, :, at : at + width] == last[:, :, at : at + 1]
        worth.add_(equal, alpha=max(1, round(UNIT * DECAY ** (back - 1))))
    real = (worth > 0) & (place < length.unsqueeze(1)).unsqueeze(1)
    return torch.where(real, worth * width + place, -1)


def make(of: DrafterInputs) -> PathDrafter:
    """Drafter `ngram`."""
    return PathDrafter(NgramSource(of.method.value(NGRAM)))
