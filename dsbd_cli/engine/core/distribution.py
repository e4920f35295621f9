"""Log-probabilities of candidates to distributions: the pool distribution, a node's own, and warping.

Letters: R requests, n nodes, C candidates per node, V vocabulary. Natural logs, float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsbd_cli.engine.core.candidates import CandidateCount, Candidates
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.ops.layout import NO_SHARE, SHARE_UNITS

LOG_UNITS = math.log(SHARE_UNITS)
TIES = 8  # candidates of a node beyond the row's top_k: up to this many pairs tied with the last one kept can stay


@dataclass(slots=True)
class Warp:
    """Sampling settings of the rows of a batch. The plain Python fields summarise all rows on the host.

    Attributes:
        temperature, top_p, min_p: [R] float32. top_k: [R] int64, 0 = no cut.
        scope: `pool` warps the joint distribution over (beam, token), `beam` each beam's row.
        max_top_k: largest top_k of the batch. all_top_k: every row has one. even_top_k: it is the same in all rows.
        any_top_p, any_min_p: some row asks for this cut.
        greedy: [R] bool, rows of temperature 0 (the limit T -> 0): their pairs are drawn in the order of their weights,
            without noise. any_greedy: the batch has a greedy row.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: Tensor
    scope: str
    max_top_k: int = 0
    all_top_k: bool = False
    even_top_k: bool = True
    any_top_p: bool = False
    any_min_p: bool = False
    any_greedy: bool = False

    @property
    def greedy_rows(self) -> Tensor | None:
        """Rows that draw without noise, [R] bool; None where there are none."""
        return self.greedy if self.any_greedy else None

    def candidate_count(self, vocab_size: int) -> CandidateCount:
        """Return how many candidates hold the support of the warped distribution: at most top_k pairs of one node, and
        TIES more for ties; without a top_k all V."""
        if not self.max_top_k:
            return CandidateCount(vocab_size)
        most = min(vocab_size, self.max_top_k + TIES)
        if self.even_top_k:
            return CandidateCount(most)
        own = torch.where(self.top_k > 0, (self.top_k + TIES).clamp(max=vocab_size), vocab_size).unsqueeze(1)
        return CandidateCount(most if self.all_top_k else vocab_size, own, most)


@dataclass(slots=True)
class PoolDistribution:
    """Joint distribution over (node, token).

    Attributes:
        log_p: [R, n, C] float32, normalised over n and C together; -inf outside the support. In greedy rows (see Warp)
            it is T log P in the limit T -> 0, up to a constant.
        weight: [R, n, C] float32, running weight s of each child.
    """

    log_p: Tensor
    weight: Tensor


def log_normalise(x: Tensor) -> Tensor:
    """Return x - logsumexp(x) over the last dimension. A row of nothing but -inf stays as it is."""
    below = _from_best(x)
    return below - _log_mass(below)


def _log_mass(x: Tensor) -> Tensor:
    """Return the logsumexp over the last dimension, which is kept, of numbers <= 0. A row of nothing but -inf gets a
    finite number without meaning.

    The terms are summed as integers, so their order does not matter. A row gets the same bits however many -inf lie
    between or behind its numbers because another row of the batch is wider.
    """
    units = _shares(x).sum(-1, keepdim=True, dtype=torch.int64).clamp_(min=1)
    return (torch.log(units.to(torch.float64)) - LOG_UNITS).to(x.dtype)


def _shares(x: Tensor) -> Tensor:
    """Return exp of numbers <= 0 in whole units, to be summed as int64. SHARE_UNITS units are a probability of 1."""
    return x.clamp(min=NO_SHARE).exp_().mul_(SHARE_UNITS).round_()


