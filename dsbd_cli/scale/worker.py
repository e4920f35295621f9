"""An engine in a worker process, in a thread of its own: rows come from an inbox, answers go to an outbox.

This file does not import Ray. A worker is a plain object whose `hello` and `exchange` return within moments, so that
silence means that the process hangs.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from dsbd_cli import errors
from dsbd_cli._version import __version__
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.config.variant import Exactness
from dsbd_cli.errors import DsbdError, RowError
from dsbd_cli.requests import EngineInfo, Request, RequestResult

if TYPE_CHECKING:
    from dsbd_cli.engine.decoding.engine import Engine

WAIT_S = 0.2  # an exchange answers after this time at the latest
IDLE_S = 0.02  # an engine with nothing to do looks into the inbox after this time
BUSY_S = 0.005  # an engine that asks for rows again only after this time has computed, and is not kept waiting

LIBRARY_LOG = logging.getLogger("dsbd_cli")


class RunsRequests(Protocol):
    """The part of an engine's interface that is used here. `Engine` has it, and so have the workers together."""

    @property
    def info(self) -> EngineInfo | None: ...
    @property
    def exactness(self) -> Exactness: ...
    @property
    def allowed(self) -> str | None: ...
    @property
    def steps(self) -> int: ...
    def stop(self) -> None: ...
    def run(self, requests: Iterable[Request | RowError | None], *, ordered: bool = True) -> Iterator[RequestResult]:
        """Run requests as Engine.run does."""
        ...


class LoadedEngine(RunsRequests, Protocol):
    """An engine of this process. tell: receives lines that the user should know."""

    tell: Callable[[str], None]


LoadEngine = Callable[[], LoadedEngine]


def load_engine(target: ModelSpec, draft: ModelSpec | None, **options: object) -> Engine:
    """Call dsbd_cli.loading.load. It is imported here, because a driver of workers needs no tensor library."""
    from dsbd_cli import loading

    load: Callable[..., Engine] = loading.load
    return load(target, draft, **options)


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The setup of every worker. load: makes its engine. models: those whose files must be the same at all workers."""

    load: LoadEngine
    models: tuple[ModelSpec, ...]
    batch_size: int


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Facts about a loaded worker and its place. checkpoints: digests of the models' files, see `checkpoint_digest`.
    allowed: description of what its catalogues hold."""

    dsbd: str
    checkpoints: tuple[tuple[str, ...], ...]
    exactness: Exactness
    allowed: str | None
    host: str
    engine: EngineInfo | None

    def difference(self, other: WorkerInfo) -> str | None:
        """Return why another worker would not give the same texts, as in `dsbd is 0.1.0 there and 0.2.0 here`; None
        where it would."""
        theirs = other._compared()
        for name, value in self._compared().items():
            if value != theirs[name]:
                return f"{name} is {theirs[name]} there and {value} here"
        return None

    def _compared(self) -> dict[str, object]:
        """Return what must be the same at all workers."""
        compared = {name: getattr(self, name) for name in ("dsbd", "checkpoints", "exactness", "allowed")}
        compared |= {name: getattr(self.engine, name, None) for name in ("dtype", "draft_dtype", "chat")}
        return {**compared, "device": None if self.engine is None else self.engine.device.split(":")[0]}


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why an engine does not answer any more. kind: name of the error's class."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error in one line."""
        return cls(type(error).__name__, " ".join(str(error).split()) or "no message")

    @property
    def error(self) -> DsbdError | None:
        """The error, where it says that a run cannot go on; None where another try may succeed."""
        kind = getattr(errors, self.kind, None)
        return kind(self.message) if isinstance(kind, type) and issubclass(kind, DsbdError) else None

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


Answered = tuple[int, RequestResult]  # a row's number, and its result without the request, which the driver has
NO_REQUEST = Request("")  # takes the request's place in a result that is sent


@dataclass(frozen=True, slots=True)
class Exchange:
    """Answers that a worker returns, and the state of its engine.

    steps: taken since it was loaded, those of unfinished rows included. exactness: of its answers, weaker than at load
    where a kernel has failed since; None: not loaded. lines: for the user, since the exchange before.
    """

    answers: list[Answered]
    steps: int
    failure: Failure | None = None
    exactness: Exactness | None = None
    lines: tuple[str, ...] = ()


