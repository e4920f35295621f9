"""A machine and a pair of models made of numbers, for planners to learn; and a planner that has its own way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.core.report import LayerCounters
from dsbd_cli.engine.planning.acceptance import Acceptance
from dsbd_cli.engine.planning.planner import NOTHING, AdaptivePlanner, DraftWork, Gate, Observation, Planner, Shape


@dataclass(slots=True)
class RandomGate(Gate):
    """Gives any layer up. cuts: depths that forests were cut to."""

    random: random.Random = field(default_factory=random.Random)
    cuts: set[int] = field(default_factory=set)

    def __call__(self, confidence: Sequence[float]) -> bool:
        assert all(0 <= confidence[row] <= 1.001 for row in self.rows)
        self.confidences.append(0.0)
        on = self.random.random() < 0.7
        if not on:
            self.cuts.add(len(self.confidences) - 1)
        return on


class RandomPlanner(Planner):
    """Any shape at any time; often none, so that the draft falls far behind. gated: and any layer may be given up.
    cuts: of RandomGate."""

    def __init__(self, seed: int, depth: int, drafts: int, *, gated: bool = True) -> None:
        self.random, self.depth, self.drafts, self.used = random.Random(seed), depth, drafts, set[Shape]()
        self.gated, self.cuts = gated, set[int]()

    def gate(self, shape: Shape, rows: Sequence[int]) -> Gate | None:
        if not self.gated or not shape.depth or self.random.random() < 0.3:
            return None
        return RandomGate(0.0, rows, random=self.random, cuts=self.cuts)

    def choose(self, requests: Sequence[Acceptance], reading: DraftWork = NOTHING) -> Shape:
        depth = 0 if self.random.random() < 0.7 else self.random.randint(1, self.depth)
        shape = Shape(depth, self.random.randint(3, self.drafts))
        self.used.add(shape)
        return shape

    def observe(self, seen: Observation) -> None:
        assert set(seen.seconds) >= {"draft", "target", "verify"}

    def out_of_memory(self, shape: Shape | None, rows: int) -> bool:
        return False


class World:
    """Seconds and acceptance of a made-up machine and pair."""

    def __init__(
        self, target: tuple[float, float], draft: float, rate: float, per_draft: float = 0.0, node: float = 0.0
    ) -> None:
        """Seconds of a target call, alone and per node; of a draft call, and per node; chance of a layer to pass, and
        more of it per draft."""
        self.target, self.draft, self.rate, self.per_draft, self.node = target, draft, rate, per_draft, node
        self.random, self.request = random.Random(5), Acceptance()

    def chance(self, shape: Shape) -> float:
        return min(1.0, self.rate + self.per_draft * shape.drafts_per_layer)

    def seconds(self, shape: Shape) -> dict[str, float]:
        target = self.target[0] + self.target[1] * shape.nodes(4)
        drafted = self.draft * shape.depth + self.node * (
            4 * (shape.depth > 0) + shape.drafts_per_layer * max(0, shape.depth - 1)
        )
        return {"draft": drafted, "target": target, "verify": 0.001 * (1 + shape.depth)}

    def steps(self, shape: Shape) -> float:
        return sum(self.chance(shape) ** depth for depth in range(shape.depth + 1))

    def goodput(self, shape: Shape) -> float:
        return self.steps(shape) / sum(self.seconds(shape).values())

    def at(self, shape: Shape) -> tuple[Shape, list[Acceptance], list[list[LayerCounters]], dict[str, float]]:
        """What an iteration of the one request shows."""
        layers, alive = [], True
        for _ in range(shape.depth):
            passed = alive and self.random.random() < self.chance(shape)
            layers.append(LayerCounters(reached=int(alive), passed=int(passed), needed=4 if passed else 0))
            alive = passed
        return shape, [self.request], [layers], self.seconds(shape)

    def iterate_counted(self, planner: AdaptivePlanner, reading: DraftWork = NOTHING) -> tuple[Shape, int]:
        """Shape and steps of an iteration."""
        shown = self.at(planner.choose([self.request], reading))
        if shown[0].depth:
            shown[3]["draft"] += self.node * reading.draft_backlog
        if reading.unread and shown[0].depth:
            shown[3]["read"] = self.node * reading.unread
        planner.observe(Observation(*shown, reading))
        return shown[0], 1 + sum(layer.passed for layer in shown[2][0])

    def iterate(self, planner: AdaptivePlanner, reading: DraftWork = NOTHING) -> Shape:
        return self.iterate_counted(planner, reading)[0]

    def best(self) -> float:
        shapes = [Shape(depth, drafts) for depth in range(9) for drafts in (4, 5, 6, 8)]
        return max(map(self.goodput, shapes))


def method() -> MethodConfig:
    return MethodConfig(num_beams=4, drafts_per_layer=8, depth=8, adaptive_depth=True)
