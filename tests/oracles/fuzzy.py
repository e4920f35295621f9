"""Scalar float64 reference of rule `fuzzy` and of its divergences."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from tests.oracles.choice import normalise, without
from tests.oracles.rules import Chooser, Distribution, Draw, LayerResult, Pair, RejectionRule

__all__ = ["divergence", "fuzzy_layer"]


def divergence(target: Distribution, draft: Distribution, name: str) -> float:
    """Div(p, q) of two normalised distributions; see verify/fuzzy.py."""
    pairs = target.keys() | draft.keys()
    mean = {pair: 0.5 * (target.get(pair, 0.0) + draft.get(pair, 0.0)) for pair in pairs}
    if name == "tv":
        return 0.5 * math.fsum(abs(target.get(pair, 0.0) - draft.get(pair, 0.0)) for pair in pairs)
    return {
        "kl": lambda: _kl(draft, target),
        "kl_reversed": lambda: _kl(target, draft),
        "js": lambda: 0.5 * (_kl(target, mean) + _kl(draft, mean)),
        "js_authors": lambda: 0.5 * (_kl(mean, target) + _kl(mean, draft)),
    }[name]()


def _kl(a: Distribution, b: Distribution) -> float:
    """KL(a || b)."""
    terms = ((mass, b.get(pair, 0.0)) for pair, mass in a.items() if mass > 0.0)
    return math.fsum(mass * math.log(mass / other) if other > 0.0 else math.inf for mass, other in terms)


def fuzzy_layer(
    target: Distribution,
    draft_distribution: Distribution,
    drafts: Sequence[Pair],
    distance: float,
    threshold: float,
    fallback: str,
    beams: Collection[int],
    ends: Collection[int],
    width: int,
    chooser: Chooser,
) -> LayerResult:
    """One layer: `distance` is Div of the distributions that are compared, `target` the warped P that draws come from.

    A draft whose parent is one of the live `beams` may lie outside the support of P; others are passed over.
    """
    rule = RejectionRule()
    if distance > threshold and fallback == "strict":
        return rule.verify(target, draft_distribution, drafts, ends, width, width, chooser)
    distribution = normalise(target)
    draws: list[Draw] = []
    for number, pair in enumerate(drafts if distance <= threshold else ()):
        if sum(not draw.ends for draw in draws) < width and pair[0] in beams:
            draws.append(Draw(pair, number, pair[1] in ends))
            distribution = without(distribution, pair)
    return rule.complete(distribution, distribution, draws, (), ends, width, width, chooser)
