"""Running untrusted SQL on a small in-memory database, read-only and within a budget."""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypedDict

STEPS_PER_CALL = 1000
MAX_CALLS = 2000
MAX_ROWS = 5000
MAX_VALUE_BYTES = 100_000

READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}

QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`""")
INNERMOST = re.compile(r"\([^()]*\)")
ORDER_BY = re.compile(r"\border\s+by\b", re.IGNORECASE)

Cell = int | float | str | bytes | None
Rows = list[tuple[Cell, ...]]


class TableData(TypedDict):
    """A table as plain data."""

    columns: list[str]
    rows: list[list[int | str]]


def connect(tables: Mapping[str, TableData]) -> sqlite3.Connection:
    """An in-memory database of the tables ({name: {columns, rows}}), closed to writing."""
    database = sqlite3.connect(":memory:")
    for name, table in tables.items():
        database.execute(f"CREATE TABLE {name} ({', '.join(table['columns'])})")
        marks = ", ".join("?" * len(table["columns"]))
        database.executemany(f"INSERT INTO {name} VALUES ({marks})", table["rows"])
    database.commit()
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    database.set_authorizer(allow)
    return database


def allow(action: int, *_: str | None) -> int:
    """Let a statement read and nothing else."""
    return sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY


def _budget_of_steps(calls: int = MAX_CALLS) -> Callable[[], bool]:
    """A budget that is the same on every machine: `calls` x STEPS_PER_CALL steps of SQLite's virtual machine."""
    left = calls

    def over() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    return over


def budget_of_time(seconds: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], bool]:
    """A budget for databases of any size."""
    end = clock() + seconds
    return lambda: clock() > end


def run(
    database: sqlite3.Connection, sql: str, *, over: Callable[[], bool] | None = None, max_rows: int = MAX_ROWS
) -> Rows | None:
    """The rows of one statement, or None where it fails, writes, or goes past the budget (`over` says so)."""
    return attempt(database, sql, over=over, max_rows=max_rows)[0]


def attempt(
    database: sqlite3.Connection, sql: str, *, over: Callable[[], bool] | None = None, max_rows: int = MAX_ROWS
) -> tuple[Rows | None, str | None]:
    """The rows of one statement as `run` gives them, or None and why there are none."""
    asked = over or _budget_of_steps()
    database.set_progress_handler(lambda: int(asked()), STEPS_PER_CALL)
    try:
        cursor = database.execute(sql)
        rows = cursor.fetchmany(max_rows + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        return None, " ".join(str(error).split())[:200] or type(error).__name__
    if cursor.description is None:
        return None, "it is no statement that returns rows"
    if len(rows) > max_rows:
        return None, f"it returns more than {max_rows} rows"
    return [tuple(round(v, 6) if isinstance(v, float) else v for v in row) for row in rows], None


def same_rows(found: Rows, gold: Rows, ordered: bool) -> bool:
    """Whether two results agree: column order and repeats count, row order only where `ordered`."""
    return found == gold if ordered else Counter(found) == Counter(gold)


def is_ordered(sql: str) -> bool:
    """Whether the statement itself, not a part in parentheses or quotes, has an ORDER BY."""
    bare = QUOTED.sub("''", sql)
    while bare != (bare := INNERMOST.sub(" ", bare)):
        pass
    return ORDER_BY.search(bare) is not None
