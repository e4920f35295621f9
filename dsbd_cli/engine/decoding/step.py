"""One iteration: draft a forest, run the target once over it, walk it, commit what survives. Device tensors in and out.

Nothing is read back to the host except one small tensor of counters at the end (`Report`), the iteration's only
synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dsbd_cli.engine.core.forest import Forest, at_nodes
from dsbd_cli.engine.core.legal import FREE, Constraint, Legal, NodePaths, acting
from dsbd_cli.engine.core.noise import extend_path, stream_keys
from dsbd_cli.engine.core.probs import NEVER, Candidates, LegalTokens, Room, top_candidates
from dsbd_cli.engine.core.protocols import ForestInput
from dsbd_cli.engine.core.sheet import Sheet
from dsbd_cli.engine.core.slots import Layout, compact
from dsbd_cli.engine.core.stops import NO_STOPS
from dsbd_cli.engine.decoding.caches import Caches
from dsbd_cli.engine.decoding.ending import COUNTERS, Live
from dsbd_cli.engine.decoding.fused import committed, fits_commit, fits_sheet, fits_walk, walked
from dsbd_cli.engine.decoding.graphs import IterationGraphs, shapes
from dsbd_cli.engine.decoding.observer import Observer
from dsbd_cli.engine.decoding.planner import Shape
from dsbd_cli.engine.decoding.state import BatchState
from dsbd_cli.engine.decoding.timing import PhaseTimer
from dsbd_cli.engine.decoding.walk import Walk, walk
from dsbd_cli.engine.drafting.base import DraftContext, Drafter, Endings
from dsbd_cli.engine.drafting.beam import MERGED_LAG, run
from dsbd_cli.engine.verify.base import Rule

__all__ = ["Plan", "Report", "Stepper", "Work"]

PHASES = ("draft", "target", "verify")
ROW_FIELDS = ("done", "invalid", "steps", "width_sum", "used", "trunk", "drafted")


@dataclass(slots=True)
class Report:
    """Counters of one iteration, on the host: rows[r][field], layers[r][layer][field]."""

    rows: list[dict[str, int]]
    layers: list[list[dict[str, int]]]
    draft_calls: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Shapes of one iteration, chosen on the host.

    Attributes:
        slots: S, active cache slots. shape: D and K.
        lag: most used slots of a row that the draft has not run, or more.
        idle: the draft runs nothing, and holds no slot of any row's tail.
        settled, tail: of ForestInput, for the target. generated: tokens that every running row has at least.
        beams: roots of the forest. W, or 1 where every running row has its first beam alone.
    """

    slots: int
    shape: Shape
    lag: int
    idle: bool = False
    settled: tuple[int, ...] | None = None
    tail: int = 0
    generated: int = 0
    beams: int = 0

    @property
    def nodes(self) -> int:
        """N."""
        return self.shape.nodes(self.beams)


class Work:
    """Results of the phases of one iteration, each read by the next."""

    context: DraftContext
    forest: Forest
    draft_calls: int
    legal_tokens: LegalTokens | None
    logits: Tensor
    counters: Tensor

    def drop(self) -> None:
        """Let go of what no later iteration reads: each captured shape would hold logits of its own."""
        for name in ("context", "forest", "logits", "legal_tokens"):
            vars(self).pop(name, None)  # a replay makes none


