"""Measurements of a whole engine: the measured side of a profile."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.variants import MIN_WIDTH, RULES
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.drafting.bridge.bridged import BridgedDraft
from dsbd_cli.engine.protocols import ForestModel
from dsbd_cli.errors import DsbdError, shorten
from dsbd_cli.io.lines.jsonl import LineWriter
from dsbd_cli.io.records.native_record import native_record
from dsbd_cli.io.records.record_parts import MethodRecord
from dsbd_cli.io.records.row import Row
from dsbd_cli.lab.metrics.memory import PeakMemory, synchronise
from dsbd_cli.lab.profiling.budget import Budget, CutOffError
from dsbd_cli.lab.profiling.timers import EngineLog
from dsbd_cli.lab.reports.profile_data import NO_DRAFT, ForestSize, Phase
from dsbd_cli.requests import EngineInfo, Request, RequestResult
from dsbd_cli.stats import RequestStats


def drafts_nodes(method: MethodConfig) -> bool:
    """Return whether a draft model runs the forest's nodes. It does not for look-ups, which have no model, nor for a
    bridge, whose draft has tokens of its own."""
    return method.needs_draft and not method.bridges


def setting_of(method: MethodConfig) -> ForestSize:
    """Return the part of a method that a profile varies."""
    if not method.depth:
        return NO_DRAFT
    return ForestSize(method.depth, method.drafts_per_layer, method.value(MIN_WIDTH) if method.dynamic else None)


def method_for(method: MethodConfig, setting: ForestSize) -> MethodConfig:
    """Return the method with another setting. Without a draft the width is always W."""
    if not setting.depth:
        # settings of drafting are dropped; rule fuzzy without a draft is plain sampling
        return MethodConfig(
            rule=MethodConfig().rule if RULES[method.rule].needs_draft else method.rule,
            num_beams=method.num_beams,
            depth=0,
            warp_scope=method.warp_scope,
            memory_saving=method.memory_saving,
        )
    changed = replace(method, depth=setting.depth, drafts_per_layer=setting.drafts_per_layer)
    if setting.min_width is None:
        return changed
    return changed.but(MIN_WIDTH, setting.min_width)


@dataclass(frozen=True, slots=True)
class EngineMeasurement:
    """The engine run over all requests, with one method. seconds: wall clock from the first request to the last record
    written. write_s: seconds of making and writing the records. peak_memory_bytes: of the process, or of the GPUs; None
    where it is unknown."""

    method: MethodConfig
    log: EngineLog
    results: tuple[RequestResult, ...]
    seconds: float
    write_s: float
    peak_memory_bytes: int | None

    @property
    def tokens(self) -> int:
        """Number of tokens of the best texts."""
        return sum(result.hypotheses[0].num_tokens for result in self.results if result.hypotheses)

    @property
    def stats(self) -> RequestStats:
        """Counters of all requests."""
        return RequestStats.total(result.stats for result in self.results)


@dataclass(frozen=True, slots=True)
class ProfiledPair:
    """The parts that all measurements of a profile share: a loaded engine, the requests, the number of rows decoded
    together, and the time that they may take."""

    loaded: Engine
    requests: tuple[Request, ...]
    batch_size: int
    budget: Budget = field(default_factory=Budget)

    @property
    def info(self) -> EngineInfo:
        """Names, dtypes and devices of the models."""
        assert self.loaded.info is not None
        return self.loaded.info

    @property
    def target(self) -> ForestModel:
        """The model whose text comes out."""
        return self.loaded.target

    @property
    def draft_model(self) -> ForestModel | None:
        """The draft's model, also of a bridged draft."""
        draft = self.loaded.draft
        return draft.model if isinstance(draft, BridgedDraft) else draft

    @property
    def models(self) -> tuple[ForestModel, ...]:
        """Target and draft."""
        return tuple(model for model in (self.target, self.draft_model) if model is not None)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of the models, each once."""
        return tuple({model.device for model in self.models})

    def engine(self, method: MethodConfig, *, log_steps: bool = False) -> Engine:
        """Make a new engine over the pair."""
        draft = self.loaded.draft if method.needs_draft else None
        return self.loaded.replace(draft=draft, method=method, batch_size=self.batch_size, log_steps=log_steps)

    def answers(self, engine: Engine, requests: Sequence[Request]) -> Iterator[RequestResult]:
        """Yield the results of an engine. Raises DsbdError where a row has failed, CutOffError where the budget's
        `stop` has cut it off."""
        done = 0
        with self.budget.running(engine.stop):
            for result in engine.run(requests):
                if result.error is not None:
                    raise DsbdError(
                        f"the prompt with id {shorten(result.request.id)} cannot be profiled: {result.error}"
                    )
                done += 1
                yield result
            if done < len(requests):
                raise CutOffError

    def timed(self, method: MethodConfig, *, log_steps: bool = False) -> EngineMeasurement:
        """Answer the requests and write their records to a file that is thrown away. Raises as `answers` does."""
        engine = self.engine(method, log_steps=log_steps)
        log = EngineLog(self.devices, captured=engine.stepper.graphs is not None)
        engine.observe(log)
        writing, results = 0.0, []
        record = MethodRecord(engine.method, self.info.target, self.info.draft)
        memories = [PeakMemory(device) for device in self.devices if device.type == "cuda"] or [
            PeakMemory(self.target.device)
        ]
        for memory in memories:
            memory.start()
        with tempfile.TemporaryDirectory() as folder:
            synchronise(*self.devices)
            start = time.perf_counter()
            with LineWriter.create(Path(folder) / "records.jsonl", overwrite=False) as writer:
                for index, result in enumerate(self.answers(engine, self.requests)):
                    before = time.perf_counter()
                    row = Row(index, index + 1, result.request.id, result.request, None, None, "")
                    writer.write(native_record(row, result, record))
                    writing += time.perf_counter() - before
                    results.append(result)
                before = time.perf_counter()
            writing += time.perf_counter() - before
            synchronise(*self.devices)
            seconds = time.perf_counter() - start
        peaks = [peak for memory in memories if (peak := memory.peak()) is not None]
        for model in self.models:
            model.release()
        return EngineMeasurement(engine.method, log, tuple(results), seconds, writing, sum(peaks) if peaks else None)


def phases_of(measurement: EngineMeasurement) -> tuple[Phase, ...]:
    """Return where the seconds of a measurement went. `other` is the remainder: scheduling, the host's reads, memory
    for the batch.

    `compact` is the move of kept slots in both caches; within a CUDA graph it is part of `verify`. A bridge runs new
    texts through its draft in the phase `draft`.
    """
    log = measurement.log
    seconds = {
        **{name: log.span_s(name) for name in ("tokenise", "prefill")},
        **log.phases,
        **{name: log.span_s(name) for name in ("compact", "detokenise")},
        "write": measurement.write_s,
    }
    seconds["verify"] -= seconds["compact"]
    if not measurement.method.depth:
        del seconds["draft"]  # nothing is drafted; making the roots counts as `other`
    seconds["other"] = max(0.0, measurement.seconds - sum(seconds.values()))
    count = max(log.iterations, 1)
    return tuple(Phase(name, value, value / count, value / measurement.seconds) for name, value in seconds.items())
