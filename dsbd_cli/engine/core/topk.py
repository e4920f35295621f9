"""Selection of the largest numbers, in an order that is the same on every device: of equal numbers the first comes
first."""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")

BLOCKED_FROM = 1024  # tokens; smaller vocabularies are searched whole
BLOCKS = (64, 8)  # tokens of a block of the vocabulary, and of a part of a block
SORTED_TO = 512  # numbers; up to here a stable sort takes no longer than topk with ties broken


def best_first(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Select the `count` largest over the last dimension, best first: values and indices. Of equal numbers the first
    comes first.

    torch.topk alone does not define which of equal numbers it takes, nor their order.
    """
    if x.shape[-1] <= SORTED_TO:
        best, index = torch.sort(x, dim=-1, descending=True, stable=True)
        return best[..., :count], index[..., :count]
    if x.dtype == torch.float64:
        return torch.topk(x, count, dim=-1)  # float64 keys hold noise of 52 bits: no two are equal
    index = torch.topk(_break_ties(x, torch.arange(x.shape[-1], device=x.device)), count, dim=-1).indices
    return x.gather(-1, index), index


def _break_ties(x: Tensor, place: Tensor) -> Tensor:
    """Return the float32 x as float64 numbers in the same order, without ties: of equal numbers the one of lower place
    becomes the larger.

    A float64 has 29 bits more, so the amount subtracted stays below the gap to the next float32. place: below 2**27.
    """
    wide = x.to(torch.float64)
    return torch.addcmul(wide, wide.abs().clamp(1e-60, 1e300), place.to(torch.float64), value=-(2.0**-51))


def best_tokens(values: Tensor, count: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select the `count` largest in each row of values [n, V], best first: values and tokens. Of equal values the lower
    token comes first. It is cheaper than best_first where V is large.

    In a large vocabulary the best tokens lie in the blocks with the largest maxima, and there in the parts with the
    largest maxima, so only those are searched. maxima [n, V // BLOCKS[0]]: maxima of the blocks, where they are known.
    Then `values` may have a smaller dtype; the result is float32.
    """
    vocabulary, rows = values.shape[-1], len(values)
    if vocabulary < BLOCKED_FROM:
        return best_first(values, count)
    edge = vocabulary // BLOCKS[0] * BLOCKS[0]
    kept_values = values[:, :edge]
    tokens = torch.arange(0, edge, BLOCKS[0], device=values.device).expand(rows, -1)  # the first of each block
    for size, next_size in zip(BLOCKS, (*BLOCKS[1:], 1), strict=True):
        if tokens.shape[1] > 2 * count:
            blocks = kept_values.view(rows, -1, size)
            largest = blocks.amax(-1) if maxima is None else maxima
            best = torch.topk(_break_ties(largest, tokens), count, dim=-1, sorted=False).indices
            tokens = tokens.gather(1, best)
            kept_values = blocks.gather(1, best.unsqueeze(-1).expand(-1, -1, size)).flatten(1)
        maxima = None
        tokens = (tokens.unsqueeze(-1) + torch.arange(0, size, next_size, device=values.device)).flatten(1)
    rest = torch.arange(edge, vocabulary, device=values.device).expand(rows, -1)
    kept_values, tokens = torch.cat((kept_values, values[:, edge:]), 1).to(torch.float32), torch.cat((tokens, rest), 1)
    at = torch.topk(_break_ties(kept_values, tokens), count, dim=-1).indices
    return kept_values.gather(-1, at), tokens.gather(-1, at)
