"""The rule of benchmarks/sweep.py on candidates made by hand."""

from __future__ import annotations

from benchmarks.sweep import Candidate, choose


def test_the_best_quality_within_five_percent_of_the_fastest() -> None:
    fast = Candidate("fast", 2.00, 0.80, -0.10)
    good = Candidate("good", 1.91, 0.84, -0.20)
    slow = Candidate("slow", 1.89, 0.99, -0.01)
    assert choose([fast, good, slow]) == [good, fast]


def test_equal_quality_goes_by_log_probability_then_by_speed() -> None:
    one = Candidate("one", 2.00, 0.8, -0.2)
    two = Candidate("two", 1.95, 0.8, -0.1)
    three = Candidate("three", 1.99, 0.8, -0.1)
    assert [found.name for found in choose([one, two, three])] == ["three", "two", "one"]
