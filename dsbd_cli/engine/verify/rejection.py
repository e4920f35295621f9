"""Rejection rules: drafts sampled from a recorded distribution Q are accepted one after another against the target's
distribution P.

`Rejection` draws without replacement and is exact for the joint distribution of w such draws (recursive rejection
sampling: Leviathan et al. 2023 for the identity, Jeon et al. 2024 (arXiv 2402.14160) for several drafts;
docs/algorithm.md for beams). Draws that the tests leave missing come from the exact distribution, and one that equals a
drafted node is that node: this is how deterministic nodes are accepted (point-mass verification). `WithReplacement` is
the i.i.d. distribution of Qin et al. 2025, kept for comparison; duplicate beams are part of it.

Everything here is float64 over the support of P: Q matters only there, since a residual max(0, P' - Q') lives on the
support of P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.engine.core.nodes import DraftDistribution
from dsbd_cli.engine.core.noise import ACCEPT, CLOCK, COMPLETION, RESIDUAL, gumbel, uniform
from dsbd_cli.engine.core.pool import DraftRequest, ends_before, live_draws
from dsbd_cli.engine.core.sampler import Independent, Sampler, WithoutReplacement, entry_index, largest
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.verify.base import DraftedLayer, LayerDraws, LayerView, Rule, at_front, equal_nodes, passing

TINY = 1e-300
MOST_PROBS = 1 << 20  # numbers in the distributions Q' that are made together


@dataclass(slots=True)
class _Tests:
    """State of the sequential tests of one layer.

    Attributes:
        log_p: [R, M] float64, log P without what is taken, not renormalised.
        p: [R, M] float64, P without what is taken, renormalised.
        residual: [R, M] float64, P'; NaN where nothing is left of P.
        live: [R, 1] int64, number of accepted drafts that are live.
        taken: for every tested draft [R, 1] bool, whether it was accepted.
    """

    log_p: Tensor
    p: Tensor
    residual: Tensor
    live: Tensor
    taken: list[Tensor]


@dataclass(slots=True)
class _Accepted:
    """Accepted drafts of a layer.

    Attributes:
        index: [R, K1] int64, pool index of every draft. live: [R, K1] bool, which are accepted and live.
        count: [R] int64, how many are accepted, live or not. ends: [R, M] bool, the ending pairs among them.
    """

    index: Tensor
    live: Tensor
    count: Tensor
    ends: Tensor


def draft_log_probs_at(view: LayerView, drafts: DraftedLayer) -> Tensor:
    """Return log Q at the pairs of the target's pool: [R, M] float64. Q is over all nodes of the live beams' layer."""
    assert drafts.distribution is not None
    return at_pool(view, drafts, drafts.distribution.log_q)


def at_pool(view: LayerView, drafts: DraftedLayer, log_values: Tensor) -> Tensor:
    """Move values of the draft's candidates [R, n, Cq] to the pairs of the target's pool: [R, M] float64, -inf for a
    pair that the draft has no candidate for."""
    assert drafts.distribution is not None
    distribution = drafts.distribution
    first = drafts.offset - log_values.shape[1]  # forest index of the first node of that layer
    local = (view.node - first).clamp(min=0).unsqueeze(-1)
    log_q = log_values.gather(1, local.expand(-1, -1, log_values.shape[-1]))
    if distribution.candidates.full:
        width = log_q.shape[-1]
        log_probs = log_q.gather(2, view.tokens.clamp(max=width - 1))
        at = torch.where(view.tokens < width, log_probs, NEG_INF)
    else:
        tokens = distribution.candidates.tokens.gather(1, local.expand(-1, -1, log_values.shape[-1]))
        same = view.tokens.unsqueeze(-1) == tokens.unsqueeze(-2)  # [R, W, C, Cq]
        at = torch.where(same, log_q.unsqueeze(-2), NEG_INF).amax(-1)
    return torch.where(view.valid.unsqueeze(-1), at, NEG_INF).flatten(1).to(torch.float64)


@dataclass(slots=True)
class _Places:
    """Places of the drafts in the target's pool, [R, K] each.

    Attributes:
        index: int64, flat pool index. known: bool, the parent is live and the token a candidate.
        beam: int64, the live beam that is the parent, -1 if it is dead.
    """

    index: Tensor
    known: Tensor
    beam: Tensor


def _locate(view: LayerView, drafts: DraftedLayer) -> _Places:
    same = (drafts.parent.unsqueeze(2) == view.node.unsqueeze(1)) & view.valid.unsqueeze(1)  # [R, K, W]
    beam, live = same.to(torch.int8).argmax(-1), same.any(-1)
    width = view.tokens.shape[2]
    if view.full:
        column = drafts.token.clamp(max=width - 1)
        in_support = drafts.token < width
    else:
        tokens = view.tokens.gather(1, beam.unsqueeze(-1).expand(-1, -1, width))
        hit = tokens == drafts.token.unsqueeze(-1)
        column, in_support = hit.to(torch.int8).argmax(-1), hit.any(-1)
    return _Places(beam * width + column, live & in_support & drafts.valid, torch.where(live, beam, -1))


def _normalise(probs: Tensor, otherwise: Tensor) -> Tensor:
    """Return probs / sum(probs); `otherwise` where the sum underflows."""
    total = probs.sum(-1, keepdim=True)
    return torch.where(total > TINY, probs / total, otherwise)


class Rejection(Rule):
    """Rule `rejection`: the ordered live beams follow sequential draws without replacement from P."""

    sampler: Sampler = WithoutReplacement()
    needs_distribution = True
    drafts_end = True
    replacement = False
    """Draws are independent, and what is taken stays in the distribution."""
    joins = True
    """A missing draw that equals a drafted node is that node."""

    def decide(self, view: LayerView, drafts: DraftedLayer) -> tuple[Tensor | None, Tensor | None]:
        """Return the rows [R] bool whose drafts are tested (None: all), and those whose drafts are taken untested
        (None: none)."""
        return None, None

    def verify(self, view: LayerView) -> LayerDraws:
        """Test the drafts in order, then complete the layer where it stopped."""
        log_p = view.log_p.flatten(1).to(torch.float64)
        p = log_p.exp()
        tests = _Tests(log_p, p, p, torch.zeros_like(view.width).unsqueeze(1), [])
        accepted = places = None
        if view.drafts is not None and view.drafts.distribution is not None:
            places = _locate(view, view.drafts)
            accepted = self._test_drafts(view, view.drafts, view.drafts.distribution, tests, places)
        return self._finish(view, tests, accepted)

    def _test_drafts(
        self, view: LayerView, drafts: DraftedLayer, distribution: DraftDistribution, tests: _Tests, places: _Places
    ) -> _Accepted:
        count = distribution.log_drawn.shape[1]
        log_rest = torch.zeros_like(distribution.log_rest) if self.replacement else distribution.log_rest
        u = uniform(view.key(ACCEPT).unsqueeze(1), torch.arange(count, device=log_rest.device))
        bound = u * torch.exp(distribution.log_drawn - log_rest)  # accepted below P'(d)
        index, ends = places.index[:, :count], view.ends.flatten(1)
        lasting = ~ends.gather(1, index)
        drawn = drafts.sampled[:, :count]
        drawn_known = places.known[:, :count] & drawn
        tested, free = self.decide(view, drafts)
        allowed = drawn_known if tested is None else drawn_known & tested.unsqueeze(1)
        drawn = drawn if tested is None else drawn & tested.unsqueeze(1)
        untested = None
        if free is not None:
            untested = drawn_known & torch.isfinite(view.logprob.flatten(1).gather(1, index)) & free.unsqueeze(1)
        width, columns = view.width.unsqueeze(1), (torch.split(item, 1, 1) for item in (index, drawn, allowed, bound))
        distributions = self._drawn_distributions(view, drafts, log_rest, places)
        for j, (at, drawn_now, allowed_now, bound_now, q) in enumerate(zip(*columns, distributions, strict=True)):
            going = tests.live < width
            accept = (bound_now < tests.residual.gather(1, at)) & allowed_now
            tested_now = drawn_now
            if untested is not None:
                accept |= untested[:, j : j + 1]
                tested_now = tested_now | accept
            accept &= going
            self._update(tests, at, accept, tested_now & going, q)
            tests.taken.append(accept)
            tests.live = tests.live + (accept & lasting[:, j : j + 1])
        taken = torch.cat(tests.taken, 1)
        ending = (taken & ~lasting).to(torch.int8)
        ended = torch.zeros_like(ends, dtype=torch.int8).scatter_reduce(1, index, ending, "amax")
        return _Accepted(index, taken & lasting, taken.sum(1), ended.bool())

    def _drawn_distributions(
        self, view: LayerView, drafts: DraftedLayer, log_rest: Tensor, places: _Places
    ) -> Iterator[Tensor]:
        """Yield Q' of each draft in turn, at the pairs of the target's pool: [R, M] float64. They do not depend on what
        is accepted, so several are made at once.

        What is left of Q is renormalised in logs, because at a low temperature the rest of a distribution is far below
        the smallest number. log_rest: [R, K1] float64.
        """
        assert drafts.distribution is not None
        log_q = draft_log_probs_at(view, drafts).unsqueeze(1)
        rows, count, pairs = len(log_q), log_rest.shape[1], log_q.shape[2]
        order = torch.arange(count, device=log_q.device)
        # the draft that took each pair away, count where none did
        taker = torch.full((rows, pairs), count, dtype=torch.int64, device=log_q.device)
        if not self.replacement:
            mine = torch.where(places.known[:, :count], order, count)
            taker = taker.scatter_reduce(1, places.index[:, :count], mine, "amin")
        for part in torch.split(order, max(1, MOST_PROBS // (rows * pairs))):
            q = torch.exp(log_q - log_rest[:, part].unsqueeze(2)).nan_to_num(nan=0.0)
            here = taker.unsqueeze(1) >= part.unsqueeze(1)
            if drafts.distribution.scope == "parent":
                beam = torch.arange(pairs, device=log_q.device) // view.tokens.shape[2]
                here &= beam == places.beam[:, part].unsqueeze(2)
            yield from torch.where(here, q, 0.0).unbind(1)

    def _update(self, tests: _Tests, at: Tensor, accept: Tensor, tested: Tensor, q: Tensor) -> None:
        """Update P and P' after one test of a draft drawn from Q' = q. at: [R, 1], its pool index. Rows whose tests are
        over (tested is False) stay as they are.

        What is left of P is renormalised in logs, as what is left of Q.
        """
        rejected = _normalise((tests.residual - q).clamp(min=0), tests.p)
        if not self.replacement:
            gone = torch.where(accept, NEG_INF, torch.zeros_like(accept, dtype=torch.float64))
            tests.log_p = tests.log_p.scatter_add(1, at, gone)
            tests.p = torch.softmax(tests.log_p, 1)
        after = torch.where(accept, tests.p, rejected)
        tests.residual = torch.where(tested, after, tests.residual)

    def _finish(self, view: LayerView, tests: _Tests, accepted: _Accepted | None) -> LayerDraws:
        """Return the accepted drafts, then the missing draws. Missing draws that are drafted nodes count for the layer
        as well."""
        beams, ends, live = view.num_beams, view.ends.flatten(1), tests.live.squeeze(1)
        exhausted = (tests.log_p == NEG_INF).all(1) & (live > 0)
        going = (live < view.width) & ~exhausted
        fresh = self._noise(view)
        first, first_real = largest((torch.log(tests.residual.nan_to_num(0.0)) + fresh[:, 0]).unsqueeze(1), 1)
        first_real &= going.unsqueeze(1)
        first_ends = first_real & ends.gather(1, first)
        first_live = first_real & ~first_ends
        more, more_real, more_ends = self._complete(view, tests, fresh, first, first_real)
        drawn = [(first, first_live), (more, more_real & going.unsqueeze(1))]
        nodes = [torch.full_like(first, -1), torch.full_like(more, -1)]
        if accepted is not None and view.drafts is not None:
            drawn.insert(0, (accepted.index, accepted.live))
            order = torch.arange(accepted.index.shape[1], device=live.device) + view.drafts.offset
            nodes.insert(0, order.expand_as(accepted.index))
        indices, reals = zip(*drawn, strict=True)
        index, valid, node = at_front(torch.cat(indices, 1), torch.cat(reals, 1), torch.cat(nodes, 1), beams)
        if self.joins:
            node = torch.where(node < 0, equal_nodes(view, index, valid), node)
        passed, width, valid = passing(view, node, valid)
        missing = (width - (live + first_live.squeeze(1))).clamp(min=0)
        ended = more_ends(torch.where(going, missing, 0)) | torch.zeros_like(ends).scatter(1, first, first_ends)
        count = (valid & (node >= 0) & (torch.arange(beams, device=index.device) >= tests.live)).sum(1)
        if accepted is not None:
            ended, count = ended | accepted.ends, count + accepted.count
        return LayerDraws(index, valid, node, ended, valid, passed, count)

    def _noise(self, view: LayerView) -> Tensor:
        """Return Gumbel noise [R, 2, M] float64 for the draw from the residual, and for the draws that complete the
        layer."""
        keys = torch.stack((view.key(RESIDUAL), view.key(COMPLETION)), 1).unsqueeze(2)
        return gumbel(keys, entry_index(view.tokens).flatten(1).unsqueeze(1))

    def _complete(
        self, view: LayerView, tests: _Tests, fresh: Tensor, first: Tensor, first_real: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Draw further live pairs from P without what is taken, by the noise `fresh` [R, 2, M]. Return index and real
        [R, W], and a function that returns which ending pairs [R, M] were drawn before the n-th of them, n [R]
        int64."""
        distribution = torch.where(first_real, tests.log_p.scatter(1, first, NEG_INF), tests.log_p)
        keys, ends = distribution + fresh[:, 1], view.ends.flatten(1)
        draws = live_draws(keys, ends, view.num_beams)
        return draws.index, draws.valid, lambda count: ends_before(keys, ends, draws, count)


