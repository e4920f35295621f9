"""Prompt lookup (the retrieval store of the prompt in RASD, arXiv 2503.03434; prompt lookup decoding). It drafts what
follows an earlier place of the prompt or the output where the last tokens, or tokens much like them, have occurred
before. There is no model: everything is a comparison of tensors.

The last tokens are compared one by one with those before an earlier place, and some may differ. So a beam that has
changed a token of what it copies still continues after the place it came from. Most beams of a search are like this:
they differ from the best one in a token or two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.config.variants import NGRAM
from dsbd_cli.engine.constraints.legal import NO_TOKEN
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.drafting.base import DraftContext, DrafterInputs
from dsbd_cli.engine.drafting.paths import Paths, beam_share
from dsbd_cli.engine.drafting.recall import RecallDrafter
from dsbd_cli.engine.drafting.text import contexts, suffix
from dsbd_cli.ops.interface import host_reads

PLACES = 4  # places of the text that each beam follows
# Guessed log-probability of the token at the best place, and how much less it is at each further place
BEST_LOGPROB, LOGPROB_STEP = -0.02, 3.0
LAST_SCORE, DECAY = 1000, 0.85  # score of an equal last token, and the factor for each token before it


def match_scores(tokens: Tensor, length: Tensor, longest: int) -> Tensor:
    """Score how good it is to continue at every place of the text: [R, W, X] int64, -1 where nothing matches. A place
    scores higher the more the tokens before it are like the last ones. Of equal places the later one scores higher.

    tokens: [R, W, X]; length: [R]. longest: how many of the last tokens are compared.
    """
    width = tokens.shape[2]
    position = torch.arange(width, device=tokens.device)
    last = suffix(tokens, length, longest)
    last = torch.where(last == NO_TOKEN, NO_TOKEN - 1, last)  # equal to no token
    before = torch.nn.functional.pad(tokens, (longest, 0), value=NO_TOKEN)
    worth = torch.zeros_like(tokens)
    for back in range(1, longest + 1):
        at = longest - back
        equal = before[:, :, at : at + width] == last[:, :, at : at + 1]
        worth.add_(equal, alpha=max(1, round(LAST_SCORE * DECAY ** (back - 1))))
    real = (worth > 0) & (position < length.unsqueeze(1)).unsqueeze(1)
    return torch.where(real, worth * width + position, -1)


class NgramDrafter(RecallDrafter):
    """A drafter of the best K pairs of each layer under a guessed distribution, which has nearly all of its mass on the
    tokens at the places that are most alike.

    Every node follows some places of the text, so that a beam which leaves the copy by a token continues after it.
    """

    def __init__(self, longest: int, *, recalls: bool) -> None:
        """longest: n, last tokens that are compared. recalls: the target's candidates are kept from one iteration to
        the next."""
        super().__init__(recalls=recalls)
        self._longest = longest

    def paths(self, context: DraftContext) -> Paths:
        """Return K places of every beam as paths. The best place of each beam weighs more than any beam's second
        place, because a layer passes where every beam continues as drafted. Among places of the same rank those of
        likelier beams weigh more.

        A path that reaches the end of the text continues from its own beginning, because the text has repeated itself
        so far.
        """
        assert context.prompts is not None
        tokens, length = contexts(context.prompts, context.beams)
        rank, start = match_scores(tokens, length, self._longest).topk(
            min(context.drafts_per_layer, tokens.shape[2]), 2
        )
        rows, beams, places = start.shape
        steps = torch.arange(context.depth, device=tokens.device)
        period = (length.view(-1, 1, 1) - start).clamp(min=1).unsqueeze(-1)
        at = start.unsqueeze(-1) + steps % period  # [R, W, c, D]
        paths = tokens.gather(2, at.flatten(2)).view(rows, beams, places, context.depth)
        weight = (1 + beam_share(context.beams)).unsqueeze(-1) * 0.25 ** torch.arange(places, device=tokens.device)
        real = (rank >= 0) & context.beams.valid.unsqueeze(-1)
        return Paths(
            root=torch.arange(beams, device=tokens.device).view(1, -1, 1).expand_as(start).flatten(1),
            tokens=paths.flatten(1, 2).clamp(min=0),
            length=torch.where(real, context.depth, 0).flatten(1),
            weight=weight.flatten(1),
        )

    def propose(self, context: DraftContext) -> Forest:
        """Draft the K best pairs of every layer."""
        assert context.prompts is not None
        beams = context.beams
        forest = Forest(context.buffer)
        if context.depth == 0:
            return forest
        text, length = contexts(context.prompts, beams)
        rank, start = match_scores(text, length, self._longest).topk(min(PLACES, text.shape[2]), 2)
        start = torch.where(rank >= 0, start, -1)  # [R, n, p], where the places that each node follows begin
        width, flat = text.shape[2], text.flatten(1)
        for layer in range(context.depth):
            nodes = forest.layers[layer]
            # a place that reaches the end of the text goes on from where it began
            position = start + layer % (length.view(-1, 1, 1) - start).clamp(min=1)
            at = (nodes.root.unsqueeze(-1) * width + position).clamp(min=0).flatten(1)
            guess = torch.where(start >= 0, flat.gather(1, at).view_as(start), NO_TOKEN)
            order = torch.arange(guess.shape[2], device=guess.device)
            made = self.add_layer(context, forest, layer, guess, BEST_LOGPROB - LOGPROB_STEP * order)
            if made is None:
                break
            # a child follows the place that guessed its token, else the best place
            above = (made.parent - forest.offset(layer)).unsqueeze(-1).expand(-1, -1, start.shape[2])
            followed = start.gather(1, above)
            if start.shape[2] > 1:
                guessed = guess.gather(1, above) == made.token.unsqueeze(-1)
                followed = followed.gather(2, guessed.to(torch.int8).argmax(-1, keepdim=True))
            start = followed
        return forest


def make(inputs: DrafterInputs) -> NgramDrafter:
    """Make drafter `ngram`. On a GPU it remembers nothing, because a captured iteration reads its inputs at fixed
    addresses."""
    return NgramDrafter(inputs.method.value(NGRAM), recalls=host_reads(inputs.device))
