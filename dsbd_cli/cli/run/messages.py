"""Messages for people, all of which are printed here: lines on standard error, plain or as JSON."""

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


class _MessageHandler(logging.Handler):
    """A handler that prints what the library logs as lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), level="error" if record.levelno >= logging.ERROR else "info")


def set_style(*, json_lines: bool = False, verbose: bool = False, quiet: bool | None = False) -> None:
    """Set how messages are printed from now on, those that the library logs included.

    json_lines: every line is a JSON object (--set log=json). verbose: what the library logs for information, such as
    which model is loaded, is printed without a terminal, too. quiet: only errors are printed (--quiet).
    """
    global _json, _quiet
    _json, _quiet = json_lines, bool(quiet)
    library = logging.getLogger("dsbd_cli")
    library.handlers, library.propagate = [_MessageHandler()], False
    told = logging.INFO if verbose or json_lines or on_terminal() else logging.WARNING
    library.setLevel(logging.ERROR if quiet else told)


def on_terminal() -> bool:
    """Return whether standard error is a terminal, so that somebody watches."""
    return sys.stderr is not None and sys.stderr.isatty()


def utc_now() -> str:
    """Return the time of day, for people. Intervals are measured by the monotonic clock, which nobody sets back."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def quote_command(command: str) -> str:
    """Return a command with no-break spaces, so that a message is not wrapped inside it, and a terminal's user can copy
    it."""
    return command.replace(" ", NO_BREAK)


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds, as in 0:03:20."""
    total = int(seconds)
    return f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"


def say(
    message: str, *, level: Level = "info", event: str = "message", fields: Mapping[str, object] | None = None
) -> None:
    """Print one line on standard error, even if the message holds line ends. It is no error if nobody reads it."""
    if level == "error" or not _quiet:
        _write(_formatted(message, level, event, fields or {}))


def warn(message: str) -> None:
    """Print a warning: something to know that does not end the run."""
    say(message if _json else f"warning: {message}", level="warning", event="warning")


def log(message: str, fields: Mapping[str, object]) -> None:
    """Print a line of a log, with the time of day."""
    say(message if _json else f"{utc_now()} {message}", event="progress", fields=fields)


def error_line(message: str) -> None:
    """Print the message of the error that ended the command."""
    say(message if _json else f"error: {message}", level="error", event="error")


class Talk:
    """Messages of a command while it works: on a terminal one line that is replaced, elsewhere a log line a minute."""

    def __init__(self, live: Callable[[str], None] | None, clock: Callable[[], float] = time.monotonic) -> None:
        """live: replaces the line; None: there is no terminal, or messages are switched off."""
        self._live, self._clock, self._told = live, clock, -LOG_INTERVAL_S

    def now(self, message: str, fields: Mapping[str, object] | None = None, *, due: bool = False) -> None:
        """Show a message that changes all the time. due: a log prints it at once."""
        if self._live is not None:
            self._live(message)
        elif due or self._clock() - self._told >= LOG_INTERVAL_S:
            self._told = self._clock()
            log(message, fields or {})

    def step(self, message: str) -> None:
        """Say what is done next."""
        (self._live or say)(message)


@contextmanager
def talking() -> Iterator[Talk]:
    """Yield a Talk for the time that a command works."""
    if _quiet or not on_terminal():
        yield Talk(None)
        return
    shown = ""

    def show(message: str) -> None:
        nonlocal shown
        shown = message

    with live_line(lambda: shown):
        yield Talk(show)


def live_line(text: Callable[[], str], console: Console | None = None) -> Live:
    """Return a line on standard error that is redrawn ten times a second. rich handles NO_COLOR and the width."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    began = time.monotonic()

    def line() -> Text:
        seconds = time.monotonic() - began
        turn = SPINNER[int(REDRAWS_PER_S * seconds) % len(SPINNER)]
        # a narrow terminal cuts off the end
        return Text(f"{turn} {duration(seconds)} {text()}", no_wrap=True, overflow="ellipsis")

    console = console or Console(file=cast("TextIO", _SafeStream(sys.stderr)), stderr=True)
    return Live(
        console=console, transient=True, redirect_stdout=False, refresh_per_second=REDRAWS_PER_S, get_renderable=line
    )


class _SafeStream:
    """A terminal's stream, for rich, that drops what is written after the terminal has gone."""

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
    """Print a line from a signal handler, which may have interrupted a write to the same stream."""
    if _quiet:
        return
    with suppress(AttributeError, OSError, ValueError):
        os.write(sys.stderr.fileno(), _formatted(message, "info", "signal", {}).encode())


def _formatted(message: str, level: Level, event: str, fields: Mapping[str, object]) -> str:
    if not _json:
        text, width = visible(message), _width()
        return f"dsbd: {' '.join(text.split()) if width is None else _wrapped(text, width)}\n"
    text = " ".join(message.split())
    common = {"schema": LOG.id, "time": utc_now(), "level": level, "event": event, "message": text}
    return LOG.text_line(common | dict(fields))


def visible(text: str) -> str:
    """Return a text whose control characters are escaped, because an id may hold any, and a terminal would obey them.

    White space stays: it is joined or wrapped later, and JSON lines escape their own.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in " \t\n\r\v\f" + NO_BREAK else repr(c)[1:-1] for c in text)


def _width() -> int | None:
    """Return the columns of the terminal that shows standard error; None if it is no terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return None


def _wrapped(message: str, width: int) -> str:
    """Wrap a message at spaces only, because the terminal itself would break names and paths.

    Columns are reserved for the name of the program, which the caller writes before the first word.
    """
    name = f"dsbd:{NO_BREAK}"
    lines = textwrap.wrap(
        name + message, width, subsequent_indent=" " * len(name), break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).removeprefix(name).replace(NO_BREAK, " ")


def _write(line: str) -> None:
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(line)
        sys.stderr.flush()
