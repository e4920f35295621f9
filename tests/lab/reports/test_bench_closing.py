"""The sentence that closes a run: what is better, what is faster, and where a file is too small to tell."""

from __future__ import annotations

import dataclasses
import io

import pytest

from dsbd_cli.lab.reports.bench_closing import closing_lines
from dsbd_cli.lab.reports.bench_data import BenchReport, BenchRow, Interval, PairedTest
from dsbd_cli.lab.reports.bench_markdown import markdown_page
from dsbd_cli.lab.reports.bench_terminal import print_report
from tests.lab.reports.test_bench_reports import row


def compared(
    method: str, ratio: tuple[float, float], better: int, worse: int, p: float, base: str = "greedy", beams: int = 4
) -> BenchRow:
    """ratio: median speed and the lower quartile. Of 40 records the baseline has 20 right."""
    test = PairedTest(base, 40, better, worse, (better - worse) / 40, "mcnemar", p, p, 8)
    speed = Interval(ratio[0], ratio[1], ratio[0] + 0.05)
    right = Interval((20 + better - worse) / 40, 0.3, 0.7)
    return dataclasses.replace(
        row("jsonl", method, 0),
        scores={"number": right},
        settings={"num_beams": beams},
        ratios={base: speed},
        paired={base: test},
    )


GREEDY = dataclasses.replace(row("jsonl", "greedy", 0), ratios={}, scores={"number": Interval(0.5, 0.35, 0.65)})
NONE = "is better than greedy by more than chance (p < 0.05); "
POWER = " With 40 records a difference shows only if 8 or more are scored differently, all one way."


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [compared("beam-search", (0.5, 0.4), 3, 1, 1.0), compared("dsbd-search", (0.7, 0.6), 3, 1, 1.0)],
            f"No beam method {NONE}greedy is 1.4 times as fast as the next, dsbd-search.{POWER}",
        ),
        (
            [compared("speculative", (1.3, 1.2), 0, 3, 0.25, beams=1), compared("beam-search", (0.9, 0.8), 1, 1, 1.0)],
            f"No method {NONE}speculative is 1.3 times as fast.{POWER}",
        ),
        (
            [compared("beam-search", (1.02, 0.98), 3, 1, 1.0)],
            f"No beam method {NONE}none is clearly faster.{POWER}",
        ),
        (
            [compared("dsbd-fuzzy", (9.0, 8.0), 0, 12, 0.001)],
            f"No beam method {NONE}all others are worse.{POWER}",
        ),
        (
            [compared("beam-search", (0.5, 0.4), 12, 0, 0.001), compared("beams-vote", (0.9, 0.8), 9, 0, 0.01)],
            "beam-search is better than greedy: number 80.0 % instead of 50.0 %; it is 0.5 times as fast.",
        ),
        (
            [compared("greedy", (4.2, 4.0), 2, 2, 1.0, "hf-beam-search", 1)],
            f"No method {NONE.replace('greedy', 'hf-beam-search')}greedy is 4.2 times as fast.{POWER}",
        ),
        (
            [compared("beam-search", (0.0, 0.0), 0, 0, 1.0)],
            f"No beam method {NONE}no other method than greedy gave an answer.{POWER}",
        ),
        ([], None),
    ],
)
def test_what_is_said(rows: list[BenchRow], said: str | None) -> None:
    report = BenchReport([GREEDY, *rows] if rows and rows[0].method != "greedy" else rows, {}, {})
    assert closing_lines(report) == ([] if said is None else [said])
    if said is not None:
        stream = io.StringIO()
        print_report(report, stream)
        assert " ".join(stream.getvalue().split()).endswith(said)
        assert f"**{said}**" in markdown_page(report)


def test_a_small_file_and_answers_that_are_not_scored() -> None:
    one = compared("beam-search", (0.5, 0.4), 1, 0, 1.0)
    few = dataclasses.replace(one, paired={"greedy": dataclasses.replace(one.paired["greedy"], records=5)})
    (said,) = closing_lines(BenchReport([GREEDY, few], {}, {}))
    assert said.endswith("With 5 records no difference can show: it takes 8 that are scored differently.")
    once = dataclasses.replace(few, windows=1)
    (said,) = closing_lines(BenchReport([GREEDY, once], {}, {}))
    assert "beam-search was 0.5 times as fast in the only window that was timed (--rounds times more)" in said
    plain = [dataclasses.replace(GREEDY, scores={}), dataclasses.replace(one, scores={}, paired={})]
    both = [*plain, *(dataclasses.replace(row, task="qa") for row in plain)]
    said = "The answers are not scored; greedy is 2 times as fast as the next, beam-search."
    assert closing_lines(BenchReport(plain, {}, {})) == [said]
    assert closing_lines(BenchReport(both, {}, {})) == [f"jsonl: {said}", f"qa: {said}"]
