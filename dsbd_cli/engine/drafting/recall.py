"""Memory of what the target said of the last iteration's nodes, for the drafts of the next one.

Where a layer did not pass, the target has already judged nodes below it. A beam that comes by such a node again has a
known law there, alternatives included: which tokens enter the best W beside the copies is then no guess. A node is
known by the key of its path, among the nodes of its own row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.topk import NEG_INF, best_tokens

__all__ = ["KEPT", "Recall"]

KEPT = 64  # tokens of each node, the best ones: the same in every batch, so that proposals are
ABSENT = torch.iinfo(torch.int64).max


class Recall:
    """The best tokens of the nodes of each row, in order of the nodes' keys."""

    def __init__(self, forest: Forest, candidates: Candidates) -> None:
        """Remember an iteration: R rows of N nodes."""
        nodes = forest.flat
        # an absent node may have the path of one that is there, and what it is said to be followed by means nothing
        self._keys, order = torch.where(nodes.valid, nodes.path, ABSENT).sort(1)
        tokens, logprobs = candidates.tokens, candidates.logprobs
        rows, count, most = tokens.shape
        if most > KEPT:
            best, index = best_tokens(logprobs.flatten(0, 1), KEPT)
            tokens, logprobs = tokens.flatten(0, 1).gather(1, index), best
        more = max(0, KEPT - most)
        tokens = torch.nn.functional.pad(tokens.view(rows, count, -1), (0, more))
        logprobs = torch.nn.functional.pad(logprobs.view(rows, count, -1), (0, more), value=NEG_INF)
        self._tokens = _in_order(tokens, order)
        self._logprobs = _in_order(logprobs, order).nan_to_num(nan=NEG_INF, neginf=NEG_INF)

    @property
    def rows(self) -> int:
        """R."""
        return len(self._keys)

    def select(self, rows: Tensor) -> None:
        """Only these rows [n] int64, in this order."""
        self._keys, self._tokens, self._logprobs = self._keys[rows], self._tokens[rows], self._logprobs[rows]

    def at(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Look up nodes by keys [R, n]: which are known [R, n] bool, tokens and log-probabilities [R, n, KEPT]."""
        place = torch.searchsorted(self._keys, keys.contiguous()).clamp(max=self._keys.shape[1] - 1)
        known = self._keys.gather(1, place) == keys
        return known, _in_order(self._tokens, place), _in_order(self._logprobs, place)


def _in_order(values: Tensor, index: Tensor) -> Tensor:
    """values [R, N, C] of the nodes index [R, n]."""
    return values.gather(1, index.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
