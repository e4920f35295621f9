"""The planner that goes by what a drafter foresees.

Guards: drafts without a chance, chances that are never corrected or never tried again, a change of the machine's speed
taken for the price of nodes.
"""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.core.report import LayerCounters
from dsbd_cli.engine.planning.acceptance import Acceptance
from dsbd_cli.engine.planning.planner import (
    FIRST_LOOK_UPS,
    LOOK_UP_SHARE,
    LookUpsFirst,
    Observation,
    ProspectPlanner,
    Prospects,
    Shape,
    planner_for,
)
from dsbd_cli.engine.planning.timing import RelativeTimes

MOST = Shape(4, 2)


def make() -> ProspectPlanner:
    method = MethodConfig(
        rule="search", num_beams=1, drafter="suffix", adaptive_depth=True, depth=4, drafts_per_layer=2
    )
    return ProspectPlanner(method)


def foreseen(chance: float, rows: int = 1) -> Prospects:
    """Each layer passes with this chance, whatever its number of nodes."""
    return Prospects([1, 2], np.tile(chance ** np.arange(1.0, 5.0), (rows, 2, 1)))


def play(planner: ProspectPlanner, request: Acceptance, chance: float, passes: bool, times: int = 1) -> list[int]:
    """Iterations of one row, of which a node costs a tenth of the rest. Return their depths."""
    depths = []
    for _ in range(times):
        shape = planner.cut(MOST, foreseen(chance), [request])
        reached = [LayerCounters(1, 1, 1, 1, int(passes), int(passes)) for _ in range(shape.depth if passes else 1)]
        layers = [*reached, *[LayerCounters()] * shape.depth][: shape.depth]
        seconds = {"draft": 0.0, "target": 1 + 0.1 * shape.nodes(1), "verify": 0.0}
        planner.observe(Observation(shape, [request], [layers], seconds))
        depths.append(shape.depth)
    return depths


def test_layers_are_drafted_as_deep_as_they_pay() -> None:
    planner, request = make(), Acceptance()
    assert play(planner, request, 0.99, True, 20)[-1] == 4
    assert play(planner, request, 0.3, True)[0] < 4
    assert play(planner, request, 0.0, True)[0] == 0
    assert planner.cut(MOST, foreseen(0.99), [request]).drafts_per_layer == 1  # a second node would bring nothing


def test_what_never_passes_is_given_up_and_tried_again() -> None:
    planner = make()
    play(planner, Acceptance(), 0.5, True, 20)
    depths = play(planner, Acceptance(), 0.5, False, 4000)
    assert depths[0] > 0
    assert sum(depth > 0 for depth in depths[100:]) < 200
    assert any(depths[-2000:])


def test_a_row_unlike_the_others_has_chances_of_its_own() -> None:
    planner, good, bad = make(), Acceptance(), Acceptance()
    for _ in range(30):
        play(planner, good, 0.6, True)
        play(planner, bad, 0.6, False)
    assert planner._of_row(good) > 1.2 * planner._of_row(bad)


def test_nothing_is_foreseen_of_no_rows_and_what_does_not_fit_is_left_out() -> None:
    planner = make()
    assert planner.cut(MOST, foreseen(1.0), [Acceptance()]).depth == 4
    assert planner.out_of_memory(Shape(4, 1), 1)
    assert planner.cut(MOST, foreseen(1.0), [Acceptance()]).depth < 4
    assert not planner.out_of_memory(Shape(0, 2), 1)


def looks(planner: ProspectPlanner, passes: bool, price_s: float, times: int) -> int:
    """Iterations of one row whose look-ups take so long, where the rest takes a second. Return how many were made."""
    request, made = Acceptance(), 0
    for _ in range(times):
        shape = planner.choose([request])
        if planner.foresees:
            shape = planner.cut(shape, foreseen(0.9 if passes else 0.0), [request])
            made += 1
        layers = [LayerCounters(1, 1, 1, 1, 1, 1)] * shape.depth
        looked_up_s = price_s if planner.foresees else 0.0
        seconds = {"draft": looked_up_s, "target": 1 + 0.01 * shape.nodes(1), "verify": 0.0}
        planner.observe(Observation(shape, [request], [layers], seconds, looked_up_s=looked_up_s))
    return made


def test_look_ups_that_find_nothing_take_a_share_of_the_time() -> None:
    assert looks(make(), False, 0.2, 1000) < 1.2 * LOOK_UP_SHARE * 1000 / 0.2 + FIRST_LOOK_UPS
    assert looks(make(), False, 0.001, 100) == 100
    assert looks(make(), True, 0.2, 100) > 95


def test_one_slow_look_up_does_not_end_them() -> None:
    first = make()
    looks(first, False, 60.0, 1)
    assert looks(first, False, 0.001, 50) == 50
    planner = make()
    looks(planner, False, 0.001, 50)
    looks(planner, False, 60.0, 1)
    assert looks(planner, False, 0.001, 50) > 45


