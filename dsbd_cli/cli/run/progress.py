"""Progress of a run, for people: a live line on a terminal, elsewhere a log line a minute, and a summary in the end."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dsbd_cli.cli.options.options import STANDARD, TalkOptions
from dsbd_cli.cli.run.messages import LOG_INTERVAL_S, duration, live_line, log, on_terminal, say, set_style, warn
from dsbd_cli.cli.run.summary import Totals
from dsbd_cli.errors import MAX_SHOWN, RowError, UsageError, plural

if TYPE_CHECKING:
    from rich.live import Live

MAX_SAME_WARNINGS = 3
MAX_NAMED_FAILURES = 3
ROWS_THAT_TELL = 10  # rows whose mean length is an estimate for the rows to come


def begin_talk(talk: TalkOptions) -> None:
    """Set how messages are printed, by the options. Raises UsageError for two that contradict each other."""
    set_style(json_lines=talk.log == "json", verbose=talk.log == "verbose", quiet=talk.quiet)
    if talk.quiet and talk.log == "verbose":
        raise UsageError("--quiet and --set log=verbose cannot be used together: give one of them")


class Reporter:
    """A counter of the rows of a run, which reports on them as the options say."""

    def __init__(self, talk: TalkOptions, output: Path | None, *, says_why: bool) -> None:
        """output: where records go; if that is a terminal, no live line is shown. says_why: the record of a row that
        failed holds its error."""
        self.totals = Totals()
        self._output, self._says_why = output, says_why
        self._failures: list[str] = []  # the first ones
        shown = output in (None, STANDARD) and sys.stdout is not None and sys.stdout.isatty()
        self._quiet, self._json = bool(talk.quiet), talk.log == "json"
        self._verbose = not talk.quiet and talk.log in ("verbose", "json")
        self._terminal = on_terminal()
        self._live = self._terminal and not self._quiet and not self._json and not shown
        self._progress: Live | None = None
        self.input_bytes: int | None = None
        self.input_rows: int | None = None  # where they are counted; else the progress is measured in bytes
        self.note: Callable[[], str] = str  # further text for the line of progress
        self._steps: Callable[[], int] = lambda: self.totals.stats.steps
        self._bytes_before = self._bytes = 0
        self._over = threading.Event()
        self._logged = False
        self._warned: Counter[str] = Counter()

    def begin(self, message: str, steps: Callable[[], int]) -> None:
        """Report models and settings, once they are loaded, and begin to show the progress.

        steps: returns the steps taken so far, unfinished rows included. A step adds a token to every beam.
        """
        self.totals.started, self._steps = time.perf_counter(), steps
        if self._verbose:
            say(message, event="start")
        if self._live:
            self._progress = live_line(partial(self._progress_line, live=True))
            self._progress.start()
        elif not self._quiet:
            threading.Thread(target=self._log, name="dsbd-log", daemon=True).start()

    def waiting(self, text: Callable[[], str]) -> AbstractContextManager[object]:
        """Return a live line that says what is waited for, or nothing where no live line is shown."""
        return live_line(text) if self._live else nullcontext()

    def warn(self, message: str, *, kind: str | None = None) -> None:
        """Print a warning; of one kind only the first few are printed."""
        if kind is not None:
            self._warned[kind] += 1
            if self._warned[kind] == MAX_SAME_WARNINGS:
                message += " (more of this kind are counted, not told)"
            elif self._warned[kind] > MAX_SAME_WARNINGS:
                return
        if not self._quiet:
            warn(message)

    def row(self, index: int, row_id: str | None, error: RowError | None) -> None:
        """Count a row that was written. row_id: None where it cannot be read. error: why it failed."""
        self.totals.rows += 1
        if error is None:
            return
        self.totals.failed += 1
        self.totals.errors[type(error).__name__] += 1
        message = f"row {index} ({'without an id' if row_id is None else f'id {row_id[:MAX_SHOWN]}'}): {error}"
        if len(self._failures) < MAX_NAMED_FAILURES:
            self._failures.append(message)
        if self._verbose:
            say(message, level="warning", event="row_failed")

    def at(self, position: int, *, skipped: bool = False) -> None:
        """Note that the input is done up to this byte. skipped: an earlier run had done it."""
        self._bytes = max(self._bytes, position)
        if skipped:
            self._bytes_before = position

    def stop(self) -> None:
        """Remove the live line, and end the log."""
        self._over.set()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def summary(self, message: str, *, always: bool = False) -> None:
        """Print how the run ended.

        Without a terminal or a verbose log this is printed only if it is worth a mail: rows failed, were cut or asked
        for what the run does not do, the run was long, or `always` is set.
        """
        self.stop()
        totals = self.totals
        wanted = always or self._terminal or self._verbose or self._json or self._logged
        if self._quiet:
            return
        self._name_failures()
        if wanted or totals.failed or totals.skipped_failed or totals.invalid_rows or totals.overruled_rows:
            say(message, event="summary", fields=self.totals.numbers())

    def _name_failures(self) -> None:
        """Print the first rows that failed, and where the others are, unless --set log=verbose has printed each."""
        if self._verbose or not self._failures:
            return
        for text in self._failures:
            warn(text)
        if (more := self.totals.failed - len(self._failures)) > 0:
            destination = "standard output" if self._output in (None, STANDARD) else self._output
            where = f'records with "error" in {destination}' if self._says_why else f"empty lines in {destination}"
            say(f"{plural(more, 'more row')} failed: {where}")

    @property
    def _unfinished(self) -> int:
        """Number of tokens of rows that are not written yet."""
        return max(0, self._steps() - self.totals.stats.steps)

    def _progress_line(self, *, live: bool = False) -> str:
        """Return the line of progress. live: what changes most comes first, because a narrow terminal cuts off the
        end."""
        left, note = self._share_done(), self.note()
        totals = self.totals.line(self._unfinished, counts_rows=not self.input_rows)  # else `left` counts them
        return ", ".join(filter(None, (left, totals, note) if live else (totals, note, left)))

    def _share_done(self) -> str:
        """Return the share of the input that is done, and the time for the rest if its rows are as long as those so
        far."""
        totals, steps = self.totals, self.totals.stats.steps
        if self.input_rows:
            whole, now, before = self.input_rows, totals.rows + totals.skipped, totals.skipped
            text = f"{now} of {plural(whole, 'row')}"
        elif self.input_bytes:
            whole, now, before = self.input_bytes, self._bytes, self._bytes_before
            text = f"{min(1.0, now / whole):.0%} done"
        else:
            return ""
        if now <= before or not steps or totals.rows - totals.failed < ROWS_THAT_TELL:
            return text
        left = (whole - now) * steps / (now - before) - self._unfinished
        if left <= 0:  # the unfinished rows are longer than those before, nobody knows by how much
            return text
        return f"{text}, {duration(self.totals.seconds * left / (steps + self._unfinished))} left"

    def _log(self) -> None:
        """Print a log line a minute. Event.wait uses the monotonic clock: setting the clock neither stops nor floods
        the log."""
        while not self._over.wait(LOG_INTERVAL_S):
            self._logged = True
            log(self._progress_line(), {**self.totals.numbers(), "unfinished_tokens": self._unfinished})
