"""Compressed input and output, known by the suffix .gz or .zst. Both formats are sequences of independent frames."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

COMPRESSED = (".gz", ".zst")
PIECE_BYTES = 1 << 10  # read at a time when compressed: bounds the decompressed size (32 MiB at worst)
BLOCK_BYTES = 1 << 20  # decompressed at a time when a file is only checked
GZIP_FORMAT = 31  # zlib's number for a gzip header and trailer


class DecompressionError(OSError):
    """The compressed data is damaged or ends in the middle."""


class _Frame(Protocol):
    """A decompressor of one frame (gzip: member)."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def compression(path: Path) -> str | None:
    """Return the ending of a compressed file's name in lower case, `.gz` or `.zst`; None for a plain file."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else None


def ending(path: Path) -> str:
    """Return the ending of a name before .gz or .zst, in lower case: `.csv` for rows.CSV.gz."""
    plain = path.with_suffix("") if compression(path) else path
    return plain.suffix.lower()


def open_input(path: Path) -> BinaryIO:
    """Open a file to read bytes from, decompressed if its name ends in .gz or .zst. Raises OSError."""
    make: Callable[[], _Frame]
    kind = compression(path)
    if kind == ".gz":
        make = partial(zlib.decompressobj, GZIP_FORMAT)
    elif kind == ".zst":
        import zstandard

        make = zstandard.ZstdDecompressor().decompressobj
    else:
        return path.open("rb")
    return io.BufferedReader(_Decompressing(path.open("rb"), make))


def check_whole(path: Path) -> None:
    """Read a compressed file once to its end, a block at a time. Raises DecompressionError if it is damaged or cut
    off."""
    with open_input(path) as stream:
        while stream.read(BLOCK_BYTES):
            pass


def frame_maker(path: Path) -> Callable[[bytes], bytes] | None:
    """Return a function that makes one whole frame of some bytes, for an output of this name; None for a plain file.

    The same bytes give the same frame.
    """
    kind = compression(path)
    if kind == ".gz":
        return lambda data: gzip.compress(data, compresslevel=6, mtime=0)
    if kind == ".zst":
        import zstandard

        return zstandard.ZstdCompressor(level=3, write_checksum=True).compress
    return None


class _Decompressing(io.RawIOBase):
    """A stream of the decompressed content of all frames of a file, one after another.

    Unlike the readers of gzip and zstandard it limits the memory that a frame with a large content takes, and it raises
    an error for both formats if the file ends in the middle of a frame.
    """

    def __init__(self, stream: BinaryIO, make: Callable[[], _Frame]) -> None:
        self._stream, self._make = stream, make
        self._frame: _Frame | None = None
        self._data, self._given = b"", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer with decompressed bytes, and return their number. Raises DecompressionError."""
        while self._given == len(self._data):
            piece = self._left() or self._stream.read(PIECE_BYTES)
            if not piece:
                if self._frame is not None:
                    raise DecompressionError("the compressed data ends in the middle")
                return 0
            if self._frame is None:
                self._frame = self._make()
            self._data, self._given = self._decompressed(self._frame, piece), 0
        view = memoryview(buffer).cast("B")
        size = min(len(view), len(self._data) - self._given)
        view[:size] = self._data[self._given : self._given + size]
        self._given += size
        return size

    def _left(self) -> bytes:
        """Return the bytes after a frame that has just ended, and forget that frame; b"" if none has ended."""
        if self._frame is None or not self._frame.eof:
            return b""
        left, self._frame = self._frame.unused_data, None
        return left

    def _decompressed(self, frame: _Frame, piece: bytes) -> bytes:
        try:
            return frame.decompress(piece)
        except Exception as error:  # zlib.error and ZstdError have no common base but this
            raise DecompressionError(f"the data is damaged or not compressed ({error})") from None

    def close(self) -> None:
        self._stream.close()
        super().close()
