"""A bench run on the terminal, in as many tables as it takes for none to be wider than the screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from rich import box
from rich.table import Table
from rich.text import Text

from dsbd_cli.lab.reports import bench_cells as cells
from dsbd_cli.lab.reports.bench_cells import ReportColumn
from dsbd_cli.lab.reports.bench_closing import closing_lines
from dsbd_cli.lab.reports.bench_data import STOPPED, BenchReport, BenchRow, ChosenThreshold
from dsbd_cli.lab.reports.screen import Screen

GAP = 3  # between columns, as rich draws them
SHORT_TITLE = 13

Section = tuple[str, list[ReportColumn]]


def print_report(report: BenchReport, stream: IO[str] | None) -> None:
    """Write the tables. A stream that is no terminal gets plain text, 120 columns wide; None gets nothing."""
    console = Screen(stream)
    for line in cells.environment_lines(report):
        console.print(Text(line, style="dim"))
    if not report.complete:
        console.print(Text(STOPPED, style="bold"))
    for task in report.tasks:
        rows = report.of(task)
        for title, columns in _packed(cells.setting_columns(rows), _sections(rows), rows, console.width):
            console.print()
            console.show(_table(f"{cells.task_title(task, rows)}: {title}", columns, rows))
        for choice in report.choices_of(task):
            _print_choice(console, report, choice)
    console.print()
    for line in cells.reading_lines(report.rows):
        console.print(Text(line, style="dim"))
    for note in report.notes:
        console.print(Text(f"note: {note}"))
    if closing := closing_lines(report):
        console.print()
        for line in closing:
            console.print(Text(line, style="bold"))


def _print_choice(console: Screen, report: BenchReport, choice: ChosenThreshold) -> None:
    """Print the curve with dev and test records side by side, and what was chosen by which rule."""
    rows = report.curve(choice)
    head, sections = cells.choice_columns(report, choice)
    for title, shown in _packed(head, sections.items(), rows, console.width):
        console.print()
        console.show(_table(f"{cells.choice_title(report, choice)}, {title}", shown, rows))
    console.print(Text(cells.choice_line(report, choice)))


def _packed(
    head: list[ReportColumn], sections: Iterable[Section], rows: Sequence[BenchRow], width: int
) -> Iterator[Section]:
    """Yield sections side by side as long as they fit, else one below the other, else divided between columns."""
    room = width - 1 - _widths(head, rows)
    titles: list[str] = []
    seen: set[str] = set()
    columns: list[ReportColumn] = []
    for title, wanted in sections:
        for group in _split(wanted, rows, room):
            if columns and _widths([*columns, *group], rows) > room:
                yield ", ".join(titles), [*head, *columns]
                titles, columns = [], []
            titles.append(title if title not in seen else f"{title}, continued")
            seen.add(title)
            columns += group
    yield ", ".join(titles), [*head, *columns]


def _sections(rows: Sequence[BenchRow]) -> Iterator[Section]:
    """Yield the sections with the columns in which something was measured."""
    for title, columns in (
        ("quality", cells.quality_columns(rows)),
        ("speed", cells.speed_columns(rows)),
        ("memory and energy", cells.resource_columns()),
        ("work per record", cells.work_columns()),
    ):
        if kept := cells.measured(columns, rows):
            memory_only = title == "memory and energy" and len(kept) <= 2
            yield "memory" if memory_only else title, kept


def _split(columns: list[ReportColumn], rows: Sequence[BenchRow], room: int) -> Iterator[list[ReportColumn]]:
    group: list[ReportColumn] = []
    for column in columns:
        if group and _widths([*group, column], rows) > room:
            yield group
            group = []
        group.append(column)
    yield group


def _widths(columns: Sequence[ReportColumn], rows: Sequence[BenchRow]) -> int:
    return sum(_width(column, rows) + GAP for column in columns)


def _width(column: ReportColumn, rows: Sequence[BenchRow]) -> int:
    """Return the width of a column. Cells and short headings stay whole; a long heading is wrapped between words."""
    title = max(min(len(column.title), SHORT_TITLE), *(len(word) for word in column.title.split()))
    return max([title, *(len(column.cell(row)) for row in rows)])


def _table(title: str, columns: Sequence[ReportColumn], rows: Sequence[BenchRow]) -> Table:
    """Make a table. Rows in which nothing was measured are left out."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
    for column in columns:
        table.add_column(
            column.title, justify="left" if column.text else "right", width=_width(column, rows), vertical="bottom"
        )
    for line in cells.table_lines(columns, rows):
        table.add_row(*line)
    return table
