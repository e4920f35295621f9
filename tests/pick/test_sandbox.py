"""The process that runs untrusted SQL: its limits, and that it is there again when it has died."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dsbd_cli.pick import sql_child
from dsbd_cli.pick.sandbox import SqlProcess, SqlStoppedError, StatementResult, UnreadableDatabaseError
from dsbd_cli.pick.sql_child import Digest, open_database

DATABASE = Path(__file__).parents[1] / "lab" / "tasks" / "data" / "spider" / "database" / "pets" / "pets.sqlite"
NUMBERS = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) "
DEAF = "SELECT instr(zeroblob(999999), zeroblob(499999) || x'01')"  # one opcode of 10^11 comparisons
HANG_S = 600.0  # only so that a fault does not hang the suite


def run(process: SqlProcess, sql: str, seconds: float = HANG_S) -> StatementResult | str:
    return process.run(DATABASE, sql, seconds=seconds)


FAILS = [
    ("SELECT 1 LIKE '" + "%a" * 600 + "'", "LIKE or GLOB pattern too complex"),
    (NUMBERS + "SELECT zeroblob(999999) FROM t", "it returns more than 64 MB"),
    ("SELECT zeroblob(1000001)", "string or blob too big"),
    ("SELECT 1" + " UNION ALL SELECT 1" * 200, "too many terms in compound SELECT"),
    ("SELECT " + "1+" * 2000 + "1", "Expression tree is too large"),
    ("SELECT " + " " * sql_child.MAX_SQL_BYTES, "it has 100007 characters, but must have at most 100000"),
    ("SELECT '\ud800'", "surrogates not allowed"),
    ("ATTACH ':memory:' AS other", "not authorized"),
    ("SELECT load_extension('x')", "not authorized"),
    ("", "it is no statement that returns rows"),
]


@pytest.mark.parametrize(("sql", "message"), FAILS, ids=[sql[:20] + message[-20:] for sql, message in FAILS])
def test_a_statement_beyond_a_limit_fails_alone(sql: str, message: str) -> None:
    process = SqlProcess()
    outcome = run(process, sql)
    assert isinstance(outcome, str)
    assert message in outcome
    assert isinstance(run(process, "SELECT 1"), StatementResult)
    assert process.starts == 1, "the process has survived it"


def test_a_deaf_statement_is_ended_and_the_next_one_runs() -> None:
    process = SqlProcess()
    assert run(process, DEAF, seconds=0.1) == "it ran longer than 0.1 s"
    assert isinstance(run(process, "SELECT 1"), StatementResult)
    assert process.starts == 2


def test_one_process_serves_many_statements_and_returns_when_it_is_killed() -> None:
    process = SqlProcess()
    for _ in range(100):
        assert isinstance(run(process, "SELECT kind FROM pet"), StatementResult)
    assert process.starts == 1
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert isinstance(run(process, "SELECT kind FROM pet"), StatementResult)
    assert process.starts == 2


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="only Linux shows a process's limits")
def test_the_limits_of_the_process() -> None:
    process = SqlProcess()
    run(process, "SELECT 1", seconds=5)
    assert process._process is not None
    text = Path(f"/proc/{process._process.pid}/limits").read_text()
    soft = {line[:26].strip(): line[26:47].strip() for line in text.splitlines()}
    assert int(soft["Max address space"]) == sql_child.ADDRESS_BYTES
    assert int(soft["Max file size"]) == sql_child.FILE_BYTES
    assert int(soft["Max core file size"]) == 0
    assert 5 <= int(soft["Max cpu time"]) <= 5 + sql_child.GRACE_S + 60
    assert os.getpgid(process._process.pid) != os.getpgid(0), "Ctrl-C in a terminal is not for it"


def test_settings_of_a_database() -> None:
    database = open_database(DATABASE)
    database.set_authorizer(None)
    told = {
        name: database.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("trusted_schema", "cell_size_check", "hard_heap_limit")
    }
    database.close()
    assert told == {"trusted_schema": 0, "cell_size_check": 1, "hard_heap_limit": sql_child.HEAP_BYTES}


def test_a_stopped_process_runs_nothing() -> None:
    process = SqlProcess()
    run(process, "SELECT 1")
    process.stop()
    with pytest.raises(SqlStoppedError):
        run(process, "SELECT 1")
    fresh = SqlProcess()
    fresh.stop()
    with pytest.raises(SqlStoppedError):
        run(fresh, "SELECT 1")
    assert fresh.starts == 0


def test_stopping_ends_the_statement_that_runs() -> None:
    """The signal comes while the statement runs, whenever that is: it never ends by itself."""
    process = SqlProcess()
    run(process, "SELECT 1")
    before = signal.signal(signal.SIGALRM, lambda *_: process.stop())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(SqlStoppedError):
            run(process, NUMBERS + "SELECT count(*) FROM t")
    finally:
        signal.signal(signal.SIGALRM, before)


def test_what_is_no_database(tmp_path: Path) -> None:
    process = SqlProcess()
    (tmp_path / "x").write_text("no database" * 100)
    with pytest.raises(UnreadableDatabaseError, match="file is not a database"):
        process.run(tmp_path / "x", "SELECT 1", seconds=HANG_S)
    with pytest.raises(UnreadableDatabaseError, match="No such file"):
        process.run(tmp_path / "y", "SELECT 1", seconds=HANG_S)
    assert isinstance(run(process, "SELECT 1"), StatementResult)


Row = tuple[sql_child.Cell, ...]


def ran(*rows: Row) -> StatementResult:
    digest = Digest()
    for row in rows:
        digest.add(row)
    return StatementResult(**digest.answer())


@pytest.mark.parametrize(
    ("rows", "other", "ordered", "any_order"),
    [
        ([(1, "a"), (2, "b")], [(1.0, "a"), (2, "b")], True, True),
        ([(1,), (2,)], [(2,), (1,)], False, True),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False),
        ([(1, 2)], [(2, 1)], False, False),
        ([(1,)], [("1",)], False, False),
        ([("a",)], [(b"a",)], False, False),
        ([(None,)], [("None",)], False, False),
        ([("ab", "c")], [("a", "bc")], False, False),
        ([(0.1 + 0.2,)], [(0.3,)], True, True),
        ([(-0.0,)], [(0,)], True, True),
        ([], [()], False, False),
    ],
)
def test_equal_digests_are_equal_rows(rows: list[Row], other: list[Row], ordered: bool, any_order: bool) -> None:
    first, second = ran(*rows), ran(*other)
    assert first.same(second, ordered=True) is ordered
    assert first.same(second, ordered=False) is any_order
