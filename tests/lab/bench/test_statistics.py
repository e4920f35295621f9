"""Intervals against numbers known otherwise, ratios against windows made by hand."""

from __future__ import annotations

import math

import pytest

from dsbd_cli.lab.bench.runners import BestAnswer
from dsbd_cli.lab.bench.sweep import SweepSetting, plan
from dsbd_cli.lab.bench.tally import Tally, bootstrap_mean, middle_half, ratios_of
from dsbd_cli.lab.metrics.energy import EnergyMeter, EnergyWindow
from dsbd_cli.lab.reports.bench_cells import work_columns
from dsbd_cli.stats import DrafterStats, LayerStats, RequestStats, StepStats


def test_the_bootstrap_of_a_mean_has_its_known_width() -> None:
    """Of n = 400 coin flips the interval is 1.96 standard errors, 0.049, to each side."""
    found = bootstrap_mean([0.0, 1.0] * 200)
    assert found.value == 0.5
    expected = 1.96 * math.sqrt(0.25 / 400)
    assert found.low == pytest.approx(0.5 - expected, abs=0.004)
    assert found.high == pytest.approx(0.5 + expected, abs=0.004)
    assert bootstrap_mean([0.0, 1.0] * 200) == found, "the same on every run"


def test_the_bootstrap_of_a_constant_is_the_constant() -> None:
    assert bootstrap_mean([1.0] * 5) == middle_half([1.0])


def test_the_middle_half() -> None:
    found = middle_half([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.value, found.low, found.high) == (3.0, 2.0, 4.0)


def settings(*names: str, **sweep: list[int]) -> list[SweepSetting]:
    return list(plan(list(names), sweep).settings)


def tally(setting: SweepSetting, speeds: dict[tuple[int, int], float], task: str = "sql") -> Tally:
    made = Tally(task, setting, 8)
    for place, speed in speeds.items():
        made.add_time(place, round(100 * speed), EnergyWindow(None, 100.0, "unavailable"), None)
    return made


def test_ratios_are_of_the_same_window_and_the_same_number_of_beams() -> None:
    two, four, coupled = settings("beam-sampling", "dsbd-coupled", num_beams=[2, 4])[:3]
    assert (two.label, four.label, coupled.name) == ("W=2", "W=4", "dsbd-coupled W=2")
    mine = tally(coupled, {(0, 0): 10.0, (0, 1): 30.0, (1, 0): 7.0})
    others = [
        tally(four, {(0, 0): 1.0, (0, 1): 1.0}),
        tally(two, {(0, 0): 5.0, (0, 1): 10.0, (9, 9): 1.0}),
        tally(two, {(0, 0): 99.0}, task="qa"),
    ]
    assert ratios_of(mine, others) == {"beam-sampling": [2.0, 3.0]}


def test_a_baseline_is_not_compared_with_itself() -> None:
    greedy, beam = settings("greedy", "beam-sampling")
    one, other = tally(greedy, {(0, 0): 4.0}), tally(beam, {(0, 0): 2.0})
    assert ratios_of(one, [one, other]) == {"beam-sampling": [2.0]}
    assert ratios_of(other, [one, other]) == {"greedy": [0.5]}


def test_counters_of_requests_are_summed_by_depth() -> None:
    (setting,) = settings("dsbd-coupled", depth=[2])
    made = tally(setting, {(0, 0): 1.0})
    first = [LayerStats(1, 8, 4, 4, 4, True), LayerStats(2, 8, 4, 4, 1, False)]
    second = [LayerStats(1, 8, 4, 4, 3, False)]
    steps = [StepStats("a", i, 0, 1, 20, 40, 0, layers, 0.0, 0.0, 0.0) for i, layers in enumerate((first, second), 1)]
    stats = RequestStats(target_calls=2, draft_calls=4, steps=3, drafted=32, accepted=8, width_sum=12, step_log=steps)
    stats.drafters = {"beam": DrafterStats(24, 6), "ngram": DrafterStats(8, 2)}
    answer = BestAnswer("x", 5, -1.0, stats, 1000)
    made.add_answers([answer], [{"exact match": 1.0}], [-1.0])
    row = made.row({}, EnergyMeter(None, reason="none"), "rss")
    assert row.passed_by_depth == (0.5, 0.0)
    assert row.accepted_by_depth == (7 / 16, 1 / 8)
    assert row.accepted_by_drafter == {"beam": 0.25, "ngram": 0.25}
    assert any(column.cell(row) == "25 (beam 25, ngram 25)" for column in work_columns([row]))
    assert (row.steps_per_call, row.acceptance_rate, row.mean_width) == (1.5, 0.25, 4.0)
    assert (row.target_calls, row.draft_calls, row.kv_peak_bytes) == (2.0, 4.0, 1000)
    assert row.logprob_per_token == -0.2


def test_energy_counts_only_windows_that_were_measured() -> None:
    (setting,) = settings("greedy")
    made = Tally("sql", setting, 8)
    made.add_time((0, 0), 100, EnergyWindow(50.0, 2.0, "nvml"), 7)
    made.add_time((0, 1), 900, EnergyWindow(None, 0.1, "nvml"), 9)
    made.add_answers([BestAnswer("", 0, None, None, None, "too long")], [{"exact match": 0.0}], [0.0])
    meter = EnergyMeter(None)
    meter.idle_watts = 10.0
    row = made.row({}, meter, "cuda")
    assert row.energy.j_per_token == 0.5
    assert row.energy.j_per_token_above_idle == pytest.approx((50.0 - 20.0) / 100)
    assert row.energy.watts == 25.0
    assert (row.peak_memory_bytes, row.failed, row.logprob_per_token) == (9, 1, None)


def test_counters_are_summed() -> None:
    """Guards against counters of one request alone, those of each drafter among them."""
    first = RequestStats(target_calls=2, steps=3, kv_peak_slots=9, drafters={"beam": DrafterStats(4, 1)})
    second = RequestStats(target_calls=5, steps=7, kv_peak_slots=6, drafters={"beam": DrafterStats(2, 2)})
    both = RequestStats.total([first, second])
    assert (both.target_calls, both.steps, both.kv_peak_slots) == (7, 10, 9)
    assert both.drafters == {"beam": DrafterStats(6, 3)}
    assert first.drafters == {"beam": DrafterStats(4, 1)}
