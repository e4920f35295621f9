"""Pass rates of layers: fading counts by layer and by choice of drafts, of one request or of all. Also the number of
iterations that requests take. No tensors.

Letters: D layers, M choices: each pair of a least confidence and a number of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsbd_cli.engine.core.report import LayerCounters

FADE = 0.97  # factor on the weight of all earlier observations at each new one
FIRST_RATE = 0.7  # assumed chance that a layer passes, before any observation
PRIOR = 2.0  # weight of an assumed rate, in observed layers
SHARED_WEIGHT = 8.0  # weight of the rate of all requests in the rate of one request, in observed layers

Numbers = NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Acceptance:
    """Counts [2, D, M]: verifications that reached a layer, and those that passed it. None before the first."""

    counts: Numbers | None = None
    _look_ups: Acceptance | None = None

    def look_ups(self) -> Acceptance:
        """Return the counts of iterations of the same request that drafted look-ups alone, beside a draft model."""
        if self._look_ups is None:
            self._look_ups = Acceptance()
        return self._look_ups

    def add(self, reached: Numbers, passed: Numbers, depth: int) -> None:
        """Add the observations of one iteration, and fade the earlier ones. reached, passed: [layers, M], verifications
        that reached the layer, and those that passed it. depth: D."""
        layers, choices = reached.shape
        if self.counts is None:
            self.counts = np.zeros((2, depth, choices))
        fade = np.where(reached > 0, FADE, 1.0)
        self.counts[:, :layers] = fade * self.counts[:, :layers] + np.stack((reached, passed))


class PassRates:
    """Rates at which layers pass with each choice: of all requests together, and of each request, shrunk towards the
    rate of all.

    A layer that needed j drafts would have passed with j, so every iteration informs on all smaller numbers of drafts.
    A layer whose confidence is too low for a choice does not go to the target with that choice, which counts as not
    passed. So an iteration also informs on all larger least confidences.
    """

    def __init__(self, numbers: Sequence[int], depth: int, second: int = 0, least: Sequence[float] = (0.0,)) -> None:
        """numbers: numbers of drafts, ascending. second: how many drafts of each number are the second drafter's; a
        layer's `needed` counts only those of the first. least: least confidences, ascending."""
        self._least, self._depth = np.array(least), depth
        self._numbers, self._enough = np.array(numbers), np.array(numbers) - second
        self._all = Acceptance(np.zeros((2, depth, len(least) * len(numbers))))
        # [D, confidences]: layers that were drafted, and of them those that went to the target
        self._drafted, self._given = np.zeros((depth, len(least))), np.zeros((depth, len(least)))

    def count(
        self,
        requests: Sequence[Acceptance],
        layers: Sequence[Sequence[LayerCounters]],
        drafts: int,
        least: float = 0.0,
        confidences: Sequence[float] | None = None,
    ) -> None:
        """Count the layers of one iteration. layers: counters of each request's layers. drafts: K of the iteration.
        least: confidence that a layer had to be above to go to the target. confidences: of the layers that were
        drafted, perhaps one more than went to the target; None: not known."""
        depth = len(layers[0]) if layers else 0
        drafted = depth if confidences is None else len(confidences)
        if not drafted:
            return
        confidence = np.full(drafted, np.inf) if confidences is None else np.array(confidences)
        known = self._least >= least
        given = np.logical_and.accumulate(confidence[:, None] > self._least)  # [layers, confidences]
        reached_layer = np.vstack((known, given[:-1] & known))
        self._drafted[:drafted] = np.where(reached_layer, FADE, 1.0) * self._drafted[:drafted] + reached_layer
        self._given[:drafted] = np.where(reached_layer, FADE, 1.0) * self._given[:drafted] + (reached_layer & given)
        known = np.repeat(known, len(self._numbers)) & np.tile(self._numbers <= drafts, len(self._least))
        reached_layer, given = (np.repeat(one, len(self._numbers), axis=1) & known for one in (reached_layer, given))
        enough = np.tile(self._enough, len(self._least))
        shown = [[(layer.reached, layer.passed, layer.needed) for layer in counters] for counters in layers]
        if drafted > depth:  # verification reached this layer, too, but the target did not run it
            shown = [[*own, (own[-1][1] if own else 1, 0, 0)] for own in shown]
        reached, passed, needed = np.array(shown).transpose(2, 0, 1)[..., None]
        arrived = reached_layer & (reached > 0)  # [requests, layers, M]
        passed_layer = arrived & given & (passed > 0) & (needed <= enough)
        for request, came, held in zip(requests, arrived, passed_layer, strict=True):
            request.add(came, held, self._depth)
        self._all.add(arrived.sum(0), passed_layer.sum(0), self._depth)

    def reach_target(self) -> Numbers:
        """Return the chance that all layers down to each one go to the target, where they are to be drafted:
        [confidences, D]."""
        shares: Numbers = (self._given + PRIOR) / (self._drafted + PRIOR)
        return shares.cumprod(0).T

    def steps(self, requests: Sequence[Acceptance]) -> Numbers:
        """Return the expected steps of one target call, summed over the requests, with 1 .. D layers:
        [confidences, numbers, D]. Each request yields 1 + the sum over the layers of the chance that all layers down to
        that one pass."""
        size = self._depth, len(self._least), len(self._numbers)
        assert self._all.counts is not None
        reached, passed = self._all.counts.reshape(2, *size)
        rates, first = np.empty(size), np.full(len(self._least), FIRST_RATE)
        for choice in range(len(self._numbers)):  # more drafts pass no less often
            rates[0, :, choice] = (passed[0, :, choice] + PRIOR * first) / (reached[0, :, choice] + PRIOR)
            first = np.maximum(first, rates[0, :, choice])
        for layer in range(1, self._depth):  # the rate of the layer above is the assumed rate of each
            rates[layer] = (passed[layer] + PRIOR * rates[layer - 1]) / (reached[layer] + PRIOR)
        own = [request.counts for request in requests if request.counts is not None]
        alive = (len(requests) - len(own)) * rates.cumprod(0)
        if own:
            came, held = np.stack(own, 1).reshape(2, -1, *size)
            chances = (held + SHARED_WEIGHT * rates) / (came + SHARED_WEIGHT)
            alive += chances.cumprod(1).sum(0)
        return len(requests) + alive.cumsum(0).transpose(1, 2, 0)


@dataclass(slots=True)
class RequestLengths:
    """Iterations that a request takes: a fading mean over those that ended. expected: the mean. Its first value counts
    as if one request had ended with it."""

    expected: float
    ended: int = 1
    _running: dict[int, tuple[Acceptance, int]] = field(default_factory=dict)  # keeps each object, so its id is unique

    def now(self) -> float:
        """Return the mean of the iterations that the running requests are expected to take. A request that has run
        longer than expected counts with the iterations that it has run."""
        running = [max(self.expected, iterations) for _, iterations in self._running.values()]
        return sum(running) / len(running) if running else self.expected

    def restart(self) -> None:
        """Forget the running requests, because they start over. None of them counts as ended."""
        self._running.clear()

    def see(self, requests: Sequence[Acceptance]) -> None:
        """Count one more iteration, of these requests. Those that are no longer among them have ended."""
        running = {id(request): (request, self._running.get(id(request), (request, 0))[1] + 1) for request in requests}
        for key, (_, iterations) in self._running.items():
            if key not in running:
                self.ended += 1
                self.expected += (iterations - self.expected) * max(1 - FADE, 1 / self.ended)
        self._running = running
