"""Records of every generated token where a request asks for it: its log-probability, the likeliest tokens at its place,
and the beam that it was appended to. No such record exists while no row of the batch asks.

Letters: R requests, W beams, F finished hypotheses kept, L history length, T likeliest tokens, D drafted layers, N
nodes, m pairs (parent node, token), C candidates of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.core.beams import Beams, Finished
from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.nodes import at_nodes
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.requests import TokenDetail


@dataclass(slots=True)
class Marks:
    """Records of each generated token of m sequences.

    Attributes:
        logprob: [R, m, L] float32, raw log p(token | before).
        beam: [R, m, L] int64, index of the beam that the token was appended to, among the beams of its step.
        top, top_logprob: [R, m, L, T] int64 and float32, the likeliest tokens at this place, by token id. Where fewer
            than T were recorded, because no row asked for so many then, the rest have -inf.
    """

    logprob: Tensor
    beam: Tensor
    top: Tensor
    top_logprob: Tensor

    @classmethod
    def empty(cls, rows: int, count: int, history: int, tops: int, device: torch.device) -> Marks:
        """Return marks without a record."""
        zeros = torch.zeros(rows, count, history, device=device)
        many = torch.zeros(rows, count, history, tops, device=device)
        return cls(zeros, zeros.to(torch.int64), many.to(torch.int64), many)

    def each(self, change: Callable[[Tensor], Tensor]) -> Marks:
        """Apply the same change to every tensor."""
        return Marks(change(self.logprob), change(self.beam), change(self.top), change(self.top_logprob))

    def gather(self, index: Tensor) -> Marks:
        """Return the marks of the sequences `index` [R, m]."""
        return self.each(lambda value: value.gather(1, _expand_index(index, value)))

    def put(self, at: Tensor, new: Marks) -> Marks:
        """Return the marks with `new` [R, m, n] written at the places `at` [R, m, n] of the history."""
        pairs = zip(_tensors(self), _tensors(new), strict=True)
        return Marks(*(old.scatter(2, _expand_index(at, value), value) for old, value in pairs))

    def where(self, condition: Tensor, other: Marks) -> Marks:
        """Return these marks where `condition` [R, m] holds, else those of `other`."""
        pairs = zip(_tensors(self), _tensors(other), strict=True)
        return Marks(*(torch.where(_expand_index(condition, a, expand=False), a, b) for a, b in pairs))


@dataclass(slots=True)
class TokenTrace:
    """The marks of the live beams [R, W, L] and of the finished hypotheses [R, F, L]."""

    live: Marks
    done: Marks

    @classmethod
    def empty(cls, beams: Beams, finished: Finished) -> TokenTrace:
        """Return a trace without a record and without likeliest tokens (T = 0)."""
        (rows, width, history), kept = beams.history.shape, finished.score.shape[1]
        device = beams.history.device
        return cls(Marks.empty(rows, width, history, 0, device), Marks.empty(rows, kept, history, 0, device))

    @property
    def tops(self) -> int:
        """T, likeliest tokens that are recorded at each place."""
        return self.live.top.shape[3]

    def fit(self, history: int, tops: int) -> None:
        """Make room for `history` tokens, and for `tops` likeliest tokens of each."""
        more, wider = history - self.live.logprob.shape[2], max(0, tops - self.tops)

        def grown(value: Tensor) -> Tensor:
            pads = (0, more) if value.dim() == 3 else (0, wider, 0, more)
            return torch.nn.functional.pad(value, pads, value=NEG_INF if value.is_floating_point() else 0)

        if more > 0 or wider:
            more = max(0, more)
            self.live, self.done = self.live.each(grown), self.done.each(grown)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        self.live, self.done = (marks.each(lambda value: value[rows]) for marks in (self.live, self.done))

    def follow(
        self,
        beams: Beams,
        finished: Finished,
        forest: Forest,
        candidates: Candidates,
        before: Tensor,
        best: Candidates | None,
        parent: Tensor,
        token: Tensor,
        steps: Tensor,
    ) -> None:
        """Record one iteration, before the commit changes beams and finished hypotheses.

        candidates: of all N nodes. before: [R, D + 1, W], the beams (nodes) that each step began with. best: the T
        likeliest tokens of all nodes; None where T is 0. parent, token [R, W]: the new live beams; steps: [R].
        """
        nodes = _paths(forest)

        def new(parent: Tensor, token: Tensor, steps: Tensor, old: Marks) -> Marks:
            """Return the marks of the roots, with those of this iteration's tokens behind them."""
            path = at_nodes(nodes, parent)  # [R, m, D + 1], the parent of each step
            at = beams.length.view(-1, 1, 1) + torch.arange(path.shape[2], device=path.device)
            at = at.clamp(max=old.logprob.shape[2] - 1).expand_as(path)
            fresh = _marks(path, forest.path_to(parent, token, steps), candidates, best, before, old)
            return old.gather(forest.flat.root.gather(1, parent)).put(at, fresh)

        ended = (finished.length - beams.length.unsqueeze(1)).clamp(1, forest.depth + 1)
        node = finished.node.clamp(0, forest.offset(forest.depth + 1) - 1)
        kept = self.done.gather(finished.origin.clamp(min=0))
        self.done = kept.where(finished.origin >= 0, new(node, finished.token, ended, self.live))
        self.live = new(parent, token, steps.unsqueeze(1).expand_as(parent), self.live)


