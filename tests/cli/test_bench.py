"""`dsbd bench` as a command: what is refused before anything is loaded, what is written, and Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import sqlite3
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import pytest

import dsbd_cli.models
from dsbd_cli.cli.app import run
from dsbd_cli.cli.commands import bench as command
from dsbd_cli.cli.commands.bench import _progress_of
from dsbd_cli.cli.run import messages
from dsbd_cli.cli.run.messages import Talk, set_style
from dsbd_cli.errors import ModelError, OutputError
from dsbd_cli.lab.bench import runners, sweep
from dsbd_cli.lab.bench.prepare import Prompt
from tests.cli.conftest import Outcome, read, terminal

Call = Callable[..., Outcome]
SMALL = ("--task", "qa", "--records", "2", "--max-new-tokens", "8", "--methods", "greedy,dsbd-coupled")


def bench(*arguments: str, terminal: TextIO | None = None) -> Outcome:
    """`dsbd bench` with real engines in this process, which has torch already; a warning is an error. terminal: what is
    standard error, and is not in the outcome then."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(terminal or err), warnings.catch_warnings():
        warnings.simplefilter("error")
        code = run(["bench", *arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "dsbd-couple"), "did you mean dsbd-coupled"),
        (("--methods", "dsbd-coupled", "--draft", "none"), "needs a draft, but there is none: name one with --draft"),
        (("--methods", "greedy", "--draft", "builtin:draft"), "no method of --methods drafts"),
        (("--methods", "greedy", "--temperature", "2"), "no method of --methods samples"),
        (("--methods", "greedy", "--temperature", "2", "--seed", "1"), "--methods samples: drop them"),
        (("--methods", "greedy", "--num-beams", "4"), "--num-beams would do nothing"),
        (("--num-beams", "4,x"), "--num-beams is '4,x', but must be an integer"),
        (("--task", "squad"), "needs the path of its data"),
        (("--task", "sql,sql"), "sql stands there twice"),
        (
            ("--task", "nothing"),
            "error: --task is 'nothing', but must be one of sql, qa, squad, spider, mt-bench, translation,",
        ),
        (("--task", ""), "--task '' names no task"),
        (("--chat",), "--chat would do nothing, because sql and qa bring their own prompts: drop it"),
        (("--no-chat", "--task", "qa"), "--chat would do nothing, because qa brings its own prompts: drop it"),
        (("--data", "x"), "belongs to one task"),
        (("--input", "x", "--task", "sql"), "--input and --task cannot be used together"),
        (("--input", "x", "--data", "y"), "--input and --data cannot be used together"),
        (("--task", "jsonl", "--data", "x"), "--task jsonl is no task: name the prompts with --input"),
        (("--task", "qa", "--score", "f1"), "--score f1 is for prompts of --input, but the task is qa: drop it"),
        (("--records", "0"), "--records is 0, but must be 1 or more"),
        (("--records", "9" * 20), f"--records is {'9' * 20}, but must be at most 2147483647"),
        (("--records", "9" * 5000), f"--records is '{'9' * 58}…, but must be an integer"),
        (("--rounds", "0"), "--rounds is 0, but must be 1 or more"),
        (("--threads", "1025"), "--threads is 1025, but must be at most 1024"),
        (("--batch-size", "0"), "--batch-size is 0"),
        (("--json", "no/such/folder/x.jsonl"), "the folder no/such/folder does not exist"),
        (("--json", "-"), "--json needs a file, but - is standard output"),
        (("--json", "x.jsonl.gz"), "--json x.jsonl.gz is not compressed: name it without .gz"),
        (("--plot", "x.jpeg"), "must end in .png, .svg or .pdf"),
        (("--json", "x.png", "--plot", "x.png"), "are both x.png"),
        (("--markdown", "x"), "No such option: --markdown"),
        (("--existing", "overwrite"), "but none is given"),
        (("--target", "somebody/model", "--methods", "dsbd-coupled"), "needs a draft, but there is none: name one"),
        (("--input", "x", "--dev-data", "y"), "--dev-data y would do nothing without --shots: drop it"),
        (("--shots", "1", "--dev-data", "x"), "goes with --input or --data"),
    ],
)
def test_what_cannot_be_is_refused_before_models_are_loaded(
    dsbd: Call, arguments: tuple[str, ...], message: str
) -> None:
    done = dsbd("bench", *arguments)
    assert (done.code, done.out, done.loads) == (2, "", [])
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_a_file_that_exists_is_kept(dsbd: Call, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("old")
    done = dsbd("bench", "--json", str(path))
    assert (done.code, done.loads, path.read_text()) == (2, [], "old")
    assert "--existing overwrite" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--input", "{old}"),
        ("--task", "squad", "--data", "{old}"),
        ("--input", "y", "--shots", "1", "--dev-data", "{old}"),
        ("--allow", "{old}"),
        ("--methods", "greedy,dsbd-coupled", "--drafter", "retrieval", "--set", "index={old}"),
        ("--input", "y", "--score", "exec:{old}"),
        ("--input", "y", "--target", "{old}"),
        ("--input", "y", "--score", "exec:{folder}/{{name}}.png"),
    ],
)
@pytest.mark.parametrize("output", ["--json", "--plot"])
def test_a_report_does_not_replace_what_is_read(
    dsbd: Call, arguments: tuple[str, ...], output: str, tmp_path: Path
) -> None:
    old, content = tmp_path / "old.png", b"SQLite format 3\0" if "exec:" in arguments[-1] else b'{"prompt": "a"}\n'
    old.write_bytes(content)
    words = [word.format(old=old, folder=tmp_path) for word in arguments]
    done = dsbd("bench", *words, output, str(old), "--existing", "overwrite")
    assert (done.code, done.loads, old.read_bytes()) == (2, [], content)
    assert f"{output} {old} is the input: name another file" in done.err


