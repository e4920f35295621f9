"""Lines in, lines out. Input is read one line at a time; every output line is flushed before the next is made."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

from dsbd_cli.errors import OutputError, UsageError

__all__ = ["ClosedOutputError", "LineWriter", "check_new", "read_lines"]

BOM = b"\xef\xbb\xbf"


class ClosedOutputError(Exception):
    """Whoever read our output has gone (`| head -1`): the run ends quietly, since nothing went wrong."""


def read_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and the lines that are not blank, without their line ends. Holds one line at a time."""
    for number, line in enumerate(stream, start=1):
        text = (line.removeprefix(BOM) if number == 1 else line).strip()
        if text:
            yield number, text


def check_new(path: Path, *, option: str, overwrite: bool) -> None:
    """Refuse, before any model is loaded, a file that exists. Devices and named pipes may be written to."""
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder: name a file")
    if path.is_file() and not overwrite:
        raise UsageError(f"{option} {path} exists: name another file, or replace it with --overwrite")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: the folder {path.parent} does not exist")


class LineWriter:
    """Writes whole lines. A line that could not be written whole is taken back where the file allows it."""

    def __init__(self, stream: BinaryIO | io.FileIO, name: str, *, owned: bool) -> None:
        """owned: close the stream in the end, and keep its size to the last whole line."""
        self._stream, self._name, self._owned = stream, name, owned
        self._truncates = owned and stream.seekable()
        self._size = 0

    @classmethod
    def create(cls, path: Path, *, overwrite: bool) -> Self:
        """A new file, unbuffered. Raises OutputError; a file that has come into being meanwhile is not touched."""
        fresh = not overwrite and not (path.exists() and not path.is_file())
        try:
            return cls(io.FileIO(path, "xb" if fresh else "wb"), str(path), owned=True)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error

    def write(self, line: bytes) -> None:
        """One line, flushed. Raises ClosedOutputError when nobody reads it, OutputError when it cannot be written."""
        try:
            left = memoryview(line + b"\n")
            while left:
                left = left[self._stream.write(left) or 0 :]
            self._stream.flush()
        except BrokenPipeError as error:
            raise ClosedOutputError from error
        except OSError as error:
            self._take_back()
            raise OutputError(f"cannot write {self._name}: {error.strerror}; the lines before are complete") from error
        self._size += len(line) + 1

    def _take_back(self) -> None:
        """A full disk may have taken half a line."""
        if self._truncates:
            try:
                os.ftruncate(self._stream.fileno(), self._size)
            except OSError:
                return

    def close(self) -> None:
        """Close an own file; a borrowed stream stays open."""
        if self._owned:
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
