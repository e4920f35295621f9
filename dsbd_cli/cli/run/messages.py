"""Everything for people goes through here: lines on standard error, plain or as JSON."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TextIO, cast

from dsbd_cli.io.schemas.contracts import LOG

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

Level = Literal["info", "warning", "error"]

NO_BREAK = "\u00a0"
LOG_INTERVAL_S = 60.0
SPINNER, REDRAWS_PER_S = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", 10

_json = _quiet = False


class _Lines(logging.Handler):
    """Handler that says what the library logs, as lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), level="error" if record.levelno >= logging.ERROR else "info")


def set_style(*, json_lines: bool = False, quiet: bool | None = False) -> None:
    """From now on every line is a JSON object (--set log=json), and nothing is said but errors (--quiet)."""
    global _json, _quiet
    _json, _quiet = json_lines, bool(quiet)
    library = logging.getLogger("dsbd_cli")
    library.handlers, library.propagate = [_Lines()], False
    library.setLevel(logging.ERROR if quiet else logging.INFO)


def utc_now() -> str:
    """The time of day, for people. Intervals come from the monotonic clock, which nobody sets back."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def quote_command(command: str) -> str:
    """A command inside a message: a terminal shows it without line ends in it, so that it can be copied."""
    return command.replace(" ", NO_BREAK)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as in 0:03:20."""
    total = int(seconds)
    return f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"


def say(
    message: str, *, level: Level = "info", event: str = "message", fields: Mapping[str, object] | None = None
) -> None:
    """One line on standard error, even where a message holds line ends. Nobody listening is no error."""
    if level == "error" or not _quiet:
        _write(_line(message, level, event, fields or {}))


def warn(message: str) -> None:
    """Something to know about that does not end the run."""
    say(message if _json else f"warning: {message}", level="warning", event="warning")


def log(message: str, fields: Mapping[str, object]) -> None:
    """A line of a log: with the time of day."""
    say(message if _json else f"{utc_now()} {message}", event="progress", fields=fields)


def error_line(message: str) -> None:
    """Say the message of the error boundary."""
    say(message if _json else f"error: {message}", level="error", event="error")


class Talk:
    """Lines that a command says while it works: one on a terminal that is replaced, elsewhere a log line a minute."""

    def __init__(self, live: Callable[[str], None] | None, clock: Callable[[], float] = time.monotonic) -> None:
        """live: replaces the line; None: there is no terminal, or nothing is to be said."""
        self._live, self._clock, self._told = live, clock, -LOG_INTERVAL_S

    def now(self, message: str, fields: Mapping[str, object], *, due: bool = False) -> None:
        """Show what changes all the time. due: a log has it at once."""
        if self._live is not None:
            self._live(message)
        elif due or self._clock() - self._told >= LOG_INTERVAL_S:
            self._told = self._clock()
            log(message, fields)

    def step(self, message: str) -> None:
        """Say what is done next."""
        (self._live or say)(message)


@contextmanager
def talking() -> Iterator[Talk]:
    """While a command works."""
    if _quiet or sys.stderr is None or not sys.stderr.isatty():
        yield Talk(None)
        return
    shown = ""

    def show(message: str) -> None:
        nonlocal shown
        shown = message

    with live_line(lambda: shown):
        yield Talk(show)


def live_line(told: Callable[[], str], console: Console | None = None) -> Live:
    """One line on standard error that is drawn again ten times a second; rich looks after NO_COLOR and the width."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    began = time.monotonic()

    def line() -> Text:
        seconds = time.monotonic() - began
        turn = SPINNER[int(REDRAWS_PER_S * seconds) % len(SPINNER)]
        # where the terminal is narrow the end gives way
        return Text(f"{turn} {duration(seconds)} {told()}", no_wrap=True, overflow="ellipsis")

    console = console or Console(file=cast("TextIO", _Lasting(sys.stderr)), stderr=True)
    return Live(
        console=console, transient=True, redirect_stdout=False, refresh_per_second=REDRAWS_PER_S, get_renderable=line
    )


class _Lasting:
    """A stream to a terminal, for rich: what is written after the terminal has gone goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def write_from_signal(message: str) -> None:
    """A line from a signal handler, which may have interrupted a write of the same stream."""
    if _quiet:
        return
    try:
        os.write(sys.stderr.fileno(), _line(message, "info", "signal", {}).encode())
    except (AttributeError, OSError, ValueError):
        return


def _line(message: str, level: Level, event: str, fields: Mapping[str, object]) -> str:
    if not _json:
        text, width = visible(message), _width()
        return f"dsbd: {' '.join(text.split()) if width is None else _wrapped(text, width)}\n"
    text = " ".join(message.split())
    head = {"schema": LOG.id, "time": utc_now(), "level": level, "event": event, "message": text}
    return LOG.text_line(head | dict(fields))


def visible(text: str) -> str:
    """Characters that a terminal would obey, not show, as escapes: an id may hold any. White space stays, which is
    joined or broken at later; JSON lines escape their own."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in " \t\n\r\v\f" + NO_BREAK else repr(c)[1:-1] for c in text)


def _width() -> int | None:
    """Columns of the terminal that shows standard error; None where it is no terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return None


def _wrapped(message: str, width: int) -> str:
    """Broken at spaces only: the terminal itself would break names and paths. The first word stays behind the name of
    the program, which takes its columns here and is written by the caller."""
    name = f"dsbd:{NO_BREAK}"
    lines = textwrap.wrap(
        name + message, width, subsequent_indent=" " * len(name), break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).removeprefix(name).replace(NO_BREAK, " ")


def _write(line: str) -> None:
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return
