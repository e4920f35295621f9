"""Retrieval from a corpus (REST, arXiv 2311.08252; the corpus store of RASD, arXiv 2503.03434). It drafts what follows
the beam's last tokens in the user's own texts: the most frequent continuations, as a tree.

The suffix array is searched on the device, for all beams and all suffix lengths at once. There is no loop over hits.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dsbd_cli.config.variants import INDEX
from dsbd_cli.engine.drafting.base import DraftContext, DrafterInputs
from dsbd_cli.engine.drafting.index import CorpusIndex, open_index
from dsbd_cli.engine.drafting.paths import PathDrafter, Paths, beam_share
from dsbd_cli.engine.drafting.text import contexts, suffix

LONGEST, SHORTEST = 16, 2
HITS = 64


class RetrievalDrafter(PathDrafter):
    """A drafter of what follows a beam's longest suffix, of 16 to 2 tokens, that the corpus holds.

    Where the suffix has more than HITS places, HITS of them are taken, evenly spread over the sorted range. So the
    share of a continuation is right to 1 / HITS. (REST counts up to 5000 places.)
    """

    def __init__(self, index: CorpusIndex, device: torch.device) -> None:
        self._tokens = torch.from_numpy(index.tokens).to(device)
        self._suffixes = torch.from_numpy(index.suffixes).to(device)

    def paths(self, context: DraftContext) -> Paths:
        """Return HITS paths of every beam. The weight of each is the beam's share over the number of its hits."""
        assert context.prompts is not None
        tokens, length = contexts(context.prompts, context.beams)
        lengths = torch.arange(LONGEST, SHORTEST - 1, -1, device=tokens.device)
        last = suffix(tokens, length, LONGEST)
        low, high = self.search(last, lengths)  # [R, W, lengths]
        hit_valid = (high > low) & (lengths <= length.view(-1, 1, 1)) & context.beams.valid.unsqueeze(-1)
        longest = hit_valid.to(torch.int8).argmax(-1, keepdim=True)
        low, high = low.gather(2, longest), high.gather(2, longest)
        count = torch.where(hit_valid.any(-1, keepdim=True), high - low, 0)
        hit = torch.arange(HITS, device=tokens.device)
        position = low + torch.where(count > HITS, hit * count // HITS, hit)
        start = self._suffix(position) + lengths[longest]
        steps = torch.arange(context.depth, device=tokens.device)
        following = self._token(start.unsqueeze(-1) + steps).to(torch.int64)  # [R, W, HITS, D]
        real = (following >= 0).to(torch.int64).cumprod(-1).sum(-1)
        weight = beam_share(context.beams).unsqueeze(-1) / count.clamp(1, HITS)
        root = torch.arange(position.shape[1], device=tokens.device).view(1, -1, 1)
        return Paths(
            root=root.expand_as(position).flatten(1),
            tokens=following.clamp(min=0).flatten(1, 2),
            length=torch.where(hit < count, real, 0).flatten(1),
            weight=weight.expand(position.shape).flatten(1),
        )

    def search(self, last: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the range of suffixes that begin with the last s tokens, for each s of `lengths`: low and high, [R, W,
        lengths] int64. last: [R, W, LONGEST] int64."""
        steps = torch.arange(LONGEST, device=last.device)
        at = (LONGEST - lengths).unsqueeze(1) + steps  # the last s tokens, moved to the left
        query = last[:, :, at.clamp(max=LONGEST - 1)].to(torch.int32)  # [R, W, lengths, LONGEST]
        # the sign of the sum is that of the first difference
        worth = torch.where(steps < lengths.unsqueeze(1), 1 << (LONGEST - 1 - steps), 0).to(torch.int32)
        size = len(self._tokens)
        low = torch.zeros(2, *query.shape[:-1], dtype=torch.int64, device=last.device)
        high = torch.full_like(low, size)
        # in the search for the upper end, suffixes equal to the query count as lower
        bound = torch.arange(2, device=last.device).view(2, 1, 1, 1)
        for _ in range(size.bit_length()):
            middle = (low + high) >> 1
            here = self._token(self._suffix(middle).unsqueeze(-1) + steps)
            below = ((here - query).sign_().mul_(worth).sum(-1) < bound) & (low < high)
            low = torch.where(below, middle + 1, low)
            high = torch.where(below, high, middle)
        return low[0], low[1]

    def _suffix(self, index: Tensor) -> Tensor:
        """Return where the suffix of each rank starts, int64. A rank past the end stands for the last one."""
        return self._suffixes[index.clamp(max=len(self._suffixes) - 1)].to(torch.int64)

    def _token(self, index: Tensor) -> Tensor:
        """Return the tokens at these places, int32. A place past the end of the corpus has a separator, as its last
        place has."""
        return self._tokens[index.clamp(max=len(self._tokens) - 1)]


def make(inputs: DrafterInputs) -> RetrievalDrafter:
    """Make drafter `retrieval`. Raises UsageError where the index cannot be used."""
    index = inputs.method.value(INDEX)
    assert index is not None, "checked by MethodConfig"
    return RetrievalDrafter(open_index(Path(index), inputs.codec.token_bytes()), inputs.device)
