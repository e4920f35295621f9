"""The SQL task: scoring by execution, and what its generator promises."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.lab.tasks.sql import SQL
from training.tasks import SqlGenerator

RIGHT, WRONG = {"execution accuracy": 1.0}, {"execution accuracy": 0.0}

TABLES = {
    "singer": {
        "columns": ["singer_id", "age", "city"],
        "rows": [[1, 20, "Rosel"], [2, 30, "Rosel"], [3, 40, "Manor"], [4, 50, "Manor"]],
    },
    "concert": {"columns": ["concert_id", "singer_id", "year"], "rows": [[1, 1, 1999], [2, 1, 2004], [3, 9, 2004]]},
}

ENDLESS = "WITH RECURSIVE n ( x ) AS ( SELECT 1 UNION ALL SELECT x + 1 FROM n ) SELECT "


def record(gold: str) -> TaskRecord:
    """A record on the tables above."""
    return TaskRecord("x", "", gold, {"tables": TABLES, "ordered": " ORDER BY " in gold})


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("SELECT age FROM singer", "SELECT age FROM singer", True),
        ("SELECT age FROM singer", "  select singer.age from singer ;", True),
        ("SELECT age FROM singer", "SELECT age FROM singer ORDER BY age DESC", True),
        ("SELECT age FROM singer ORDER BY age ASC", "SELECT age FROM singer ORDER BY age DESC", False),
        ("SELECT age FROM singer ORDER BY age ASC", "SELECT age FROM singer ORDER BY singer_id", True),
        ("SELECT city FROM singer", "SELECT DISTINCT city FROM singer", False),
        ("SELECT age, city FROM singer", "SELECT city, age FROM singer", False),
        ("SELECT age, city FROM singer", "SELECT age FROM singer", False),
        ("SELECT AVG ( age ) FROM singer", "SELECT SUM ( age ) / 4.0 FROM singer", True),
        ("SELECT COUNT ( * ) FROM singer", "SELECT COUNT ( * ) FROM concert", False),
        ("SELECT COUNT ( * ) FROM singer", "SELECT '4'", False),
        ("SELECT age FROM singer", "SELECT height FROM singer", False),
        ("SELECT age FROM singer", "SELECT age FROM singer; SELECT age FROM singer", False),
        ("SELECT age FROM singer", "", False),
        ("SELECT age FROM singer", "\x00", False),
        ("SELECT age FROM singer", "not SQL", False),
    ],
)
def test_score(gold: str, answer: str, right: bool) -> None:
    assert SQL.score(record(gold), answer) == (RIGHT if right else WRONG)


@pytest.mark.parametrize(
    "answer",
    [
        "DELETE FROM singer",
        "INSERT INTO singer VALUES ( 5, 60, 'Rosel' )",
        "UPDATE singer SET age = 1 RETURNING age",
        "DROP TABLE singer",
        "CREATE TABLE t ( x )",
        "PRAGMA writable_schema = 1",
        "ATTACH 'leak.db' AS leak",
        "VACUUM INTO 'leak.db'",
    ],
)
def test_writing_is_wrong(answer: str) -> None:
    assert SQL.score(record("SELECT age FROM singer"), answer) == WRONG


@pytest.mark.parametrize(
    "answer",
    [
        ENDLESS + "COUNT ( * ) FROM n",
        ENDLESS + "x FROM n",
        "SELECT COUNT ( * ) FROM " + ", ".join(f"singer s{i}" for i in range(20)),
        "SELECT hex ( zeroblob ( 900000000 ) )",
    ],
)
def test_sql_that_does_not_end_is_wrong(answer: str) -> None:
    assert SQL.score(record("SELECT age FROM singer"), answer) == WRONG


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_gold_scores_right(split: str) -> None:
    assert all(SQL.score(r, r.reference) == RIGHT for r in islice(SqlGenerator().records(split, 3), 100))


def test_another_gold_of_the_same_schema_scores_wrong() -> None:
    """A database too poor to tell questions apart would let wrong SQL pass."""
    lucky = total = 0
    for group in islice(SqlGenerator().groups("dev", 0, 4, 2), 100):
        for record, other in pairwise(group):
            if record.reference != other.reference:
                total += 1
                lucky += SQL.score(record, other.reference) == RIGHT
    assert lucky <= 0.02 * total


def test_prompt_and_reference_are_text_to_sql() -> None:
    for r in islice(SQL.records(), 50):
        assert r.prompt.startswith("schema: ")
        assert r.prompt.endswith("\nsql:")
        assert r.reference.startswith("SELECT ")
