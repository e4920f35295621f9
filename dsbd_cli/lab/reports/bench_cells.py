"""Numbers as short text, the same on the terminal and in markdown. What was not measured is a dash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsbd_cli.errors import plural
from dsbd_cli.lab.reports.bench_data import (
    BASELINES,
    BenchReport,
    BenchRow,
    ChosenThreshold,
    Interval,
    PairedTest,
)
from dsbd_cli.lab.reports.units import DASH, bytes_text, figure

MOST_COMPARED = 2  # baselines that get columns


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """A column of a report: its heading, and the function that returns the text for a row. text: the column is
    left-aligned."""

    title: str
    cell: Callable[[BenchRow], str]
    text: bool = False


def number(value: float | None, form: str) -> str:
    """Return the number in this format, or a dash."""
    return DASH if value is None else format(value, form)


def percent(interval: Interval | None) -> str:
    """Return a share and its interval in percent, as in `84.5 (79–90)`."""
    if interval is None:
        return DASH
    return f"{100 * interval.value:.1f} ({100 * interval.low:.0f}–{100 * interval.high:.0f})"


def ratio(interval: Interval | None) -> str:
    """Return a ratio and its range, as in `1.42x (1.38–1.47)`. One window has no range."""
    if interval is None:
        return DASH
    if interval.low == interval.high:
        return f"{interval.value:.2f}x"
    return f"{interval.value:.2f}x ({interval.low:.2f}–{interval.high:.2f})"


def paired(test: PairedTest | None) -> str:
    """Return a test as in `3/1 (0.62)`: number of better and of worse records, and the p value after Holm's
    correction."""
    if test is None:
        return DASH
    p = test.p_holm
    return f"{test.better}/{test.worse} ({'<0.001' if p < 0.001 else format(p, '.2g' if p < 0.1 else '.2f')})"


def task_title(task: str, rows: Sequence[BenchRow]) -> str:
    """Return the name of a task with the number of its records."""
    return f"{task}, {plural(max(row.records for row in rows), 'record')}"


def baselines(rows: Sequence[BenchRow]) -> list[str]:
    """Return the methods of these rows that others are compared with. The first one is what a user has today."""
    return [name for name in BASELINES if any(name in row.ratios for row in rows)][:MOST_COMPARED]


def setting_columns(rows: Sequence[BenchRow]) -> list[ReportColumn]:
    """Return the column of the method's name, and that of its setting where a sweep has set something."""
    columns = [ReportColumn("method", lambda row: row.method, text=True)]
    if any(row.setting for row in rows):
        columns.append(ReportColumn("setting", lambda row: row.setting, text=True))
    return columns


def quality_columns(rows: Sequence[BenchRow]) -> list[ReportColumn]:
    """Return the columns of scores, of the comparison with the first baseline, and of the log-probability."""
    columns = [
        ReportColumn(f"{metric} %", lambda row, metric=metric: percent(row.scores.get(metric)))  # type: ignore[misc]
        for metric in dict.fromkeys(metric for row in rows for metric in row.scores)
    ]
    columns += [
        ReportColumn(f"better/worse than {name} (p)", lambda row, name=name: paired(row.paired.get(name)))  # type: ignore[misc]
        for name in baselines(rows)[:1]
    ]
    return [*columns, ReportColumn("log-prob/token", lambda row: number(row.logprob_per_token, ".3f"))]


def speed_columns(rows: Sequence[BenchRow]) -> list[ReportColumn]:
    """Return the columns of tokens per second, and of the ratio to each baseline."""
    return [
        ReportColumn("tokens/s", lambda row: figure(row.tokens_per_s.value)),
        *(
            ReportColumn(f"vs {name}", lambda row, name=name: ratio(row.ratios.get(name)))  # type: ignore[misc]
            for name in baselines(rows)
        ),
    ]


def work_columns() -> list[ReportColumn]:
    """Return the columns of the work: calls, widths, accepted drafts, and layers passed by depth."""
    return [
        ReportColumn("steps/target call", lambda row: number(row.steps_per_call, ".2f")),
        ReportColumn("target calls", lambda row: number(row.target_calls, ".1f")),
        ReportColumn("draft calls", lambda row: number(row.draft_calls, ".1f")),
        ReportColumn("width", lambda row: number(row.mean_width, ".2f")),
        ReportColumn("accepted %", _accepted),
        ReportColumn("layers passed %, by depth", _passed),
    ]


def resource_columns() -> list[ReportColumn]:
    """Return the columns of memory and energy."""
    return [
        ReportColumn("KV peak/request", lambda row: bytes_text(row.kv_peak_bytes)),
        ReportColumn("peak memory", lambda row: bytes_text(row.peak_memory_bytes)),
        ReportColumn("J/token", lambda row: number(row.energy.j_per_token, ".3g")),
        ReportColumn("J/token above idle", lambda row: number(row.energy.j_per_token_above_idle, ".3g")),
    ]


def _accepted(row: BenchRow) -> str:
    """Return the share of accepted drafts in percent, and that of each drafter where there are two."""
    parts = [f"{name} {number(_percent(rate), '.0f')}" for name, rate in row.accepted_by_drafter.items()]
    return number(_percent(row.acceptance_rate), ".0f") + (f" ({', '.join(parts)})" if parts else "")


