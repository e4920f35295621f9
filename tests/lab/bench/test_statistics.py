"""Intervals against numbers known otherwise, ratios against windows made by hand."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from dsbd_cli.lab.bench.runners import BestAnswer
from dsbd_cli.lab.bench.statistics import (
    bootstrap_mean,
    holm,
    least_records,
    mcnemar,
    middle_half,
    paired_tests,
    score_interval,
    sign_flip,
)
from dsbd_cli.lab.bench.sweep import SweepSetting, plan
from dsbd_cli.lab.bench.tally import Tally, paired_of, ratios_of
from dsbd_cli.lab.metrics.energy import EnergyMeter, EnergyWindow
from dsbd_cli.lab.reports.bench_table import columns_of
from dsbd_cli.stats import DrafterStats, LayerStats, RequestStats, StepStats


def test_the_bootstrap_of_a_mean_has_its_known_width() -> None:
    """Of n = 400 coin flips the interval is 1.96 standard errors, 0.049, to each side."""
    interval = bootstrap_mean([0.0, 1.0] * 200)
    assert interval.value == 0.5
    expected = 1.96 * math.sqrt(0.25 / 400)
    assert interval.low == pytest.approx(0.5 - expected, abs=0.004)
    assert interval.high == pytest.approx(0.5 + expected, abs=0.004)
    assert bootstrap_mean([0.0, 1.0] * 200) == interval, "the same on every run"


def test_the_bootstrap_of_a_constant_is_the_constant() -> None:
    assert bootstrap_mean([0.5] * 5) == middle_half([0.5])


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_of_shares_is_wilson_s(right: int, count: int, low: float, high: float) -> None:
    """Values of Newcombe (1998), Statistics in Medicine 17, 857-872, table I, method 3."""
    interval = score_interval([1.0] * right + [0.0] * (count - right))
    assert interval.value == right / count
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    other = score_interval([0.0] * right + [1.0] * (count - right))
    assert (other.low, other.high) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_scores_between_0_and_1_have_a_bootstrap_interval() -> None:
    values = [0.0, 0.5, 1.0, 0.25] * 5
    assert score_interval(values) == bootstrap_mean(values)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (5, 0), (0, 6), (6, 1), (4, 9), (3, 3)])
def test_mcnemar_is_that_of_all_sequences_of_a_fair_coin(better: int, worse: int) -> None:
    coins = list(itertools.product((0, 1), repeat=better + worse))
    far = [sum(coin) for coin in coins if abs(2 * sum(coin) - len(coin)) >= abs(better - worse)]
    assert mcnemar(better, worse) == pytest.approx(len(far) / len(coins))


def test_the_sign_flip_test_enumerates_few_and_draws_many() -> None:
    few = [0.3, -0.1, 0.2, 0.0, 0.25, -0.05]
    signs = itertools.product((1, -1), repeat=len(few))
    sums = [abs(sum(sign * value for sign, value in zip(flips, few, strict=True))) for flips in signs]
    assert sign_flip(few) == pytest.approx(sum(total >= abs(sum(few)) - 1e-12 for total in sums) / len(sums))
    # many: a normal distribution of the sum, by the central limit theorem
    draws = random.Random(1)
    many = [draws.uniform(-0.9, 1.1) for _ in range(200)]
    z = abs(sum(many)) / math.sqrt(sum(value * value for value in many))
    assert sign_flip(many) == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.02)
    assert sign_flip(many) == sign_flip(many), "the same on every run"


def test_holm_s_correction() -> None:
    """Worked by hand: 4 x 0.005, 3 x 0.01, 2 x 0.03, then 1 x 0.04, which may not be below the one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_how_many_records_must_differ() -> None:
    assert [least_records(tests) for tests in (1, 10)] == [6, 9]
    for tests in (1, 10):
        count = least_records(tests)
        pairs = [("greedy", [1.0] * count + [0.0], [0.0] * (count + 1))] + [("greedy", [0.0], [0.0])] * (tests - 1)
        assert paired_tests(pairs)[0].shown
        shorter = [("greedy", pairs[0][1][1:], pairs[0][2][1:]), *pairs[1:]]
        assert not paired_tests(shorter)[0].shown


def test_methods_are_paired_with_their_baseline_record_by_record() -> None:
    """Two widths of beam search beside the baseline of the same width; one was stopped a record earlier."""
    greedy, two, four, theirs, theirs_four = settings("greedy", "beam-search", "hf-beam-search", num_beams=[2, 4])
    scores = {greedy: [0, 0, 1], two: [1, 1, 1], four: [1, 0, 0], theirs: [0, 1, 1, 1], theirs_four: [0.5, 0, 1]}
    tallies = []
    for setting, values in scores.items():
        made = tally(setting, {(0, 0): 1.0})
        made.add_answers(
            [BestAnswer("", 1, 0.0, None, None)] * len(values),
            [{"F1": float(value)} for value in values],
            [0.0] * len(values),
        )
        tallies.append(made)
    paired = {tally.setting.name: tests for tally, tests in paired_of(tallies).items()}
    assert set(paired["beam-search W=2"]) == {"hf-beam-search", "greedy"}
    test = paired["beam-search W=2"]["hf-beam-search"]
    assert (test.baseline, test.records, test.better, test.worse, test.test) == (
        "hf-beam-search W=2",
        3,
        1,
        0,
        "mcnemar",
    )
    test = paired["beam-search W=4"]["hf-beam-search"]
    assert (test.baseline, test.better, test.worse, test.test) == ("hf-beam-search W=4", 1, 1, "sign-flip")
    assert test.difference == pytest.approx(-0.5 / 3)
    assert paired["greedy"]["hf-beam-search"].baseline == "hf-beam-search W=2"
    assert set(paired["hf-beam-search W=2"]) == {"greedy", "beam-search"}


def test_the_middle_half() -> None:
    interval = middle_half([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (interval.value, interval.low, interval.high) == (3.0, 2.0, 4.0)


def settings(*names: str, **sweep: list[int]) -> list[SweepSetting]:
    return list(plan(list(names), sweep).settings)


def tally(setting: SweepSetting, speeds: dict[tuple[int, int], float], task: str = "sql") -> Tally:
    made = Tally(task, setting, 8)
    for window, speed in speeds.items():
        made.add_time(window, round(100 * speed), EnergyWindow(None, 100.0), None)
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
    greedy_tally, other = tally(greedy, {(0, 0): 4.0}), tally(beam, {(0, 0): 2.0})
    assert ratios_of(greedy_tally, [greedy_tally, other]) == {"beam-sampling": [2.0]}
    assert ratios_of(other, [greedy_tally, other]) == {"greedy": [0.5]}


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
    assert any(column.cell(row) == "25 (beam 25, ngram 25)" for column in columns_of([row]))
    assert (row.steps_per_call, row.acceptance_rate, row.mean_width) == (1.5, 0.25, 4.0)
    assert (row.target_calls, row.draft_calls, row.kv_peak_bytes) == (2.0, 4.0, 1000)
    assert row.logprob_per_token == -0.2


def test_energy_counts_only_windows_that_were_measured() -> None:
    (setting,) = settings("greedy")
    made = Tally("sql", setting, 8)
    made.add_time((0, 0), 100, EnergyWindow(50.0, 2.0), 7)
    made.add_time((0, 1), 900, EnergyWindow(None, 0.1), 9)
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
