"""Draws from a pool distribution. To draw without replacement is to take the largest sums of log-probability and Gumbel
noise, in descending order.

M = n * C entries of a pool (node-major), W live beams wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.engine.core.topk import NEG_INF, best_first


@dataclass(slots=True)
class DraftRequest:
    """Pairs to be drafted below one layer of n nodes.

    Attributes:
        log_q: [R, n, C] float32, the draft's pool distribution, -inf where a pair must not be drafted. tokens: [R, n,
            C] int64.
        path: [R, n] int64 path keys. stream: [R] int64, key of the layer's own draft noise.
        count: K. greedy_rows: [R] bool, rows that rule `coupled` draws without noise.
    """

    log_q: Tensor
    tokens: Tensor
    path: Tensor
    stream: Tensor
    count: int
    greedy_rows: Tensor | None = None


@dataclass(slots=True)
class LiveDraws:
    """The first live (not ending) pairs of a pool in draw order.

    Attributes:
        index: [R, W] int64 into the flat pool.
        key: [R, W] float32, descending; -inf where the support was exhausted.
    """

    index: Tensor
    key: Tensor

    @property
    def valid(self) -> Tensor:
        """Mask of the real draws, [R, W] bool."""
        return self.key > NEG_INF


def live_draws(keys: Tensor, ends: Tensor | None, count: int) -> LiveDraws:
    """Select the `count` largest keys among the pairs that do not end the sequence. Of equal keys the first is taken
    first.

    keys [R, M] float, ends [R, M] bool; None: no pair ends it.
    """
    masked = keys if ends is None else keys.masked_fill(ends, NEG_INF)
    if masked.shape[-1] < count:
        masked = torch.nn.functional.pad(masked, (0, count - masked.shape[-1]), value=NEG_INF)
    key, index = best_first(masked, count)
    return LiveDraws(torch.where(key > NEG_INF, index, 0), key)


def ends_before(keys: Tensor, ends: Tensor, draws: LiveDraws, width: Tensor) -> Tensor:
    """Return which ending pairs are drawn before the width-th live one: [R, M] bool. width [R] int64; 0 draws
    nothing."""
    last = draws.key.gather(1, (width - 1).clamp(min=0).unsqueeze(1))
    return ends & (keys > last) & (width > 0).unsqueeze(1)


def match_pairs(parent: Tensor, token: Tensor, node_parent: Tensor, node_token: Tensor, node_valid: Tensor) -> Tensor:
    """Find the drafted node that equals each pair: [R, W] index into K, or -1. parent, token [R, W]; node_* [R, K]."""
    same = (parent.unsqueeze(2) == node_parent.unsqueeze(1)) & (token.unsqueeze(2) == node_token.unsqueeze(1))
    same &= node_valid.unsqueeze(1)
    return torch.where(same.any(-1), same.to(torch.int8).argmax(-1), -1)
