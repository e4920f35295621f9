"""What an earlier run has left: torn lines, failed rows, settings beside the file, and the lock."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dsbd_cli.errors import OutputError, UsageError
from dsbd_cli.io.lines.lock import open_locked
from dsbd_cli.io.lines.replace import replacing, write_atomically
from dsbd_cli.io.lines.resume import (
    TAIL_BYTES,
    DoneRows,
    drop_failed,
    finished_steps,
    read_done,
    read_run,
    record_digest,
    settings_file,
    truncate_at,
    whole_size,
    write_settings,
)


def opened(path: Path, data: bytes) -> io.FileIO:
    path.write_bytes(data)
    return io.FileIO(path, "rb+")


def native(row_id: str, key: str, *, failed: bool = False) -> bytes:
    return json.dumps({"id": row_id, "key": key, **({"error": {"type": "X"}} if failed else {})}).encode() + b"\n"


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (b"", b""),
        (b"{}\n", b"{}\n"),
        (b'{}\n{"a', b"{}\n"),
        (b'{"a', b""),
        (b"{}\n\0\0\0", b"{}\n"),
        (b'{}\n{"a\0\0\n', b"{}\n"),
        (b"{}\n" + b"x" * (2 * TAIL_BYTES + 5), b"{}\n"),
        (b"{}\n" + b"x" * TAIL_BYTES + b"\n", b"{}\n" + b"x" * TAIL_BYTES + b"\n"),
    ],
)
def test_a_torn_end_goes_and_nothing_else(tmp_path: Path, data: bytes, kept: bytes) -> None:
    """Guards against a cut too much at the edge of a block of the backward search."""
    with opened(tmp_path / "out", data) as stream:
        assert whole_size(stream) == len(kept)
        assert (tmp_path / "out").read_bytes() == data
        assert truncate_at(stream, len(kept)) == len(data) - len(kept)
        assert stream.tell() == len(kept)
    assert (tmp_path / "out").read_bytes() == kept


def test_rows_are_known_by_id_and_key_and_counted(tmp_path: Path) -> None:
    openai = {"id": "batch_req_k3", "custom_id": "c", "response": {}, "error": {"code": "x"}}
    data = native("a", "k1") * 2 + native("b", "k2", failed=True) + json.dumps(openai).encode() + b"\n"
    with opened(tmp_path / "out", data) as stream:
        done = read_done(stream, tmp_path / "out", len(data))
        assert read_done(stream, tmp_path / "out", len(data) - 1).failed.total() == 1
    assert (done.answered.total(), done.failed.total()) == (2, 2)
    assert [done.take("a", "k1") for _ in range(3)] == ["answered", "answered", None]
    assert done.take("b", "k1") is None, "the row has changed"
    assert done.take("b", "k2") == "failed"
    assert (done.answered.total(), done.failed.total()) == (0, 1)
    assert done.take("c", "k3") == "failed"
    assert done.has_id("c")
    assert not done.has_id("d")


def test_an_answer_counts_before_an_error_and_an_id_may_be_unknown(tmp_path: Path) -> None:
    data = native("a", "k", failed=True) + native("a", "k") + b'{"id": null, "key": "k", "error": {}}\n'
    with opened(tmp_path / "out", data) as stream:
        done = read_done(stream, tmp_path / "out", len(data))
        assert [done.take("a", "k") for _ in range(3)] == ["answered", "failed", None]
        assert [done.take(None, "k") for _ in range(2)] == ["failed", None]
    with opened(tmp_path / "out", b'{"id": null, "key": "k"}\n') as stream, pytest.raises(UsageError, match="line 1"):
        read_done(stream, tmp_path / "out", 100)


@pytest.mark.parametrize("line", [b"[]", b"{}", b'{"id": 3, "key": "k"}', b"not json", b"\xff"])
def test_a_line_of_somebody_else_is_named(tmp_path: Path, line: bytes) -> None:
    with opened(tmp_path / "out", native("a", "k") + line + b"\n") as stream, pytest.raises(UsageError, match="line 2"):
        read_done(stream, tmp_path / "out", 10**6)


def test_failed_rows_are_dropped_in_one_step_and_the_lock_moves_on(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(native("a", "1") + native("b", "2", failed=True) + native("c", "3"))
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    stream = open_locked(tmp_path / "link", create_only=False)
    fresh, count = drop_failed(stream, tmp_path / "link")
    with fresh:
        assert count == 1
        assert path.read_bytes() == native("a", "1") + native("c", "3")
        assert (tmp_path / "link").is_symlink()
        assert path.stat().st_mode & 0o777 == 0o640
        with pytest.raises(OutputError, match="another process"):
            open_locked(path, create_only=False)
        assert drop_failed(fresh, path) == (fresh, 0)
        fresh.seek(0, os.SEEK_END)
        fresh.write(b"{}\n")
    assert path.read_bytes().endswith(b"{}\n")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["link", "out"]


def test_as_many_failed_records_are_dropped_as_are_named(tmp_path: Path) -> None:
    path, data = tmp_path / "out", native("a", "1", failed=True) * 2 + native("b", "2", failed=True) + native("a", "1")
    with opened(path, data) as stream:
        fresh, count = drop_failed(stream, path, Counter({record_digest("a", "1"): 1}))
    with fresh:
        assert (count, path.read_bytes()) == (1, data.removeprefix(native("a", "1", failed=True)))
        assert drop_failed(fresh, path, Counter()) == (fresh, 0)


def test_settings_stand_beside_the_file(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(UsageError, match="missing"):
        read_run(output, "--existing resume")
    write_settings(output, {"seed": 1, "stop": ["\n"]}, 123)
    assert settings_file(output).name == "out.jsonl.dsbd-run"
    assert read_run(output, "--existing resume") == ({"seed": 1, "stop": ["\n"]}, 123, None)
    for text in ("", "[]", "{}", '{"schema": "dsbd.run/1"}', '{"schema": "dsbd.run/9", "settings": {}, "created": 1}'):
        settings_file(output).write_text(text)
        with pytest.raises(UsageError, match="not what dsbd wrote"):
            read_run(output, "--existing resume")


def test_a_pipe_is_written_to_and_a_link_stays_one(tmp_path: Path) -> None:
    """Guards a report that takes the place of the pipe, the device or the link that was named."""
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_bytes(b"old")
    link.symlink_to(real)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, b"report")
    assert os.read(reader, 100) == b"report"
    os.close(reader)
    assert pipe.is_fifo()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["link", "pipe", "real"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x"
    with pytest.raises(OutputError, match="No such file"):
        write_atomically(path, b"1")
    write_atomically(tmp_path / "x", b"1")
    write_atomically(tmp_path / "x", b"2")
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("x", b"2")]


def test_a_disk_with_room_for_a_part_keeps_the_old_file(tmp_path: Path) -> None:
    """Guards a report or a record that is cut off without a word: one call writes what there is room for."""
    path = tmp_path / "x"
    write_atomically(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OutputError, match=r"cannot write .*x: File too large"):
            write_atomically(path, bytes(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("x", b"old")]


def test_of_two_writers_of_a_new_file_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with replacing(path) as stream:
        with pytest.raises(OutputError, match=r"/x is being written by another process"):
            write_atomically(path, b"2")
        stream.write(b"1")
    stream.close()
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("x", b"1")]


STEP = {"schema": "dsbd.step/1"}


def test_steps_of_a_row_without_a_record_are_cut(tmp_path: Path) -> None:
    done = DoneRows()
    done.add("a", "k", failed=False)
    steps = [
        json.dumps(STEP | {"id": row_id, "iteration": iteration}, separators=(",", ":")).encode() + b"\n"
        for iteration, row_id in enumerate("aabb")
    ]
    with opened(tmp_path / "steps", b"".join(steps) + b'{"schema":"dsbd.step/1","id"') as stream:
        assert finished_steps(stream, Path("steps"), done) == len(b"".join(steps[:2]))


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_steps_are_cut_behind_the_last_row_with_a_record(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever blocks of the file end, and in one pass: a file without such a row may have millions of lines."""
    monkeypatch.setattr("dsbd_cli.io.lines.resume.TAIL_BYTES", block)
    done = DoneRows()
    done.add("a", "k", failed=False)
    lines = [
        json.dumps(STEP | {"id": row_id, "x": "y" * size}).encode() + b"\n" for size, row_id in enumerate("bbab" * 3)
    ]
    for kept in (0, 3, 11):
        held = b"".join(lines[:kept] + [line for line in lines[kept:] if b'"b"' in line])
        with opened(tmp_path / f"steps{kept}", held) as stream:
            assert finished_steps(stream, Path("steps"), done) == len(b"".join(lines[:kept]))


