"""Keeps what Ray and its processes print off standard output, which is for records, and standard error, which is for
our messages."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO


class _OnlyBytes(io.TextIOBase):
    """A text stream whose text goes nowhere. Records are bytes and go through `buffer`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.buffer = stream.buffer

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While it lasts, native code and processes that are started write to nowhere in place of standard error, text that
    threads print to standard output is dropped, and Ray's loggers are silent. `sys.stderr` still leads to standard
    error, `sys.stdout.buffer` to standard output."""
    logger = logging.getLogger("ray")
    logger.propagate = False
    logger.setLevel(
        logging.CRITICAL + 1
    )  # a handler would not do: ray.init takes all away, and Python has a last resort
    stdout, stderr = sys.stdout, sys.stderr
    if stdout is not None and hasattr(stdout, "buffer"):
        sys.stdout = _OnlyBytes(stdout)
    ours = _own_descriptor(stderr)
    if ours is not None:
        sys.stderr = ours
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr
        if ours is not None:
            ours.flush()
            os.dup2(ours.fileno(), 2)
            ours.close()


def _own_descriptor(stream: TextIO | None) -> TextIO | None:
    """Another stream to where standard error leads, whose own descriptor leads to nowhere from now on; None where it
    is no descriptor of this process."""
    try:
        if stream is None or stream.fileno() != 2:
            return None
        stream.flush()
        ours = os.fdopen(os.dup(2), "w", buffering=1, encoding=stream.encoding, errors="backslashreplace")
    except (OSError, ValueError, AttributeError):
        return None
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return ours
