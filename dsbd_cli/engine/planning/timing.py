"""Phase times of an iteration, and lines fitted to times. On the CPU the wall clock is used, on a GPU events, so that
timing adds no synchronisation.

A timer is given an opaque factory of events, so this file needs no tensor library.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_cli.engine.planning.acceptance import FADE, Numbers

UNIT_SHARE, RATIO_SHARE = 0.2, 0.1  # of the last observation in a time and in a ratio
FORGOTTEN = 0.999  # factor on what is known of a choice, for each observation of another one
FREE_NODES = 16  # nodes that are assumed to cost as much together as an iteration of as many or fewer
LEAST_RATIO = 0.05  # of any number of nodes
SLOPES = 32  # slopes between neighbours in time that a line is fitted to


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
    """The line seconds = a + b * x, fitted to times that come one after the other.

    b is the median slope between neighbours in time with different x, weighted by the distance of the two x, over the
    last SLOPES. So it does not matter that the machine is slower at one time than at another: memory of a shared
    machine changes its speed by half from minute to minute, and least squares took that for the price of x. b is never
    negative, and keeps its value where x stays the same. a goes by fading means.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    _last: tuple[float, float] | None = None
    _slopes: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SLOPES))

    def add(self, x: float, y: float) -> None:
        """Add one observation."""
        self.weight, self.x, self.y = FADE * self.weight + 1, FADE * self.x + x, FADE * self.y + y
        if self._last is not None and x != self._last[0]:
            distance = x - self._last[0]
            self._slopes.append(((y - self._last[1]) / distance, abs(distance)))
        self._last = x, y

    def fit(self) -> tuple[float, float]:
        """Return a and b; zeros before any observation."""
        if not self.weight:
            return 0.0, 0.0
        b = max(0.0, self._median_slope())
        return (self.y - b * self.x) / self.weight, b

    def at(self, x: float) -> float:
        """Return the predicted seconds; 0 before any observation."""
        a, b = self.fit()
        return max(0.0, a + b * x)

    def _median_slope(self) -> float:
        """Return the slope at which half of the weight is reached, 0 before two different x."""
        half = sum(distance for _, distance in self._slopes) / 2
        for slope, distance in sorted(self._slopes):
            half -= distance
            if half <= 0:
                return slope
        return 0.0


@dataclass(slots=True)
class RelativeTimes:
    """Times of iterations by their number of nodes, each relative to the first that was added.

    A few more nodes may cost nothing, and the next one much, so no line is fitted. The time of a unit follows the speed
    of the machine at once, the ratios do so slowly. Ratios of numbers that are not used fall, so that they are tried
    again.
    """

    unit: float = 0.0
    _ratios: dict[int, float] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)

    def add(self, nodes: int, seconds: float) -> None:
        """Add one observation."""
        if not self._ratios:
            self.unit, self._ratios[nodes] = seconds, 1.0
        ratio = self._ratios.get(nodes, seconds / self.unit)
        if nodes in self._ratios:
            self.unit += UNIT_SHARE * (seconds / ratio - self.unit)
        self._seen[nodes] = self._seen.get(nodes, 0) + 1
        if len(self._seen) > 1:
            ratio += max(RATIO_SHARE, 1 / self._seen[nodes]) * (seconds / self.unit - ratio)
        for other, value in self._ratios.items():
            self._ratios[other] = 1 + (value - 1) * FORGOTTEN if value > 1 else value
        self._ratios[nodes] = ratio

    def knows(self, nodes: int) -> bool:
        """Return whether this number of nodes was timed."""
        return nodes in self._ratios

    def at(self, nodes: NDArray[np.int64]) -> Numbers:
        """Return the expected ratios of these numbers of nodes: between two that are known by a line, beyond them by
        FREE_NODES, or as many as an iteration had at first, if that is more."""
        known = sorted(self._ratios) or [0]
        price = 1 / max(FREE_NODES, next(iter(self._ratios), 0))
        between = np.interp(nodes, known, [self._ratios.get(number, 1.0) for number in known])
        beyond = np.maximum(0, nodes - known[-1]) - np.maximum(0, known[0] - nodes)
        return np.asarray((between + price * beyond).clip(LEAST_RATIO), np.float64)
