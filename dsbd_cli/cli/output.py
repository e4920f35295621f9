"""The one sink: records go to standard output or a file, everything for people to standard error."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dsbd_cli.data.jsonl import LineWriter
from dsbd_cli.errors import OutputError
from dsbd_cli.requests import RequestResult

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Reporter", "Totals", "error_line", "open_writer", "say"]

STANDARD = Path("-")


def say(message: str) -> None:
    """One line for people, on standard error, even where a message holds line ends. Nobody listening is no error."""
    try:
        sys.stderr.write(f"dsbd: {' '.join(message.split())}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return


def error_line(message: str) -> None:
    """What the error boundary says."""
    say(f"error: {message}")


def open_writer(path: Path | None, *, overwrite: bool) -> LineWriter:
    """Standard output for None and `-`, else a new file."""
    if path is not None and path != STANDARD:
        return LineWriter.create(path, overwrite=overwrite)
    if sys.stdout is None:
        raise OutputError("standard output is closed: name a file with --output")
    sys.stdout.flush()
    return LineWriter(sys.stdout.buffer, "standard output", owned=False)


class Totals:
    """Sums over the rows of a run."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.rows = self.failed = self.tokens = self.steps = self.target_calls = self.drafted = self.accepted = 0

    def add(self, result: RequestResult) -> None:
        """Count what one result cost and gave."""
        self.tokens += sum(beam.num_tokens for beam in result.hypotheses[:1])
        stats = result.stats
        self.steps += stats.steps
        self.target_calls += stats.target_calls
        self.drafted += stats.drafted
        self.accepted += stats.accepted

    def line(self) -> str:
        """Rows, tokens/s of the best texts, steps per target call, acceptance."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        parts = [rows, f"{self.tokens} tokens", f"{self.tokens / seconds:.1f} tokens/s"]
        if self.target_calls:
            parts.append(f"{self.steps / self.target_calls:.2f} steps per call")
        if self.drafted:
            parts.append(f"{self.accepted / self.drafted:.0%} accepted")
        if self.failed:
            parts.append(f"{self.failed} failed")
        return ", ".join(parts)


class Reporter:
    """What people see of a run: a live line on a terminal, failed rows if verbose, a summary in the end."""

    def __init__(self, *, quiet: bool, verbose: bool, records_on_terminal: bool) -> None:
        """records_on_terminal: no live line, because records would run through it."""
        self.totals = Totals()
        self._quiet, self._verbose = quiet, verbose
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._live = self._terminal and not quiet and not records_on_terminal
        self._progress: Progress | None = None

    def begin(self, message: str) -> None:
        """Models and settings, once they are loaded."""
        self.totals.started = time.perf_counter()
        if self._verbose:
            say(message)
        if self._live:
            self._progress = _live_line()
            self._progress.start()

    def row(self, *, error: str | None = None) -> None:
        """A row is written."""
        self.totals.rows += 1
        if error is not None:
            self.totals.failed += 1
            if self._verbose:
                say(error)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=self.totals.line())

    def stop(self) -> None:
        """Take the live line away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def summary(self, message: str) -> None:
        """Say how the run ended: always when rows failed, else to a terminal or when verbose; never when quiet."""
        self.stop()
        if not self._quiet and (self._terminal or self._verbose or self.totals.failed):
            say(message)


def _live_line() -> Progress:
    """One line on standard error that is replaced as rows are done; rich looks after NO_COLOR and the width."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    progress.add_task("starting", total=None)
    return progress
