"""The engine: requests in, results out, in input order. Rows of one batch run together and are refilled as they
finish."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, overload

import torch

from dsbd_cli.config import Exactness, MethodConfig, OnTooLong
from dsbd_cli.engine.core.beams import fit_window
from dsbd_cli.engine.core.protocols import ForestModel, TextCodec
from dsbd_cli.engine.core.stops import StopTable
from dsbd_cli.engine.decoding.budget import PEEK, fitting_rows, least_bytes, memory_bytes
from dsbd_cli.engine.decoding.devices import captures, current, events, out_of_memory
from dsbd_cli.engine.decoding.encode import Encoder
from dsbd_cli.engine.decoding.outcome import collect, common_tokens, record_iteration
from dsbd_cli.engine.decoding.pieces import Pieces
from dsbd_cli.engine.decoding.planner import Reading, Shape, planner_for
from dsbd_cli.engine.decoding.prefill import prefill
from dsbd_cli.engine.decoding.scheduler import Job, ResultOrder, Results, Scheduler, Source, bucket
from dsbd_cli.engine.decoding.state import BatchState
from dsbd_cli.engine.decoding.step import Plan, Stepper
from dsbd_cli.engine.decoding.timing import PhaseTimer
from dsbd_cli.engine.drafting import BridgedDraft, BridgeDrafter, DrafterInputs, Endings, make_drafter
from dsbd_cli.engine.drafting.base import Stopped
from dsbd_cli.engine.drafting.text import Prompts
from dsbd_cli.engine.verify import make_rule
from dsbd_cli.errors import (
    NumericalError,
    OutOfMemoryRowError,
    RowError,
    UsageError,
)
from dsbd_cli.requests import Piece, Request, RequestResult
from dsbd_cli.stats import RequestStats

__all__ = ["Engine", "EngineInfo"]

READ_AHEAD = 4

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What runs: names, dtypes and devices of the models, for records and reports."""

    target: str
    draft: str | None
    dtype: str
    device: str
    draft_dtype: str | None = None
    draft_device: str | None = None


