"""Small random schemas with the rows that fill them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from training.tasks.words import (
    COLUMN_MODIFIERS,
    NUMBER_NOUNS,
    TABLE_MODIFIERS,
    TABLE_NOUNS,
    TEXT_NOUNS,
    compound,
    draw_name,
    proper_name,
)

ROWS = 24

Row = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column and the values that its rows draw from; keys have none."""

    name: str
    kind: str
    values: tuple[int | str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table: the primary key first, the foreign key (if any) second."""

    name: str
    parent: str | None
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def key(self) -> str:
        """The primary key's name."""
        return f"{self.name}_id"

    def of_kind(self, kind: str) -> list[Column]:
        """The columns of a kind: number or text."""
        return [column for column in self.columns if column.kind == kind]

    def plain_columns(self) -> list[Column]:
        """The columns that are not keys."""
        return [column for column in self.columns if column.kind != "key"]


@dataclass(frozen=True, slots=True)
class Schema:
    """Tables in the order shown; a child names its parent."""

    tables: tuple[Table, ...]

    def text(self) -> str:
        """The schema as prompts show it."""
        shown = [f"{t.name} ( {', '.join(c.name for c in t.columns)} )" for t in self.tables]
        return "; ".join(shown)

    def pairs(self) -> list[tuple[Table, Table]]:
        """Every (parent, child)."""
        by_name = {table.name: table for table in self.tables}
        return [(by_name[t.parent], t) for t in self.tables if t.parent is not None]


def _number_column(split: str, rng: random.Random, taken: set[str]) -> Column:
    """A number column: as many distinct values as rows, so that sorting has no ties."""
    name = draw_name(split, lambda: compound(rng, COLUMN_MODIFIERS, NUMBER_NOUNS), taken)
    return Column(name, "number", tuple(rng.sample(range(3, 100), ROWS)))


def _text_column(split: str, rng: random.Random, taken: set[str], values: set[str]) -> Column:
    """A text column of a few values that repeat."""
    name = draw_name(split, lambda: compound(rng, COLUMN_MODIFIERS, TEXT_NOUNS), taken)
    pool = [proper_name(split, rng, values) for _ in range(rng.randint(4, 6))]
    return Column(name, "text", tuple(pool))


def fill(columns: tuple[Column, ...], rng: random.Random) -> tuple[Row, ...]:
    """Rows for the columns: keys count up, number values are all used once, text values repeat."""
    shuffled = {c.name: rng.sample(c.values, ROWS) for c in columns if c.kind == "number"}
    rows = []
    for index in range(ROWS):
        row: list[int | str] = [index + 1]
        for column in columns[1:]:
            if column.kind == "key":
                row.append(rng.randint(1, ROWS * 3 // 4))
            elif column.kind == "number":
                row.append(shuffled[column.name][index])
            else:
                row.append(rng.choice(column.values))
        rows.append(tuple(row))
    return tuple(rows)


def make_schema(split: str, rng: random.Random, tables: int, widest: int) -> Schema:
    """A schema of so many tables, each with two to `widest` columns besides its keys."""
    taken: set[str] = set()
    values: set[str] = set()
    names = [draw_name(split, lambda: compound(rng, TABLE_MODIFIERS, TABLE_NOUNS), taken) for _ in range(tables)]
    made: list[Table] = []
    for index, name in enumerate(names):
        parent = rng.choice(names[:index]) if index else None
        keys = [Column(f"{name}_id", "key")]
        if parent is not None:
            keys.append(Column(f"{parent}_id", "key"))
        plain = [_number_column(split, rng, taken), _text_column(split, rng, taken, values)]
        for _ in range(rng.randint(2, widest) - 2):
            number = rng.random() < 0.5
            plain.append(_number_column(split, rng, taken) if number else _text_column(split, rng, taken, values))
        rng.shuffle(plain)
        columns = tuple(keys + plain)
        made.append(Table(name, parent, columns, fill(columns, rng)))
    rng.shuffle(made)
    return Schema(tuple(made))