def test_a_report_does_not_replace_a_file_of_spider(dsbd: Call, tmp_path: Path) -> None:
    old = tmp_path / "dev.json"
    old.write_text("[]")
    done = dsbd("bench", "--task", "spider", "--data", str(tmp_path), "--json", str(old), "--existing", "overwrite")
    assert (done.code, done.loads, old.read_text()) == (2, [], "[]")
    assert f"--json {old} is the input: name another file" in done.err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder where nobody can make a file is needed")
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(dsbd: Call) -> None:
    done = dsbd("bench", "--json", "/proc/x.jsonl")
    assert (done.code, done.loads) == (1, [])
    assert "cannot write /proc/x.jsonl" in done.err


def test_tables_go_to_standard_output_and_files_where_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "LOG_INTERVAL_S", float("inf"))  # however slow the machine is
    written, picture = tmp_path / "x.json", tmp_path / "x.png"
    done = bench(*SMALL, "--json", str(written), "--plot", str(picture))
    assert done.code == 0
    told = [line.partition("Z ")[2] for line in done.err.splitlines() if "compiling" not in line]
    assert told[0] == "0 of 2 windows, warming up greedy"
    assert re.fullmatch(r"1 of 2 windows, about \d+:\d\d:\d\d left, qa: dsbd-coupled", told[1])
    assert len(told) == 2
    assert "dsbd-coupled" in done.out
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert [line["method"] for line in lines] == ["greedy", "dsbd-coupled"]
    assert lines[0]["command"].startswith("dsbd bench --task qa")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_report_that_cannot_be_written_in_the_end_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OutputError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(command, "write_atomically", full)
    done = bench(*SMALL[:-1], "greedy", "--json", str(tmp_path / "x.json"))
    assert done.code == 1
    assert "x.json: No space left on device" in done.err
    assert "greedy" in done.out