class Engine:
    """Speculative beam decoding of many requests with one pair of models.

    Without a draft the method has depth 0, plain beam sampling or beam search by the same code, or a drafter that
    needs no model.
    """

    def __init__(
        self,
        target: ForestModel,
        draft: ForestModel | BridgedDraft | None,
        codec: TextCodec,
        method: MethodConfig | None = None,
        *,
        batch_size: int | None = 8,
        info: EngineInfo | None = None,
        log_steps: bool = False,
        on_too_long: OnTooLong = "error",
        cuda_graphs: bool | None = None,
    ) -> None:
        """batch_size: requests decoded together at most; None for as many as fit in memory.

        log_steps: keep a StepStats per iteration in each result.

        on_too_long: a prompt that does not fit the models' positions fails, or loses tokens on its left.
        cuda_graphs: capture iterations as CUDA graphs; None: where both models lie whole on one GPU.
        """
        name = None if draft is None else (info.draft if info is not None else None) or type(draft).__name__
        self.method = (method or MethodConfig()).fit_draft(name)
        bridged = isinstance(draft, BridgedDraft)
        if draft is not None and bridged != self.method.bridges:
            raise UsageError(f"drafter {self.method.drafter} takes a {'plain draft' if bridged else 'BridgedDraft'}")
        if batch_size is not None and batch_size < 1:
            message = f"batch_size is {batch_size}, but must be 1 or more"
            raise UsageError(message, field="batch_size", value=batch_size, expected="1 or more")
        # a bridge runs its draft by itself: the two models share no slots
        self.bridged = draft if isinstance(draft, BridgedDraft) else None
        shared = None if isinstance(draft, BridgedDraft) else draft
        self.target, self.draft, self.codec = target, shared, codec
        self.batch_size, self.info, self.log_steps = batch_size or 1, info, log_steps
        self.steps = 0  # taken so far, those of unfinished requests too; another thread may look
        self._fit_batch = batch_size is None
        self._invariant = target.invariant
        self._stopping = False
        device = target.device
        memory = self._check_memory(device)
        self._encoder = Encoder(target, self.draft, codec, self.method, on_too_long, memory)
        eos = torch.zeros(target.vocab_size, dtype=torch.bool)
        ending = {token for token in codec.eos_ids if token < target.vocab_size}
        eos[list(ending)] = True
        self._stops = StopTable(codec.token_bytes(), target.vocab_size, device)
        drafter = make_drafter(DrafterInputs(self.method, draft, target.vocab_size, codec, device))
        rule = make_rule(self.method)
        self._stepper = Stepper(
            target,
            shared,
            drafter,
            rule,
            Endings(eos.to(device), len(ending), self._stops),
            PhaseTimer(events(device)),
            captures(target, shared, bridged, cuda_graphs),
            lambda: self._stopping,
        )
        # larger steps are fewer shapes to capture
        self._slot_step, self._window_step = (128, 64) if self._stepper.graphs is not None else (32, 16)
        self._drafter, self._planner = drafter, planner_for(self.method)
        self._names = self.method.drafter_names if "+" in self.method.drafter else ()
        self._deepest = Shape(self.method.depth, self.method.drafts_per_layer)
        self._rows = self.batch_size  # out of memory lowers it
        self._proven = 1  # most rows that have run
        self._slots = 0
        self._reserved: tuple[object, ...] | None = None  # rows, slots and generations of both caches
        self._running = False
        self._shape: Shape | None = None  # of the iteration under way

    def _check_memory(self, device: torch.device) -> int:
        """Bytes of the device. Raises UsageError where it cannot hold an iteration of any row."""
        method, memory = self.method, memory_bytes(device)
        nodes = Shape(method.depth, method.drafts_per_layer).within(1).nodes(method.num_beams)
        if least_bytes(nodes, self.target.vocab_size) > memory:
            drafts = f" and drafts_per_layer {method.drafts_per_layer}" if method.depth else ""
            raise UsageError(
                f"num_beams is {method.num_beams}{drafts}, but {nodes} nodes in an iteration of a single row do not "
                f"fit into {memory / 2**30:.1f} GiB: lower it"
            )
        return memory

    @property
    def exactness(self) -> Exactness:
        """What the output shares with plain decoding. It is the method's, but for `same-text`: where the target's
        logits depend on what else is in a forward, rounding can change a text, and only the law is the same."""
        promised = self.method.exactness
        return "same-law" if promised == "same-text" and not self.target.invariant else promised

    @property
    def stepper(self) -> Stepper:
        """What runs the iterations; its drafter, rule and timer may be wrapped to watch them."""
        return self._stepper

    def stop(self) -> None:
        """Ask `run` to end, at the next layer that is drafted or after the iteration it is in, for good; requests that
        are not done give no result.

        May be called from a signal handler or another thread.
        """
        self._stopping = True

    @overload
    def generate(self, requests: str | Request, *, seed: int = 0) -> RequestResult: ...  # type: ignore[overload-overlap]

    @overload
    def generate(self, requests: Iterable[Request | str], *, seed: int = 0) -> list[RequestResult]: ...

    def generate(
        self, requests: str | Request | Iterable[Request | str], *, seed: int = 0
    ) -> RequestResult | list[RequestResult]:
        """Answer one prompt or request, or a list of them: one result, or a list.

        seed: of the run, as in `run`. Raises the RowError of the first request that failed; `run` goes on instead.
        """
        alone = isinstance(requests, Request | str)
        results = list(self.run([requests] if isinstance(requests, Request | str) else requests, seed=seed))
        if self._stopping:
            raise UsageError("this engine was stopped and answers nothing any more: load another one")
        for result in results:
            result.check()
        return results[0] if alone else results

    def run(self, requests: Iterable[Request | str | None], *, seed: int = 0) -> Iterator[RequestResult]:
        """Decode requests; yield one result each, in input order, as soon as its turn has come.

        A string is a prompt. seed: of the run; a request without a seed gets its own from this and its id, and one
        without an id is named by its place, from 0. The command does the same, so it gives the same text.

        A request that fails yields a result with `error`; the others go on. The input is read lazily, a few batches
        ahead at most. An item None says that nothing is ready yet: the engine goes on with what it has. Out of memory
        halves the batch and decodes its requests again, which gives the same results; a request that does not fit
        alone fails.
        """
        return self._answers(Source(requests, seed), ResultOrder())

    def stream(self, requests: Iterable[Request | str | None], *, seed: int = 0) -> Iterator[Piece]:
        """Decode requests as `run` does; yield text of each as soon as it can no longer change.

        After an iteration every running request may yield a piece. The pieces of a request, joined, are the beginning
        of its best text; the last one completes it and has the result. A request that fails ends with a piece that has
        a result with `error`. Pieces of different requests are mixed, and results come as they are done.

        A piece holds what is common to all live beams and to the best finished hypothesis, because any of these may
        become the best text. So one beam streams token by token; several stream up to where they part, and an early
        finished hypothesis holds back what follows until a better one is finished. Half a character, and what may be
        the beginning of a stop string, are held back too.
        """
        return self._answers(Source(requests, seed), Pieces(self.codec))

    @torch.inference_mode()
    def _answers(self, source: Source, order: Results[Item]) -> Iterator[Item]:
        """What `order` gives out while all requests of the source are decoded."""
        if self._running:
            gc.collect()  # a run that nobody holds any more may wait in a cycle
        if self._running:
            raise UsageError(
                "this engine is in use by another run: finish that one, close() its iterator, or load a second engine"
            )
        self._running = True
        backlog = deque[Job]()
        try:
            while not self._stopping and (backlog or not source.exhausted()):
                if self._fit_batch:
                    self._read(source, PEEK, order, backlog)
                    self._choose_rows(backlog)
                self._read(source, self._rows - len(backlog), order, backlog)
                yield from order.ready()
                if backlog:
                    yield from self._decode(source, order, backlog)
        finally:
            self._running = False

    def _nodes(self, jobs: Iterable[Job]) -> int:
        """Most nodes of an iteration of these requests."""
        steps = max(job.request.sampling.max_new_tokens for job in jobs)
        return self._deepest.within(steps).nodes(self.method.num_beams)

    def _choose_rows(self, backlog: deque[Job]) -> None:
        """The batch size that memory allows, from the requests seen first."""
        if backlog:
            nodes = self._nodes(backlog)
            slots = max(len(job.prompt) + job.request.sampling.max_new_tokens for job in backlog) + 2 * nodes
            models = [model for model in (self.target, self.draft) if model is not None]
            self.batch_size = self._rows = fitting_rows(models, bucket(slots, self._slot_step), nodes)
            self._fit_batch = False

    def _decode(self, source: Source, order: Results[Item], backlog: deque[Job]) -> Iterator[Item]:
        """One batch, refilled from the source as its rows finish, until it is empty or out of memory."""
        scheduler, state = Scheduler(min(len(backlog), self._rows)), None
        while not self._stopping and (backlog or scheduler.running):
            try:
                state = self._admit(state, scheduler, backlog)
                self._iterate(state, scheduler, order)
                self._shape = None
                self._proven = max(self._proven, len(scheduler.jobs))
            except Stopped:
                return
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                self._recover(scheduler, order, backlog)
                yield from order.ready()
                return
            yield from order.ready()
            # a batch that began small, because little was ready, ends so that a larger one can begin
            growing = len(scheduler.jobs) < self._rows and not source.exhausted()
            if not growing and order.held < READ_AHEAD * self.batch_size:
                self._read(source, len(scheduler.free) - len(backlog), order, backlog)
                yield from order.ready()
            kept = scheduler.shrink() if source.exhausted() and not backlog else None
            if kept is not None:
                self._shrink(state, kept)

    def _recover(self, scheduler: Scheduler, order: Results[object], backlog: deque[Job]) -> None:
        """After out of memory: the running requests wait again, for fewer drafts where the planner has a choice, or for
        half as many rows."""
        running = [job for _, job in scheduler.running]
        smaller = self._planner.out_of_memory(self._shape, len(running))
        self._shape = None
        self._reserved = None
        self._forget_graphs()
        for model in (self.target, self.draft):
            if model is not None:
                model.release()
        if isinstance(self._drafter, BridgeDrafter):
            self._drafter.release()
        alone = len(running) == 1 and not smaller
        if alone and not running[0].retried:
            running[0].retried = True  # once more, with all memory given back
        elif alone:
            job = running.pop()
            tokens = len(job.prompt) + job.request.sampling.max_new_tokens
            error = OutOfMemoryRowError(
                f"out of memory with this row alone ({tokens} tokens, {self._nodes([job])} nodes in an iteration): "
                "shorten it, or lower num_beams, depth or drafts_per_layer"
            )
            order.put(job.number, RequestResult(job.request, (), len(job.prompt), job.stats, error))
        # a row that fails alone says nothing about how many others fit
        if not smaller:
            self._rows = max(1, len(running) // 2) if running else self._proven
        for job in running:
            self.steps -= job.stats.steps
            job.stats = RequestStats()
        backlog.extendleft(reversed(running))

    def _read(self, source: Source, count: int, order: Results[object], backlog: deque[Job]) -> None:
        """Up to `count` requests that can be decoded; results of those that cannot go straight out."""
        while count > 0 and (item := source.next()) is not None:
            number, request = item
            try:
                ids, truncated = self._encoder.encode(request)
                backlog.append(Job(number, request, ids, started=time.perf_counter(), truncated=truncated))
                count -= 1
            except RowError as error:
                order.put(number, RequestResult(request, (), 0, RequestStats(), error))

    def _admit(self, state: BatchState | None, scheduler: Scheduler, backlog: deque[Job]) -> BatchState:
        """Prefill waiting requests and put them into free rows; makes or grows the batch's memory where needed."""
        new = [(row, backlog.popleft()) for row in scheduler.free[: len(backlog)]]
        for row, job in new:
            scheduler.place(row, job)
        jobs = [job for _, job in scheduler.running]
        nodes, steps = self._nodes(jobs), max(job.request.sampling.max_new_tokens for job in jobs)
        history = steps + self._deepest.within(steps).depth + 2
        slots = max(len(job.prompt) + job.request.sampling.max_new_tokens for job in jobs)
        if state is None:
            state = self._allocate(len(scheduler.jobs), bucket(slots + 2 * nodes, self._slot_step), nodes, history)
        if not new:
            return state
        state.grow_history(history)
        self._reserve(state, slots + nodes + 1)
        for model in (self.target, self.draft):
            if model is not None:
                for row, _ in new:
                    model.clear(row)  # 0 times a NaN of an earlier request would be NaN
        self._prefill(self.target, new, apart=self._invariant)
        for row, job in new:
            sampling = job.request.sampling
            state.admit(row, job.prompt, job.request.seed, self._stops.start(sampling.stop), sampling)
        return state

    def _prefill(self, model: ForestModel, new: Sequence[tuple[int, Job]], *, apart: bool) -> None:
        prefill(model, [row for row, _ in new], [job.prompt for _, job in new], trash=self._slots - 1, apart=apart)

    def _prefill_draft(self, draft: ForestModel, running: Sequence[tuple[int, Job]], timer: PhaseTimer) -> None:
        """Prompts of the rows that are about to draft for the first time; one that never drafts costs nothing. timer:
        gets a lap `read` if there are any."""
        new = [(row, job) for row, job in running if not job.prefilled]
        if new:
            with current(draft.device):
                timer.start()
                self._prefill(draft, new, apart=False)
                timer.lap("read")
        for _, job in new:
            job.prefilled = True

    def _allocate(self, rows: int, slots: int, nodes: int, history: int) -> BatchState:
        self._stops.forget()
        if self._reserved is None or self._reserved != self._reservation(rows, slots):
            self._forget_graphs()
            for model in (self.target, self.draft):
                if model is not None:
                    model.release()  # else rows of one batch would multiply with slots of another
                    model.reserve(rows, slots)
        self._slots, self._reserved = slots, self._reservation(rows, slots)
        window = bucket(nodes, self._window_step)
        state = BatchState.empty(self.method, rows, slots, window, history, self.target.device)
        if self._drafter.needs_text:
            state.prompts = Prompts.empty(rows, self.target.device)
        return state

    def _reservation(self, rows: int, slots: int) -> tuple[object, ...]:
        """What must be the same for the caches to be used again: another engine may share the models."""
        models = [model for model in (self.target, self.draft) if model is not None]
        return (rows, slots, *(model.generation for model in models))

    def _forget_graphs(self) -> None:
        """The caches are about to move."""
        if self._stepper.graphs is not None:
            self._stepper.graphs.forget()

    def _reserve(self, state: BatchState, slots: int) -> None:
        """At least `slots` cache slots per row."""
        if slots > self._slots:
            self._forget_graphs()
            self._slots = bucket(max(slots, self._slots * 5 // 4), self._slot_step)
            for model in (self.target, self.draft):
                if model is not None:
                    model.reserve(state.rows, self._slots)
            self._reserved = None
            state.table.grow(self._slots)

    def _iterate(self, state: BatchState, scheduler: Scheduler, order: Results[object]) -> None:
        """One iteration of all rows; finished ones hand in their results."""
        running = scheduler.running
        requests = [job.acceptance for _, job in running]
        reading = self._reading(scheduler)
        left = max(job.request.sampling.max_new_tokens - job.stats.steps for _, job in running)
        shape, lag = self._planner.choose(requests, reading).within(left), reading.lag
        self._shape = shape
        timer = PhaseTimer(events(self.target.device if self.draft is None else self.draft.device))
        nodes = shape.nodes(self.method.num_beams)
        busy = scheduler.most_used() + nodes
        self._reserve(state, busy + 1)
        window = bucket(scheduler.longest_tail() + nodes, self._window_step)
        state.beams.ancestors = fit_window(state.beams.ancestors, window)
        active = min(bucket(busy, self._slot_step), self._slots - 1)
        idle = not shape.depth and all(job.drafted <= job.trunk for _, job in running)
        if not shape.depth:
            lag = 0
        elif self.draft is not None:
            self._prefill_draft(self.draft, running, timer)
        with current(self.target.device):
            report = self._stepper.step(state, Plan(active, shape, lag, idle, *self._settled(scheduler, nodes, active)))
            seconds = self._stepper.timer.seconds()
        layers_of = [report.layers[row] for row, _ in running]
        self._planner.observe(shape, requests, layers_of, seconds | timer.seconds(), reading, self._stepper.steady)
        for row, job in running:
            counters = report.rows[row]
            layers = report.layers[row]
            record_iteration(job, counters, layers, seconds, len(running), nodes, self.log_steps, self._names)
            self.steps += counters["steps"]
            job.stats.draft_calls += report.draft_calls
            job.used, job.trunk, job.drafted = counters["used"], counters["trunk"], counters["drafted"]
            if counters["invalid"]:
                self._fail(state, scheduler, row, order)
            elif counters["done"]:
                order.put(job.number, collect(state.finished, row, scheduler.remove(row), self.codec))
                state.release(row)
            else:
                order.progress(job, partial(common_tokens, state, row))

    def _settled(self, scheduler: Scheduler, nodes: int, active: int) -> tuple[tuple[int, ...] | None, int]:
        """`settled` and `tail` of the target's forward; on a GPU the same for all iterations of a shape."""
        if not self._invariant:
            return None, 0
        if self.target.device.type != "cpu":
            return (0,) * len(scheduler.jobs), active
        settled = tuple(0 if job is None else len(job.prompt) - 1 for job in scheduler.jobs)
        longest = max(job.used - settled[row] for row, job in scheduler.running)
        return settled, bucket(longest + nodes, self._slot_step)

    def _reading(self, scheduler: Scheduler) -> Reading:
        """What the draft must run before it drafts. The lag is W times a power of two, so that shapes repeat, or 0."""
        if self.draft is None:
            return Reading()
        lag, size = scheduler.longest_lag(), self.method.num_beams
        while size < lag:
            size *= 2
        lengths = [(len(job.prompt), job.prefilled) for _, job in scheduler.running]
        unread = sum(length for length, prefilled in lengths if not prefilled)
        return Reading(size if lag else 0, unread, sum(length for length, _ in lengths))

    def _fail(self, state: BatchState, scheduler: Scheduler, row: int, order: Results[object]) -> None:
        """A row whose model returned NaN: an error result, and clean memory for the next request."""
        job = scheduler.remove(row)
        error = NumericalError(
            f"the target returned NaN after {job.stats.steps} steps: "
            "the checkpoint may need another dtype (try float32)"
        )
        order.put(job.number, RequestResult(job.request, (), len(job.prompt), job.stats, error))
        state.release(row)

    def _shrink(self, state: BatchState, kept: list[int]) -> None:
        """Drop free rows, so that the last requests do not pay for empty ones."""
        state.select(kept)
        for model in (self.target, self.draft):
            if model is not None:
                model.select_rows(torch.tensor(kept, device=model.device))
