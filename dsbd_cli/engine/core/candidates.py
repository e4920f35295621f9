"""The most probable tokens of every node, from logits.

Letters: R requests, n nodes, C candidates per node, V vocabulary. Natural logs, float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsbd_cli.engine.core.topk import BLOCKED_FROM, BLOCKS, NEG_INF, best_tokens
from dsbd_cli.ops import reference
from dsbd_cli.ops.interface import Ops, host_reads
from dsbd_cli.ops.select import ops_for

LOGITS_PER_PART = 1 << 21  # read at a time on a CPU: enough for all threads, few enough for the processor's cache
SWEEP_LOGITS_PER_THREAD = 1 << 17  # that `_maxima_and_total` reads at a time: few enough for the cache of one core


@dataclass(slots=True)
class Candidates:
    """Tokens that may follow each node: the whole vocabulary (`full`, C = V), or the C most probable tokens.

    Attributes:
        tokens: [R, n, C] int64, ascending. So equal pairs of a pool are ordered by beam, then by token id, whatever C
            is.
        logprobs: [R, n, C] float32, raw log-probabilities (normalised over the whole vocabulary); -inf where the node
            has fewer candidates.
    """

    tokens: Tensor
    logprobs: Tensor
    full: bool

    def at(self, index: Tensor) -> Candidates:
        """Return the candidates of the nodes `index` [R, m]."""
        wide = index.unsqueeze(-1).expand(-1, -1, self.tokens.shape[-1])
        return Candidates(self.tokens.gather(1, wide), self.logprobs.gather(1, wide), self.full)

    def best(self, count: int) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probabilities [R, n, m] of the best `count` candidates of each node, or of all C where
        C is not larger."""
        if self.tokens.shape[-1] <= count:
            return self.tokens, self.logprobs
        best, index = best_tokens(self.logprobs.flatten(0, 1), count)
        tokens = self.tokens.flatten(0, 1).gather(1, index)
        return tokens.view(*self.tokens.shape[:2], count), best.view(*self.tokens.shape[:2], count)


@dataclass(frozen=True, slots=True)
class CandidateCount:
    """Number of candidates of each node of a batch. A node's own number must not depend on other rows of the batch.

    Attributes:
        count: C, at least the number of any node.
        own: [R, 1] or [R, n] int64, the number of each node; None: `count` for all.
        most: largest number of a node that has fewer than V.
    """

    count: int
    own: Tensor | None = None
    most: int = 0

    def at_least(self, least: int) -> CandidateCount:
        """Return these numbers, raised to `least` where they are lower."""
        own = None if self.own is None else self.own.clamp(min=least)
        return CandidateCount(max(self.count, least), own, max(self.most, least))


class LegalTokens(Protocol):
    """Tokens that may follow m = R * n nodes, ordered row by row; see engine/constraints/legal.py."""

    def apply(self, logprobs: Tensor, part: slice, total: Tensor) -> None:
        """Change log-probabilities in place, to -inf where a token is illegal. logprobs: [k, V] float32 of the nodes
        `part`; a draft that lacks tokens has fewer columns. total: [k, 1] float32, the logsumexp that was subtracted
        from the logits."""
        ...

    def listed(self, part: slice) -> tuple[Tensor, Tensor] | None:
        """Return the only tokens that may follow the nodes `part`: [k, F] int64, ascending, and which of them are real,
        [k, F] bool. Their log-probabilities stay as they are. Return None where there is no such list."""
        ...


def top_candidates(
    logits: Tensor, wanted: CandidateCount, legal: LegalTokens | None = None, ops: Ops | None = None
) -> Candidates:
    """Select the most probable tokens of every node, sorted by token id. Where C reaches V, all tokens are selected.

    Of equally probable tokens the lower ids are taken. A node's candidates do not depend on C: where a node has fewer,
    the rest have log-probability -inf. logits: [R, n, V]. legal: tokens that may follow the nodes. They are applied
    after the normalisation over all V and before the selection, so a node gets the best of its legal tokens. ops: None
    for the operations of the logits' device, without GPU kernels.
    """
    if ops is None:
        ops = ops_for(logits.device, torch.float32, ("log_total",))
    if legal is not None:
        return _legal_candidates(logits, wanted, legal, ops)
    count = min(wanted.count, logits.shape[-1])
    if wanted.own is None and (candidates := ops.candidates(logits, count)) is not None:
        return Candidates(*candidates, full=count == logits.shape[-1])
    rows = logits.flatten(0, -2)
    size = _rows_of_part(rows)
    if wanted.own is None:
        parts = [_candidates(part, count, ops) for part in torch.split(rows, size)]
    else:
        own = wanted.own.expand(logits.shape[:-1]).reshape(-1, 1)
        pairs = zip(torch.split(rows, size), torch.split(own, size), strict=True)
        parts = [_candidates(part, count, ops, some, wanted.most) for part, some in pairs]
    tokens, best = (
        (part[0] if len(part) == 1 else torch.cat(part)).view(*logits.shape[:-1], count)
        for part in zip(*parts, strict=True)
    )
    return Candidates(tokens, best, full=count == logits.shape[-1])


