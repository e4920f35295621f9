"""Lines in and out."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsbd_cli.errors import OutputError, UsageError
from dsbd_cli.io.lines.jsonl import ClosedOutputError, LineWriter, check_new, read_lines
from dsbd_cli.io.records.row import LongLine


class Slow(io.BytesIO):
    """Takes three bytes at a time, then fails."""

    def __init__(self, room: int, error: OSError) -> None:
        super().__init__()
        self.room, self.error = room, error

    def write(self, data: bytes) -> int:
        if self.tell() >= self.room:
            raise self.error
        return super().write(bytes(data)[:3])


def test_lines_are_numbered_and_blank_ones_skipped() -> None:
    stream = io.BytesIO(b'\xef\xbb\xbf{"a":1}\r\n\n  \r\n {"b":2} \n\xff\xfe\nlast')
    assert list(read_lines(stream)) == [(1, b'{"a":1}'), (4, b' {"b":2} '), (5, b"\xff\xfe"), (6, b"last")]


def test_a_very_long_line() -> None:
    line = b"x" * 10_000_000
    assert list(read_lines(io.BytesIO(line + b"\n"))) == [(1, line)]


class Chunks(io.RawIOBase):
    """Gives one chunk per read, as a pipe does, and notes how many were asked for."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks, self.reads = list(chunks), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:
        self.reads += 1
        chunk = self.chunks.pop(0) if self.chunks else b""
        size = min(len(chunk), len(buffer))
        buffer[:size] = chunk[:size]
        if size < len(chunk):
            self.chunks.insert(0, chunk[size:])
        return size


def chunked(*chunks: bytes) -> io.BufferedReader:
    return io.BufferedReader(Chunks(*chunks))


def test_a_line_is_given_as_soon_as_it_has_come() -> None:
    chunks = Chunks(b"a\nb", b"", b"never read")
    lines = read_lines(io.BufferedReader(chunks))
    assert next(lines) == (1, b"a")
    assert chunks.reads == 1
    assert list(lines) == [(2, b"b")]


@given(st.binary(max_size=60).map(lambda text: text.replace(b"x", b"\n")), st.lists(st.integers(1, 9)))
def test_chunks_do_not_matter(text: bytes, sizes: list[int]) -> None:
    chunks, left = [], text
    for size in sizes:
        chunks.append(left[:size])
        left = left[size:]
    parts = [chunk for chunk in [*chunks, left] if chunk]
    got = list(read_lines(chunked(*parts)))
    assert got == list(read_lines(io.BytesIO(text)))
    expected = enumerate(text.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
    assert got == [(number, line.removesuffix(b"\r")) for number, line in expected if line.strip()]


def test_too_long_a_line_is_passed_over_without_being_held() -> None:
    line = b"y" * 1_000
    lines = [b"x" * 100, b"x" * 101, line * 90_000, b"short", b"z" * 101]
    stream = chunked(*[line] * 3, b"\n", *(lines[0] + b"\n" + lines[1] + b"\nend", b"\n", lines[4]))
    assert list(read_lines(stream, limit=100)) == [
        (1, LongLine(3_000, b"y" * 256)),
        (2, lines[0]),
        (3, LongLine(101, lines[1])),
        (4, b"end"),
        (5, LongLine(101, lines[4])),
    ]
    tracemalloc.start()
    got = list(read_lines(chunked(*[line * 10] * 3_000, b"\nshort"), limit=1 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got == [(1, LongLine(30_000_000, b"y" * 256)), (2, b"short")]
    assert peak < 8 << 20


def test_limits_do_not_count_line_ends() -> None:
    stream = io.BytesIO(b"\xef\xbb\xbf12345\r\n12345\r\n123456\r\n")
    assert list(read_lines(stream, limit=5)) == [(1, b"12345"), (2, b"12345"), (3, LongLine(7, b"123456\r"))]


LINES = st.binary(min_size=1).filter(
    lambda line: b"\n" not in line and line.strip() == line and not line.startswith(b"\xef\xbb\xbf")
)


@given(st.lists(LINES))
def test_what_is_written_is_read_back(lines: list[bytes]) -> None:
    stream = io.BytesIO()
    with LineWriter(stream, "memory", owned=False) as writer:
        for line in lines:
            writer.write(line)
    assert [line for _, line in read_lines(io.BytesIO(stream.getvalue()))] == lines


def test_a_line_taken_in_pieces_is_whole() -> None:
    stream = Slow(100, OSError())
    LineWriter(stream, "slow", owned=False).write(b"0123456789")
    assert stream.getvalue() == b"0123456789\n"


def test_errors_of_the_stream() -> None:
    full = LineWriter(Slow(3, OSError(28, "No space left on device")), "out.jsonl", owned=False)
    with pytest.raises(OutputError, match=r"cannot write out\.jsonl: No space left on device; the lines before"):
        full.write(b"0123456789")
    with pytest.raises(ClosedOutputError):
        LineWriter(Slow(0, BrokenPipeError()), "pipe", owned=False).write(b"x")


def test_an_existing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    check_new(path, option="--output", overwrite=False)
    path.write_text("kept")
    with pytest.raises(UsageError, match="exists: name another file, or replace it with --existing overwrite"):
        check_new(path, option="--output", overwrite=False)
    with pytest.raises(OutputError, match="File exists"):
        LineWriter.create(path, overwrite=False)
    assert path.read_text() == "kept"
    check_new(path, option="--output", overwrite=True)
    with LineWriter.create(path, overwrite=True) as writer:
        writer.write(b"new")
    assert path.read_text() == "new\n"


def test_a_device_may_be_written_to() -> None:
    check_new(Path("/dev/null"), option="--output", overwrite=False)
    with LineWriter.create(Path("/dev/null"), overwrite=False) as writer:
        writer.write(b"x")


def test_an_appended_line_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """The size that a failed write is taken back to counts from where the writer began."""
    path = tmp_path / "out"
    path.write_bytes(b"kept\n")
    stream = io.FileIO(path, "rb+")
    stream.seek(0, io.SEEK_END)
    writer = LineWriter(stream, "out", owned=True)
    writer.write(b"more")
    stream.write(b"torn")
    writer._take_back()
    writer.close()
    assert path.read_bytes() == b"kept\nmore\n"
