"""Distributions over pairs, and who makes the random choices of the oracles: given noise, or every possibility in
turn."""

from __future__ import annotations

import functools
import gc
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

__all__ = [
    "Chooser",
    "Distribution",
    "NoiseChooser",
    "Pair",
    "enumerate_distribution",
    "normalise",
    "remembered",
    "total_variation",
    "without",
]

Pair = tuple[int, int]
"""(beam, token): a beam's index in its layer and its next token."""

Distribution = Mapping[Pair, float]
"""Masses over pairs. A pair outside the support is absent or 0."""

KeyT = TypeVar("KeyT", bound=Hashable)
OutcomeT = TypeVar("OutcomeT", bound=Hashable)
ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")

_known: dict[object, tuple[object, object]] | None = None  # while a distribution is enumerated


def remembered(function: Callable[ParametersT, ResultT]) -> Callable[ParametersT, ResultT]:
    """While a distribution is enumerated, the result for the same objects is computed once: every branch repeats the
    decisions of those before it. Nobody changes a distribution. Arguments are known by identity, so they are kept as
    well."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:  # without names, whose looking at takes a third of a call
        if _known is None:
            return function(*arguments)  # type: ignore[call-arg]
        key = (function, *map(id, arguments))
        kept = _known.get(key)
        if kept is None:
            kept = _known[key] = function(*arguments), arguments  # type: ignore[call-arg]
        return kept[0]

    return call


def normalise(masses: Mapping[KeyT, float]) -> dict[KeyT, float]:
    """The support only, summing to 1; empty when there is no mass."""
    total = math.fsum(masses.values())
    if total <= 0.0:
        return {}
    return {key: mass / total for key, mass in masses.items() if mass > 0.0}


def without(distribution: Distribution, pair: Pair) -> dict[Pair, float]:
    """The distribution of the next draw once `pair` is taken."""
    return normalise({other: mass for other, mass in distribution.items() if other != pair})


def total_variation(a: Mapping[KeyT, float], b: Mapping[KeyT, float]) -> float:
    """Half the summed absolute difference: the largest error in the probability of any event."""
    return 0.5 * math.fsum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())


class Chooser(Protocol):
    """Every random decision of an oracle goes through one of these two calls.

    Streams are `draft`, `residual` and `completion`. Draws with replacement carry their number in the layer, as in
    `completion/2`, because a Gumbel array serves one draw, or one run of draws without replacement.
    """

    def accept(self, probability: float, index: int) -> bool:
        """The test of draft number `index`."""
        ...

    def draw(self, distribution: Distribution, stream: str) -> Pair:
        """One pair of a distribution that need not be normalised."""
        ...


@dataclass(slots=True)
class NoiseChooser:
    """Decides by given noise: the slow reference of a verifier that is handed the same numbers.

    Attributes:
        uniforms: uniforms[j] tests draft j.
        gumbels: stream -> pair -> Gumbel number. Reusing an array for successive draws without replacement is
            Gumbel-top-k (Kool et al. 2019, arXiv 1903.06059).
    """

    uniforms: Sequence[float]
    gumbels: Mapping[str, Mapping[Pair, float]]

    def accept(self, probability: float, index: int) -> bool:
        return self.uniforms[index] < probability

    def draw(self, distribution: Distribution, stream: str) -> Pair:
        noise = self.gumbels[stream]
        return max(
            (pair for pair in distribution if distribution[pair] > 0.0),
            key=lambda pair: math.log(distribution[pair]) + noise[pair],
        )


@dataclass(slots=True)
class _Replay:
    """Follows the decisions of `prefix`, then always the first option, and notes the options not taken."""

    prefix: tuple[int, ...]
    taken: list[int] = field(default_factory=list)
    untried: list[tuple[int, ...]] = field(default_factory=list)
    probability: float = 1.0

    def accept(self, probability: float, index: int) -> bool:
        probability = min(max(probability, 0.0), 1.0)
        return self._choose([probability, 1.0 - probability]) == 0

    def draw(self, distribution: Distribution, stream: str) -> Pair:
        pairs, chances = _options(distribution)
        return pairs[self._choose(chances)]

    def _choose(self, chances: Sequence[float]) -> int:
        """Index of an option of non-zero chance."""
        at = len(self.taken)
        if at < len(self.prefix):
            choice = self.prefix[at]
        else:
            options = [number for number, chance in enumerate(chances) if chance > 0.0]
            choice = options[0]
            self.untried.extend((*self.taken, other) for other in options[1:])
        self.taken.append(choice)
        self.probability *= chances[choice]
        return choice


@remembered
def _options(distribution: Distribution) -> tuple[list[Pair], list[float]]:
    """What can be drawn, and its chances."""
    pairs, total = list(distribution), math.fsum(distribution.values())
    return pairs, [distribution[pair] / total for pair in pairs]


def enumerate_distribution(run: Callable[[Chooser], OutcomeT]) -> dict[OutcomeT, float]:
    """Exact distribution of the outcome of `run`, which must be deterministic given its choices and make finitely many
    of them.

    Runs it once for every sequence of choices of non-zero probability (depth first, replaying prefixes of decisions).
    """
    global _known  # noqa: PLW0603
    parts: defaultdict[OutcomeT, list[float]] = defaultdict(list)
    stack: list[tuple[int, ...]] = [()]
    before, _known, collects = _known, {}, gc.isenabled()
    gc.disable()  # it would look again and again at all that is remembered
    try:
        while stack:
            chooser = _Replay(stack.pop())
            parts[run(chooser)].append(chooser.probability)
            stack.extend(chooser.untried)
    finally:
        _known = before
        if collects:
            gc.enable()
    distribution = {outcome: math.fsum(chances) for outcome, chances in parts.items()}
    total = math.fsum(distribution.values())
    assert abs(total - 1.0) < 1e-12, f"choices sum to {total!r}"
    return distribution
