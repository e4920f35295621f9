"""The program of a process that runs untrusted SQL, and what it does with one statement.

`sandbox.SqlProcess` starts this file by its path, without the package, so that it starts quickly. It reads one JSON
request a line and answers each with one JSON line. Rows of a result do not leave the process, only digests of them:
equal digests stand for equal rows.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

STEPS_PER_CALL = 1000
MAX_VALUE_BYTES = 1_000_000
MAX_MEMORY_VALUE_BYTES = 100_000  # in a database of a record's own tables
MAX_SQL_BYTES = 100_000
MAX_RESULT_BYTES = 64 << 20
CELL_BYTES = 8  # that each value counts in addition to its own
MAX_ERROR = 200  # characters

ADDRESS_BYTES = 1 << 30  # of the process
HEAP_BYTES = 512 << 20  # of SQLite in it
FILE_BYTES = 256 << 20  # of a temporary file: a large sort needs one
GRACE_S = 2  # of processor time, beyond the time of a statement

READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
LIMITS = {
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL_BYTES,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 1_000_000,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}

Cell = int | float | str | bytes | None


class TableData(TypedDict):
    """A table as plain data."""

    columns: list[str]
    rows: list[list[int | str]]


class StatementRequest(TypedDict):
    """One statement. Exactly one of `path` and `tables` is None. `steps`: the most steps of SQLite's virtual machine,
    None: any."""

    path: str | None
    tables: Mapping[str, TableData] | None
    sql: str
    seconds: float
    steps: int | None
    max_rows: int


def allow(action: int, *_: str | None) -> int:
    """Let a statement read and nothing else."""
    return sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY


def connect(tables: Mapping[str, TableData]) -> sqlite3.Connection:
    """Make an in-memory database of the tables ({name: {columns, rows}}), closed to writing."""
    database = sqlite3.connect(":memory:")
    for name, table in tables.items():
        database.execute(f"CREATE TABLE {name} ({', '.join(table['columns'])})")
        marks = ", ".join("?" * len(table["columns"]))
        database.executemany(f"INSERT INTO {name} VALUES ({marks})", table["rows"])
    database.commit()
    _close_to_writing(database, MAX_MEMORY_VALUE_BYTES)
    return database


def open_database(path: Path) -> sqlite3.Connection:
    """Open a database read-only, and close it to every action but reading. Raises sqlite3.Error where the file is no
    database."""
    database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    database.text_factory = lambda data: data.decode(errors="replace")  # some of Spider's texts are not UTF-8
    _close_to_writing(database, MAX_VALUE_BYTES)
    try:
        database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        database.close()
        raise
    return database


def _close_to_writing(database: sqlite3.Connection, value_bytes: int) -> None:
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", f"hard_heap_limit = {HEAP_BYTES}"):
        database.execute(f"PRAGMA {pragma}").close()
    if sys.version_info >= (3, 12):  # 3.11 has no name for it; the file is opened read-only in any case
        database.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE)
    for limit, value in {**LIMITS, sqlite3.SQLITE_LIMIT_LENGTH: value_bytes}.items():
        database.setlimit(limit, value)
    database.set_authorizer(allow)


def budget(seconds: float, steps: int | None) -> Callable[[], str | None]:
    """Return a function to be called once in STEPS_PER_CALL steps. It returns why a statement has to end; None where it
    may go on."""
    end, calls = time.monotonic() + seconds, math.inf if steps is None else steps // STEPS_PER_CALL

    def over() -> str | None:
        nonlocal calls
        calls -= 1
        if calls < 0:
            return f"it took more than {steps} steps"
        return f"it ran longer than {seconds:g} s" if time.monotonic() > end else None

    return over


class Digest:
    """Two digests of rows, one that depends on their order and one that does not. Equal digests stand for equal rows.
    Floats are rounded to six decimals, and 4.0 is 4."""

    def __init__(self) -> None:
        self.bytes = self.rows = self._bag = 0
        self._ordered = hashlib.blake2b(digest_size=16)

    def add(self, row: tuple[Cell, ...]) -> None:
        """Add one more row."""
        row_digest = hashlib.blake2b(digest_size=16)
        for cell in row:
            data = _cell_bytes(cell)
            self.bytes += CELL_BYTES + len(data)
            row_digest.update(b"%d:" % len(data) + data)
        self.rows += 1
        self._ordered.update(row_digest.digest())
        self._bag += int.from_bytes(row_digest.digest(), "big")  # a sum, in which repeats count

    def answer(self) -> dict[str, str]:
        """Return both digests, in hexadecimal digits."""
        return {"ordered": self._ordered.hexdigest(), "bag": f"{self._bag:x}/{self.rows}"}


def _cell_bytes(cell: Cell) -> bytes:
    if isinstance(cell, float):
        cell = round(cell, 6)
        cell = int(cell) if cell.is_integer() else cell
    if isinstance(cell, str):
        return b"s" + cell.encode(errors="surrogatepass")
    return b"b" + cell if isinstance(cell, bytes) else repr(cell).encode()


def run(database: sqlite3.Connection, request: StatementRequest) -> dict[str, str]:
    """Run a statement. Return the digests of the rows that it returns, or `error`: why it has failed."""
    over, reasons = budget(request["seconds"], request["steps"]), list[str]()

    def ends() -> int:
        if reason := over():
            reasons.append(reason)
        return bool(reasons)

    database.set_progress_handler(ends, STEPS_PER_CALL)
    digest = Digest()
    try:
        cursor = database.execute(request["sql"])
        for row in cursor:
            digest.add(row)
            if digest.rows > request["max_rows"]:
                return {"error": f"it returns more than {request['max_rows']} rows"}
            if digest.bytes > MAX_RESULT_BYTES:
                return {"error": f"it returns more than {MAX_RESULT_BYTES >> 20} MB"}
        if cursor.description is None:
            return {"error": "it is no statement that returns rows"}
    except MemoryError:
        return {"error": "it needs more memory than a statement may take"}
    except (sqlite3.Error, sqlite3.Warning, ValueError, RecursionError) as error:
        return {"error": reasons[0] if reasons else " ".join(str(error).split())[:MAX_ERROR] or type(error).__name__}
    finally:
        database.set_progress_handler(None, 0)
    return digest.answer()


class _Databases:
    """The database of the last request, which stays open for the next one."""

    def __init__(self) -> None:
        self._key: object = None
        self._open: sqlite3.Connection | None = None

    def of(self, request: StatementRequest) -> sqlite3.Connection:
        """Return the database of a request. Raises sqlite3.Error or OSError where there is none."""
        path, tables = request["path"], request["tables"]
        if path is None:
            assert tables is not None
            key: object = tables
        else:
            status = os.stat(path)
            key = (path, status.st_dev, status.st_ino)
        if self._open is None or key != self._key:
            if self._open is not None:
                self._open.close()
                self._open = None
            self._open = connect(tables or {}) if path is None else open_database(Path(path))
            self._key = key
        return self._open


def _limit(number: int, most: int) -> None:
    """Set a limit of this process, at most to its hard limit."""
    hard = resource.getrlimit(number)[1]
    resource.setrlimit(number, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def serve() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # too large a file is an error of the statement
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    if sys.platform != "darwin":  # which has no such limit
        _limit(resource.RLIMIT_AS, ADDRESS_BYTES)
    databases = _Databases()
    _answer({})
    for line in sys.stdin.buffer:
        request: StatementRequest = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        # it ends a statement whose parent is gone; a parent that lives ends it earlier
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + request["seconds"]) + GRACE_S)
        try:
            database = databases.of(request)
        except (sqlite3.Error, sqlite3.Warning, OSError, ValueError, MemoryError) as error:
            _answer({"unreadable": " ".join(str(error).split())[:MAX_ERROR] or type(error).__name__})
            continue
        _answer(run(database, request))


def _answer(answer: dict[str, str]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
