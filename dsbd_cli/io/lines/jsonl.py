"""Input and output of lines. Input is read in blocks; every output line is flushed before the next is made."""

from __future__ import annotations

import io
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

import orjson

from dsbd_cli.errors import OutputError, UsageError, writing
from dsbd_cli.io.lines.compression import frame_maker
from dsbd_cli.io.records.row import MAX_LINE_BYTES, Line, LongLine

BOM = b"\xef\xbb\xbf"
BLOCK_BYTES = 1 << 17
FIRST_BYTES = 256

FRAME_LINES = 256
FRAME_SECONDS = 1.0

NumberedLine = tuple[int, Line]
ReadLines = Callable[[BinaryIO], Iterator[NumberedLine]]  # read_lines, or a function that reads a table as such lines
OUTPUT_CLOSED = 141  # exit code of a program that SIGPIPE ends: 128 + 13


class ClosedOutputError(Exception):
    """Nobody reads our output any more (`| head -1`).

    The run ends without a message and with OUTPUT_CLOSED as exit code, because a row was not written.
    """


def read_lines(stream: BinaryIO, *, limit: int = MAX_LINE_BYTES, blank: bool = False) -> Iterator[NumberedLine]:
    """Yield the lines, without their line ends, each with its number from 1. blank: also those that are blank.

    A line is yielded as soon as it was read to its end. A line of more than `limit` bytes is skipped without being
    held, and yielded as a LongLine.
    """
    most = max(limit, FIRST_BYTES) + len(BOM) + 2  # room for the first line's byte order mark and the line end
    for number in itertools.count(1):
        line = stream.readline(most)
        whole, ended = line.removesuffix(b"\n"), line.endswith(b"\n") or len(line) < most
        size = len(whole)
        while not ended:
            more = stream.readline(BLOCK_BYTES)
            size += len(more.removesuffix(b"\n"))
            line, ended = more, more.endswith(b"\n") or len(more) < BLOCK_BYTES
        text = (whole.removeprefix(BOM) if number == 1 else whole).removesuffix(b"\r")
        if len(text) > limit or size > len(whole):
            yield number, LongLine(size, whole[:FIRST_BYTES])
        elif (line and blank) or (text and not text.isspace()):
            yield number, text
        if not line.endswith(b"\n"):
            return


def read_object(line: bytes) -> dict[str, object] | None:
    """Return the JSON object of a line that this program has written; None if the line holds none."""
    try:
        value: object = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def check_new(path: Path, *, option: str, overwrite: bool, instead: str = "name another file") -> None:
    """Raise UsageError, before any model is loaded, for an output file that exists or that cannot be created.

    Devices and named pipes may be written to, `-` may not. overwrite: the file may exist. instead: advice for the
    message.
    """
    if path == Path("-"):
        raise UsageError(f"{option} needs a file, but - is standard output: name a file")
    try:
        is_folder, is_file, has_folder = path.is_dir(), path.is_file(), path.parent.is_dir()
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be used: {error.strerror or error}") from None
    if is_folder:
        raise UsageError(f"{option} {path} is a folder: name a file")
    if is_file and not overwrite:
        raise UsageError(f"{option} {path} exists: {instead}, or replace it with --existing overwrite")
    if not has_folder:
        raise UsageError(f"{option} {path}: the folder {path.parent} does not exist")


class LineWriter:
    """A writer of whole lines. A line that could not be written whole is cut off again where the file allows it.

    A compressed output is written in whole frames. A line is written at once if the last frame is at least a second
    old. Else it waits for a later line: the waiting lines are written once a second has passed, or 256 of them are
    there. So a crash costs a second of lines, and what is in the file can be read. Call `flush` if no line is expected
    for a while.
    """

    def __init__(
        self,
        stream: BinaryIO | io.FileIO,
        name: str,
        *,
        owned: bool,
        frame: Callable[[bytes], bytes] | None = None,
        left: str = "the lines before are complete",
    ) -> None:
        """Write from the present position of the stream.

        owned: close the stream in the end, and cut the file back to its last whole line if a write fails. frame: see
        `frame_maker`. left: what a failed write leaves, for the message.
        """
        self._stream, self._name, self._owned, self._left = stream, name, owned, left
        self._truncates = owned and stream.seekable()
        self._size = stream.tell() if self._truncates else 0
        self._frame, self._pending, self._flushed = frame, list[bytes](), -FRAME_SECONDS

    @classmethod
    def create(cls, path: Path, *, overwrite: bool) -> Self:
        """Open a new file, unbuffered, compressed by its suffix. Raises OutputError.

        Unless `overwrite` is set, a file that was created meanwhile is not touched.
        """
        fresh = not overwrite and not (path.exists() and not path.is_file())
        with writing(path):
            stream = io.FileIO(path, "xb" if fresh else "wb")
        return cls(stream, str(path), owned=True, frame=frame_maker(path))

    def write(self, line: bytes) -> None:
        """Write one line and flush it. Raises ClosedOutputError if nobody reads it, OutputError if it cannot be
        written."""
        if self._frame is None:
            self._put(line + b"\n")
            return
        self._pending.append(line + b"\n")
        if len(self._pending) >= FRAME_LINES or time.monotonic() - self._flushed >= FRAME_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait for their frame to be full."""
        if self._frame is not None and self._pending:
            lines, self._pending = b"".join(self._pending), []
            self._put(self._frame(lines))
            self._flushed = time.monotonic()

    def _put(self, data: bytes) -> None:
        try:
            left = memoryview(data)
            while left:
                left = left[self._stream.write(left) or 0 :]
            self._stream.flush()
        except BrokenPipeError as error:
            raise ClosedOutputError from error
        except OSError as error:
            self._take_back()
            raise OutputError(f"cannot write {self._name}: {error.strerror}; {self._left}") from error
        self._size += len(data)

    def _take_back(self) -> None:
        """Cut the file back to its last whole line, because a full disk may have taken half a line."""
        if self._truncates:
            with suppress(OSError):
                os.ftruncate(self._stream.fileno(), self._size)

    def close(self) -> None:
        """Write the waiting lines, and close a stream that is owned; a borrowed stream stays open."""
        try:
            self.flush()
        finally:
            if self._owned:
                self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
