"""Lines in and out."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsbd_cli.data.jsonl import ClosedOutputError, LineWriter, check_new, read_lines
from dsbd_cli.errors import OutputError, UsageError


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
    stream = io.BytesIO(b'\xef\xbb\xbf{"a":1}\r\n\n  \n{"b":2}\n\xff\xfe\nlast')
    assert list(read_lines(stream)) == [(1, b'{"a":1}'), (4, b'{"b":2}'), (5, b"\xff\xfe"), (6, b"last")]


def test_a_very_long_line() -> None:
    line = b"x" * 20_000_000
    assert list(read_lines(io.BytesIO(line + b"\n"))) == [(1, line)]


def test_one_line_is_held_at_a_time() -> None:
    stream = io.BytesIO(b"a\nb\n")
    lines = read_lines(stream)
    assert next(lines) == (1, b"a")
    assert stream.tell() == 2


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
    with pytest.raises(UsageError, match="exists: name another file, or replace it with --overwrite"):
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
