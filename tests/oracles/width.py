"""Scalar float64 reference of the width policy `threshold` (verify/width.py)."""

from __future__ import annotations

import math

from tests.oracles.choice import Distribution, normalise

__all__ = ["acceptance_counts", "expected_width"]


def acceptance_counts(target: Distribution, draft_distribution: Distribution, drafts: int) -> list[float]:
    """Pr[k of `drafts` i.i.d. drafts accepted] for k = 0, 1, ..: exact with replacement, an estimate without.

    Source: arXiv 2409.16560, the recursion for the draft width, with Q subtracted once per rejection.
    """
    target = residual = normalise(target)
    draft_distribution, chances = normalise(draft_distribution), []
    for _ in range(drafts):
        chances.append(math.fsum(min(mass, draft_distribution.get(pair, 0.0)) for pair, mass in residual.items()))
        rest = {pair: max(0.0, mass - draft_distribution.get(pair, 0.0)) for pair, mass in residual.items()}
        residual = normalise(rest) or target
    first, none = [], [1.0]  # first[i]: draft i is the first one accepted; none[m]: none of m is
    for chance in chances:
        first.append(chance * none[-1])
        none.append(none[-1] * (1.0 - chance))
    table = [none]
    for _ in range(drafts):
        fewer = table[-1]
        table.append([math.fsum(first[i] * fewer[m - 1 - i] for i in range(m)) for m in range(drafts + 1)])
    return [row[drafts] for row in table]


def expected_width(
    target: Distribution,
    draft_distribution: Distribution,
    drafts: int,
    threshold: float,
    min_width: int,
    full_width: int,
) -> int:
    """w of a layer: the largest with Pr[at least w accepted] >= threshold, clamped to min_width..full_width."""
    counts = acceptance_counts(target, draft_distribution, drafts)
    reached = [w for w in range(drafts + 1) if math.fsum(counts[w:]) >= threshold]
    return min(max(max(reached, default=0), min_width), full_width)
