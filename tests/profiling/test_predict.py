"""The arithmetic of predictions, floors and memory, on numbers done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsbd_cli.engine.models.sizes import ModelSize
from dsbd_cli.lab.profiling import advice
from dsbd_cli.lab.profiling.acceptance import Rates
from dsbd_cli.lab.profiling.curves import node_counts, points_of
from dsbd_cli.lab.profiling.machine import MachineRates
from dsbd_cli.lab.profiling.predict import Costs, Interpolation, choose, layer_costs, predict, predictions
from dsbd_cli.lab.profiling.probe import SlotPeak, owners
from dsbd_cli.lab.reports.profile_data import (
    NO_DRAFT,
    ForestSize,
    Machine,
    MeasuredSetting,
    Prediction,
    Spread,
    spread_of,
)

COSTS = Costs(
    target=Interpolation(((4, 0.010), (36, 0.042))),
    draft=Interpolation(((4, 0.001), (8, 0.002))),
    first_nodes=6.0,
    iteration_s=0.002,
    layer_s=0.001,
    draft_s=0.0001,
    once_s=0.5,
    plain_once_s=0.25,
    rows=2.0,
    plain_rows=4.0,
    steps=400,
    tokens=300,
    num_beams=4,
)


def test_a_line_between_and_beyond_its_points() -> None:
    line = Interpolation(((4, 1.0), (8, 2.0), (16, 6.0)), scale=2.0)
    assert [line.at(n) for n in (1, 4, 6, 8, 12, 16, 20)] == [2.0, 2.0, 3.0, 4.0, 8.0, 12.0, 16.0]
    assert Interpolation(((4, 1.0),)).at(99) == 1.0
    assert Interpolation(((4, 2.0), (8, 1.0))).at(99) == 1.0, "noise leads nowhere below what was measured"


def test_nothing_is_predicted_for_layers_that_no_forest_had() -> None:
    """Guards a look-up, which drafts for each K apart: where time is short, some K know fewer layers than others."""
    deep, shallow = Rates((9, 6, 3), (6, 3, 2), (12, 6, 4)), Rates((9, 6, 3), (6, 3, 2), (12, 6, 4)).first(2)
    found = predictions(COSTS, {(4, None): deep, (8, None): shallow}, [1, 2, 3])
    sizes = {(one.setting.drafts_per_layer, one.setting.depth) for one in found if one.setting.depth}
    assert sizes == {(4, 1), (4, 2), (4, 3), (8, 1), (8, 2)}


def test_an_iteration_is_the_sum_of_its_parts() -> None:
    # first draft forward 1.5 ms, another one 2 ms, target of 4 + 2 * 8 nodes, the rest, two layers of 8 drafts
    expected = 0.0015 + 0.002 + 0.026 + 0.002 + 2 * (0.001 + 8 * 0.0001)
    assert COSTS.iteration(ForestSize(2, 8)) == pytest.approx(expected)
    assert COSTS.iteration(NO_DRAFT) == pytest.approx(0.012)


def test_without_forwards_of_a_draft_layers_and_drafts_hold_what_drafting_costs() -> None:
    costs = replace(COSTS, draft=None)
    assert costs.iteration(ForestSize(2, 8)) == pytest.approx(0.026 + 0.002 + 2 * (0.001 + 8 * 0.0001))
    assert costs.iteration(NO_DRAFT) == COSTS.iteration(NO_DRAFT)


def test_the_cache_of_a_bridged_draft_is_an_owner_of_its_own() -> None:
    found = {one.name: one.bytes for one in owners([("target", 100)], SlotPeak(2, 1, 1, 3), 10, 60, 1, 1000, 0, 50)}
    assert found["KV of the draft"] == 50
    assert found["workspace"] == 1000 - 100 - 60 - 50


def test_costs_of_layers_and_drafts_from_two_settings() -> None:
    # 10 ms and nothing else; 4 layers of 8 drafts cost 4 * (1 + 8 * 0.5) ms more, 2 of 16 cost 2 * (1 + 16 * 0.5)
    layer, draft = layer_costs(0.010, ForestSize(4, 8), 0.030, ForestSize(2, 16), 0.028)
    assert (layer, draft) == (pytest.approx(0.001), pytest.approx(0.0005))
    # noise that makes the wider one cheaper, or a layer cheaper than nothing
    assert layer_costs(0.010, ForestSize(4, 8), 0.030, ForestSize(2, 16), 0.012) == (pytest.approx(0.005), 0.0)
    layer, draft = layer_costs(0.010, ForestSize(4, 8), 0.030, ForestSize(2, 16), 0.100)
    assert (layer, draft) == (pytest.approx(0.0), pytest.approx(0.005 / 8))
    assert layer_costs(0.010, ForestSize(4, 8), 0.030, ForestSize(2, 8), 0.020) == (pytest.approx(0.005), 0.0)


def test_tokens_per_second_of_a_run() -> None:
    rates = Rates((10, 8), (8, 4), (32, 16))
    found = predict(COSTS, ForestSize(2, 8), rates)
    steps = 1 + 0.8 + 0.8 * 0.5
    assert found.steps_per_call == pytest.approx(steps)
    assert found.tokens_per_s == pytest.approx(300 / (0.5 + 400 / (steps * 2) * COSTS.iteration(ForestSize(2, 8))))
    plain = predict(COSTS, NO_DRAFT, None)
    assert plain.steps_per_call == 1.0
    assert plain.tokens_per_s == pytest.approx(300 / (0.25 + 400 / 4 * 0.012))
    grid = predictions(COSTS, {(8, None): rates, (4, None): rates}, [1, 2])
    assert [one.setting for one in grid] == [
        NO_DRAFT,
        ForestSize(1, 8),
        ForestSize(1, 4),
        ForestSize(2, 8),
        ForestSize(2, 4),
    ]


def test_the_fastest_is_chosen_and_of_varying_widths_the_widest_near_it() -> None:
    fixed = [(ForestSize(2, 8), 10.0), (ForestSize(4, 8), 10.2), (NO_DRAFT, 9.9)]
    assert choose(fixed, 4) == ForestSize(4, 8)
    dynamic = [
        (ForestSize(2, 8, 1), 10.0),
        (ForestSize(2, 8, 2), 9.6),
        (ForestSize(2, 8, 3), 9.4),
        (ForestSize(1, 8, 2), 9.7),
    ]
    assert choose(dynamic, 4) == ForestSize(1, 8, 2)
    assert choose([*dynamic, (NO_DRAFT, 9.6)], 4) == NO_DRAFT
    assert choose([*dynamic, (NO_DRAFT, 9.0)], 4) == ForestSize(1, 8, 2)


def test_the_floor_is_the_larger_of_memory_and_arithmetic() -> None:
    measured = [(1, Spread(0.004, 0.004, 0.004, 3)), (100, Spread(0.5, 0.4, 0.6, 3))]
    size = ModelSize(held_bytes=2_000_000, read_bytes=1_000_000, flops_per_node=2_000_000)
    points = points_of(measured, 2, 50, 1000, size, MachineRates(1e9, 1e10))
    memory = (1_000_000 + 2 * 50 * 1000) / 1e9
    assert (points[0].floor_s, points[0].bound) == (pytest.approx(memory), "memory")
    assert (points[1].floor_s, points[1].bound) == (pytest.approx(2_000_000 * 100 * 2 / 1e10), "arithmetic")
    assert points[1].share_of_floor == pytest.approx(0.08)
    assert points_of(measured, 2, 50, 1000, None, None)[0].share_of_floor is None


def test_node_counts_hold_what_is_wanted() -> None:
    assert node_counts(4, 36, 10) == [1, 2, 4, 8, 10, 16, 24, 32, 36]


def test_memory_adds_up_to_the_peak() -> None:
    slots = SlotPeak(trunk=100, tail=10, in_flight=36, path=115)
    found = {one.name: one.bytes for one in owners([("target", 5000), ("draft", 700)], slots, 10, 2000, 4, 9000, 800)}
    assert (found["KV trunk"], found["KV tail"]) == (1000, 100)
    assert found["KV in flight"] == 360
    assert found["KV reserved, free"] == 2000 - 1460
    assert found["workspace"] == 9000 - 5000 - 700 - 2000 - 800
    assert found["one cache per beam"] == 4 * 115 * 10
    parts = [size for name, size in found.items() if name not in ("peak", "one cache per beam")]
    assert sum(size or 0 for size in parts) == found["peak"]
    unknown = {one.name: one.bytes for one in owners([("target", None)], slots, 10, 2000, 4, 9000, 800)}
    assert unknown["weights, target"] is None
    assert unknown["workspace"] is None


def measured(setting: ForestSize, speed: float, low: float = 1.0, high: float = 1.0) -> MeasuredSetting:
    predicted = Prediction(setting, 2.0, 0.1, 10.0, 4.0)
    return MeasuredSetting(setting, Spread(1.0, low, high, 3), 100, spread_of([speed]), 2.0, 50, 4.0, (), predicted)


def test_notes_say_when_speculation_does_not_pay() -> None:
    now, plain = measured(ForestSize(4, 8), 10.0), measured(NO_DRAFT, 20.0)
    told = " ".join(advice.notes(now, [plain], NO_DRAFT))
    assert "no draft is 2.00 times as fast" in told
    assert "with this drafter no D and K" in told
    assert "use no draft" in told
    assert "the prediction for no draft was off by -50%" in told
    told = " ".join(advice.notes(now, [measured(NO_DRAFT, 8.0)], ForestSize(4, 8)))
    assert "speculation pays: 1.25 times" in told
    assert "the settings in use are the recommended ones" in told


def test_warnings_of_a_busy_machine_and_of_spread() -> None:
    quiet = Machine("cpu", 2, 2, 0.3, {})
    assert advice.warnings(quiet, [measured(ForestSize(4, 8), 10.0)]) == []
    busy = Machine("cpu", 2, 2, 1.4, {})
    assert "load average 1.4" in advice.warnings(busy, [])[0]
    assert "spread by 50%" in advice.warnings(quiet, [measured(ForestSize(4, 8), 10.0, 0.8, 1.3)])[0]


def test_whether_a_longer_or_wider_draft_would_pay() -> None:
    def one(depth: int, drafts: int, speed: float) -> Prediction:
        return Prediction(ForestSize(depth, drafts), 2.0, 0.1, speed, 4.0)

    found = [one(2, 8, 10.0), one(3, 8, 11.0), one(1, 8, 9.0), one(2, 12, 10.1), one(3, 12, 99.0)]
    told = advice.neighbours(found[0], found, measured(ForestSize(2, 8), 10.0), None)
    assert told == [
        "a longer draft would pay: D=3 K=8 is predicted to change speed by +10%",
        "a shorter draft would not pay: D=1 K=8 is predicted to change speed by -10%",
        "a wider draft would change little: D=2 K=12 is predicted within 3% of the speed as set",
    ]


def test_a_draft_that_only_comes_nearer_to_no_draft_does_not_pay() -> None:
    found = [Prediction(ForestSize(2, 8), 2.0, 0.1, 10.0, 4.0), Prediction(ForestSize(1, 8), 2.0, 0.1, 16.2, 4.0)]
    now = measured(ForestSize(2, 8), 20.0)
    assert advice.neighbours(found[0], found, now, measured(NO_DRAFT, 35.4)) == [
        "a shorter draft would be faster than as set, but still slower than no draft: D=1 K=8 is predicted to change "
        "speed by +62%, no draft was measured to change it by +77%"
    ]
    assert "would pay" in advice.neighbours(found[0], found, now, measured(NO_DRAFT, 32.0))[0]


def test_a_line_through_what_runs_measured() -> None:
    """Guards predictions that contradict the runs they are made from."""
    line = Interpolation(((2, 1.0), (10, 2.0), (20, 4.0))).through([(2, 2.0), (10, 2.0), (10, 4.0)])
    assert [line.at(nodes) for nodes in (1, 2, 10, 20)] == pytest.approx([2.0, 2.0, 3.0, 6.0])
    assert line.at(6) == pytest.approx(2.5)
    assert Interpolation(((2, 1.0), (10, 2.0))).through([(6, 3.0)]).points == ((2, 2.0), (6, 3.0), (10, 4.0))


def test_notes_say_why_a_slower_run_without_a_draft_is_recommended() -> None:
    now, plain = measured(ForestSize(4, 8, 1), 52.4), measured(NO_DRAFT, 51.1)
    best = choose([(one.setting, one.tokens_per_s.median) for one in (now, plain)], 4)
    told = " ".join(advice.notes(now, [plain], best))
    assert "speculation pays: 1.03 times" in told
    assert "no draft is recommended all the same: it is within 5% of the fastest" in told
    assert "use no draft" not in told
