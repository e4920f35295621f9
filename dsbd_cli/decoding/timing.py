"""Phase times of an iteration: wall clock on the CPU, events on a GPU, so that timing adds no synchronisation.

Takes opaque event factories so that this file needs no tensor library.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Event", "PhaseTimer"]


class Event(Protocol):
    """A moment on a device's time line."""

    def record(self) -> None:
        """Mark now."""
        ...

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to a later one; both must have happened."""
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
    """Laps of one iteration. `seconds()` may be read once the device has reached the last lap (after the iteration's
    one transfer)."""

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
        """Seconds of each phase of the last iteration."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return {name: before.elapsed_time(after) / 1e3 for (_, before), (name, after) in pairs}
