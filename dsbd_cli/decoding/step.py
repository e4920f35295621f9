"""One iteration: draft a forest, run the target once over it, walk it, commit what survives. Device tensors in and out.

Nothing is read back to the host except one small tensor of counters at the end (`Report`), the iteration's only
synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dsbd_cli.core.forest import Forest
from dsbd_cli.core.probs import NEVER, top_candidates
from dsbd_cli.core.protocols import ForestInput, ForestModel
from dsbd_cli.core.slots import compact, node_slots, visible
from dsbd_cli.decoding.state import BatchState
from dsbd_cli.decoding.timing import PhaseTimer
from dsbd_cli.decoding.walk import Live, Walk, walk
from dsbd_cli.drafting.base import DraftContext, Drafter, Endings
from dsbd_cli.drafting.beam import run
from dsbd_cli.verify.base import Rule

__all__ = ["Report", "Stepper"]

ROW_FIELDS = ("done", "invalid", "steps", "width_sum", "used", "trunk", "late")
LAYER_FIELDS = ("reached", "drafted", "live_parents", "width", "accepted", "passed")


@dataclass(slots=True)
class Report:
    """Counters of one iteration, on the host: rows[r][field], layers[r][layer][field]."""

    rows: list[dict[str, int]]
    layers: list[list[dict[str, int]]]


class Stepper:
    """Runs iterations of one batch."""

    def __init__(
        self,
        target: ForestModel,
        draft: ForestModel | None,
        drafter: Drafter,
        rule: Rule,
        endings: Endings,
        timer: PhaseTimer,
    ) -> None:
        self.target, self.draft, self.drafter = target, draft, drafter
        self.rule, self.endings, self.timer = rule, endings, timer
        self.num_eos = int(endings.eos.sum())
        limits = [model.max_positions for model in (target, draft) if model is not None and model.max_positions]
        self.last_position = min(limits, default=2**31) - 1

    def step(self, state: BatchState, slots: int, late: bool) -> Report:
        """One iteration. slots: S active cache slots; late: the draft misses some beam's parent."""
        self.timer.start()
        forest = self.drafter.propose(self._context(state, slots, late))
        self.timer.lap("draft")
        logits = self._target(state, forest, slots)
        self.timer.lap("target")
        size = self.rule.candidates(state.method.num_beams, self.num_eos, state.warp.max_top_k, logits.shape[-1])
        if self.endings.stops.used and not self.rule.warps:
            size = logits.shape[-1]  # any number of tokens may complete a stop string
        outcome = walk(state, forest, top_candidates(logits, size), self.rule, self.endings)
        counters = _pack(state, outcome, self._commit(state, forest, outcome))
        self.timer.lap("verify")
        return _report(counters)

    def _context(self, state: BatchState, slots: int, late: bool) -> DraftContext:
        method, table = state.method, state.table
        nodes = method.num_beams + method.depth * method.drafts_per_layer
        layer_of = torch.arange(nodes, device=table.used.device) - method.num_beams
        layer_of = torch.div(layer_of, method.drafts_per_layer, rounding_mode="floor") + 1
        layer_of[: method.num_beams] = 0
        # drafts past the last position can never be taken, but must be embeddable
        positions = (state.beams.depth.unsqueeze(1) + layer_of).clamp(max=self.last_position)
        table.positions.scatter_(1, node_slots(table, nodes), positions)
        return DraftContext(
            beams=state.beams,
            table=table,
            rule=self.rule,
            warp=state.warp,
            endings=self.endings,
            depth=method.depth,
            drafts_per_layer=method.drafts_per_layer,
            slots=slots,
            trash=table.positions.shape[1] - 1,
            row_key=state.row_key,
            iteration=state.iteration,
            catch_up=late,
            record_law=self.rule.needs_law or method.width == "threshold",
        )

    def _target(self, state: BatchState, forest: Forest, slots: int) -> Tensor:
        """Target logits of all nodes: [R, N, V]."""
        table = state.table
        ancestors = forest.flat("ancestors")
        at = node_slots(table, ancestors.shape[1])
        batch = ForestInput(
            tokens=forest.flat("token"),
            positions=table.positions.gather(1, at),
            slots=at,
            mask=visible(table, ancestors, slots),
            slot_positions=table.positions[:, :slots],
        )
        return run(self.target, batch, table.used.device)

    def _commit(self, state: BatchState, forest: Forest, outcome: Walk) -> Tensor:
        """Final beams become the live beams; both caches keep only their ancestors. Returns rows where the draft
        lags: [R] bool."""
        beams, live, table = state.beams, outcome.live, state.table
        _settle(state, forest, outcome)
        if state.method.memory_saving:
            live = _best_only(live)
        going = state.active & ~outcome.done
        live.valid = live.valid & going.unsqueeze(1)
        beams.history = _history(beams.history, beams.length, forest, live.parent, live.token, outcome.steps)
        relative = (table.used - table.trunk).unsqueeze(1) + live.parent
        ancestors = _rows(forest.flat("ancestors"), live.parent)
        moved = compact(table, ancestors, live.valid)
        for model in (self.target, self.draft):
            if model is not None:
                model.move(moved.source.to(model.device), moved.target.to(model.device))
        beams.valid, beams.token, beams.weight, beams.logprob = live.valid, live.token, live.weight, live.logprob
        beams.path, beams.stop_state, beams.ancestors = live.path, live.stop_state, moved.ancestors
        beams.parent_slot = moved.where.gather(1, relative)
        beams.parent_token = forest.flat("token").gather(1, live.parent)
        last = forest.offset(forest.depth) if forest.depth else forest.num_beams
        beams.catch_up = live.valid & (live.parent >= last)
        beams.length = beams.length + outcome.steps
        beams.depth = beams.depth + outcome.steps
        state.iteration = state.iteration + 1
        return beams.catch_up.any(1)


