"""How deep and wide to draft in the next iteration: always the same, or what measured best (goodput, arXiv 2406.14066).

Host numbers only. A planner sees what every iteration reports anyway: seconds of its phases and how far each row's walk
came. Depth 0 is always among the choices, so drafting that does not pay is left alone, but for a probe now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dsbd_cli.config import MethodConfig

__all__ = ["AdaptivePlanner", "FixedPlanner", "Line", "Planner", "Shape", "planner_for"]

LayerCounters = Sequence[dict[str, int]]

FADE = 0.97  # weight of the past, iteration by iteration, in times and acceptance
PROBE_EVERY, PROBE_AT_MOST = 64, 256  # iterations between probes of more drafts; twice as many after each in vain
WARM = 1  # first iterations of a shape, whose times (allocation, caches) are not believed
BETTER = 1.02  # a change must promise so much
FIRST_RATE = 0.7  # acceptance believed before anything is seen, and its weight in layers
PRIOR = 2.0


@dataclass(frozen=True, slots=True)
class Shape:
    """D layers of K nodes."""

    depth: int
    drafts_per_layer: int

    def nodes(self, num_beams: int) -> int:
        """N."""
        return num_beams + self.depth * self.drafts_per_layer


class Planner(Protocol):
    """Chooses the shape of each iteration."""

    def choose(self, rows: int) -> Shape:
        """Shape of the next iteration of so many rows."""
        ...

    def observe(self, shape: Shape, layers: Sequence[LayerCounters], seconds: dict[str, float]) -> None:
        """What an iteration did. layers: counters of every running row; seconds: of the phases draft, target and
        verify."""
        ...


class FixedPlanner:
    """The configured shape, always."""

    def __init__(self, method: MethodConfig) -> None:
        self._shape = Shape(method.depth, method.drafts_per_layer)

    def choose(self, rows: int) -> Shape:
        """D and K as configured."""
        return self._shape

    def observe(self, shape: Shape, layers: Sequence[LayerCounters], seconds: dict[str, float]) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class Line:
    """seconds = a + b * x by least squares over fading observations; b is never negative."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """One observation."""
        self.weight, self.x, self.y = FADE * self.weight + 1, FADE * self.x + x, FADE * self.y + y
        self.xx, self.xy = FADE * self.xx + x * x, FADE * self.xy + x * y

    def at(self, x: float) -> float:
        """Predicted seconds; 0 before any observation."""
        if not self.weight:
            return 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x * mean_x
        slope = 0.0
        if spread > 1e-6 * (1 + mean_x * mean_x):
            slope = max(0.0, (self.xy / self.weight - mean_x * mean_y) / spread)
        return max(0.0, mean_y + slope * (x - mean_x))


@dataclass(slots=True)
class _Layer:
    """Fading counts of one depth, by number of drafts: how often a walk came there, how often it passed."""

    reached: dict[int, float] = field(default_factory=dict)
    passed: dict[int, float] = field(default_factory=dict)

    def add(self, drafts: int, reached: int, passed: int) -> None:
        self.reached[drafts] = FADE * self.reached.get(drafts, 0.0) + reached
        self.passed[drafts] = FADE * self.passed.get(drafts, 0.0) + passed

    def rate(self, drafts: int, prior: float) -> float:
        """Chance to pass, drawn towards `prior` where little was seen."""
        reached = self.reached.get(drafts, 0.0)
        return (self.passed.get(drafts, 0.0) + PRIOR * prior) / (reached + PRIOR)


class AdaptivePlanner:
    """Maximises expected steps per second over depths 0 .. D and a few numbers of drafts up to K.

    Steps of a shape: 1 + sum over its layers of the chance that all layers down to it pass. Seconds: lines fitted
    to draft, target and remaining time against the nodes each had to run. A layer that passed with its j-th
    draft as the last one needed would have passed with j drafts, so every iteration informs on all smaller K.
    """

    def __init__(self, method: MethodConfig) -> None:
        # fewer drafts than beams would be fast, but never let a layer keep all its beams
        least, most = min(method.num_beams, method.drafts_per_layer), method.drafts_per_layer
        middle = {round(least * (most / least) ** (i / 3)) for i in range(4)}
        self._choices = sorted(middle | {most})
        self._beams = method.num_beams
        self._largest = Shape(method.depth, most)
        self._layers = [_Layer() for _ in range(method.depth)]
        self._draft, self._target, self._rest = Line(), Line(), Line()
        self._seen: dict[tuple[int, Shape], int] = {}
        self._rows = 1
        self._now = Shape(0, most)
        # to begin with, shapes apart enough to tell what a node and a layer cost
        wide, narrow = Shape(min(method.depth, 4), most), Shape(min(method.depth, 2), self._choices[0])
        self._first = [shape for shape in (wide, Shape(0, most), narrow) for _ in range(WARM + 1)]
        self._since_probe, self._patience = 0, PROBE_EVERY

    def choose(self, rows: int) -> Shape:
        """The shape of the most expected steps per second."""
        self._rows = rows
        if self._first:
            return self._first.pop()
        self._since_probe += 1
        if self._since_probe >= self._patience and self._now != self._largest:
            self._since_probe, self._patience = 0, min(2 * self._patience, PROBE_AT_MOST)
            return Shape(max(1, self._now.depth), self._largest.drafts_per_layer)
        best = max(self._shapes(), key=self._goodput)
        if self._goodput(best) > BETTER * self._goodput(self._now):
            self._now, self._patience = best, PROBE_EVERY
        return self._now

    def observe(self, shape: Shape, layers: Sequence[LayerCounters], seconds: dict[str, float]) -> None:
        """Learn from an iteration of len(layers) rows."""
        for depth, layer in enumerate(self._layers[: shape.depth]):
            counters = [row[depth] for row in layers]
            reached = sum(item["reached"] for item in counters)
            if not reached:
                break
            for drafts in self._choices:
                if drafts <= shape.drafts_per_layer:
                    passed = sum(item["passed"] and item["needed"] <= drafts for item in counters)
                    layer.add(drafts, reached, passed)
        times = self._seen[self._rows, shape] = self._seen.get((self._rows, shape), 0) + 1
        if times <= WARM:
            return
        self._target.add(self._rows * shape.nodes(self._beams), seconds["target"])
        self._rest.add(shape.depth, seconds["verify"])
        if shape.depth:
            self._draft.add(self._rows * shape.drafts_per_layer, seconds["draft"] / shape.depth)

    def expected_steps(self, shape: Shape) -> float:
        """Steps that one target call is expected to yield."""
        steps, alive, rate = 1.0, 1.0, FIRST_RATE
        for layer in self._layers[: shape.depth]:
            rate = layer.rate(shape.drafts_per_layer, rate)
            alive *= rate
            steps += alive
        return steps

    def expected_seconds(self, shape: Shape) -> float:
        """Time that one iteration is expected to take; 0 before any was timed."""
        draft = shape.depth * self._draft.at(self._rows * shape.drafts_per_layer) if shape.depth else 0.0
        return draft + self._target.at(self._rows * shape.nodes(self._beams)) + self._rest.at(shape.depth)

    def _goodput(self, shape: Shape) -> float:
        return self.expected_steps(shape) / max(self.expected_seconds(shape), 1e-9)

    def _shapes(self) -> list[Shape]:
        none = Shape(0, self._largest.drafts_per_layer)
        depths = range(1, self._largest.depth + 1)
        return [none] + [Shape(depth, drafts) for depth in depths for drafts in self._choices]


def planner_for(method: MethodConfig) -> Planner:
    """The planner that a method asks for."""
    return AdaptivePlanner(method) if method.adaptive_depth and method.depth else FixedPlanner(method)
