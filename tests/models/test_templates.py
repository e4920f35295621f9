"""Conversations in the templates of the families in use have the tokens of transformers' apply_chat_template."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.config.chat import ChatConfig
from dsbd_cli.models.stored_tokenizer import store, stored
from dsbd_cli.models.tokenizer import HFCodec
from tests.helpers.checkpoints import byte_level, wrap

FOLDER = Path(__file__).parent / "templates"
FAMILIES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
MARKS = re.compile(r"<\|[a-z_]+\|>|<｜[^｜]+｜>|</?think>|</?tool_call>|<(?:start|end)_of_turn>|\[/?[A-Z_]{4,}\]")

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a place"},
        "days": {"type": "array", "items": {"type": "integer"}},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": PARAMETERS}}
SYSTEM = {"role": "system", "content": "Be brief. <|none|>"}
USER = {"role": "user", "content": "Wie ist das Wetter in Zürich?\n"}
ANSWER = {"role": "assistant", "content": "Schön,"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "weather", "content": '{"sky": "blue"}'}
THOUGHT = {**ANSWER, "reasoning_content": "It may rain."}
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "plain": ([USER], {}),
    "system": ([SYSTEM, USER, ANSWER, {"role": "user", "content": "And now?"}], {}),
    "tools": ([SYSTEM, USER], {"tools": [WEATHER]}),
    "no tools": ([USER], {"tools": [WEATHER], "tool_choice": "none"}),
    "called": ([USER, CALL, RESULT], {"tools": [WEATHER]}),
    "called, with nulls": ([USER, {**CALL, "content": None, "refusal": None}, RESULT], {"tools": [WEATHER]}),
    "thinking": ([USER], {"template_kwargs": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}}),
    "not thinking": ([USER], {"template_kwargs": {"enable_thinking": False, "thinking": False}}),
    "thought": ([USER, THOUGHT], {"continue_final_message": True}),
    "continued": ([USER, ANSWER], {"continue_final_message": True}),
    "continued blank": ([USER, {**ANSWER, "content": "Schön, "}], {"continue_final_message": True}),
    "answered": ([USER, ANSWER], {}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": " Hi "}, {"type": "image"}]}], {}),
    "documents": ([USER], {"documents": [{"title": "a", "text": "b"}]}),
    "unknown variables": ([USER], {"template_kwargs": {"date_string": "1 May 2026", "xyz": [None, {"a": 1.5}]}}),
}


@cache
def tokenizer_of(family: str) -> Any:
    """A tokenizer that has the marks of a family's template as tokens."""
    template = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
    tokenizer = wrap(byte_level(), chat_template=template)
    tokenizer.add_tokens(sorted(set(MARKS.findall(template))), special_tokens=True)
    return tokenizer


def theirs(tokenizer: Any, messages: list[dict[str, Any]], chat: dict[str, Any]) -> list[int]:
    """The ids of transformers. Raises what the template raises."""
    continued = chat.get("continue_final_message", False)
    ids: list[int] = tokenizer.apply_chat_template(
        messages,
        tools=None if chat.get("tool_choice") == "none" else chat.get("tools"),
        documents=chat.get("documents"),
        add_generation_prompt=not continued,
        continue_final_message=continued,
        return_dict=False,
        **chat.get("template_kwargs", {}),
    )
    return ids


def outcome(encode: Callable[[], list[int]]) -> tuple[list[int] | None, str]:
    """The ids, or None and the beginning of the message of what was raised, in one line."""
    try:
        return encode(), ""
    except Exception as error:
        return None, " ".join(str(error).split())[:160]


@pytest.fixture(params=["transformers", "stored"])
def codec(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], HFCodec]:
    """Make a codec of a tokenizer as it is, or as a later load has it."""

    def made(tokenizer: Any) -> HFCodec:
        if request.param == "transformers":
            return HFCodec(tokenizer, ())
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        facts = store(tokenizer)
        assert facts is not None
        restored = stored(facts, lambda: tokenizer)
        assert restored is not None
        return HFCodec(restored, ())

    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_transformers(family: str, codec: Callable[[Any], HFCodec]) -> None:
    """Every conversation that a template takes; one that it refuses is refused with the same words."""
    tokenizer, taken = tokenizer_of(family), {}
    made = codec(tokenizer)
    for name, (messages, chat) in CHATS.items():
        expected, refused = outcome(lambda: theirs(tokenizer, messages, chat))  # noqa: B023
        ours, told = outcome(lambda: made.encode_chat(messages, ChatConfig(**chat)))  # noqa: B023
        assert ours == expected, name
        assert refused[:80] in told, name
        taken[name] = ours
    taken = {name: ids for name, ids in taken.items() if ids is not None}
    assert taken.keys() >= {"plain", "system", "thinking", "not thinking", "continued", "answered"}
    assert taken["continued"] != taken["answered"]


@pytest.mark.parametrize(("family", "name"), [("qwen3", "thinking"), ("gpt_oss", "thinking"), ("deepseek", "thinking")])
def test_variables_change_the_prompt(family: str, name: str) -> None:
    made = HFCodec(tokenizer_of(family), ())
    assert made.encode_chat(CHATS[name][0], ChatConfig(**CHATS[name][1])) != made.encode_chat(
        CHATS["not thinking"][0], ChatConfig(**CHATS["not thinking"][1])
    )


@pytest.mark.parametrize("family", ["qwen3", "llama3", "mistral", "gpt_oss", "deepseek"])
def test_tools_reach_the_prompt_unless_none_is_chosen(family: str) -> None:
    made = HFCodec(tokenizer_of(family), ())
    chat = ChatConfig(tools=(WEATHER,))
    assert "weather" in made.render_chat([USER], chat)
    assert made.render_chat([USER], ChatConfig(tools=(WEATHER,), tool_choice="none")) == made.render_chat([USER])


@pytest.mark.parametrize("family", ["llama3", "mistral", "gpt_oss"])
def test_arguments_as_text_are_those_of_the_object(family: str) -> None:
    """As vLLM does: lines of the OpenAI API hold JSON text, which these templates would quote once more."""
    [call] = CALL["tool_calls"]
    written = {**CALL, "tool_calls": [{**call, "function": {**call["function"], "arguments": '{"city":"Zürich"}'}}]}
    made, chat = HFCodec(tokenizer_of(family), ()), ChatConfig(tools=(WEATHER,))
    assert made.encode_chat([USER, written, RESULT], chat) == theirs(
        tokenizer_of(family), [USER, CALL, RESULT], {"tools": [WEATHER]}
    )


def test_a_template_that_joins_texts_gets_arguments_as_text() -> None:
    [call] = CALL["tool_calls"]
    written = {**CALL, "tool_calls": [{**call, "function": {**call["function"], "arguments": '{"city":"Bern"}'}}]}
    messages = [USER, written, RESULT]
    ids = HFCodec(tokenizer_of("deepseek"), ()).encode_chat(messages)
    assert ids == theirs(tokenizer_of("deepseek"), messages, {})