def _passed(row: BenchRow) -> str:
    """Return the share of each layer that passed in percent; a dash where nothing was drafted."""
    return " ".join(f"{100 * share:.0f}" for share in row.passed_by_depth) if row.drafted else DASH


def measured(columns: Sequence[ReportColumn], rows: Sequence[BenchRow]) -> list[ReportColumn]:
    """Return the columns in which something was measured. The report's notes give reasons why others are missing."""
    return [column for column in columns if column.text or any(column.cell(row) != DASH for row in rows)]


def table_lines(columns: Sequence[ReportColumn], rows: Sequence[BenchRow]) -> list[list[str]]:
    """Return the cells of a table, without the rows in which nothing was measured."""
    lines = [[column.cell(row) for column in columns] for row in rows]
    numbers = [place for place, column in enumerate(columns) if not column.text]
    return [line for line in lines if any(line[place] != DASH for place in numbers)]


def choice_columns(
    report: BenchReport, choice: ChosenThreshold
) -> tuple[list[ReportColumn], dict[str, list[ReportColumn]]]:
    """Return the columns of a curve's test rows: those that name the row, and for each subject the numbers of dev and
    test records side by side."""
    dev = report.dev_of(choice.task)
    metric = next((row.metric for row in dev.values()), None)
    numbers: dict[str, tuple[str, Callable[[BenchRow], str]]] = {
        "quality": (f"{metric} %", lambda row: percent(row.quality)),
        "work": ("steps/target call", lambda row: number(row.steps_per_call, ".2f")),
        "speed": ("tokens/s", lambda row: figure(row.tokens_per_s.value)),
    }
    head = [
        ReportColumn("method", lambda row: row.method, text=True),
        ReportColumn("setting", lambda row: row.setting, text=True),
        ReportColumn("chosen", lambda row: "yes" if row.name == choice.chosen else "", text=True),
    ]
    return head, {
        subject: [
            ReportColumn(f"{title}, dev", lambda row, cell=cell: cell(dev[row.name]) if row.name in dev else DASH),  # type: ignore[misc]
            ReportColumn(f"{title}, test", cell),
        ]
        for subject, (title, cell) in numbers.items()
    }


def choice_title(report: BenchReport, choice: ChosenThreshold) -> str:
    """Return the title of a choice, with the numbers of records."""
    dev = max(row.records for row in report.dev_of(choice.task).values())
    test = max((row.records for row in report.of(choice.task)), default=0)
    return f"{choice.task}, {plural(dev, 'dev record')} and {plural(test, 'test record')}: fuzzy threshold"


def choice_line(report: BenchReport, choice: ChosenThreshold) -> str:
    """Return the sentence on the chosen setting, with its scores and the rule of the choice."""
    if choice.chosen is None:
        lost = f"every threshold loses more than {100 * choice.tolerance:g} points on dev records"
        return f"{choice.task}: none is chosen: {lost}. Rule: {choice.rule}."
    dev = report.dev_of(choice.task)[choice.chosen]
    test = next((row for row in report.of(choice.task) if row.name == choice.chosen), None)
    scores = [
        f"{100 * row.quality.value:.1f} % on {name}"
        for name, row in (("dev", dev), ("test", test))
        if row is not None and row.quality is not None
    ]
    coarse = f" One dev record is {100 / dev.records:.1f} points." if dev.records * choice.tolerance < 1 else ""
    return f"{choice.task}: {choice.chosen} is chosen: {', '.join(scores)}. Rule: {choice.rule}.{coarse}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def environment_lines(report: BenchReport) -> list[str]:
    """Return lines on what ran where."""
    env, run = report.environment, report.run
    versions = env.get("versions")
    named = versions if isinstance(versions, dict) else {}
    draft = f", draft {run['draft']}" if run.get("draft") else ", no draft"
    commit = f", commit {env['commit']}" if env.get("commit") else ""
    packages = ", ".join(f"{name} {named[name]}" for name in ("dsbd", "torch", "transformers") if named.get(name))
    return [
        f"target {run.get('target')}{draft}; {run.get('dtype')}, batches of {run.get('batch_size')}, "
        f"at most {plural(run.get('max_new_tokens'), 'new token')}",
        f"{env.get('device')}, {plural(env.get('threads'), 'thread')}; {packages}{commit}",
    ]


def reading_lines(rows: Sequence[BenchRow]) -> list[str]:
    """Return lines that explain the numbers and ranges."""
    lines = []
    if any(row.scores for row in rows):
        lines.append("Scores: mean over the records (95 % interval: Wilson's where all are 0 or 1, else by bootstrap).")
    if any(row.paired for row in rows):
        lines.append(
            "better/worse: records with a higher/lower score than the baseline's (p of the exact McNemar test, or of a "
            "sign-flip test where scores lie between 0 and 1, after Holm's correction over the methods)."
        )
    lines.append(
        "tokens/s: delivered tokens of the best beams, median of the windows; ratios: median of neighbouring windows "
        "(middle half)."
    )
    return lines
