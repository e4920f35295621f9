"""Adaptix (ADED, arXiv 2407.12021): a table of trigrams that adapts to the request, and a search for the likeliest
tree. No draft model.

Where this departs from the paper, so that nothing depends on the order of requests and all shapes are static:

- The table is not carried along but read off the text (prompt and output of the request's live beams) in every
  iteration. The paper begins with the counts of a corpus; fuse with `retrieval` to have one.
- The paper adds STEP to each trigram of the last 16 tokens at every iteration, so one met once has gained 14 * STEP
  when it leaves; here each occurrence counts that much at once.
- Its Monte-Carlo tree search visits prefixes in proportion to their probability; here the K likeliest prefixes of each
  layer are taken, which is what the visits lead to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.engine.core.beams import Beams
from dsbd_cli.engine.drafting.base import DraftContext, DrafterInputs, padded_top
from dsbd_cli.engine.drafting.paths import PathDrafter, Paths, beam_share
from dsbd_cli.engine.drafting.text import PromptTable, contexts, suffix

STEP, WINDOW, CAP = 0.04, 16, 3.0
GAIN = STEP * (WINDOW - 2)
KEPT = 12


class TrigramDrafter(PathDrafter):
    """A drafter of the likeliest paths by P(c | a, b) = score(a, b, c) / sum of the KEPT best scores of (a, b)."""

    def paths(self, context: DraftContext) -> Paths:
        """Return every node of the tree as a path of its own: M = D * K."""
        assert context.prompts is not None
        table = _TrigramTable(context.prompts, context.beams)
        beams, count, depth = context.beams, context.drafts_per_layer, context.depth
        tokens, length = contexts(context.prompts, beams)
        last = suffix(tokens, length, 2)
        a, b, value = last[:, :, 0], last[:, :, 1], beam_share(beams)
        root = torch.arange(b.shape[1], device=b.device).expand_as(b)
        path = b.new_zeros(*b.shape, depth)
        layers: list[tuple[Tensor, Tensor, Tensor]] = []
        for layer in range(depth):
            following, chance = table.after(a, b)  # [R, n, k]
            best, index = padded_top((value.unsqueeze(-1) * chance).flatten(1), count, 0.0)
            above = index // following.shape[2]
            a, b, value = b.gather(1, above), following.flatten(1).gather(1, index), best
            root = root.gather(1, above)
            path = path.gather(1, above.unsqueeze(-1).expand(-1, -1, depth)).clone()
            path[:, :, layer] = b
            layers.append((root, path, value))
        ends = torch.arange(1, depth + 1, device=b.device).repeat_interleave(count)
        weight = torch.cat([value for _, _, value in layers], 1)
        return Paths(
            root=torch.cat([root for root, _, _ in layers], 1),
            tokens=torch.cat([path for _, path, _ in layers], 1),
            length=torch.where(weight > 0, ends, 0),
            weight=weight,
        )


class _TrigramTable:
    """The trigrams of the live beams' texts. A place that all beams share counts once, not W times."""

    def __init__(self, prompts: PromptTable, beams: Beams) -> None:
        tokens, length = contexts(prompts, beams)
        flat = tokens.flatten(1)  # [R, U]
        before = torch.nn.functional.pad(tokens, (2, 0), value=-1)
        self._first, self._second = before[:, :, :-2].flatten(1), before[:, :, 1:-1].flatten(1)
        inside = torch.arange(tokens.shape[2], device=flat.device) < length.unsqueeze(1)
        share = beams.valid / beams.valid.sum(1, keepdim=True).clamp(min=1)
        self._share = (inside.unsqueeze(1) * share.unsqueeze(-1)).flatten(1)  # [R, U]
        ranked, order = flat.sort(dim=1)
        new = torch.nn.functional.pad(ranked[:, 1:] != ranked[:, :-1], (1, 0)).to(torch.int64).cumsum(1)
        # [R, U], number of each token among the row's different ones
        self._number = torch.empty_like(order).scatter_(1, order, new)
        self._tokens = torch.zeros_like(flat).scatter_(1, new, ranked).clamp(min=0)

    def after(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the KEPT best tokens after the pairs a, b [R, n] and their probabilities: [R, n, k] each, 0 where
        there are fewer."""
        hit = (self._first.unsqueeze(1) == a.unsqueeze(-1)) & (self._second.unsqueeze(1) == b.unsqueeze(-1))
        count = torch.zeros(hit.shape, dtype=torch.float32, device=hit.device)
        count.scatter_add_(2, self._number.unsqueeze(1).expand_as(hit), hit * self._share.unsqueeze(1))
        score, number = padded_top((GAIN * count).clamp(max=CAP).flatten(0, 1), KEPT, 0.0)
        score, number = score.view(*a.shape, -1), number.view(*a.shape, -1)
        tokens = self._tokens.gather(1, number.flatten(1)).view_as(number)
        return tokens, score / score.sum(-1, keepdim=True).clamp(min=1e-30)


def make(inputs: DrafterInputs) -> TrigramDrafter:
    """Make drafter `trigram`."""
    return TrigramDrafter()
