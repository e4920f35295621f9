"""Rounds of --until: which rows are answered again, in which order results come, what is said to have been spent."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli import MethodConfig, Request, SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import InvalidRowError, RowError
from dsbd_cli.job.cli.app import run
from dsbd_cli.job.cli.until import Until, Widening
from dsbd_cli.job.pick.execution import ByExecution, Databases
from dsbd_cli.job.records import RowReader
from dsbd_cli.lab.tasks.sql import SqlTask
from dsbd_cli.lab.tasks.sql_child import TableData
from dsbd_cli.requests import RequestResult
from dsbd_cli.stats import DrafterStats, RequestStats
from tests.cli.conftest import Outcome
from tests.engine.toys import NumberCodec, table_pair

Dsbd = Callable[..., Outcome]


class Passing(ByExecution):
    """Texts pass that have any of these words."""

    words: tuple[str, ...] = ()

    def passes(self, metadata: object, text: str) -> bool:
        if metadata == "none":
            raise InvalidRowError("no database")
        return any(word in text.split() for word in self.words)


def engine(width: int) -> Engine:
    target, _ = table_pair(1, 12, 0.0, {2: 1.0})
    return Engine(
        target, None, NumberCodec(12, (2,)), MethodConfig(rule="search", num_beams=width, depth=0), batch_size=2
    )


def rounds(words: tuple[str, ...], window: int = 3) -> tuple[Widening, list[Any]]:
    check = Passing(Databases(""))
    Passing.words = words
    reader = RowReader(SamplingConfig(max_new_tokens=5, n_best=2), num_beams=2)
    rows = [reader.read(json.dumps({"prompt": f"{i} 3"}).encode(), index=i, number=i + 1) for i in range(7)]
    metadata: dict[int, object] = {id(row.request): "none" if row.index == 4 else None for row in rows}
    found = Widening(engine(2), Until(check, (2, 4, 8)), engine, metadata, window=window)
    asked: list[Request | RowError | None] = [row.request for row in rows]
    asked[2:2] = [None, InvalidRowError("broken")]
    results = list(found.run(iter(asked)))
    assert [result.request for result in results if result.error is None or result.request.prompt] == [
        row.request for row in rows
    ]
    answered = [result for result in results if result.request.prompt]
    return found, [(result, found.told(row)) for result, row in zip(answered, rows, strict=True)]


@pytest.mark.parametrize("window", [1, 3, 100])
def test_rows_are_answered_again_until_one_passes(window: int) -> None:
    wide = {}
    for width in (2, 4, 8):
        sampling = SamplingConfig(max_new_tokens=5, n_best=width)
        wide[width] = list(engine(width).run([Request(f"{i} 3", sampling=sampling) for i in range(7)]))
    word = wide[8][0].hypotheses[6].text.split()[-1]
    found, pairs = rounds((word,), window)
    used = set()
    for place, (result, told) in enumerate(pairs):
        if place == 4:
            assert "no database" in str(result.error)
            assert told is None
            continue
        expected = next((w for w in (2, 4, 8) if any(word in h.text.split() for h in wide[w][place].hypotheses)), 8)
        assert told["num_beams"] == expected
        texts = [h.text for h in wide[expected][place].hypotheses]
        passing = next((rank for rank, text in enumerate(texts) if word in text.split()), None)
        assert told["passed"] is (passing is not None)
        assert told["beam"] == passing
        assert result.hypotheses[0].text == texts[passing or 0]
        assert len(result.hypotheses) == 2
        assert told["target_calls"] == result.stats.target_calls
        assert told["target_calls"] == sum(wide[w][place].stats.target_calls for w in (2, 4, 8) if w <= expected)
        used.add(expected)
    assert len(used) > 1
    assert found.widened == sum(told["num_beams"] > 2 for _, told in pairs if told)


def test_a_wider_round_that_fails_takes_nothing_away() -> None:
    """Out of memory with more beams: the row keeps the answer that it has."""

    def failing(width: int) -> Engine:
        made = engine(width)
        run = made.run

        def broken(requests: Any) -> Iterator[RequestResult]:
            for result in run(requests):
                yield replace(result, hypotheses=(), error=InvalidRowError("out of memory"))

        if width > 2:
            made.run = broken  # type: ignore[method-assign, assignment]
        return made

    Passing.words = ("nothing says this",)
    row = RowReader(SamplingConfig(max_new_tokens=3), num_beams=2).read(b'{"prompt": "5 3"}', index=0, number=1)
    found = Widening(engine(2), Until(Passing(Databases("")), (2, 4, 8)), failing, {}, window=1)
    [result] = found.run([row.request])
    told = found.told(row)
    assert result.error is None
    assert result.hypotheses[0].text == next(engine(2).run([row.request])).hypotheses[0].text  # type: ignore[list-item]
    assert told is not None
    assert (told["passed"], told["num_beams"], told["rounds"]) == (False, 2, 2)


def test_nothing_is_held_back_in_a_pipe() -> None:
    """None says that nothing more is there yet: what has come is answered at once."""
    Passing.words = ("0",)
    reader = RowReader(SamplingConfig(max_new_tokens=3), num_beams=2)
    row = reader.read(b'{"prompt": "5 3"}', index=0, number=1)
    found = Widening(engine(2), Until(Passing(Databases("")), (2, 4)), engine, {}, window=100)

    def lines() -> Iterator[Request | RowError | None]:
        yield row.request
        yield None
        raise AssertionError("the first result was due before more was read")

    assert next(found.run(lines())).request is row.request


WRONG = [
    (("--until", "exec"), "--until is 'exec', but must be one of exec-ok"),
    (("--until", "exec-ok"), "database is missing: it is spelled exec-ok:DATABASE,max-beams=..."),
    (("--until", "exec-ok:d"), "max-beams is missing: it is spelled exec-ok:DATABASE,max-beams=..."),
    (("--until", "exec-ok:d,max-beams=4"), "max-beams is 4, but must be more than --num-beams"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_cannot_work(dsbd: Dsbd, options: tuple[str, ...], message: str) -> None:
    done = dsbd("generate", *options)
    assert done.code == 2
    assert message in done.err


def test_sql_from_the_command_line(tmp_path: Path) -> None:
    """The built-in pair on its own task: a row whose tables are there passes at once, the other one never."""
    record = next(iter(SqlTask().records("test", 3)))
    tables = record.meta["tables"]
    assert isinstance(tables, dict)
    for name, held in (("good", tables), ("bad", {})):
        with closing(sqlite3.connect(tmp_path / f"{name}.sqlite")) as database:
            database.execute("CREATE TABLE other (x)")
            for table, data in held.items():
                shown: TableData = data
                database.execute(f"CREATE TABLE {table} ({', '.join(shown['columns'])})")
            database.commit()
    lines = [{"id": name, "prompt": record.prompt, "metadata": {"db": name}} for name in ("good", "bad")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    code = run(
        [
            *("generate", "-q", "-i", str(tmp_path / "in.jsonl"), "-o", str(out), "--decode", "search"),
            *("--num-beams", "1", "--until", f"exec-ok:{tmp_path}/{{db}}.sqlite,max-beams=3"),
            *("--max-new-tokens", "40", "--draft", "none"),
        ]
    )
    assert code == 0
    good, bad = (json.loads(line) for line in out.read_text().splitlines())
    assert good["until"]["passed"] is True
    assert bad["until"] == {**bad["until"], "passed": False, "beam": None, "num_beams": 3, "rounds": 3}
    assert bad["until"]["target_calls"] == bad["stats"]["target_calls"]


def test_counters_of_two_rounds_are_summed() -> None:
    """Guards against counters of one round alone, those of each drafter among them."""
    first = RequestStats(target_calls=2, steps=3, kv_peak_slots=9, drafters={"beam": DrafterStats(4, 1)})
    second = RequestStats(target_calls=5, steps=7, kv_peak_slots=6, drafters={"beam": DrafterStats(2, 2)})
    both = RequestStats.total([first, second])
    assert (both.target_calls, both.steps, both.kv_peak_slots) == (7, 10, 9)
    assert both.drafters == {"beam": DrafterStats(6, 3)}
    assert first.drafters == {"beam": DrafterStats(4, 1)}


def test_stopping_ends_a_statement_that_never_ends(tmp_path: Path) -> None:
    """The stop comes while a beam is checked; the row is not answered, so a run that goes on answers it."""
    endless = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t"
    path = tmp_path / "x.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (x)")

    class Endless(ByExecution):
        def passes(self, metadata: object, text: str) -> bool:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return ByExecution.passes(self, metadata, endless)

    found = Widening(engine(2), Until(Endless(Databases(str(path)), timeout_s=1e6), (2, 4)), engine, {}, window=1)
    row = RowReader(SamplingConfig(max_new_tokens=3), num_beams=2).read(b'{"prompt": "5 3"}', index=0, number=1)
    before = signal.signal(signal.SIGALRM, lambda *_: found.stop())
    try:
        assert list(found.run([row.request])) == []
    finally:
        signal.signal(signal.SIGALRM, before)
