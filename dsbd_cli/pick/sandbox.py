"""Execution of untrusted SQL, read-only, in a process with limits that is started again when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsbd_cli.errors import DsbdError
from dsbd_cli.pick import sql_child
from dsbd_cli.pick.sql_child import MAX_SQL_BYTES, TableData

STEPS = 2_000_000  # of SQLite's virtual machine, where a statement of a record is run
MAX_ROWS = 1_000_000
START_S = 60.0
GRACE_S = 1.0  # in which a statement may end by itself, after its time
WAIT_S = 60.0
MAX_ANSWER_BYTES = 1 << 16

# Comments, quoted texts and names, which may lack their end at the end of the statement; parentheses; words; all else
TOKEN = re.compile(
    r"""(?P<skipped>\s++|--[^\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/|\Z))"""
    r"""|'[^']*+(?:'|\Z)|"[^"]*+(?:"|\Z)|`[^`]*+(?:`|\Z)|\[[^\]]*+(?:\]|\Z)|[()]|\w++|.""",
    re.DOTALL,
)


class UnreadableDatabaseError(Exception):
    """A file that is no database, or that cannot be opened."""


class SqlStoppedError(Exception):
    """A call of `stop` while, or before, a statement ran."""


@dataclass(frozen=True, slots=True)
class StatementResult:
    """Result of a statement, as digests: equal ones stand for equal rows. Floats count to six decimals."""

    ordered: str
    bag: str

    def same(self, other: StatementResult, *, ordered: bool) -> bool:
        """Return whether two results agree. Column order and repeats count, row order only where `ordered`."""
        return self.ordered == other.ordered if ordered else self.bag == other.bag


class SqlProcess:
    """A process that runs statements, one at a time. It is started by the first one, and ends with this object."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., SqlProcess] | None = None
        self._stopped = False
        self.starts = 0

    def run(
        self,
        database: Path | Mapping[str, TableData],
        sql: str,
        *,
        seconds: float,
        steps: int | None = None,
        max_rows: int = MAX_ROWS,
    ) -> StatementResult | str:
        """Run a statement: return its result, or why it has failed. It fails where it is no statement that returns
        rows, where it writes, or where it passes a limit.

        database: a file, or tables. seconds: time after which it is ended, whatever it does. steps: the most steps of
        SQLite's virtual machine, None: any. Raises UnreadableDatabaseError, SqlStoppedError, and DsbdError where no
        process can be started.
        """
        if len(sql) > MAX_SQL_BYTES:
            return f"it has {len(sql)} characters, but must have at most {MAX_SQL_BYTES}"
        request = {
            "path": str(database.resolve()) if isinstance(database, Path) else None,
            "tables": None if isinstance(database, Path) else database,
            "sql": sql,
            "seconds": seconds,
            "steps": steps,
            "max_rows": max_rows,
        }
        process = self._started()
        try:
            answer = _ask(process, json.dumps(request).encode() + b"\n", seconds + GRACE_S)
        except TimeoutError:
            self.close()
            return f"it ran longer than {seconds:g} s"
        except BaseException:
            self.close()  # its answer would be taken for that of the next statement
            raise
        if answer is None:
            self.close()
            if self._stopped:
                raise SqlStoppedError
            return _died(process)
        if "unreadable" in answer:
            raise UnreadableDatabaseError(answer["unreadable"])
        return answer["error"] if "error" in answer else StatementResult(answer["ordered"], answer["bag"])

    def stop(self) -> None:
        """End the statement that runs, and refuse others. It may be called from a signal handler."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process. The next statement starts another one."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the process once it is ready for a statement, so that its start is no part of a statement's time.
        Raises DsbdError where it does not start, SqlStoppedError."""
        if self._process is not None and self._process.poll() is not None:
            self.close()  # killed from outside while it was idle
        if self._process is None and not self._stopped:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", sql_child.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                process_group=0,  # Ctrl-C in a terminal does not reach it
            )
            self._process, self._end = process, weakref.finalize(self, _ended, process)
            self.starts += 1
            try:
                ready = _read(process, START_S)
            except BaseException:
                self.close()
                raise
            if ready is None and not self._stopped:
                self.close()
                raise DsbdError(f"the process that runs SQL does not start: {_died(process)}")
        if self._stopped:
            self.close()
            raise SqlStoppedError
        assert self._process is not None
        return self._process


def _ask(process: subprocess.Popen[bytes], request: bytes, seconds: float) -> dict[str, str] | None:
    """Send a request and return the answer; None where the process has died. Raises TimeoutError where none comes in
    time."""
    assert process.stdin is not None
    try:
        left = memoryview(request)
        while left:
            left = left[process.stdin.write(left) or 0 :]
    except BrokenPipeError:
        return None
    return _read(process, seconds)


def _read(process: subprocess.Popen[bytes], seconds: float) -> dict[str, str] | None:
    """Return the answer in one line of the process; None where it has died. Signals are handled meanwhile. Raises
    TimeoutError."""
    assert process.stdout is not None
    poll, end, line = select.poll(), time.monotonic() + seconds, b""
    poll.register(process.stdout, select.POLLIN)
    while not line.endswith(b"\n") and len(line) < MAX_ANSWER_BYTES:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if poll.poll(1000 * min(left, WAIT_S)):
            more = os.read(process.stdout.fileno(), MAX_ANSWER_BYTES)
            if not more:
                return None
            line += more
    answer: dict[str, str] = json.loads(line)
    return answer


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):
            stream.close()
    process.wait()


def _died(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"


def is_ordered(sql: str) -> bool:
    """Return whether the statement itself, not a part in parentheses, quotes or comments, has an ORDER BY. It is read
    once."""
    depth, before = 0, ""
    for token in TOKEN.finditer(sql):
        if token["skipped"] is not None:
            continue
        word = token[0].casefold()
        depth += (word == "(") - (word == ")")
        if word == "by" and before == "order" and depth == 0:
            return True
        before = word
    return False