def _best_only(live: Live) -> Live:
    """The best beam alone, in the first place."""
    best = torch.where(live.valid, live.logprob, NEVER).argmax(1, keepdim=True)
    width = live.valid.shape[1]
    only = Live(*(getattr(live, item.name).gather(1, best).repeat(1, width) for item in fields(live)))
    only.valid &= torch.arange(width, device=best.device) == 0
    return only


def _rows(value: Tensor, index: Tensor) -> Tensor:
    """value [R, n, X] at index [R, m] -> [R, m, X]."""
    return value.gather(1, index.unsqueeze(-1).expand(-1, -1, value.shape[-1]))


def _history(history: Tensor, length: Tensor, forest: Forest, parent: Tensor, token: Tensor, steps: Tensor) -> Tensor:
    """Generated tokens of pairs (parent node, token) [R, m]: their root's history, the path to the parent, the token.

    What stands past the new length is meaningless and overwritten later.
    """
    path = _rows(forest.flat("path_tokens"), parent)
    path = torch.nn.functional.pad(path, (0, 1))
    last = (steps - 1).clamp(min=0)
    last = last.unsqueeze(1).expand_as(parent) if last.dim() == 1 else last
    path = path.scatter(2, last.unsqueeze(-1), token.unsqueeze(-1))
    taken = _rows(history, forest.flat("root").gather(1, parent))
    at = length.unsqueeze(1) + torch.arange(path.shape[2], device=path.device)
    at = at.clamp(max=history.shape[2] - 1).unsqueeze(1).expand_as(path)
    return taken.scatter(2, at, path)


def _settle(state: BatchState, forest: Forest, outcome: Walk) -> None:
    """Write the tokens of hypotheses that finished in this iteration."""
    finished, beams = state.finished, state.beams
    steps = finished.length - beams.length.unsqueeze(1)
    steps = steps.clamp(1, forest.depth + 1)
    parent = finished.node.clamp(min=0)  # entries without a hypothesis have none
    finished.settle(_history(beams.history, beams.length, forest, parent, finished.token, steps))


def _pack(state: BatchState, outcome: Walk, late: Tensor) -> Tensor:
    """All counters of an iteration in one tensor: [R, ROW_FIELDS + D * LAYER_FIELDS] int64."""
    rows = [outcome.done, outcome.invalid, outcome.steps, outcome.width_sum, state.table.used, state.table.trunk, late]
    columns = [value.to(torch.int64) for value in rows]
    for counts in outcome.layers:
        columns += [getattr(counts, name) for name in LAYER_FIELDS]
    return torch.stack(columns, 1)


def _report(counters: Tensor) -> Report:
    """The iteration's only transfer to the host."""
    table = counters.tolist()
    first, width = len(ROW_FIELDS), len(LAYER_FIELDS)
    return Report(
        rows=[dict(zip(ROW_FIELDS, line[:first], strict=True)) for line in table],
        layers=[
            [
                dict(zip(LAYER_FIELDS, line[start : start + width], strict=True))
                for start in range(first, len(line), width)
            ]
            for line in table
        ],
    )
