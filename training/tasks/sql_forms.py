"""Questions about a schema, each built together with its gold SQL."""

from __future__ import annotations

import random
from dataclasses import dataclass

from training.tasks.schema import Column, Schema, Table
from training.tasks.words import plural, spoken

COMPARE = {
    ">": ("over", "above", "more than", "greater than"),
    "<": ("under", "below", "less than"),
    ">=": ("at least", "no less than"),
    "<=": ("at most", "no more than"),
    "=": ("exactly",),
}

AGGREGATES = {
    "AVG": ("average", "mean"),
    "SUM": ("total", "sum of the"),
    "MAX": ("highest", "largest"),
    "MIN": ("lowest", "smallest"),
}

SHOW = ("show", "list", "give", "find")
SYNONYM = 0.2


@dataclass(frozen=True, slots=True)
class Scope:
    """The tables that a question is about: the main one and, joined, another with their key."""

    main: Table
    other: Table | None = None
    key: str = ""

    @property
    def source(self) -> str:
        """The FROM clause's content."""
        if self.other is None:
            return self.main.name
        return f"{self.main.name} JOIN {self.other.name} USING ( {self.key} )"


@dataclass(frozen=True, slots=True)
class Clause:
    """A piece of a question and the piece of SQL that it means."""

    words: str
    sql: str


NONE = Clause("", "")


def say(column: Column, rng: random.Random) -> str:
    """A column as the question names it."""
    return spoken(column.name, rng, SYNONYM)


def many(table: Table) -> str:
    """A table's rows as the question names them."""
    return plural(table.name.replace("_", " "))


def compare(column: Column, rng: random.Random) -> Clause:
    """A condition on one column, with a value that occurs in its rows."""
    said = say(column, rng)
    if column.kind == "text":
        value = rng.choice(column.values)
        if rng.random() < 0.2:
            return Clause(f"{said} is not '{value}'", f"{column.name} != '{value}'")
        return Clause(f"{said} is '{value}'", f"{column.name} = '{value}'")
    values = sorted(int(value) for value in column.values)
    if rng.random() < 0.15:
        low, high = sorted(rng.sample(values, 2))
        return Clause(f"{said} is between {low} and {high}", f"{column.name} BETWEEN {low} AND {high}")
    sign = rng.choice((">", ">", "<", "<", ">=", "<=", "="))
    value = rng.choice(values) if sign == "=" else rng.choice(values[5:-5])
    return Clause(f"{said} is {rng.choice(COMPARE[sign])} {value}", f"{column.name} {sign} {value}")


def _above_average(table: Table, rng: random.Random) -> Clause:
    """A condition against the average of the whole table."""
    column = rng.choice(table.of_kind("number"))
    sign, word = rng.choice(((">", "above"), ("<", "below")))
    sql = f"{column.name} {sign} ( SELECT AVG ( {column.name} ) FROM {table.name} )"
    return Clause(f"{say(column, rng)} is {word} the average", sql)


def condition(scope: Scope, rng: random.Random, level: int) -> Clause:
    """One to three conditions joined by AND or OR, as `whose ...`."""
    columns = scope.main.plain_columns()
    if scope.other is not None:
        other = rng.choice(scope.other.plain_columns())
        first = compare(other, rng)
        if rng.random() < 0.7:
            first = Clause(f"{scope.other.name.replace('_', ' ')} {first.words}", first.sql)
    elif level and rng.random() < 0.2:
        first = _above_average(scope.main, rng)
    else:
        first = compare(rng.choice(columns), rng)
    parts = [first]
    more = [column for column in columns if not first.sql.startswith(f"{column.name} ")]
    rng.shuffle(more)
    if level and more and rng.random() < 0.35:
        parts.append(compare(more.pop(), rng))
        if level > 1 and more and scope.other is None and rng.random() < 0.2:
            parts.append(compare(more.pop(), rng))
    joint = rng.choice(("and", "or")) if scope.other is None else "and"
    words = f" {joint} ".join(part.words for part in parts)
    return Clause(f" whose {words}", " WHERE " + f" {joint.upper()} ".join(part.sql for part in parts))


def membership(schema: Schema, rng: random.Random) -> tuple[Scope, Clause]:
    """Parents with no child, or with some child that meets a condition."""
    parent, child = rng.choice(schema.pairs())
    name = child.name.replace("_", " ")
    if rng.random() < 0.5:
        sql = f" WHERE {parent.key} NOT IN ( SELECT {parent.key} FROM {child.name} )"
        return Scope(parent), Clause(f" without any {name}", sql)
    inner = compare(rng.choice(child.plain_columns()), rng)
    sql = f" WHERE {parent.key} IN ( SELECT {parent.key} FROM {child.name} WHERE {inner.sql} )"
    return Scope(parent), Clause(f" that have some {name} whose {inner.words}", sql)


def _pick_scope(schema: Schema, rng: random.Random, level: int) -> tuple[Scope, Clause]:
    """The tables of a question and its condition (perhaps none)."""
    draw = rng.random()
    pairs = schema.pairs()
    if level and pairs and draw < 0.3:
        parent, child = rng.choice(pairs)
        main, other = (parent, child) if rng.random() < 0.5 else (child, parent)
        scope = Scope(main, other, parent.key)
        return scope, condition(scope, rng, level)
    if level and pairs and draw < 0.42:
        return membership(schema, rng)
    scope = Scope(rng.choice(schema.tables))
    return scope, (condition(scope, rng, level) if draw < 0.85 else NONE)


