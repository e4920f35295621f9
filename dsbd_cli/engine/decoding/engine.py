"""The engine: requests in, results out, in input order. Rows of one batch run together and are refilled as they
finish."""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, overload

import torch

from dsbd_cli.config import Exactness, MethodConfig, OnTooLong
from dsbd_cli.engine.core.grammar import GrammarCompiler, GrammarTable
from dsbd_cli.engine.core.protocols import ForestModel, TextCodec
from dsbd_cli.engine.core.stops import StopTable
from dsbd_cli.engine.core.token_rules import RuleTable
from dsbd_cli.engine.core.trie import TrieTable
from dsbd_cli.engine.decoding.answers import Catalogue, RowTries
from dsbd_cli.engine.decoding.batch import Batch, most_steps
from dsbd_cli.engine.decoding.budget import LOGIT_BYTES, PEEK, fitting_rows, least_bytes, memory_bytes, out_of_memory
from dsbd_cli.engine.decoding.caches import Caches
from dsbd_cli.engine.decoding.devices import captures, current, events, kernel_failed, kernels_for
from dsbd_cli.engine.decoding.encode import Encoder
from dsbd_cli.engine.decoding.jobs import AsDone, Job, ResultOrder, Results
from dsbd_cli.engine.decoding.observer import Observer
from dsbd_cli.engine.decoding.outcome import collect, common_tokens, ended, record_iteration
from dsbd_cli.engine.decoding.pieces import Pieces
from dsbd_cli.engine.decoding.planner import Shape, deepest, planner_for
from dsbd_cli.engine.decoding.step import Report, Stepper
from dsbd_cli.engine.decoding.timing import PhaseTimer
from dsbd_cli.engine.drafting import AnyDraft, BridgedDraft, DrafterInputs, Endings, make_drafter
from dsbd_cli.engine.drafting.base import Stopped
from dsbd_cli.engine.verify import make_rule
from dsbd_cli.errors import (
    NumericalError,
    OutOfMemoryRowError,
    RowError,
    UsageError,
)
from dsbd_cli.requests import Piece, Request, RequestResult, Source
from dsbd_cli.stats import RequestStats

__all__ = ["Engine", "EngineInfo"]

