"""Adaptive depth: any sequence of forest shapes gives the same text, the draft always catches up, and the planner finds
the fastest shape of a world it does not know.

Guards: draft slots never filled after a stretch without drafts; a planner that drafts at a loss, never drafts again, or
does not notice that the world changed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dsbd_cli.config import MethodConfig, SamplingConfig
from dsbd_cli.core.protocols import ForestInput
from dsbd_cli.decoding.engine import Engine
from dsbd_cli.decoding.planner import AdaptivePlanner, FixedPlanner, Line, Shape, planner_for
from dsbd_cli.errors import UsageError
from dsbd_cli.requests import Request
from tests.engine.toys import NumberCodec, TableLM, table_pair

VOCABULARY = 12


class RandomPlanner:
    """Any shape at any time; often none, so that the draft falls far behind."""

    def __init__(self, seed: int, depth: int, drafts: int) -> None:
        self.random, self.depth, self.drafts, self.used = random.Random(seed), depth, drafts, set[Shape]()

    def choose(self, rows: int) -> Shape:
        depth = 0 if self.random.random() < 0.7 else self.random.randint(1, self.depth)
        shape = Shape(depth, self.random.randint(3, self.drafts))
        self.used.add(shape)
        return shape

    def observe(self, shape: Shape, layers: Sequence[object], seconds: dict[str, float]) -> None:
        assert set(seconds) >= {"draft", "target", "verify"}


class CheckedDraft(TableLM):
    """A draft whose cache must hold what the target's holds, in every slot that one of its nodes sees."""

    def __init__(self, table: Tensor, target: TableLM) -> None:
        super().__init__(table)
        self.target, self.compared = target, 0
        self.fresh: Tensor | None = None  # slots of this iteration's own nodes, which the target has not run

    def move(self, source: Tensor, target: Tensor) -> None:
        super().move(source, target)
        self.fresh = None

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        result = super().forward(batch, logits=logits)
        if batch.rows is not None:
            return result
        fresh = torch.zeros_like(self.tokens, dtype=torch.bool) if self.fresh is None else self.fresh
        self.fresh = fresh.scatter(1, batch.slots, True)
        width = batch.mask.shape[2]
        old = batch.mask.any(1) & ~self.fresh[:, :width]
        self.compared += int(old.sum())
        assert torch.equal(self.tokens[:, :width][old], self.target.tokens[:, :width][old])
        return result


def decode(planner: RandomPlanner | None, rule: str, batch_size: int, beams: int = 3) -> list[list[tuple[int, ...]]]:
    target, draft = table_pair(1, VOCABULARY, 0.4)
    checked = CheckedDraft(draft.table, target)
    method = MethodConfig(rule=rule, num_beams=beams, drafts_per_layer=8, depth=5 if planner else 0)  # type: ignore[arg-type]
    engine = Engine(target, checked if planner else None, NumberCodec(VOCABULARY, (2,)), method, batch_size=batch_size)
    if planner:
        engine._planner = planner
    sampling = SamplingConfig(max_new_tokens=40, top_k=6, n_best=beams)
    results = engine.run(Request(str(i), i, prompt_ids=(i % 5, i % 7), sampling=sampling) for i in range(12))
    texts = [[hypothesis.token_ids for hypothesis in result.hypotheses] for result in results]
    assert planner is None or checked.compared > 300
    return texts


@pytest.mark.parametrize("rule", ["coupled", "search"])
@pytest.mark.parametrize("beams", [1, 3])
def test_any_sequence_of_shapes_gives_the_same_text(rule: str, beams: int) -> None:
    plain = decode(None, rule, 1, beams)
    for seed, batch_size in ((1, 1), (2, 5), (3, 12)):
        planner = RandomPlanner(seed, 5, 8)
        assert decode(planner, rule, batch_size, beams) == plain
        assert len({shape.depth for shape in planner.used}) >= 4


