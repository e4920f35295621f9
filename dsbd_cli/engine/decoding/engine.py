"""The engine: it takes requests and yields results, in input order by default. The run itself is in loop.py."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, TypeVar, Unpack, overload

import torch

from dsbd_cli.config.method import MethodConfig, check_engine_options
from dsbd_cli.config.model import OnTooLong
from dsbd_cli.config.variant import Exactness
from dsbd_cli.engine.cache.caches import Caches
from dsbd_cli.engine.constraints.answers import Catalogue
from dsbd_cli.engine.decoding.encode import Encoder
from dsbd_cli.engine.decoding.loop import Loop
from dsbd_cli.engine.decoding.recovery import Recovery
from dsbd_cli.engine.decoding.scheduler import RequestQueue, Scheduler
from dsbd_cli.engine.decoding.streaming import Pieces
from dsbd_cli.engine.decoding.tables import RequestTables
from dsbd_cli.engine.drafting.base import DrafterInputs
from dsbd_cli.engine.drafting.bridge.bridged import AnyDraft, BridgedDraft
from dsbd_cli.engine.drafting.drafters import make_drafter
from dsbd_cli.engine.iteration.devices import captures, events, iteration_ops
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.iteration.request_state import CompletionOrder, ResultOrder, Results
from dsbd_cli.engine.iteration.stepper import Stepper
from dsbd_cli.engine.planning.memory_limit import check_memory, footprint
from dsbd_cli.engine.planning.planner import planner_for
from dsbd_cli.engine.planning.timing import PhaseTimer
from dsbd_cli.engine.protocols import ForestModel, KernelModel, TextCodec
from dsbd_cli.engine.verify.rules import make_rule
from dsbd_cli.errors import RowError, UsageError
from dsbd_cli.ops.interface import Ops, host_reads
from dsbd_cli.ops.select import ITERATION, suffix_missing
from dsbd_cli.requests import EngineInfo, NumberedRequests, Piece, Request, RequestResult

Item = TypeVar("Item")
_in_use = set[int]()  # ids of the models of all runs under way


class EngineOptions(TypedDict, total=False):
    """Arguments of Engine that stay as they were given."""

    batch_size: int | None
    on_too_long: OnTooLong
    cuda_graphs: bool | None
    kernels: bool | None


class EngineChanges(EngineOptions, total=False):
    """Arguments of Engine, by name."""

    target: ForestModel
    draft: AnyDraft | None
    codec: TextCodec
    method: MethodConfig | None
    info: EngineInfo | None
    log_steps: bool
    catalogues: Mapping[str, Catalogue] | None


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
        """Join loaded models; `load` and `from_models` do so.

        Args:
            target: the model whose text comes out.
            draft: the model or head that proposes, or None.
            codec: text to tokens and back.
            method: how to decode.
            batch_size: requests decoded together at most; None for as many as fit in memory.
            info: names, dtypes and devices of the models.
            log_steps: keep a StepStats per iteration in each result.
            on_too_long: a prompt that does not fit the models' positions fails, or loses tokens on its left.
            cuda_graphs: capture iterations as CUDA graphs; None: where both models lie whole on one GPU.
            kernels: run iterations with kernels in place of tensor code; None: on a GPU.
            catalogues: answers that requests may be held to, by name; the one named "" holds for all that name none.
        """
        check_engine_options(method, batch_size, on_too_long, log_steps, cuda_graphs, kernels)
        name = None if draft is None else (info.draft if info is not None else None) or type(draft).__name__
        self.method = (method or MethodConfig()).fit_draft(name)
        serves = target.invariant and host_reads(target.device) and suffix_missing() is None
        info = info and replace(info, drafts=serves or not self.method.assumed)
        if self.method.assumed and not serves:
            self.method = self.method.without_drafts()
        if batch_size is not None and batch_size < 1:
            message = f"batch_size is {batch_size}, but must be 1 or more"
            raise UsageError(message, field="batch_size", value=batch_size, expected="1 or more")
        self.target, self.draft, self.codec, self.info = target, draft, codec, info
        self.catalogues, self.log_steps = dict(catalogues or {}), log_steps
        self.share_prefixes = True  # read what prompts of a run share once; False: to measure what that saves
        self.one_root = True  # one root in a row's first iteration; False: W roots, as in captured iterations
        self.tell: Callable[[str], None] = _warn  # receives lines that the user should know but that stop nothing
        self._asked = EngineOptions(
            batch_size=batch_size, on_too_long=on_too_long, cuda_graphs=cuda_graphs, kernels=kernels
        )
        self._stopping = False
        device, vocab_size = target.device, target.vocab_size
        memory = check_memory(self.method, target)
        self._tables = RequestTables.empty(codec, vocab_size, self.catalogues, device)
        grammars = self._tables.grammars
        self._drafter = make_drafter(DrafterInputs(self.method, draft, vocab_size, codec, device, grammars))
        shared = self._drafter.model
        self._encoder = Encoder(
            target, shared, codec, self.method, on_too_long, memory, self.catalogues, grammars.compiler, self._tell
        )
        graphs = captures([target] if shared is None else [target, shared], self._drafter.on_host, cuda_graphs)
        if graphs is not None:
            graphs.tell = self._tell
        ops = iteration_ops(device, kernels)
        self._caches = Caches(target, shared, large_steps=graphs is not None, moving=self._forget_graphs)
        self._stepper = Stepper(
            self._caches,
            self._drafter,
            make_rule(self.method),
            self._tables.endings,
            PhaseTimer(events(device)),
            graphs,
            lambda: self._stopping,
            self._tables.constraints,
        )
        self._use(ops)
        self._planner = planner_for(
            self.method,
            gated=host_reads(device),
            draft_share=0.0 if shared is None else shared.read_bytes / target.read_bytes,
        )
        self._scheduler = Scheduler(self._caches, self.method, batch_size)
        self._recovery = Recovery(self._scheduler, self._caches, self._drafter, self._leave_kernels, self._tell)
        self.observe(Observer())

    def replace(self, **changes: Unpack[EngineChanges]) -> Engine:
        """Return a new engine that differs in these arguments of the constructor alone. The two share their models, so
        they must not run at once."""
        arguments = self._arguments()
        arguments.update(changes)
        return Engine(**arguments)

    def _arguments(self) -> EngineChanges:
        """Return the constructor's arguments, with what has been changed since."""
        return {
            **self._asked,
            "target": self.target,
            "draft": self.draft,
            "codec": self.codec,
            "method": self.method,
            "info": self.info,
            "log_steps": self.log_steps,
            "catalogues": self.catalogues,
        }

    @property
    def exactness(self) -> Exactness:
        """Exactness of the output, compared with plain decoding.

        It is that of the method, except for `same-text`. Where the target's logits depend on what else is in a forward,
        rounding can change a text, and only the distribution is the same (`same-law`).
        """
        promised = self.method.exactness
        return "same-law" if promised == "same-text" and not self.target.invariant else promised

    @property
    def footprint(self) -> str:
        """A sentence on what a row takes: nodes and logits of its largest iteration, and cache per token."""
        return footprint(self.method, self.models)

    @property
    def allowed(self) -> str | None:
        """A phrase with the number of answers that the catalogues hold and the device memory they take; None without
        any."""
        return self._tables.tries.about

    @property
    def batch_size(self) -> int:
        """Requests decoded together at most; 1 before the first run where memory decides."""
        return self._scheduler.batch_size

    @property
    def steps(self) -> int:
        """Steps taken so far, including those of unfinished requests. Another thread may read it."""
        return self._scheduler.steps

    @property
    def models(self) -> list[ForestModel]:
        """Models whose caches the engine keeps: the target, and the draft model where it runs the forest's nodes."""
        return self._caches.models

    @property
    def stepper(self) -> Stepper:
        """The stepper that runs the iterations."""
        return self._stepper

    def remember(self, texts: Iterable[Sequence[str]]) -> None:
        """Let the drafter look up texts of earlier runs. texts: those of each row, the best one first."""
        for row in texts if self._drafter.learns_rows else ():
            self._drafter.row_ended((), self.codec.encode_pieces(list(row)))

    def observe(self, observer: Observer) -> None:
        """Let this observer, and no other, receive what the engine does from now on."""
        self._stepper.observer = self._caches.observer = observer

    def stop(self) -> None:
        """Ask `run` to end for good: at the next layer that is drafted, or after the iteration under way. Requests that
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
        return self.run_into(ResultOrder() if ordered else CompletionOrder(), requests, seed=seed)

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
        return self.run_into(Pieces(self.codec), requests, seed=seed)

    def run_into(
        self, results: Results[Item], requests: Iterable[Request | str | RowError | None], *, seed: int = 0
    ) -> Iterator[Item]:
        """Decode requests as `run` does, and yield what `results` gives out meanwhile."""
        return self._answers(NumberedRequests(requests, seed), results)

    @torch.inference_mode()
    def _answers(self, numbered: NumberedRequests, results: Results[Item]) -> Iterator[Item]:
        """Decode all requests of the source, and yield what `results` gives out meanwhile.

        Raises UsageError where another run uses this engine, or one that shares a model with it.
        """
        self._refuse_stopped()
        bridged = [self.draft.model] if isinstance(self.draft, BridgedDraft) else []
        models = {id(model) for model in (*self.models, *bridged)}  # whose caches hold one run's rows
        if models & _in_use:
            gc.collect()  # a run that nobody holds any more may be kept by a reference cycle
        if models & _in_use:
            raise UsageError(
                "the models of this engine are in use by another run: finish that one, close() its iterator, or load "
                "a second engine"
            )
        _in_use.update(models)
        try:
            self._caches.begin(share=self.share_prefixes)
            self._drafter.release()  # drop what it has read in an earlier run
            loop = Loop(
                self.method,
                self.codec,
                self._caches,
                self._tables,
                self._drafter,
                self._stepper,
                self._planner,
                self._scheduler,
                self._recovery,
                stopping=lambda: self._stopping,
                one_root=self.one_root,
                log_steps=self.log_steps,
                queue=RequestQueue(numbered, self._encoder, results, self._stepper.observer),
                results=results,
            )
            yield from loop.run()
        finally:
            _in_use.difference_update(models)
            self._drafter.run_ended()

    def _refuse_stopped(self) -> None:
        """Raise UsageError once `stop` was called."""
        if self._stopping:
            raise UsageError("this engine was stopped and answers nothing any more: load another one")

    def _use(self, ops: Ops) -> None:
        """Run iterations with these operations from now on."""
        self._stepper.ops = ops
        if self.info is not None:
            of_target = (report for report in self.info.ops if report[0] not in {own.op for own in ops.report})
            self.info = replace(self.info, ops=(*of_target, *ops.facts))
        for model in self.models:
            if isinstance(model, KernelModel):
                model.use_ops(ops)

    def _leave_kernels(self) -> bool:
        """Switch to tensor code, in layers and in iterations, because a kernel that passed its trial cannot be compiled
        or launched at this shape. Return False where no kernel was in use."""
        ops = self._stepper.ops
        used = bool(ops.by("triton"))
        self._use(ops.without(*ITERATION, reason="a kernel failed"))
        draft = self.draft.model if isinstance(self.draft, BridgedDraft) else self.draft
        for model in {id(model): model for model in (self.target, draft)}.values():
            if isinstance(model, KernelModel):
                used = model.leave_kernels() or used
        return used

    def _tell(self, line: str) -> None:
        self.tell(line)  # looked up at each call, because it may be replaced

    def _forget_graphs(self) -> None:
        """Drop the captured iterations, because the caches are about to move."""
        if self._stepper.graphs is not None:
            self._stepper.graphs.forget()


def _warn(line: str) -> None:
    """Issue a Python warning: the default of `Engine.tell`."""
    warnings.warn(line, RuntimeWarning, stacklevel=2)
