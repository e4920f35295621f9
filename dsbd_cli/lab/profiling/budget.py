"""The time that a profile may take, what it leaves out for that, and how it is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dsbd_cli.engine.planning.timing import FittedLine
from dsbd_cli.errors import UsageError
from dsbd_cli.lab.reports.profile_data import ForestSize

ANNOUNCED_FROM_S = 1.0


class CutOffError(Exception):
    """An end of the measuring by a signal. What was measured until then is the profile."""


@dataclass(slots=True)
class Budget:
    """Seconds that may be spent on measuring, counted from `start`. Without a limit everything is measured.

    announce: called with what is being measured. found: called with each result. left_out: parts that had to be left
    out.
    """

    seconds: float = float("inf")
    announce: Callable[[str], None] = lambda message: None
    clock: Callable[[], float] = time.perf_counter
    found: Callable[[str], None] = lambda message: None
    left_out: list[str] = field(default_factory=list)
    stopped: bool = False
    _began: float = 0.0
    _running: Callable[[], None] | None = None

    def start(self) -> None:
        """Start to count the time, once the models are loaded."""
        self._began = self.clock()

    @property
    def left(self) -> float:
        """Seconds that are left; less than 0 where a part took longer than expected."""
        return self.seconds - (self.clock() - self._began)

    def affords(self, what: str, expected_s: float, *, reserved_s: float = 0.0) -> bool:
        """Return whether there is time for a part, and for `reserved_s` seconds of later parts that are worth more. If
        not, note the part as left out."""
        if expected_s + reserved_s <= self.left:
            return True
        self.left_out.append(f"{what} (about {max(1.0, expected_s):.0f} s)")
        return False

    def tell(self, what: str, expected_s: float = 0.0) -> None:
        """Announce what is measured next. Raises CutOffError once `stop` was called."""
        self.check()
        self.announce(what + (f", about {expected_s:.0f} s" if expected_s >= ANNOUNCED_FROM_S else ""))

    def check(self) -> None:
        """Raise CutOffError once `stop` was called."""
        if self.stopped:
            raise CutOffError

    def stop(self) -> None:
        """End soon, and keep what is measured. May be called from a signal handler."""
        self.stopped = True
        if self._running is not None:
            self._running()

    @contextmanager
    def running(self, stop: Callable[[], None]) -> Iterator[None]:
        """Run the block, in which an engine runs that `stop` ends. Raises CutOffError where it was stopped before."""
        self._running = stop
        try:
            self.check()
            yield
        except UsageError:
            self.check()  # a stopped engine refuses to begin
            raise
        finally:
            self._running = None


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected seconds of measurements that have not been made yet, estimated from single forwards of one row.

    Attributes:
        target, draft: seconds of a forward as a line over its nodes; draft is None where no draft model runs the nodes.
            most: nodes of the widest forward of the target that was timed. num_beams: W.
        now, prefill_s, iterations, steps_per_call: setting and results of a measurement that was made. scale: measured
            seconds of an iteration of it over the seconds of its forwards of one row.
    """

    target: FittedLine
    draft: FittedLine | None
    most: int
    num_beams: int
    now: ForestSize
    prefill_s: float = 0.0
    iterations: int = 0
    steps_per_call: float = 1.0
    scale: float = 1.0

    def iteration(self, setting: ForestSize) -> float:
        """Return the seconds of the forwards in one iteration of one row."""
        drafting = self.draft.at(setting.drafts_per_layer) if self.draft is not None else 0.0
        return self.target.at(setting.nodes(self.num_beams)) + setting.depth * drafting

    def request(self, prompt_tokens: int, new_tokens: int) -> float:
        """Return the most seconds that one request may take: a prompt costs no more per token than a forest, and an
        iteration yields a token or more."""
        return prompt_tokens * self.target.at(self.most) / self.most + new_tokens * self.iteration(self.now)

    def seconds(self, setting: ForestSize) -> float:
        """Return the seconds of answering all requests once more with another setting. A smaller forest may yield only
        one step per iteration."""
        now = self.now
        smaller = setting.depth < now.depth or setting.drafts_per_layer < now.drafts_per_layer
        iterations = self.iterations * (self.steps_per_call if smaller else 1.0)
        return self.prefill_s + self.scale * iterations * self.iteration(setting)
