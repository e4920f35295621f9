"""The only place where logits become probabilities: candidates of a node, the pool law, warping.

Letters: R requests, n nodes, C candidates per node, V vocabulary. Natural logs, float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "Candidates",
    "LegalTokens",
    "PoolLaw",
    "Room",
    "Warp",
    "best_first",
    "best_tokens",
    "cpu_kernels",
    "log_normalise",
    "pool_law",
    "row_law",
    "top_candidates",
]

NEVER = float("-inf")

BLOCKED_FROM = 1024  # tokens; smaller vocabularies are searched whole
BLOCKS = (64, 8)
PART = 1 << 21  # numbers worked on at a time: enough for all threads, few enough for the cache
SWEPT = 1 << 17  # of a large vocabulary, for each thread: few enough for a cache of its own
# exp of less is subnormal: ten times slower on processors, and no part of a float32 sum with a 1
LOWEST = -80.0
SHARE_UNITS = 2.0**36  # of a share of 1: the shares of 2**27 pairs still add up to less than 2**63
LOG_UNITS = math.log(SHARE_UNITS)
NO_SHARE = -26.0  # exp of less is rounded to no unit
SORTED_TO = 512  # numbers; up to here a stable sort takes no longer than a search of what was told apart
TIES = 8  # candidates beyond a row's top_k: so many pairs that are tied with the last one kept may stay


@dataclass(slots=True)
class CpuKernels:
    """What engine.models, which core does not know, has brought for all of the process; None: torch serves.

    log_totals: log of the sum of exp of a few rows [n, V] less the largest of each row [n, 1]: [n, 1] float32, or None
    where it does not serve such rows.
    """

    log_totals: Callable[[Tensor, Tensor], Tensor | None] | None = None


cpu_kernels = CpuKernels()


@dataclass(slots=True)
class Candidates:
    """Tokens a node can go on with: every one (`full`, C = V), or the C most probable ones.

    Attributes:
        tokens: [R, n, C] int64, ascending. So of equal pairs of a pool the first is that of the first beam, then that
            of the lowest token id, whatever C is.
        logprobs: [R, n, C] float32, raw log-probabilities (normalised over the whole vocabulary); -inf where the node
            has fewer candidates.
    """

    tokens: Tensor
    logprobs: Tensor
    full: bool

    def at(self, index: Tensor) -> Candidates:
        """Candidates of the nodes `index` [R, m]."""
        wide = index.unsqueeze(-1).expand(-1, -1, self.tokens.shape[-1])
        return Candidates(self.tokens.gather(1, wide), self.logprobs.gather(1, wide), self.full)


@dataclass(frozen=True, slots=True)
class Room:
    """How many candidates the nodes of a batch have. A node's own number must not depend on the rows beside it.

    Attributes:
        count: C, at least as many as any node has.
        own: [R, 1] or [R, n] int64, of each node; None: all have `count`.
        most: largest number of a node that has fewer than V.
    """

    count: int
    own: Tensor | None = None
    most: int = 0

    def at_least(self, least: int) -> Room:
        """The same with `least` for all nodes that have fewer."""
        own = None if self.own is None else self.own.clamp(min=least)
        return Room(max(self.count, least), own, max(self.most, least))


class LegalTokens(Protocol):
    """What may follow some nodes, m = R * n of them in one row after another; see core/legal.py."""

    def apply(self, logprobs: Tensor, part: slice, total: Tensor) -> None:
        """Change log-probabilities in place, to -inf where a token is illegal. logprobs: [k, V] float32 of the nodes
        `part`; of a draft that lacks tokens, fewer columns. total: [k, 1] float32, what was taken from the logits."""
        ...

    def listed(self, part: slice) -> tuple[Tensor, Tensor] | None:
        """The only tokens [k, F] int64 that may follow the nodes `part`, ascending, and which are real [k, F] bool;
        what they are given is left as it is. None where it cannot be said so."""
        ...


@dataclass(slots=True)
class Warp:
    """Sampling settings of the rows of a batch. What the host knows of them is beside the tensors.

    Attributes:
        temperature, top_p, min_p: [R] float32. top_k: [R] int64, 0 = no cut.
        scope: `pool` warps the joint law over (beam, token), `beam` each beam's row.
        max_top_k: largest top_k of the batch. all_top_k: every row has one. even_top_k: it is the same in all rows.
        any_top_p, any_min_p: some row asks for this cut.
        cold: [R] bool, rows of temperature 0, the limit: their pairs are drawn in the order of their weights, without
            noise. any_cold: there are such rows.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    scope: str
    max_top_k: int
    all_top_k: bool
    even_top_k: bool
    any_top_p: bool
    any_min_p: bool
    cold: Tensor
    any_cold: bool = False

    @property
    def silent(self) -> Tensor | None:
        """[R] bool, rows that draw without noise; None where there are none."""
        return self.cold if self.any_cold else None

    def room(self, vocab_size: int) -> Room:
        """Candidates that hold the warped support: top_k pairs of one node at most, and room for ties."""
        if not self.max_top_k:
            return Room(vocab_size)
        most = min(vocab_size, self.max_top_k + TIES)
        if self.even_top_k:
            return Room(most)
        own = torch.where(self.top_k > 0, (self.top_k + TIES).clamp(max=vocab_size), vocab_size).unsqueeze(1)
        return Room(most if self.all_top_k else vocab_size, own, most)