def pool_distribution(candidates: Candidates, weight: Tensor, live: Tensor, warp: Warp) -> PoolDistribution:
    """Return P(i, v) = warp(exp(s_i) p(v | x_i)), normalised over the pool. weight: [R, n] float32, live: [R, n]
    bool."""
    weight = torch.where(live, weight, NEG_INF).unsqueeze(-1)
    if warp.scope == "pool":
        joint = weight + candidates.logprobs
        scaled = _from_best(joint.flatten(1)) / warp.temperature.unsqueeze(1)
        log_p = _cut(scaled, warp).view_as(joint)
    else:
        joint = weight + row_distribution(candidates, warp)
        log_p = log_normalise(joint.flatten(1)).view_as(joint)
    return PoolDistribution(_replace_greedy_rows(joint, log_p, warp), joint)


def row_distribution(candidates: Candidates, warp: Warp) -> Tensor:
    """Return each node's own warped distribution, normalised over its candidates (but see _replace_greedy_rows):
    [R, n, C] float32."""
    best = _from_best(candidates.logprobs)
    scaled = best / warp.temperature[:, None, None]
    log_p = _cut(scaled.flatten(0, 1), _per_node(warp, scaled.shape[1])).view_as(scaled)
    return _replace_greedy_rows(best, log_p, warp)


def _replace_greedy_rows(x: Tensor, log_p: Tensor, warp: Warp) -> Tensor:
    """Return log_p, with T log p in the limit T -> 0, up to a constant, in greedy rows. That is x, the log-weights
    before the warp, wherever the cuts kept the pair. x, log_p: [R, n, C]."""
    return torch.where(warp.greedy[:, None, None] & (log_p > NEG_INF), x, log_p) if warp.any_greedy else log_p


def _from_best(x: Tensor) -> Tensor:
    """Subtract the largest value of the last dimension from x, so that a low temperature cannot overflow. -inf stays
    -inf."""
    return x - x.amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)


def _per_node(warp: Warp, times: int) -> Warp:
    """Repeat the settings of each row `times` times, once for each of its nodes."""
    fields = (warp.temperature, warp.top_k, warp.top_p, warp.min_p)
    temperature, top_k, top_p, min_p = (field.repeat_interleave(times) for field in fields)
    return replace(warp, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def _cut(x: Tensor, warp: Warp) -> Tensor:
    """Apply top-k, top-p and min-p to log-weights x [rows, M], whose largest in each row is 0, and normalise. The cuts
    compare values, so all entries tied at a cut stay."""
    best: Tensor | None = None
    if warp.max_top_k:
        count = min(warp.max_top_k, x.shape[-1])
        best = torch.topk(x, count, dim=-1).values
        kth = best.gather(1, (warp.top_k - 1).clamp(0, count - 1).unsqueeze(1))
        lowest = kth if warp.all_top_k else torch.where(warp.top_k.unsqueeze(1) > 0, kth, NEG_INF)
        x = torch.where(x >= lowest, x, NEG_INF)
        best = torch.where(best >= lowest, best, NEG_INF) if warp.any_top_p else None
    if warp.any_top_p:
        if best is None or not warp.all_top_k:
            best = torch.sort(x, dim=-1, descending=True).values
        # the mass of all of x, not of `best`: the number of entries tied with the last one must not matter
        mass = _shares(x).sum(-1, keepdim=True, dtype=torch.int64)
        wanted = warp.top_p.unsqueeze(1).to(torch.float64) * mass
        # the entry at which the mass first reaches top_p is the last one kept
        short = _shares(best).cumsum(-1, dtype=torch.int64) < wanted
        last = short.sum(-1, keepdim=True).clamp(max=best.shape[-1] - 1)
        lowest = torch.where(warp.top_p.unsqueeze(1) < 1, best.gather(1, last), NEG_INF)
        x = torch.where(x >= lowest, x, NEG_INF)
    if warp.any_min_p:
        # in float64, because in float32 the last few numbers of a tensor may get other bits than the others
        lowest = x.amax(-1, keepdim=True) + torch.log(warp.min_p.to(torch.float64)).to(torch.float32).unsqueeze(1)
        x = torch.where(x >= lowest, x, NEG_INF)
    return x - _log_mass(x)
