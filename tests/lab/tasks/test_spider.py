"""Spider's folder and execution accuracy, against statements judged by hand."""

from __future__ import annotations

import itertools
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from dsbd_cli.errors import UsageError
from dsbd_cli.lab.tasks.spider import score_spider, spider_dataset
from dsbd_cli.pick.sandbox import TOKEN, is_ordered
from dsbd_cli.pick.sql_child import open_database

FOLDER = Path(__file__).parent / "data" / "spider"
ENDLESS = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t"


def score(number: int, sql: str) -> float:
    record = list(spider_dataset(FOLDER).records())[number]
    return score_spider(record, sql)["execution accuracy"]


def test_the_folder_is_read() -> None:
    records = list(spider_dataset(FOLDER).records())
    assert len(records) == 5
    assert records[0].prompt == (
        "schema: singer ( singer_id, name, age ); concert ( concert_id, singer_id, year, price )\n"
        "question: How many singers are there?\nsql:"
    )
    assert [is_ordered(record.reference) for record in records] == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("number", "sql", "right"),
    [
        (0, "select count(singer_id) from singer;", 1.0),
        (0, "SELECT 4.0", 1.0),  # 4.0 == 4, as in the official script
        (0, "SELECT '4'", 0.0),
        (1, "SELECT name, age FROM singer ORDER BY age DESC, name ASC", 1.0),
        (1, "SELECT name, age FROM singer ORDER BY age, name", 0.0),  # wrong order
        (1, "SELECT name, age FROM singer", 0.0),
        (1, "SELECT age, name FROM singer ORDER BY age DESC, name", 0.0),  # columns in the wrong order
        (1, "SELECT name FROM singer ORDER BY age DESC, name", 0.0),  # missing column
        (1, "SELECT name, age, singer_id FROM singer ORDER BY age DESC, name", 0.0),  # one too many
        (2, "SELECT year FROM concert ORDER BY year DESC", 1.0),  # any order, where the gold has none
        (2, "SELECT DISTINCT year FROM concert", 0.0),  # duplicate rows count
        (2, "SELECT year FROM concert UNION ALL SELECT 2015", 0.0),
        (3, "SELECT name FROM singer WHERE singer_id IN (SELECT singer_id FROM concert WHERE year = 2015)", 1.0),
        (3, "SELECT nme FROM singer", 0.0),  # no such column
        (3, "", 0.0),
        (3, "SELECT name FROM singer; SELECT 1", 0.0),  # two statements
        (4, "SELECT kind, sum(weight) / count(*) FROM pet GROUP BY 1", 1.0),
        (4, "DELETE FROM pet", 0.0),
        (4, "SELECT kind, weight FROM pet", 0.0),
    ],
)
def test_statements_judged_by_hand(number: int, sql: str, right: float) -> None:
    assert score(number, sql) == right


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM singer",
        "INSERT INTO singer VALUES (9, 'Ed', 1)",
        "UPDATE singer SET age = 0",
        "DROP TABLE singer",
        "CREATE TABLE more (x)",
        "ATTACH DATABASE '{folder}/made.sqlite' AS made",
        "PRAGMA user_version = 7",
        "VACUUM INTO '{folder}/made.sqlite'",
    ],
)
def test_sql_that_writes_is_wrong_and_changes_nothing(sql: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "spider")
    path = tmp_path / "spider" / "database" / "concert" / "concert.sqlite"
    before = path.read_bytes()
    record = next(spider_dataset(tmp_path / "spider").records())
    assert score_spider(record, sql.format(folder=tmp_path)) == {"execution accuracy": 0.0}
    assert path.read_bytes() == before
    assert not (tmp_path / "made.sqlite").exists()
    assert len(list(path.parent.iterdir())) == 1


def test_the_file_itself_is_opened_read_only() -> None:
    """Even without the authorizer, which is the second lock."""
    database = open_database(FOLDER / "database" / "pets" / "pets.sqlite")
    database.set_authorizer(None)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        database.execute("DELETE FROM pet")
    database.close()


def test_sql_that_never_ends_is_wrong_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsbd_cli.lab.tasks.spider.TIMEOUT_S", 0.2)
    assert score(0, ENDLESS) == 0.0


def test_a_missing_database_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "spider")
    missing = tmp_path / "spider" / "database" / "pets" / "pets.sqlite"
    missing.unlink()
    with pytest.raises(UsageError, match=r"dev\[4\]: the database .*pets.sqlite does not exist"):
        list(spider_dataset(tmp_path / "spider").records())
    assert not missing.exists(), "sqlite would make an empty one"


def edit(folder: Path, name: str, change: object) -> Path:
    shutil.copytree(FOLDER, folder / "spider")
    path = folder / "spider" / name
    document = json.loads(path.read_text())
    assert callable(change)
    change(document)
    path.write_text(json.dumps(document))
    return folder / "spider"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dev.json", lambda d: d[1].pop("query"), r"dev\[1\] has no field query"),
        ("dev.json", lambda d: d[1].update(query="SELECT x FROM y"), r"dev\[1\].query fails on .*: SELECT x FROM y"),
        ("dev.json", lambda d: d[2].update(db_id="no"), r"dev\[2\].db_id is 'no', which tables.json does not hold"),
        ("tables.json", lambda d: d[0]["column_names_original"].append([9, "x"]), r"\[8\] is \[9, 'x'\], but must be"),
        ("tables.json", lambda d: d[1].update(db_id=3), r"tables\[1\].db_id is 3, but must be a string"),
        ("dev.json", lambda d: d.clear(), "holds no question"),
    ],
)
def test_a_broken_folder_is_told_by_place_and_field(name: str, change: object, message: str, tmp_path: Path) -> None:
    folder = edit(tmp_path, name, change)
    with pytest.raises(UsageError, match=message):
        list(spider_dataset(folder).records())


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER  BY a", True),
        ("select a from t order\nby a limit 3", True),
        ("SELECT a FROM t WHERE b IN (SELECT b FROM u ORDER BY c LIMIT (1 + (2)))", False),
        ("SELECT a FROM t WHERE b = ' ORDER BY ' AND c = 'it''s order by'", False),
        ("SELECT a FROM (SELECT 1) ORDER BY 1", True),
        ('SELECT "order by" FROM t', False),
        ("SELECT a FROM t -- order by a", False),
        ("SELECT a FROM t /* order by ( */", False),
        ("SELECT a FROM t /* ( */ ORDER -- (\n BY a", True),
        ("SELECT [order by], `order by` FROM t", False),
        ("SELECT a FROM t ORDER BY '--'", True),
    ],
)
def test_only_the_statements_own_order_counts(sql: str, ordered: bool) -> None:
    assert is_ordered(sql) is ordered


@pytest.mark.parametrize("opening", ["(", "/*", "/*(", "'", '"', "[", "`", "--", "order ", "*", "/"])
def test_no_character_is_looked_at_twice(opening: str) -> None:
    """Guards against a quadratic search: a megabyte would take hours. Every token begins where the one before ends."""
    sql = opening * (1_000_000 // len(opening))
    assert is_ordered(sql) is False
    end = 0
    for token in itertools.islice(TOKEN.finditer(sql), 100):
        assert token.start() == end
        end = token.end()