class WithReplacement(Rejection):
    """Rule `with-replacement`: independent draws, duplicates kept (the distribution of Qin et al. 2025)."""

    sampler = Independent()
    replacement = True
    joins = False  # two equal beams would share a node, whose drafts belong to one beam only

    def _complete(
        self, view: LayerView, tests: _Tests, fresh: Tensor, first: Tensor, first_real: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Draw live pairs independently.

        Independent draws are the events of one Poisson clock per pair with rate P. So the live ones are independent
        draws from P given that they are live. An ending pair was drawn if its clock rings before the last live one,
        whose time is Gamma(missing) / P(live).
        """
        ends = view.ends.flatten(1)
        distribution = tests.log_p.masked_fill(ends, NEG_INF)
        log_p, stream = distribution.view(view.tokens.shape), view.key(COMPLETION)
        index, real = self.sampler.draw(DraftRequest(log_p, view.tokens, view.path, stream, view.num_beams))
        clock, entries = view.key(CLOCK).unsqueeze(1), entry_index(view.tokens).flatten(1)

        def ended_before(count: Tensor) -> Tensor:
            steps = torch.arange(view.num_beams, device=index.device).unsqueeze(0)
            wanted = steps < count.unsqueeze(1)
            waits = torch.where(wanted, -torch.log(uniform(clock, -1 - steps)), 0.0).sum(1, keepdim=True)
            last = waits / distribution.exp().sum(1, keepdim=True)
            p = tests.log_p.exp()
            rings = -torch.log(uniform(clock, entries)) / p
            return ends & (rings < last) & (p > 0) & (count > 0).unsqueeze(1)

        return index, real, ended_before
