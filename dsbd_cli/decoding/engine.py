"""The engine: requests in, results out, in input order. Rows of one batch run together and are refilled as they
finish."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import torch

from dsbd_cli.config import MethodConfig, OnTooLong
from dsbd_cli.core.beams import fit_window
from dsbd_cli.core.protocols import ForestModel, TextCodec
from dsbd_cli.core.stops import StopTable
from dsbd_cli.decoding.outcome import collect, record_iteration
from dsbd_cli.decoding.prefill import prefill
from dsbd_cli.decoding.scheduler import Job, ResultOrder, Scheduler, Source, bucket
from dsbd_cli.decoding.state import BatchState
from dsbd_cli.decoding.step import Stepper
from dsbd_cli.decoding.timing import Event, PhaseTimer
from dsbd_cli.drafting import BeamDrafter, Drafter, Endings, NoDrafter
from dsbd_cli.errors import (
    InvalidRowError,
    NumericalError,
    OutOfMemoryRowError,
    PromptTooLongError,
    RowError,
    UsageError,
)
from dsbd_cli.requests import Request, RequestResult
from dsbd_cli.stats import RequestStats
from dsbd_cli.verify import RULES

__all__ = ["Engine", "EngineInfo"]

SLOT_STEP = 32
WINDOW_STEP = 16
READ_AHEAD = 4


def _events(device: torch.device) -> Callable[[], Event] | None:
    """Marks on the device's own time line; None for the wall clock."""
    if device.type != "cuda":
        return None
    return partial(torch.cuda.Event, enable_timing=True)  # type: ignore[return-value]


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one: events go to its stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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

    Without a draft the method must have depth 0: plain beam sampling or beam search by the same code.
    """

    def __init__(
        self,
        target: ForestModel,
        draft: ForestModel | None,
        codec: TextCodec,
        method: MethodConfig | None = None,
        *,
        batch_size: int = 8,
        info: EngineInfo | None = None,
        log_steps: bool = False,
        on_too_long: OnTooLong = "error",
    ) -> None:
        """batch_size: requests decoded together at most. log_steps: keep a StepStats per iteration in each result.

        on_too_long: a prompt that does not fit the models' positions fails, or loses tokens on its left.
        """
        self.method = method or MethodConfig(depth=4 if draft is not None else 0)
        if (draft is None) != (self.method.depth == 0):
            raise UsageError("a draft model goes with depth 1 or more, no draft model with depth 0")
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}, but must be 1 or more")
        self.target, self.draft, self.codec = target, draft, codec
        self.batch_size, self.info, self.log_steps = batch_size, info, log_steps
        self._on_too_long, self._stopping = on_too_long, False
        device = target.device
        eos = torch.zeros(target.vocab_size, dtype=torch.bool)
        eos[[token for token in codec.eos_ids if token < target.vocab_size]] = True
        self._stops = StopTable(codec.token_bytes(), target.vocab_size, device)
        drafter: Drafter = NoDrafter() if draft is None else BeamDrafter(draft, target.vocab_size)
        rule = RULES[self.method.rule]()
        self._stepper = Stepper(
            target, draft, drafter, rule, Endings(eos.to(device), self._stops), PhaseTimer(_events(device))
        )
        self._drafter = drafter
        self._nodes = self.method.num_beams + self.method.depth * self.method.drafts_per_layer
        self._rows = batch_size  # out of memory lowers it
        self._proven = 1  # most rows that have run
        self._slots = 0
        self._late = False
        self._running = False

    @property
    def stepper(self) -> Stepper:
        """What runs the iterations; its drafter, rule and timer may be wrapped to watch them."""
        return self._stepper

    def stop(self) -> None:
        """Ask `run` to end after the iteration it is in, for good; requests that are not done give no result.

        May be called from a signal handler or another thread.
        """
        self._stopping = True

    @torch.inference_mode()
    def run(self, requests: Iterable[Request | None]) -> Iterator[RequestResult]:
        """Decode requests; yield one result each, in input order, as soon as its turn has come.

        A request that fails yields a result with `error`; the others go on. The input is read lazily, a few batches
        ahead at most. An item None says that nothing is ready yet: the engine goes on with what it has. Out of memory
        halves the batch and decodes its requests again, which gives the same results; a request that does not fit
        alone fails.
        """
        if self._running:
            raise UsageError("this engine is in use by another run: finish that one first, or load a second engine")
        self._running = True
        source, order, backlog = Source(requests), ResultOrder(), deque[Job]()
        try:
            while not self._stopping and (backlog or not source.exhausted()):
                self._read(source, self._rows - len(backlog), order, backlog)
                yield from order.ready()
                if backlog:
                    yield from self._decode(source, order, backlog)
        finally:
            self._running = False

    def _decode(self, source: Source, order: ResultOrder, backlog: deque[Job]) -> Iterator[RequestResult]:
        """One batch, refilled from the source as its rows finish, until it is empty or out of memory."""
        scheduler, state = Scheduler(min(len(backlog), self._rows)), None
        while not self._stopping and (backlog or scheduler.running):
            try:
                state = self._admit(state, scheduler, backlog)
                self._iterate(state, scheduler, order)
                self._proven = max(self._proven, len(scheduler.jobs))
            except torch.OutOfMemoryError:
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

    def _recover(self, scheduler: Scheduler, order: ResultOrder, backlog: deque[Job]) -> None:
        """After out of memory: the running requests wait again, for half as many rows."""
        running = [job for _, job in scheduler.running]
        for model in (self.target, self.draft):
            if model is not None:
                model.release()
        if len(running) == 1 and not running[0].retried:
            running[0].retried = True  # once more, with all memory given back
        elif len(running) == 1:
            job = running.pop()
            tokens = len(job.prompt) + job.request.sampling.max_new_tokens
            error = OutOfMemoryRowError(f"out of memory with this row alone ({tokens} tokens): shorten it")
            order.put(job.number, RequestResult(job.request, (), len(job.prompt), job.stats, error))
        # a row that fails alone says nothing about how many others fit
        self._rows = max(1, len(running) // 2) if running else self._proven
        for job in running:
            job.stats = RequestStats()
        backlog.extendleft(reversed(running))

    def _read(self, source: Source, count: int, order: ResultOrder, backlog: deque[Job]) -> None:
        """Up to `count` requests that can be decoded; results of those that cannot go straight out."""
        while count > 0 and (item := source.next()) is not None:
            number, request = item
            try:
                ids, truncated = self._encode(request)
                backlog.append(Job(number, request, ids, started=time.perf_counter(), truncated=truncated))
                count -= 1
            except RowError as error:
                order.put(number, RequestResult(request, (), 0, RequestStats(), error))

    def _encode(self, request: Request) -> tuple[list[int], int]:
        """Token ids of the prompt, and how many were dropped. Raises RowError where it cannot be decoded."""
        if request.prompt_ids is not None:
            ids = list(request.prompt_ids)
        elif request.messages is not None:
            ids = self.codec.encode_chat([dict(message) for message in request.messages])
        else:
            ids = self.codec.encode(request.prompt or "")
        self._check(request, ids)
        return self._fit(request, ids)

    def _check(self, request: Request, ids: list[int]) -> None:
        """Everything that makes one request impossible to decode. Raises RowError."""
        if not ids:
            raise InvalidRowError("prompt is empty: there is no token to start from")
        if foreign := [token for token in ids if not 0 <= token < self.target.vocab_size]:
            raise InvalidRowError(
                f"prompt holds token id {foreign[0]}, but the target has {self.target.vocab_size} ids"
            )
        if not 0 <= request.seed < 2**63:
            raise InvalidRowError(f"seed is {request.seed}, but must be from 0 to 2**63 - 1")
        for stop in request.sampling.stop:
            if any("\ud800" <= letter <= "\udfff" for letter in stop):
                raise InvalidRowError(f"stop is {stop!r}, which is no valid text: it holds half a surrogate pair")
        if request.sampling.n_best > self.method.num_beams:
            raise InvalidRowError(
                f"n_best is {request.sampling.n_best}, but num_beams is {self.method.num_beams}: "
                "there are no more hypotheses"
            )

    def _fit(self, request: Request, ids: list[int]) -> tuple[list[int], int]:
        """The prompt as the models' positions allow it, and how many tokens were dropped. Raises PromptTooLongError."""
        new = request.sampling.max_new_tokens
        limits = [
            (model.max_positions, role)
            for role, model in (("target", self.target), ("draft", self.draft))
            if model is not None and model.max_positions is not None
        ]
        limit, role = min(limits, key=lambda pair: pair[0], default=(len(ids) + new, ""))
        if len(ids) + new <= limit:
            return ids, 0
        if self._on_too_long == "truncate-left" and (kept := self._cut(ids, limit - new)):
            return kept, len(ids) - len(kept)
        raise PromptTooLongError(
            f"prompt has {len(ids)} tokens and max_new_tokens is {new}, but the {role} has {limit} positions"
        )

    def _cut(self, ids: list[int], room: int) -> list[int]:
        """The last ids that fit into the room, after the tokens that the tokenizer begins every text with."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(ids, self.codec.encode(""), strict=False))
        begin = len(list(same))
        return ids[:begin] + ids[len(ids) - room + begin :] if room > begin else []

    def _admit(self, state: BatchState | None, scheduler: Scheduler, backlog: deque[Job]) -> BatchState:
        """Prefill waiting requests and put them into free rows; makes or grows the batch's memory where needed."""
        new = [(row, backlog.popleft()) for row in scheduler.free[: len(backlog)]]
        for row, job in new:
            scheduler.place(row, job)
        jobs = [job for _, job in scheduler.running]
        history = max(job.request.sampling.max_new_tokens for job in jobs) + self.method.depth + 2
        slots = max(len(job.prompt) + job.request.sampling.max_new_tokens for job in jobs)
        if state is None:
            state = self._allocate(len(scheduler.jobs), bucket(slots + 2 * self._nodes, SLOT_STEP), history)
        if not new:
            return state
        state.grow_history(history)
        self._reserve(state, slots + self._nodes + 1)
        rows, prompts = [row for row, _ in new], [job.prompt for _, job in new]
        for model in (self.target, self.draft):
            if model is not None:
                for row in rows:
                    model.clear(row)  # 0 times a NaN of an earlier request would be NaN
                prefill(model, rows, prompts, trash=self._slots - 1)
        for row, job in new:
            sampling = job.request.sampling
            state.admit(row, job.prompt, job.request.seed, self._stops.start(sampling.stop), sampling)
        return state

    def _allocate(self, rows: int, slots: int, history: int) -> BatchState:
        self._slots, self._late = slots, False
        self._stops.forget()
        for model in (self.target, self.draft):
            if model is not None:
                model.release()  # else rows of one batch would multiply with slots of another
                model.reserve(rows, slots)
        window = bucket(self._nodes, WINDOW_STEP)
        return BatchState.empty(self.method, rows, slots, window, history, self.target.device)

    def _reserve(self, state: BatchState, slots: int) -> None:
        """At least `slots` cache slots per row."""
        if slots > self._slots:
            self._slots = bucket(max(slots, self._slots * 5 // 4), SLOT_STEP)
            for model in (self.target, self.draft):
                if model is not None:
                    model.reserve(state.rows, self._slots)
            state.table.grow(self._slots)

    def _iterate(self, state: BatchState, scheduler: Scheduler, order: ResultOrder) -> None:
        """One iteration of all rows; finished ones hand in their results."""
        busy = scheduler.most_used() + self._nodes
        self._reserve(state, busy + 1)
        window = bucket(scheduler.longest_tail() + self._nodes, WINDOW_STEP)
        state.beams.ancestors = fit_window(state.beams.ancestors, window)
        active = min(bucket(busy, SLOT_STEP), self._slots - 1)
        with _current(self.target.device):
            report = self._stepper.step(state, active, self._late)
            seconds = self._stepper.timer.seconds()
        running = scheduler.running
        self._late = False
        for row, job in running:
            counters = report.rows[row]
            record_iteration(job, counters, report.layers[row], seconds, len(running), self._nodes, self.log_steps)
            job.stats.draft_calls += self._drafter.calls
            job.used, job.trunk = counters["used"], counters["trunk"]
            self._late |= bool(counters["late"])
            if counters["invalid"]:
                self._fail(state, scheduler, row, order)
            elif counters["done"]:
                order.put(job.number, collect(state.finished, row, scheduler.remove(row), self.codec))
                state.release(row)

    def _fail(self, state: BatchState, scheduler: Scheduler, row: int, order: ResultOrder) -> None:
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
