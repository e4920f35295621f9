"""Running `dsbd` in this process or in another one, with a fake engine."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

import dsbd_cli
from dsbd_cli.cli.app import run
from tests.helpers import fake

ROOT = Path(__file__).parents[2]
ONE_ROW = b'{"prompt": "a"}\n'
HANG_S = 600  # only so that a fault does not hang the suite


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    """A stream that was asked for."""
    assert stream is not None
    return stream


def of_rule(rule: str) -> tuple[str, str]:
    """The option of a rule."""
    return ("--decode", "search") if rule == "search" else ("--verify", rule)


@contextmanager
def terminal(columns: int) -> Iterator[tuple[int, int]]:
    """Both ends of a terminal; the second is the program's."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    try:
        yield ours, theirs
    finally:
        os.close(ours)


def read(ours: int, until: str | None = None) -> str:
    """What comes until a pattern is in it, or to the end."""
    text = ""
    while until is None or not re.search(until, text):
        assert select.select([ours], [], [], HANG_S)[0], f"nothing more came after {text!r}"
        try:
            more = os.read(ours, 65536)
        except OSError:  # the other end is closed
            more = b""
        if not more:
            assert until is None, f"{until!r} is not in {text!r}"
            break
        text += more.decode()
    return text.replace("\r\n", "\n")


@dataclass
class Outcome:
    """What a command returned and wrote."""

    code: int
    out: str
    err: str
    loads: list[dict[str, object]] = field(default_factory=list)

    @property
    def records(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


class _Stream(io.TextIOWrapper):
    """A standard stream in memory; `tty` says what isatty answers."""

    def __init__(self, data: bytes = b"", *, tty: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", write_through=True)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    def text(self) -> str:
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode()


@pytest.fixture
def dsbd(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """dsbd("generate", "--num-beams", "2", lines=[...]) in this process; terminals as named. One row to answer where no
    lines are given, because without one nothing is loaded."""
    loads: list[dict[str, object]] = []
    module = fake.module(fake.fake_load(loads))
    monkeypatch.setitem(sys.modules, fake.MODULE, module)
    monkeypatch.setattr(dsbd_cli, "loading", module, raising=False)
    monkeypatch.delenv("DSBD_DEBUG", raising=False)
    monkeypatch.setenv("DSBD_TARGET", "builtin:target")  # named, so that no line says that nobody named one

    def call(*arguments: str, lines: list[object] | bytes = ONE_ROW, terminals: tuple[str, ...] = ()) -> Outcome:
        data = lines if isinstance(lines, bytes) else "".join(json.dumps(line) + "\n" for line in lines).encode()
        streams = {
            name: _Stream(data if name == "stdin" else b"", tty=name in terminals)
            for name in ("stdin", "stdout", "stderr")
        }
        with monkeypatch.context() as patch:
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            code = run(arguments)
        return Outcome(code, streams["stdout"].text(), streams["stderr"].text(), list(loads))

    return call


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.Popen[bytes]]:
    """A real `dsbd` process with the fake engine."""
    monkeypatch.setenv("DSBD_TARGET", "builtin:target")

    def heard() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def begin(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        command = [sys.executable, "-W", "error", "-m", "tests.helpers.fake", *arguments]
        pipes.setdefault("preexec_fn", heard)  # the suite itself may run under nohup
        return subprocess.Popen(command, cwd=ROOT, **pipes)

    return begin
