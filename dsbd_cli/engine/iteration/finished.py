"""Progress of each row in a verification, hypotheses that finished in it, and the counters, computed over all layers at
once.

The draws of a layer do not depend on what finished above it. It only decides whether they are used. So all layers are
verified first, and then the ends of all of them are processed together, in a few operations instead of some sixty per
layer.

Letters: R requests, W beams, L = D + 1 layers, F finished hypotheses kept, E new ones that a layer can bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.report import SECOND, LayerCounters
from dsbd_cli.engine.core.topk import NEG_INF, best_first
from dsbd_cli.engine.iteration.batch_state import BatchState, Limits
from dsbd_cli.engine.verify.base import LayerDraws, LayerView


@dataclass(slots=True)
class Live:
    """Live beams of one step: the pair (parent node, token) of each, its forest node if it was drafted (else -1), and
    its scores. All [R, W]."""

    parent: Tensor
    token: Tensor
    node: Tensor
    valid: Tensor
    weight: Tensor
    logprob: Tensor


@dataclass(slots=True)
class Verified:
    """Parts of one verified layer that are kept. None of them is as large as the pool. Of all layers together, after
    `stack_layers`, every field has the layers as its second dimension: [R, L, ...].

    Attributes:
        live: beams of the next step. countable, passed, accepted: as in LayerDraws.
        before, before_valid: [R, W], nodes of the beams that the step began with, and which of them are valid. width:
            [R].
        logprob, node, token: [R, F], the best pairs that ended here: raw score (-inf: none), parent node, last token.
    """

    live: Live
    countable: Tensor
    passed: Tensor
    accepted: Tensor
    before: Tensor
    before_valid: Tensor
    width: Tensor
    logprob: Tensor
    node: Tensor
    token: Tensor


def verified(view: LayerView, draws: LayerDraws, live: Live, kept: int) -> Verified:
    """Return the parts of a verified layer that the end of verify_forest needs. kept: F."""
    flat = view.logprob.flatten(1).masked_fill(~draws.ends, NEG_INF)
    before, before_valid = view.node, view.valid
    if (more := kept - before.shape[1]) > 0:  # a step that began with fewer beams
        pad = torch.nn.functional.pad
        before, before_valid = pad(before, (0, more), value=-1), pad(before_valid, (0, more))
        flat = pad(flat, (0, max(0, kept - flat.shape[1])), value=NEG_INF)
    ended, index = best_first(flat, kept)
    beam, token = view.pair(index.clamp(max=draws.ends.shape[1] - 1))
    return Verified(
        live=live,
        countable=draws.countable,
        passed=draws.passed,
        accepted=draws.accepted,
        before=before,
        before_valid=before_valid,
        width=view.width,
        logprob=ended,
        node=view.node.gather(1, beam),
        token=token,
    )


def stack_layers(layers: list[Verified]) -> Verified:
    """Join the layers of a forest in one record."""

    def stack(name: str, records: Sequence[object]) -> Tensor:
        return torch.stack([getattr(record, name) for record in records], 1)

    live = Live(*(stack(item.name, [layer.live for layer in layers]) for item in fields(Live)))
    return Verified(live, *(stack(item.name, layers) for item in fields(Verified) if item.name != "live"))


@dataclass(slots=True)
class Progress:
    """Progress of each row: active [R, L] bool, the layers that count; steps [R], their number; done, invalid [R]
    bool."""

    active: Tensor
    steps: Tensor
    done: Tensor
    invalid: Tensor


def progress_of(state: BatchState, layers: Verified, rows: Tensor, broken: Tensor) -> Progress:
    """Add new hypotheses to the best finished ones, layer by layer, until a layer does not pass or the request is done.
    layers: all of them, stacked. rows: [R] bool, rows that are verified. broken: [R, N] bool, nodes with NaN. A request
    whose layer begins with one takes no further step and is invalid. Updates `state.finished`.

    The end test is that of transformers: no live beam, scored at its present length, beats the worst of the best W
    finished ones, where W is the row's. With early_stopping "never" and a length penalty above 0 it is scored at the
    largest length.
    """
    finished, limits, live = state.finished, state.limits, layers.live
    number = torch.arange(1, live.valid.shape[1] + 1, device=rows.device)
    length = state.beams.length.unsqueeze(1) + number  # [R, L]
    scale = _power(length, limits.length_penalty.unsqueeze(1))
    out_of_length = length >= limits.max_new.unsqueeze(1)
    cut = torch.where(layers.countable & out_of_length.unsqueeze(2), live.logprob, NEG_INF)
    logprob = torch.cat((layers.logprob, cut), 2)  # [R, L, E]
    best_score, index = finished.best_after(logprob / scale.unsqueeze(2))
    worst = best_score[:, :, -1]
    if limits.row_beams is not None:
        best_score, worst = _best_of_row(best_score, limits.row_beams)
    full = worst > NEG_INF
    best_scale = _best_scale(limits, scale) if limits.any_never else scale
    best_live = torch.where(live.valid, live.logprob, NEG_INF).amax(2) / best_scale
    cannot_improve = full & (best_live <= worst)
    done = out_of_length | cannot_improve | (limits.early.unsqueeze(1) & full) | ~live.valid.any(2)
    goes_on = layers.passed & ~done
    at_beams = broken.gather(1, layers.before.clamp(min=0).flatten(1)).view_as(layers.before)
    begins_broken = (at_beams & layers.before_valid).any(2)
    reached = torch.cat((rows.unsqueeze(1), goes_on[:, :-1]), 1)
    active = (reached & ~begins_broken).to(torch.int64).cumprod(1)
    so_far = torch.cat((torch.ones_like(active[:, :1]), active[:, :-1]), 1) > 0
    invalid = (so_far & reached & begins_broken).any(1)
    steps = active.sum(1)
    by_length = torch.arange(logprob.shape[2], device=rows.device) >= layers.logprob.shape[2]
    new = {
        "logprob": logprob,
        "length": length.unsqueeze(2).expand_as(logprob),
        "by_length": by_length.expand_as(logprob),
        "origin": torch.full_like(logprob, -1, dtype=torch.int64),
        "node": torch.cat((layers.node, live.parent), 2),
        "token": torch.cat((layers.token, live.token), 2),
    }
    finished.take(new, best_score, index, steps)
    active = active.to(torch.bool)
    return Progress(active, steps, (done & active).any(1) | invalid, invalid)


def _best_of_row(score: Tensor, row_beams: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores [R, L, F] with -inf behind the best W of each row, and the W-th of them [R, L]. row_beams: W,
    [R]."""
    beyond = torch.arange(score.shape[2], device=score.device) >= row_beams.unsqueeze(1)
    last = (row_beams - 1).view(-1, 1, 1).expand(-1, score.shape[1], 1)
    return score.masked_fill(beyond.unsqueeze(1), NEG_INF), score.gather(2, last).squeeze(2)


