"""Chat templates are programs of the checkpoint: they are rendered by a child process with limits, and a template that
goes beyond them is the error of its row."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.config.chat import MOST_BYTES, ChatConfig, template_text
from dsbd_cli.errors import InvalidRowError, UsageError
from dsbd_cli.models import chat
from dsbd_cli.models.chat import ChatTemplate, Renderer, check_template
from dsbd_cli.models.stored_tokenizer import store, stored
from tests.helpers.checkpoints import CHAT, byte_level, wrap

MESSAGES = [{"role": "user", "content": "hé 漢字 \ud800 \x00"}, {"role": "assistant", "content": "a\nb"}]
LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    with closing(Renderer(seconds=600)) as made:
        yield made


@pytest.fixture(scope="module")
def lasting() -> Iterator[Renderer]:
    """A renderer whose child lives through all that is asked of it."""
    with closing(Renderer(seconds=600)) as made:
        yield made


def with_template(template: Any) -> Any:
    return wrap(byte_level(), chat_template=template)


def rendered(renderer: Renderer, template: str, *, opened: bool = True) -> str:
    """The text of MESSAGES."""
    variables = {name: str(value) for name, value in with_template(None).special_tokens_map.items()}
    return renderer.render(template, variables, messages=MESSAGES, add_generation_prompt=opened)


@pytest.mark.parametrize("opened", [True, False])
def test_the_text_is_that_of_transformers(lasting: Renderer, opened: bool) -> None:
    template = CHAT + "{{ bos_token }}{{ messages | tojson }}{{ messages[::-1][0].content }}"
    expected = with_template(template).apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=opened)
    assert rendered(lasting, template, opened=opened) == expected


BEYOND = {
    LOOP: "it executes more than 4000000 lines for them",
    "{{ 'a' * 10 ** 10 }}": "it takes more than 2 GiB",
    DOUBLING: "it takes more than 2 GiB",
    "{{ 'a' * 10 ** 8 }}": "it makes 100000000 characters of them, but 67108864 are the most",
    "{{ raise_exception('no\\n such role') }}": "refuses these messages: no such role",
    "{{ (1).__class__.__mro__ }}": "refuses these messages: access to attribute '__class__' of",
    "{{ cycler.__init__.__globals__.os.system('true') }}": "refuses these messages: access to attribute '__init__' of",
    "{% set x = messages.append(1) %}": "refuses these messages: ",
    "{% include '/etc/hostname' %}": "refuses these messages: no loader for this environment specified",
    "{% import 'os' as os %}": "refuses these messages: no loader for this environment specified",
}


@pytest.mark.parametrize(("template", "message"), BEYOND.items(), ids=[key[:30] for key in BEYOND])
def test_a_template_beyond_its_limits_is_an_error_of_the_row(lasting: Renderer, template: str, message: str) -> None:
    with pytest.raises(InvalidRowError) as caught:
        rendered(lasting, template)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert rendered(lasting, "{{ 1 }}") == "1", "the next row is answered"
    assert lasting.starts == 1


def test_an_operation_that_does_not_end_is_an_error_of_the_row() -> None:
    """A power of 3 with 400 million digits: one line, and hours."""
    with closing(Renderer(seconds=1)) as renderer:
        with pytest.raises(InvalidRowError, match="takes more than 1 s of processor time for these messages"):
            rendered(renderer, "{{ 3 ** (messages | length * 4 * 10 ** 8) }}")
        assert rendered(renderer, "{{ 1 }}") == "1", "the next row is answered"
        assert renderer.starts == 2, "by another child"


def test_a_child_that_is_killed_is_started_anew(renderer: Renderer) -> None:
    template = "{{ messages[0].role }}"
    assert rendered(renderer, template) == "user"
    assert renderer._child is not None
    os.kill(renderer._child.pid, 9)
    renderer._child.wait()
    assert rendered(renderer, template) == "user"
    assert renderer.starts == 2


def test_what_is_no_string_on_the_path_means_nothing(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As to an import; guards notebooks that put a Path there."""
    monkeypatch.setattr(sys, "path", [Path("here"), *sys.path])
    assert rendered(renderer, "{{ messages[0].role }}") == "user"


