"""An engine without a model: prompts say what happens to them. Nothing here imports torch.

`fail` gives an error result, `nan` a broken score, `slow` takes ten minutes of short iterations, `stubborn` a single
iteration as long, and both say on standard error when they begin and end; `pause` takes a second; `crash` and
`no memory` end the run, `die` the process.
FAKE_ROW_S says how long any other row takes, FAKE_GATE names a `Gate` before each row, FAKE_LOG_S says how often a log
line is due, and with FAKE_CLOCK=backwards the time of day loses an hour at every look.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import dsbd_cli
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.config.variant import Exactness
from dsbd_cli.errors import ModelError, PromptTooLongError, RowError
from dsbd_cli.requests import Hypothesis, Request, RequestResult
from dsbd_cli.stats import LayerStats, RequestStats, StepStats

if TYPE_CHECKING:
    from dsbd_cli.requests import EngineInfo

MODULE = "dsbd_cli.loading"
FAILING = "fail"


def tell(what: str) -> None:
    """A line on standard error that a test can wait for."""
    os.write(2, f"fake: {what}\n".encode())


class Gate:
    """Holds rows back in whatever process answers them, and tells who has begun them: so a test waits for what it needs
    and not for a time. A row is known by its prompt, `row N`; all others pass."""

    def __init__(self, folder: Path) -> None:
        self.begun, self.held = folder / "begun", folder / "held"

    def hold(self, first: int, end: int = sys.maxsize) -> None:
        """Rows from `first` up to `end` wait; those that were held before and are not any more go on."""
        new = self.held.with_name("new")
        new.write_text(f"{first} {end}")
        new.replace(self.held)

    def release(self) -> None:
        """No row waits."""
        self.hold(0, 0)

    def holders(self) -> set[int]:
        """Processes that have begun rows that wait; those that have ended since, too."""
        lines = self.begun.read_text().splitlines() if self.begun.exists() else []
        return {int(line.split()[0]) for line in lines if self._holds(int(line.split()[1]))}

    def pass_row(self, prompt: str) -> None:
        """Notes that this process has begun a row, and returns when it may be answered."""
        _, row, number = prompt.partition("row ")
        if not row:
            return
        with self.begun.open("a") as stream:
            stream.write(f"{os.getpid()} {number}\n")
        while self._holds(int(number)):
            time.sleep(0.01)

    def _holds(self, number: int) -> bool:
        try:
            first, end = map(int, self.held.read_text().split())
        except FileNotFoundError:
            return False
        return first <= number < end


class FakeEngine:
    """Answers in input order and reads `batch_size` requests ahead, as the real one does. before: called with each
    row's prompt before it is answered."""

    def __init__(
        self, method: MethodConfig, batch_size: int, log_steps: bool, before: Callable[[str], None] | None = None
    ) -> None:
        self.before = before
        self.method, self.batch_size, self.log_steps = method, batch_size, log_steps
        self.info: EngineInfo | None = None
        self.tell: Callable[[str], None] = lambda line: None
        self.stopping, self.steps, self.allowed = False, 0, None

    @property
    def exactness(self) -> Exactness:
        return self.method.exactness

    def remember(self, texts: object) -> None:
        """Draft nothing."""

    def stop(self) -> None:
        self.stopping = True

    def run(self, requests: Iterable[Request | RowError | None], *, ordered: bool = True) -> Iterator[RequestResult]:
        batch: list[Request | RowError] = []
        for request in requests:
            if request is not None:
                batch.append(request)
            if len(batch) == self.batch_size or request is None:
                yield from self._iteration(batch)
            if self.stopping:
                return
        yield from self._iteration(batch)

    def _iteration(self, batch: list[Request | RowError]) -> Iterator[RequestResult]:
        while batch and not self.stopping:
            request = batch.pop(0)
            if isinstance(request, RowError):
                yield RequestResult(Request(""), (), 0, RequestStats(), request)
                continue
            if request.prompt == "slow" and self._slow():
                return
            yield self._answer(request)

    def _slow(self) -> bool:
        """Whether it was stopped."""
        tell("slow begins")
        for _ in range(12000):
            time.sleep(0.05)
            self.steps += 1
            if self.stopping:
                return True
        tell("slow ends")
        return False

    def _answer(self, request: Request) -> RequestResult:
        prompt = request.prompt or " ".join(message["content"] for message in request.messages or ())
        if prompt == FAILING:
            error = PromptTooLongError("prompt has 900 tokens, but the target has 512 positions")
            return RequestResult(request, (), 0, RequestStats(), error)
        if prompt == "crash":
            raise RuntimeError("a bug\nin two lines")
        if prompt == "no memory":
            raise ModelError("the device is out of memory")
        if prompt == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt == "pause":
            time.sleep(1)
        if prompt == "stubborn":
            tell("stubborn begins")
            time.sleep(600)
            tell("stubborn ends")
        if self.before is not None:
            self.before(prompt)
        logprob = float("nan") if prompt == "nan" else -1.25
        beams = tuple(
            Hypothesis(f"{prompt}!{rank}", (5, 6, 2), "stop", logprob - rank, (logprob - rank) / 3)
            for rank in range(request.sampling.n_best)
        )
        return RequestResult(request, beams, 7, self._stats(request))

    def _stats(self, request: Request) -> RequestStats:
        stats = RequestStats(2, 8, 3, 16, 4, 12, 40, 0.1234567, 0.2, 0.3, 0.7)
        self.steps += stats.steps
        if self.log_steps:
            layer = LayerStats(1, 8, 4, 4, 4, True)
            stats.step_log = [StepStats(request.id, 1, 1, 2, 12, 40, 7, [layer], 0.1234567, 0.2, 0.3)]
        return stats