def _best_scale(limits: Limits, scale: Tensor) -> Tensor:
    """Return what the log-probability of a live beam is divided by where it is compared with finished hypotheses,
    [R, L]. scale: that of its present length."""
    longest = _power(limits.max_new, limits.length_penalty).unsqueeze(1)
    return torch.where((limits.never & (limits.length_penalty > 0)).unsqueeze(1), longest, scale)


def _power(length: Tensor, penalty: Tensor) -> Tensor:
    """Return length ** penalty in float32. torch's pow is not used, because it gives the last few numbers of a tensor
    other bits than the others."""
    return torch.exp(penalty.to(torch.float64) * torch.log(length.to(torch.float64))).to(torch.float32)


def counters(forest: Forest, layers: Verified, active: Tensor) -> Tensor:
    """Return the LayerCounters of the drafted layers: [R, D, fields] int64. layers: all of them, stacked. active:
    [R, L] bool."""
    depth = forest.depth
    if not depth:
        return active.new_zeros(len(active), 0, len(LayerCounters._fields), dtype=torch.int64)
    drafted, parent, drafter_id = (
        value[:, forest.num_beams :].view(len(value), depth, -1)
        for value in (forest.flat.valid, forest.flat.parent, forest.flat.drafter_id)
    )
    before, before_valid = layers.before[:, :depth].unsqueeze(2), layers.before_valid[:, :depth].unsqueeze(2)
    has_live_parent = ((parent.unsqueeze(3) == before) & before_valid).any(3) & drafted
    passed, reached = layers.passed[:, :depth], active[:, :depth]
    node, valid = layers.live.node[:, :depth], layers.live.valid[:, :depth]
    offset = forest.num_beams + forest.drafts_per_layer * torch.arange(depth, device=node.device)
    column = torch.where(valid & (node >= 0), node - offset.unsqueeze(1), -1)  # [R, D, W]
    accepted, drafted_by = column >= 0, drafter_id.gather(2, column.clamp(min=0))
    columns = [  # in the order of LayerCounters
        reached,
        drafted.sum(2),
        has_live_parent.sum(2),
        layers.width[:, :depth],
        layers.accepted[:, :depth],
        passed & reached,
        torch.where(drafted_by == SECOND, 0, column + 1).amax(2) * passed,
        (drafter_id * drafted).sum(2),
        (accepted * drafted_by).sum(2),
    ]
    return torch.stack([column.to(torch.int64) for column in columns], 2)
