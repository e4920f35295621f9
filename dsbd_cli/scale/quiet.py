"""A context that keeps what Ray and its processes print off standard output, which is for records, and off standard
error, which is for our messages."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO


class _OnlyBytes(io.TextIOBase):
    """A text stream that drops its text. Records are bytes and go through `buffer`."""

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
    """Silence Ray for the block. Native code and started processes write to the null device in place of standard error,
    text that threads print to standard output is dropped, and Ray's loggers are silent. `sys.stderr` still leads to
    standard error, `sys.stdout.buffer` to standard output."""
    logger = logging.getLogger("ray")
    logger.propagate = False
    # a handler would not do, because ray.init removes all of them, and Python then uses its handler of last resort
    logger.setLevel(logging.CRITICAL + 1)
    stdout, stderr = sys.stdout, sys.stderr
    if stdout is not None and hasattr(stdout, "buffer"):
        sys.stdout = _OnlyBytes(stdout)
    own_stream = _own_descriptor(stderr)
    if own_stream is not None:
        sys.stderr = own_stream
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr
        if own_stream is not None:
            own_stream.flush()
            os.dup2(own_stream.fileno(), 2)
            own_stream.close()


def _own_descriptor(stream: TextIO | None) -> TextIO | None:
    """Return another stream to where standard error leads, and point standard error's own descriptor at the null device
    from now on. Return None where the stream is no descriptor of this process."""
    try:
        if stream is None or stream.fileno() != 2:
            return None
        stream.flush()
        own_stream = os.fdopen(os.dup(2), "w", buffering=1, encoding=stream.encoding, errors="backslashreplace")
    except (OSError, ValueError, AttributeError):
        return None
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    return own_stream
