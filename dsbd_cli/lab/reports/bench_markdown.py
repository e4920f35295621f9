"""A bench run as a markdown page: one wide table per task."""

from __future__ import annotations

from collections.abc import Sequence

from dsbd_cli.lab.reports import bench_cells as cells
from dsbd_cli.lab.reports.bench_cells import ReportColumn
from dsbd_cli.lab.reports.bench_closing import closing_lines
from dsbd_cli.lab.reports.bench_data import STOPPED, BenchReport, BenchRow


def aligned_table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[bool]) -> str:
    """Return a markdown table, aligned so that it can be read as text too. left: for each column, whether it is
    left-aligned."""
    shown = [[cell.replace("|", "\\|") for cell in line] for line in (titles, *rows)]
    widths = [max(len(line[place]) for line in shown) for place in range(len(titles))]
    rule = ["-" * (width + 1) + ("-" if text else ":") for width, text in zip(widths, left, strict=True)]
    padded = [
        [f" {cell:{'<' if text else '>'}{width}} " for cell, width, text in zip(line, widths, left, strict=True)]
        for line in shown
    ]
    return "\n".join(f"|{'|'.join(line)}|" for line in (padded[0], rule, *padded[1:])) + "\n"


def markdown_table(columns: Sequence[ReportColumn], rows: Sequence[BenchRow]) -> str:
    """Return a markdown table of the rows with these columns. Rows in which nothing was measured are left out."""
    lines = cells.table_lines(columns, rows)
    return aligned_table([column.title for column in columns], lines, [column.text for column in columns])


def markdown_page(report: BenchReport) -> str:
    """Return the page: heading and command, and for each task one table with quality, speed, memory and energy, and one
    with the work."""
    env = report.environment
    parts = ["# dsbd bench\n", f"`{env.get('command')}`, {env.get('date')}\n"]
    parts.append(
        "\n".join(f"- {line}" for line in [*cells.environment_lines(report), *cells.reading_lines(report.rows)]) + "\n"
    )
    if not report.complete:
        parts.append(f"**{STOPPED}**\n")
    for task in report.tasks:
        rows = report.of(task)
        head = cells.setting_columns(rows)
        parts.append(f"## {cells.task_title(task, rows)}\n")
        results = [*head, *cells.quality_columns(rows), *cells.speed_columns(rows), *cells.resource_columns()]
        parts.append(markdown_table(cells.measured(results, rows), rows))
        if work := cells.measured(cells.work_columns(), rows):
            parts.append(markdown_table([*head, *work], rows))
        for choice in report.choices_of(task):
            named, numbers = cells.choice_columns(report, choice)
            columns = [*named, *(column for pair in numbers.values() for column in pair)]
            parts.append(f"### {cells.choice_title(report, choice)}\n")
            parts.append(markdown_table(columns, report.curve(choice)))
            parts.append(f"{cells.choice_line(report, choice)}\n")
    if closing := closing_lines(report):
        parts.append("\n\n".join(f"**{line}**" for line in closing) + "\n")
    if report.notes:
        parts.append("## Notes\n")
        parts.append("\n".join(f"- {note}" for note in report.notes) + "\n")
    return "\n".join(parts)
