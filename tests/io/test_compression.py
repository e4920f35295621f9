"""Compressed files in and out."""

from __future__ import annotations

import gzip
import io
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard

from dsbd_cli.io.lines import jsonl
from dsbd_cli.io.lines.compression import DecompressionError, frame_maker, open_input
from dsbd_cli.io.lines.jsonl import LineWriter, read_lines

ROOT = Path(__file__).parents[2]
SUFFIXES = [".gz", ".zst"]


def compress(data: bytes, suffix: str) -> bytes:
    """By the format's own tool, not by ours."""
    return gzip.compress(data) if suffix == ".gz" else zstandard.ZstdCompressor().compress(data)


def content(path: Path) -> bytes:
    """By the format's own tool, not by ours."""
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    reader = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True)
    return reader.read()


@pytest.mark.parametrize("suffix", ["", *SUFFIXES])
def test_round_trip(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"out.jsonl{suffix}"
    lines = [b"line %d " % number + b"x" * (number % 700) for number in range(3_000)]
    with LineWriter.create(path, overwrite=False) as writer:
        for line in lines:
            writer.write(line)
    with open_input(path) as stream:
        assert [line for _, line in read_lines(stream)] == lines
    if suffix:
        assert content(path) == b"".join(line + b"\n" for line in lines)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_many_frames_of_any_size_in_one_file(suffix: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    parts = [rng.randbytes(rng.choice([0, 1, 50, 5_000, 300_000])) for _ in range(60)]
    path = tmp_path / f"in{suffix}"
    path.write_bytes(b"".join(compress(part, suffix) for part in parts))
    with open_input(path) as stream:
        assert stream.read() == b"".join(parts)
    path.write_bytes(b"")
    with open_input(path) as stream:
        assert stream.read() == b""


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_ends_in_the_middle_is_an_error_after_its_lines(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"in{suffix}"
    whole = compress(b"whole\n", suffix)
    for cut in (1, 5, 12):
        path.write_bytes(whole + compress(os.urandom(3_000), suffix)[:-cut])
        with open_input(path) as stream:
            lines = read_lines(stream)
            assert next(lines) == (1, b"whole")
            with pytest.raises(DecompressionError, match="the compressed data ends in the middle"):
                list(lines)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damaged_data_is_an_error(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"in{suffix}"
    path.write_bytes(b"plain text\n")
    with open_input(path) as stream, pytest.raises(DecompressionError, match="the data is damaged or not compressed"):
        stream.read()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_frame_that_swells_is_read_in_bounded_memory(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"in{suffix}"
    path.write_bytes(compress(b"x" * 100_000_000, suffix))
    tracemalloc.start()
    with open_input(path) as stream:
        size = sum(len(block) for block in iter(lambda: stream.read(1 << 16), b""))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 100_000_000
    assert peak < 80 << 20


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_lines_are_in_the_file_in_whole_frames(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once while they are slow, in frames of 256 while they are fast, and always after `flush`."""
    now = [1_000.0]
    monkeypatch.setattr(jsonl.time, "monotonic", lambda: now[0])
    path = tmp_path / f"out{suffix}"
    with LineWriter.create(path, overwrite=False) as writer:
        for number in range(3):
            now[0] += 1.5
            writer.write(b"slow %d" % number)
            assert content(path).count(b"\n") == number + 1
        for _ in range(255):
            writer.write(b"fast")
        assert content(path).count(b"\n") == 3
        writer.write(b"fast")
        assert content(path).count(b"\n") == 3 + 256
        writer.write(b"late")
        writer.flush()
        writer.flush()
        assert content(path).endswith(b"fast\nlate\n")
        writer.write(b"last")
    assert content(path).endswith(b"late\nlast\n")


def test_the_same_lines_give_the_same_bytes() -> None:
    for suffix in SUFFIXES:
        make = frame_maker(Path(f"x{suffix}"))
        assert make is not None
        assert make(b"data") == make(b"data")
    assert frame_maker(Path("x.jsonl")) is None


CHILD = """
import sys
from pathlib import Path
from dsbd_cli.io.lines.jsonl import LineWriter
writer = LineWriter.create(Path(sys.argv[1]), overwrite=False)
number = 0
while True:
    writer.write(b"line %d" % number)
    number += 1
"""


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_was_written_before_a_kill_can_be_read(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"out{suffix}"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], cwd=ROOT)
    end = time.monotonic() + 600  # only so that a fault does not hang the suite
    while time.monotonic() < end and not (path.exists() and path.stat().st_size > 20_000):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    lines = []
    with open_input(path) as stream, suppress(DecompressionError):  # the last frame may be torn
        for _, line in read_lines(stream):
            lines.append(line)
    assert len(lines) > 256
    assert lines == [b"line %d" % number for number in range(len(lines))]


class Full(io.BytesIO):
    def write(self, _: object) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_under_a_frame() -> None:
    writer = LineWriter(Full(), "out.gz", owned=False, frame=frame_maker(Path("out.gz")))
    with pytest.raises(jsonl.OutputError, match=r"cannot write out\.gz: No space left on device"):
        writer.write(b"x")
    writer.close()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_endings_may_be_in_capitals(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"out.jsonl{suffix.upper()}"
    with LineWriter.create(path, overwrite=False) as writer:
        writer.write(b"one")
    make = frame_maker(Path(f"x{suffix}"))
    assert make is not None
    assert path.read_bytes() == make(b"one\n")
    with open_input(path) as stream:
        assert stream.read() == b"one\n"
