"""Types that a verification rule sees of one layer and that it returns, and code that several rules share. Everything
is tensors. The noise is drawn from keys, never from a global state.

Letters: R requests, W beams, K drafts per layer, C candidates per beam, M = W*C pairs of the pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.core.nodes import DraftDistribution
from dsbd_cli.engine.core.pool import LiveDraws, ends_before, live_draws, match_pairs
from dsbd_cli.engine.core.sampler import Sampler
from dsbd_cli.engine.core.topk import NEG_INF


@dataclass(slots=True)
class DraftedLayer:
    """The drafted nodes below the live beams' layer, sampled ones first in draw order.

    Attributes:
        parent: [R, K] int64, forest index of the parent. token: [R, K] int64. valid: [R, K] bool.
        sampled: [R, K] bool, drawn from the distribution.
        offset: forest index of the first of them.
        distribution: the distribution of the first K1 nodes, which may be sampled; None where there is no such node, or
            where neither the rule nor the width reads it.
        above_weight: [R, n] float32, running weight under the draft of the nodes above, which the distribution has as
            parents.
    """

    parent: Tensor
    token: Tensor
    valid: Tensor
    sampled: Tensor
    offset: int
    distribution: DraftDistribution | None
    above_weight: Tensor


@dataclass(slots=True)
class LayerView:
    """One step of the target's distribution over the live beams.

    Attributes:
        log_p: [R, W, C] float32, pool distribution P, -inf outside its support.
        tokens: [R, W, C] int64. ends: [R, W, C] bool, pairs that end the sequence.
        logprob: [R, W, C] float32, raw log-probability l of each child.
        node: [R, W] int64, forest index of each live beam. valid: [R, W] bool. path: [R, W] int64, path keys.
        full: the candidates are the whole vocabulary, in order.
        drafts: None for the bonus layer.
        width: [R] int64, w_l: live beams the layer needs to pass. dynamic: it may be less than W.
        keys: [R, STREAMS] int64, keys of this layer's noise. num_beams: W, the most live beams of the next step.
        row_beams: [R] int64, W of each row, where some row has fewer; None where all have num_beams.
        noise: [R, W, C] float32, G(x, v) of the candidates (Sampler.path_noise); None where it is not computed yet.
        greedy_rows: [R] bool, rows that draw without noise (temperature 0); None where there are none.
    """

    log_p: Tensor
    tokens: Tensor
    ends: Tensor
    logprob: Tensor
    node: Tensor
    valid: Tensor
    path: Tensor
    full: bool
    drafts: DraftedLayer | None
    width: Tensor
    dynamic: bool
    keys: Tensor
    num_beams: int
    row_beams: Tensor | None = None
    noise: Tensor | None = None
    greedy_rows: Tensor | None = None

    def key(self, stream: int) -> Tensor:
        """Return the key of one stream of this layer's noise: [R] int64."""
        return self.keys[:, stream]

    def pair(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return beam and token of flat pool indices [R, m]."""
        return index // self.tokens.shape[2], self.tokens.flatten(1).gather(1, index)


@dataclass(slots=True)
class LayerDraws:
    """Draws that one layer yields.

    Attributes:
        index: [R, W] int64, flat pool index of each live draw, in draw order. valid: [R, W] bool.
        node: [R, W] int64, the drafted node equal to each draw, or -1.
        ends: [R, M] bool, pairs that became finished hypotheses.
        countable: [R, W] bool, live draws that count as hypotheses when the length limit ends the request here.
        passed: [R] bool, all live draws are drafted nodes and there are as many as the layer needs.
        accepted: [R] int64, drafted nodes taken.
    """

    index: Tensor
    valid: Tensor
    node: Tensor
    ends: Tensor
    countable: Tensor
    passed: Tensor
    accepted: Tensor


class Rule(ABC):
    """A verification rule: a sampler with which target and draft draw, and a test of what was drafted. A rule inherits
    from this class.

    Attributes:
        sampler: how target and draft draw.
        needs_distribution: the test compares P with the draft's distribution Q.
        drafts_end: drafts of end tokens are of use to the test.
    """

    sampler: Sampler
    needs_distribution: bool = False
    drafts_end: bool = False

    @classmethod
    def of(cls, method: MethodConfig) -> Self:
        """Make the rule with the settings of a method."""
        return cls()

    @abstractmethod
    def verify(self, view: LayerView) -> LayerDraws:
        """Draw the next live beams of one layer."""


def equal_nodes(view: LayerView, index: Tensor, valid: Tensor) -> Tensor:
    """Return the forest node equal to each draw, -1 where there is none: [R, W] int64. index, valid: see
    LayerDraws."""
    if view.drafts is None:
        return torch.full_like(index, -1)
    drafts, (beam, token) = view.drafts, view.pair(index)
    matches = match_pairs(view.node.gather(1, beam), token, drafts.parent, drafts.token, drafts.valid)
    return torch.where(valid & (matches >= 0), matches + drafts.offset, -1)


def passing(view: LayerView, node: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether the layer passes [R] bool, its width then [R] int64, and which of the draws are within it: [R, W]
    bool. node, valid: see LayerDraws."""
    steps = torch.arange(view.num_beams, device=node.device).unsqueeze(0)
    needed = valid & (steps < view.width.unsqueeze(1))
    passed = ((node >= 0) | ~needed).all(1) & needed.any(1)
    width = torch.where(passed, view.width, view.num_beams if view.row_beams is None else view.row_beams)
    return passed, width, valid & (steps < width.unsqueeze(1))


def verify_by_keys(view: LayerView, keys: Tensor, rank_limit: bool) -> tuple[LayerDraws, Tensor]:
    """Verify a layer whose draws do not depend on the drafts. The pairs of the largest keys are drawn, and the layer
    passes if the first w_l live ones are drafted. The second result is of use where the width is dynamic: the end-token
    draws before the w_l-th live one, [R, M] bool.

    keys: [R, W, C] float. With `rank_limit` an end counts only if it is among the W best pairs (transformers' beam
    search); without it, if it is drawn before the last live draw.
    """
    flat, ends = keys.flatten(1), view.ends.flatten(1)
    draws = live_draws(flat, ends, view.num_beams)
    node = equal_nodes(view, draws.index, draws.valid)
    passed, width, valid = passing(view, node, draws.valid)
    finished, countable = _ends(view, flat, ends, draws, width, rank_limit)
    accepted = ((node >= 0) & valid).sum(1)
    ends_within_width = ends_before(flat, ends, draws, view.width) if view.dynamic else finished
    return LayerDraws(draws.index, valid, node, finished, countable & valid, passed, accepted), ends_within_width


def complete_afresh(view: LayerView, draws: LayerDraws, ends_within_width: Tensor, keys: Tensor) -> LayerDraws:
    """Draw again, with other noise, what lies beyond the w_l-th live draw of a layer with w_l < W that did not pass.

    That the layer stopped says something about the noise of the pairs that were not drawn, because the drafts were
    chosen by the same noise. So to draw on with this noise would bias the distribution. ends_within_width: see
    verify_by_keys. keys: [R, W, C], log P with fresh noise.
    """
    beams = view.num_beams
    steps = torch.arange(beams, device=keys.device).unsqueeze(0)
    again = ~draws.passed & (view.width < beams)
    first = draws.valid & (steps < view.width.unsqueeze(1))
    taken = ends_within_width.to(torch.int8).scatter_reduce(1, draws.index, first.to(torch.int8), "amax").bool()
    fresh, ends = keys.flatten(1).masked_fill(taken, NEG_INF), view.ends.flatten(1)
    more = live_draws(fresh, ends, beams)
    count = first.sum(1)
    missing = torch.where(count == view.width, beams - count, 0)  # with fewer first draws nothing is left to draw
    index, valid, node = at_front(
        torch.cat((draws.index, more.index), 1),
        torch.cat((first, more.valid & (steps < missing.unsqueeze(1))), 1),
        torch.cat((draws.node, torch.full_like(more.index, -1)), 1),
        beams,
    )
    keep = again.unsqueeze(1)
    valid = torch.where(keep, valid, draws.valid)
    return LayerDraws(
        index=torch.where(keep, index, draws.index),
        valid=valid,
        node=torch.where(keep, node, draws.node),
        ends=torch.where(keep, ends_within_width | ends_before(fresh, ends, more, missing), draws.ends),
        countable=valid,
        passed=draws.passed,
        accepted=torch.where(again, ((draws.node >= 0) & first).sum(1), draws.accepted),
    )


def at_front(index: Tensor, valid: Tensor, node: Tensor, beams: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first W valid draws of m, in order and without gaps: index, valid and node [R, m] -> [R, W] each.

    beams: W. Places without a draw have index 0 and node -1.
    """
    at = torch.where(valid, valid.cumsum(1) - 1, beams).clamp(max=beams)
    nowhere = index.new_zeros(len(index), beams + 1)
    fronts = nowhere.scatter(1, at, index), nowhere.bool().scatter(1, at, valid), (nowhere - 1).scatter(1, at, node)
    return fronts[0][:, :beams], fronts[1][:, :beams], fronts[2][:, :beams]


def _ends(
    view: LayerView, keys: Tensor, ends: Tensor, draws: LiveDraws, width: Tensor, rank_limit: bool
) -> tuple[Tensor, Tensor]:
    if not rank_limit:
        return ends_before(keys, ends, draws, width), torch.ones_like(draws.valid)
    best = torch.topk(keys, min(view.num_beams, keys.shape[-1]), dim=-1).values
    last = best[:, -1:]
    if view.row_beams is not None:
        last = best.gather(1, (view.row_beams.unsqueeze(1) - 1).clamp(max=best.shape[1] - 1))
    return ends & (keys >= last) & torch.isfinite(keys), draws.key >= last
