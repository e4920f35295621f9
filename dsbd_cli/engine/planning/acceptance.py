"""How often layers pass: fading counts by choice of drafts and by layer, of one request or of all; and how many
iterations requests take. No tensors.

Letters: D layers, M choices: each of a few least confidences with each of a few numbers of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsbd_cli.engine.core.report import LayerCounters

FADE = 0.97  # weight of the past, observation by observation
FIRST_RATE = 0.7  # chance of a layer to pass, believed before anything is seen
PRIOR = 2.0  # weight of what is believed, in layers
TRUST = 8.0  # weight of what all requests showed against what a request shows itself, in layers

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Acceptance:
    """Counts [D, M] of verifications that came to a layer and of those that passed it. None until something was
    seen."""

    reached: Numbers | None = None
    passed: Numbers | None = None

    def add(self, reached: Numbers, passed: Numbers) -> None:
        """Count what one iteration showed of its layers. reached, passed: [layers, M], verifications that came to the
        layer, and that passed it."""
        assert self.reached is not None
        assert self.passed is not None
        fade, layers = np.where(reached > 0, FADE, 1.0), len(reached)
        self.reached[:layers] = fade * self.reached[:layers] + reached
        self.passed[:layers] = fade * self.passed[:layers] + passed


class PassRates:
    """How often layers pass with each choice: of all requests, and drawn towards that, of each.

    A layer that needed j drafts would have passed with j, so every iteration informs on all smaller numbers. A layer
    whose confidence is too low for a choice does not go to the target there, which counts as not passed. So an
    iteration also informs on all larger least confidences.
    """

    def __init__(self, numbers: Sequence[int], depth: int, second: int = 0, least: Sequence[float] = (0.0,)) -> None:
        """numbers: of drafts, ascending. second: how many drafts of each are the second drafter's; a layer's `needed`
        counts those of the first. least: confidences, ascending."""
        self._least, self._depth = np.array(least), depth
        self._numbers, self._enough = np.array(numbers), np.array(numbers) - second
        self._all = self._opened()
        # [D, confidences]: layers that were drafted, and of them those that went to the target
        self._drafted, self._given = np.zeros((depth, len(least))), np.zeros((depth, len(least)))

    def _opened(self) -> Acceptance:
        size = self._depth, len(self._least) * len(self._numbers)
        return Acceptance(np.zeros(size), np.zeros(size))

    def count(
        self,
        requests: Sequence[Acceptance],
        layers: Sequence[Sequence[LayerCounters]],
        drafts: int,
        least: float = 0.0,
        confidences: Sequence[float] | None = None,
    ) -> None:
        """Layers of so many drafts, request by request. least: confidence below which none went to the target.
        confidences: of the layers that were drafted, perhaps one more than went to the target; None: not known."""
        depth = len(layers[0]) if layers else 0
        drafted = depth if confidences is None else len(confidences)
        if not drafted:
            return
        sure = np.full(drafted, np.inf) if confidences is None else np.array(confidences)
        known = self._least >= least
        given = np.logical_and.accumulate(sure[:, None] > self._least)  # [layers, confidences]
        came = np.vstack((known, given[:-1] & known))
        self._drafted[:drafted] = np.where(came, FADE, 1.0) * self._drafted[:drafted] + came
        self._given[:drafted] = np.where(came, FADE, 1.0) * self._given[:drafted] + (came & given)
        known = np.repeat(known, len(self._numbers)) & np.tile(self._numbers <= drafts, len(self._least))
        came, given = (np.repeat(one, len(self._numbers), axis=1) & known for one in (came, given))
        enough = np.tile(self._enough, len(self._least))
        shown = [[(layer.reached, layer.passed, layer.needed) for layer in counters] for counters in layers]
        if drafted > depth:  # verification came to the layer that is not there
            shown = [[*own, (own[-1][1] if own else 1, 0, 0)] for own in shown]
        reached, passed, needed = np.array(shown).transpose(2, 0, 1)[..., None]
        arrived = came & (reached > 0)  # [requests, layers, M]
        held = arrived & given & (passed > 0) & (needed <= enough)
        for request, *own in zip(requests, arrived, held, strict=True):
            if request.reached is None:
                request.reached, request.passed = (np.zeros((self._depth, len(enough))) for _ in range(2))
            request.add(*own)
        self._all.add(arrived.sum(0), held.sum(0))

    def given(self) -> Numbers:
        """Chance that all layers down to each one go to the target, of those that are to be drafted: [confidences,
        D]."""
        shares: Numbers = (self._given + PRIOR) / (self._drafted + PRIOR)
        return shares.cumprod(0).T

    def steps(self, requests: Sequence[Acceptance]) -> Numbers:
        """Steps that one target call is expected to yield, of all requests together, with 1 .. D layers: [confidences,
        numbers, D]. Each request yields 1 + the chance that all layers down to one pass, summed over the layers."""
        size = self._depth, len(self._least), len(self._numbers)
        reached, passed = (x.reshape(size) for x in (self._all.reached, self._all.passed) if x is not None)
        rates, first = np.empty(size), np.full(len(self._least), FIRST_RATE)
        for choice in range(len(self._numbers)):  # more drafts pass no less often
            rates[0, :, choice] = (passed[0, :, choice] + PRIOR * first) / (reached[0, :, choice] + PRIOR)
            first = np.maximum(first, rates[0, :, choice])
        for layer in range(1, self._depth):  # each one is drawn towards the layer above
            rates[layer] = (passed[layer] + PRIOR * rates[layer - 1]) / (reached[layer] + PRIOR)
        own = [request for request in requests if request.reached is not None]
        alive = (len(requests) - len(own)) * rates.cumprod(0)
        if own:
            came, held = (np.stack([getattr(one, name) for one in own]) for name in ("reached", "passed"))
            chances = (held.reshape(-1, *size) + TRUST * rates) / (came.reshape(-1, *size) + TRUST)
            alive += chances.cumprod(1).sum(0)
        return len(requests) + alive.cumsum(0).transpose(1, 2, 0)


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
