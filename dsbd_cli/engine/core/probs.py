"""The only place where logits become probabilities: candidates of a node, the pool law, warping.

Letters: R requests, n nodes, C candidates per node, V vocabulary. Natural logs, float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Candidates", "PoolLaw", "Warp", "log_normalise", "pool_law", "row_law", "top_candidates"]

NEVER = float("-inf")

BLOCKED_FROM = 4096  # tokens; smaller vocabularies are sorted whole
BLOCK = 64
PART = 1 << 21  # numbers worked on at a time: enough for all threads, few enough for the cache
# exp of less is subnormal: ten times slower on processors, and no part of a float32 sum with a 1
LOWEST = -80.0


@dataclass(slots=True)
class Candidates:
    """Tokens a node can go on with. `full` means every token in order (C = V); otherwise the C most probable ones.

    Attributes:
        tokens: [R, n, C] int64.
        logprobs: [R, n, C] float32, raw log-probabilities (normalised over the whole vocabulary).
    """

    tokens: Tensor
    logprobs: Tensor
    full: bool

    def at(self, index: Tensor) -> Candidates:
        """Candidates of the nodes `index` [R, m]."""
        wide = index.unsqueeze(-1).expand(-1, -1, self.tokens.shape[-1])
        return Candidates(self.tokens.gather(1, wide), self.logprobs.gather(1, wide), self.full)


@dataclass(slots=True)
class Warp:
    """Sampling settings of the rows of a batch. The flags say on the host which cuts any row asks for.

    Attributes:
        temperature, top_p, min_p: [R] float32. top_k: [R] int64, 0 = no cut.
        scope: `pool` warps the joint law over (beam, token), `beam` each beam's row.
        max_top_k: largest top_k of the batch when every row has one, else 0.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    scope: str
    max_top_k: int
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


@dataclass(slots=True)
class PoolLaw:
    """Joint law over (node, token).

    Attributes:
        log_p: [R, n, C] float32, normalised over n and C together; -inf outside the support.
        weight: [R, n, C] float32, running weight s of each child.
    """

    log_p: Tensor
    weight: Tensor