class _LogWarnings(logging.Handler):
    """A handler that passes on what the library logs as a warning."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


class Worker:
    """An engine that a thread loads and runs. Rows and answers pass through `exchange`."""

    def __init__(self, setup: WorkerSetup, *, owns_process: bool = True) -> None:
        """owns_process: the process is there for this worker alone. Ctrl-C is then ignored, because it is for the
        driver, which ends its workers, and what the library logs as a warning goes to the driver. Otherwise both are
        left to the process."""
        self._setup = setup
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._handler = _LogWarnings(self._lines.put) if owns_process else None
        if self._handler is not None:
            LIBRARY_LOG.addHandler(self._handler)
        if owns_process and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._info: WorkerInfo | None = None
        self._failure: Failure | None = None
        self._loaded = threading.Event()
        self._engine: LoadedEngine | None = None
        self._inbox: queue.SimpleQueue[tuple[int, Request]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Answered | None] = queue.SimpleQueue()
        self._numbers: dict[int, tuple[int, Request]] = {}  # by id of the request
        threading.Thread(target=self._work, name="dsbd-engine", daemon=True).start()

    def hello(self, wait_s: float = WAIT_S) -> WorkerInfo | Failure | None:
        """Return what is loaded, or why it cannot be; None while it is loading. Returns within `wait_s` seconds."""
        self._loaded.wait(wait_s)
        return self._failure or self._info

    def put(self, rows: Sequence[tuple[int, Request]]) -> None:
        """Take rows, each with a number of its own."""
        for row in rows:
            self._inbox.put(row)

    def exchange(self, rows: Sequence[tuple[int, Request]], wait_s: float = WAIT_S) -> Exchange:
        """Take rows and return the answers that are done. It returns after `wait_s` seconds, or as soon as there is an
        answer and the engine has taken all rows, so that it can be given more. While there are rows left to take,
        answers are gathered, because one message costs the driver as much as many answers."""
        self.put(rows)
        done: list[Answered] = []
        until = time.monotonic() + wait_s
        while self._failure is None or not self._outbox.empty():
            may_return = bool(done) and self._inbox.empty()
            try:
                item = self._outbox.get(timeout=0.0 if may_return else max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if item is not None:
                done.append(item)
        engine, failure, lines = self._engine, None if done else self._failure, self._take_lines()
        if engine is None:
            return Exchange(done, 0, failure, lines=lines)
        return Exchange(done, engine.steps, failure, engine.exactness, lines)

    def _take_lines(self) -> tuple[str, ...]:
        """Return the lines since the last call."""
        lines = list[str]()
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._lines.get_nowait())
        return tuple(lines)

    def _work(self) -> None:
        """Load an engine, then answer until the process ends. This is the work of the thread."""
        try:
            self._engine = engine = self._setup.load()
            engine.tell = self._lines.put
            self._info = self._described(engine)
            self._loaded.set()
            for result in engine.run(self._requests(), ordered=False):
                number, _ = self._numbers.pop(id(result.request))
                self._outbox.put((number, replace(result, request=NO_REQUEST)))
        except BaseException as error:  # of any kind: the driver must hear of it
            if self._handler is not None:
                LIBRARY_LOG.removeHandler(self._handler)
            self._failure = Failure.of(error)
            self._loaded.set()
            self._outbox.put(None)

    def _described(self, engine: RunsRequests) -> WorkerInfo:
        from dsbd_cli.models.checkpoints.digest import checkpoint_digest

        return WorkerInfo(
            dsbd=__version__,
            checkpoints=tuple(tuple(checkpoint_digest(model).values()) for model in self._setup.models),
            exactness=engine.exactness,
            allowed=engine.allowed,
            host=socket.gethostname(),
            engine=engine.info,
        )

    def _requests(self) -> Iterator[Request | None]:
        """Yield the rows of the inbox, and None where there is none."""
        idle_since = -BUSY_S  # time at which the engine last got None
        while True:
            busy = time.monotonic() - idle_since > BUSY_S
            try:
                number, request = self._inbox.get(timeout=0.0 if busy else IDLE_S)
            except queue.Empty:
                idle_since = time.monotonic()
                yield None
                continue
            if self._inbox.empty():
                self._outbox.put(None)  # ends an exchange that gathers answers
            # a new object, because the engine's answer is found by the identity of its request
            request = replace(request)
            self._numbers[id(request)] = (number, request)
            yield request