def test_half_an_answer_is_none(renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a traceback where the child is ended while it answers."""
    (tmp_path / "child.py").write_text("input(); print('{\"text\": \"ab', end='')")
    monkeypatch.setattr(chat, "CHILD", tmp_path / "child.py")
    with pytest.raises(InvalidRowError, match="the process that does it ended with exit code 0"):
        rendered(renderer, "{{ 1 }}")


@pytest.mark.parametrize("kept", [False, True], ids=["transformers", "stored"])
def test_one_of_several_templates_is_taken_or_the_row_fails(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As get_chat_template chooses: tool_use for conversations with tools, else the default."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer: Any = with_template({"default": "d", "tool_use": "t", "other": "o"})
    if kept:
        facts = store(tokenizer)
        assert facts is not None
        tokenizer = stored(facts, lambda: tokenizer)
    tools = ChatConfig(tools=({"type": "function"},))
    assert ChatTemplate(tokenizer).render(MESSAGES) == "d"
    assert ChatTemplate(tokenizer).render(MESSAGES, tools) == "t"
    assert ChatTemplate(tokenizer).render(MESSAGES, replace(tools, tool_choice="none")) == "d"
    with pytest.raises(InvalidRowError, match="the model's chat template cannot be chosen"):
        ChatTemplate(with_template({"one": "d", "other": "o"})).render(MESSAGES)


def test_variables_of_the_row_come_before_those_of_the_run_and_of_the_tokenizer() -> None:
    template = ChatTemplate(with_template("x"), "{{ a }} {{ b }} {{ bos_token }} {{ c is defined }}", {"a": 1, "b": 1})
    assert template.render(MESSAGES, ChatConfig(template_kwargs={"b": 2})) == "1 2 <s> False"
    assert template.render(MESSAGES, ChatConfig(template_kwargs={"bos_token": "B", "c": None})) == "1 1 B True"
    assert ChatTemplate(with_template(None)).exists is False


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0].content }}", "the final message does not appear in the chat after applying"),
        ("{{ messages[-1].text }}", "this is not an accepted field in the chat_template"),
    ],
)
def test_an_answer_that_a_template_drops_cannot_be_continued(template: str, said: str) -> None:
    """With the message of transformers."""
    continued = ChatConfig(continue_final_message=True)
    with pytest.raises(InvalidRowError, match=said):
        ChatTemplate(with_template(template)).render(MESSAGES, continued)


CALLS = "{% for m in messages %}{% for c in m.tool_calls %}{{ JOIN }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("join", "shown"),
    [
        ("c.function.arguments | tojson", '{"a": [1]}'),
        ("c.function.arguments.a", "[1]"),
        ("'<' + c.function.arguments + '>'", '<{"a":[1]}>'),
    ],
)
def test_arguments_are_an_object_for_a_template_unless_it_joins_texts(join: str, shown: str) -> None:
    """Guards JSON text that is quoted once more: lines of the OpenAI API hold arguments as text."""
    call = {"type": "function", "id": "x", "function": {"name": "f", "arguments": '{"a":[1]}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(with_template(CALLS.replace("JOIN", join))).render(messages) == shown


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", '"a"'])
def test_arguments_that_are_no_object_stay_as_they_are(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    template = CALLS.replace("JOIN", "c.function.arguments | tojson")
    assert json.loads(ChatTemplate(with_template(template)).render(messages)) == arguments


def test_a_value_that_is_no_json_is_an_error_of_the_row() -> None:
    with pytest.raises(
        InvalidRowError, match=r"the conversation cannot be given to a chat template: .* set is not JSON"
    ):
        ChatTemplate(with_template("x")).render([{"role": "user", "content": {1, 2}}])


def test_a_text_that_is_no_template_is_told_before_the_run() -> None:
    check_template("{% generation %}{{ messages }}{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}")
    with pytest.raises(UsageError, match=r"^chat_template cannot be used: unexpected '}'$"):
        check_template("{% if messages }}")


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ([1], r"chat_template_kwargs is \[1\], but must be an object"),
        ({"tools": []}, "tools is no variable of a template: give tools"),
        ({"add_generation_prompt": False}, "add_generation_prompt is no variable .*: give continue_final_message"),
        ({"tokenize": False}, "tokenize is no variable of a template: drop it"),
    ],
)
def test_variables_that_mean_something_else_are_refused(kwargs: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ChatConfig(template_kwargs=kwargs)


def test_a_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ 1 }} é", encoding="utf-8")
    assert template_text(file) == "{{ 1 }} é" == template_text("{{ 1 }} é")
    with pytest.raises(
        UsageError, match=r"chat_template is 'own.jinja', but must be the text .* for a file give a Path"
    ):
        template_text("own.jinja")
    with pytest.raises(UsageError, match="but must be a file"):
        template_text(tmp_path)
    file.write_bytes(b"{{ 1 }}" + b" " * MOST_BYTES)
    with pytest.raises(UsageError, match="a template may have 1048576"):
        template_text(file)
