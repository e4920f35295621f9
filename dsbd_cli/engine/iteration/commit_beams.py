"""The commit, which writes the results of a verified iteration into the state of a batch."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.nodes import at_nodes
from dsbd_cli.engine.core.noise import extend_path
from dsbd_cli.engine.core.slots import compact
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.base import Endings
from dsbd_cli.engine.iteration.batch_state import BatchState
from dsbd_cli.engine.iteration.finished import Live
from dsbd_cli.engine.iteration.verify_forest import VerifiedForest


def commit_beams(
    state: BatchState,
    forest: Forest,
    outcome: VerifiedForest,
    live: Live,
    endings: Endings,
    run: int,
) -> tuple[Tensor, Tensor]:
    """Make the final beams the live ones and compact their slots. Return source and destination [R, T] of the slots
    that the caches must copy. run: first nodes of each row that the draft has run."""
    beams, table = state.beams, state.table
    _store_finished(state, forest, outcome)
    going = state.active & ~outcome.done.to(torch.bool)
    live.valid = live.valid & going.unsqueeze(1)
    steps = outcome.steps.unsqueeze(1).expand_as(live.parent)
    beams.history = _history(beams.history, beams.length, forest, live.parent, live.token, steps)
    ancestors = at_nodes(forest.flat.ancestors, live.parent)
    run_by_draft = table.used + run if run else table.drafted
    moved = compact(table, ancestors, live.valid, run_by_draft)
    beams.valid, beams.token, beams.weight, beams.logprob = live.valid, live.token, live.weight, live.logprob
    beams.path = extend_path(forest.flat.path.gather(1, live.parent), live.token)
    state_before = forest.flat.stop_state.gather(1, live.parent)
    beams.stop_state, beams.ancestors = endings.step(state_before, live.token), moved.ancestors
    beams.length = beams.length + outcome.steps
    beams.depth = beams.depth + outcome.steps
    state.iteration = state.iteration + 1
    return moved.src_slots, moved.dst_slots


def nodes_run(forest: Forest, *, draft_guesses: bool) -> int:
    """Return how many nodes of a forest the draft has run: all layers above the last one that it drafted.

    draft_guesses: drafted nodes count as not run.
    """
    layers = min(forest.layers_run, 1) if draft_guesses else forest.layers_run
    return forest.offset(layers) if layers else 0


def best_only(live: Live) -> Live:
    """Keep only the best beam of each row, at index 0."""
    best = torch.where(live.valid, live.logprob, NEG_INF).argmax(1, keepdim=True)
    width = live.valid.shape[1]
    only = Live(*(getattr(live, item.name).gather(1, best).repeat(1, width) for item in fields(live)))
    only.valid &= torch.arange(width, device=best.device) == 0
    return only


def _history(history: Tensor, length: Tensor, forest: Forest, parent: Tensor, token: Tensor, steps: Tensor) -> Tensor:
    """Return the generated tokens [R, m, L] of pairs (parent node, token) [R, m]: their root's history, the path to the
    parent, the token.

    Entries past the new length are meaningless, and are overwritten later.
    """
    path = forest.path_to(parent, token, steps)
    taken = at_nodes(history, forest.flat.root.gather(1, parent))
    at = length.unsqueeze(1) + torch.arange(path.shape[2], device=path.device)
    at = at.clamp(max=history.shape[2] - 1).unsqueeze(1).expand_as(path)
    return taken.scatter(2, at, path)


def _store_finished(state: BatchState, forest: Forest, outcome: VerifiedForest) -> None:
    """Write the tokens of hypotheses that finished in this iteration."""
    finished, beams = state.finished, state.beams
    steps = finished.length - beams.length.unsqueeze(1)
    steps = steps.clamp(1, forest.depth + 1)
    # nodes of older entries belong to an earlier forest, perhaps a larger one; what is gathered for them is not used
    parent = finished.node.clamp(0, forest.offset(forest.depth + 1) - 1)
    finished.store_tokens(_history(beams.history, beams.length, forest, parent, finished.token, steps))


def pack_counters(state: BatchState, outcome: VerifiedForest) -> Tensor:
    """Join all counters of an iteration in one tensor: RowCounters, then LayerCounters of D layers, [R, ...] int64."""
    table = state.table
    rows = [
        outcome.done,
        outcome.invalid,
        outcome.steps,
        outcome.width_sum,
        table.used,
        table.common_prefix,
        table.drafted,
    ]
    return torch.cat((torch.stack([value.to(torch.int64) for value in rows], 1), outcome.counters.flatten(1)), 1)
