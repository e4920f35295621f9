"""The plain decoder: scalar beam sampling and beam search over a function path -> log-probabilities, no draft, no
forest, no cache.

Slow reference of the whole engine. Random choices go through a chooser, so the distribution of its results can be
enumerated exactly.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

from tests.oracles.rules import (
    Chooser,
    Pair,
    Pool,
    beam_step,
    enumerate_distribution,
    greedy_distribution,
    greedy_step,
    legal_rows,
    pool_distribution,
    search_layer,
)

Path = tuple[int, ...]
Rows = Callable[[Path], Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class Settings:
    """What ends a request and how pairs are weighed; as in SamplingConfig."""

    width: int
    max_new: int
    ends: Collection[int] = ()
    temperature: float = 1.0
    top_k: int = 0
    length_penalty: float = 1.0
    early: bool | Literal["never"] = False
    scope: Literal["pool", "beam"] = "pool"
    search: bool = False
    legal: Callable[[Path], Collection[int]] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A hypothesis."""

    tokens: Path
    logprob: float
    by_length: bool
    score: float


Step = Callable[[list[Path], dict[Pair, float]], tuple[Pair, ...]]


def sampled(chooser: Chooser, settings: Settings) -> Step:
    """Draws without replacement, every decision by the chooser."""
    return lambda paths, distribution: beam_step(distribution, settings.ends, settings.width, chooser)


def coupled(noise: Callable[[Path, int], float], settings: Settings) -> Step:
    """Draws by log P + G(path, token)."""

    def step(paths: list[Path], distribution: dict[Pair, float]) -> tuple[Pair, ...]:
        ranked = sorted(
            distribution, key=lambda pair: math.log(distribution[pair]) + noise(paths[pair[0]], pair[1]), reverse=True
        )
        drawn: list[Pair] = []
        while ranked and sum(token not in settings.ends for _, token in drawn) < settings.width:
            drawn.append(ranked.pop(0))
        return tuple(drawn)

    return step


def greedy(settings: Settings) -> Step:
    """Temperature 0: the likeliest pairs, of equal ones those that go on, then the first beam and the lowest token."""

    def step(paths: list[Path], distribution: dict[Pair, float]) -> tuple[Pair, ...]:
        return greedy_step(distribution, settings.ends, settings.width)

    return step


@lru_cache(maxsize=4096)
def _pool(
    rows: Rows, settings: Settings, paths: tuple[Path, ...], weights: tuple[float, ...], search: bool
) -> tuple[dict[int, Mapping[int, float]], Pool | None]:
    """Legal rows of each beam, and the distribution of its step where there is one. Kept, because an enumeration comes
    back to the same beams again and again."""
    table: Mapping[int, Mapping[int, float]] = {beam: rows(path) for beam, path in enumerate(paths)}
    legal = None if settings.legal is None else {beam: settings.legal(path) for beam, path in enumerate(paths)}
    table, running = dict(legal_rows(table, legal)), dict(enumerate(weights))
    if search:
        return table, None
    if settings.temperature == 0:
        return table, greedy_distribution(running, table, settings.scope, settings.top_k)
    return table, pool_distribution(running, table, settings.scope, settings.temperature, settings.top_k)


@dataclass(frozen=True, slots=True)
class _Beams:
    """A request between two steps."""

    paths: tuple[Path, ...] = ((),)
    weights: tuple[float, ...] = (0.0,)
    logprobs: tuple[float, ...] = (0.0,)
    finished: tuple[Text, ...] = ()


class _Step:
    """One step of a request: what can be drawn, and what becomes of the beams."""

    def __init__(self, rows: Rows, settings: Settings, beams: _Beams, search: bool) -> None:
        self._settings, self._beams = settings, beams
        table, self.pool = _pool(rows, settings, beams.paths, beams.weights, search)
        self.raw = {(b, v): beams.logprobs[b] + lp for b in table for v, lp in table[b].items() if lp > -math.inf}

    def searched(self) -> _Beams | tuple[Text, ...]:
        """After the best pairs by raw scores."""
        drawn = search_layer(self.raw, (), self._settings.ends, self._settings.width).pairs
        best = sorted(self.raw, key=lambda pair: self.raw[pair], reverse=True)[: self._settings.width]
        return self._after(drawn, {pair for pair in drawn if pair in best}, self.raw)

    def drawn(self, pairs: tuple[Pair, ...]) -> _Beams | tuple[Text, ...]:
        """After these draws."""
        assert self.pool is not None
        return self._after(pairs, set(pairs), self.pool.weights)

    def _after(
        self, drawn: tuple[Pair, ...], counted: set[Pair], child: Mapping[Pair, float]
    ) -> _Beams | tuple[Text, ...]:
        """The live beams, or the hypotheses of a request that is done."""
        paths, raw, settings = self._beams.paths, self.raw, self._settings
        length = len(paths[0]) + 1
        last = length == settings.max_new
        live = [pair for pair in drawn if pair[1] not in settings.ends]
        scale = length**settings.length_penalty
        new = [pair for pair in drawn if pair in counted and (pair[1] in settings.ends or last)]
        texts = [Text((*paths[b], v), raw[b, v], v not in settings.ends, raw[b, v] / scale) for b, v in new]
        finished = sorted((*self._beams.finished, *texts), key=lambda text: text.score, reverse=True)[: settings.width]
        full = len(finished) == settings.width
        never = settings.early == "never" and settings.length_penalty > 0
        best_scale = settings.max_new**settings.length_penalty if never else scale
        hopeless = full and live and max(raw[pair] for pair in live) / best_scale <= finished[-1].score
        if last or not live or hopeless or (settings.early is True and full):
            return tuple(finished)
        return _Beams(
            tuple((*paths[b], v) for b, v in live),
            tuple(child[pair] for pair in live),
            tuple(raw[pair] for pair in live),
            tuple(finished),
        )


def decode(rows: Rows, settings: Settings, step: Step | None = None) -> tuple[Text, ...]:
    """Best `width` hypotheses, best first. Without `step`: beam search by raw scores."""
    state: _Beams | tuple[Text, ...] = _Beams()
    while isinstance(state, _Beams):
        decoding_step = _Step(rows, settings, state, step is None)
        distribution = None if decoding_step.pool is None else decoding_step.pool.distribution
        state = (
            decoding_step.searched()
            if step is None or distribution is None
            else decoding_step.drawn(step(list(state.paths), distribution))
        )
    return state


def results_distribution(rows: Rows, settings: Settings) -> dict[tuple[Path, ...], float]:
    """Exact distribution of the tokens of all hypotheses. Steps are enumerated one after the other, and beams that
    several ways lead to are followed once: the distribution of `enumerate_distribution` over `decode`, which follows
    every way from its beginning."""
    results: defaultdict[tuple[Path, ...], list[float]] = defaultdict(list)
    beams = {_Beams(): [1.0]}
    while beams:
        following: defaultdict[_Beams, list[float]] = defaultdict(list)
        for state, ways in beams.items():
            step, mass = _Step(rows, settings, state, False), math.fsum(ways)
            assert step.pool is not None
            distribution = step.pool.distribution
            for pairs, chance in enumerate_distribution(
                partial(beam_step, distribution, settings.ends, settings.width)
            ).items():
                outcome = step.drawn(pairs)
                if isinstance(outcome, _Beams):
                    following[outcome].append(mass * chance)
                else:
                    results[tuple(text.tokens for text in outcome)].append(mass * chance)
        beams = following
    return {tokens: math.fsum(chances) for tokens, chances in results.items()}