class Stepper:
    """Runs iterations of one batch. `steady`: the last one took the time that its shape will take again."""

    def __init__(
        self,
        caches: Caches,
        drafter: Drafter,
        rule: Rule,
        endings: Endings,
        timer: PhaseTimer,
        graphs: IterationGraphs[Work] | None = None,
        stopping: Callable[[], bool] = lambda: False,
        constraints: Sequence[Constraint] = (),
        kernels: frozenset[str] = frozenset(),
    ) -> None:
        """graphs: where iterations are captured; None runs them plainly. stopping: an iteration is to end in its
        middle, by raising Stopped. constraints: of the rows' answers. kernels: names of those in use."""
        self.caches, self.drafter, self.kernels = caches, drafter, kernels
        self.rule, self.endings, self.timer, self.graphs = rule, endings, timer, graphs
        self.stopping, self.constraints = stopping, constraints
        self.steady = True
        self.observer = Observer()
        limits = [model.max_positions for model in caches.models if model.max_positions]
        self.last_position = min(limits, default=2**31) - 1

    def step(self, state: BatchState, plan: Plan) -> Report:
        """One iteration, as docs/algorithm.md counts it: W live beams, K drafts in each of D layers."""
        work = Work()
        legal = acting(self.constraints, state.legal_starts, plan.generated) if self.constraints else None

        def draft() -> None:
            # 1. Draft: below the live beams, D times K pairs of the draft's pool, with the law Q they were drawn from
            work.context = self._context(state, plan, legal)
            work.forest = self.drafter.propose(work.context)
            work.draft_calls = self.drafter.calls
            if self.observer.looks:
                self.observer.drafted(work.context, work.forest)

        def target() -> None:
            # 2. One target forward over all W + D*K nodes: each sees the prompt, its own ancestors and itself
            work.legal_tokens = None if legal is None else legal.of(NodePaths.of(work.forest, state.beams))
            work.logits = self._target(state, plan, work.forest, work.context)

        def verify() -> None:
            # 3. Verify layer by layer: a layer passes if it yields its width in live beams. The first that does not is
            #    completed by the exact law, and so is the bonus layer below the last one
            candidates = self._candidates(state, work.forest, work.logits, work.legal_tokens)
            self.drafter.learn(work.forest, candidates)
            if self._walks(state, work.forest, candidates):
                outcome = walked(state, work.forest, candidates, self.rule, self.endings, work.context.keys)
            else:
                looking = self.observer if self.observer.looks else None
                outcome = walk(state, work.forest, candidates, self.rule, self.endings, work.context.keys, looking)
            # 4. Commit: both caches keep only the ancestors of the live beams
            if state.trace is not None:
                _record(state, work.forest, candidates, work.logits, outcome)
            work.counters = self._commit(state, work.forest, outcome, plan.idle, legal)

        phases, slower = (draft, target, verify), self._slower()
        self.steady = plan.beams == state.method.num_beams
        if plan.beams < state.method.num_beams:
            state.beams = state.beams.first()
        self.timer.start()
        if self.graphs is None or self.observer.looks or (legal is not None and legal.on_host):
            for name, phase in zip(PHASES, phases, strict=True):
                with self.observer.span(name):
                    phase()
                self.timer.lap(name)
        else:
            key = (replace(plan, generated=0), legal and legal.key, *self._static(state))
            work = self.graphs.run(key, state, work, phases, lambda number: self.timer.lap(PHASES[number]))
            self.steady = self.graphs.steady
        self.steady = self.steady and self._slower() == slower
        work.drop()
        return _report(work.counters, work.draft_calls)

    def _slower(self) -> int:
        """Forwards of the models so far whose time says nothing of the next one's."""
        return sum(getattr(model, "slower_forwards", 0) for model in self.caches.models)

    def _static(self, state: BatchState) -> tuple[Hashable, ...]:
        """Everything beside the plan that fixes shapes, branches or addresses of an iteration."""
        warp = state.warp
        return (
            shapes(state),
            (warp.max_top_k, warp.all_top_k, warp.even_top_k, warp.any_top_p, warp.any_min_p, warp.any_cold),
            self.endings.stops.version if self.endings.stops.used else None,
        )

    def _candidates(self, state: BatchState, forest: Forest, logits: Tensor, legal: LegalTokens | None) -> Candidates:
        """The target's best tokens of every node, enough for every draw of the rule."""
        vocabulary = logits.shape[-1]
        room = self.rule.sampler.candidates(state.method.num_beams, self.endings.num_eos, state.warp, vocabulary)
        if self.endings.stops.used and not self.rule.sampler.random:
            # any number of tokens may complete a stop string, but only of the rows that have one
            own = torch.where(forest.flat.stop_state == NO_STOPS, room.count, vocabulary)
            room = Room(vocabulary, own, room.count)
        return top_candidates(logits, room, legal, kernel="candidates" in self.kernels)

    def _context(self, state: BatchState, plan: Plan, legal: Legal | None) -> DraftContext:
        sheet = self._sheet(state, plan, legal)
        if sheet is not None:
            return self._drafting(state, plan, legal, sheet.keys, None, sheet)
        table, shape, nodes = state.table, plan.shape, plan.nodes
        layer_of = torch.arange(nodes, device=table.used.device) - plan.beams
        layer_of = torch.div(layer_of, shape.drafts_per_layer, rounding_mode="floor") + 1
        layer_of[: plan.beams] = 0
        # drafts past the last position can never be taken, but must be embeddable
        positions = (state.beams.depth.unsqueeze(1) + layer_of).clamp(max=self.last_position)
        layout = Layout.of(table, nodes, state.beams.ancestors.shape[-1], plan.slots)
        table.positions.scatter_(1, layout.slots, positions)
        keys = stream_keys(state.row_key, state.iteration, shape.depth + 1)
        return self._drafting(state, plan, legal, keys, layout, None)

    def _drafting(
        self,
        state: BatchState,
        plan: Plan,
        legal: Legal | None,
        keys: Tensor,
        layout: Layout | None,
        sheet: Sheet | None,
    ) -> DraftContext:
        table, shape = state.table, plan.shape
        return DraftContext(
            beams=state.beams,
            table=table,
            placed=layout,
            sampler=self.rule.sampler,
            drafts_end=self.rule.drafts_end,
            warp=state.warp,
            endings=self.endings,
            depth=shape.depth,
            drafts_per_layer=shape.drafts_per_layer,
            slots=plan.slots,
            trash=table.positions.shape[1] - 1,
            row_key=state.row_key,
            iteration=state.iteration,
            keys=keys,
            lag=plan.lag,
            record_law=self.rule.needs_law or state.method.dynamic or self.observer.looks,
            prompts=state.prompts,
            stopping=self.stopping,
            legal=legal,
            kernels=self.kernels,
            sheet=sheet,
        )

    def _sheet(self, state: BatchState, plan: Plan, legal: Legal | None) -> Sheet | None:
        """Where kernels write this iteration's forest, with its roots; None where tensor code makes it."""
        if "draft" not in self.kernels or legal is not None or not self.drafter.on_sheet or self.observer.looks:
            return None
        method, shape = state.method, plan.shape
        model = self.drafter.model
        width = 0 if model is None else min(model.vocab_size, self.caches.target.vocab_size)
        room = self.rule.sampler.candidates(method.num_beams, 1, state.warp, width).at_least(
            min(shape.drafts_per_layer + 8, width)
        )
        late = plan.lag if shape.depth else 0
        if late > MERGED_LAG or (
            shape.depth
            and not fits_sheet(
                method.rule, max(plan.beams, shape.drafts_per_layer), shape.drafts_per_layer, min(room.count, width)
            )
        ):
            return None
        return Sheet.begin(
            method.rule,
            state.beams,
            state.table,
            (state.row_key, state.iteration),
            layers=shape.depth,
            drafts=shape.drafts_per_layer,
            slots=plan.slots,
            late=late,
            last_position=self.last_position,
        )

    def _walks(self, state: BatchState, forest: Forest, candidates: Candidates) -> bool:
        """The kernel walks."""
        return "walk" in self.kernels and not self.observer.looks and fits_walk(state, forest, candidates)

    def _target(self, state: BatchState, plan: Plan, forest: Forest, context: DraftContext) -> Tensor:
        """Target logits of all nodes: [R, N, V]."""
        prompt = None
        if self.caches.target.device.type != "cpu":
            # the trunk, which is there; where bits are promised the prompt without its last token, which is the root
            prompt = state.table.trunk if plan.settled is None else state.beams.depth - state.beams.length
        if context.sheet is not None:
            batch = replace(context.sheet.input(0, plan.nodes), settled=plan.settled, tail=plan.tail, prompt=prompt)
            logits = run(self.caches.target, batch, state.table.used.device)
            assert logits is not None
            return logits
        table, tokens, at = state.table, forest.flat.token, context.layout.slots
        table.tokens.scatter_(1, at, tokens)
        batch = ForestInput(
            tokens=tokens,
            positions=table.positions.gather(1, at),
            slots=at,
            mask=context.layout.mask(forest.flat.ancestors),
            slot_positions=table.positions[:, : context.slots],
            settled=plan.settled,
            tail=plan.tail,
            prompt=prompt,
        )
        logits = run(self.caches.target, batch, table.used.device)
        assert logits is not None
        return logits

    def _commit(self, state: BatchState, forest: Forest, outcome: Walk, idle: bool, legal: Legal | None) -> Tensor:
        """Final beams become the live beams; both caches keep only their ancestors. Returns the counters."""
        beams, live, table = state.beams, outcome.live, state.table
        if state.method.memory_saving:
            live = _best_only(live)
        if "commit" in self.kernels and fits_commit(state):
            report = _pack(state, outcome) if outcome.report is None else outcome.report
            source, target = committed(state, forest, live, report, self.endings)
            self.caches.move(source, target, table.trunk, table.drafted, draft=not idle)
            self._limit(state, forest, live, legal)
            return report
        _settle(state, forest, outcome)
        going = state.active & ~outcome.done.to(torch.bool)
        live.valid = live.valid & going.unsqueeze(1)
        beams.history = _history(beams.history, beams.length, forest, live.parent, live.token, outcome.steps)
        ancestors = at_nodes(forest.flat.ancestors, live.parent)
        # the draft has run all layers but the last; without a drafted layer nothing new
        run_by_draft = table.used + forest.offset(forest.depth) if forest.depth else table.drafted
        moved = compact(table, ancestors, live.valid, run_by_draft)
        self.caches.move(moved.source, moved.target, table.trunk, table.drafted, draft=not idle)
        beams.valid, beams.token, beams.weight, beams.logprob = live.valid, live.token, live.weight, live.logprob
        beams.path = extend_path(forest.flat.path.gather(1, live.parent), live.token)
        state_before = forest.flat.stop_state.gather(1, live.parent)
        beams.stop_state, beams.ancestors = self.endings.step(state_before, live.token), moved.ancestors
        self._limit(state, forest, live, legal)
        beams.length = beams.length + outcome.steps
        beams.depth = beams.depth + outcome.steps
        state.iteration = state.iteration + 1
        return _pack(state, outcome)

    def _limit(self, state: BatchState, forest: Forest, live: Live, legal: Legal | None) -> None:
        """Legal states of the new beams."""
        beams = state.beams
        if legal is not None:
            assert forest.flat.legal_state is not None
            beams.legal_state = legal.step(forest.flat.legal_state.gather(1, live.parent), live.token)
        elif beams.legal_state.shape != live.token.shape:
            beams.legal_state = torch.full_like(live.token, FREE)


