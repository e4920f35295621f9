"""Walk down a verified forest: from the roots, one beam-sampling step per layer, until a layer does not pass.

Everything is tensor code over [R, ...] with static shapes; a row that has stopped is carried along unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dsbd_cli.core.beams import Finished
from dsbd_cli.core.forest import Forest
from dsbd_cli.core.noise import extend_path
from dsbd_cli.core.probs import NEVER, Candidates, pool_law
from dsbd_cli.decoding.state import BatchState
from dsbd_cli.drafting.base import Endings
from dsbd_cli.verify.base import DraftedLayer, LayerDraws, LayerView, Rule
from dsbd_cli.verify.rejection import draft_law_at
from dsbd_cli.verify.width import expected_width

__all__ = ["LayerCounts", "Live", "Walk", "walk"]


@dataclass(slots=True)
class Live:
    """Live beams of one step: the pair (parent node, token) of each, its forest node if it was drafted, and its
    scores. All [R, W]."""

    parent: Tensor
    token: Tensor
    node: Tensor
    valid: Tensor
    weight: Tensor
    logprob: Tensor
    path: Tensor
    stop_state: Tensor

    def where(self, rows: Tensor, other: Live) -> Live:
        """These beams in the given rows [R] bool, the other's elsewhere."""
        keep = rows.unsqueeze(1)
        return Live(*(torch.where(keep, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


@dataclass(slots=True)
class LayerCounts:
    """Counters of one drafted layer, [R] int64 each; `reached` is 0 where the walk stopped above, `needed` the drafts
    it took, in draw order, to fill the layer (0 where it did not pass).

    Of two drafters: `drafted_second` and `accepted_second` are of the nodes that only the second one proposed, `needed`
    of the first one's, unless the second drafted alone; `held_second` says that the second one proposed all that it
    took to pass.
    """

    reached: Tensor
    drafted: Tensor
    live_parents: Tensor
    width: Tensor
    accepted: Tensor
    passed: Tensor
    needed: Tensor
    drafted_second: Tensor
    accepted_second: Tensor
    held_second: Tensor


@dataclass(slots=True)
class Walk:
    """Outcome: final beams (pairs to be committed), steps taken [R], sum of widths [R], requests done [R], NaN rows
    [R], layer counts."""

    live: Live
    steps: Tensor
    width_sum: Tensor
    done: Tensor
    invalid: Tensor
    layers: list[LayerCounts]


def walk(state: BatchState, forest: Forest, candidates: Candidates, rule: Rule, endings: Endings) -> Walk:
    """Verify all layers in turn. candidates: of all N nodes. Updates `state.finished`."""
    beams = state.beams
    index = torch.arange(beams.token.shape[1], device=beams.token.device).expand_as(beams.token)
    live = Live(index, beams.token, index, beams.valid, beams.weight, beams.logprob, beams.path, beams.stop_state)
    broken = torch.isnan(candidates.logprobs).any(-1) & forest.flat("valid")
    invalid = broken.any(1) & state.active
    active = state.active & ~invalid
    outcome = Walk(live, torch.zeros_like(beams.length), torch.zeros_like(beams.length), invalid.clone(), invalid, [])
    for layer in range(forest.depth + 1):
        view, weight = _view(state, forest, candidates, rule, endings, live, layer)
        draws = rule.verify(view)
        live = _advance(view, weight, draws, live, endings)
        outcome.live = live.where(active, outcome.live)
        outcome.steps = outcome.steps + active
        outcome.width_sum = outcome.width_sum + draws.valid.sum(1) * active
        done = _finish(state, view, draws, live, outcome.steps, active)
        outcome.done = outcome.done | (done & active)
        if view.drafts is not None:
            outcome.layers.append(_count(view, draws, active, forest.layers[layer + 1].second, forest.firsts))
        active = active & draws.passed & ~done
    return outcome


def _view(
    state: BatchState, forest: Forest, candidates: Candidates, rule: Rule, endings: Endings, live: Live, layer: int
) -> tuple[LayerView, Tensor]:
    """The target's law over the live beams of one layer, and the running weight of every child."""
    own = candidates.at(live.node.clamp(min=0))
    logprob = torch.where(live.valid, live.logprob, NEVER).unsqueeze(-1) + own.logprobs
    if rule.warps:
        law = pool_law(own, live.weight, live.valid, state.warp)
        log_p, weight = law.log_p, law.weight
    else:
        log_p = weight = logprob
    view = LayerView(
        log_p=log_p,
        tokens=own.tokens,
        ends=endings.ends(live.stop_state, own.tokens),
        logprob=logprob,
        node=live.node,
        valid=live.valid,
        path=live.path,
        row_key=state.row_key,
        iteration=state.iteration,
        layer=layer,
        full=own.full,
        drafts=_drafts(forest, layer),
        width=torch.full_like(state.row_key, state.method.num_beams),
        dynamic=state.method.width == "threshold",
    )
    method = state.method
    if method.width == "threshold" and view.drafts is not None:
        assert view.drafts.law is not None
        q = draft_law_at(view, view.drafts).exp()
        p = view.log_p.flatten(1).to(torch.float64).exp()
        # of a fused layer only the sampled nodes: which deterministic ones stand beside them depends on the draws
        drawn = view.drafts.law.log_drawn.shape[1]
        view.width = expected_width(p, q, drawn, method.width_threshold, method.min_width, method.num_beams)
    return view, weight


def _drafts(forest: Forest, layer: int) -> DraftedLayer | None:
    if layer == forest.depth:
        return None
    below = forest.layers[layer + 1]
    return DraftedLayer(
        parent=below.parent,
        token=below.token,
        valid=below.valid,
        sampled=below.sampled,
        offset=forest.offset(layer + 1),
        law=forest.laws[layer],
        above_weight=forest.layers[layer].weight,
    )


def _advance(view: LayerView, weight: Tensor, draws: LayerDraws, live: Live, endings: Endings) -> Live:
    """The live draws as beams of the next step."""
    beam, token = view.pair(draws.index)
    return Live(
        parent=live.node.gather(1, beam),
        token=token,
        node=draws.node,
        valid=draws.valid,
        weight=weight.flatten(1).gather(1, draws.index),
        logprob=view.logprob.flatten(1).gather(1, draws.index),
        path=extend_path(live.path.gather(1, beam), token),
        stop_state=endings.step(live.stop_state.gather(1, beam), token),
    )


def _finish(state: BatchState, view: LayerView, draws: LayerDraws, live: Live, steps: Tensor, active: Tensor) -> Tensor:
    """Take new hypotheses into the best finished ones and say which rows are done: [R] bool.

    The end test is transformers': no live beam, scored at its present length, beats the worst of the best `num_beams`
    finished ones.
    """
    finished, limits = state.finished, state.limits
    length = state.beams.length + steps
    scale = length.to(torch.float32).pow(limits.length_penalty)
    out_of_length = length >= limits.max_new
    kept = finished.score.shape[1]
    flat = view.logprob.flatten(1).masked_fill(~draws.ends, NEVER)
    ended, index = torch.topk(flat, min(kept, flat.shape[1]), dim=1)
    beam, token = view.pair(index)
    cut = torch.where(draws.countable & out_of_length.unsqueeze(1), live.logprob, NEVER)
    logprob = torch.cat((ended, cut), 1)
    new = Finished(
        score=logprob / scale.unsqueeze(1),
        logprob=logprob,
        length=length.unsqueeze(1).expand_as(logprob),
        by_length=torch.cat((torch.zeros_like(ended, dtype=torch.bool), torch.ones_like(cut, dtype=torch.bool)), 1),
        source=torch.full_like(logprob, -1, dtype=torch.int64),
        node=torch.cat((view.node.gather(1, beam), live.parent), 1),
        token=torch.cat((token, live.token), 1),
        tokens=finished.tokens,
    )
    finished.merge(new, active)
    best = torch.where(live.valid, live.logprob, NEVER).amax(1) / scale
    hopeless = finished.full & (best <= finished.score[:, -1])
    return out_of_length | hopeless | (limits.early & finished.full) | ~live.valid.any(1)


def _count(
    view: LayerView, draws: LayerDraws, active: Tensor, second: Tensor | None, firsts: int | None
) -> LayerCounts:
    """second: [R, K] bool, proposed by the second of two drafters; firsts: nodes of the first one (see Forest)."""
    assert view.drafts is not None
    valid, drafts = view.drafts.valid, view.drafts.valid.shape[1]
    parents = (view.drafts.parent.unsqueeze(2) == view.node.unsqueeze(1)) & view.valid.unsqueeze(1)
    firsts = drafts if firsts is None else firsts
    place = torch.where(draws.valid & (draws.node >= 0), draws.node - view.drafts.offset, -1)
    counted = place < firsts if firsts else place >= 0
    proposed = torch.zeros_like(valid) if second is None else second
    return LayerCounts(
        reached=active.to(torch.int64),
        drafted=valid.sum(1),
        live_parents=(parents.any(2) & valid).sum(1),
        width=view.width,
        accepted=draws.accepted,
        passed=(draws.passed & active).to(torch.int64),
        needed=torch.where(counted, place + 1, 0).amax(1) * draws.passed,
        drafted_second=valid[:, firsts:].sum(1),
        accepted_second=(place >= firsts).sum(1),
        held_second=draws.passed * (proposed.gather(1, place.clamp(min=0)) | (place < 0)).all(1),
    )
