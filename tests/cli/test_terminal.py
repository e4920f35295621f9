"""What a person sees: the live line, and messages on terminals of any width."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsbd_cli.cli.options.options import FileOptions, TalkOptions
from dsbd_cli.cli.run.files import count_rows
from dsbd_cli.cli.run.progress import Reporter
from dsbd_cli.cli.run.shard import Shard
from dsbd_cli.errors import InvalidRowError
from tests.cli.conftest import pipe, read, terminal

Start = Callable[..., subprocess.Popen[bytes]]

SLOW = b'{"prompt": "slow"}\n'


def test_the_live_line_counts_tokens_of_rows_that_are_not_done(start: Start) -> None:
    with terminal(80) as (ours, theirs):
        process = start("generate", "--batch-size", "1", stderr=theirs)
        os.close(theirs)
        pipe(process.stdin).write(SLOW)
        pipe(process.stdin).flush()
        shown = read(ours, r"0 rows, [1-9]\d* tokens")
        assert " left" not in shown
        process.kill()
        process.communicate()


def test_the_log_counts_tokens_of_rows_that_are_not_done(start: Start) -> None:
    process = start("generate", "--batch-size", "1", "--set", "log=json", env={**os.environ, "FAKE_LOG_S": "0.2"})
    pipe(process.stdin).write(SLOW)
    pipe(process.stdin).flush()
    line = b""
    while not re.search(rb"0 rows, [1-9]\d* tokens.*\"unfinished_tokens\": [1-9]", line):
        line = pipe(process.stderr).readline()
        assert line, "the run ended before such a line came"
    process.kill()
    process.communicate()


def reporter(rows: int, *, input_bytes: int = 1000, row_bytes: int = 10, steps: int = 0) -> Reporter:
    """After so many rows of 20 tokens; steps: of rows under way."""
    made = Reporter(TalkOptions(quiet=True), Path("out.jsonl"), says_why=True)
    made.input_bytes = input_bytes
    made.begin("", steps=lambda: made.totals.stats.steps + steps)
    for row in range(rows):
        made.totals.tokens += 20
        made.totals.stats.steps += 20
        made.at(row_bytes * (row + 1))
        made.row(row, str(row), None)
    made.totals.started -= 100  # seconds ago
    return made


def left(made: Reporter) -> str:
    return made._share_done()


def test_the_time_left_is_told_when_it_can_be_and_does_not_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 s for so many rows: the time left follows from the tokens, and those of rows under way count."""
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0)
    assert left(reporter(0)) == "0% done"
    assert left(reporter(0, steps=500)) == "0% done", "no row has said how long a row is"
    assert left(reporter(9)) == "9% done"
    assert left(reporter(20)) == "20% done, 0:06:40 left"
    assert left(reporter(20, steps=100)) == "20% done, 0:05:00 left", "500 of 2,000 tokens took 100 s"
    assert left(reporter(99, steps=400)) == "99% done", "the last row is longer than any before"
    failed = reporter(0)
    for number in range(20):
        failed.at(10 * number + 10)
        failed.row(number, str(number), InvalidRowError("x"))
    assert left(failed) == "20% done", "refused rows tell nothing of the time of the others"


def test_the_share_and_the_time_left_go_by_rows_where_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a share by bytes, which the one long row in front makes wrong."""
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0)
    made = reporter(20, row_bytes=45)
    assert left(made) == "90% done, 0:00:11 left"
    made.input_rows = 80
    assert left(made) == "20 of 80 rows, 0:05:00 left"
    made.totals.skipped = 20
    assert left(made) == "40 of 80 rows, 0:03:20 left", "what an earlier run has done says nothing of the pace"


def test_rows_of_the_input_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\n{"prompt": "a"}\r\n\n  \n{"prompt": "b"}\n{"prompt": "c"}')
    files, size = FileOptions(input=path), path.stat().st_size
    assert count_rows(files, size) == 3
    assert [Shard(part, 2).rows(3) for part in (0, 1)] == [2, 1]
    assert count_rows(files, None) is None
    assert count_rows(FileOptions(), None) is None
    monkeypatch.setattr("dsbd_cli.cli.run.files.MAX_COUNTED_BYTES", size - 1)
    assert count_rows(files, size) is None


def test_a_terminal_shows_the_share_by_rows(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' * 3 + SLOW)
    with terminal(100) as (ours, theirs):
        process = start("generate", "--batch-size", "1", "-i", str(path), stderr=theirs)
        os.close(theirs)
        read(ours, r"3 of 4 rows, \d+ tokens")
        process.kill()
        process.communicate()


@pytest.mark.parametrize("columns", [8, 40, 80])  # 8: the first word does not fit behind the program's name
def test_messages_are_broken_at_spaces_only(start: Start, columns: int) -> None:
    path = "/no-such-folder-" + "x" * 60 + "/prompts.jsonl"
    with terminal(columns) as (ours, theirs):
        process = start("generate", "--input", path, stdin=subprocess.DEVNULL, stderr=theirs)
        os.close(theirs)
        text = read(ours)
        process.communicate()
    words = f"dsbd: error: --input {path} cannot be read: No such file or directory".split()
    assert text.split() == words
    first, *others = text.splitlines()
    assert first.startswith("dsbd: error:")
    assert all(len(line) <= columns or len(line.split()) == 1 for line in others)
    assert len(first) <= columns or first == "dsbd: error:"


def test_the_command_that_goes_on_is_not_broken(start: Start, tmp_path: os.PathLike[str]) -> None:
    """Guards against a command that cannot be copied from a narrow terminal."""
    output = os.path.join(tmp_path, "out.jsonl")
    with terminal(40) as (ours, theirs):
        process = start("generate", "-o", output, "--set", "max-errors=1", stderr=theirs)
        os.close(theirs)
        pipe(process.stdin).write(b"broken\n")
        pipe(process.stdin).close()
        process.stdin = None
        text = read(ours)
        process.communicate()
    assert f"dsbd generate -o {output} --set max-errors=1 --existing resume\n" in text


@pytest.mark.parametrize("where", ["terminal", "pipe"])
def test_a_name_cannot_steer_the_terminal(start: Start, tmp_path: os.PathLike[str], where: str) -> None:
    """Ids, fields and file names stand in messages: guards a title, a colour or a bidirectional override in them."""
    name = "\x1b]0;owned\x07\x9b31m\u202e\u2028"
    row = json.dumps({"id": name, "prompt": "fail"}) + "\n"
    output = os.path.join(tmp_path, f"{name}.jsonl")
    call = ("generate", "-o", output, "--set", "log=verbose", "--set", "max-errors=1")
    if where == "pipe":
        process = start(*call)
        text = process.communicate(row.encode())[1].decode()
    else:
        with terminal(300) as (ours, theirs):
            process = start(*call, stderr=theirs)
            os.close(theirs)
            pipe(process.stdin).write(row.encode())
            pipe(process.stdin).close()
            process.stdin = None
            text = read(ours)
            process.communicate()
    shown = "\\x1b]0;owned\\x07\\x9b31m\\u202e\\u2028"
    assert f"(id {shown})" in text
    assert f"{shown}.jsonl" in text
    assert not set(text) & set("\x07\x9b\u202e\u2028")
    assert "\x1b]" not in text
