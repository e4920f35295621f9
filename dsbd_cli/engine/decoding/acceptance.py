"""How often layers pass: fading counts by choice of drafts and by layer, of one request or of all; and how many
iterations requests take. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add, mul, truediv

__all__ = ["FADE", "Acceptance", "Lives"]

FADE = 0.97  # weight of the past, observation by observation


@dataclass(slots=True)
class Acceptance:
    """Counts [choice][layer] of walks that came to a layer and of those that passed it. Empty until something was
    seen."""

    reached: list[list[float]] = field(default_factory=list)
    passed: list[list[float]] = field(default_factory=list)

    def open(self, choices: int, depth: int) -> None:
        """Room for counts, where there is none yet."""
        if not self.reached:
            self.reached = [[0.0] * depth for _ in range(choices)]
            self.passed = [[0.0] * depth for _ in range(choices)]

    def add(self, choice: int, layer: int, reached: float, passed: float) -> None:
        """What one iteration showed."""
        row = self.reached[choice]
        row[layer] = FADE * row[layer] + reached
        row = self.passed[choice]
        row[layer] = FADE * row[layer] + passed

    def rates(self, choice: int, first: float, weight: float) -> list[float]:
        """Chance of each layer to pass, drawn towards that of the layer above (`first` for the first layer), which
        weighs as much as `weight` walks."""
        rates = []
        for passed, reached in zip(self.passed[choice], self.reached[choice], strict=True):
            first = (passed + weight * first) / (reached + weight)
            rates.append(first)
        return rates

    def alive(self, choice: int, prior: Sequence[float], weight: float) -> list[float]:
        """Chance that all layers down to each one pass: own counts, drawn towards rates that weigh as much as `weight`
        walks. prior: those rates times the weight."""
        passed, reached = map(add, self.passed[choice], prior), map(weight.__add__, self.reached[choice])
        return list(accumulate(map(truediv, passed, reached), mul))


@dataclass(slots=True)
class Lives:
    """Iterations that a request takes: a fading mean over those that ended. expected: at first, what is believed before
    any has, as if one had shown it."""

    expected: float
    ended: int = 1
    _running: dict[int, tuple[Acceptance, int]] = field(default_factory=dict)  # the object is kept, so is its id

    def now(self) -> float:
        """Iterations that the running requests take, of which some are known to take more than was expected."""
        running = [max(self.expected, iterations) for _, iterations in self._running.values()]
        return sum(running) / len(running) if running else self.expected

    def restart(self) -> None:
        """The running requests start over; none has ended."""
        self._running.clear()

    def see(self, requests: Sequence[Acceptance]) -> None:
        """The requests of one more iteration; those no longer among them have ended."""
        running = {id(request): (request, self._running.get(id(request), (request, 0))[1] + 1) for request in requests}
        for key, (_, iterations) in self._running.items():
            if key not in running:
                self.ended += 1
                self.expected += (iterations - self.expected) * max(1 - FADE, 1 / self.ended)
        self._running = running
