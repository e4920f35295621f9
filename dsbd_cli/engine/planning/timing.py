"""Phase times of an iteration, and lines fitted to times. On the CPU the wall clock is used, on a GPU events, so that
timing adds no synchronisation.

A timer is given an opaque factory of events, so this file needs no tensor library.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dsbd_cli.engine.planning.acceptance import FADE


class Event(Protocol):
    """A moment on a device's time line."""

    def record(self) -> None:
        """Mark the present moment."""
        ...

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to a later one. Both must have happened."""
        ...


class _Clock:
    """Wall-clock event."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Clock) -> float:
        return (end.at - self.at) * 1e3


class PhaseTimer:
    """Timer of the phases of one iteration. `seconds()` may be read once the device has reached the last lap (after the
    iteration's one transfer)."""

    def __init__(self, event: Callable[[], Event] | None = None) -> None:
        self._event: Callable[[], Event] = event or _Clock  # type: ignore[assignment]
        self._marks: list[tuple[str, Event]] = []

    def start(self) -> None:
        """Begin an iteration."""
        self._marks.clear()
        self.lap("start")

    def lap(self, name: str) -> None:
        """End a phase."""
        event = self._event()
        event.record()
        self._marks.append((name, event))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase of the last iteration."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return {name: before.elapsed_time(after) / 1e3 for (_, before), (name, after) in pairs}


@dataclass(slots=True)
class FittedLine:
    """The line seconds = a + b * x, fitted by least squares over fading observations. b is never negative, and keeps
    its value where x has been the same for long."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    slope: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Add one observation."""
        self.weight, self.x, self.y = FADE * self.weight + 1, FADE * self.x + x, FADE * self.y + y
        self.xx, self.xy = FADE * self.xx + x * x, FADE * self.xy + x * y

    def fit(self) -> tuple[float, float]:
        """Return a and b; zeros before any observation."""
        if not self.weight:
            return 0.0, 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x * mean_x
        if spread > 1e-6 * (1 + mean_x * mean_x):
            self.slope = max(0.0, (self.xy / self.weight - mean_x * mean_y) / spread)
        return mean_y - self.slope * mean_x, self.slope

    def at(self, x: float) -> float:
        """Return the predicted seconds; 0 before any observation."""
        a, b = self.fit()
        return max(0.0, a + b * x)