def from_environment() -> Callable[[str], None] | None:
    """What FAKE_GATE and FAKE_ROW_S ask for before each row."""
    row_s, gate = float(os.environ.get("FAKE_ROW_S", "0")), os.environ.get("FAKE_GATE")
    if gate is not None:
        return Gate(Path(gate)).pass_row
    return (lambda prompt: time.sleep(row_s)) if row_s else None


def fake_load(
    calls: list[dict[str, object]] | None = None, before: Callable[[str], None] | None = None
) -> Callable[..., FakeEngine]:
    """A stand-in for dsbd_cli.loading.load that notes what it was called with. before: given where it may
    be sent to another process, which has another environment."""

    def load(target: ModelSpec, draft: ModelSpec | None, **options: object) -> FakeEngine:
        if calls is not None:
            calls.append({"target": target, "draft": draft, **options})
        method, batch_size = options["method"], options["batch_size"]
        assert isinstance(method, MethodConfig)
        assert isinstance(batch_size, int)
        return FakeEngine(method, batch_size, bool(options["log_steps"]), before or from_environment())

    return load


def module(load: Callable[..., FakeEngine]) -> types.ModuleType:
    """A module with this `load`, to stand in the place of the real one."""
    made = types.ModuleType(MODULE)
    made.__dict__["load"] = load
    return made


if __name__ == "__main__":
    from dsbd_cli.cli.app import main
    from dsbd_cli.cli.run import progress
    from dsbd_cli.scale import worker

    signal.signal(signal.SIGINT, signal.default_int_handler)
    progress.LOG_INTERVAL_S = float(os.environ.get("FAKE_LOG_S", "60"))
    if os.environ.get("FAKE_CLOCK") == "backwards":
        moments = count(2_000_000_000, -3600)
        time.time = lambda: float(next(moments))
    load = fake_load(before=from_environment())
    sys.modules[MODULE] = dsbd_cli.__dict__["loading"] = module(load)
    worker.load_engine = load  # which goes to workers by value
    main()
