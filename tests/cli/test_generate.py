"""`dsbd generate` over a fake engine: what is written, in which order, and what the command returns."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.cli.run.prompts import warn_plain
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.requests import EngineInfo, Request
from tests.cli.conftest import Outcome
from tests.helpers import fake

Dsbd = Callable[..., Outcome]

RECORD = (
    "schema index id key text finish_reason logprob score num_tokens beams usage seed exactness method stats".split()
)


def prompts(*texts: str) -> list[object]:
    return [{"id": f"r{number}", "prompt": text} for number, text in enumerate(texts)]


def test_a_record_has_the_documented_fields_in_order(dsbd: Dsbd) -> None:
    outcome = dsbd("generate", "--n-best", "2", lines=prompts("hello"))
    assert (outcome.code, outcome.err) == (0, "")
    [record] = outcome.records
    assert list(record) == RECORD
    assert record["schema"] == "dsbd.output/1"
    assert (record["index"], record["id"], record["text"]) == (0, "r0", "hello!0")
    assert [list(beam) for beam in record["beams"]] == [RECORD[4:9]] * 2
    assert record["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}
    assert list(record["method"])[:5] == ["rule", "num_beams", "drafts_per_layer", "depth", "width"]
    assert record["exactness"] == "same-text"
    assert record["stats"] == {
        "target_calls": 2,
        "draft_calls": 8,
        "steps": 3,
        "steps_per_call": 1.5,
        "drafted": 16,
        "accepted": 4,
        "acceptance_rate": 0.25,
        "mean_width": 4.0,
        "kv_peak_slots": 40,
        "prompt_tokens_reused": 0,
        "draft_s": 0.123457,
        "target_s": 0.2,
        "verify_s": 0.3,
        "total_s": 0.7,
    }


@pytest.mark.parametrize("batch", ["1", "3", "8"])
def test_bad_rows_stay_in_input_order_and_the_others_go_on(dsbd: Dsbd, batch: str) -> None:
    lines = b'{"prompt": "a"}\n\nnot json\n{"prompt": "fail", "id": "f"}\n[1]\n{"prompt": 3}\n\xff\n{"prompt": "b"}\n'
    outcome = dsbd("generate", "--batch-size", batch, lines=lines)
    assert outcome.code == 3
    records = outcome.records
    assert [record["index"] for record in records] == list(range(7))
    assert [record.get("text") for record in records] == ["a!0", None, None, None, None, None, "b!0"]
    kinds = [record.get("error", {}).get("type") for record in records]
    assert kinds[1:6] == ["InvalidRowError", "PromptTooLongError", *["InvalidRowError"] * 3]
    assert list(records[1]) == ["schema", "index", "id", "key", "error"]
    assert list(records[1]["error"]) == ["type", "message", "line"]
    assert records[2]["id"] == "f"
    assert records[1]["error"]["message"].startswith("line 3: not valid JSON")
    *named, last = outcome.err.splitlines()
    assert [line.partition("): line ")[2][:2] for line in named[:3]] == ["3:", "4:", "5:"]
    assert named[1].startswith("dsbd: warning: row 2 (id f): line 4: prompt has 900 tokens")
    assert named[3:] == ['dsbd: 2 more rows failed: records with "error" in standard output']
    assert last.startswith("dsbd: 7 rows, 6 tokens, ")
    assert "5 failed" in last


def test_a_score_that_is_no_number_is_an_error_record(dsbd: Dsbd) -> None:
    outcome = dsbd("generate", lines=prompts("nan", "ok"))
    assert outcome.code == 3
    assert outcome.records[0]["error"]["type"] == "NumericalError"
    assert "null" not in outcome.out.splitlines()[0]


def test_no_rows_are_no_error(dsbd: Dsbd) -> None:
    assert dsbd("generate", lines=b"\n \n").code == 0


def test_an_error_of_the_run_keeps_what_was_written(dsbd: Dsbd) -> None:
    outcome = dsbd("generate", "--batch-size", "1", lines=prompts("a", "no memory", "b"))
    assert outcome.code == 1
    assert [record["text"] for record in outcome.records] == ["a!0"]
    assert outcome.err == "dsbd: error: the device is out of memory\n"


def test_a_bug_is_one_line_and_a_traceback_only_on_demand(dsbd: Dsbd, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = dsbd("generate", lines=prompts("crash"))
    assert outcome.code == 1
    assert (
        outcome.err == "dsbd: error: RuntimeError: a bug in two lines (unexpected; dsbd --debug shows the traceback)\n"
    )
    assert "Traceback" in dsbd("--debug", "generate", lines=prompts("crash")).err
    assert "RuntimeError: a bug" in dsbd("generate", "--debug", lines=prompts("crash")).err.partition("Traceback")[2]
    monkeypatch.setenv("DSBD_DEBUG", "1")
    assert "Traceback" in dsbd("generate", lines=prompts("crash")).err


def test_names_that_the_system_refuses(dsbd: Dsbd, tmp_path: Path) -> None:
    """A folder that may not be entered gives errors of the same kind, but not to the superuser."""
    name, out = "x" * 300, str(tmp_path / "out")
    for arguments in (
        ("generate", "--allow", name),
        ("merge", name, "-o", out),
        ("index", name, "-o", out),
    ):
        outcome = dsbd(*arguments, lines=prompts("a"))
        assert (outcome.code, outcome.err) == (2, f"dsbd: error: {name} cannot be used: File name too long\n")


def test_nobody_takes_the_built_in_pair_for_a_model_of_their_own(dsbd: Dsbd, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dsbd("generate", lines=prompts("a")).err == "", "it is named"
    monkeypatch.delenv("DSBD_TARGET")
    told = dsbd("generate", lines=prompts("a"))
    assert (told.code, told.err.count("\n")) == (0, 1)
    assert "the built-in pair answers, which is for demonstration" in told.err
    assert "name a model with --target" in told.err
    assert dsbd("generate", "--quiet", lines=prompts("a")).err == ""
    assert dsbd("generate", "--target", "builtin:target", lines=prompts("a")).err == ""


def test_a_place_may_be_one_the_pair_s_or_a_map(dsbd: Dsbd) -> None:
    for devices, target, draft in (
        ("cuda:1", ("cuda:1", None), "cuda:1"),
        ("balanced", ("auto", "balanced"), "auto"),
        ("balanced,cuda:2", ("auto", "balanced"), "cuda:2"),
        ('{"": 0, "lm_head": 1}', ("auto", '{"": 0, "lm_head": 1}'), "auto"),
    ):
        call = dsbd("generate", "--device", devices, lines=prompts("a")).loads[-1]
        assert (call["target"].device, call["target"].device_map) == target  # type: ignore[attr-defined]
        assert call["draft"].device == draft  # type: ignore[attr-defined]


@pytest.fixture
def with_template(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """with_template(True): the target that is loaded has a chat template."""
    plain = fake.FakeEngine.__init__

    def set_(chat: bool) -> None:
        def begin(self: fake.FakeEngine, *arguments: Any) -> None:
            plain(self, *arguments)
            self.info = EngineInfo("t", None, "float32", "cpu", chat=chat)

        monkeypatch.setattr(fake.FakeEngine, "__init__", begin)

    return set_


def test_plain_prompts_are_those_that_are_no_messages(capfd: pytest.CaptureFixture[str]) -> None:
    """Guards what profile, distill and trim-draft warn of."""
    plain, chat = Request("a"), Request(messages=({"role": "user", "content": "a"},))
    info = EngineInfo("t", None, "float32", "cpu", chat=True)
    warn_plain(None, info, [chat, plain])
    assert "the target has a chat template" in capfd.readouterr().err
    for asked_chat, which, requests in (
        (None, info, [chat]),
        (True, info, [plain]),
        (False, info, [plain]),
        (None, replace(info, chat=False), [plain]),
        (None, None, [plain]),
    ):
        warn_plain(asked_chat, which, requests)
        assert capfd.readouterr().err == ""


def test_plain_prompts_to_a_chat_model_are_told_of_once(dsbd: Dsbd, with_template: Callable[[bool], None]) -> None:
    with_template(True)
    message = {"messages": [{"role": "user", "content": "a"}]}
    for lines in (prompts("a", "b"), [message, *prompts("a", "b")]):
        told = dsbd("generate", lines=lines)
        assert (told.code, told.err.count("\n")) == (0, 1)
        assert "warning: the target has a chat template, but prompts are given to it as they stand: --chat" in told.err
    for silent in (("--no-chat",), ("--chat",), ("--quiet",)):
        assert dsbd("generate", *silent, lines=prompts("a")).err == ""
    assert dsbd("generate", lines=[message]).err == ""
    with_template(False)
    assert dsbd("generate", lines=prompts("a")).err == ""


def test_chat_makes_a_prompt_what_a_user_says(
    dsbd: Dsbd, with_template: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_template(True)
    seen: list[Request] = []
    plain = fake.FakeEngine._answer
    monkeypatch.setattr(fake.FakeEngine, "_answer", lambda self, request: seen.append(request) or plain(self, request))
    message = {"role": "system", "content": "b"}
    out = ("-o", str(tmp_path / "out"))
    assert dsbd("generate", "--chat", *out, lines=[*prompts("a"), {"messages": [message]}]).code == 0
    assert dsbd("generate", "--chat", "--input-format", "text", lines=b"c d\n").code == 0
    user = [{"role": "user", "content": text} for text in ("a", "c d")]
    assert [request.messages for request in seen] == [(user[0],), (message,), (user[1],)]
    other = dsbd("generate", *out, "--existing", "resume", lines=prompts("a"))
    assert (other.code, "--chat was true and is not set" in other.err) == (2, True)
    with_template(False)
    refused = dsbd("generate", "--chat", lines=prompts("a"))
    assert (refused.code, refused.out) == (2, "")
    assert "--chat: target t has no chat template: drop it" in refused.err


def test_options_reach_the_library(dsbd: Dsbd) -> None:
    outcome = dsbd(
        *"generate --target t --draft d --dtype bfloat16 --device cuda:1,cpu --batch-size 3".split(),
        *"--set gpu=plain --trust-remote-code target --num-beams 6 --threads 2".split(),
    )
    [call] = outcome.loads
    method = call.pop("method")
    assert (method.num_beams, method.drafts_per_layer) == (6, 12)
    assert call == {
        "target": ModelSpec("t", "target", "bfloat16", "cuda:1", trust_remote_code=True),
        "draft": ModelSpec("d", "draft", "bfloat16", "cpu"),
        "cuda_graphs": False,
        "kernels": False,
        "batch_size": 3,
        "log_steps": False,
        "on_too_long": "error",
        "allow": None,
        "chat_template": None,
        "chat_template_kwargs": None,
        "threads": 2,
    }


def test_sampling_options_and_row_overrides_reach_the_request(dsbd: Dsbd) -> None:
    outcome = dsbd("generate", "--n-best", "3", lines=[{"prompt": "a"}, {"prompt": "b", "n": 1, "seed": 9}])
    assert [len(record["beams"]) for record in outcome.records] == [3, 1]
    assert outcome.records[1]["seed"] == 9


def test_files_are_written_and_never_replaced_by_accident(dsbd: Dsbd, tmp_path: Path) -> None:
    source, output, stats = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "steps.jsonl"))
    source.write_text('{"prompt": "a"}\n{"prompt": "fail"}\n')
    arguments = ("generate", "-i", str(source), "-o", str(output), "--set", f"stats={stats}")
    assert dsbd(*arguments).code == 3
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == [0, 1]
    [step] = [json.loads(line) for line in stats.read_text().splitlines()]
    assert list(step) == (
        "schema id iteration passed_layers steps nodes kv_slots trunk layers draft_s target_s verify_s".split()
    )
    assert step["schema"] == "dsbd.step/1"
    assert list(step["layers"][0]) == ["layer", "drafted", "live_parents", "width", "accepted", "passed"]
    before = output.read_bytes()
    refused = dsbd(*arguments)
    assert (refused.code, output.read_bytes(), len(refused.loads)) == (2, before, 1)
    assert f"--output {output} exists: name another file, go on with it with --existing resume, or " in refused.err
    assert dsbd(*arguments, "--existing", "overwrite").code == 3


@pytest.mark.parametrize(("name", "form"), [("out.jsonl.gz", "native"), ("out.txt", "text")])
def test_nobody_is_told_to_go_on_with_what_cannot_be_resumed(dsbd: Dsbd, tmp_path: Path, name: str, form: str) -> None:
    (tmp_path / name).write_text("")
    refused = dsbd("generate", "-o", str(tmp_path / name), "--output-format", form)
    assert refused.err.endswith(f"{name} exists: name another file, or replace it with --existing overwrite\n")


def test_a_failed_load_leaves_no_output_file(dsbd: Dsbd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dsbd_cli

    def broken(*_: object, **__: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(dsbd_cli.__dict__["loading"], "load", broken)
    output = tmp_path / "out.jsonl"
    assert dsbd("generate", "-o", str(output), lines=prompts("a")).code == 1
    assert not output.exists()


def test_standard_error_is_silent_unless_somebody_watches(dsbd: Dsbd) -> None:
    rows = prompts("a", "fail")
    assert dsbd("generate", lines=prompts("a")).err == ""
    assert dsbd("generate", "--quiet", lines=rows).err == ""
    assert "1 failed" in dsbd("generate", lines=rows).err
    assert dsbd("generate", lines=prompts("fail")).err.endswith("dsbd: 1 row, 1 failed\n"), "no speed of nothing"
    verbose = dsbd("generate", "--set", "log=verbose", lines=rows).err
    assert "rule coupled, 4 beams" in verbose
    assert "row 1 (id r1): line 2: prompt has 900 tokens" in verbose
    assert "1.50 steps per call, 25% accepted" in verbose


def test_what_is_loaded_is_told_to_somebody_who_watches(dsbd: Dsbd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a mail from cron every night, because the model is large."""
    library, load = logging.getLogger("dsbd_cli.models.load_model"), sys.modules[fake.MODULE].load

    def loading(*arguments: object, **options: object) -> object:
        library.info("loading it")
        library.warning("compiling it")
        return load(*arguments, **options)

    monkeypatch.setattr(sys.modules[fake.MODULE], "load", loading)
    assert dsbd("generate").err == "dsbd: compiling it\n"
    assert dsbd("generate", "--quiet").err == ""
    for options in ({"terminals": ("stderr",)}, {}):
        words = () if options else ("--set", "log=verbose")
        assert dsbd("generate", *words, **options).err.startswith("dsbd: loading it\ndsbd: compiling it\n")


def test_a_terminal_gets_a_live_line_and_a_summary(dsbd: Dsbd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = dsbd("generate", lines=prompts("a"), terminals=("stderr",))
    assert shown.code == 0
    assert "dsbd: 1 row, 3 tokens" in shown.err
    assert "\x1b[?25l" in shown.err, "the live line hides the cursor"
    assert len(shown.records) == 1
    mixed = dsbd("generate", lines=prompts("a"), terminals=("stderr", "stdout"))
    assert "\x1b" not in mixed.err, "records scroll by on the same terminal"
    assert dsbd("generate", "-q", lines=prompts("a"), terminals=("stderr",)).err == ""


def test_a_terminal_without_input_is_told_what_to_do(dsbd: Dsbd) -> None:
    outcome = dsbd("generate", terminals=("stdin",))
    assert outcome.code == 2
    assert "dsbd generate < prompts.jsonl" in outcome.err
    assert dsbd("generate", "-i", "-", lines=prompts("a"), terminals=("stdin",)).code == 0
