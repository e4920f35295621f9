"""The console that tables are printed on: one rule for widths, and one for a reader that has closed the pipe."""

from __future__ import annotations

import io
from typing import IO

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

LEAST_WIDTH, WIDTH_OF_FILES, NO_LIMIT = 80, 120, 10_000


def before_and_after() -> Table:
    """Make a table with two numbers in a row."""
    table = Table(box=None)
    for column, name in enumerate(("", "before", "after")):
        table.add_column(name, justify="right" if column else "left")
    return table


class Screen(Console):
    """A console as wide as the terminal, and at least LEAST_WIDTH columns.

    A stream that is no terminal gets plain text, WIDTH_OF_FILES columns wide. None, a standard output that was closed
    before the process began, gets nothing.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        stream = io.StringIO() if stream is None else stream
        width = None if stream.isatty() else WIDTH_OF_FILES
        super().__init__(file=stream, width=width, highlight=False, emoji=False, markup=False)
        self.width = max(self.width, LEAST_WIDTH)

    def show(self, table: RenderableType) -> None:
        """Print a table. Where it is wider than the screen, the terminal wraps its lines, but no cell is cut."""
        least = Measurement.get(self, self.options.update(width=NO_LIMIT), table).minimum
        before = self.width
        self.width = max(before, least)
        try:
            self.print(table)
        finally:
            self.width = before

    def say(self, text: str) -> None:
        """Print a line as it is, which the terminal alone wraps."""
        self.print(text, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, which ends the command. As in every command, a reader that has gone is no error."""
        raise BrokenPipeError
