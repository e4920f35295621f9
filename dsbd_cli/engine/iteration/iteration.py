"""One iteration: draft a forest, run the target once over it, verify it, commit what survives.

Inputs and results are tensors on the device. Nothing is read back to the host except what a gate asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
from torch import Tensor

from dsbd_cli.engine.cache.caches import Caches
from dsbd_cli.engine.constraints.legal import FREE, Legal, NodePaths
from dsbd_cli.engine.core.candidates import CandidateCount, Candidates, LegalTokens, top_candidates
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.forest_buffer import ForestBuffer, ForestSizes, KernelBuffer, TensorBuffer
from dsbd_cli.engine.core.own_ids import KEPT
from dsbd_cli.engine.drafting.base import DraftContext, Drafter, Endings
from dsbd_cli.engine.drafting.beam import MERGED_BACKLOG, run
from dsbd_cli.engine.iteration.batch_state import BatchState
from dsbd_cli.engine.iteration.commit_beams import best_only, commit_beams, nodes_run, pack_counters
from dsbd_cli.engine.iteration.finished import Live
from dsbd_cli.engine.iteration.iteration_kernels import commit_with_kernel, verification_kernel, verify_with_kernel
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.iteration.verify_forest import VerifiedForest, verify_forest
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.engine.verify.base import Rule
from dsbd_cli.ops.interface import Ops, host_reads


@dataclass(frozen=True, slots=True)
class IterationShape:
    """Shapes of one iteration, chosen on the host.

    Attributes:
        slots: S, active cache slots. depth: D, drafted layers. drafts_per_layer: K. looked_up: of Shape.
        draft_backlog: upper bound of the used slots of a row that the draft has not run.
        idle: the draft runs nothing, and holds no slot of any row's suffix.
        prompt_slots, suffix: of the target's ForestInput. generated: least number of tokens that a running row has
            generated.
        beams: number of roots of a row: W, or 1 where every running row has its first beam alone.
    """

    slots: int
    depth: int
    drafts_per_layer: int
    draft_backlog: int
    looked_up: bool = False
    idle: bool = False
    prompt_slots: tuple[int, ...] | None = None
    suffix: int = 0
    generated: int = 0
    beams: int = 0

    @property
    def nodes(self) -> int:
        """N, nodes of a row."""
        return self.beams + self.depth * self.drafts_per_layer


class DeviceReport:
    """Results of an iteration besides the state: counters [R, ...] int64 as `pack_counters` joins them, and the number
    of draft forwards. A captured iteration writes the same tensors again at every replay."""

    counters: Tensor
    draft_calls: int


@dataclass
class Iteration:
    """One iteration of a batch, with the numbered parts of docs/algorithm.md: W live beams, K drafts in each of D
    layers. Each part stores what the next one reads.

    Attributes:
        state: the batch; the commit rebinds its tensors. shape: its sizes. legal: the constraints that act, if any.
        caches, drafter, rule, endings: of the engine. ops: operations that serve the iteration.
        last_position: the largest that both models have. stopping: returns True once the engine was asked to stop.
        observer: receives what happens. gate: of DraftContext.
        report: results besides the state.
        context: slots and noise keys of the nodes. forest: the drafted nodes. legal_tokens: which tokens may follow
            each node. logits: of the target, [R, N, V]. candidates: its best tokens of each node. outcome: final beams.
    """

    state: BatchState
    shape: IterationShape
    legal: Legal | None
    caches: Caches
    drafter: Drafter
    rule: Rule
    endings: Endings
    ops: Ops
    last_position: int
    stopping: Callable[[], bool]
    observer: Observer
    gate: Callable[[list[float]], bool] | None = None
    report: DeviceReport = field(default_factory=DeviceReport)
    context: DraftContext = field(init=False)
    forest: Forest = field(init=False)
    legal_tokens: LegalTokens | None = field(init=False)
    logits: Tensor = field(init=False)
    candidates: Candidates = field(init=False)
    outcome: VerifiedForest = field(init=False)

    def draft(self) -> None:
        """1. Draft K pairs of the draft's pool below the live beams, D times, and keep the distribution Q they were
        drawn from."""
        self.context = self._context()
        self.forest = self.drafter.propose(self.context)
        self.report.draft_calls = self.drafter.calls
        if self.observer.attached:
            self.observer.drafted(self.context, self.forest)

    def target(self) -> None:
        """2. Run the target once over all W + D*K nodes: each sees the prompt, its own ancestors and itself."""
        paths = None if self.legal is None else NodePaths.of(self.forest, self.state.beams)
        self.legal_tokens = None if self.legal is None or paths is None else self.legal.of(paths)
        logits = run(self.caches.target, self._target_input(), self.state.table.used.device)
        assert logits is not None
        self.logits = logits

    def verify(self) -> None:
        """3. Verify layer by layer: a layer passes if all live beams that it needs are drafted nodes. The first layer
        that does not pass is completed by the exact distribution. So is the bonus layer below the last one."""
        state, forest = self.state, self.forest
        self.candidates = self.best_tokens()
        self.drafter.learn(forest, self.candidates)
        if state.own_ids is not None and self.shape.depth:  # without drafts it would cost more than it brings
            state.own_ids.learn(forest.flat, self.candidates)
        arguments = state, forest, self.candidates, self.rule, self.endings, self.context.keys
        kernel = None if self.observer.attached else verification_kernel(self.ops, state, forest, self.candidates)
        if kernel is not None:
            self.outcome = verify_with_kernel(kernel, *arguments)
        else:
            self.outcome = verify_forest(*arguments, self.observer if self.observer.attached else None)

    def commit(self) -> None:
        """4. Commit: the final beams become the live ones, and both caches keep only their ancestors."""
        state, forest, outcome, table = self.state, self.forest, self.outcome, self.state.table
        live = best_only(outcome.live) if state.method.memory_saving else outcome.live
        self._trace(live)
        # the kernel writes the beams in place, and an observer may have kept the forest that begins with them
        sizes = state.finished.score.shape[1], state.beams.ancestors.shape[2]
        kernel = None if self.observer.attached else self.ops.commit(*sizes)
        run = 0 if self.shape.looked_up else nodes_run(forest, draft_guesses=self.caches.draft_guesses)
        if kernel is not None:
            counters = pack_counters(state, outcome) if outcome.report is None else outcome.report
            moved = commit_with_kernel(kernel, state, forest, live, counters, self.endings, run)
        else:
            moved = commit_beams(state, forest, outcome, live, self.endings, run)
            counters = pack_counters(state, outcome)
        self.caches.move(*moved, table.common_prefix, table.drafted, draft=not self.shape.idle)
        self._step_legal_states(live)
        self.report.counters = counters

    def verify_and_commit(self) -> None:
        """Do parts 3 and 4, which are captured as one CUDA graph."""
        self.verify()
        self.commit()

    def best_tokens(self) -> Candidates:
        """Return the target's best tokens of every node, enough for every draw of the rule."""
        state, vocabulary = self.state, self.logits.shape[-1]
        beams, stops = state.method.num_beams, self.endings.stops
        wanted = self.rule.sampler.candidates(beams, stops.num_eos, state.warp, vocabulary)
        if stops.used and not self.rule.sampler.random and beams + stops.ending[-1] > wanted.count:
            # rows in which more tokens end a text need more, so that W live pairs are left
            counts = [max(wanted.count, min(beams + ending, vocabulary)) for ending in stops.ending]
            own = (beams + stops.most_ending[self.forest.flat.stop_state]).clamp(wanted.count, vocabulary)
            most = max((count for count in counts if count < vocabulary), default=wanted.count)
            wanted = CandidateCount(counts[-1], own, most)
        if state.own_ids is not None and self.shape.depth and not self.rule.sampler.random:
            # more candidates do not change which are best
            wanted = wanted.at_least(min(KEPT, vocabulary))
        return top_candidates(self.logits, wanted, self.legal_tokens, self.ops)

    def _context(self) -> DraftContext:
        """Return what the drafter needs: the nodes' buffer and noise keys, and the settings of this iteration."""
        state, shape = self.state, self.shape
        return DraftContext(
            beams=state.beams,
            buffer=self._buffer(),
            sampler=self.rule.sampler,
            drafts_end=self.rule.drafts_end,
            warp=state.warp,
            endings=self.endings,
            num_beams=state.method.num_beams,
            depth=shape.depth,
            drafts_per_layer=shape.drafts_per_layer,
            row_key=state.row_key,
            iteration=state.iteration,
            draft_backlog=shape.draft_backlog,
            looked_up=shape.looked_up,
            record_distribution=self.rule.needs_distribution or state.method.dynamic or self.observer.attached,
            prompts=state.prompts,
            stopping=self.stopping,
            legal=self.legal,
            ops=self.ops,
            gate=self.gate,
            own_ids=None if state.own_ids is None else state.own_ids.tokens,
            row_beams=state.limits.row_beams,
            prompt_slots=shape.prompt_slots,
            suffix=shape.suffix,
        )

    def _buffer(self) -> ForestBuffer:
        """Return the memory of this iteration's nodes, with the roots in it."""
        state, shape = self.state, self.shape
        sizes = ForestSizes(
            shape.beams,
            shape.drafts_per_layer,
            shape.depth,
            shape.slots,
            draft_backlog=shape.draft_backlog if shape.depth else 0,
            last_position=self.last_position,
        )
        noise, kernel = (state.row_key, state.iteration), self._draft_kernel(sizes)
        if kernel is None:
            return TensorBuffer(sizes, state.beams, state.table, noise, legal=self.legal is not None)
        return KernelBuffer(state.method.rule, sizes, state.beams, state.table, noise, kernel)

    def _draft_kernel(self, sizes: ForestSizes) -> ModuleType | None:
        """Return the kernels that write the forest; None where tensor code does. Those of a GPU know no gate."""
        if (
            self.legal is not None
            or not self.drafter.by_kernel
            or self.observer.attached
            or (
                self.gate is not None
                and (self.state.warp.scope == "beam" or not host_reads(self.state.table.used.device))
            )
            or sizes.draft_backlog > MERGED_BACKLOG
        ):
            return None
        if not sizes.layers:
            return self.ops.draft()
        method, model, drafts = self.state.method, self.drafter.model, sizes.drafts
        width = 0 if model is None else min(model.vocab_size, self.caches.target.vocab_size)
        wanted = self.rule.sampler.candidates(method.num_beams, 1, self.state.warp, width)
        wanted = wanted.at_least(min(drafts + 8, width))
        recorded = self.rule.needs_distribution or method.dynamic
        count = min(wanted.count, width)
        return self.ops.draft(method.rule, max(sizes.roots, drafts), drafts, count, recorded)

    def _target_input(self) -> ForestInput:
        """Return the target's input over all nodes."""
        state, shape, prompt = self.state, self.shape, None
        if not host_reads(self.caches.target.device):
            # Every node sees the common prefix. With prompt_slots, where equal bits are promised, only the slots of
            # prompts count: one for each token of a prompt but the last, which was the first root.
            prompt = state.table.common_prefix if shape.prompt_slots is None else state.beams.depth - state.beams.length
        batch = self.forest.buffer.input()
        return replace(batch, prompt_slots=shape.prompt_slots, suffix=shape.suffix, prompt=prompt)

    def _trace(self, live: Live) -> None:
        """Record the log-probabilities of this iteration's tokens, for rows that ask for them."""
        state, outcome = self.state, self.outcome
        if state.trace is not None:
            assert outcome.before is not None
            parts = (state.beams, state.finished, self.forest, self.candidates, outcome.before)
            state.trace.follow(*parts, self._likeliest(state.trace.tops), live.parent, live.token, outcome.steps)

    def _likeliest(self, count: int) -> Candidates | None:
        """Return the likeliest tokens of every node under its row's token rules; None where no row asks for them."""
        if not count:
            return None
        changes = None if self.legal is None else self.legal.changes(NodePaths.of(self.forest, self.state.beams))
        return top_candidates(self.logits, CandidateCount(count, None, count), changes)

    def _step_legal_states(self, live: Live) -> None:
        """Advance the legal states to the new beams."""
        beams, legal_state = self.state.beams, self.forest.flat.legal_state
        if self.legal is not None:
            assert legal_state is not None
            beams.legal_state = self.legal.step(legal_state.gather(1, live.parent), live.token)
        elif beams.legal_state.shape != live.token.shape:
            beams.legal_state = torch.full_like(live.token, FREE)
