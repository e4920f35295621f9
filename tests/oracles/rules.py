"""The specification in executable form: scalar float64, no tensors. Slow reference of the core and of the verifiers.

P is the target's pool distribution, Q the draft's, W live beams at most, K drafts per layer. Every random decision goes
through a Chooser (oracle_choice), so that tests can feed noise or enumerate all branches. The rules are those of Qin et
al., AAAI 2025 (arXiv 2409.16560), made exact.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from tests.oracles.choice import (
    Chooser,
    Distribution,
    NoiseChooser,
    Pair,
    enumerate_distribution,
    remembered,
    total_variation,
)
from tests.oracles.choice import normalise as _normalise
from tests.oracles.choice import without as _without

__all__ = [
    "Chooser",
    "Distribution",
    "Draw",
    "LayerResult",
    "NoiseChooser",
    "Pair",
    "Pool",
    "RejectionRule",
    "WithReplacementRule",
    "beam_step",
    "coupled_layer",
    "draft_layer",
    "enumerate_distribution",
    "greedy_distribution",
    "greedy_step",
    "legal_rows",
    "normalise",
    "pool_distribution",
    "search_layer",
    "total_variation",
    "verify_layer_rejection",
    "verify_layer_with_replacement",
    "warp",
    "without",
]

KeyT = TypeVar("KeyT", bound=Hashable)

normalise, without = remembered(_normalise), remembered(_without)


def warp(
    log_weights: Mapping[KeyT, float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> dict[KeyT, float]:
    """Distribution of these log-weights after temperature, top-k, top-p and min-p, in that order.

    Cuts go by value, so entries tied with the last one kept all stay. top_k 0, top_p 1 and min_p 0 cut nothing.
    """
    finite = {key: value / temperature for key, value in log_weights.items() if value > -math.inf}
    if not finite:
        return {}
    if top_k:
        lowest = sorted(finite.values(), reverse=True)[min(top_k, len(finite)) - 1]
        finite = {key: value for key, value in finite.items() if value >= lowest}
    highest = max(finite.values())
    distribution = normalise({key: math.exp(value - highest) for key, value in finite.items()})
    if top_p < 1.0:
        lowest = _value_reaching(top_p, distribution.values())
        distribution = normalise({key: mass for key, mass in distribution.items() if mass >= lowest})
    lowest = min_p * max(distribution.values())
    return normalise({key: mass for key, mass in distribution.items() if mass >= lowest})


def _value_reaching(top_p: float, masses: Iterable[float]) -> float:
    """The mass at which the descending cumulative sum first reaches top_p; the least one if rounding keeps it below."""
    total, mass = 0.0, 0.0
    for mass in sorted(masses, reverse=True):
        total += mass
        if total >= top_p:
            break
    return mass


@dataclass(frozen=True, slots=True)
class Pool:
    """All pairs of a step.

    Attributes:
        distribution: normalised over the pool, support only.
        weights: running weight s of each child, natural log.
    """

    distribution: dict[Pair, float]
    weights: dict[Pair, float]


def pool_distribution(
    weights: Mapping[int, float],
    rows: Mapping[int, Mapping[int, float]],
    scope: Literal["pool", "beam"] = "pool",
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    legal: Mapping[int, Collection[int]] | None = None,
) -> Pool:
    """P(i, v) of live beams with weights s_i and rows log p(v | x^i).

    legal: tokens that may follow each beam; the others have no mass, and what is legal keeps its log p. Scope `pool`
    warps the joint distribution and accumulates raw logs; `beam` warps each beam's row, renormalises it and accumulates
    its logs.
    """
    rows = legal_rows(rows, legal)
    if scope == "pool":
        joint = {(beam, token): weights[beam] + row for beam in weights for token, row in rows[beam].items()}
        return Pool(warp(joint, temperature, top_k, top_p, min_p), joint)
    joint = {}
    for beam, weight in weights.items():
        row = warp(rows[beam], temperature, top_k, top_p, min_p)
        joint.update({(beam, token): weight + math.log(mass) for token, mass in row.items()})
    return Pool(warp(joint), joint)


def legal_rows(
    rows: Mapping[int, Mapping[int, float]], legal: Mapping[int, Collection[int]] | None
) -> Mapping[int, Mapping[int, float]]:
    """The rows without illegal tokens. They are not normalised again."""
    if legal is None:
        return rows
    return {beam: {token: row[token] for token in row if token in legal[beam]} for beam, row in rows.items()}


def greedy_distribution(
    weights: Mapping[int, float],
    rows: Mapping[int, Mapping[int, float]],
    scope: Literal["pool", "beam"] = "pool",
    top_k: int = 0,
    legal: Mapping[int, Collection[int]] | None = None,
) -> Pool:
    """The pool at temperature 0, for greedy_step: masses in the order in which the limit draws the pairs.

    Weights of scope `beam` are T s in the limit: how far the tokens of a beam are below the best ones of their rows.
    """
    if scope == "pool":
        return pool_distribution(weights, rows, scope, 1.0, top_k, legal=legal)
    rows, joint = legal_rows(rows, legal), {}
    for beam, weight in weights.items():
        best = max(rows[beam].values(), default=0.0)
        joint.update({(beam, token): weight + rows[beam][token] - best for token in warp(rows[beam], 1.0, top_k)})
    return Pool(warp(joint), joint)


def greedy_step(distribution: Distribution, ends: Collection[int], width: int) -> tuple[Pair, ...]:
    """beam_step in the limit of temperature 0: the likeliest pairs until `width` are live.

    Of equal ones those that go on come first, then those of the first beam and of the lowest token.
    """
    drawn: list[Pair] = []
    for pair in sorted(distribution, key=lambda pair: (-distribution[pair], pair[1] in ends, pair)):
        if sum(token not in ends for _, token in drawn) == width:
            break
        drawn.append(pair)
    return tuple(drawn)


class Draw(NamedTuple):
    """A drawn pair.

    Attributes:
        source: number of the draft that it is, None when it is no drafted node.
        ends: its token ends the sequence: a finished hypothesis, not a live beam.
    """

    pair: Pair
    source: int | None
    ends: bool


class LayerResult(NamedTuple):
    """Draws of one layer in order. A layer that did not pass is the last one of its iteration."""

    draws: tuple[Draw, ...]
    passed: bool

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return tuple(draw.pair for draw in self.draws)

    @property
    def live(self) -> tuple[Draw, ...]:
        return tuple(draw for draw in self.draws if not draw.ends)

    @property
    def finished(self) -> tuple[Draw, ...]:
        return tuple(draw for draw in self.draws if draw.ends)


def beam_step(
    distribution: Distribution,
    ends: Collection[int],
    width: int,
    chooser: Chooser,
    replacement: bool = False,
    limit: int | None = None,
) -> tuple[Pair, ...]:
    """The distribution to reproduce: draw pairs until `width` are live, the support is exhausted or `limit` are drawn.

    With replacement the draws are i.i.d. and duplicates stay; without a limit some live pair must have mass.
    """
    distribution, live = normalise(distribution), 0
    drawn: list[Pair] = []
    _require_end(distribution, ends, replacement, limit)
    while distribution and live < width and len(drawn) != limit:
        pair = chooser.draw(distribution, f"completion/{len(drawn)}" if replacement else "completion")
        drawn.append(pair)
        live += pair[1] not in ends
        distribution = distribution if replacement else without(distribution, pair)
    return tuple(drawn)


def _require_end(distribution: Distribution, ends: Collection[int], replacement: bool, limit: int | None) -> None:
    """I.i.d. draws from a distribution of ending pairs alone would never yield a live one."""
    if replacement and limit is None and distribution and all(token in ends for _, token in distribution):
        raise ValueError("no live pair has mass: draws with replacement need a limit")


def draft_layer(
    distribution: Distribution, count: int, chooser: Chooser, replacement: bool = False
) -> tuple[Pair, ...]:
    """`count` ordered draws from the draft's pool distribution; fewer without replacement when the support is
    smaller."""
    distribution = normalise(distribution)
    drawn: list[Pair] = []
    while distribution and len(drawn) < count:
        pair = chooser.draw(distribution, f"draft/{len(drawn)}" if replacement else "draft")
        drawn.append(pair)
        distribution = distribution if replacement else without(distribution, pair)
    return tuple(drawn)


class RejectionRule:
    """Multi-draft rejection without replacement, jointly exact for the ordered draws of a layer.

    P' (`residual`) is the distribution of the next target draw given all tests so far, Q' (`draft_distribution`) the
    distribution of the next draft. One test keeps "the next draw has distribution P'" true (Leviathan et al. 2023,
    arXiv 2211.17192; several drafts as in recursive rejection sampling, arXiv 2402.14160). Each method is one place
    where the rule can be got wrong.
    """

    replacement = False

    def first_draft_distribution(self, target: Distribution, draft_distribution: Distribution) -> Distribution:
        """Q' before the first test: Q as it was sampled from, dead parents included."""
        return normalise(draft_distribution)

    def accept_probability(self, residual: Distribution, draft_distribution: Distribution, draft: Pair) -> float:
        """min(1, P'(d) / Q'(d)); a draft of a dead parent has P'(d) = 0."""
        chance = draft_distribution.get(draft, 0.0)
        return min(1.0, residual.get(draft, 0.0) / chance) if chance > 0.0 else 0.0

    @remembered
    def after_rejection(
        self, target: Distribution, residual: Distribution, draft_distribution: Distribution
    ) -> Distribution:
        """norm(max(0, P' - Q')), or P where nothing is left, which has probability 0."""
        rest = {pair: max(0.0, mass - draft_distribution.get(pair, 0.0)) for pair, mass in residual.items()}
        return _normalise(rest) or target

    def take(self, target: Distribution, pair: Pair) -> Distribution:
        """P once `pair` is drawn."""
        return without(target, pair)

    def next_draft_distribution(self, draft_distribution: Distribution, draft: Pair) -> Distribution:
        """Q' once `draft` has been looked at, accepted or not."""
        return without(draft_distribution, draft)

    def first_missing_distribution(
        self, target: Distribution, residual: Distribution, draft_distribution: Distribution
    ) -> Distribution:
        """Distribution of the first draw that completes a stopped layer."""
        return residual

    def verify(
        self,
        target: Distribution,
        draft_distribution: Distribution,
        drafts: Sequence[Pair],
        ends: Collection[int],
        width: int,
        full_width: int,
        chooser: Chooser,
        limit: int | None = None,
    ) -> LayerResult:
        """Test the drafts until `width` live ones are accepted, then draw what is missing."""
        draws: list[Draw] = []
        target = normalise(target)
        residual: Distribution = target
        _require_end(target, ends, self.replacement, limit)
        draft_distribution = self.first_draft_distribution(target, draft_distribution)
        for number, draft in enumerate(drafts):
            if _count_live(draws) == width or len(draws) == limit:
                break
            if chooser.accept(self.accept_probability(residual, draft_distribution, draft), number):
                draws.append(Draw(draft, number, draft[1] in ends))
                target = residual = self.take(target, draft)
            else:
                residual = self.after_rejection(target, residual, draft_distribution)
            draft_distribution = self.next_draft_distribution(draft_distribution, draft)
        first = self.first_missing_distribution(target, residual, draft_distribution)
        return self.complete(target, first, draws, drafts, ends, width, full_width, chooser, limit)

    def complete(
        self,
        target: Distribution,
        first: Distribution,
        draws: list[Draw],
        drafts: Sequence[Pair],
        ends: Collection[int],
        width: int,
        full_width: int,
        chooser: Chooser,
        limit: int | None = None,
    ) -> LayerResult:
        """Draw what is missing: one pair from `first`, then from P. A draw that is a drafted node counts as that node.

        A layer passes if its first `width` live draws are nodes, or all live pairs of a smaller support are; otherwise
        it goes on to `full_width`.
        """
        numbers = {} if self.replacement else {pair: number for number, pair in reversed(list(enumerate(drafts)))}
        distribution, stream, passed = first, "residual", False
        for wanted in (min(width, full_width), full_width):
            while not passed and distribution and _count_live(draws) < wanted and len(draws) != limit:
                pair = chooser.draw(distribution, f"{stream}/{len(draws)}" if self.replacement else stream)
                draws.append(Draw(pair, numbers.get(pair), pair[1] in ends))
                distribution = target = self.take(target, pair)
                stream = "completion"
            sources = [draw.source for draw in draws if not draw.ends]
            passed |= bool(sources) and None not in sources and (len(sources) == width or not target)
        return LayerResult(tuple(draws), passed)