def test_steps_of_another_run_are_read_once(tmp_path: Path) -> None:
    """Guards against a block of the file for each of its lines, which took hours."""
    held = b'{"schema":"dsbd.step/1","id":"b"}\n' * 200_000
    with opened(tmp_path / "steps", held) as stream, _Counted(stream) as counted:
        assert finished_steps(counted, Path("steps"), DoneRows()) == 0
    assert counted.bytes < 3 * len(held)


@pytest.mark.parametrize(
    "held", ["my notes", "my notes\n", "SQLite format 3\0", '{"id": "a"}\n', '{"schema":"dsbd.output/1","id":"a"}\n']
)
def test_lines_that_are_no_steps_are_not_cut(held: str, tmp_path: Path) -> None:
    said = "--set stats=steps holds lines that are no steps of dsbd"
    with opened(tmp_path / "steps", held.encode()) as stream, pytest.raises(UsageError, match=said):
        finished_steps(stream, Path("steps"), DoneRows())


class _Counted(io.FileIO):
    """The same file, with the bytes that were read of it."""

    def __init__(self, stream: io.FileIO) -> None:
        super().__init__(os.dup(stream.fileno()), "rb+")
        self.bytes = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size) or b""
        self.bytes += len(data)
        return data


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Guards against a lock file that outlives a kill -9."""
    path = tmp_path / "out"
    code = (
        "import sys; from pathlib import Path; from dsbd_cli.io.lines.lock import open_locked\n"
        "stream = open_locked(Path(sys.argv[1]), create_only=True); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(OutputError, match="is being written by another process"):
            open_locked(path, create_only=False)
        process.kill()
        process.wait()
    open_locked(path, create_only=False).close()
    with pytest.raises(OutputError, match="File exists"):
        open_locked(path, create_only=True)
