"""A bench run on the terminal: one table per task, with as many columns as fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from rich import box
from rich.table import Table
from rich.text import Text

from dsbd_cli.errors import plural
from dsbd_cli.lab.reports.bench_data import BASELINES, STOPPED, BenchReport, BenchRow, Interval, PairedTest, task_title
from dsbd_cli.lab.reports.screen import Screen
from dsbd_cli.lab.reports.units import DASH, bytes_text, figure

MOST_COMPARED = 2  # baselines that get columns
GAP = 2  # between columns, as the table draws them
SHORT_TITLE = 10


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its heading, and the function that returns the text for a row. text: the column is
    left-aligned, and never left out."""

    title: str
    cell: Callable[[BenchRow], str]
    text: bool = False

    def width(self, rows: Sequence[BenchRow]) -> int:
        """Return the width of the column. Cells and short headings stay whole; a long heading is wrapped between
        words."""
        title = max(min(len(self.title), SHORT_TITLE), *(len(word) for word in self.title.split()))
        return max([title, *(len(self.cell(row)) for row in rows)])


def print_report(report: BenchReport, stream: IO[str] | None) -> None:
    """Write the tables. A stream that is no terminal gets plain text, 120 columns wide; None gets nothing."""
    console = Screen(stream)
    for line in environment_lines(report):
        console.print(Text(line, style="dim"))
    if not report.complete:
        console.print(Text(STOPPED, style="bold"))
    left_out: dict[str, None] = {}
    for task in report.tasks:
        rows = report.of(task)
        shown, others = fitting(columns_of(rows), rows, console.width)
        left_out |= dict.fromkeys(column.title for column in others)
        console.print()
        console.show(_table(task_title(task, rows), shown, rows))
    console.print()
    for line in reading_lines(report.rows):
        console.print(Text(line, style="dim"))
    if left_out:
        names = ", ".join(title.replace("/ ", "/") for title in left_out)
        console.print(Text(f"Left out for width, and in --json: {names}.", style="dim"))
    for note in report.notes:
        console.print(Text(f"note: {note}"))


def columns_of(rows: Sequence[BenchRow]) -> list[Column]:
    """Return the columns in which something was measured, the most important first. The report's notes give reasons
    why others are missing."""
    metrics = dict.fromkeys(metric for row in rows for metric in row.scores)
    scores = [
        Column(f"{metric} %", lambda row, metric=metric: _percent(row.scores.get(metric)))  # type: ignore[misc]
        for metric in metrics
    ]
    # the first baseline is what a user has today
    names = [name for name in BASELINES if any(name in row.ratios for row in rows)][:MOST_COMPARED]
    ratios = [Column(f"speed by {name}", lambda row, name=name: _ratio(row.ratios.get(name))) for name in names]  # type: ignore[misc]
    tests = [
        Column(f"better/ worse than {name} (p)", lambda row, name=name: _paired(row.paired.get(name)))  # type: ignore[misc]
        for name in names[:1]
    ]
    columns = [
        Column("method", lambda row: row.method, text=True),
        Column("setting", lambda row: row.setting or DASH, text=True),
        *scores[:1],
        Column("tokens/s", lambda row: figure(row.tokens_per_s.value)),
        *ratios[:1],
        Column("steps/ target call", lambda row: _number(row.steps_per_call, ".2f")),
        *tests,
        Column("accepted %", _accepted),
        *scores[1:],
        Column("peak memory", lambda row: bytes_text(row.peak_memory_bytes)),
        Column("J/token", lambda row: _number(row.energy.j_per_token, ".3g")),
        *ratios[1:],
        Column("layers passed % by depth", _passed),
        Column("log-prob/ token", lambda row: _number(row.logprob_per_token, ".3f")),
        Column("KV peak/ request", lambda row: bytes_text(row.kv_peak_bytes)),
        Column("J/token above idle", lambda row: _number(row.energy.j_per_token_above_idle, ".3g")),
        Column("width", lambda row: _number(row.mean_width, ".2f")),
        Column("target calls", lambda row: _number(row.target_calls, ".1f")),
        Column("draft calls", lambda row: _number(row.draft_calls, ".1f")),
    ]
    return [column for column in columns if any(column.cell(row) != DASH for row in rows)]


def fitting(columns: Sequence[Column], rows: Sequence[BenchRow], width: int) -> tuple[list[Column], list[Column]]:
    """Return the columns that fit side by side into a width, and those that do not. No column stands behind one that
    was left out: those that come first are the most important ones."""
    used = 0
    for number, column in enumerate(columns):
        used += column.width(rows) + GAP
        if used - GAP > width and not column.text:
            return list(columns[:number]), list(columns[number:])
    return list(columns), []


def _table(title: str, columns: Sequence[Column], rows: Sequence[BenchRow]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        padding=(0, 1),
    )
    for column in columns:
        table.add_column(
            column.title, justify="left" if column.text else "right", width=column.width(rows), vertical="bottom"
        )
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table


def _number(value: float | None, form: str) -> str:
    """Return the number in this format, or a dash."""
    return DASH if value is None else format(value, form)


def _percent(interval: Interval | None) -> str:
    """Return a share and its interval in percent, as in `84.5 (79–90)`."""
    if interval is None:
        return DASH
    return f"{100 * interval.value:.1f} ({100 * interval.low:.0f}–{100 * interval.high:.0f})"


def _ratio(interval: Interval | None) -> str:
    """Return a ratio and its range, as in `1.42x (1.38–1.47)`. One window has no range."""
    if interval is None:
        return DASH
    if interval.low == interval.high:
        return f"{interval.value:.2f}x"
    return f"{interval.value:.2f}x ({interval.low:.2f}–{interval.high:.2f})"


def _paired(test: PairedTest | None) -> str:
    """Return a test as in `3/1 (0.62)`: number of better and of worse records, and the p value after Holm's
    correction."""
    if test is None:
        return DASH
    p = test.p_holm
    return f"{test.better}/{test.worse} ({'<0.001' if p < 0.001 else format(p, '.2g' if p < 0.1 else '.2f')})"


def _accepted(row: BenchRow) -> str:
    """Return the share of accepted drafts in percent, and that of each drafter where there are two."""
    parts = [f"{name} {_share(rate)}" for name, rate in row.accepted_by_drafter.items()]
    return _share(row.acceptance_rate) + (f" ({', '.join(parts)})" if parts else "")


def _share(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.0f}"


def _passed(row: BenchRow) -> str:
    """Return the share of each layer that passed in percent; a dash where nothing was drafted."""
    return " ".join(map(_share, row.passed_by_depth)) if row.drafted else DASH


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


def reading_lines(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Yield lines that explain the numbers and ranges."""
    if any(row.scores for row in rows):
        yield "Scores: mean over the records (95 % interval: Wilson's where all are 0 or 1, else by bootstrap)."
    tests = [test for row in rows for test in row.paired.values()]
    if tests:
        largest = max(tests, key=lambda test: test.records)
        shows = (
            f"A difference shows only if {largest.least} or more records are scored differently, all one way."
            if largest.least <= largest.records
            else f"With {plural(largest.records, 'record')} no difference can show: it takes {largest.least}."
        )
        yield (
            "better/worse: records with a higher/lower score than the baseline's (p of the exact McNemar test, or of a "
            "sign-flip test where scores lie between 0 and 1, after Holm's correction over the methods). " + shows
        )
    yield (
        "tokens/s: delivered tokens of the best beams, median of the windows; ratios: median of neighbouring windows "
        "(middle half)."
    )
