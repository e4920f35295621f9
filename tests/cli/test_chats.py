"""Chats on the command line: templates and their variables for a run, answers that are continued, whose tokenizer."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.cli.app import run
from dsbd_cli.cli.run.prompts import NOT_CONTINUED, is_left_off
from dsbd_cli.config.chat import ChatConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.requests import Request
from tests.cli.conftest import Outcome, _Stream
from tests.helpers.checkpoints import byte_level, save, wrap

Dsbd = Callable[..., Outcome]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ note }}"
CHAT = {"id": "a", "messages": [{"role": "user", "content": "hi"}]}
LEFT_OFF = {"id": "b", "messages": [CHAT["messages"][0], {"role": "assistant", "content": "Well"}]}


def setting(name: str, value: object) -> tuple[str, str]:
    return "--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def test_templates_and_variables_go_to_the_engine(dsbd: Dsbd, tmp_path: Path) -> None:
    """The template as text, because a worker may be elsewhere; the settings file tells a digest."""
    file, out = tmp_path / "own.jinja", tmp_path / "out.jsonl"
    file.write_text(TEMPLATE, encoding="utf-8")
    options = (*setting("chat-template", str(file)), *setting("chat-template-kwargs", {"b": None, "a": [1]}))
    done = dsbd("generate", "-o", str(out), *options, lines=[CHAT])
    assert done.code == 0, done.err
    assert done.loads[-1]["chat_template"] == TEMPLATE
    assert done.loads[-1]["chat_template_kwargs"] == {"b": None, "a": [1]}
    again = ("generate", "-o", str(out), "--existing", "resume")
    same = (*setting("chat-template", str(file)), *setting("chat-template-kwargs", {"a": [1], "b": None}))
    assert dsbd(*again, *same, lines=[CHAT]).code == 0
    done = dsbd(*again, *setting("chat-template", str(file)), lines=[CHAT])
    assert done.code == 2
    assert """--set chat-template-kwargs was '{"a":[1],"b":null}' and is not set""" in done.err
    file.write_text(TEMPLATE + " ", encoding="utf-8")
    done = dsbd(*again, *same, lines=[CHAT])
    assert done.code == 2
    assert "--set chat-template was '" in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (setting("chat-template-kwargs", "{"), "--set chat-template-kwargs is '{', but must be a JSON object"),
        (setting("chat-template-kwargs", "[1]"), "--set chat-template-kwargs is '[1]', but must be a JSON object"),
        (setting("chat-template-kwargs", {"tools": []}), "tools is no variable of a template: give tools"),
        (setting("chat-template", "none.jinja"), "--set chat-template is 'none.jinja', but must be a file"),
        (setting("tokenizer", "own"), "--set tokenizer is 'own', but must be one of base"),
    ],
)
def test_what_cannot_be_used_is_one_line(dsbd: Dsbd, options: tuple[str, ...], said: str) -> None:
    done = dsbd("generate", *options, lines=[CHAT])
    assert (done.code, done.loads) == (2, [])
    assert said in done.err
    assert done.err.count("\n") == 1


def test_lines_of_text_have_no_use_for_a_template(dsbd: Dsbd, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    for options in (setting("chat-template", str(file)), setting("chat-template-kwargs", {"a": 1})):
        for more, code in ((), 2), (("--no-chat",), 2), (("--chat",), 0):
            done = dsbd("generate", "--input-format", "text", *more, *options, lines=b"a\n")
            assert done.code == code, done.err
            assert ("--input-format text without --chat has prompts alone" in done.err) == bool(code)
        done = dsbd("profile", *options)
        assert done.code == 2
        assert "would do nothing, because there is no --input" in done.err


def test_an_answer_that_is_not_continued_is_told_once(dsbd: Dsbd) -> None:
    done = dsbd("generate", lines=[CHAT, LEFT_OFF, {**LEFT_OFF, "id": "c"}])
    assert done.code == 0
    assert done.err.count(NOT_CONTINUED) == 1
    assert NOT_CONTINUED not in dsbd("generate", lines=[CHAT]).err
    assert NOT_CONTINUED not in dsbd("generate", "--set", "prefix=We", lines=[LEFT_OFF]).err


def test_what_is_continued_or_calls_a_function_is_not_left_off() -> None:
    messages: Any = LEFT_OFF["messages"]
    assert is_left_off(Request(messages=messages))
    assert not is_left_off(Request(messages=messages, chat=ChatConfig(continue_final_message=True)))
    assert not is_left_off(Request(messages=messages, sampling=SamplingConfig(prefix="a")))
    assert not is_left_off(Request(messages=[*messages[:1], {"role": "assistant", "tool_calls": [{}]}]))
    assert not is_left_off(Request("a"))


# Through real checkpoints


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = wrap(byte_level(), chat_template=TEMPLATE)
    return save(tmp_path_factory.mktemp("target"), tokenizer=tokenizer, vocab_size=len(tokenizer))


@pytest.fixture
def real(target: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """dsbd with the target and six greedy tokens of one beam."""

    def call(command: str, *options: str, lines: list[object]) -> Outcome:
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        streams = {name: _Stream(data if name == "stdin" else b"") for name in ("stdin", "stdout", "stderr")}
        with monkeypatch.context() as patch:
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            model = ("--target", str(target), "--num-beams", "1", "--decode", "search", "--dtype", "float32")
            code = run([command, *model, "--max-new-tokens", "6", *options])
        return Outcome(code, streams["stdout"].text(), streams["stderr"].text())

    return call


def answer(done: Outcome) -> tuple[object, object]:
    assert done.code == 0, done.err
    [record] = done.records
    usage = record["usage"]
    assert isinstance(usage, dict)
    return record["text"], usage["prompt_tokens"]


def test_a_run_renders_with_its_own_template_and_variables(real: Dsbd, tmp_path: Path) -> None:
    """As the same text given as a prompt without special tokens; the tokenizer adds none here."""
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}!{{ note }}", encoding="utf-8")
    for options, text in (
        ((), "<s>user: hi\n"),
        (setting("chat-template-kwargs", {"note": "Be brief."}), "<s>user: hi\nBe brief."),
        (setting("chat-template", str(own)), "hi!"),
        ((*setting("chat-template", str(own)), *setting("chat-template-kwargs", {"note": 5})), "hi!5"),
    ):
        want = answer(real("generate", "--no-chat", lines=[{"prompt": text}]))
        assert answer(real("generate", *options, lines=[CHAT])) == want
        assert answer(real("generate", "--chat", *options, lines=[{"prompt": "hi"}])) == want


def test_a_template_is_checked_before_the_run(real: Dsbd, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if x %}", encoding="utf-8")
    done = real("generate", *setting("chat-template", str(broken)), lines=[CHAT])
    assert done.code == 2
    assert "--set chat-template cannot be used: Unexpected end of template." in done.err


def test_variables_without_a_template_are_refused(dsbd: Dsbd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    stdin = io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n'), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    errors = _Stream()
    monkeypatch.setattr(sys, "stderr", errors)
    assert run(["generate", "--target", "builtin:target", "--draft", "none", "--set", "chat-template-kwargs={}"]) == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n'), encoding="utf-8"))
    assert run(
        ["generate", "--target", "builtin:target", "--draft", "none", *setting("chat-template-kwargs", {"a": 1})]
    )
    assert "--set chat-template-kwargs is {'a': 1}, but target builtin:target has no chat template" in errors.text()


def test_a_prefix_of_a_row_begins_its_text(real: Dsbd) -> None:
    done = real("generate", lines=[{**CHAT, "prefix": "Sure, "}, {"id": "p", "prompt": "The qu", "prefix": "ick"}])
    assert done.code == 0, done.err
    for record, prefix in zip(done.records, ("Sure, ", "ick"), strict=True):
        assert str(record["text"]).startswith(prefix)
        assert record["num_tokens"] <= 6  # type: ignore[operator]
