"""Adaptive depth: any sequence of forest shapes gives the same text, the draft always catches up, and the planner finds
the fastest shape of a world it does not know.

Guards: draft slots never filled after a stretch without drafts; a prompt that the draft never reads; a planner that
drafts at a loss, never drafts again, does not notice that the world changed, or treats unlike requests alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.core.report import LayerCounters
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.planning.acceptance import Acceptance, PassRates
from dsbd_cli.engine.planning.planner import (
    NOTHING,
    AdaptivePlanner,
    DraftWork,
    Gate,
    Observation,
    Planner,
    Shape,
    planner_for,
)
from dsbd_cli.engine.planning.timing import FittedLine
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import UsageError
from dsbd_cli.requests import Request
from tests.helpers.toys import NumberCodec, TableLM, table_pair
from tests.helpers.worlds import RandomPlanner, World, method

VOCABULARY = 12


class CheckedDraft(TableLM):
    """A draft whose cache must hold what the target's holds, in every slot that one of its nodes sees."""

    def __init__(self, table: Tensor, target: TableLM) -> None:
        super().__init__(table)
        self.truth, self.compared = target, 0
        self.fresh: Tensor | None = None  # slots of this iteration's own nodes, which the target has not run

    def move(self, source: Tensor, target: Tensor, common_prefix: Tensor) -> None:
        super().move(source, target, common_prefix)
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
        assert torch.equal(self.tokens[:, :width][old], self.truth.tokens[:, :width][old])
        return result


def decode(planner: RandomPlanner | None, rule: str, batch_size: int, beams: int = 3) -> list[list[tuple[int, ...]]]:
    target, draft = table_pair(1, VOCABULARY, 0.4)
    checked = CheckedDraft(draft.table, target)
    method = MethodConfig(rule=rule, num_beams=beams, drafts_per_layer=8, depth=5 if planner else 0)  # type: ignore[arg-type]
    engine = Engine(target, checked if planner else None, NumberCodec(VOCABULARY, (2,)), method, batch_size=batch_size)
    if planner:
        engine._planner = planner
    sampling = SamplingConfig(max_new_tokens=40, top_k=6, n_best=beams)
    results = engine.run(Request(id=str(i), seed=i, prompt_ids=(i % 5, i % 7), sampling=sampling) for i in range(12))
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
        assert planner.cuts >= {0, 1}


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
    draft_backlog = used[200:]
    steps = sum(world.steps(shape) for shape in draft_backlog)
    seconds = sum(sum(world.seconds(shape).values()) for shape in draft_backlog)
    assert steps / seconds > 0.95 * world.best()
    assert (max(set(draft_backlog), key=draft_backlog.count).depth > 0) == drafts


def test_notices_that_the_world_changed() -> None:
    planner = AdaptivePlanner(method())
    poor, good = World((0.05, 0.002), 0.01, 0.05), World((0.05, 0.002), 0.003, 0.9)
    assert [poor.iterate(planner).depth for _ in range(200)][-20:].count(0) > 15
    draft_backlog = [good.iterate(planner).depth for _ in range(3000)][-50:]
    assert sum(depth > 0 for depth in draft_backlog) > 45


def test_a_layer_that_needed_few_drafts_passes_with_few() -> None:
    """Drafts past the fourth bring nothing here, and cost."""
    planner, world = AdaptivePlanner(method()), World((0.05, 0.001), 0.002, 0.7)
    used = [world.iterate(planner) for _ in range(300)][100:]
    assert max(set(used), key=used.count).drafts_per_layer <= 5


def test_line_forgets_and_is_never_negative() -> None:
    line = FittedLine()
    assert line.at(3) == 0
    for x in (1, 2, 3, 4):
        line.add(x, 5 - x)
    assert line.at(100) == pytest.approx(line.at(0))  # falling with x: taken as flat
    for _ in range(400):
        line.add(1, 1.0)
        line.add(2, 3.0)
    assert line.at(3) == pytest.approx(5.0, abs=0.01)
    for _ in range(3000):
        line.add(2, 3.0)
        line.fit()
    assert line.at(3) == pytest.approx(5.0, abs=0.05)  # one x tells nothing about the slope: nodes do not become free


