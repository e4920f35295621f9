"""The plain decoder: scalar beam sampling and beam search over a function path -> log-probabilities, no draft, no
forest, no cache.

Slow twin of the whole engine. Random choices go through a chooser, so the law of its results can be enumerated exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tests.oracles.rules import Chooser, Pair, Pool, beam_step, cold_law, cold_step, legal_rows, pool_law, search_layer

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
    early: bool = False
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
    return lambda paths, law: beam_step(law, settings.ends, settings.width, chooser)


def coupled(noise: Callable[[Path, int], float], settings: Settings) -> Step:
    """Draws by log P + G(path, token)."""

    def step(paths: list[Path], law: dict[Pair, float]) -> tuple[Pair, ...]:
        ranked = sorted(law, key=lambda pair: math.log(law[pair]) + noise(paths[pair[0]], pair[1]), reverse=True)
        drawn: list[Pair] = []
        while ranked and sum(token not in settings.ends for _, token in drawn) < settings.width:
            drawn.append(ranked.pop(0))
        return tuple(drawn)

    return step


def cold(settings: Settings) -> Step:
    """Temperature 0: the likeliest pairs, of equal ones those that go on, then the first beam and the lowest token."""

    def step(paths: list[Path], law: dict[Pair, float]) -> tuple[Pair, ...]:
        return cold_step(law, settings.ends, settings.width)

    return step


@lru_cache(maxsize=4096)
def _pool(
    rows: Rows, settings: Settings, paths: tuple[Path, ...], weights: tuple[float, ...], search: bool
) -> tuple[dict[int, Mapping[int, float]], Pool | None]:
    """Legal rows of each beam, and the law of its step where there is one. Kept, because an enumeration comes back to
    the same beams again and again."""
    table: Mapping[int, Mapping[int, float]] = {beam: rows(path) for beam, path in enumerate(paths)}
    legal = None if settings.legal is None else {beam: settings.legal(path) for beam, path in enumerate(paths)}
    table, running = dict(legal_rows(table, legal)), dict(enumerate(weights))
    if search:
        return table, None
    if settings.temperature == 0:
        return table, cold_law(running, table, settings.scope, settings.top_k)
    return table, pool_law(running, table, settings.scope, settings.temperature, settings.top_k)


def decode(rows: Rows, settings: Settings, step: Step | None = None) -> tuple[Text, ...]:
    """Best `width` hypotheses, best first. Without `step`: beam search by raw scores."""
    paths: list[Path] = [()]
    weights, logprobs = {0: 0.0}, {0: 0.0}
    finished: list[Text] = []
    for length in range(1, settings.max_new + 1):
        table, pool = _pool(rows, settings, tuple(paths), tuple(weights.values()), step is None)
        raw = {(b, v): logprobs[b] + lp for b in table for v, lp in table[b].items() if lp > -math.inf}
        last = length == settings.max_new
        if step is None or pool is None:
            result = search_layer(raw, (), settings.ends, settings.width)
            drawn = result.pairs
            best = sorted(raw, key=lambda pair: raw[pair], reverse=True)[: settings.width]
            counted = {pair for pair in drawn if pair in best}
            child = raw
        else:
            drawn = step(paths, pool.law)
            counted, child = set(drawn), pool.weights
        live = [pair for pair in drawn if pair[1] not in settings.ends]
        scale = length**settings.length_penalty
        new = [pair for pair in drawn if pair in counted and (pair[1] in settings.ends or last)]
        finished += [Text((*paths[b], v), raw[b, v], v not in settings.ends, raw[b, v] / scale) for b, v in new]
        finished = sorted(finished, key=lambda text: text.score, reverse=True)[: settings.width]
        full = len(finished) == settings.width
        hopeless = full and live and max(raw[pair] for pair in live) / scale <= finished[-1].score
        if not live or hopeless or (settings.early and full):
            break
        paths = [(*paths[b], v) for b, v in live]
        weights = {beam: child[pair] for beam, pair in enumerate(live)}
        logprobs = {beam: raw[pair] for beam, pair in enumerate(live)}
    return tuple(finished)