def _candidates(
    logits: Tensor, count: int, ops: Ops, own: Tensor | None = None, most: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the candidates of some nodes and their log-probabilities, [n, count] each. logits [n, V]. own: [n, 1], how
    many each node has; most: the largest such number below V.

    The caller passes few rows at a time, so that they stay in the processor's cache (benchmarks/LOG.md).
    """
    vocabulary = logits.shape[-1]
    full = count == vocabulary
    maxima_and_total = None if full or vocabulary < BLOCKED_FROM else _maxima_and_total(logits, ops)
    values = logits.to(torch.float32) if maxima_and_total is None else logits
    beyond_own = None
    if not full:
        best, ranked = best_tokens(values, count, None if maxima_and_total is None else maxima_and_total[0])
        beyond_own = None if own is None else torch.arange(count, device=values.device) >= own
        tokens, order = ranked.sort(dim=-1)
        best = best.gather(-1, order)
        beyond_own = None if beyond_own is None else beyond_own.gather(-1, order)
    else:
        best, tokens = values, torch.arange(vocabulary, device=values.device).expand_as(values)
    if full and own is not None:
        some, ranked = best_tokens(values, min(most, vocabulary))
        last = (own - 1).clamp(max=some.shape[-1] - 1)
        limit, token = some.gather(-1, last), ranked.gather(-1, last)
        beyond_own = ((values < limit) | ((values == limit) & (tokens > token))) & (own < vocabulary)
    if maxima_and_total is None:
        highest = best.amax(-1, keepdim=True)
        total = ops.log_total(values, highest)
    else:
        _, highest, total = maxima_and_total
    best = (best - highest).sub_(total)
    return tokens, best if beyond_own is None else best.masked_fill_(beyond_own, NEG_INF)


def _maxima_and_total(logits: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
    """Read logits [n, V] of a large vocabulary once, and return what the selection and the normalisation need.

    Return the largest logit of each block [n, V // BLOCKS[0]] float32, the largest of each row [n, 1], and the log of
    the sum of exp(logit - largest of the row) [n, 1].

    On the CPU the rows are read in parts so small that no memory is taken from the system for them, because the first
    access to such memory takes longer than the arithmetic (benchmarks/LOG.md).
    """
    rows, vocabulary = logits.shape
    edge = vocabulary // BLOCKS[0] * BLOCKS[0]
    size = max(1, rows)
    if host_reads(logits.device) and (ops.log_total is reference.log_total or logits.dtype != torch.float32):
        size = max(2, SWEEP_LOGITS_PER_THREAD * torch.get_num_threads() // vocabulary)  # otherwise nothing is copied
    parts = []
    for part in torch.split(logits, size):
        values = part.to(torch.float32)
        maxima = values[:, :edge].view(len(values), -1, BLOCKS[0]).amax(-1)
        highest = torch.cat((maxima, values[:, edge:]), 1).amax(-1, keepdim=True)
        parts.append((maxima, highest, ops.log_total(values, highest)))
    maxima, highest, total = (part[0] if len(part) == 1 else torch.cat(part) for part in zip(*parts, strict=True))
    return maxima, highest, total


def _rows_of_part(rows: Tensor) -> int:
    """Return how many rows [n, V] of logits are read at a time."""
    return max(1, LOGITS_PER_PART // rows.shape[1] if host_reads(rows.device) else len(rows))


def _legal_candidates(logits: Tensor, wanted: CandidateCount, legal: LegalTokens, ops: Ops) -> Candidates:
    """Do what top_candidates does, under a constraint. Where the constraint lists the legal tokens and fewer than V are
    wanted, only the listed ones are read, and C is at most their number."""
    rows, vocabulary = logits.flatten(0, -2), logits.shape[-1]
    own = None if wanted.own is None else wanted.own.expand(logits.shape[:-1]).reshape(-1, 1)
    size = _rows_of_part(rows)
    tokens, best = [], []
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        values = rows[part].to(torch.float32)
        highest = values.amax(-1, keepdim=True)
        total = ops.log_total(values, highest)
        candidates = legal.listed(part) if wanted.count < vocabulary else None
        if candidates is None:
            logprobs = (values - highest).sub_(total)
            legal.apply(logprobs, part, highest + total)
            columns = torch.arange(vocabulary, device=values.device).expand_as(values)
        else:
            columns, real = candidates
            real = real & (columns < vocabulary)
            columns = columns.clamp(max=vocabulary - 1)
            logprobs = (values.gather(1, columns) - highest).sub_(total).masked_fill_(~real, NEG_INF)
        count = min(wanted.count, logprobs.shape[1])
        if count < logprobs.shape[1] or own is not None:
            ranked = best_tokens(logprobs, count)[1]
            beyond_own = None if own is None else torch.arange(count, device=values.device) >= own[part]
            at, order = ranked.sort(dim=-1)
            logprobs, columns = logprobs.gather(1, at), columns.gather(1, at)
            logprobs = logprobs if beyond_own is None else logprobs.masked_fill_(beyond_own.gather(1, order), NEG_INF)
        tokens.append(columns)
        best.append(logprobs)
    shape = (*logits.shape[:-1], tokens[0].shape[1])
    return Candidates(torch.cat(tokens).view(shape), torch.cat(best).view(shape), full=shape[-1] == vocabulary)
