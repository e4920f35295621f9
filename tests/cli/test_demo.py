"""`dsbd demo`: four beams beside transformers', and what `generate` says where nothing is given to it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable

import pytest

from dsbd_cli.cli.app import run
from dsbd_cli.cli.commands import demo
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import InvalidRowError, ModelNotFoundError
from dsbd_cli.lab.bench.beside import Beam, BesideTransformers, TimedBeams
from dsbd_cli.requests import EngineInfo
from dsbd_cli.stats import RequestStats
from tests.cli.conftest import ROOT, Outcome


def test_the_built_in_pair_gives_transformers_beams(capsys: pytest.CaptureFixture[str]) -> None:
    """Both answer for real; scores come from both sides, and drafts must have saved calls."""
    assert run(["demo"]) == 0
    out = capsys.readouterr().out
    scores = re.findall(r"\d  score (-\d+\.\d{4})", out)
    assert len(scores) == 2 * demo.BEAMS
    assert scores[: demo.BEAMS] == scores[demo.BEAMS :]
    assert out.count("the same beam ") == demo.BEAMS
    assert "the same beams for 7 of 7" in out
    match = re.search(r"(\d+) steps in (\d+) target calls, ([\d.]+) steps per call", out)
    assert match is not None
    assert float(match[3]) == pytest.approx(int(match[1]) / int(match[2]), abs=0.005)
    assert float(match[3]) > 2
    assert "\x1b" not in out


def test_its_prompts_are_the_sample_inputs() -> None:
    lines = (ROOT / "sample_inputs" / "prompts.jsonl").read_text().splitlines()
    assert demo._prompts(True) == [json.loads(line)["prompt"] for line in lines]


BEAMS = tuple(Beam(f" text\n{number}\x1b[31m", (number,), -0.5 * number) for number in range(demo.BEAMS))
OURS = TimedBeams(BEAMS, 0.5, RequestStats(steps=6, target_calls=2))


class _Fake(BesideTransformers):
    """Without models. beams: of transformers, by the places of ours, None for another one."""

    beams: tuple[int | None, ...] = ()

    def __init__(self, *_: object) -> None:
        self.info = EngineInfo("T", None, "float32", "cpu", chat=True)

    def load_theirs(self) -> None:
        return

    def ours(self, prompt: str) -> TimedBeams:
        return OURS

    def theirs(self, prompt: str) -> TimedBeams:
        other = Beam("strange", (99,), -9.0)
        return TimedBeams(tuple(other if index is None else BEAMS[index] for index in self.beams), 1.0)


@pytest.mark.parametrize(
    ("beams", "code", "says"),
    [
        ((0, 1, 2, 3), 0, ["the same beam"] * 4),
        ((1, 0, 2, 3), 1, ["beam 2 of above", "beam 1 of above", "the same beam", "the same beam"]),
        ((0, 1, 2, None), 1, ["the same beam", "the same beam", "the same beam", "strange"]),
    ],
)
def test_beams_that_differ_are_shown_and_end_with_an_error_code(
    beams: tuple[int | None, ...],
    code: int,
    says: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dsbd_cli.lab.bench.beside.BesideTransformers", _Fake)
    monkeypatch.setattr(_Fake, "beams", beams)
    monkeypatch.setattr(demo.Checkpoint, "open", lambda spec: None)
    assert run(["demo", "--target", "my model", "--prompt", "a\nb\x07"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == ["  a", "  b\\x07", "  to T as a chat, no draft, float32"]
    ours = next(index for index, line in enumerate(lines) if line.startswith("dsbd, 4 beams"))
    assert lines[ours] == "dsbd, 4 beams: 0.50 s; 6 steps in 2 target calls, 3.00 steps per call"
    assert re.split(r"\s{2,}", lines[ours + 2].strip()) == [f"text {number}\\x1b[31m" for number in range(4)]
    theirs = next(index for index, line in enumerate(lines) if line.startswith("transformers, 4 beams"))
    assert lines[theirs] == "transformers, 4 beams: 1.00 s; 2.0 times as long"
    assert re.split(r"\s{2,}", lines[theirs + 2].strip()) == says
    for command in ("generate", "bench"):
        assert any(f"dsbd {command} --target 'my model' --chat" in line for line in lines[theirs:])
    assert all(len(line) <= 120 for line in lines)


def test_a_long_prompt_stays_below_its_heading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsbd_cli.lab.bench.beside.BesideTransformers", _Fake)
    monkeypatch.setattr(_Fake, "beams", (0, 1, 2, 3))
    assert run(["demo", "--prompt", "word " * 60]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = lines[1 : next(index for index, line in enumerate(lines) if "to T as a chat" in line)]
    assert len(shown) > 1
    assert all(re.match("  word( word)*$", line.rstrip()) for line in shown)


def test_a_wrong_name_is_told_before_torch_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--target", "no-such-model"]) == 1
    assert capsys.readouterr().err.startswith("dsbd: error: target model 'no-such-model' is not known")


def test_a_signal_while_a_model_is_fetched_ends_the_demo_as_later_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[object] = []

    def locate(spec: ModelSpec) -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        raise ModelNotFoundError("stop here")

    monkeypatch.setattr(demo.Checkpoint, "open", locate)
    assert run(["demo"]) == 1
    assert handlers
    assert signal.SIG_DFL not in handlers


def test_a_prompt_that_cannot_be_answered_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the exit codes: 1 is for beams that differ, 3 for rows of a file."""

    def fail(self: _Fake, prompt: str) -> TimedBeams:
        raise InvalidRowError("request demo: prompt is empty: there is no token to start from")

    monkeypatch.setattr("dsbd_cli.lab.bench.beside.BesideTransformers", _Fake)
    monkeypatch.setattr(_Fake, "ours", fail)
    assert run(["demo", "--prompt", ""]) == 2
    said = "--prompt cannot be answered: prompt is empty: there is no token to start from"
    assert capsys.readouterr().err.endswith(f"error: {said}\n")


def test_generate_explains_itself_on_a_terminal(dsbd: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSBD_TARGET")
    shown = dsbd("generate", terminals=("stdin",))
    assert (shown.code, shown.out, shown.loads) == (2, "", [])
    *explained, error = shown.err.splitlines()
    assert "dsbd: dsbd generate --target MODEL -i prompts.jsonl -o answers.jsonl" in explained
    assert "dsbd demo" in explained[-1]
    assert error.startswith("dsbd: error: no input")
    named = dsbd("generate", "--target", "builtin:target", terminals=("stdin",))
    assert (named.code, named.err.splitlines()) == (2, [error])