class World:
    """Seconds and acceptance of a made-up machine and pair."""

    def __init__(self, target: tuple[float, float], draft: float, rate: float, per_draft: float = 0.0) -> None:
        self.target, self.draft, self.rate, self.per_draft = target, draft, rate, per_draft
        self.random = random.Random(5)

    def chance(self, shape: Shape) -> float:
        return min(1.0, self.rate + self.per_draft * shape.drafts_per_layer)

    def seconds(self, shape: Shape) -> dict[str, float]:
        target = self.target[0] + self.target[1] * shape.nodes(4)
        return {"draft": self.draft * shape.depth, "target": target, "verify": 0.001 * (1 + shape.depth)}

    def steps(self, shape: Shape) -> float:
        return sum(self.chance(shape) ** depth for depth in range(shape.depth + 1))

    def goodput(self, shape: Shape) -> float:
        return self.steps(shape) / sum(self.seconds(shape).values())

    def iterate(self, planner: AdaptivePlanner) -> Shape:
        shape = planner.choose(1)
        layers, alive = [], True
        for _ in range(shape.depth):
            passed = alive and self.random.random() < self.chance(shape)
            layers.append({"reached": int(alive), "passed": int(passed), "needed": 4 if passed else 0})
            alive = passed
        planner.observe(shape, [layers], self.seconds(shape))
        return shape

    def best(self) -> float:
        shapes = [Shape(depth, drafts) for depth in range(9) for drafts in (4, 5, 6, 8)]
        return max(map(self.goodput, shapes))


def method() -> MethodConfig:
    return MethodConfig(num_beams=4, drafts_per_layer=8, depth=8, adaptive_depth=True)


@pytest.mark.parametrize(
    ("world", "drafts"),
    [
        (World((0.05, 0.008), 0.01, 0.35), False),  # compute-bound: every node costs, little is accepted
        (World((0.05, 0.0), 0.001, 0.8), True),  # memory-bound: nodes are free
        (World((0.06, 0.001), 0.004, 0.6), True),
        (World((0.01, 0.0), 0.02, 0.9), False),  # the draft is dearer than the target
    ],
    ids=["nodes-cost", "nodes-free", "between", "dear-draft"],
)
def test_finds_a_shape_close_to_the_best(world: World, drafts: bool) -> None:
    planner = AdaptivePlanner(method())
    used = [world.iterate(planner) for _ in range(600)]
    late = used[200:]
    steps = sum(world.steps(shape) for shape in late)
    seconds = sum(sum(world.seconds(shape).values()) for shape in late)
    assert steps / seconds > 0.95 * world.best()
    assert (max(set(late), key=late.count).depth > 0) == drafts


def test_notices_that_the_world_changed() -> None:
    planner = AdaptivePlanner(method())
    poor, good = World((0.05, 0.002), 0.01, 0.05), World((0.05, 0.002), 0.003, 0.9)
    assert [poor.iterate(planner).depth for _ in range(200)][-20:].count(0) > 15
    late = [good.iterate(planner).depth for _ in range(3000)][-50:]
    assert sum(depth > 0 for depth in late) > 45


def test_a_layer_that_needed_few_drafts_passes_with_few() -> None:
    """Drafts past the fourth bring nothing here, and cost."""
    planner, world = AdaptivePlanner(method()), World((0.05, 0.001), 0.002, 0.7)
    used = [world.iterate(planner) for _ in range(300)][100:]
    assert max(set(used), key=used.count).drafts_per_layer <= 5


def test_line_forgets_and_is_never_negative() -> None:
    line = Line()
    assert line.at(3) == 0
    for x in (1, 2, 3, 4):
        line.add(x, 5 - x)
    assert line.at(100) == pytest.approx(line.at(0))  # falling with x: taken as flat
    for _ in range(400):
        line.add(1, 1.0)
        line.add(2, 3.0)
    assert line.at(3) == pytest.approx(5.0, abs=0.01)


def test_a_fixed_method_has_a_fixed_planner() -> None:
    planner = planner_for(MethodConfig(depth=3, drafts_per_layer=6))
    assert isinstance(planner, FixedPlanner)
    assert planner.choose(7) == Shape(3, 6)
    assert isinstance(planner_for(method()), AdaptivePlanner)
    with pytest.raises(UsageError, match="adaptive_depth"):
        MethodConfig(depth=0, adaptive_depth=True)


@pytest.mark.parametrize("width", ["fixed", "threshold"])
def test_layers_keep_room_for_all_beams(width: str) -> None:
    """Guards speed that is bought with narrower beams: with K below W no layer could keep W."""
    config = MethodConfig(num_beams=4, drafts_per_layer=8, depth=6, width=width, adaptive_depth=True)  # type: ignore[arg-type]
    planner, world = AdaptivePlanner(config), World((0.01, 0.02), 0.0, 0.9)
    assert {world.iterate(planner).drafts_per_layer for _ in range(200)} <= set(range(4, 9))