def top_candidates(logits: Tensor, count: int) -> Candidates:
    """The `count` most probable tokens of every node; all of them in order when count reaches V. logits [R, n, V]."""
    vocabulary = logits.shape[-1]
    if count < vocabulary and logits.device.type == "cpu" and vocabulary >= BLOCKED_FROM:
        rows = logits.flatten(0, -2)
        parts = [_blocked(part, count) for part in torch.split(rows, max(1, PART // vocabulary))]
        tokens, best = (torch.cat(part).view(*logits.shape[:-1], count) for part in zip(*parts, strict=True))
        return Candidates(tokens, best, full=False)
    values = logits.to(torch.float32)
    total = torch.logsumexp(values, dim=-1, keepdim=True)
    if count >= vocabulary:
        tokens = torch.arange(vocabulary, device=logits.device).expand(values.shape)
        return Candidates(tokens, values - total, full=True)
    best, tokens = torch.topk(values, count, dim=-1)
    return Candidates(tokens, best - total, full=False)


def _blocked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens of a few rows and their log-probabilities, [n, count] each. logits [n, V].

    The best entries of a row lie in the blocks with the best maxima, so that only those are sorted. Few rows at a time
    stay in the processor's cache (docs/experiments.md).
    """
    values = logits.to(torch.float32, copy=True)
    blocks = values.shape[-1] // BLOCK
    edge = blocks * BLOCK
    table = values[:, :edge].view(-1, blocks, BLOCK)
    chosen = torch.topk(table.amax(-1), min(count, blocks), dim=-1, sorted=False).indices.unsqueeze(-1)
    some = torch.cat((table.gather(1, chosen.expand(-1, -1, BLOCK)).flatten(1), values[:, edge:]), 1)
    best, at = torch.topk(some, count, dim=-1)
    inside = at < chosen.shape[1] * BLOCK
    block = chosen.squeeze(-1).gather(1, torch.where(inside, at // BLOCK, 0))
    tokens = torch.where(inside, block * BLOCK + at % BLOCK, at - chosen.shape[1] * BLOCK + edge)
    highest = best[:, :1]
    total = values.sub_(highest).clamp_(min=LOWEST).exp_().sum(-1, keepdim=True).log_()
    return tokens, best - highest - total


def log_normalise(x: Tensor, of: Tensor | None = None) -> Tensor:
    """x - logsumexp(of, by default x) over the last dimension; all -inf stays all -inf."""
    total = torch.logsumexp(x if of is None else of, dim=-1, keepdim=True)
    return torch.where(torch.isfinite(total), x - total, NEVER)


def pool_law(candidates: Candidates, weight: Tensor, live: Tensor, warp: Warp) -> PoolLaw:
    """P(i, v) = warp(exp(s_i) p(v | x_i)), normalised over the pool. weight [R, n] float32, live [R, n] bool."""
    weight = torch.where(live, weight, NEVER).unsqueeze(-1)
    if warp.scope == "pool":
        joint = weight + candidates.logprobs
        scaled = _from_best(joint.flatten(1)) / warp.temperature.unsqueeze(1)
        return PoolLaw(_cut(scaled, warp).view_as(joint), joint)
    joint = weight + row_law(candidates, warp)
    return PoolLaw(log_normalise(joint.flatten(1)).view_as(joint), joint)


def row_law(candidates: Candidates, warp: Warp) -> Tensor:
    """Each node's own warped law, normalised over its candidates: [R, n, C] float32."""
    scaled = _from_best(candidates.logprobs) / warp.temperature[:, None, None]
    return _cut(scaled.flatten(0, 1), _repeat(warp, scaled.shape[1])).view_as(scaled)


def _from_best(x: Tensor) -> Tensor:
    """x less its largest value over the last dimension, so that a low temperature cannot overflow."""
    best = x.amax(-1, keepdim=True)
    return torch.where(torch.isfinite(best), x - best, x)


def _repeat(warp: Warp, times: int) -> Warp:
    """The settings of each row for each of its nodes."""
    fields = (warp.temperature, warp.top_k, warp.top_p, warp.min_p)
    temperature, top_k, top_p, min_p = (field.repeat_interleave(times) for field in fields)
    return Warp(
        temperature, top_k, top_p, min_p, warp.scope, warp.max_top_k, warp.any_top_k, warp.any_top_p, warp.any_min_p
    )


def _cut(x: Tensor, warp: Warp) -> Tensor:
    """top-k, top-p, min-p of log-weights x [rows, M], then normalise. Cuts go by value, so ties at a cut all stay."""
    best: Tensor | None = None
    if warp.any_top_k:
        count = min(warp.max_top_k or x.shape[-1], x.shape[-1])
        best = torch.topk(x, count, dim=-1).values
        kth = best.gather(1, (warp.top_k - 1).clamp(0, count - 1).unsqueeze(1))
        lowest = kth if warp.max_top_k else torch.where(warp.top_k.unsqueeze(1) > 0, kth, NEVER)
        x = torch.where(x >= lowest, x, NEVER)
        best = torch.where(best >= lowest, best, NEVER) if warp.any_top_p else None
    if warp.any_top_p:
        if best is None or not warp.max_top_k:
            best = torch.sort(x, dim=-1, descending=True).values
        # of all that is left, not of `best`: how many entries tie with the last one must not matter
        mass = torch.exp(log_normalise(best, of=x)).cumsum(-1)
        # the entry at which the mass first reaches top_p is the last one kept
        last = (mass < warp.top_p.unsqueeze(1)).sum(-1, keepdim=True).clamp(max=best.shape[-1] - 1)
        lowest = torch.where(warp.top_p.unsqueeze(1) < 1, best.gather(1, last), NEVER)
        x = torch.where(x >= lowest, x, NEVER)
    if warp.any_min_p:
        lowest = x.amax(-1, keepdim=True) + torch.log(warp.min_p).unsqueeze(1)
        x = torch.where(x >= lowest, x, NEVER)
    return log_normalise(x)