def test_prompts_go_through_the_chat_template_where_that_is_asked_for(tmp_path: Path) -> None:
    """Guards methods that are compared on texts that the user's own runs never see."""
    prompts, target = tmp_path / "in.jsonl", tmp_path / "chat"
    prompts.write_text('{"prompt": "question: who"}\n')
    shutil.copytree(Path(dsbd_cli.models.__file__).parent / "builtin" / "target", target)
    (target / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    words = ("--input", str(prompts), "--methods", "greedy", "--max-new-tokens", "2", "--target")
    plain = bench(*words, str(target))
    assert "note: the target has a chat template, but prompts are given to it as they stand: --chat puts" in plain.out
    for chat in ("--chat", "--no-chat"):
        told = bench(*words, str(target), chat)
        assert (told.code, "chat template" in told.out) == (0, False)
    refused = bench(*words, "builtin:target", "--chat")
    assert "error: --chat: target builtin:target has no chat template: drop it" in refused.err


def test_only_records_that_are_answered_are_looked_at(tmp_path: Path) -> None:
    """Guards a run of few records, which ended with the gold SQL of a record that it would not have answered."""
    target, database, lines = tmp_path / "chat", tmp_path / "x.sqlite", tmp_path / "in.jsonl"
    with contextlib.closing(sqlite3.connect(database)) as opened:
        opened.execute("CREATE TABLE t (x)")
    shutil.copytree(Path(dsbd_cli.models.__file__).parent / "builtin" / "target", target)
    (target / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    line = '{"messages": [{"role": "user", "content": "question: who"}], "reference": "SELECT x FROM %s"}\n'
    lines.write_text(line % "t" + line % "missing")
    words = ("--input", str(lines), "--score", f"exec:{database}", "--records", "1", "--methods", "greedy")
    done = bench(*words, "--max-new-tokens", "2", "--target", str(target))
    assert (done.code, "in.jsonl, 1 record" in done.out) == (0, True), done.err


def test_a_closed_standard_output_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `dsbd bench --json x >&-` has it, which wants the file alone."""
    monkeypatch.setattr(sys, "stdout", None)
    assert run(["bench", *SMALL[:-1], "greedy", "--json", str(tmp_path / "x.json")]) == 0
    assert (tmp_path / "x.json").stat().st_size > 0


def test_the_time_left_is_said_early_and_then_every_minute(capsys: pytest.CaptureFixture[str]) -> None:
    set_style()
    now = 0.0
    log = _progress_of(Talk(None, lambda: now), 3)
    for done, seconds, left in [(0, 0, None), (0, 1, None), (1, 2, 80.0), (2, 3, 90.0), (3, 4, 3700.4), (4, 5, 60.0)]:
        now = seconds
        log(done, 9, "x", left)
    now = 64.5
    log(5, 9, "y", 50.0)
    log(9, 9, "", 0.0)
    assert [line.partition("Z ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "0 of 9 windows, x",
        "1 of 9 windows, about 0:01:20 left, x",
        "3 of 9 windows, about 1:01:40 left, x",
        "5 of 9 windows, about 0:00:50 left, y",
    ]


def test_methods_that_need_a_draft_are_named_where_there_is_none() -> None:
    words = ("--task", "qa", "--records", "1", "--max-new-tokens", "2", "--methods", "all", "--draft", "none", "-q")
    done = bench(*words)
    assert (done.code, done.err) == (0, "")
    said = " ".join(done.out.split())
    assert "note: left out: speculative, dsbd-coupled, dsbd-search," in said
    assert "hf-assisted: they need a draft, but there is none: name one with --draft" in said


def lines_of(path: Path, count: int, reference: str = ', "reference": "x"') -> Path:
    path.write_text("".join(f'{{"prompt": "question {number}"{reference}}}\n' for number in range(count)))
    return path


def test_scores_and_options_of_lines_that_cannot_be(dsbd: Call, tmp_path: Path) -> None:
    """All before a model is loaded, in one line."""
    plain = lines_of(tmp_path / "plain.jsonl", 2)
    cold = lines_of(tmp_path / "cold.jsonl", 2, ', "reference": "x", "temperature": 0')
    json_ = ', "response_format": {"type": "json_object"}'
    shaped = lines_of(tmp_path / "shaped.jsonl", 2, json_)
    (tmp_path / "x.sqlite").write_text("no database, " * 99)
    for path, arguments, message in (
        (plain, ("--score", "same"), "--score is 'same', but must be one of exact, prefix, contains, regex:PATTERN"),
        (plain, ("--score", "regex:("), "must be a regex: "),
        (plain, ("--score", ""), "--score is '', but must be one of exact"),
        (plain, ("--score", "number"), "line 1: reference is 'x', but must be a number"),
        (plain, ("--score", f"exec:{tmp_path / 'x.sqlite'}"), "x.sqlite cannot be read: file is not a database"),
        (cold, ("--methods", "hf-beam-sampling"), "some line asks for temperature 0, which it does not take"),
        (shaped, ("--methods", "hf-greedy,greedy"), "only methods of our own engine follow a grammar"),
    ):
        done = dsbd("bench", "-i", str(path), *arguments)
        assert (done.code, done.out, done.loads, len(done.err.splitlines())) == (2, "", [], 1)
        assert message in done.err


def test_a_file_of_the_user_s_own_with_a_score_and_options(tmp_path: Path) -> None:
    """Methods that cannot do what a line asks for are named. The file's name may have any bytes."""
    data, out = tmp_path / "x\udcff.jsonl", tmp_path / "x.out"
    rows = [{"prompt": f"question {n}", "reference": n, "max_tokens": 3, "seed": n} for n in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "temperature": 0}]))
    words = ("--input", str(data), "--score", "number", "--methods", "greedy,beam-search,all", "--draft", "none")
    done = bench(*words, "--num-beams", "2", "--json", str(out), "-q")
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    assert "hf-beam-sampling: some line asks for temperature 0, which it does not take" in said
    assert "better/worse: records with a higher/lower score" in said
    assert "With 4 records no difference can show: it takes 9." in said
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["method"] for line in lines} >= {"greedy", "beam-search", "hf-beam-search"}
    assert {line["tokens"] <= 12 for line in lines} == {True}
    assert all(line["scores"]["number"]["high"] > 0.3 for line in lines), "0 of 4 is not 0 for certain"


