"""Clocks around the models, the codec and the phases of an engine, put there from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dsbd_cli.engine.core.protocols import (
    ForestInput,
    ForestModel,
    SourceCodec,
    SourceModel,
    SourceRequest,
    TextCodec,
)
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.decoding.timing import PhaseTimer
from dsbd_cli.requests import Request, Segment
from dsbd_cli.token_rules import Timestamps, TokenRules

__all__ = ["RunLog", "TimedModel", "log_phases", "synchronise", "timed_codec", "timed_model"]

Role = Literal["target", "draft"]
Kind = Literal["forest", "prefill"]
PHASES = ("draft", "target", "verify")


def synchronise(*devices: torch.device) -> None:
    """Wait until the devices have done what they were asked."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class Stopwatch:
    """A duration on a device's own time line, from now on, without a synchronisation of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._seconds = 0.0
        self._mark()

    def _mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._seconds = time.perf_counter() - self._seconds

    def stop(self) -> Callable[[], float]:
        """End it. What is returned gives the seconds, once the device has come so far."""
        self._mark()
        if self._events:
            first, last = self._events
            return lambda: first.elapsed_time(last) / 1e3
        return partial(float, self._seconds)


@dataclass(slots=True)
class Forward:
    """One forward: nodes per row, rows, active slots; `first` of its model in its iteration."""

    role: Role
    kind: Kind
    nodes: int
    rows: int
    slots: int
    first: bool
    seconds: Callable[[], float]


@dataclass(slots=True)
class RunLog:
    """Everything that one run tells. Seconds of phases are sums over the iterations.

    every: all forwards and moves are in it; else those of prefills alone (see TimedModel).
    """

    every: bool = True
    forwards: list[Forward] = field(default_factory=list)
    moves: list[Callable[[], float]] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    tokenise_s: float = 0.0
    detokenise_s: float = 0.0
    iterations: int = 0
    seen: set[Role] = field(default_factory=set)
    reserved: dict[Role, int] = field(default_factory=dict)

    def of(self, role: Role, kind: Kind = "forest") -> list[Forward]:
        """All logged forwards of one model and kind."""
        return [one for one in self.forwards if (one.role, one.kind) == (role, kind)]

    def forward_s(self, role: Role, kind: Kind) -> float:
        """Seconds of all logged forwards of one model and kind."""
        return sum(one.seconds() for one in self.of(role, kind))

    @contextmanager
    def adding(self, name: Literal["tokenise_s", "detokenise_s"]) -> Iterator[None]:
        """Add the seconds of a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def move_s(self) -> float:
        """Seconds of all logged moves, which are part of the phase verify."""
        return sum(seconds() for seconds in self.moves)


class TimedModel:
    """A model whose forwards and moves are logged.

    A CUDA graph that repeats an iteration calls no Python, so nothing inside it could be logged: where the log wants
    every forward, the model says that it cannot be captured; else it logs prefills, which never are.
    """

    def __init__(self, inner: ForestModel, role: Role, log: RunLog, *, name_scopes: bool = False) -> None:
        """name_scopes: name the forwards in a profiler's trace."""
        self.inner, self.role, self.log = inner, role, log
        self._name_scopes = name_scopes

    @property
    def capturable(self) -> bool:
        """Whether iterations may become CUDA graphs."""
        return not self.log.every and self.inner.capturable

    @property
    def generation(self) -> int:
        """As the inner model's."""
        return self.inner.generation

    @property
    def head_ids(self) -> Tensor | None:
        """As the inner model's."""
        return self.inner.head_ids

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.inner.vocab_size

    @property
    def device(self) -> torch.device:
        """Of inputs and logits."""
        return self.inner.device

    @property
    def max_positions(self) -> int | None:
        """As the inner model's."""
        return self.inner.max_positions

    @property
    def invariant(self) -> bool:
        """As the model that is timed."""
        return self.inner.invariant

    @property
    def token_rules(self) -> TokenRules:
        """As the inner model's."""
        return getattr(self.inner, "token_rules", None) or TokenRules()

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """Logs the most rows x slots."""
        self.log.reserved[self.role] = max(self.log.reserved.get(self.role, 0), rows * slots)
        self.inner.reserve(rows, slots, window)

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        """The inner forward, timed."""
        if logits and not self.log.every:
            return self.inner.forward(batch)
        kind: Kind = "forest" if logits else "prefill"
        scope: AbstractContextManager[object] = nullcontext()
        if self._name_scopes:
            scope = torch.profiler.record_function(f"{self.role} {kind} forward")
        with scope:
            watch = Stopwatch(self.device)
            output = self.inner.forward(batch, logits=logits)
            seconds = watch.stop()
        rows, nodes, slots = batch.mask.shape
        first = kind == "forest" and self.role not in self.log.seen
        self.log.seen.add(self.role)
        self.log.forwards.append(Forward(self.role, kind, nodes, rows, slots, first, seconds))
        return output

    def move(self, source: Tensor, target: Tensor, trunk: Tensor) -> None:
        """The inner move, timed."""
        if not self.log.every:
            self.inner.move(source, target, trunk)
            return
        watch = Stopwatch(self.device)
        self.inner.move(source, target, trunk)
        self.log.moves.append(watch.stop())

    def select_rows(self, rows: Tensor) -> None:
        """As the inner model."""
        self.inner.select_rows(rows)

    def clear(self, row: int, start: int = 0) -> None:
        """As the inner model."""
        self.inner.clear(row, start)

    @property
    def copies_prefixes(self) -> bool:
        """As the inner model."""
        return self.inner.copies_prefixes

    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """As the inner model."""
        self.inner.copy_prefixes(copies)

    def release(self) -> None:
        """As the inner model."""
        self.inner.release()

    def kv_bytes_per_slot(self) -> int:
        """As the inner model."""
        return self.inner.kv_bytes_per_slot()

    def state_bytes(self, window: int) -> int:
        """As the inner model."""
        return self.inner.state_bytes(window)


