"""How often layers pass: fading counts by choice of drafts and by layer, of one request or of all; and how many
iterations requests take. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add, mul, truediv

from dsbd_cli.engine.core.report import LayerCounters

FADE = 0.97  # weight of the past, observation by observation
FIRST_RATE = 0.7  # chance of a layer to pass, believed before anything is seen
PRIOR = 2.0  # weight of what is believed, in layers
TRUST = 8.0  # weight of what all requests showed against what a request shows itself, in layers


@dataclass(slots=True)
class Acceptance:
    """Counts [choice][layer] of verifications that came to a layer and of those that passed it, a choice being a number
    of drafts. Empty until something was seen."""

    reached: list[list[float]] = field(default_factory=list)
    passed: list[list[float]] = field(default_factory=list)

    def open(self, choices: int, depth: int) -> None:
        """Room for counts, where there is none yet."""
        if not self.reached:
            self.reached = [[0.0] * depth for _ in range(choices)]
            self.passed = [[0.0] * depth for _ in range(choices)]

    def add(self, choice: int, layer: int, reached: float, passed: float) -> None:
        """Count what one iteration showed. reached, passed: verifications that came to the layer, and that passed
        it."""
        row = self.reached[choice]
        row[layer] = FADE * row[layer] + reached
        row = self.passed[choice]
        row[layer] = FADE * row[layer] + passed

    def rates(self, choice: int, first: float, weight: float) -> list[float]:
        """Chance of each layer to pass, drawn towards that of the layer above (`first` for the first layer), which
        weighs as much as `weight` verifications."""
        rates = []
        for passed, reached in zip(self.passed[choice], self.reached[choice], strict=True):
            first = (passed + weight * first) / (reached + weight)
            rates.append(first)
        return rates

    def alive(self, choice: int, prior: Sequence[float], weight: float) -> list[float]:
        """Chance that all layers down to each one pass: own counts, drawn towards rates that weigh as much as `weight`
        verifications. prior: those rates times the weight."""
        passed, reached = map(add, self.passed[choice], prior), map(weight.__add__, self.reached[choice])
        return list(accumulate(map(truediv, passed, reached), mul))


class PassRates:
    """How often layers pass with each of a few numbers of drafts: of all requests, and drawn towards that, of each."""

    def __init__(self, numbers: Sequence[int], depth: int, second: int = 0) -> None:
        """numbers: ascending. second: how many drafts of each are the second drafter's; a layer's `needed` counts those
        of the first."""
        self._numbers, self._depth, self._second = numbers, depth, second
        self._all = Acceptance()
        self._all.open(len(numbers), depth)

    def count(self, requests: Sequence[Acceptance], layers: Sequence[Sequence[LayerCounters]], drafts: int) -> None:
        """Layers of so many drafts, request by request. One that needed j of them would have passed with j."""
        known = [(at, number - self._second) for at, number in enumerate(self._numbers) if number <= drafts]
        for depth, counters in enumerate(zip(*layers, strict=True)):
            came = [(one, layer) for one, layer in zip(requests, counters, strict=True) if layer.reached]
            for at, enough in known if came else ():
                passed = [layer.passed and layer.needed <= enough for _, layer in came]
                for (request, _), held in zip(came, passed, strict=True):
                    request.open(len(self._numbers), self._depth)
                    request.add(at, depth, 1.0, held)
                self._all.add(at, depth, len(came), sum(passed))

    def steps(self, requests: Sequence[Acceptance]) -> list[float]:
        """Steps that one target call is expected to yield, of all requests together: without drafts, then for every
        number of drafts with 1 .. D layers. Each request yields 1 + the chance that all layers down to one pass, summed
        over the layers."""
        rows, first = float(len(requests)), FIRST_RATE
        found = [rows]
        own = [request for request in requests if request.reached]
        for choice in range(len(self._numbers)):
            rates = self._all.rates(choice, first, PRIOR)
            first = max(first, rates[0])  # more drafts pass no less often
            alive = [(rows - len(own)) * chance for chance in accumulate(rates, mul)]
            prior = [TRUST * rate for rate in rates]
            for request in own:
                alive = list(map(add, alive, request.alive(choice, prior, TRUST)))
            found += list(accumulate(alive, initial=rows))[1:]
        return found


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
