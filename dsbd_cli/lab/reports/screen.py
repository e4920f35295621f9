"""Where tables are printed: one rule for widths, and for a reader who has gone."""

from __future__ import annotations

from typing import IO

from rich.console import Console

__all__ = ["MIN_WIDTH", "Screen"]

MIN_WIDTH, WIDTH_OF_FILES = 100, 120


class Screen(Console):
    """As wide as the terminal, and at least MIN_WIDTH: a narrow terminal wraps lines; cut cells would be lost.

    A stream that is no terminal gets plain text, WIDTH_OF_FILES columns wide.
    """

    def __init__(self, stream: IO[str]) -> None:
        width = None if stream.isatty() else WIDTH_OF_FILES
        super().__init__(file=stream, width=width, highlight=False, emoji=False, markup=False)
        self.width = max(self.width, MIN_WIDTH)

    def on_broken_pipe(self) -> None:
        """Nobody reads any more: no error, as for every command. Raises BrokenPipeError, which ends the command."""
        raise BrokenPipeError
