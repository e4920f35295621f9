"""The examples run, and do what they say."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from dsbd_cli.cli import app
from dsbd_cli.lab.tasks.sql import SQL

ROOT = Path(__file__).parents[1]
Example = Callable[..., str]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Example:
    """example("rollouts", "--steps", "12"): the script as `python` runs it, in this process, which has torch already;
    what it and its commands print."""
    monkeypatch.chdir(ROOT)

    def call(name: str, *options: str, stdin_text: str = "") -> str:
        path = str(ROOT / "examples" / f"{name}.py")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [path, *options])
            patch.setattr(sys, "stdin", io.StringIO(stdin_text))
            runpy.run_path(path, run_name="__main__")
        return capfd.readouterr().out

    return call


PROMPTS = "".join(
    json.dumps({"prompt": f"passage: {name} moved a boat in Tarn.\nquestion: what did {name} do\nanswer:"}) + "\n"
    for name in ("Nesen", "Olu")
)


DSBD = [sys.executable, "-m", "dsbd_cli"]


@pytest.fixture
def commands_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an example starts as `python -m dsbd_cli` runs in this process, which has torch already, one command after
    another. Returns the names of the commands that ran; other programs are started as ever."""
    run, popen, ran = subprocess.run, subprocess.Popen, list[str]()
    files = iter(range(9))

    def called(arguments: list[str], stdin: IO[bytes]) -> tuple[int, IO[bytes]]:
        """Exit code and standard output of a command."""
        ran.append(arguments[0])
        said = (tmp_path / f"said{next(files)}").open("w+b")
        with (
            monkeypatch.context() as patch,
            io.TextIOWrapper(stdin) as read,
            os.fdopen(os.dup(said.fileno()), "w") as out,
        ):
            patch.setattr(sys, "stdin", read)
            patch.setattr(sys, "stdout", out)
            code = app.run(arguments)
        said.seek(0)
        return code, said

    def begun(command: list[str], **options: Any) -> Any:
        if command[:3] != DSBD:
            return popen(command, **options)
        assert options == {"stdout": subprocess.PIPE}
        code, said = called(command[3:], io.BytesIO())
        assert code == 0
        return nullcontext(SimpleNamespace(stdout=said))

    def done(command: list[str], **options: Any) -> Any:
        if command[:3] != DSBD:
            return run(command, **options)
        assert options.keys() == {"stdin", "stdout", "check"}
        code, said = called(command[3:], options["stdin"])
        assert code == 0 or not options["check"]
        with said:
            return subprocess.CompletedProcess(command, code, said.read())

    monkeypatch.setattr(subprocess, "Popen", begun)
    monkeypatch.setattr(subprocess, "run", done)
    return ran


def test_text_to_sql(example: Example, commands_here: list[str]) -> None:
    said = example("text_to_sql", "--records", "3")
    assert commands_here == ["generate", "pick"]
    assert re.fullmatch(r"[0-3] of 3 right; for [0-3] another beam than the best was the first to run\n", said)


def test_more_beams_for_the_rows_that_need_them(example: Example, commands_here: list[str], tmp_path: Path) -> None:
    """Rows whose tables are there run with one beam; those whose tables are missing are answered again with three."""
    record = next(iter(SQL.records()))
    tables = record.meta["tables"]
    assert isinstance(tables, dict)
    for name, held in (("good", tables), ("bad", {})):
        with closing(sqlite3.connect(tmp_path / f"{name}.sqlite")) as database, database:
            database.execute("CREATE TABLE other (x)")
            for table, data in held.items():
                database.execute(f"CREATE TABLE {table} ({', '.join(data['columns'])})")
    names = ("bad", "good", "bad")
    rows = "".join(json.dumps({"prompt": record.prompt, "metadata": {"db": name}}) + "\n" for name in names)
    options = ("--database", f"{tmp_path}/{{db}}.sqlite", "--num-beams", "1", "3", "--max-new-tokens", "40")
    records = [json.loads(line) for line in example("more_beams", *options, stdin_text=rows).splitlines()]
    assert commands_here == 2 * ["generate", "pick"]
    assert [(record["id"], record["index"]) for record in records] == [("0", 0), ("1", 1), ("2", 2)]
    assert [(record["pick"]["of"], record["pick"]["ran"]) for record in records] == [(3, 0), (1, 1), (3, 0)]


def test_mbr(example: Example) -> None:
    records = list(
        map(
            json.loads,
            example("mbr_translation", "--samples", "3", "--max-new-tokens", "6", stdin_text=PROMPTS).splitlines(),
        )
    )
    assert [record["id"] for record in records] == ["0", "1"]
    assert all(0 <= record["expected_utility"] <= 100 for record in records)


def test_self_consistency(example: Example) -> None:
    """Its commands are processes."""
    records = list(
        map(
            json.loads,
            example("self_consistency", "--samples", "3", "--max-new-tokens", "6", stdin_text=PROMPTS).splitlines(),
        )
    )
    assert [record["pick"]["of"] for record in records] == [3, 3]


def test_rollouts_learn(example: Example) -> None:
    rewards = [float(line.split()[-1]) for line in example("rollouts", "--steps", "12").splitlines()]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) > sum(rewards[:3])