def beside_a_model() -> LookUpsFirst:
    method = MethodConfig(rule="search", num_beams=1, drafter="beam+suffix", drafts_per_layer=2)
    planner = planner_for(method)
    assert isinstance(planner, LookUpsFirst)
    return planner


def run_iterations(planner: LookUpsFirst, chance: float, model_passes: bool, count: int) -> list[Shape]:
    """Iterations of one row. A call of the model costs a fifth of the target's, a node a twentieth. Look-ups pass as
    they foresee if the chance is above a half. Return the shapes."""
    shapes, request = [], Acceptance()
    for _ in range(count):
        planned = planner.choose([request])
        shape = planner.cut(planned, foreseen(chance), [request])
        passes = chance > 0.5 if shape.looked_up else model_passes
        reached = [LayerCounters(1, 1, 1, 1, int(passes), int(passes)) for _ in range(shape.depth if passes else 1)]
        layers = [*reached, *[LayerCounters()] * shape.depth][: shape.depth]
        draft = 0.2 * shape.depth if shape.runs_draft else 0.01
        seconds = {"draft": draft, "target": 1 + 0.05 * shape.nodes(1), "verify": 0.0}
        planner.observe(Observation(shape, [request], [layers], seconds, gate=planner.gate(shape, [0])))
        shapes.append(shape)
    return shapes


def test_look_ups_come_first_where_they_promise_more_than_the_model() -> None:
    assert all(shape.looked_up for shape in run_iterations(beside_a_model(), 0.95, True, 60)[20:] if shape.depth > 1)
    unsure = run_iterations(beside_a_model(), 0.1, True, 60)
    assert not any(shape.looked_up for shape in unsure)
    assert sum(shape.depth > 0 for shape in unsure[20:]) > 35
    neither = run_iterations(beside_a_model(), 0.0, False, 60)
    assert sum(shape.depth > 0 for shape in neither[20:]) < 5


def test_look_ups_that_promise_little_leave_the_iterations_to_the_model() -> None:
    """After an iteration that the model rested in, it is weighed again at once."""
    planner = beside_a_model()
    run_iterations(planner, 0.0, True, 30)
    sure, shapes = list[Shape](), list[Shape]()
    for _ in range(20):
        sure += run_iterations(planner, 1.0, True, 1)
        shapes += run_iterations(planner, 0.55, True, 3)
    assert sum(shape.looked_up for shape in sure) > 10
    assert sum(shape.runs_draft for shape in shapes) > 50


def test_the_model_is_timed_and_tried_although_look_ups_pass() -> None:
    shapes = run_iterations(beside_a_model(), 0.95, True, 200)
    assert [shape.runs_draft for shape in shapes[:5]].count(True) >= 1
    assert any(shape.runs_draft for shape in shapes[20:])
    assert sum(shape.looked_up for shape in shapes) > 150


def test_times_of_look_ups_do_not_count_for_the_model() -> None:
    planner, request = beside_a_model(), Acceptance()
    run_iterations(planner, 0.1, True, 40)
    before = planner._model._target_line.fit()
    shape = planner.cut(planner.choose([request]), foreseen(0.99), [request])
    assert shape.looked_up
    passed = [LayerCounters(1, 1, 1, 1, 1, 1)] * shape.depth
    planner.observe(Observation(shape, [request], [passed], {"draft": 0.0, "target": 99.0, "verify": 0.0}))
    assert planner._model._target_line.fit() == before
    assert request.look_ups().counts is not None
    assert request.counts is None


def test_only_texts_that_do_not_depend_on_drafts_are_looked_up_first() -> None:
    for rule, drafter, expected in (
        ("search", "beam+suffix", True),
        ("coupled", "rsd-s+grammar", True),
        ("search", "beam+ngram", False),
        ("search", "ngram+suffix", False),
        ("rejection", "beam+suffix", False),
    ):
        method = MethodConfig(rule=rule, drafter=drafter, adaptive_depth=True, width="fixed")
        assert isinstance(planner_for(method), LookUpsFirst) == expected
    assert MethodConfig(rule="search", drafter="beam+suffix").depth == 16
    assert not isinstance(planner_for(MethodConfig(drafter="beam+suffix", depth=4)), LookUpsFirst)


@pytest.mark.parametrize("drift", [1.0, 0.97, 1.03])
def test_ratios_of_times_do_not_follow_the_speed_of_the_machine(drift: float) -> None:
    """The machine becomes slower or faster from iteration to iteration, by up to twenty times in all."""
    times, speed = RelativeTimes(), 1.0
    for number in range(100):
        nodes = (4, 8, 12)[number % 3]
        times.add(nodes, speed * {4: 1.0, 8: 1.02, 12: 1.4}[nodes])
        speed *= drift
    four, eight, ten, twelve, more = times.at(np.array([4, 8, 10, 12, 44]))
    assert eight / four == pytest.approx(1.02, abs=0.15)
    assert twelve / four == pytest.approx(1.4, abs=0.2)
    assert ten == pytest.approx((eight + twelve) / 2)
    assert more == pytest.approx(twelve + 2)
