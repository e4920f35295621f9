"""What other K, D and W_min would have accepted, where each K was drafted, or replayed from larger forests.

Drafts of a model stand in draw order, so a forest of K' < K drafts is, but for what its own smaller pools would have
let in, the part of a forest of K that is reached through the first K' drafts of every layer. A layer of the smaller
forest passes if enough of the target's leading draws lie in that part. Plain Python: no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["LayerProbe", "Rates", "acceptance_rates", "first_drafts", "passes"]


@dataclass(frozen=True, slots=True)
class LayerProbe:
    """One verified layer of one row.

    Attributes:
        parents: of each drafted node, its place in the layer above (a beam above layer 1).
        real: of each drafted node, whether it exists.
        draws: the target's live draws in order, each as the place of the equal drafted node, or -1.
        widths: estimated width w by K', before W_min; None with fixed width.
    """

    parents: tuple[int, ...]
    real: tuple[bool, ...]
    draws: tuple[int, ...]
    widths: Mapping[int, int] | None = None


Chain = Sequence[LayerProbe]


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one (K', W_min) by depth: layers reached, layers passed, and live beams summed over the passed ones."""

    reached: tuple[int, ...]
    passed: tuple[int, ...]
    width_sum: tuple[int, ...]

    def chance(self, layer: int) -> float:
        """Measured chance that the layer (from 0) passes once it is reached; 0 where that never happened."""
        return self.passed[layer] / self.reached[layer] if self.reached[layer] else 0.0

    def first(self, layers: int) -> Rates:
        """Of so many layers alone."""
        return Rates(self.reached[:layers], self.passed[:layers], self.width_sum[:layers])

    def steps_per_call(self, depth: int) -> float:
        """Expected: the layers that pass one after another, and the step that is always completed."""
        expected, alive = 1.0, 1.0
        for layer in range(min(depth, len(self.reached))):
            alive *= self.chance(layer)
            expected += alive
        return expected

    def mean_width(self, depth: int, num_beams: int) -> float:
        """Expected live beams per step; the completed step has W."""
        steps, beams, alive = 1.0, float(num_beams), 1.0
        for layer in range(min(depth, len(self.reached))):
            if not self.passed[layer]:
                break
            alive *= self.chance(layer)
            steps += alive
            beams += alive * self.width_sum[layer] / self.passed[layer]
        return beams / steps


def first_drafts(layer: LayerProbe, above: Sequence[bool] | None, count: int) -> list[bool]:
    """Which drafted nodes a forest of `count` drafts per layer would hold. above: the same of the layer above."""
    kept, left = [], count
    for parent, real in zip(layer.parents, layer.real, strict=True):
        keep = real and left > 0 and (above is None or above[parent])
        kept.append(keep)
        left -= keep
    return kept


def passes(layer: LayerProbe, kept: Sequence[bool], width: int) -> tuple[bool, int]:
    """Whether the layer passes with this width, and with how many live beams."""
    needed = min(width, len(layer.draws))
    leading = 0
    for place in layer.draws:
        if place < 0 or not kept[place]:
            break
        leading += 1
    return needed > 0 and leading >= needed, needed


def acceptance_rates(
    chains: Iterable[Chain],
    drafts: Sequence[int],
    min_widths: Sequence[int | None],
    num_beams: int,
    depth: int,
    *,
    replayed: bool = True,
) -> dict[tuple[int, int | None], Rates]:
    """Rates by (K', W_min) from chains of layers that were really looked at; a chain of fewer drafts than K' says
    nothing about it. W_min None: fixed width. replayed: a chain of more drafts does, because its drafts stand in draw
    order."""
    counts = {(k, m): ([0] * depth, [0] * depth, [0] * depth) for k in drafts for m in min_widths}
    for chain in chains:
        for k in drafts:
            held = len(chain[0].parents) if chain else k
            if held < k or (held > k and not replayed):
                continue
            kept: list[list[bool]] = []
            for layer in chain:
                kept.append(first_drafts(layer, kept[-1] if kept else None, k))
            for m in min_widths:
                reached, passed, widths = counts[k, m]
                for place, layer in enumerate(chain):
                    width = num_beams if m is None else _width(layer, k, m, num_beams)
                    reached[place] += 1
                    done, live = passes(layer, kept[place], width)
                    if not done:
                        break
                    passed[place] += 1
                    widths[place] += live
    return {key: Rates(tuple(a), tuple(b), tuple(c)) for key, (a, b, c) in counts.items()}


def _width(layer: LayerProbe, drafts: int, min_width: int, num_beams: int) -> int:
    estimate = (layer.widths or {}).get(drafts, num_beams)
    return max(min(estimate, num_beams), min_width)