@dataclass(slots=True)
class PoolLaw:
    """Joint law over (node, token).

    Attributes:
        log_p: [R, n, C] float32, normalised over n and C together; -inf outside the support. In cold rows (see Warp)
            T log P up to a constant.
        weight: [R, n, C] float32, running weight s of each child.
    """

    log_p: Tensor
    weight: Tensor


def best_first(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest over the last dimension, best first: values and indices. Of equal ones the first comes first.

    torch.topk leaves the order of equal numbers open, and which of them it takes.
    """
    if x.shape[-1] <= SORTED_TO:
        best, index = torch.sort(x, dim=-1, descending=True, stable=True)
        return best[..., :count], index[..., :count]
    if x.dtype == torch.float64:
        return torch.topk(x, count, dim=-1)  # holds noise of 52 bits: no two are equal
    index = torch.topk(_apart(x, torch.arange(x.shape[-1], device=x.device)), count, dim=-1).indices
    return x.gather(-1, index), index


def _apart(x: Tensor, place: Tensor) -> Tensor:
    """Numbers in the same order as the float32 x, in which equal ones are apart: the one of lower place is larger.

    A float64 has 29 bits more, so what is taken away stays below the gap to the next float32. place: below 2**27.
    """
    wide = x.to(torch.float64)
    return torch.addcmul(wide, wide.abs().clamp(1e-60, 1e300), place.to(torch.float64), value=-(2.0**-51))


def top_candidates(logits: Tensor, room: Room, legal: LegalTokens | None = None, *, kernel: bool = False) -> Candidates:
    """The most probable tokens of every node, of equal ones those of lower id; all of them where C reaches V.

    They stand in order of token id. What a node has does not depend on C: where it has fewer, the rest is impossible.
    logits: [R, n, V]. legal: what may follow the nodes. It acts after the normalisation over all V and before the best
    are taken, so a node has the best of its legal tokens. kernel: the kernel does it where it fits.
    """
    if legal is not None:
        return _legal_candidates(logits, room, legal)
    count = min(room.count, logits.shape[-1])
    if kernel and room.own is None:
        from dsbd_cli.kernels import candidates

        if candidates.fits(logits, count):
            tokens, logprobs = candidates.candidates(logits, count)
            return Candidates(tokens, logprobs, full=count == logits.shape[-1])
    rows = logits.flatten(0, -2)
    size = max(1, PART // logits.shape[-1]) if logits.device.type == "cpu" else len(rows)
    if room.own is None:
        parts = [_candidates(part, count) for part in torch.split(rows, size)]
    else:
        own = room.own.expand(logits.shape[:-1]).reshape(-1, 1)
        pairs = zip(torch.split(rows, size), torch.split(own, size), strict=True)
        parts = [_candidates(part, count, some, room.most) for part, some in pairs]
    tokens, best = (
        (part[0] if len(part) == 1 else torch.cat(part)).view(*logits.shape[:-1], count)
        for part in zip(*parts, strict=True)
    )
    return Candidates(tokens, best, full=count == logits.shape[-1])


def _candidates(logits: Tensor, count: int, own: Tensor | None = None, most: int = 0) -> tuple[Tensor, Tensor]:
    """Candidates of a few nodes and their log-probabilities, [n, count] each. logits [n, V]. own: [n, 1], how many each
    node has; most: the largest such number below V.

    Few rows at a time stay in the processor's cache (benchmarks/LOG.md).
    """
    vocabulary = logits.shape[-1]
    full = count == vocabulary
    swept = None if full or vocabulary < BLOCKED_FROM else _sweep(logits)
    values = logits.to(torch.float32) if swept is None else logits
    over = None
    if not full:
        best, ranked = best_tokens(values, count, None if swept is None else swept[0])
        over = None if own is None else torch.arange(count, device=values.device) >= own
        tokens, order = ranked.sort(dim=-1)
        best = best.gather(-1, order)
        over = None if over is None else over.gather(-1, order)
    else:
        best, tokens = values, torch.arange(vocabulary, device=values.device).expand_as(values)
    if full and own is not None:
        some, ranked = best_tokens(values, min(most, vocabulary))
        last = (own - 1).clamp(max=some.shape[-1] - 1)
        limit, token = some.gather(-1, last), ranked.gather(-1, last)
        over = ((values < limit) | ((values == limit) & (tokens > token))) & (own < vocabulary)
    if swept is None:
        highest = best.amax(-1, keepdim=True)
        total = _log_total(values, highest)
    else:
        _, highest, total = swept
    best = (best - highest).sub_(total)
    return tokens, best if over is None else best.masked_fill_(over, NEVER)


def _sweep(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a row of a large vocabulary is searched and normalised by, read once: the largest logits of its blocks
    [n, V // BLOCKS[0]] float32, the largest of all [n, 1] and the log of the sum of exp of what the others are below it
    [n, 1]. logits [n, V].

    On the CPU in parts so small that no memory is taken from the system for them: to touch that the first time takes
    longer than the arithmetic (benchmarks/LOG.md).
    """
    rows, vocabulary = logits.shape
    edge = vocabulary // BLOCKS[0] * BLOCKS[0]
    size = max(1, rows)
    if logits.device.type == "cpu" and (cpu_kernels.log_totals is None or logits.dtype != torch.float32):
        size = max(2, SWEPT * torch.get_num_threads() // vocabulary)  # else nothing is copied
    found = []
    for part in torch.split(logits, size):
        values = part.to(torch.float32)
        maxima = values[:, :edge].view(len(values), -1, BLOCKS[0]).amax(-1)
        highest = torch.cat((maxima, values[:, edge:]), 1).amax(-1, keepdim=True)
        found.append((maxima, highest, _log_total(values, highest)))
    maxima, highest, total = (part[0] if len(part) == 1 else torch.cat(part) for part in zip(*found, strict=True))
    return maxima, highest, total


def _log_total(values: Tensor, highest: Tensor) -> Tensor:
    """log of the sum of exp of a few rows [n, V], less the largest of each row [n, 1]: [n, 1] float32."""
    kernel = cpu_kernels.log_totals
    total = None if kernel is None else kernel(values, highest)
    if total is not None:
        return total
    shares = (values - highest).clamp_(min=LOWEST).exp_()
    # a row that stands alone would be summed by all threads in parts, in another order than one of several
    return (shares if len(shares) > 1 else shares.repeat(2, 1)).sum(-1, keepdim=True).log_()[: len(values)]


def _legal_candidates(logits: Tensor, room: Room, legal: LegalTokens) -> Candidates:
    """top_candidates under a constraint. Where it lists the legal tokens and not all V are wanted, only the listed
    ones are looked at, and C is at most their number."""
    rows, vocabulary = logits.flatten(0, -2), logits.shape[-1]
    own = None if room.own is None else room.own.expand(logits.shape[:-1]).reshape(-1, 1)
    size = max(1, PART // vocabulary) if logits.device.type == "cpu" else max(1, len(rows))
    tokens, best = [], []
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        values = rows[part].to(torch.float32)
        highest = values.amax(-1, keepdim=True)
        total = _log_total(values, highest)
        found = legal.listed(part) if room.count < vocabulary else None
        if found is None:
            logprobs = (values - highest).sub_(total)
            legal.apply(logprobs, part, highest + total)
            columns = torch.arange(vocabulary, device=values.device).expand_as(values)
        else:
            columns, real = found
            real = real & (columns < vocabulary)
            columns = columns.clamp(max=vocabulary - 1)
            logprobs = (values.gather(1, columns) - highest).sub_(total).masked_fill_(~real, NEVER)
        count = min(room.count, logprobs.shape[1])
        if count < logprobs.shape[1] or own is not None:
            ranked = best_tokens(logprobs, count)[1]
            over = None if own is None else torch.arange(count, device=values.device) >= own[part]
            at, order = ranked.sort(dim=-1)
            logprobs, columns = logprobs.gather(1, at), columns.gather(1, at)
            logprobs = logprobs if over is None else logprobs.masked_fill_(over.gather(1, order), NEVER)
        tokens.append(columns)
        best.append(logprobs)
    shape = (*logits.shape[:-1], tokens[0].shape[1])
    return Candidates(torch.cat(tokens).view(shape), torch.cat(best).view(shape), full=shape[-1] == vocabulary)


def best_tokens(values: Tensor, count: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` largest of a few rows [n, V], best first, of equal ones the lower token first: values and tokens.
    Cheaper than best_first where V is large.

    In a large vocabulary they lie in the blocks with the best maxima, and in these in the best parts of blocks, so that
    only those are searched. maxima [n, V // BLOCKS[0]]: of the blocks, where they are known; the values may then be of
    a smaller dtype, and are float32 in the result.
    """
    vocabulary, rows = values.shape[-1], len(values)
    if vocabulary < BLOCKED_FROM:
        return best_first(values, count)
    edge = vocabulary // BLOCKS[0] * BLOCKS[0]
    some = values[:, :edge]
    tokens = torch.arange(0, edge, BLOCKS[0], device=values.device).expand(rows, -1)  # the first of each block
    for size, next_size in zip(BLOCKS, (*BLOCKS[1:], 1), strict=True):
        if tokens.shape[1] > 2 * count:
            table = some.view(rows, -1, size)
            largest = table.amax(-1) if maxima is None else maxima
            best = torch.topk(_apart(largest, tokens), count, dim=-1, sorted=False).indices
            tokens = tokens.gather(1, best)
            some = table.gather(1, best.unsqueeze(-1).expand(-1, -1, size)).flatten(1)
        maxima = None
        tokens = (tokens.unsqueeze(-1) + torch.arange(0, size, next_size, device=values.device)).flatten(1)
    rest = torch.arange(edge, vocabulary, device=values.device).expand(rows, -1)
    some, tokens = torch.cat((some, values[:, edge:]), 1).to(torch.float32), torch.cat((tokens, rest), 1)
    at = torch.topk(_apart(some, tokens), count, dim=-1).indices
    return some.gather(-1, at), tokens.gather(-1, at)


def log_normalise(x: Tensor) -> Tensor:
    """x - logsumexp(x) over the last dimension; all -inf stays all -inf."""
    below = _from_best(x)
    return below - _log_mass(below)


def _log_mass(x: Tensor) -> Tensor:
    """logsumexp of numbers of at most 0 over the last dimension, which is kept; of nothing but -inf it is some number.

    The sum has no order: a row has the same bits whatever stands between its numbers, or behind them, that is -inf
    because another row of the batch is wider.
    """
    units = _shares(x).sum(-1, keepdim=True, dtype=torch.int64).clamp_(min=1)
    return (torch.log(units.to(torch.float64)) - LOG_UNITS).to(x.dtype)


def _shares(x: Tensor) -> Tensor:
    """exp of numbers of at most 0 in whole units, of which SHARE_UNITS are 1. To be summed as int64."""
    return x.clamp(min=NO_SHARE).exp_().mul_(SHARE_UNITS).round_()


def pool_law(candidates: Candidates, weight: Tensor, live: Tensor, warp: Warp) -> PoolLaw:
    """P(i, v) = warp(exp(s_i) p(v | x_i)), normalised over the pool. weight [R, n] float32, live [R, n] bool."""
    weight = torch.where(live, weight, NEVER).unsqueeze(-1)
    if warp.scope == "pool":
        joint = weight + candidates.logprobs
        scaled = _from_best(joint.flatten(1)) / warp.temperature.unsqueeze(1)
        log_p = _cut(scaled, warp).view_as(joint)
    else:
        joint = weight + row_law(candidates, warp)
        log_p = log_normalise(joint.flatten(1)).view_as(joint)
    return PoolLaw(_of_cold(joint, log_p, warp), joint)


def row_law(candidates: Candidates, warp: Warp) -> Tensor:
    """Each node's own warped law, normalised over its candidates (but see _of_cold): [R, n, C] float32."""
    best = _from_best(candidates.logprobs)
    scaled = best / warp.temperature[:, None, None]
    log_p = _cut(scaled.flatten(0, 1), _repeat(warp, scaled.shape[1])).view_as(scaled)
    return _of_cold(best, log_p, warp)


def _of_cold(x: Tensor, log_p: Tensor, warp: Warp) -> Tensor:
    """log_p, but in cold rows T log p in the limit T -> 0, up to a constant: what was warped, where the cuts left it.

    x, log_p: [R, n, C].
    """
    return torch.where(warp.cold[:, None, None] & (log_p > NEVER), x, log_p) if warp.any_cold else log_p


def _from_best(x: Tensor) -> Tensor:
    """x less its largest value over the last dimension, so that a low temperature cannot overflow. -inf stays -inf."""
    return x - x.amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)


def _repeat(warp: Warp, times: int) -> Warp:
    """The settings of each row for each of its nodes."""
    fields = (warp.temperature, warp.top_k, warp.top_p, warp.min_p)
    temperature, top_k, top_p, min_p = (field.repeat_interleave(times) for field in fields)
    return replace(warp, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def _cut(x: Tensor, warp: Warp) -> Tensor:
    """top-k, top-p, min-p of log-weights x [rows, M], the largest of a row 0, then normalise. Cuts go by value, so ties
    at a cut all stay."""
    best: Tensor | None = None
    if warp.max_top_k:
        count = min(warp.max_top_k, x.shape[-1])
        best = torch.topk(x, count, dim=-1).values
        kth = best.gather(1, (warp.top_k - 1).clamp(0, count - 1).unsqueeze(1))
        lowest = kth if warp.all_top_k else torch.where(warp.top_k.unsqueeze(1) > 0, kth, NEVER)
        x = torch.where(x >= lowest, x, NEVER)
        best = torch.where(best >= lowest, best, NEVER) if warp.any_top_p else None
    if warp.any_top_p:
        if best is None or not warp.all_top_k:
            best = torch.sort(x, dim=-1, descending=True).values
        # of all that is left, not of `best`: how many entries tie with the last one must not matter
        wanted = warp.top_p.unsqueeze(1).to(torch.float64) * _shares(x).sum(-1, keepdim=True, dtype=torch.int64)
        # the entry at which the mass first reaches top_p is the last one kept
        last = (
            (_shares(best).cumsum(-1, dtype=torch.int64) < wanted).sum(-1, keepdim=True).clamp(max=best.shape[-1] - 1)
        )
        lowest = torch.where(warp.top_p.unsqueeze(1) < 1, best.gather(1, last), NEVER)
        x = torch.where(x >= lowest, x, NEVER)
    if warp.any_min_p:
        # in float64: in float32 the last few numbers of a tensor may take another log than the others
        lowest = x.amax(-1, keepdim=True) + torch.log(warp.min_p.to(torch.float64)).to(torch.float32).unsqueeze(1)
        x = torch.where(x >= lowest, x, NEVER)
    return x - _log_mass(x)