def _record(state: BatchState, forest: Forest, candidates: Candidates, logits: Tensor, outcome: Walk) -> None:
    """Log-probabilities of this iteration's tokens, for rows that ask for them."""
    live, trace = outcome.live, state.trace
    assert trace is not None
    assert outcome.before is not None
    if state.method.memory_saving:
        live = _best_only(live)
    place = (state.beams, state.finished, forest, candidates, logits, outcome.before)
    trace.follow(*place, live.parent, live.token, outcome.steps)


def _best_only(live: Live) -> Live:
    """The best beam alone, in the first place."""
    best = torch.where(live.valid, live.logprob, NEVER).argmax(1, keepdim=True)
    width = live.valid.shape[1]
    only = Live(*(getattr(live, item.name).gather(1, best).repeat(1, width) for item in fields(live)))
    only.valid &= torch.arange(width, device=best.device) == 0
    return only


def _history(history: Tensor, length: Tensor, forest: Forest, parent: Tensor, token: Tensor, steps: Tensor) -> Tensor:
    """Generated tokens of pairs (parent node, token) [R, m]: their root's history, the path to the parent, the token.

    What stands past the new length is meaningless and overwritten later.
    """
    path = at_nodes(forest.flat.path_tokens, parent)
    path = torch.nn.functional.pad(path, (0, 1))
    last = (steps - 1).clamp(min=0)
    last = last.unsqueeze(1).expand_as(parent) if last.dim() == 1 else last
    path = path.scatter(2, last.unsqueeze(-1), token.unsqueeze(-1))
    taken = at_nodes(history, forest.flat.root.gather(1, parent))
    at = length.unsqueeze(1) + torch.arange(path.shape[2], device=path.device)
    at = at.clamp(max=history.shape[2] - 1).unsqueeze(1).expand_as(path)
    return taken.scatter(2, at, path)


