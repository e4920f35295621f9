"""Small decoders over table models, for distributions of several steps: plain beam sampling and speculative
decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.oracles.rules import (
    Chooser,
    Distribution,
    Pair,
    Pool,
    RejectionRule,
    WithReplacementRule,
    beam_step,
    draft_layer,
    pool_distribution,
)

from .cases import random_row

Path = tuple[int, ...]
WidthPolicy = Callable[[Distribution, Distribution], int]


class Beam(NamedTuple):
    path: Path
    weight: float


class Step(NamedTuple):
    """One beam-sampling step: w of its layer, the drawn beams in order (ended ones too), whether the layer passed."""

    width: int
    drawn: tuple[Beam, ...]
    passed: bool


@dataclass(frozen=True)
class Model:
    """A language model given by a random table, with the warp that its distributions go through.

    answers: the only texts that it may say, their end tokens included; none: any.
    limit: tokens of a text at most, so that only what leaves an answer within it may follow; none: any number. An
        answer may reach the limit without its end token.
    """

    seed: int
    tokens: int
    zeros: int = 0
    warp: dict[str, object] = field(default_factory=dict)
    answers: tuple[Path, ...] = ()
    limit: int | None = None
    rows: dict[Path, dict[int, float]] = field(default_factory=dict, compare=False)
    pools: dict[tuple[tuple[int, Beam], ...], Pool] = field(default_factory=dict, compare=False)

    def row(self, path: Path) -> dict[int, float]:
        if path not in self.rows:
            self.rows[path] = random_row(random.Random(f"{self.seed} {path}"), self.tokens, self.zeros)
        return self.rows[path]

    def pool(self, beams: dict[int, Beam]) -> Pool:
        key = tuple(beams.items())
        if key not in self.pools:
            rows = {index: self.row(beam.path) for index, beam in beams.items()}
            weights = {index: beam.weight for index, beam in beams.items()}
            legal = {index: self.legal(beam.path) for index, beam in beams.items()} if self.answers else None
            self.pools[key] = self.distribution(weights, rows, legal)
        return self.pools[key]

    def distribution(
        self, weights: dict[int, float], rows: dict[int, dict[int, float]], legal: dict[int, set[int]] | None
    ) -> Pool:
        """The pool distribution; what a mutant gets wrong."""
        return pool_distribution(weights, rows, legal=legal, **self.warp)  # type: ignore[arg-type]

    def legal(self, path: Path) -> set[int]:
        """Tokens that some answer goes on with which the limit does not cut."""
        able = [answer for answer in self.answers if self.limit is None or len(answer) - 1 <= self.limit]
        return {answer[len(path)] for answer in able if len(answer) > len(path) and answer[: len(path)] == path}


def child(beams: dict[int, Beam], pool: Pool, pair: Pair) -> Beam:
    return Beam((*beams[pair[0]].path, pair[1]), pool.weights[pair])


@dataclass(frozen=True)
class Setting:
    """`drafts` is K, `depth` D, `full_width` W. `eager` drafts all layers before the first test, as an engine does.
    `gate`: a layer of this number goes to the target; those below one that does not are not drafted."""

    target: Model
    draft: Model
    full_width: int
    drafts: int
    depth: int
    ends: frozenset[int] = frozenset()
    rule: RejectionRule = field(default_factory=RejectionRule)
    policy: WidthPolicy | None = None
    eager: bool = False
    limit: int | None = None
    gate: Callable[[Forest, int], bool] = lambda forest, layer: True

    @property
    def replacement(self) -> bool:
        return isinstance(self.rule, WithReplacementRule)


ROOT = {0: Beam((), 0.0)}


def plain_steps(setting: Setting, steps: int, chooser: Chooser) -> tuple[Step, ...]:
    """`steps` steps of beam sampling, nothing drafted."""
    live, record = ROOT, []
    for _ in range(steps):
        pool = setting.target.pool(live)
        pairs = beam_step(
            pool.distribution, setting.ends, setting.full_width, chooser, setting.replacement, setting.limit
        )
        children = [child(live, pool, pair) for pair in pairs]
        record.append(Step(setting.full_width, tuple(children), False))
        live = dict(enumerate(beam for beam in children if beam.path[-1] not in setting.ends))
    return tuple(record)


@dataclass
class Forest:
    """Draft layers grown from the live beams on demand: nodes of each layer and the distribution they were drawn
    from."""

    setting: Setting
    chooser: Chooser
    layers: list[dict[int, Beam]]
    distributions: list[Distribution] = field(default_factory=list)
    drawn: list[tuple[Pair, ...]] = field(default_factory=list)

    def layer(self, number: int) -> tuple[Distribution, tuple[Pair, ...]]:
        while len(self.distributions) <= number:
            nodes = {index: beam for index, beam in self.layers[-1].items() if self._extends(beam)}
            pool = self.setting.draft.pool(nodes)
            pairs = draft_layer(pool.distribution, self.setting.drafts, self.chooser, self.setting.replacement)
            self.distributions.append(pool.distribution)
            self.drawn.append(pairs)
            self.layers.append({index: child(nodes, pool, pair) for index, pair in enumerate(pairs)})
        return self.distributions[number], self.drawn[number]

    def _extends(self, beam: Beam) -> bool:
        return not beam.path or beam.path[-1] not in self.setting.ends


def speculative_steps(setting: Setting, steps: int, chooser: Chooser) -> tuple[Step, ...]:
    """The first `steps` steps, whichever iterations they come from; an iteration drafts from the committed beams."""
    live, record = ROOT, []
    while len(record) < steps:
        forest = Forest(setting, chooser, [live])
        if setting.eager and setting.depth:
            forest.layer(setting.depth - 1)
        for layer in range(setting.depth + 1):
            step, live = _verify_layer(setting, forest, layer, live, chooser)
            record.append(step)
            if not step.passed or len(record) == steps:
                break
        live = dict(enumerate(live.values()))
    return tuple(record)


def _verify_layer(
    setting: Setting, forest: Forest, layer: int, live: dict[int, Beam], chooser: Chooser
) -> tuple[Step, dict[int, Beam]]:
    """One step, and the live beams after it, keyed by draft node if the layer passed. After D layers, or the last one
    that goes to the target, the bonus."""
    pool = setting.target.pool(live)
    bonus = layer == setting.depth or not setting.gate(forest, layer)
    distribution, drafts = ({}, ()) if bonus else forest.layer(layer)
    width = setting.full_width if bonus or setting.policy is None else setting.policy(pool.distribution, distribution)
    result = setting.rule.verify(
        pool.distribution, distribution, drafts, setting.ends, width, setting.full_width, chooser, setting.limit
    )
    children = [(draw, child(live, pool, draw.pair)) for draw in result.draws]
    assert not (bonus and result.passed)
    survivors = {
        draw.source if result.passed and draw.source is not None else number: beam
        for number, (draw, beam) in enumerate(children)
        if not draw.ends
    }
    return Step(width, tuple(beam for _, beam in children), result.passed), survivors
