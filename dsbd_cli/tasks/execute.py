"""Running untrusted SQL on a small in-memory database, read-only and within a budget."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from typing import TypedDict

STEPS_PER_CALL = 1000
MAX_CALLS = 2000
MAX_ROWS = 5000
MAX_VALUE_BYTES = 100_000

READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}

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


def run(database: sqlite3.Connection, sql: str) -> Rows | None:
    """The rows of a statement, or None where it fails, writes, or goes past the budget."""
    calls = 0

    def over_budget() -> int:
        nonlocal calls
        calls += 1
        return int(calls > MAX_CALLS)

    database.set_progress_handler(over_budget, STEPS_PER_CALL)
    try:
        cursor = database.execute(sql)
        rows = cursor.fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError):
        return None
    if cursor.description is None or len(rows) > MAX_ROWS:
        return None
    return [tuple(round(v, 6) if isinstance(v, float) else v for v in row) for row in rows]


def same_rows(found: Rows, gold: Rows, ordered: bool) -> bool:
    """Whether two results agree: column order and repeats count, row order only where `ordered`."""
    return found == gold if ordered else Counter(found) == Counter(gold)
