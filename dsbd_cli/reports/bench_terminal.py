"""A bench run on the terminal: several tables of one screen's width instead of one that is crowded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dsbd_cli.reports.bench_cells import (
    Column,
    environment_lines,
    quality_columns,
    reading_lines,
    resource_columns,
    setting_columns,
    work_columns,
)
from dsbd_cli.reports.bench_data import BenchReport, BenchRow

__all__ = ["MIN_WIDTH", "print_report"]

MIN_WIDTH, WIDTH_OF_FILES = 100, 120


def print_report(report: BenchReport, stream: IO[str]) -> None:
    """Write the tables. A stream that is no terminal gets plain text, 120 columns wide."""
    terminal = stream.isatty()
    console = Console(file=stream, width=None if terminal else WIDTH_OF_FILES, highlight=False, soft_wrap=False)
    if terminal and console.width < MIN_WIDTH:
        console.width = MIN_WIDTH  # a narrow terminal wraps or scrolls; cut cells would be lost
    for line in environment_lines(report):
        console.print(Text(line, style="dim"))
    for task in report.tasks:
        console.print()
        console.print(_task(report.of(task), task))
    console.print()
    for line in reading_lines(report.rows):
        console.print(Text(line, style="dim"))
    for note in report.notes:
        console.print(Text(f"note: {note}"))


def _task(rows: Sequence[BenchRow], task: str) -> Group:
    head = setting_columns(rows)
    title = f"{task}: quality and speed, {max(row.records for row in rows)} records"
    tables = [
        (title, quality_columns(rows)),
        (f"{task}: work per record, by the engine's counters", work_columns(rows)),
    ]
    tables.append((f"{task}: memory and energy", resource_columns(rows)))
    return Group(*(part for title, columns in tables if (part := _table(title, [*head, *columns], rows)) is not None))


def _table(title: str, columns: Sequence[Column], rows: Sequence[BenchRow]) -> Table | None:
    """Rows in which nothing was measured are left out."""
    shown = [row for row in rows if any(column.cell(row) != "–" for column in columns if not column.text)]
    if not shown:
        return None
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify="left" if column.text else "right", no_wrap=column.text)
    for row in shown:
        table.add_row(*(column.cell(row) for column in columns))
    return table