def _settle(state: BatchState, forest: Forest, outcome: Walk) -> None:
    """Write the tokens of hypotheses that finished in this iteration."""
    finished, beams = state.finished, state.beams
    steps = finished.length - beams.length.unsqueeze(1)
    steps = steps.clamp(1, forest.depth + 1)
    # older entries were nodes of another forest, perhaps a larger one; what they would take is not used
    parent = finished.node.clamp(0, forest.offset(forest.depth + 1) - 1)
    finished.settle(_history(beams.history, beams.length, forest, parent, finished.token, steps))


def _pack(state: BatchState, outcome: Walk) -> Tensor:
    """All counters of an iteration in one tensor: [R, ROW_FIELDS + D * COUNTERS] int64."""
    table = state.table
    rows = [outcome.done, outcome.invalid, outcome.steps, outcome.width_sum, table.used, table.trunk, table.drafted]
    return torch.cat((torch.stack([value.to(torch.int64) for value in rows], 1), outcome.counters.flatten(1)), 1)


def _report(counters: Tensor, draft_calls: int) -> Report:
    """The iteration's only transfer to the host."""
    table = counters.tolist()
    first, width = len(ROW_FIELDS), len(COUNTERS)
    return Report(
        rows=[dict(zip(ROW_FIELDS, line[:first], strict=True)) for line in table],
        layers=[
            [dict(zip(COUNTERS, line[start : start + width], strict=True)) for start in range(first, len(line), width)]
            for line in table
        ],
        draft_calls=draft_calls,
    )
