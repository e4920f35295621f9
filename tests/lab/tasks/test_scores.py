"""Scores of `--score`: each kind by hand, and what it refuses before a model is loaded."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import pytest

from dsbd_cli.errors import UsageError
from dsbd_cli.lab.tasks.choose import open_dataset
from dsbd_cli.lab.tasks.dataset import Dataset


def dataset(folder: Path, kind: str, reference: object, metadata: Mapping[str, object] | None = None) -> Dataset:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "p", "reference": reference, "metadata": metadata}) + "\n")
    return open_dataset("jsonl", path, score=kind)


def scored(folder: Path, kind: str, reference: object, answer: str) -> float:
    data = dataset(folder, kind, reference)
    (record,) = data.records()
    (value,) = data.score(record, answer).values()
    assert data.metrics == tuple(data.score(record, answer))
    return value


@pytest.mark.parametrize(
    ("kind", "reference", "right", "wrong"),
    [
        ("exact", " Paris ", ["Paris", "Paris\n"], ["paris", "Paris."]),
        ("prefix", "yes", ["Yes, it is", "yes"], ["It is: yes", "ye"]),
        ("contains", "New  York", ["It is new york.", "NEW\nYORK"], ["York", "newyork"]),
        (r"regex:[Aa]nswer is (\S+)", "12", ["the answer is 3, no, the answer is 12.0", "answer is 12."], ["12", ""]),
        (r"regex:\d+", "7", ["5, then 7"], ["7, then 5"]),
        (
            "number",
            "so 1,200.50",
            ["1200.5", "It is $1,200.50.", "3 + 4 = +1.2005e3", "about 1200.50 km", "3 x 400.1666 =\n**1200.5**"],
            ["1200", "1200.5 or 3", "-1200.5", "x1200.5", "none", "1,2005"],
        ),
        ("number", -4, ["-4", "it is −4", "= -4.0"], ["4", "3-4", "-40"]),
        ("number", 0.5, [".5", "50e-2"], ["5"]),
        (
            "json",
            {"a": [1, None], "b": "x"},
            ['{"b":"x", "a": [1.0, null]}', 'Here:\n```json\n{"a": [1, null], "b": "x"}\n```\nDone.'],
            [
                '{"a": [null, 1], "b": "x"}',
                '{"a": [1, null], "b": "x", "c": 0}',
                '{"a": [true, null], "b": "x"}',
                "{",
                "",
            ],
        ),
        ("json", "[true]", ["[true]"], ["[1]", "[" * 5000, "1" * 5000]),
    ],
)
def test_answers_by_hand(kind: str, reference: object, right: list[str], wrong: list[str], tmp_path: Path) -> None:
    for answers, value in ((right, 1.0), (wrong, 0.0)):
        assert [scored(tmp_path, kind, reference, answer) for answer in answers] == [value] * len(answers)


def test_scores_that_have_degrees(tmp_path: Path) -> None:
    """F1 by hand: 2 of 3 found words are among 4; chrF is 1 where all is the same."""
    assert scored(tmp_path, "f1", "red big cat sat", "the red cat ran") == pytest.approx(
        2 * (2 / 3) * 0.5 / (2 / 3 + 0.5)
    )
    assert scored(tmp_path, "chrf", "the cat sat", "the cat sat") == pytest.approx(1.0)
    assert 0.2 < scored(tmp_path, "chrf", "the cat sat", "the cat ran") < 0.9


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.sqlite"
    with sqlite3.connect(path) as made:
        made.executescript("CREATE TABLE t (a INT, b TEXT); INSERT INTO t VALUES (2, 'x'), (1, 'y');")
    return path


def test_sql_is_right_where_it_returns_the_rows_of_the_reference(database: Path, tmp_path: Path) -> None:
    kind = f"exec:{tmp_path}/{{db}}.sqlite"
    data = dataset(tmp_path, kind, "SELECT a FROM t", {"db": "shop"})
    (record,) = data.records()
    texts = [" SELECT a FROM t ORDER BY a", "SELECT b FROM t", "SELECT a FROM t LIMIT 1", "DROP TABLE t", ""]
    assert [data.score(record, text) for text in texts] == [{"execution accuracy": float(not n)} for n in range(5)]
    assert data.execute is not None
    assert [data.execute(record, text) is not None for text in texts] == [True, True, True, False, False]
    ordered = dataset(tmp_path, f"exec:{database}", "SELECT a FROM t ORDER BY a")
    (record,) = ordered.records()
    scores = [ordered.score(record, f"SELECT a FROM t ORDER BY a {way}") for way in ("ASC", "DESC")]
    assert [score["execution accuracy"] for score in scores] == [1.0, 0.0]


def test_a_reference_that_does_not_run_is_told_with_its_line(database: Path, tmp_path: Path) -> None:
    data = dataset(tmp_path, f"exec:{database}", "SELECT c FROM t")
    with pytest.raises(UsageError, match=r"record 0: reference fails on .*shop.sqlite: no such column: c"):
        list(data.records())


@pytest.mark.parametrize(
    ("kind", "reference", "message"),
    [
        ("same", "a", "--score is 'same', but must be one of exact, prefix, contains, regex:PATTERN"),
        ("exact:x", "a", "--score is 'exact:x', but must be one of"),
        ("regex:", "a", "--score is 'regex:', but must be one of"),
        ("regex:(", "a", r"--score regex is '\(', but must be a regex: "),
        ("number", "none", "line 1: reference is 'none', but must be a number, or a text that holds one"),
        ("number", True, "line 1: reference is .*rue, but must be a number"),
        ("json", "{", "line 1: reference is '{', but must be JSON"),
        ("exact", 4, "line 1: reference is 4, but must be a text"),
        ("contains", " ", "line 1: reference is ' ', but must be a text that is not blank"),
        ("exec:missing.sqlite", "SELECT 1", "--score exec: missing.sqlite does not exist"),
        ("exec:{db}.sqlite", "SELECT 1", "line 1: metadata.db is .*, but the database {db}.sqlite needs"),
    ],
)
def test_what_cannot_be_scored_is_told_at_once(kind: str, reference: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        dataset(tmp_path, kind, reference)


def test_a_file_that_is_no_database_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_text("no database, " * 100)
    with pytest.raises(UsageError, match=r"x.sqlite cannot be read: file is not a database"):
        dataset(tmp_path, f"exec:{path}", "SELECT 1")


def test_a_score_goes_with_references_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for row in ({"prompt": "p"}, {"prompt": "p", "relevant": ["a"]}):
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(UsageError, match="--score f1 needs a reference on every line"):
            open_dataset("jsonl", path, score="f1")
    with pytest.raises(UsageError, match="--score f1 is for prompts of --input, but the task is qa: drop it"):
        open_dataset("qa", None, score="f1")