def test_a_change_of_the_machines_speed_is_not_the_price_of_nodes() -> None:
    """A machine that becomes slower and faster again, where another shape is tried now and then."""
    line = FittedLine()
    for number in range(400):
        slow, nodes = 1.6 if number % 90 >= 50 else 1.0, 9 if number % 40 == 12 else 1
        line.add(nodes, slow * (0.04 + 0.001 * nodes))
        if number > 60:
            assert 0.0009 < line.fit()[1] < 0.0017


def test_a_fixed_method_has_a_fixed_planner() -> None:
    planner = planner_for(MethodConfig(depth=3, drafts_per_layer=6))
    assert type(planner) is Planner
    assert planner.choose([Acceptance()] * 7) == Shape(3, 6)
    assert isinstance(planner_for(method()), AdaptivePlanner)
    with pytest.raises(UsageError, match="adaptive_depth"):
        MethodConfig(depth=0, adaptive_depth=True)


def first_draft(beams: int, share: float, unread: int, backlog: int = 0) -> int:
    """Iterations without drafts before the first with them. backlog: nodes that the draft has not run."""
    config = MethodConfig(num_beams=beams, drafts_per_layer=8, depth=8, adaptive_depth=True)
    planner, world = planner_for(config, draft_share=share), World((0.05, 0.0), 0.005, 0.9)
    for number in range(2000):
        if world.iterate(planner, DraftWork(backlog, unread)).depth:
            return number
    return 2000


@pytest.mark.parametrize(
    ("beams", "share", "unread", "expected"),
    [(4, 0.3, 320, 1160), (4, 0.05, 64, 820), (2, 0.05, 64, 820), (4, 0.0, 320, 2), (1, 0.3, 320, 2)],
)
def test_with_several_beams_a_draft_model_waits_until_a_hundredth_of_the_time_pays_for_it(
    beams: int, share: float, unread: int, expected: int
) -> None:
    """Guards short runs that are a tenth slower because a draft was tried that could not pay, and one beam, whose
    drafts pay, that waits."""
    assert expected <= first_draft(beams, share, unread) <= expected + 8


def test_what_the_draft_has_not_run_counts_in_the_price_of_the_first_try() -> None:
    assert 1160 <= first_draft(4, 0.3, 0, 320) <= 1168
    assert first_draft(4, 0.3, 160, 160) == first_draft(4, 0.3, 0, 320)


def test_no_draft_is_tried_before_an_iteration_without_drafts_is_timed() -> None:
    """Guards answers of one token, whose iterations are never steady: eight tries would each read their prompts."""
    planner, world = planner_for(method(), draft_share=0.3), World((0.05, 0.0), 0.005, 0.9)
    for _ in range(60):
        shown = world.at(planner.choose([world.request], DraftWork(unread=320)))
        assert not shown[0].depth
        planner.observe(Observation(*shown, DraftWork(unread=320), False))


