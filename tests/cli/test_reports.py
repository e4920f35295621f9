"""What people and monitors are told: log lines, JSON logs, the summary file."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from dsbd_cli import __version__
from dsbd_cli.cli.run import messages, progress
from tests.cli.conftest import Outcome

Dsbd = Callable[..., Outcome]

ROWS: list[object] = [{"id": "a", "prompt": "a"}, {"id": "f", "prompt": "fail"}]


def test_a_long_run_logs_plain_lines_with_the_time(dsbd: Dsbd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.02)
    monkeypatch.setenv("FAKE_ROW_S", "0.05")
    outcome = dsbd("generate", lines=[ROWS[0]] * 4)
    lines = outcome.err.splitlines()
    assert any(line.startswith("dsbd: warning: line 2: the id 'a'") for line in lines)
    logged = [line for line in lines if line.startswith("dsbd: 2") and "Z " in line]
    assert logged
    assert "4 rows, 12 tokens" in lines[-1], "a run that has logged also ends with a summary"
    assert "\x1b" not in outcome.err
    assert "rows" not in dsbd("generate", "--quiet", lines=[ROWS[0]] * 4).err


def test_repeated_warnings_are_counted_not_told(dsbd: Dsbd) -> None:
    outcome = dsbd("generate", lines=[ROWS[0]] * 9)
    assert outcome.err.count("warning") == progress.MAX_SAME_WARNINGS
    assert "more of this kind are counted, not told" in outcome.err.splitlines()[-1]


def test_the_share_and_the_time_left_are_told_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0)
    talk = progress.TalkOptions()
    reporter = progress.Reporter(talk, Path("out.jsonl"), says_why=True)
    assert reporter._share_done() == ""
    reporter.input_bytes = 1000
    reporter.at(500, skipped=True)
    assert reporter._share_done() == "50% done"
    reporter.totals.started -= 60
    reporter.at(750)
    assert reporter._share_done() == "75% done", "nothing is answered, so nobody knows"
    reporter.totals.rows, reporter.totals.stats.steps = progress.ROWS_THAT_TELL, 100
    assert reporter._share_done() == "75% done, 0:01:00 left"
    assert reporter._progress_line(live=True).startswith("75% done, 0:01:00 left, 10 rows")


def test_the_live_line_of_two_drafters_keeps_its_clock() -> None:
    screen = io.StringIO()
    rates = "24% accepted (dynamic-tree 30%, retrieval 1%)"
    said = f"24% done, 0:01:00 left, 8 rows, 400 tokens, 2.09 steps per call, {rates}"
    with messages.live_line(lambda: said, Console(file=screen, width=100, force_terminal=True)) as line:
        line.refresh()
    shown = Text.from_ansi(screen.getvalue()).plain
    assert "0:00:00" in shown
    assert "24% done, 0:01:00 left" in shown
    assert "…" in shown


def test_json_logs(dsbd: Dsbd) -> None:
    outcome = dsbd("generate", "--set", "log=json", lines=[*ROWS, ROWS[0]])
    events = [json.loads(line) for line in outcome.err.splitlines()]
    assert [event["event"] for event in events] == ["start", "row_failed", "warning", "summary"] or [
        event["event"] for event in events
    ] == ["start", "warning", "row_failed", "summary"]
    assert all(set(event) >= {"time", "level", "event", "message"} for event in events)
    assert {event["schema"] for event in events} == {"dsbd.log/1"}
    assert events[-1]["rows"]["failed"] == 1
    failed = dsbd("generate", "--set", "log=json", "--batch-size", "1", lines=[{"prompt": "no memory"}])
    last = json.loads(failed.err.splitlines()[-1])
    assert (last["level"], last["event"], last["message"]) == ("error", "error", "the device is out of memory")
    assert dsbd("generate", "--set", "log=json", "--quiet", lines=ROWS).err == ""
    assert dsbd("generate", "--top-p", "2").err.startswith("dsbd: error: "), "the next command speaks plainly again"


def test_the_summary_file(dsbd: Dsbd, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    assert dsbd("generate", "--seed", "5", "--set", f"summary={path}", lines=ROWS).code == 3
    said = json.loads(path.read_bytes())
    assert (said["schema"], said["ending"], said["exit_code"]) == ("dsbd.summary/1", "complete", 3)
    assert said["rows"]["written"] == 2
    assert said["rows"]["failed"] == 1
    assert said["errors"] == {"PromptTooLongError": 1}
    assert said["tokens"]["best_texts"] == 3
    assert said["seconds"]["total_s"] > 0
    assert (said["energy_j"], said["energy_source"]) == (None, "unavailable")
    assert said["settings"]["seed"] == 5
    assert said["settings"]["target"] == "builtin:target"
    assert said["versions"]["dsbd"] == __version__
    assert said["versions"]["torch"]
    refused = dsbd("generate", "--set", f"summary={path}", lines=ROWS)
    assert refused.code == 2
    assert "exists" in refused.err
    failed = dsbd(
        "generate",
        "--existing",
        "overwrite",
        "--set",
        f"summary={path}",
        "--batch-size",
        "1",
        lines=[{"prompt": "no memory"}],
    )
    said = json.loads(path.read_bytes())
    assert (failed.code, said["ending"], said["exit_code"]) == (1, "failed", 1)
    assert said["message"] == "the device is out of memory"
