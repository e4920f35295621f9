"""Speed of settings that were not run: measured costs of the parts, measured acceptance, put together.

    iteration = first draft forward + (D - 1) draft forwards of K nodes + target forward of W + D*K nodes
              + what every iteration costs + D * (what a layer costs + K * what a draft costs)
    run       = once per run + steps / (steps per call x rows per iteration) x iteration

Without a draft model, or with one that is run through text, drafting is in what layers and drafts cost.
After the goodput model of Liu et al. 2024 (arXiv 2406.14066), with beams. Plain Python: no tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsbd_cli.lab.profiling.acceptance import Rates
from dsbd_cli.lab.reports.profile_data import NO_DRAFT, ForestSize, Prediction

__all__ = ["NEAR", "Costs", "Interpolation", "choose", "layer_costs", "predict", "predictions"]

NEAR = 0.95


@dataclass(frozen=True, slots=True)
class Interpolation:
    """Seconds over nodes: measured points, joined by straight lines, the last one going on where it rises. scale: to
    the run."""

    points: tuple[tuple[int, float], ...]
    scale: float = 1.0

    def at(self, nodes: float) -> float:
        """Seconds of a forward of so many nodes."""
        points = self.points
        if len(points) == 1:
            return points[0][1] * self.scale
        right = min(max(bisect_left([n for n, _ in points], nodes), 1), len(points) - 1)
        (n0, t0), (n1, t1) = points[right - 1], points[right]
        if nodes <= points[0][0]:
            return points[0][1] * self.scale
        if nodes > n1 and t1 < t0:  # a measurement's noise, which would lead below 0
            return t1 * self.scale
        return (t0 + (t1 - t0) * (nodes - n0) / (n1 - n0)) * self.scale

    def through(self, measured: Sequence[tuple[int, float]]) -> Interpolation:
        """The same line, scaled to pass through what was measured in runs; in between the scales are joined, too.
        Measurements at the same nodes count alike."""
        at: dict[int, list[float]] = {}
        for nodes, seconds in measured:
            at.setdefault(nodes, []).append(seconds / self.at(nodes))
        means = [(nodes, sum(some) / len(some)) for nodes, some in sorted(at.items())]
        (first, low), (last, high) = means[0], means[-1]
        scales = Interpolation(tuple(means))

        def scale(nodes: int) -> float:
            return low if nodes <= first else high if nodes >= last else scales.at(nodes)

        kept = dict.fromkeys([*(nodes for nodes, _ in self.points), *at])
        return Interpolation(tuple((nodes, self.at(nodes) * scale(nodes)) for nodes in sorted(kept)))


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured in runs of the setting in use, of another K, and of no draft.

    Attributes:
        target, draft: forwards; draft is None where its forwards are no part of the sum.
        first_nodes: mean nodes of the first draft forward (pending tokens and late parents).
        iteration_s, layer_s, draft_s: of an iteration outside of forwards, of each of its drafted layers, and of each
            draft of a layer.
        once_s: per run. rows: requests that share an iteration, on average. plain_*: the same of no draft.
        steps: of all requests. tokens: of the best texts. num_beams: W.
    """

    target: Interpolation
    draft: Interpolation | None
    first_nodes: float
    iteration_s: float
    layer_s: float
    draft_s: float
    once_s: float
    plain_once_s: float
    rows: float
    plain_rows: float
    steps: int
    tokens: int
    num_beams: int

    def iteration(self, setting: ForestSize) -> float:
        """Seconds of one iteration."""
        depth, drafts = setting.depth, setting.drafts_per_layer
        total = self.iteration_s + self.target.at(setting.nodes(self.num_beams))
        total += depth * (self.layer_s + self.draft_s * drafts)
        if depth and self.draft is not None:
            first = max(self.first_nodes, self.num_beams)
            total += self.draft.at(first) + (depth - 1) * self.draft.at(drafts)
        return total


def layer_costs(
    iteration_s: float, setting: ForestSize, seconds: float, other: ForestSize, other_seconds: float
) -> tuple[float, float]:
    """(layer_s, draft_s) from what iterations of two settings with different K cost outside of forwards."""
    here = max(seconds - iteration_s, 0.0) / setting.depth
    there = max(other_seconds - iteration_s, 0.0) / other.depth
    apart = other.drafts_per_layer - setting.drafts_per_layer
    each = max((there - here) / apart, 0.0) if apart else 0.0
    each = min(each, here / setting.drafts_per_layer)  # a layer without drafts costs no less than nothing
    return here - each * setting.drafts_per_layer, each


def predict(costs: Costs, setting: ForestSize, rates: Rates | None) -> Prediction:
    """One setting. rates None: no draft, one step per call."""
    steps = rates.steps_per_call(setting.depth) if rates else 1.0
    width = rates.mean_width(setting.depth, costs.num_beams) if rates else float(costs.num_beams)
    iteration = costs.iteration(setting)
    once, rows = (costs.once_s, costs.rows) if setting.depth else (costs.plain_once_s, costs.plain_rows)
    seconds = once + costs.steps / (steps * rows) * iteration
    return Prediction(setting, steps, iteration, costs.tokens / seconds, width)


def predictions(
    costs: Costs, rates: Mapping[tuple[int, int | None], Rates], depths: Iterable[int]
) -> tuple[Prediction, ...]:
    """Every K and W_min of the rates at every depth from 1 that they know, and no draft at all, which stands first."""
    found = [predict(costs, NO_DRAFT, None)]
    for depth in sorted(set(depths)):
        known = {key: rate for key, rate in rates.items() if 0 < depth <= len(rate.reached)}
        found += [predict(costs, ForestSize(depth, k, m), rate) for (k, m), rate in known.items()]
    return tuple(found)


def choose(found: Sequence[tuple[ForestSize, float]], num_beams: int) -> ForestSize:
    """Of settings and their tokens/s the fastest; where the width varies, the widest within 5 % of the fastest,
    because narrow beams lose text. Without a draft all W beams live."""
    fastest, speed = max(found, key=lambda one: one[1])
    if all(setting.min_width is None for setting, _ in found):
        return fastest

    def width(setting: ForestSize) -> int:
        return num_beams if not setting.depth else setting.min_width or 0

    return max((one for one in found if one[1] >= NEAR * speed), key=lambda one: (width(one[0]), one[1]))[0]