def test_the_planner_knows_how_large_the_draft_is() -> None:
    target, draft = table_pair(1, VOCABULARY, 0.4)
    target.read_bytes, draft.read_bytes = 8, 2
    ours, copied = (
        Engine(
            target, model, NumberCodec(VOCABULARY, (2,)), MethodConfig(num_beams=4, adaptive_depth=True, drafter=name)
        )
        for model, name in ((draft, "beam"), (None, "ngram"))
    )
    assert [engine._planner._draft_share for engine in (ours, copied)] == [0.25, 0.0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", ["fixed", "threshold"])
def test_layers_keep_room_for_all_beams(width: str) -> None:
    """Guards speed that is bought with narrower beams: with K below W no layer could keep W."""
    config = MethodConfig(num_beams=4, drafts_per_layer=8, depth=6, width=width, adaptive_depth=True)  # type: ignore[arg-type]
    planner, world = AdaptivePlanner(config), World((0.01, 0.02), 0.0, 0.9)
    assert {world.iterate(planner).drafts_per_layer for _ in range(200)} <= set(range(4, 9))


def serve(planner: AdaptivePlanner, rates: Sequence[float], length: int, *, apart: bool) -> float:
    """Steps per second of requests one after another, request i with acceptance rates[i % n]. apart: each request keeps
    its own counts; otherwise they are hidden from the planner."""
    worlds = [World((0.05, 0.002), 0.01, rate) for rate in rates]
    for seed, world in enumerate(worlds):
        world.random.seed(seed)
    steps, seconds = 0, 0.0
    for number in range(90):
        world, request, left = worlds[number % len(rates)], Acceptance(), length
        while left > 0:
            world.request = request if apart else Acceptance()
            shape, taken = world.iterate_counted(planner)
            left, steps, seconds = left - taken, steps + taken, seconds + sum(world.seconds(shape).values())
    return steps / seconds


def test_requests_unlike_each_other_get_shapes_of_their_own() -> None:
    """Every other request is hard to draft for: one depth for all would be wrong for both."""
    unlike = [serve(AdaptivePlanner(method()), (0.2, 0.85), 80, apart=apart) for apart in (True, False)]
    assert unlike[0] > 1.1 * unlike[1]
    alike = [serve(AdaptivePlanner(method()), (0.5,), 80, apart=apart) for apart in (True, False)]
    assert alike[0] > 0.95 * alike[1]


def test_a_batch_takes_the_shape_of_the_largest_sum() -> None:
    """One request in eight passes everything, the others nothing: the batch has no use for drafts, but the one alone
    has. A request that left is forgotten."""
    planner, world = AdaptivePlanner(method()), World((0.05, 0.002), 0.01, 0.5)
    good, bad = Acceptance(), Acceptance()
    for _ in range(20):
        world.iterate(planner)
    for request, rate in ((good, 1.0), (bad, 0.0)):
        world.rate, world.request = rate, request
        for _ in range(60):
            planner.observe(Observation(*world.at(Shape(4, 8))))
    planner._probe_budget_s = 0.0  # no probe
    assert planner.choose([good]).depth > 2
    planner._now = Shape(0, 8)
    assert planner.choose([bad]).depth == planner.choose([good, *[bad] * 7]).depth == 0
    planner._now = Shape(0, 8)
    assert planner.choose([Acceptance()]).depth <= planner.choose([good]).depth


def test_a_new_request_starts_from_what_others_showed() -> None:
    planner, world = AdaptivePlanner(method()), World((0.05, 0.0), 0.001, 0.95)
    deep = [world.iterate(planner) for _ in range(100)][-1].depth
    assert deep > 4
    assert planner.choose([Acceptance()]).depth == deep


def test_what_cannot_pay_is_hardly_tried() -> None:
    """A layer of drafts yields one step at most. Where it takes longer than a whole iteration without drafts, the wide
    shapes are not timed at all, and probes take a hundredth of the time."""
    planner, world = AdaptivePlanner(method()), World((0.05, 0.002), 0.2, 0.0)
    used = [world.iterate(planner) for _ in range(6000)]
    assert any(shape.depth for shape in used[:4])  # its time had to be measured
    assert not any(shape.depth for shape in used[4:60])
    extra = sum(sum(world.seconds(shape).values()) - sum(world.seconds(Shape(0, 8)).values()) for shape in used[4:])
    assert 0 < extra < 0.02 * 6000 * sum(world.seconds(Shape(0, 8)).values())


def test_drafts_are_weighed_now_and_then_where_they_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time of the planner itself, 1.3 % of an iteration of SmolLM2-135M. Where drafts pay, they are weighed
    at every iteration."""
    weighed, steps = 0, PassRates.steps

    def counted(rates: PassRates, requests: Sequence[Acceptance]) -> object:
        nonlocal weighed
        weighed += 1
        return steps(rates, requests)

    monkeypatch.setattr(PassRates, "steps", counted)
    for world, least, most in ((World((0.05, 0.002), 0.2, 0.0), 240, 320), (World((0.05, 0.0), 0.001, 0.9), 900, 1000)):
        planner = AdaptivePlanner(method())
        weighed = 0
        for _ in range(1000):
            world.iterate(planner)
        assert least <= weighed <= most


def test_one_slow_iteration_is_no_verdict() -> None:
    """Guards a planner that never drafts again because its first timed draft met a busy machine."""
    planner, world = AdaptivePlanner(method()), World((0.03, 0.0), 0.005, 0.9)
    for number in range(1200):
        shown = world.at(planner.choose([world.request]))
        shown[3]["draft"] += 0.08 * (number == 1)
        planner.observe(Observation(*shown))
    assert all(world.iterate(planner).depth > 3 for _ in range(50))


@pytest.mark.parametrize("stable", [True, False])
def test_runs_before_a_capture_and_the_capture_tell_nothing_about_time(stable: bool) -> None:
    """A GPU: the first two runs of a shape are launched kernel by kernel, the third holds the capture, and with other
    slots a shape is captured again."""
    planner, world = AdaptivePlanner(method()), World((0.012, 0.0), 0.001, 0.9)
    seen, depths = dict[tuple[Shape, int], int](), []
    for number in range(1500):
        shown = world.at(planner.choose([world.request]))
        key = (shown[0], 0 if stable else number // 100)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] < 3:
            shown[3]["draft"] *= 6
            shown[3]["target"] *= 2
        shown[3]["draft"] += 1.0 * (seen[key] == 3)
        planner.observe(Observation(*shown, NOTHING, seen[key] > 3))
        depths.append(shown[0].depth)
    assert sum(depth > 4 for depth in depths[-1000:]) > 900


def test_it_is_probed_again_once_it_could_pay() -> None:
    planner, fast, slow = AdaptivePlanner(method()), World((0.05, 0.0), 0.1, 0.9), World((2.0, 0.0), 0.1, 0.9)
    assert not any([fast.iterate(planner).depth for _ in range(60)][20:])
    assert [slow.iterate(planner).depth for _ in range(1500)][-20:].count(0) == 0


def test_a_dear_probe_waits_for_a_moment_with_little_to_catch_up_on_and_comes_more_rarely() -> None:
    gaps = {}
    for draft in (0.002, 0.04):
        planner, world = AdaptivePlanner(method()), World((0.05, 0.002), draft, 0.0)
        used = [world.iterate(planner).depth for _ in range(3000)]
        probes = [number for number, depth in enumerate(used) if depth and number > 20]
        gaps[draft] = probes[-1] - probes[-2]
    assert gaps[0.04] > gaps[0.002]
    waits = []
    for draft_backlog in (512, 4):
        planner, world = AdaptivePlanner(method()), World((0.05, 0.002), 0.02, 0.0, node=0.0005)
        for number in range(100):  # the first probe shows what tokens of the backlog cost
            world.iterate(planner, DraftWork(4 if number < 40 else 512))
        waits.append(next(number for number in range(2000) if world.iterate(planner, DraftWork(draft_backlog)).depth))
    assert waits[0] > waits[1] + 300


def test_planning_is_cheap_for_many_rows() -> None:
    """Python calls of an iteration of 32 rows; times belong into benchmarks."""
    planner, calls = AdaptivePlanner(method()), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    requests = [Acceptance() for _ in range(32)]
    passed = [[LayerCounters(reached=1, passed=1, needed=4)] * 8] * 32
    for _ in range(20):
        seconds = {"draft": 0.01, "target": 0.05, "verify": 0.001}
        planner.observe(Observation(planner.choose(requests), requests, passed, seconds))
    sys.setprofile(count)
    shape = planner.choose(requests)
    sys.setprofile(None)
    assert shape.depth == 8
    assert calls < 1000


class Prefilled(TableLM):
    """Counts the prompts that it was given, and how often its slots moved."""

    prompts = moves = 0

    def move(self, source: Tensor, target: Tensor, common_prefix: Tensor) -> None:
        self.moves += 1
        super().move(source, target, common_prefix)

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        if batch.rows is not None:
            self.prompts += len(batch.rows)
        return super().forward(batch, logits=logits)


@pytest.mark.parametrize("drafts_for", [lambda iteration: 0, lambda iteration: int(iteration == 5)])
def test_the_draft_reads_a_prompt_only_when_it_is_to_draft(drafts_for: Callable[[int], int]) -> None:
    target, draft = table_pair(1, VOCABULARY, 0.4)
    counted, seen = Prefilled(draft.table), 0

    class Planned(RandomPlanner):
        def choose(self, requests: Sequence[Acceptance], reading: DraftWork = NOTHING) -> Shape:
            nonlocal seen
            seen += 1
            prompts = len(requests) * 3
            assert reading == DraftWork(reading.draft_backlog, 0 if counted.prompts else prompts, prompts)
            return Shape(drafts_for(seen), 8)

    config = MethodConfig(num_beams=3, drafts_per_layer=8, depth=5)
    engine = Engine(target, counted, NumberCodec(VOCABULARY, ()), config, batch_size=4)
    engine._planner = Planned(0, 5, 8)
    sampling = SamplingConfig(max_new_tokens=40, top_k=6)
    results = list(engine.run(Request(id=str(i), seed=i, prompt_ids=(i, 1, 2), sampling=sampling) for i in range(4)))
    assert [result.stats.draft_calls for result in results] == [drafts_for(5)] * 4
    assert counted.prompts == 4 * drafts_for(5)
    # what it holds moves only until all of that is in the common prefixes
    assert bool(counted.moves) == bool(drafts_for(5))
    assert counted.moves < seen / 2


def test_of_two_drafters_the_first_has_fewer_nodes_to_pass_with() -> None:
    """A layer that needed three nodes of the first one passes with four, one of which is the second one's, not with
    three; and more drafts than any seen are believed to pass as often."""
    rates, request = PassRates([3, 4, 6, 8], 2, second=1), Acceptance()
    layer = LayerCounters(reached=1, passed=1, needed=3)
    for _ in range(100):
        rates.count([request], [[layer, layer._replace(reached=0)]], 6)
    one_layer = rates.steps([request])[0, :, 0]
    assert one_layer[0] < 1.2
    assert min(one_layer[1:3]) > 1.9
    assert one_layer[3] > 1.8
    with_drafts = AdaptivePlanner(
        MethodConfig(drafter="beam+ngram", num_beams=1, drafts_per_layer=4, adaptive_depth=True)
    )
    assert {shape.drafts_per_layer for shape in with_drafts._shapes} == {2, 3, 4}


def test_an_iteration_informs_on_all_larger_least_confidences() -> None:
    """Every other forest is sure and passes, the others are unsure and fail. What an iteration kept from the target
    says nothing of choices that would have given it, and all of those that would not."""
    rates, request = PassRates([4, 8], 2, least=(0.0, 0.5, 0.9)), Acceptance()
    passing, failing = (LayerCounters(reached=1, passed=passed, needed=4 * passed) for passed in (1, 0))
    nothing = LayerCounters()
    for _ in range(200):
        rates.count([request], [[passing, passing]], 8, 0.0, [0.7, 0.6])
        rates.count([request], [[failing, nothing]], 8, 0.0, [0.3, 0.7])
    assert rates.reach_target()[:, 0] == pytest.approx([1, 0.5, 0], abs=0.08)
    assert rates.reach_target()[:, 1] == pytest.approx([1, 0.5, 0], abs=0.08)
    steps = rates.steps([request])
    assert steps[:, 0, 0] == pytest.approx([1.5, 1.5, 1], abs=0.1)
    assert steps[:, 0, 1] == pytest.approx([2, 2, 1], abs=0.1)
    for _ in range(200):  # now none is sure, and the target sees none
        rates.count([request], [[]], 8, 0.5, [0.3])
    assert rates.reach_target()[:, 0] == pytest.approx([1, 0, 0], abs=0.08)
    assert rates.steps([request])[:, 0, 0] == pytest.approx([1.5, 1, 1], abs=0.1)


def test_seconds_are_of_what_is_drafted_and_of_what_goes_to_the_target() -> None:
    """Every other forest is sure in both layers, the others in none: a second layer is drafted below a sure one."""
    planner, request = AdaptivePlanner(method(), gated=True), Acceptance()
    layers = [[LayerCounters(reached=1), LayerCounters()]]
    for turn in range(400):
        shape = Shape(2, 8 if turn % 4 < 2 else 4)
        seconds = {"draft": 2 * 0.003, "target": 0.05 + 0.001 * shape.nodes(4), "verify": 0.0}
        gate = Gate(0.0, [0], [0.6, 0.6] if turn % 2 else [0.3, 0.3])
        planner.observe(Observation(shape, [request], layers, seconds, gate=gate))
    predicted = planner._seconds(1)
    assert predicted[planner._index[Shape(2, 8)]] == pytest.approx(0.05 + 0.001 * 20 + 0.003 * 2, rel=0.02)
    assert predicted[planner._index[Shape(2, 8, 0.5)]] == pytest.approx(0.05 + 0.001 * 12 + 0.003 * 1.5, rel=0.02)
    assert predicted[planner._index[Shape(2, 8, 0.7)]] == pytest.approx(0.05 + 0.001 * 4 + 0.003, rel=0.02)


def test_a_gate_goes_by_the_rows_that_run() -> None:
    gate = Gate(0.5, [1, 3])
    assert gate([0.0, 0.9, 0.0, 0.3])
    assert not gate([1.0, 0.7, 1.0, 0.2])
    assert gate.confidences == pytest.approx([0.6, 0.45])
    assert not Gate(0.0, [0])([0.0])  # nothing is drafted


def test_what_is_drafted_is_kept_from_the_target_only_by_auto_on_a_cpu() -> None:
    for config, gated, expected in (
        (method(), True, True),
        (method(), False, False),
        (MethodConfig(depth=3), True, False),
    ):
        planner = planner_for(config, gated=gated)
        assert (planner.gate(Shape(2, 8, 0.5), [0]) is not None) == expected
        assert planner.gate(Shape(0, 8), [0]) is None
        if isinstance(planner, AdaptivePlanner):
            assert ({shape.least_confidence for shape in planner._shapes} == {0.0}) != gated


class Narrow(TableLM):
    """Has memory for so many nodes of a forward."""

    room, refused = 0, 0

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        if logits and batch.tokens.numel() > self.room:
            self.refused += 1
            raise torch.OutOfMemoryError
        return super().forward(batch, logits=logits)


@pytest.mark.parametrize("room", [3 * 4, 3])
def test_drafts_that_do_not_fit_into_memory_are_left_out(room: int) -> None:
    """Guards a shape that is tried again and again, until every request has failed that would fit without drafts."""
    target, draft = table_pair(1, VOCABULARY, 0.4)
    narrow = Narrow(target.table)
    narrow.room = room
    config = MethodConfig(rule="coupled", num_beams=3, drafts_per_layer=8, depth=5, adaptive_depth=True)
    engine = Engine(narrow, draft, NumberCodec(VOCABULARY, (2,)), config, batch_size=4)
    engine._planner = planner_for(config)  # drafts at once
    sampling = SamplingConfig(max_new_tokens=40, top_k=6, n_best=3)
    results = engine.run(Request(id=str(i), seed=i, prompt_ids=(i % 5, i % 7), sampling=sampling) for i in range(12))
    assert [[hypothesis.token_ids for hypothesis in result.hypotheses] for result in results] == decode(
        None, "coupled", 4
    )
    assert 0 < narrow.refused < 12