class WithReplacementRule(RejectionRule):
    """The same for i.i.d. drafts and the i.i.d. distribution, the paper's setting: nothing drawn is ever removed."""

    replacement = True

    def take(self, target: Distribution, pair: Pair) -> Distribution:
        return target

    def next_draft_distribution(self, draft_distribution: Distribution, draft: Pair) -> Distribution:
        return draft_distribution


def _count_live(draws: Iterable[Draw]) -> int:
    return len([draw for draw in draws if not draw.ends])


def verify_layer_rejection(
    target: Distribution,
    draft_distribution: Distribution,
    drafts: Sequence[Pair],
    ends: Collection[int],
    width: int,
    full_width: int,
    chooser: Chooser,
) -> LayerResult:
    """One layer of rule `rejection`: `width` is w of this layer, `full_width` W. No drafts: plain beam sampling."""
    return RejectionRule().verify(target, draft_distribution, drafts, ends, width, full_width, chooser)


def verify_layer_with_replacement(
    target: Distribution,
    draft_distribution: Distribution,
    drafts: Sequence[Pair],
    ends: Collection[int],
    width: int,
    full_width: int,
    chooser: Chooser,
    limit: int | None = None,
) -> LayerResult:
    """One layer of rule `with-replacement`; `limit` bounds the draws of the layer, ending ones included."""
    return WithReplacementRule().verify(target, draft_distribution, drafts, ends, width, full_width, chooser, limit)


