"""What people see of a run: a live line on a terminal, a log line a minute elsewhere, a summary in the end."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from dsbd_cli.job.cli.messages import duration, log, say, warn
from dsbd_cli.job.cli.talk_options import TalkOptions
from dsbd_cli.job.cli.totals import Totals

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["LOG_INTERVAL_S", "Reporter"]

LOG_INTERVAL_S = 60.0
MAX_SAME_WARNINGS = 3


class Reporter:
    """Counts rows and talks about them as the options want it."""

    def __init__(self, talk: TalkOptions, *, records_on_terminal: bool) -> None:
        """records_on_terminal: no live line, because records would run through it."""
        self.totals = Totals()
        self._quiet, self._verbose, self._json = bool(talk.quiet), bool(talk.verbose), bool(talk.log_json)
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._live = self._terminal and not self._quiet and not self._json and not records_on_terminal
        self._progress: Progress | None = None
        self.input_bytes: int | None = None
        self._bytes_before = self._bytes = 0
        self._over = threading.Event()
        self._logged = False
        self._warned: Counter[str] = Counter()

    def begin(self, message: str) -> None:
        """Models and settings, once they are loaded."""
        self.totals.started = time.perf_counter()
        if self._verbose or (self._json and not self._quiet):
            say(message, event="start")
        if self._live:
            self._progress = _live_line()
            self._progress.start()
        elif not self._quiet:
            threading.Thread(target=self._log, name="dsbd-log", daemon=True).start()

    def warn(self, message: str, *, kind: str | None = None) -> None:
        """A warning; of one kind only the first few are told."""
        if kind is not None:
            self._warned[kind] += 1
            if self._warned[kind] == MAX_SAME_WARNINGS:
                message += " (more of this kind are counted, not told)"
            elif self._warned[kind] > MAX_SAME_WARNINGS:
                return
        if not self._quiet:
            warn(message)

    def row(self, *, error: str | None = None, kind: str = "") -> None:
        """A row is written. error: why it failed; kind: the type of that error."""
        self.totals.rows += 1
        if error is not None:
            self.totals.failed += 1
            self.totals.errors[kind] += 1
            if self._verbose:
                say(error, level="warning", event="row_failed")
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=self._live_text())

    def at(self, position: int, *, skipped: bool = False) -> None:
        """The input is worked off up to this byte; skipped: because an earlier run had done so."""
        self._bytes = position
        if skipped:
            self._bytes_before = position

    def stop(self) -> None:
        """Take the live line away."""
        self._over.set()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def summary(self, message: str, *, always: bool = False) -> None:
        """Say how the run ended; in a pipe only if it is worth a mail: failed rows, a long run, or on demand."""
        self.stop()
        wanted = always or self._terminal or self._verbose or self._json or self._logged
        if not self._quiet and (wanted or self.totals.failed or self.totals.skipped_failed):
            say(message, event="summary", fields=self.totals.numbers())

    def _line(self) -> str:
        left = self._left()
        return self.totals.line() + (f", {left}" if left else "")

    def _live_text(self) -> str:
        """What changes most stands first, because a narrow terminal cuts the end."""
        left = self._left()
        return (f"{left}, " if left else "") + self.totals.line()

    def _left(self) -> str:
        """Share of the input that is done, and the time that the rest will take at this speed."""
        if not self.input_bytes:
            return ""
        share = min(1.0, self._bytes / self.input_bytes)
        done = self._bytes - self._bytes_before
        if done <= 0 or share >= 1:
            return f"{share:.0%} done"
        seconds = self.totals.seconds * (self.input_bytes - self._bytes) / done
        return f"{share:.0%} done, {duration(seconds)} left"

    def _log(self) -> None:
        """Event.wait goes by the monotonic clock: a clock that is set back neither stops nor floods the log."""
        while not self._over.wait(LOG_INTERVAL_S):
            self._logged = True
            log(self._line(), self.totals.numbers())


def _live_line(console: Console | None = None) -> Progress:
    """One line on standard error that is replaced as rows are done; rich looks after NO_COLOR and the width."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    # the text alone gives way where the terminal is narrow
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    text = TextColumn("{task.description}", markup=False, table_column=rest)
    columns = (SpinnerColumn(), TimeElapsedColumn(), text)
    console = console or Console(stderr=True)
    progress = Progress(*columns, console=console, transient=True, redirect_stdout=False, expand=True)
    progress.add_task("starting", total=None)
    return progress