def _plain_select(scope: Scope, where: Clause, rng: random.Random) -> Clause:
    """One or two columns of the rows that meet the condition."""
    columns = rng.sample(scope.main.plain_columns(), rng.choice((1, 1, 2)))
    said = " and the ".join(say(column, rng) for column in columns)
    distinct = len(columns) == 1 and rng.random() < 0.2
    shown = ("DISTINCT " if distinct else "") + ", ".join(column.name for column in columns)
    words = f"{rng.choice(SHOW)} the {'different ' if distinct else ''}{said} of {many(scope.main)}{where.words}"
    return Clause(words, f"SELECT {shown} FROM {scope.source}{where.sql}")


def _count_select(scope: Scope, where: Clause, rng: random.Random) -> Clause:
    """How many rows meet the condition."""
    ask = rng.choice(("how many {} are there", "count the {}", "what is the number of {}"))
    if where.words and ask.endswith("there"):
        ask = "how many {} are there"
    return Clause(ask.format(many(scope.main)) + where.words, f"SELECT COUNT ( * ) FROM {scope.source}{where.sql}")


def _aggregate_select(scope: Scope, where: Clause, rng: random.Random) -> Clause:
    """An aggregate of a number column over the rows that meet the condition."""
    column = rng.choice(scope.main.of_kind("number"))
    name = rng.choice(tuple(AGGREGATES))
    words = f"what is the {rng.choice(AGGREGATES[name])} {say(column, rng)} of {many(scope.main)}{where.words}"
    return Clause(words, f"SELECT {name} ( {column.name} ) FROM {scope.source}{where.sql}")


def _group_select(scope: Scope, where: Clause, rng: random.Random) -> Clause:
    """A count or an aggregate for each value of a text column."""
    by = rng.choice(scope.main.of_kind("text"))
    tail = f" FROM {scope.source}{where.sql} GROUP BY {by.name}"
    head = f"for each {say(by, rng)}, {rng.choice(SHOW)} the"
    if rng.random() < 0.5:
        column = rng.choice(scope.main.of_kind("number"))
        name = rng.choice(tuple(AGGREGATES))
        words = f"{head} {rng.choice(AGGREGATES[name])} {say(column, rng)} of {many(scope.main)}{where.words}"
        return Clause(words, f"SELECT {by.name}, {name} ( {column.name} ){tail}")
    words = f"{head} number of {many(scope.main)}{where.words}"
    if not where.words and rng.random() < 0.5:
        least = rng.randint(2, 5)
        return Clause(
            f"{words} if it has at least {least}",
            f"SELECT {by.name}, COUNT ( * ){tail} HAVING COUNT ( * ) >= {least}",
        )
    return Clause(words, f"SELECT {by.name}, COUNT ( * ){tail}")


def _top_select(scope: Scope, where: Clause, rng: random.Random) -> Clause:
    """The first few rows by a number column."""
    by = rng.choice(scope.main.of_kind("number"))
    shown = rng.choice([column for column in scope.main.plain_columns() if column is not by])
    order, ends = rng.choice((("DESC", ("highest", "largest")), ("ASC", ("lowest", "smallest"))))
    limit = rng.randint(1, 9)
    rows = f"{limit} {many(scope.main)}" if limit > 1 else scope.main.name.replace("_", " ")
    words = f"{rng.choice(SHOW)} the {say(shown, rng)} of the {rows} with the {rng.choice(ends)} {say(by, rng)}"
    sql = f"SELECT {shown.name} FROM {scope.source}{where.sql} ORDER BY {by.name} {order} LIMIT {limit}"
    return Clause(words + (f" among those{where.words}" if where.words else ""), sql)


def _sorted_select(scope: Scope, where: Clause, rng: random.Random) -> Clause:
    """All rows, sorted by a number column."""
    by = rng.choice(scope.main.of_kind("number"))
    shown = rng.choice([column for column in scope.main.plain_columns() if column is not by])
    order, said = rng.choice((("DESC", "from high to low"), ("ASC", "from low to high")))
    words = f"{rng.choice(SHOW)} the {say(shown, rng)} of {many(scope.main)}{where.words}"
    sql = f"SELECT {shown.name} FROM {scope.source}{where.sql} ORDER BY {by.name} {order}"
    return Clause(f"{words}, sorted by {say(by, rng)} {said}", sql)


SELECTS = (
    (_plain_select, 4),
    (_count_select, 2),
    (_aggregate_select, 2),
    (_group_select, 2),
    (_top_select, 2),
    (_sorted_select, 1),
)


def ask(schema: Schema, rng: random.Random, level: int) -> Clause:
    """A question and its gold SQL."""
    scope, where = _pick_scope(schema, rng, level)
    form = rng.choices([form for form, _ in SELECTS], [weight for _, weight in SELECTS])[0]
    if form is _plain_select and not where.words:
        form = _sorted_select
    return form(scope, where, rng)