def test_a_trimmed_draft_is_compared_without_transformers_assisted_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the default methods with drafts that our own commands make."""
    (tmp_path / "texts.jsonl").write_text('{"text": "a b c"}\n')
    small = str(tmp_path / "small")
    assert run(["trim-draft", "--texts", str(tmp_path / "texts.jsonl"), "--size", "99", "-o", small, "-q"]) == 0
    words = ("--draft", small, "--input", str(lines_of(tmp_path / "x.jsonl", 1)), "--max-new-tokens", "2", "-q")
    monkeypatch.setattr(sweep, "DEFAULT_METHODS", ("dsbd-search", "hf-assisted"))
    done = bench(*words)
    assert done.code == 0, done.err
    why = "transformers runs neither a draft head nor a trimmed draft"
    assert f"note: left out: hf-assisted: {why}" in " ".join(done.out.split())
    refused = bench(*words, "--methods", "hf-assisted")
    assert (refused.code, refused.out) == (2, "")
    assert f"--methods: hf-assisted cannot be run, because {why}: leave it out" in refused.err


def test_a_record_that_no_method_answers_is_told(tmp_path: Path) -> None:
    """Guards a report of nothing: the target has no encoder to name a language to."""
    data = lines_of(tmp_path / "x.jsonl", 1)
    done = bench("--input", str(data), "--methods", "greedy", "--set", "source-lang=y", "--max-new-tokens", "4", "-q")
    assert done.code == 3
    said = " ".join(done.out.split())
    assert (
        "note: x.jsonl: records without an answer, which count as wrong: greedy 1; the first: record 0: source_lang"
        in said
    )


def test_a_sweep_of_thresholds_is_one_table(tmp_path: Path) -> None:
    data, out = lines_of(tmp_path / "x.jsonl", 3), tmp_path / "x.out"
    words = ("--input", str(data), "--methods", "dsbd-fuzzy", "--fuzzy-threshold", "0.1,0.4")
    done = bench(*words, "--num-beams", "2", "--max-new-tokens", "4", "--json", str(out))
    assert done.code == 0
    assert done.out.count("x.jsonl, 3 records") == 1
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["setting"], line["records"]) for line in lines] == [("W=2 T=0.1", 3), ("W=2 T=0.4", 3)]


def test_ctrl_c_prints_what_is_measured_and_ends_with_130() -> None:
    """More records than can be answered; the signal comes once some are measured. In this process, which has torch
    already; standard error is a terminal."""
    words = ("--task", "qa", "--records", "4000", "--max-new-tokens", "8", "--methods", "greedy,hf-greedy")
    said: list[str] = []

    def watch(ours: int) -> None:
        said.append(read(ours, r"[1-9]\d+ of \d+ windows"))
        os.kill(os.getpid(), signal.SIGINT)
        said.append(read(ours))

    with terminal(100) as (ours, theirs):
        watching = threading.Thread(target=watch, args=(ours,))
        watching.start()
        with os.fdopen(theirs, "w", buffering=1) as stream:
            done = bench(*words, terminal=stream)
        watching.join()
    assert done.code == 130
    assert "stopping after this iteration" in said[1]
    assert "hf-greedy" in done.out


def test_an_error_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory that runs out after an hour must not lose the hour."""
    calls: list[int] = []
    plain = runners.EngineRunner.run

    def fails(self: runners.EngineRunner, prompts: Sequence[Prompt]) -> list[runners.BestAnswer]:
        calls.append(len(prompts))
        if len(calls) == 6:  # two warm-ups, a window of each, and the first method's second window
            raise ModelError("out of memory")
        return plain(self, prompts)

    monkeypatch.setattr(runners.EngineRunner, "run", fails)
    out = tmp_path / "out.jsonl"
    words = ("--task", "qa", "--records", "16", "--max-new-tokens", "8", "--methods", "greedy,dsbd-coupled")
    done = bench(*words, "--json", str(out))
    assert done.code == 1
    assert "error: out of memory" in done.err
    assert "dsbd-coupled" in done.out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["method"], line["windows"], line["complete"]) for line in lines] == [
        ("greedy", 1, False), ("dsbd-coupled", 2, False),
    ]  # fmt: skip
    calls[:] = [0] * 5  # the warm-up fails
    done = bench(*words)
    assert (done.code, done.out) == (1, "")
