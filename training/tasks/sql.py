"""Questions about small schemas, each with the SQL that answers it."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing

from dsbd_cli.pick import sql_child
from dsbd_cli.pick.sandbox import STEPS
from dsbd_cli.pick.sql_child import Cell, TableData, connect
from training.tasks.generator import Drawn, Generator
from training.tasks.schema import Schema, make_schema
from training.tasks.sql_forms import Clause, ask


def _tables_of(schema: Schema) -> dict[str, TableData]:
    """The schema's tables as plain data."""
    return {t.name: {"columns": [c.name for c in t.columns], "rows": [list(r) for r in t.rows]} for t in schema.tables}


def _draw_schema(split: str, rng: random.Random, level: int) -> Schema:
    """A schema that fits the level: one table, two, or one to three."""
    if level == 0:
        return make_schema(split, rng, 1, 3)
    if level == 1:
        return make_schema(split, rng, 2, 3)
    return make_schema(split, rng, rng.choice((1, 2, 2, 2, 3)), 3)


def _rows(database: sqlite3.Connection, sql: str) -> list[tuple[Cell, ...]] | None:
    """The rows of a statement, floats to six decimals; None where it fails or takes more than STEPS steps."""
    over = sql_child.budget(float("inf"), STEPS)
    database.set_progress_handler(lambda: over() is not None, sql_child.STEPS_PER_CALL)
    try:
        rows: list[tuple[Cell, ...]] = database.execute(sql).fetchall()
    except sqlite3.Error:
        return None
    return [tuple(round(cell, 6) if isinstance(cell, float) else cell for cell in row) for row in rows]


def telling(database: sqlite3.Connection, sql: str) -> bool:
    """Whether the gold result has rows and some value that is neither 0 nor NULL."""
    rows = _rows(database, sql)
    return bool(rows) and any(value not in (0, None) for value in (rows or [()])[0])


def _draw_clause(schema: Schema, database: sqlite3.Connection, rng: random.Random, level: int) -> Clause:
    """A question whose gold result tells something."""
    while True:
        clause = ask(schema, rng, level)
        if telling(database, clause.sql):
            return clause


class SqlGenerator(Generator):
    """Records of task sql."""

    name = "sql"

    def draw(self, split: str, rng: random.Random, size: int, level: int) -> list[Drawn]:
        """Questions about one schema."""
        schema = _draw_schema(split, rng, level)
        tables = _tables_of(schema)
        with closing(connect(tables)) as database:
            clauses = [_draw_clause(schema, database, rng, level) for _ in range(size)]
        return [
            (
                f"schema: {schema.text()}\nquestion: {clause.words}\nsql:",
                clause.sql,
                {"tables": tables, "ordered": " ORDER BY " in clause.sql},
            )
            for clause in clauses
        ]