READ_AHEAD = 4

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What runs: names, dtypes and devices of the models, for records and reports. told: what the user should know of
    the target. kernels: names of the kernels in use, where the settings fit them. threads: of the processor. chat: the
    target has a chat template."""

    target: str
    draft: str | None
    dtype: str
    device: str
    draft_dtype: str | None = None
    draft_device: str | None = None
    told: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    threads: int | None = None
    chat: bool = False


class Engine:
    """Speculative beam decoding of many requests with one pair of models.

    Without a draft the method has depth 0, plain beam sampling or beam search by the same code, or a drafter that
    needs no model.
    """

    def __init__(
        self,
        target: ForestModel,
        draft: AnyDraft | None,
        codec: TextCodec,
        method: MethodConfig | None = None,
        *,
        batch_size: int | None = 8,
        info: EngineInfo | None = None,
        log_steps: bool = False,
        on_too_long: OnTooLong = "error",
        cuda_graphs: bool | None = None,
        kernels: bool | None = None,
        catalogues: Mapping[str, Catalogue] | None = None,
    ) -> None:
        """batch_size: requests decoded together at most; None for as many as fit in memory.

        log_steps: keep a StepStats per iteration in each result.

        on_too_long: a prompt that does not fit the models' positions fails, or loses tokens on its left.
        cuda_graphs: capture iterations as CUDA graphs; None: where both models lie whole on one GPU.
        kernels: run iterations with kernels in place of tensor code; None: on a GPU.
        catalogues: answers that requests may be held to, by name; the one named "" holds for all that name none.
        """
        name = None if draft is None else (info.draft if info is not None else None) or type(draft).__name__
        self.method = (method or MethodConfig()).fit_draft(name)
        if batch_size is not None and batch_size < 1:
            message = f"batch_size is {batch_size}, but must be 1 or more"
            raise UsageError(message, field="batch_size", value=batch_size, expected="1 or more")
        self.target, self.draft, self.codec = target, draft, codec
        self.batch_size, self.log_steps = batch_size or 1, log_steps
        self.steps = 0  # taken so far, those of unfinished requests too; another thread may look
        self.share_prefixes = True  # prompts of a run that begin alike; False: to measure what it saves
        self.one_root = True  # in a row's first iteration; False: W, as in captured iterations
        self.tell: Callable[[str], None] = _warn  # takes what the user should know and stops nothing
        self._fit_batch = batch_size is None
        self._stopping = False
        device = target.device
        memory = self._check_memory(device)
        eos = torch.zeros(target.vocab_size, dtype=torch.bool)
        ending = {token for token in codec.eos_ids if token < target.vocab_size}
        eos[list(ending)] = True
        self._stops = StopTable(codec.token_bytes(), target.vocab_size, device)
        self._grammars = GrammarTable(GrammarCompiler(codec, target.vocab_size), device)
        self._drafter = make_drafter(
            DrafterInputs(self.method, draft, target.vocab_size, codec, device, self._grammars)
        )
        shared = self._drafter.model
        self.catalogues, compiler = dict(catalogues or {}), self._grammars.compiler
        self._encoder = Encoder(target, shared, codec, self.method, on_too_long, memory, self.catalogues, compiler)
        self._tries = RowTries(TrieTable(target.vocab_size, device), self.catalogues.values())
        self._rules = RuleTable(
            eos.to(device), getattr(codec, "timestamps", None), on_logits=self.method.num_beams == 1
        )
        graphs = captures([target] if shared is None else [target, shared], self._drafter.on_host, cuda_graphs)
        if graphs is not None:
            graphs.tell = self._tell
        used = kernels_for(device, kernels)
        self.info = info
        self._caches = Caches(target, shared, large_steps=graphs is not None, moving=self._forget_graphs)
        self._stepper = Stepper(
            self._caches,
            self._drafter,
            make_rule(self.method),
            Endings(eos.to(device), len(ending), self._stops),
            PhaseTimer(events(device)),
            graphs,
            lambda: self._stopping,
            [self._rules, self._tries.table, self._grammars],
        )
        self._use_kernels(used)
        self._planner = planner_for(self.method)
        self._names = self.method.drafter_names if "+" in self.method.drafter else ()
        self._rows = self.batch_size  # out of memory lowers it
        self._proven = 1  # most rows that have run
        self._running = False
        self._shape: Shape | None = None  # of the iteration under way
        self.observe(Observer())

    def _check_memory(self, device: torch.device) -> int:
        """Bytes of the device. Raises UsageError where it cannot hold an iteration of any row."""
        method, memory = self.method, memory_bytes(device)
        nodes = deepest(method, 1).nodes(method.num_beams)
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
    def footprint(self) -> str:
        """What a row takes: nodes and logits of its largest iteration, and cache per token."""
        nodes = deepest(self.method, 1 << 30).nodes(self.method.num_beams)
        logits = nodes * self.target.vocab_size * LOGIT_BYTES
        cache = sum(model.kv_bytes_per_slot() for model in self.models)
        return (
            f"a row takes up to {nodes} nodes and {logits / 2**20:.0f} MiB of logits in an iteration, and "
            f"{cache / 2**10:.0f} KiB of cache per token"
        )

    @property
    def allowed(self) -> str | None:
        """How many answers the catalogues hold, and what they take of the device's memory; None without any."""
        return self._tries.about

    @property
    def models(self) -> list[ForestModel]:
        """Those whose caches the engine keeps: the target, and the draft model where it runs the forest's nodes."""
        return self._caches.models

    @property
    def stepper(self) -> Stepper:
        """What runs the iterations."""
        return self._stepper

    def observe(self, observer: Observer) -> None:
        """Tell the observer, and no other, what the engine does from now on."""
        self._observer = self._stepper.observer = self._caches.observer = observer

    def stop(self) -> None:
        """Ask `run` to end, at the next layer that is drafted or after the iteration it is in, for good; requests that
        are not done give no result. A run that begins later raises UsageError.

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
        self._refuse_stopped()
        for result in results:
            result.check()
        return results[0] if alone else results

    def run(
        self, requests: Iterable[Request | str | RowError | None], *, seed: int = 0, ordered: bool = True
    ) -> Iterator[RequestResult]:
        """Decode requests; yield one result each, in input order, as soon as its turn has come. Not ordered: as soon as
        it is done; `result.request` is the request itself where that has an id and a seed.

        A string is a prompt. seed: of the run; a request without a seed gets its own from this and its id, and one
        without an id is named by its place, from 0. The command does the same, so it gives the same text.

        A request that fails yields a result with `error`; the others go on. The input is read lazily, a few batches
        ahead at most. An item None says that nothing is ready yet: the engine goes on with what it has. An item that is
        a RowError stands for a request that has failed already: its result comes in its place. Out of memory halves
        the batch and decodes its requests again, which gives the same results; a request that does not fit alone fails.
        """
        return self._answers(Source(requests, seed), ResultOrder() if ordered else AsDone())

    def stream(self, requests: Iterable[Request | str | RowError | None], *, seed: int = 0) -> Iterator[Piece]:
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
        self._refuse_stopped()
        if self._running:
            gc.collect()  # a run that nobody holds any more may wait in a cycle
        if self._running:
            raise UsageError(
                "this engine is in use by another run: finish that one, close() its iterator, or load a second engine"
            )
        self._running = True
        self._caches.begin(share=self.share_prefixes)
        self._drafter.release()  # what it has read in an earlier run
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

    def _refuse_stopped(self) -> None:
        """Raises UsageError once `stop` was called."""
        if self._stopping:
            raise UsageError("this engine was stopped and answers nothing any more: load another one")

    def _nodes(self, jobs: Iterable[Job]) -> int:
        """Most nodes of an iteration of these requests."""
        return deepest(self.method, most_steps(jobs)).nodes(self.method.num_beams)

    def _choose_rows(self, backlog: deque[Job]) -> None:
        """The batch size that memory allows, from the requests seen first."""
        if backlog:
            nodes = self._nodes(backlog)
            slots = self._caches.round_slots(max(len(job.prompt) + job.max_new for job in backlog) + 2 * nodes)
            sources = max(self._caches.source_bytes(job.source) for job in backlog)
            self.batch_size = self._rows = fitting_rows(self._caches.models, slots, nodes, beside=sources)
            self._fit_batch = False

    def _decode(self, source: Source, order: Results[Item], backlog: deque[Job]) -> Iterator[Item]:
        """One batch, refilled from the source as its rows finish, until it is empty or out of memory."""
        rows = min(len(backlog), self._rows)
        keep_text = self._drafter.needs_text
        tables = (self._stops, self._tries, self._rules, self._grammars)
        batch = Batch(rows, self.method, self._caches, *tables, keep_text=keep_text)
        while not self._stopping and (backlog or batch.running):
            try:
                batch.admit(backlog)
                self._iterate(batch, order)
                self._shape = None
                self._proven = max(self._proven, len(batch.jobs))
            except Stopped:
                return
            except Exception as error:
                running = [job for _, job in batch.running]
                if out_of_memory(error):
                    self._recover(running, order, backlog)
                elif kernel_failed(error) and self._leave_kernels(error):
                    self._again(running, backlog)
                else:
                    raise
                yield from order.ready()
                return
            yield from order.ready()
            # a batch that began small, because little was ready, ends so that a larger one can begin
            growing = len(batch.jobs) < self._rows and not source.exhausted()
            if not growing and order.held < READ_AHEAD * self.batch_size:
                self._read(source, len(batch.free) - len(backlog), order, backlog)
                yield from order.ready()
            if source.exhausted() and not backlog and (kept := batch.shrink()):
                self._drafter.select(torch.tensor(kept, device=self.target.device))

    def _iterate(self, batch: Batch, order: Results[object]) -> None:
        """One iteration of all rows: choose the forest, run it, learn from it, hand out what is certain."""
        running = batch.running
        requests = [job.acceptance for _, job in running]
        # D layers of K drafts: what promises most steps per second, and no deeper than what is left to generate
        left = max(job.max_new - job.stats.steps for _, job in running)
        reading = batch.reading()
        shape = self._planner.choose(requests, reading).within(left)
        certain = self._drafter.certain(batch.state.beams, *shape)
        self._shape = shape = shape if certain is None else self._planner.cut(shape, certain)
        read = PhaseTimer(events(self._caches.models[-1].device))
        if shape.depth:
            batch.read_prompts(read)
        # static shapes: slots and a tail window for W + D*K nodes
        plan = batch.plan(shape, batch.reading(), narrow=self.one_root and self._stepper.graphs is None)
        # draft the forest, one target forward over it, verify layer by layer, commit: Stepper.step
        with current(self.target.device):
            report = self._stepper.step(batch.state, plan)
            seconds = self._stepper.timer.seconds()
        self._observer.iterated([job for _, job in running], plan.nodes, seconds)
        # how far each walk came, and how long it took, decides on the next forest
        layers = [report.layers[row] for row, _ in running]
        self._planner.observe(shape, requests, layers, seconds | read.seconds(), reading, self._stepper.steady)
        for row, job in running:
            counters = report.rows[row]
            record_iteration(
                job, counters, report.layers[row], seconds, len(running), plan.nodes, self.log_steps, self._names
            )
            self.steps += counters["steps"]
            job.stats.draft_calls += report.draft_calls
            job.used, job.trunk, job.drafted = counters["used"], counters["trunk"], counters["drafted"]
        over = [row for row, _ in running if report.rows[row]["invalid"] or report.rows[row]["done"]]
        if over:
            self._hand_out(batch, over, report, order)
        for row, job in batch.running:
            order.progress(job, partial(common_tokens, batch.state, row))

    def _hand_out(self, batch: Batch, rows: list[int], report: Report, order: Results[object]) -> None:
        """Results of rows that are done, and errors of those whose model returned NaN. The rows are free then."""
        jobs, state, grammars = dict(batch.running), batch.state, self._grammars.compiler
        for row in rows:
            if report.rows[row]["invalid"]:
                self._caches.forget(row)
        over = ended(state.finished, rows)
        with self._observer.span("detokenise"):
            results = {
                row: _broken(jobs[row])
                if report.rows[row]["invalid"]
                else collect(found, row, jobs[row], self.codec, grammars, state.trace)
                for row, found in zip(rows, over, strict=True)
            }
        for row, result in results.items():
            order.put(jobs[row].number, result)
        batch.remove(rows)

    def _recover(self, running: list[Job], order: Results[object], backlog: deque[Job]) -> None:
        """After out of memory: the running requests wait again, for fewer drafts where the planner has a choice, or for
        half as many rows."""
        smaller = self._planner.out_of_memory(self._shape, len(running))
        self._shape = None
        self._caches.release()
        self._drafter.release()
        alone = len(running) == 1 and not smaller
        if alone and not running[0].retried:
            running[0].retried = True  # once more, with all memory given back
        elif alone:
            job = running.pop()
            tokens = len(job.prompt) + job.max_new
            error = OutOfMemoryRowError(
                f"out of memory with this row alone ({tokens} tokens, {self._nodes([job])} nodes in an iteration): "
                "shorten it, or lower num_beams, depth or drafts_per_layer"
            )
            order.put(job.number, RequestResult(job.request, (), len(job.prompt), job.stats, error))
        # a row that fails alone says nothing about how many others fit
        if not smaller:
            self._rows = max(1, len(running) // 2) if running else self._proven
        self._again(running, backlog)

    def _again(self, running: list[Job], backlog: deque[Job]) -> None:
        """Requests whose batch has ended wait again, first of all."""
        for job in running:
            self.steps -= job.stats.steps
            job.stats = RequestStats()
        backlog.extendleft(reversed(running))

    def _use_kernels(self, names: frozenset[str]) -> None:
        self._stepper.kernels = names
        if self.info is not None:
            self.info = replace(self.info, kernels=tuple(sorted(names)))
        for model in (self.target, self._drafter.model):
            if model is not None and hasattr(model, "use_kernels"):
                model.use_kernels(names)

    def _leave_kernels(self, error: Exception) -> bool:
        """Tensor code from now on, in layers as in iterations: a kernel that passed its trial cannot be compiled or
        launched at this shape. False where none was in use."""
        used = bool(self._stepper.kernels)
        self._use_kernels(frozenset())
        draft = self.draft.model if isinstance(self.draft, BridgedDraft) else self.draft
        for model in {id(model): model for model in (self.target, draft)}.values():
            if model is not None and hasattr(model, "leave_kernels"):
                used = model.leave_kernels() or used
        if not used:
            return False
        self._caches.release()
        self._drafter.release()
        said = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        self._tell(f"the run goes on without kernels, because one of them fails here ({said})")
        return True

    def _read(self, source: Source, count: int, order: Results[object], backlog: deque[Job]) -> None:
        """Up to `count` requests that can be decoded; results of those that cannot go straight out."""
        while count > 0 and (item := source.next()) is not None:
            number, request = item
            if isinstance(request, RowError):
                order.put(number, RequestResult(Request("", id=str(number)), (), 0, RequestStats(), request))
                continue
            try:
                with self._observer.span("tokenise"):
                    job = self._encoder.job(number, request)
                backlog.append(job)
                count -= 1
            except RowError as error:
                order.put(number, RequestResult(request, (), 0, RequestStats(), error))

    def _tell(self, line: str) -> None:
        self.tell(line)  # whoever listens now

    def _forget_graphs(self) -> None:
        """The caches are about to move."""
        if self._stepper.graphs is not None:
            self._stepper.graphs.forget()


def _warn(line: str) -> None:
    """For those who do not say otherwise: a warning of Python's."""
    warnings.warn(line, RuntimeWarning, stacklevel=2)


def _broken(job: Job) -> RequestResult:
    """The error of a row whose model returned NaN."""
    error = NumericalError(
        f"the target returned NaN after {job.stats.steps} steps: the checkpoint may need another dtype (try float32)"
    )
    return RequestResult(job.request, (), len(job.prompt), job.stats, error)