def coupled_layer(
    target: Distribution,
    noise: Distribution,
    drafts: Sequence[Pair],
    ends: Collection[int],
    width: int,
    full_width: int,
    fresh: Distribution | None = None,
) -> LayerResult:
    """Common random numbers: the draws are the leading entries of log P + G until `width` are live.

    Passes if all live ones among them are drafted; otherwise goes on to `full_width` live with `fresh` noise, because
    the stop says something about the noise of what was not drawn. `noise` is G(x^i, v).
    """
    distribution = normalise(target)
    ranked = sorted(distribution, key=lambda pair: math.log(distribution[pair]) + noise[pair], reverse=True)
    draws = _leading(ranked, drafts, ends, width)
    live = [draw for draw in draws if not draw.ends]
    if live and all(draw.source is not None for draw in live):
        return LayerResult(draws, True)
    rest = ranked[len(draws) :]
    if fresh is not None and width < full_width:
        rest = sorted(rest, key=lambda pair: math.log(distribution[pair]) + fresh[pair], reverse=True)
    return LayerResult(draws + _leading(rest, drafts, ends, full_width - len(live)), False)


def _leading(ranked: Iterable[Pair], drafts: Sequence[Pair], ends: Collection[int], width: int) -> tuple[Draw, ...]:
    """Leading entries until `width` are live, with the number of the draft that each one is."""
    numbers = {pair: number for number, pair in reversed(list(enumerate(drafts)))}
    draws: list[Draw] = []
    for pair in ranked:
        if _count_live(draws) == width:
            break
        draws.append(Draw(pair, numbers.get(pair), pair[1] in ends))
    return tuple(draws)


def search_layer(scores: Distribution, drafts: Sequence[Pair], ends: Collection[int], width: int) -> LayerResult:
    """Beam search: the `width` best pairs that do not end live on; one that ends finishes if its rank is below `width`.

    As transformers' generate(do_sample=False). Passes if all live ones are drafted. Ties keep the order of `scores`.
    """
    ranked = sorted(scores, key=lambda pair: scores[pair], reverse=True)
    draws = _leading(ranked, drafts, ends, width)
    kept = tuple(draw for rank, draw in enumerate(draws) if not draw.ends or rank < width)
    return LayerResult(kept, all(draw.source is not None for draw in kept if not draw.ends))
