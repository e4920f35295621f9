"""What the target said of the last iteration's nodes, for the drafts of the next one.

Where a layer did not pass, the target has already judged nodes below it. A beam that comes by such a node again has a
known law there, alternatives included: which tokens enter the best W beside the copies is then no guess. A node is
known by the key of its path and by the prompt of its row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.probs import NEVER, Candidates
from dsbd_cli.engine.drafting.text import Prompts

__all__ = ["Recall", "prompt_keys"]

MOST = 1 << 21  # numbers that are kept
ABSENT = torch.iinfo(torch.int64).max
_ODD = 0x2545F4914F6CDD1D  # spreads places over 64 bits


def prompt_keys(prompts: Prompts) -> Tensor:
    """A number of each prompt: [R] int64."""
    at = torch.arange(prompts.tokens.shape[1], device=prompts.tokens.device)
    spread = (2 * at + 1) * _ODD
    return ((prompts.tokens + 1) * spread).masked_fill(at >= prompts.length.unsqueeze(1), 0).sum(1)


class Recall:
    """Candidates [R * N, C] of nodes, in order of their keys."""

    def __init__(self, keys: Tensor, candidates: Candidates) -> None:
        """keys: [R, N] int64."""
        self._keys, order = keys.flatten().sort()
        self._tokens = candidates.tokens.flatten(0, 1)[order]
        self._logprobs = candidates.logprobs.flatten(0, 1)[order].nan_to_num(nan=NEVER, neginf=NEVER)

    @classmethod
    def of(cls, forest: Forest, candidates: Candidates, prompts: Tensor) -> Recall | None:
        """Of an iteration; None where that would be much. prompts: [R] int64, prompt_keys of the rows."""
        if candidates.tokens.numel() > MOST:
            return None
        # an absent node may have the path of one that is there, and what it is said to be followed by means nothing
        keys = torch.where(forest.flat.valid, forest.flat.path ^ prompts.unsqueeze(1), ABSENT)
        return cls(keys, candidates)

    @property
    def width(self) -> int:
        """C."""
        return self._tokens.shape[1]

    def at(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of nodes with these keys [R, n]: which are known [R, n] bool, tokens and log-probabilities [R, n, C]."""
        place = torch.searchsorted(self._keys, keys).clamp(max=len(self._keys) - 1)
        return self._keys[place] == keys, self._tokens[place], self._logprobs[place]
