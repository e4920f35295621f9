"""The decoding loop of a run: batches of requests, refilled as their rows finish, iteration after iteration."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.cache.caches import Caches
from dsbd_cli.engine.core.report import Report
from dsbd_cli.engine.decoding.batch import Batch
from dsbd_cli.engine.decoding.recovery import Recovery
from dsbd_cli.engine.decoding.results import collect, common_tokens, nan_result, read_finished, record_iteration
from dsbd_cli.engine.decoding.scheduler import RequestQueue, Scheduler
from dsbd_cli.engine.decoding.tables import RequestTables
from dsbd_cli.engine.decoding.windows import next_window
from dsbd_cli.engine.drafting.base import Drafter, EngineStopped
from dsbd_cli.engine.iteration.devices import current, events
from dsbd_cli.engine.iteration.request_state import RequestState, Results
from dsbd_cli.engine.iteration.stepper import Stepper
from dsbd_cli.engine.planning.planner import Observation, Planner, Shape, deepest
from dsbd_cli.engine.planning.timing import PhaseTimer
from dsbd_cli.engine.protocols import TextCodec

Item = TypeVar("Item")


@dataclass(slots=True)
class Loop(Generic[Item]):
    """One run of an engine.

    Attributes:
        method, codec, caches, tables, drafter, stepper, planner, scheduler, recovery: of the engine.
        stopping: returns True once the engine was asked to stop.
        one_root: a row's first iteration may have one root. log_steps: results hold a StepStats per iteration.
        queue: requests of the run. results: receiver of their results and of partial texts that are streamed.
    """

    method: MethodConfig
    codec: TextCodec
    caches: Caches
    tables: RequestTables
    drafter: Drafter
    stepper: Stepper
    planner: Planner
    scheduler: Scheduler
    recovery: Recovery
    stopping: Callable[[], bool]
    one_root: bool
    log_steps: bool
    queue: RequestQueue
    results: Results[Item]
    _shape: Shape | None = field(default=None, init=False)  # of the iteration under way

    def run(self) -> Iterator[Item]:
        """Decode all requests of the queue, and yield results as they may go out."""
        while not self.stopping() and not self.queue.finished:
            self.scheduler.fill(self.queue)
            yield from self.results.ready()
            if self.queue.waiting:
                yield from self._decode()

    def _decode(self) -> Iterator[Item]:
        """Run one batch, refilled as its rows finish, until it is empty, or until it has failed and must begin
        again."""
        queue, results = self.queue, self.results
        rows = min(len(queue.waiting), self.scheduler.rows)
        batch = Batch(rows, self.method, self.caches, self.tables, keep_text=self.drafter.needs_text)
        while not self.stopping() and (queue.waiting or batch.running):
            self._shape = None
            try:
                if not (batch.running and self.scheduler.ending(queue, batch)):
                    batch.admit(queue.waiting)
                self._iterate(batch)
            except EngineStopped:
                return
            except Exception as error:
                running = [job for _, job in batch.running]
                if not self.recovery.after(error, running, queue, self.planner, self._shape):
                    raise
                yield from results.ready()
                return
            self.scheduler.ran(batch)
            yield from results.ready()
            self.scheduler.refill(queue, batch)
            yield from results.ready()
            if not batch.running and self.scheduler.ending(queue, batch):
                return
            if queue.finished and (kept := batch.shrink()):
                self.drafter.select(torch.tensor(kept, device=self.caches.target.device))

    def _iterate(self, batch: Batch) -> None:
        """Run one iteration of all rows: choose the forest's shape, run it, learn from it, and hand out the text that
        can no longer change."""
        running = batch.running
        requests = [job.acceptance for _, job in running]
        # D layers of K drafts: what promises most steps per second, and no deeper than what is left to generate
        left = max(job.max_new - job.stats.steps for _, job in running)
        draft_work = batch.reading()
        shape = self.planner.choose(requests, draft_work).within(left)
        begun, looked_up_s = time.perf_counter(), 0.0
        if self.planner.foresees:
            state, widest = batch.state, deepest(self.method, left)
            prospects = self.drafter.prospects(state.beams, state.prompts, widest.depth, widest.drafts_per_layer)
            shape = self.planner.cut(shape, prospects, requests)
            looked_up_s = time.perf_counter() - begun
        self._shape = shape
        prompt_timer = PhaseTimer(events(self.caches.models[-1].device))
        if shape.runs_draft:
            batch.read_prompts(prompt_timer)
        # static shapes: slots and a suffix window for W + D*K nodes
        sizes = batch.iteration_shape(shape, batch.reading(), narrow=self.one_root and self.stepper.graphs is None)
        # draft the forest, one target forward over it, verify layer by layer, commit: Stepper.step
        with current(self.caches.target.device):
            captured = self.stepper.graphs is not None
            gate = None if captured else self.planner.gate(shape, [row for row, _ in running])
            report = self.stepper.step(batch.state, sizes, gate)
            seconds = self.stepper.timer.seconds()
            seconds["draft"] += looked_up_s
        nodes = replace(sizes, depth=len(report.layers[0])).nodes  # what went to the target
        self.stepper.observer.iterated(dict(running), nodes, seconds)
        # how far each row came, and how long it took, decides on the next forest
        layers = [report.layers[row] for row, _ in running]
        seconds_of_all = seconds | prompt_timer.seconds()
        self.planner.observe(
            Observation(shape, requests, layers, seconds_of_all, draft_work, self.stepper.steady, gate, looked_up_s)
        )
        names = self.drafter.sources
        for row, job in running:
            counters = report.rows[row]
            record_iteration(job, counters, report.layers[row], seconds, len(running), nodes, self.log_steps, names)
            self.scheduler.steps += counters.steps
            job.stats.draft_calls += report.draft_calls
            job.used, job.common_prefix, job.drafted = counters.used, counters.common_prefix, counters.drafted
        done = [row for row, _ in running if report.rows[row].invalid or report.rows[row].done]
        if done:
            self._hand_out(batch, done, report)
        for row, job in batch.running:
            self.results.progress(job, partial(common_tokens, batch.state, row))

    def _hand_out(self, batch: Batch, rows: list[int], report: Report) -> None:
        """Put results of rows that are done, and errors of those whose model returned NaN, and free the rows. The next
        window of a source waits before all other requests."""
        jobs, state, grammars = dict(batch.running), batch.state, self.tables.grammars.compiler
        for row in rows:
            if report.rows[row].invalid:
                self.caches.forget(row)
        finished = read_finished(state.finished, rows)
        with self.stepper.observer.span("detokenise"):
            results = {
                row: nan_result(jobs[row])
                if report.rows[row].invalid
                else collect(hypotheses, row, jobs[row], self.codec, grammars, state.trace)
                for row, hypotheses in zip(rows, finished, strict=True)
            }
        for row, result in results.items():
            job = jobs[row]
            self.drafter.row_ended(job.prompt, [hypothesis.token_ids for hypothesis in result.hypotheses])
            following = next_window(job, result, self.codec)
            if isinstance(following, RequestState):
                self.queue.waiting.appendleft(following)
            else:
                self.results.put(job.number, following)
        batch.remove(rows)
