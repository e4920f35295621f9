"""Chat templates are programs of the checkpoint: they are rendered by a child process with limits, and a template that
goes beyond them is the error of its row."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.errors import InvalidRowError
from dsbd_cli.models import chat
from dsbd_cli.models.chat import Renderer
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


@pytest.mark.parametrize("opened", [True, False])
def test_the_text_is_that_of_transformers(lasting: Renderer, opened: bool) -> None:
    tokenizer = with_template(CHAT + "{{ bos_token }}{{ messages | tojson }}{{ messages[::-1][0].content }}")
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=opened)
    assert lasting.render(tokenizer, MESSAGES, opened=opened) == expected


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
        lasting.render(with_template(template), MESSAGES, opened=True)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert lasting.render(with_template("{{ 1 }}"), MESSAGES, opened=True) == "1", "the next row is answered"
    assert lasting.starts == 1


def test_an_operation_that_does_not_end_is_an_error_of_the_row() -> None:
    """A power of 3 with 400 million digits: one line, and hours."""
    with closing(Renderer(seconds=1)) as renderer:
        with pytest.raises(InvalidRowError, match="takes more than 1 s of processor time for these messages"):
            renderer.render(with_template("{{ 3 ** (messages | length * 4 * 10 ** 8) }}"), MESSAGES, opened=True)
        assert renderer.render(with_template("{{ 1 }}"), MESSAGES, opened=True) == "1", "the next row is answered"
        assert renderer.starts == 2, "by another child"


def test_a_child_that_is_killed_is_started_anew(renderer: Renderer) -> None:
    tokenizer = with_template("{{ messages[0].role }}")
    assert renderer.render(tokenizer, MESSAGES, opened=True) == "user"
    assert renderer._child is not None
    os.kill(renderer._child.pid, 9)
    renderer._child.wait()
    assert renderer.render(tokenizer, MESSAGES, opened=True) == "user"
    assert renderer.starts == 2


def test_what_is_no_string_on_the_path_means_nothing(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As to an import; guards notebooks that put a Path there."""
    monkeypatch.setattr(sys, "path", [Path("here"), *sys.path])
    assert renderer.render(with_template("{{ messages[0].role }}"), MESSAGES, opened=True) == "user"


def test_half_an_answer_is_none(renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a traceback where the child is ended while it answers."""
    (tmp_path / "child.py").write_text("input(); print('{\"text\": \"ab', end='')")
    monkeypatch.setattr(chat, "CHILD", tmp_path / "child.py")
    with pytest.raises(InvalidRowError, match="the process that does it ended with exit code 0"):
        renderer.render(with_template("{{ 1 }}"), MESSAGES, opened=True)


def test_one_of_several_templates_is_taken_or_the_row_fails(lasting: Renderer) -> None:
    assert lasting.render(with_template({"default": "d", "other": "o"}), MESSAGES, opened=True) == "d"
    with pytest.raises(InvalidRowError, match="the model's chat template cannot be chosen"):
        lasting.render(with_template({"one": "d", "other": "o"}), MESSAGES, opened=True)