class _TimedSourceModel(TimedModel):
    """A model with an encoder, whose reading of sources is logged as a prefill."""

    inner: SourceModel

    @property
    def max_source(self) -> int | None:
        """As the inner model's."""
        return self.inner.max_source

    @property
    def source_vocab_size(self) -> int:
        """As the inner model's."""
        return self.inner.source_vocab_size

    def source_bytes(self, source: Tensor) -> int:
        """As the inner model."""
        return self.inner.source_bytes(source)

    def encode(self, rows: Sequence[int], sources: Sequence[Tensor]) -> None:
        """The inner reading, timed."""
        watch = Stopwatch(self.device)
        self.inner.encode(rows, sources)
        longest = max(source.shape[-1] for source in sources)
        self.log.forwards.append(Forward(self.role, "prefill", longest, len(sources), longest, False, watch.stop()))


def timed_model(inner: ForestModel, role: Role, log: RunLog, *, name_scopes: bool = False) -> TimedModel:
    """A model whose forwards are logged, of its kind."""
    kind = _TimedSourceModel if isinstance(inner, SourceModel) else TimedModel
    return kind(inner, role, log, name_scopes=name_scopes)


class _TimedCodec:
    """A codec whose encoding and decoding is timed."""

    def __init__(self, inner: TextCodec, log: RunLog) -> None:
        self.inner, self.log = inner, log

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """End tokens."""
        return self.inner.eos_ids

    def encode(self, prompt: str) -> list[int]:
        """Timed."""
        with self.log.adding("tokenise_s"):
            return self.inner.encode(prompt)

    def encode_pieces(self, texts: list[str]) -> list[list[int]]:
        """As the inner codec."""
        return self.inner.encode_pieces(texts)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Timed."""
        with self.log.adding("tokenise_s"):
            return self.inner.encode_chat(messages)

    def decode(self, ids: list[int]) -> str:
        """Timed."""
        with self.log.adding("detokenise_s"):
            return self.inner.decode(ids)

    def token_bytes(self) -> list[bytes]:
        """As the inner codec."""
        return self.inner.token_bytes()


class _TimedSourceCodec(_TimedCodec):
    """A codec of a model with an encoder."""

    inner: SourceCodec

    def source(self, request: Request) -> SourceRequest:
        """Timed."""
        with self.log.adding("tokenise_s"):
            return self.inner.source(request)

    @property
    def timestamps(self) -> Timestamps | None:
        """The codec's own."""
        return self.inner.timestamps

    def segments(self, ids: Sequence[int]) -> tuple[Segment, ...]:
        """The codec's own."""
        return self.inner.segments(ids)

    def cut(self, source: Tensor, room: int) -> Tensor | None:
        """As the inner codec."""
        return self.inner.cut(source, room)


def timed_codec(inner: TextCodec, log: RunLog) -> _TimedCodec:
    """A codec whose encoding and decoding is timed, of its kind."""
    return _TimedSourceCodec(inner, log) if isinstance(inner, SourceCodec) else _TimedCodec(inner, log)


class _PhaseLog(PhaseTimer):
    """The engine's own timer, whose laps are also summed up."""

    def __init__(self, inner: PhaseTimer, log: RunLog, *, name_scopes: bool) -> None:
        super().__init__()
        self._inner, self._log, self._name_scopes = inner, log, name_scopes
        self._scope: AbstractContextManager[object] = nullcontext()
        self._open: list[str] = []

    def start(self) -> None:
        self._log.seen.clear()
        self._open = list(PHASES)
        self._enter()
        self._inner.start()

    def lap(self, name: str) -> None:
        self._inner.lap(name)
        self._scope.__exit__(None, None, None)
        self._enter()

    def seconds(self) -> dict[str, float]:
        found = self._inner.seconds()
        for name, value in found.items():
            self._log.phases[name] = self._log.phases.get(name, 0.0) + value
        self._log.iterations += 1
        return found

    def _enter(self) -> None:
        """Name what runs until the next lap in a profiler's trace."""
        self._scope = nullcontext()
        if self._name_scopes and self._open:
            self._scope = torch.profiler.record_function(self._open.pop(0))
        self._scope.__enter__()


def log_phases(engine: Engine, log: RunLog, *, name_scopes: bool = False) -> None:
    """Sum the engine's phases up in the log."""
    engine.stepper.timer = _PhaseLog(engine.stepper.timer, log, name_scopes=name_scopes)
