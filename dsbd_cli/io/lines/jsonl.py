"""Lines in, lines out. Input is read one block at a time; every output line is flushed before the next is made."""

from __future__ import annotations

import io
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, Self

import orjson

from dsbd_cli.errors import OutputError, UsageError
from dsbd_cli.io.lines.compression import frame_maker
from dsbd_cli.io.records.row import MAX_LINE_BYTES, LongLine

BOM = b"\xef\xbb\xbf"
BLOCK_BYTES = 1 << 17
HEAD_BYTES = 256

FRAME_LINES = 256
FRAME_SECONDS = 1.0

NumberedLine = tuple[int, bytes | LongLine]


class ReadLines(Protocol):
    """Interface of `read_lines`, and of what reads a table as such lines."""

    def __call__(self, stream: BinaryIO, *, limit: int = MAX_LINE_BYTES) -> Iterator[NumberedLine]: ...


OUTPUT_CLOSED = 141  # exit code of a program that SIGPIPE ends: 128 + 13


class ClosedOutputError(Exception):
    """Whoever read our output has gone (`| head -1`): the run ends quietly, with OUTPUT_CLOSED as exit code, because
    a row is not written."""


def read_lines(stream: BinaryIO, *, limit: int = MAX_LINE_BYTES) -> Iterator[NumberedLine]:
    """Line numbers from 1 and the lines that are not blank, without their line ends.

    A line is given as soon as it has come whole. A line of more than `limit` bytes is passed over without being held
    and given as a LongLine.
    """
    most = max(limit, HEAD_BYTES) + len(BOM) + 2  # with a mark before the first line, and its end
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
            yield number, LongLine(size, whole[:HEAD_BYTES])
        elif text and not text.isspace():
            yield number, text
        if not line.endswith(b"\n"):
            return


def read_object(line: bytes) -> dict[str, object] | None:
    """The JSON object of a line that this program has written; None for what is none."""
    try:
        found: object = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def check_new(path: Path, *, option: str, overwrite: bool, instead: str = "name another file") -> None:
    """Refuse, before any model is loaded, a file that exists. Devices and named pipes may be written to. instead: what
    to do about it."""
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder: name a file")
    if path.is_file() and not overwrite:
        raise UsageError(f"{option} {path} exists: {instead}, or replace it with --existing overwrite")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: the folder {path.parent} does not exist")


class LineWriter:
    """Writes whole lines. A line that could not be written whole is taken back where the file allows it.

    A compressed output is written in whole frames: a line stands in the file at once when the last frame is a second
    old, else with the lines of that second or when there are 256 of them. So a crash costs a second of lines, and
    what is in the file can be read; call `flush` where nothing more is expected for a while.
    """

    def __init__(
        self,
        stream: BinaryIO | io.FileIO,
        name: str,
        *,
        owned: bool,
        frame: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Writes from where the stream stands. owned: close it in the end, and keep its size to the last whole line.

        frame: see `frame_maker`.
        """
        self._stream, self._name, self._owned = stream, name, owned
        self._truncates = owned and stream.seekable()
        self._size = stream.tell() if self._truncates else 0
        self._frame, self._pending, self._flushed = frame, list[bytes](), -FRAME_SECONDS

    @classmethod
    def create(cls, path: Path, *, overwrite: bool) -> Self:
        """A new file, unbuffered, compressed by its suffix. Raises OutputError; a file that has come into being
        meanwhile is not touched."""
        fresh = not overwrite and not (path.exists() and not path.is_file())
        try:
            stream = io.FileIO(path, "xb" if fresh else "wb")
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error
        return cls(stream, str(path), owned=True, frame=frame_maker(path))

    def write(self, line: bytes) -> None:
        """One line, flushed. Raises ClosedOutputError when nobody reads it, OutputError when it cannot be written."""
        if self._frame is None:
            self._put(line + b"\n")
            return
        self._pending.append(line + b"\n")
        if len(self._pending) >= FRAME_LINES or time.monotonic() - self._flushed >= FRAME_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Lines that wait for their frame to be full are written now."""
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
            raise OutputError(f"cannot write {self._name}: {error.strerror}; the lines before are complete") from error
        self._size += len(data)

    def _take_back(self) -> None:
        """A full disk may have taken half a line."""
        if self._truncates:
            try:
                os.ftruncate(self._stream.fileno(), self._size)
            except OSError:
                return

    def close(self) -> None:
        """Write what waits and close an own file; a borrowed stream stays open."""
        try:
            self.flush()
        finally:
            if self._owned:
                self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
