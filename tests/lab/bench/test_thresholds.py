"""A fuzzy threshold is chosen on dev records: the rule on rows made by hand, and a run on the built-in pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from dsbd_cli import Engine, SamplingConfig, load
from dsbd_cli.lab.bench.choice import choose, curves, doubts, reference_of, without_reference
from dsbd_cli.lab.bench.prepare import BenchSpec
from dsbd_cli.lab.bench.run import Bench
from dsbd_cli.lab.bench.sweep import SweepSetting, plan
from dsbd_cli.lab.reports.bench_data import BenchReport, BenchRow, Interval
from dsbd_cli.lab.tasks.choose import open_dataset
from dsbd_cli.lab.tasks.dataset import Dataset
from dsbd_cli.lab.tasks.record import TaskRecord

THRESHOLDS = {"fuzzy_threshold": [0.4, 0.1, 0.2]}


def settings(*names: str, **sweep: Sequence[float]) -> tuple[SweepSetting, ...]:
    return plan(list(names), {**THRESHOLDS, **sweep}).settings


def rows(made: Sequence[SweepSetting], numbers: dict[str, tuple[float, float]]) -> dict[str, BenchRow]:
    """By name; numbers: label -> score and steps per call."""
    once = Interval(1.0, 1.0, 1.0)
    found = {}
    for one in made:
        score, steps = numbers[one.label]
        quality = {"exact match": Interval(score, 0.0, 1.0)}
        found[one.name] = BenchRow(
            "sql", one.method, one.label, {}, 8, None, 9, 0, 1, 9, 1.0, quality, None, once, {}, steps
        )
    return found


@pytest.mark.parametrize(
    ("numbers", "tolerance", "chosen"),
    [
        # 0.4 is faster still, but loses more than is allowed
        ({"": (0.80, 2.0), "T=0.1": (0.80, 3.0), "T=0.2": (0.78, 3.5), "T=0.4": (0.77, 4.0)}, 0.02, "T=0.2"),
        ({"": (0.80, 2.0), "T=0.1": (0.80, 3.0), "T=0.2": (0.78, 3.5), "T=0.4": (0.77, 4.0)}, 0.03, "T=0.4"),
        # equally fast: the smallest
        ({"": (0.80, 2.0), "T=0.1": (0.79, 3.0), "T=0.2": (0.90, 3.0), "T=0.4": (0.99, 3.0)}, 0.02, "T=0.1"),
        # a threshold that is slower for its score is not chosen for the score
        ({"": (0.50, 2.0), "T=0.1": (0.90, 2.0), "T=0.2": (0.50, 2.1), "T=0.4": (0.40, 4.0)}, 0.0, "T=0.2"),
        ({"": (0.80, 2.0), "T=0.1": (0.7, 3.0), "T=0.2": (0.7, 3.5), "T=0.4": (0.77, 4.0)}, 0.02, None),
    ],
)
def test_the_rule(numbers: dict[str, tuple[float, float]], tolerance: float, chosen: str | None) -> None:
    made = settings("dsbd-rejection", "dsbd-fuzzy")
    (curve,) = curves(made)
    found = choose("sql", curve, rows(made, numbers), tolerance)
    assert found.chosen == (None if chosen is None else f"dsbd-fuzzy {chosen}")
    assert found.curve == tuple(f"dsbd-fuzzy T={value}" for value in (0.1, 0.2, 0.4)), "smallest first"
    assert f"{100 * tolerance:g} points below that of dsbd-rejection" in found.rule


def test_scores_that_cannot_tell_thresholds_apart_are_told() -> None:
    """Guards against a choice on an empty scale, or on records so few that one answer exceeds the tolerance."""
    made = settings("dsbd-rejection", "dsbd-fuzzy")
    (curve,) = curves(made)

    def told(score: float, records: int) -> str:
        found = rows(made, {"": (score, 2.0), "T=0.1": (0.0, 3.0), "T=0.2": (0.0, 3.5), "T=0.4": (0.0, 4.0)})
        many = {name: dataclasses.replace(row, records=records) for name, row in found.items()}
        return " ".join(doubts("sql", curve, many, 0.02))

    assert "sql: dsbd-rejection scores 0.0% on dev records" in told(0.0, 2)
    assert "with 2 dev records one answer is 50.0 points, more than the 2 that may be lost" in told(0.5, 2)
    assert told(0.5, 50) == ""


def test_a_curve_for_each_shape_of_the_forest_and_none_of_one_threshold() -> None:
    found = curves(settings("dsbd-rejection", "dsbd-fuzzy", num_beams=[1, 4], depth=[2, 4]))
    assert [curve.settings[0].label for curve in found] == [
        f"W={beams} D={depth} T=0.1" for beams in (1, 4) for depth in (2, 4)
    ]
    assert [curve.reference.config.num_beams for curve in found if curve.reference] == [1, 1, 4, 4]
    assert curves(plan(["dsbd-fuzzy"], {"fuzzy_threshold": [0.3]}).settings) == ()


def test_scores_are_held_against_the_target_s_own_distribution_at_as_many_beams() -> None:
    names = ("beam-search", "dsbd-rejection-threshold", "dsbd-with-replacement", "hf-beam-sampling", "dsbd-fuzzy")
    made = settings(*names)
    assert without_reference(made)
    assert reference_of(made[-1], made) is None
    for name in ("beam-sampling", "dsbd-coupled", "dsbd-rejection"):
        made = settings(name, *names)
        found = reference_of(made[-1], made)
        assert found is not None
        assert found.method == name
    assert reference_of(made[-1], settings("beam-sampling", "dsbd-rejection", *names)).method == "dsbd-rejection"  # type: ignore[union-attr]
    assert without_reference(settings("multinomial", "dsbd-fuzzy")), "one beam is no reference for four"


def noting(dataset: Dataset, seen: list[str]) -> Dataset:
    """The data set, which notes the ids that are scored."""

    def score(record: TaskRecord, text: str) -> dict[str, float]:
        seen.append(record.id)
        return dict(dataset.score(record, text))

    dev = None if dataset.dev is None else noting(dataset.dev, seen)
    return dataclasses.replace(dataset, score=score, dev=dev)


@pytest.fixture(scope="module")
def pair() -> Engine:
    return load()


def bench(pair: Engine, dev_records: int, seen: list[str], rounds: int = 1) -> Bench:
    planned = plan(["greedy", "dsbd-rejection", "dsbd-fuzzy"], {"num_beams": [2], "fuzzy_threshold": [0.1, 0.4]})
    data = [noting(open_dataset("qa", None), seen)]
    sampling = SamplingConfig(max_new_tokens=8)
    spec = BenchSpec(data, planned.settings, 3, rounds, 8, sampling, dev_records=dev_records, tolerance=1.0)
    return Bench(pair, spec, command=["bench"])


def counters(report: BenchReport) -> list[tuple[object, ...]]:
    return [(row.name, row.records, row.tokens, row.scores, row.steps_per_call) for row in report.rows]


def test_dev_records_are_other_records_and_change_nothing_of_the_test_rows(pair: Engine) -> None:
    seen: list[str] = []
    running = bench(pair, 4, seen, rounds=2)
    report = running.run()
    assert running.units == 2 * 4 + 3, "dev records are run once"
    assert {name for name in seen if "-dev-" in name} == {f"qa-dev-0-{place}" for place in range(4)}
    assert {name for name in seen if "-test-" in name} == {f"qa-test-0-{place}" for place in range(3)}
    # greedy is no part of the choice
    assert [(row.name, row.records) for row in report.dev_rows] == [
        ("dsbd-rejection W=2", 4),
        ("dsbd-fuzzy W=2 T=0.1", 4),
        ("dsbd-fuzzy W=2 T=0.4", 4),
    ]
    (choice,) = report.choices
    steps = {row.name: row.steps_per_call or 0.0 for row in report.dev_rows if "fuzzy" in row.name}
    assert choice.chosen == max(steps, key=lambda name: steps[name])
    only_test: list[str] = []
    plain = bench(pair, 0, only_test, rounds=2).run()
    assert not any("-dev-" in name for name in only_test)
    assert (plain.dev_rows, plain.choices) == ([], [])
    assert counters(plain) == counters(report)


def test_nothing_is_chosen_on_half_of_the_dev_records(pair: Engine) -> None:
    running = bench(pair, 10, [])

    def stop_later(done: int, total: int, name: str, left_s: float | None) -> None:
        if done == 8:  # the first windows of dev (3) and test (4), and one of two of the second dev windows
            running.stop()

    report = running.run(stop_later)
    assert len(report.rows) == 4
    assert report.choices == []
