"""Lines from files and pipes, read ahead by a thread."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest

from dsbd_cli.errors import DsbdError
from dsbd_cli.io.lines import line_reader as module
from dsbd_cli.io.lines.compression import open_input
from dsbd_cli.io.lines.jsonl import read_lines
from dsbd_cli.io.lines.line_reader import LineReader
from dsbd_cli.io.records.row import LongLine

WAIT_S = 600.0  # only so that a fault does not hang the suite


@contextmanager
def pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Reading and writing end."""
    ends = os.pipe()
    with os.fdopen(ends[0], "rb") as reading, os.fdopen(ends[1], "wb", buffering=0) as writing:
        yield reading, writing


def next_line(items: Iterator[tuple[int, bytes | LongLine] | None]) -> tuple[int, bytes | LongLine]:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if (item := next(items)) is not None:
            return item
    raise AssertionError("no line came")


def input_threads() -> int:
    return sum(thread.name == "dsbd-input" for thread in threading.enumerate())


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a\n\nb\r\nc")
    with path.open("rb") as stream, LineReader(stream, "in") as reader:
        assert [item for item in reader if item is not None] == [(1, b"a"), (3, b"b"), (4, b"c")]
    assert input_threads() == 0


def test_a_stream_in_memory() -> None:
    with LineReader(io.BytesIO(b"a\nb"), "memory") as reader:
        assert [item for item in reader if item is not None] == [(1, b"a"), (2, b"b")]


def test_a_slow_producer_is_answered_line_by_line() -> None:
    """Each line is had before the next one is written, and meanwhile the consumer is told that nothing is ready."""
    with pipe() as (reading, writing), LineReader(reading, "pipe") as reader:
        items = iter(reader)
        assert next(items) is None
        for number in range(1, 6):
            writing.write(b"line %d\nhalf" % number)
            assert next_line(items) == (number, (b"half" if number > 1 else b"") + b"line %d" % number)
            assert next(items) is None
        writing.close()
        assert next_line(items) == (6, b"half")
        assert list(items) == []


def test_who_computes_meanwhile_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is busy asks again after each step; only one that comes back at once has time to wait."""
    waits: list[float] = []
    take = LineReader._take
    monkeypatch.setattr(LineReader, "_take", lambda self, wait: waits.append(wait) or take(self, wait))
    with pipe() as (reading, _), LineReader(reading, "pipe") as reader:
        items = iter(reader)
        for pause in (0, 0, 0.05, 0.05):
            time.sleep(pause)
            assert next(items) is None
    assert waits[0] == module.WAIT_S
    assert waits[2:] == [0.0, 0.0]


def test_a_fast_producer_is_never_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", WAIT_S)  # on a busy machine the thread may be late
    path = tmp_path / "in"
    path.write_bytes(b"x" * 200 + b"\n" + b"y" * 100 + b"\n" * 3 + b"z\n" * 100_000)
    with path.open("rb") as stream, LineReader(stream, "in") as reader:
        assert None not in list(reader)


def test_memory_is_bounded_for_a_slow_consumer(tmp_path: Path) -> None:
    path = tmp_path / "in"
    size = 60 << 20
    path.write_bytes((b"x" * 999 + b"\n") * (size // 1000))
    tracemalloc.start()
    with path.open("rb") as stream, LineReader(stream, "in") as reader:
        items = iter(reader)
        next_line(items)
        time.sleep(0.5)
        for _ in range(3):
            next_line(items)
        held = reader._held_bytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < module.MAX_HELD_BYTES + (1 << 18)
    assert peak < 16 << 20


def test_a_long_line_comes_alone_and_a_longer_one_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with path.open("wb") as stream:
        for size in (10_000_000, 12_000_000):
            stream.write(b"x" * size + b"\n")
        stream.write(b"end")
    with path.open("rb") as stream, LineReader(stream, "in", read=partial(read_lines, limit=10_000_000)) as reader:
        items = [item for item in reader if item is not None]
    assert items == [(1, b"x" * 10_000_000), (2, LongLine(12_000_000, b"x" * 256)), (3, b"end")]


def test_a_consumer_that_stops_early_leaves_no_thread(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * 99 + b"\n" + b"line\n" * 1_000_000)
    with path.open("rb") as stream, LineReader(stream, "in") as reader:
        next_line(iter(reader))
    assert input_threads() == 0
    with pipe() as (reading, writing):
        with LineReader(reading, "pipe") as reader:
            writing.write(b"a\nb")
            next_line(iter(reader))
            with pytest.raises(ZeroDivisionError), reader:
                raise ZeroDivisionError
        assert input_threads() == 0
        assert list(reader) == []


class Failing(io.BytesIO):
    """A disk that goes bad after the first read."""

    def read1(self, size: int | None = -1, /) -> bytes:
        if self.tell():
            raise OSError(5, "Input/output error")
        return super().read1(8)


def test_a_read_error_comes_after_the_lines_before_it() -> None:
    message = r"^cannot read disk behind line 2: Input/output error$"
    got: list[object] = []
    with pytest.raises(DsbdError, match=message), LineReader(Failing(b"1\n2\n3333333\n"), "disk") as reader:
        got += [item for item in reader if item is not None]
    assert got == [(1, b"1"), (2, b"2")]


def test_another_error_is_not_hidden_by_a_read_error() -> None:
    def fail() -> None:
        with LineReader(Failing(b"1\n2\n3333333\n"), "disk") as reader:
            list(reader)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_read_error_can_be_asked_for() -> None:
    with pytest.raises(DsbdError, match="torn behind line 0: it ends in the middle"):  # noqa: SIM117
        with LineReader(Torn(), "torn") as reader:
            assert [item for item in reader if item is not None] == []


def test_a_fault_of_ours_does_not_pass_for_the_end_of_the_input() -> None:
    def lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | LongLine]]:
        yield 1, stream.readline()
        raise OverflowError("date value out of range")

    message = r"^cannot read table behind line 1: OverflowError: date value out of range \(unexpected\)$"
    with pytest.raises(DsbdError, match=message), LineReader(io.BytesIO(b"1\n"), "table", read=lines) as reader:
        assert [item for item in reader if item is not None] == [(1, b"1\n")]


class Torn(io.BytesIO):
    def read1(self, size: int | None = -1, /) -> bytes:
        raise OSError("it ends in the middle")


CHILD = """
import sys
from dsbd_cli.io.lines.line_reader import LineReader
with LineReader(sys.stdin.buffer, "standard input") as source:
    for item in source:
        if item is not None:
            break
print(item)
"""


def test_a_process_can_end_while_its_standard_input_is_open() -> None:
    """A thread inside a read of standard input would abort the interpreter at its end."""
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdin.write(b"one\n")
    child.stdin.flush()
    assert child.stdout.read() == b"(1, b'one')\n"
    assert child.stderr.read() == b""
    assert child.wait(WAIT_S) == 0
    for stream in (child.stdin, child.stdout, child.stderr):
        stream.close()


def test_a_compressed_file(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(b"a\nb\n"))
    with open_input(path) as stream, LineReader(stream, "in.gz") as reader:
        assert [item for item in reader if item is not None] == [(1, b"a"), (2, b"b")]
