"""Show people a run: a live line on a terminal, a log line a minute elsewhere, a summary in the end."""

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
from dsbd_cli.cli.run.messages import LOG_INTERVAL_S, duration, live_line, log, say, set_style, warn
from dsbd_cli.cli.run.summary import Totals
from dsbd_cli.errors import UsageError, plural

if TYPE_CHECKING:
    from rich.live import Live

MAX_SAME_WARNINGS = 3
MAX_NAMED_FAILURES = 3
ROWS_THAT_TELL = 10  # their mean length says something about the rows to come


def begin_talk(talk: TalkOptions) -> None:
    """From now on messages are as the options want them. Raises UsageError for two that contradict each other."""
    set_style(json_lines=talk.log == "json", quiet=talk.quiet)
    if talk.quiet and talk.log == "verbose":
        raise UsageError("--quiet and --set log=verbose cannot be used together: give one of them")


def row_line(index: int, row_id: str, error: object) -> str:
    """A row that failed, and why. What could steer a terminal is escaped where a message is written."""
    return f"row {index} (id {row_id}): {error}"


class Reporter:
    """Counts rows and talks about them as the options want it."""

    def __init__(self, talk: TalkOptions, output: Path | None = None, *, says_why: bool = True) -> None:
        """output: where records go; on a terminal they leave no room for a live line. says_why: the record of a row
        that failed says why it did."""
        self.totals = Totals()
        self._output, self._says_why = output, says_why
        self._failures: list[str] = []  # the first ones
        shown = output in (None, STANDARD) and sys.stdout is not None and sys.stdout.isatty()
        self._quiet, self._verbose, self._json = (
            bool(talk.quiet),
            not talk.quiet and talk.log in ("verbose", "json"),
            talk.log == "json",
        )
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._live = self._terminal and not self._quiet and not self._json and not shown
        self._progress: Live | None = None
        self.input_bytes: int | None = None
        self.input_rows: int | None = None  # where they are counted; else bytes stand for them
        self.note: Callable[[], str] = str  # what else stands in the line
        self._steps: Callable[[], int] = lambda: self.totals.stats.steps
        self._bytes_before = self._bytes = 0
        self._over = threading.Event()
        self._logged = False
        self._warned: Counter[str] = Counter()

    def begin(self, message: str, steps: Callable[[], int]) -> None:
        """Models and settings, once they are loaded. steps: taken so far, unfinished rows included; a step adds a token
        to every beam."""
        self.totals.started, self._steps = time.perf_counter(), steps
        if self._verbose:
            say(message, event="start")
        if self._live:
            self._progress = live_line(partial(self._line, live=True))
            self._progress.start()
        elif not self._quiet:
            threading.Thread(target=self._log, name="dsbd-log", daemon=True).start()

    def waiting(self, text: Callable[[], str]) -> AbstractContextManager[object]:
        """A live line with what is waited for, where there is a terminal."""
        return live_line(text) if self._live else nullcontext()

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
            if len(self._failures) < MAX_NAMED_FAILURES:
                self._failures.append(error)
            if self._verbose:
                say(error, level="warning", event="row_failed")

    def at(self, position: int, *, skipped: bool = False) -> None:
        """The input is worked off up to this byte; skipped: because an earlier run had done so."""
        self._bytes = max(self._bytes, position)
        if skipped:
            self._bytes_before = position

    def stop(self) -> None:
        """Take the live line away."""
        self._over.set()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def summary(self, message: str, *, always: bool = False) -> None:
        """Say how the run ended; in a pipe only if it is worth a mail: rows that failed or were cut, a long run, or
        on demand."""
        self.stop()
        totals = self.totals
        wanted = always or self._terminal or self._verbose or self._json or self._logged
        if self._quiet:
            return
        self._name_failures()
        if wanted or totals.failed or totals.skipped_failed or totals.invalid_rows:
            say(message, event="summary", fields=self.totals.numbers())

    def _name_failures(self) -> None:
        """The first rows that failed, and where the others are; --set log=verbose has told each as it failed."""
        if self._verbose or not self._failures:
            return
        for text in self._failures:
            warn(text)
        if (more := self.totals.failed - len(self._failures)) > 0:
            place = "standard output" if self._output in (None, STANDARD) else self._output
            where = f'records with "error" in {place}' if self._says_why else f"empty lines in {place}"
            say(f"{plural(more, 'more row')} failed: {where}")

    @property
    def _unfinished(self) -> int:
        """Tokens of rows that are not written yet."""
        return max(0, self._steps() - self.totals.stats.steps)

    def _line(self, *, live: bool = False) -> str:
        """live: what changes most stands first, because a narrow terminal cuts the end."""
        left, totals, note = self._left(), self.totals.line(self._unfinished), self.note()
        return ", ".join(filter(None, (left, totals, note) if live else (totals, note, left)))

    def _left(self) -> str:
        """Share of the input that is done, and the time that the rest takes if its rows are as long as those so far."""
        totals, steps = self.totals, self.totals.stats.steps
        if self.input_rows:
            whole, now, before = self.input_rows, totals.rows + totals.skipped, totals.skipped
            of = f"of {plural(whole, 'row')}"
        elif self.input_bytes:
            whole, now, before, of = self.input_bytes, self._bytes, self._bytes_before, "done"
        else:
            return ""
        text = f"{min(1.0, now / whole):.0%} {of}"
        if now <= before or not steps or totals.rows - totals.failed < ROWS_THAT_TELL:
            return text
        left = (whole - now) * steps / (now - before) - self._unfinished
        if left <= 0:  # the rows under way are longer than those before, nobody knows by how much
            return text
        return f"{text}, {duration(self.totals.seconds * left / (steps + self._unfinished))} left"

    def _log(self) -> None:
        """Event.wait goes by the monotonic clock: a clock that is set back neither stops nor floods the log."""
        while not self._over.wait(LOG_INTERVAL_S):
            self._logged = True
            log(self._line(), {**self.totals.numbers(), "unfinished_tokens": self._unfinished})
