"""Verification of a drafted forest: from the roots, one beam-sampling step per layer, until a layer does not pass.

Everything is tensor code over [R, ...] with static shapes. All layers are verified for all rows. Results below the
layer where a row stopped are not used.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dsbd_cli.config.variants import MIN_WIDTH, WIDTH_THRESHOLD
from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.distribution import pool_distribution
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.nodes import at_nodes
from dsbd_cli.engine.core.noise import path_gumbel
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.base import Endings
from dsbd_cli.engine.iteration.batch_state import BatchState
from dsbd_cli.engine.iteration.finished import Live, counters, progress_of, stack_layers, verified
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.verify.base import DraftedLayer, LayerDraws, LayerView, Rule
from dsbd_cli.engine.verify.rejection import draft_log_probs_at
from dsbd_cli.engine.verify.width import expected_width

MOST_NOISE = 1 << 16  # numbers of noise that are made for all nodes at once; more are made layer by layer


@dataclass(slots=True)
class VerifiedForest:
    """Outcome of a verified forest.

    Attributes:
        live: final beams, pairs to be committed. steps: [R], steps taken. width_sum: [R], live beams, summed over the
            steps.
        done: requests that have ended, [R]. invalid: rows with NaN at a live beam, [R].
        counters: [R, D, fields of LayerCounters] int64, of the drafted layers.
        before: [R, D + 1, W], beams (nodes) that each step began with; None where tokens are not traced.
        report: the counters as `pack_counters` joins them; None where no kernel verified.
    """

    live: Live
    steps: Tensor
    width_sum: Tensor
    done: Tensor
    invalid: Tensor
    counters: Tensor
    before: Tensor | None = None
    report: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Nodes:
    """Facts of all N nodes that verify_forest looks up: candidates, path keys and stop states [R, N], and the noise
    G(x, v) of the candidates [R, N, C], or None."""

    candidates: Candidates
    path: Tensor
    stop_state: Tensor
    noise: Tensor | None


def verify_forest(
    state: BatchState,
    forest: Forest,
    candidates: Candidates,
    rule: Rule,
    endings: Endings,
    keys: Tensor,
    observer: Observer | None = None,
) -> VerifiedForest:
    """Verify all layers for every row, then compute how far each row came. candidates: of all N nodes. keys:
    [R, D + 1, STREAMS]. observer: receives every layer. Updates `state.finished`."""
    beams = state.beams
    index = torch.arange(beams.token.shape[1], device=beams.token.device).expand_as(beams.token)
    live = Live(index, beams.token, index, beams.valid, beams.weight, beams.logprob)
    broken = torch.isnan(candidates.logprobs).any(-1)
    # NaN at a node that no beam stands for must not reach the pool, where it would end the request
    logprobs = candidates.logprobs.nan_to_num(nan=NEG_INF, neginf=NEG_INF)
    shifted = Candidates(candidates.tokens, logprobs, candidates.full)
    path = forest.flat.path
    noise = _path_noise(path, shifted.tokens, state.warp.greedy_rows) if rule.sampler.path_noise else None
    nodes = Nodes(shifted, path, forest.flat.stop_state, noise)
    each = []
    for layer in range(forest.depth + 1):
        view, weight = _view(state, forest, nodes, keys[:, layer], rule, endings, live, layer)
        draws = rule.verify(view)
        if observer is not None:
            observer.verified(view, draws)
        live = _advance(view, weight, draws)
        each.append(verified(view, draws, live, state.finished.score.shape[1]))
    layers = stack_layers(each)
    progress = progress_of(state, layers, state.active, broken)
    last = (progress.steps - 1).clamp(min=0)
    return VerifiedForest(
        live=Live(*(_at_layer(getattr(layers.live, item.name), last) for item in fields(Live))),
        steps=progress.steps,
        width_sum=(layers.live.valid.sum(2) * progress.active).sum(1),
        done=progress.done,
        invalid=progress.invalid,
        counters=counters(forest, layers, progress.active),
        before=None if state.trace is None else layers.before,
    )


def _path_noise(path: Tensor, tokens: Tensor, greedy_rows: Tensor | None) -> Tensor | None:
    """Return G(x, v) of every node's candidates, [R, N, C], made at once. It is enough, because every live beam of a
    layer that is used is a node. Return None where it would be much more than the live nodes need."""
    if tokens.numel() > MOST_NOISE:
        return None
    return path_gumbel(path, tokens, greedy_rows)


def _at_layer(values: Tensor, layer: Tensor) -> Tensor:
    """Select one layer [R] for each row from the values [R, L, W] of all layers: [R, W]."""
    wide = layer.view(-1, 1, 1).expand(-1, 1, values.shape[2])
    return values.gather(1, wide).squeeze(1)


def _view(
    state: BatchState,
    forest: Forest,
    nodes: Nodes,
    keys: Tensor,
    rule: Rule,
    endings: Endings,
    live: Live,
    layer: int,
) -> tuple[LayerView, Tensor]:
    """Return the rule's view of one layer, with the target's distribution over its live beams, and the running weight
    of every child, [R, W, C]. keys: of the layer's streams."""
    known = live.node.clamp(min=0)
    own = nodes.candidates.at(known)
    logprob = torch.where(live.valid, live.logprob, NEG_INF).unsqueeze(-1) + own.logprobs
    if rule.sampler.random:
        distribution = pool_distribution(own, live.weight, live.valid, state.warp)
        log_p, weight = distribution.log_p, distribution.weight
    else:
        log_p = weight = logprob
    row_beams = state.limits.row_beams
    view = LayerView(
        log_p=log_p,
        tokens=own.tokens,
        ends=endings.ends(nodes.stop_state.gather(1, known), own.tokens),
        logprob=logprob,
        node=live.node,
        valid=live.valid,
        path=nodes.path.gather(1, known),
        full=own.full,
        drafts=_drafts(forest, layer),
        width=torch.full_like(state.row_key, state.method.num_beams) if row_beams is None else row_beams,
        dynamic=state.method.dynamic,
        keys=keys,
        num_beams=state.method.num_beams,
        row_beams=row_beams,
        noise=None if nodes.noise is None else at_nodes(nodes.noise, known),
        greedy_rows=state.warp.greedy_rows,
    )
    method = state.method
    if method.dynamic and view.drafts is not None:
        assert view.drafts.distribution is not None
        q = draft_log_probs_at(view, view.drafts).exp()
        p = view.log_p.flatten(1).to(torch.float64).exp()
        # of a merged layer only the sampled nodes: which deterministic ones are in it depends on the draws
        drawn = view.drafts.distribution.log_drawn.shape[1]
        view.width = expected_width(
            p, q, drawn, method.value(WIDTH_THRESHOLD), method.value(MIN_WIDTH), method.num_beams
        )
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
        distribution=forest.distributions[layer],
        above_weight=forest.layers[layer].weight,
    )


def _advance(view: LayerView, weight: Tensor, draws: LayerDraws) -> Live:
    """Return the live draws as beams of the next step."""
    beam, token = view.pair(draws.index)
    return Live(
        parent=view.node.gather(1, beam),
        token=token,
        node=draws.node,
        valid=draws.valid,
        weight=weight.flatten(1).gather(1, draws.index),
        logprob=view.logprob.flatten(1).gather(1, draws.index),
    )