def _paths(forest: Forest) -> Tensor:
    """Return the nodes from the root down to each node, [R, N, D + 1] int64. Entries behind the node itself are not
    used."""
    parent = forest.flat.parent
    width, drafts = forest.num_beams, forest.drafts_per_layer
    index = torch.arange(parent.shape[1], device=parent.device).expand_as(parent)
    column = torch.zeros_like(index).unsqueeze(2).repeat(1, 1, forest.depth + 1)
    column[:, :, 0] = index
    for layer in range(1, forest.depth + 1):
        own = slice(width + (layer - 1) * drafts, width + layer * drafts)
        above = at_nodes(column, parent[:, own].clamp(min=0))
        above[:, :, layer] = index[:, own]
        column[:, own] = above
    return column


def _marks(
    path: Tensor, tokens: Tensor, candidates: Candidates, best: Candidates | None, before: Tensor, old: Marks
) -> Marks:
    """Return the marks of steps from the nodes `path` by `tokens`, [R, m, n] each."""
    flat = path.flatten(1)

    def of(value: Tensor) -> Tensor:
        """Gather value [R, N, C] at the nodes of the path: [R, m, n, C]."""
        return at_nodes(value, flat).view(*path.shape, -1)

    same = of(candidates.tokens) == tokens.unsqueeze(3)
    # not a sum: padding behind the listed tokens of a node repeats token 0, with log-probability -inf
    logprob = torch.where(same, of(candidates.logprobs), NEG_INF).amax(3)
    beam = (before.unsqueeze(1) == path.unsqueeze(3)).to(torch.int64).argmax(3)
    top = of(best.tokens) if best is not None else old.top[:, :1, :1].expand(*path.shape, 0)
    top_logprob = of(best.logprobs) if best is not None else old.top_logprob[:, :1, :1].expand(*path.shape, 0)
    return Marks(logprob, beam, top, top_logprob)


def _tensors(marks: Marks) -> tuple[Tensor, ...]:
    return marks.logprob, marks.beam, marks.top, marks.top_logprob


def _expand_index(index: Tensor, value: Tensor, *, expand: bool = True) -> Tensor:
    """Give an index the trailing dimensions of `value`."""
    wide = index.view(*index.shape, *(1 for _ in range(value.dim() - index.dim())))
    return wide.expand(*index.shape, *value.shape[index.dim() :]) if expand else wide


def token_details(
    trace: TokenTrace, row: int, rank: int, ids: Sequence[int], sampling: SamplingConfig, token_bytes: Sequence[bytes]
) -> tuple[TokenDetail, ...]:
    """Return the records of the tokens `ids` of a finished hypothesis. Reads the device."""
    marks, length = trace.done, len(ids)
    logprob, beam = (value[row, rank, :length].tolist() for value in (marks.logprob, marks.beam))
    top, top_logprob = (value[row, rank, :length].tolist() for value in (marks.top, marks.top_logprob))

    def text(token: int) -> bytes:
        return token_bytes[token] if token < len(token_bytes) else b""

    details = []
    for position, token in enumerate(ids):
        # another row may have asked for more likeliest tokens; what has -inf was not recorded, or is impossible
        pairs = [pair for pair in zip(top_logprob[position], top[position], strict=True) if pair[0] != NEG_INF]
        order = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))
        tops = tuple((other, text(other), value) for value, other in order[: sampling.top_logprobs])
        details.append(TokenDetail(token, text(token), logprob[position], beam[position], tops))
    return tuple(details)
