"""The last lines of a bench run: one plain sentence for each task on what the run shows about the methods."""

from __future__ import annotations

from collections.abc import Sequence

from dsbd_cli.errors import plural
from dsbd_cli.lab.reports.bench_cells import baselines
from dsbd_cli.lab.reports.bench_data import SIGNIFICANT, BenchReport, BenchRow, PairedTest


def closing_lines(report: BenchReport) -> list[str]:
    """Return a line for each task on which some method was compared with a baseline."""
    found = {task: line for task in report.tasks if (line := _closing_line(report.of(task)))}
    return [f"{task}: {line}" if len(report.tasks) > 1 else line for task, line in found.items()]


def _closing_line(rows: Sequence[BenchRow]) -> str | None:
    """Return a sentence on whether a method is better than what a user has today, and which one is faster."""
    if not (names := baselines(rows)):
        return None
    base = names[0]
    compared = [row for row in rows if base in row.ratios]
    tests = {row.name: row.paired[base] for row in compared if base in row.paired}
    if not tests:
        return f"The answers are not scored; {_faster(compared, base)}."
    different = [row for row in compared if row.name in tests and tests[row.name].shown]
    if better := [row for row in different if tests[row.name].difference > 0]:
        best = max(better, key=lambda row: (tests[row.name].difference, row.ratios[base].value))
        test, ratio = tests[best.name], best.ratios[base]
        window = " in the only window that was timed (--rounds times more)" if best.windows == 1 else ""
        level = best.quality.value if best.quality else 0.0
        return (
            f"{best.name} is better than {test.baseline}: {best.metric} {100 * level:.1f} % instead of "
            f"{100 * (level - test.difference):.1f} %; it is {_speed(ratio.value)}{window}."
        )
    kind = "beam method" if all(_has_beams(row) for row in compared) else "method"
    kept = [row for row in compared if row not in different]
    faster = _faster(kept, base) if kept else "all others are worse"
    chance = f"No {kind} is better than {base} by more than chance (p < {SIGNIFICANT:g})"
    return f"{chance}; {faster}. {_power(max(tests.values(), key=lambda test: test.records))}"


def _faster(rows: Sequence[BenchRow], base: str) -> str:
    """Return a clause on which of the rows is the fastest compared with the baseline, in tokens per second."""
    first = max(rows, key=lambda row: row.ratios[base].value)
    if not first.ratios[base].value:
        return f"no other method than {base} gave an answer"
    ratio = first.ratios[base]
    if first.windows == 1:
        return f"{first.name} was {_speed(ratio.value)} in the only window that was timed (--rounds times more)"
    if ratio.low > 1:
        return f"{first.name} is {_speed(ratio.value)}"
    if ratio.high < 1:
        return f"{base} is {_speed(1 / ratio.value)} as the next, {first.name}"
    return "none is clearly faster"


def _power(test: PairedTest) -> str:
    """Return a sentence on how many records must differ for a difference to show with this number of records."""
    records = plural(test.records, "record")
    if test.least > test.records:
        return f"With {records} no difference can show: it takes {test.least} that are scored differently."
    return f"With {records} a difference shows only if {test.least} or more are scored differently, all one way."


def _speed(ratio: float) -> str:
    """Return a ratio of speeds in words."""
    number = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"
    return "as fast" if number in ("1", "0.99", "0.98") else f"{number} times as fast"


def _has_beams(row: BenchRow) -> bool:
    beams = row.settings.get("num_beams")
    return isinstance(beams, int) and beams > 1
