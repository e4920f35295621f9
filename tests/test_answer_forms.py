"""Forms of answers, on templates written in the manner of the families: which form is chosen, how texts are read, and
that a demanded call is in the form that is read."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from dsbd_cli.answer_forms import AnswerForm, Reasoning, form_of
from dsbd_cli.config.chat import ChatConfig
from dsbd_cli.config.child import byte_tokenizer, parser_limits
from dsbd_cli.errors import UsageError
from dsbd_cli.models.response_template import template_reader
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.requests import ToolCall
from tests.helpers.checkpoints import KINDS, wrap

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 3}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "name": "now"},  # as in /v1/responses, without parameters
)
CALL = ToolCall("get_weather", '{"city": "Rom", "days": 2}')

# what chat templates say of calls and reasoning, in the manner of each family
TEMPLATES = {
    "qwen": '{{ "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}',
    "qwen3": '<tool_call>{"name": ..., "arguments": ...}</tool_call> {{ "<think>\\n" }} {{ "\\n</think>" }}',
    "llama": 'Environment: ipython {"name": function name, "parameters": dictionary of argument name and its value}',
    "mistral": '{{ "[TOOL_CALLS] [" }}{{ {"name": name, "arguments": arguments} }}',
    "mistral-v11": '{{ "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}',
    "gpt-oss": "<|channel|>analysis<|message|> to=functions.{{ name }} <|channel|>final<|message|>",
    "qwen3-coder": "<tool_call>\n<function=example_function_name>\n<parameter=arguments>",
    "deepseek-like": "{{ '<｜Assistant｜><think>\\n' }}{% set content = content.split('</think>')[-1] %}",
}
WRITTEN = {
    "qwen": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom", "days": 2}}\n</tool_call>',
    "qwen3": '<tool_call>{"arguments": {"city": "Rom", "days": 2}, "name": "get_weather"}</tool_call>',
    "llama": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rom", "days": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rom", "days": 2}, "id": "abcdefghi"}]',
    "mistral-v11": '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Rom", "days": 2}',
    "gpt-oss": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rom", "days": 2}',
}  # fmt: skip


def form(family: str, added: Mapping[str, tuple[int, bool]] | None = None) -> AnswerForm:
    marks = {"<|channel|>": (300, True), "<|message|>": (301, True)} if family == "gpt-oss" else {}
    return form_of(TEMPLATES[family], added or marks)


@pytest.mark.parametrize("family", WRITTEN)
def test_calls_are_read_in_the_form_of_the_family(family: str) -> None:
    read = form(family).read_calls
    assert read(WRITTEN[family], TOOLS) == ("", (CALL,))
    assert read("It rains.", TOOLS) == ("It rains.", ())
    for cut in (WRITTEN[family][:-20], WRITTEN[family].replace("Rom", 'R"om')):  # what is no whole call stays text
        assert read(cut, TOOLS) == (cut, ())
    if family != "llama":
        assert read(f"Let me look.\n{WRITTEN[family]}", TOOLS) == ("Let me look.", (CALL,))
        kept, calls = read(f"{WRITTEN[family]}\n{WRITTEN[family][:-20]}", TOOLS)
        assert (kept, calls) == (WRITTEN[family][:-20], (CALL,))


def test_several_calls() -> None:
    text = f'{WRITTEN["qwen"]}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
    assert form("qwen").read_calls(text, TOOLS) == ("", (CALL, ToolCall("now", "{}")))
    listed = '[TOOL_CALLS][{"name": "now"}, {"name": "now"}]'
    assert form("mistral").read_calls(listed, TOOLS) == ("", (ToolCall("now", "{}"),) * 2)
    two = '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}'
    assert form("llama").read_calls(two, TOOLS) == ("", (ToolCall("now", "{}"),) * 2)


def test_json_without_a_mark_is_a_call_only_of_a_tool_that_was_given() -> None:
    """Guards answers of Llama 3 that are JSON themselves."""
    for text in ('{"name": "else", "parameters": {}}', '{"name": "now", "parameters": {}} and more', '{"a": 1}'):
        assert form("llama").read_calls(text, TOOLS) == (text, ())


@pytest.mark.parametrize("arguments", ['"{\\"city\\": \\"Rom\\"}"', '{"city": "Rom"}'])
def test_arguments_may_be_json_in_a_string(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert form("qwen").read_calls(text, TOOLS)[1] == (ToolCall("f", '{"city": "Rom"}'),)


@pytest.mark.parametrize("arguments", ["[1]", "1", '"x"', "null", '{"a": NaN}', "[" * 100_000])
def test_what_are_no_arguments_is_no_call(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert form("qwen").read_calls(text, TOOLS) == (text, ())


def test_other_forms_are_not_taken_for_known_ones() -> None:
    assert form("qwen3-coder").calls is None
    assert form_of("{{ messages }}", {}) == AnswerForm()


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("choice", ["required", "get_weather", "now"])
def test_a_demanded_call_is_read_back(family: str, choice: str) -> None:
    """Random texts that the grammar derives are calls of the tools, exact by their schema, and nothing else."""
    from llguidance import LLMatcher

    made = form(family, {}) if family != "gpt-oss" else AnswerForm(None, form(family).calls)
    grammar = made.grammar(ChatConfig(tools=TOOLS, tool_choice=choice))
    assert grammar is not None
    draw, names = random.Random(0), set()
    for _ in range(12):
        matcher = LLMatcher(byte_tokenizer(), grammar.source(), log_level=0, limits=parser_limits())
        text = b""
        while not (matcher.is_accepting() and (draw.random() < 0.5 or not any(matcher.compute_bitmask()[:32]))):
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(32, 127) if mask[byte >> 3] >> (byte & 7) & 1]
            text += bytes([draw.choice(allowed or [10])])
            assert matcher.consume_tokens([text[-1]])
        rest, calls = made.read_calls(text.decode(), TOOLS)
        assert (rest, bool(calls)) == ("", True), text
        for call in calls:
            names.add(call.name)
            arguments = json.loads(call.arguments)
            if call.name == "now":
                assert arguments == {}
            else:
                assert arguments.keys() <= {"city", "days"}
                assert len(arguments["city"]) <= 3
    assert names == ({"get_weather", "now"} if choice == "required" else {choice})


def test_added_tokens_stand_by_their_ids() -> None:
    """Guards calls that are spelled letter by letter where the model knows one token."""
    made = form(
        "qwen", {"<tool_call>": (7, False), "</tool_call>": (8, False), "<|im_end|>": (9, True), "{": (10, False)}
    )
    assert made.tokens == {"<tool_call>": 7, "</tool_call>": 8}
    grammar = made.grammar(ChatConfig(tools=TOOLS[1:], tool_choice="now"))
    assert grammar is not None
    assert '<[7]> "\\n{\\"name\\": \\"now\\", \\"arguments\\": " arguments_0 "}\\n" <[8]>' in grammar.text


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("x", "parameters of the tool 'f' are 'x', but must be a JSON schema"),
        (
            {"properties": {"a": {"type": "wrong"}}},
            "parameters of the tool 'f' cannot be used: .* \\(at /properties/a\\)",
        ),
        (
            {"properties": {"a": {"type": "array", "uniqueItems": True}}},
            "parameters of the tool 'f' cannot be used: .*uniqueItems.* \\(at /properties/a\\)",
        ),
    ],
)
def test_a_schema_that_cannot_be_followed_is_told(parameters: object, message: str) -> None:
    tools = ({"function": {"name": "f", "parameters": parameters}},)
    with pytest.raises(UsageError, match=message):
        form("qwen").grammar(ChatConfig(tools=tools, tool_choice="required"))


def test_a_keyword_that_another_can_say_is_enforced() -> None:
    """Guards names of properties that only the check of whole texts would know."""
    labels = {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}}
    tools = ({"function": {"name": "f", "parameters": {"properties": {"a": labels}, "required": ["a"]}}},)
    grammar = form("qwen").grammar(ChatConfig(tools=tools, tool_choice="f"))
    assert grammar is not None
    assert '"propertyNames"' not in grammar.text
    grammar.source()


# Reasoning

THOUGHT = "<|channel|>analysis<|message|>think<|end|><|start|>assistant"
BY_ROLE = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rom", "days": 2}'  # as in templates


@pytest.mark.parametrize(
    ("family", "opened", "text", "expected"),
    [
        ("qwen3", False, "<think>\nthink\n</think>\n\nhi", ("think", "hi")),
        ("qwen3", True, "think\n</think>\n\nhi", ("think", "hi")),
        ("qwen3", True, "<think>think</think>hi", ("think", "hi")),  # some write the mark that stands in the prompt
        ("qwen3", False, "<think>\n\n</think>\n\nhi", (None, "hi")),
        ("qwen3", False, " hi </think>", (None, " hi </think>")),
        ("qwen3", False, "<think> thi", ("thi", "")),
        ("deepseek-like", True, "a</think>b</think>c", ("a", "b</think>c")),
        ("gpt-oss", False, f"{THOUGHT}<|channel|>final<|message|>hi", ("think", "hi")),
        ("gpt-oss", False, "<|channel|>final<|message|>hi", (None, "hi")),
        ("gpt-oss", False, "<|channel|>analysis<|message|>thi", ("thi", "")),
        ("gpt-oss", False, "plain", (None, "plain")),
        (
            "gpt-oss",
            False,
            f"{THOUGHT}<|channel|>commentary<|message|>plan<|end|><|start|>assistant<|channel|>final<|message|>hi",
            ("think\n\nplan", "hi"),
        ),
        ("gpt-oss", False, f"{THOUGHT}{WRITTEN['gpt-oss']}", ("think", WRITTEN["gpt-oss"])),
        ("gpt-oss", False, f"{THOUGHT}{BY_ROLE}", ("think", f"<|start|>assistant{BY_ROLE}")),
        ("gpt-oss", False, f"{THOUGHT}<|channel|>final <|constrain|>json<|message|>{{}}", ("think", "{}")),
        ("gpt-oss", False, f"{THOUGHT}<|channel|>final json<|message|>{{}}", ("think", "{}")),
        ("gpt-oss", False, f"{THOUGHT}<|channel|>final <|constrain|>json", ("think", "")),  # cut in a header
        ("gpt-oss", False, f"{THOUGHT}<|channel|>fin", ("think", "")),
        ("gpt-oss", False, f"{THOUGHT}<|channel|>", ("think", "")),
        ("gpt-oss", False, f"{THOUGHT} to=func", ("think", "")),
        ("gpt-oss", False, THOUGHT, ("think", "")),
        ("gpt-oss", False, "<|channel|>", (None, "")),
        (
            "gpt-oss",
            False,
            f"{THOUGHT}<|channel|>analysis<|message|>I write to=functions.f<|end|><|channel|>final<|message|>hi",
            ("think\n\nI write to=functions.f", "hi"),
        ),
    ],
)
def test_reasoning_is_split(family: str, opened: bool, text: str, expected: tuple[str | None, str]) -> None:
    marks = form(family).reasoning
    assert marks is not None
    reasoning = Reasoning(marks, opened)
    assert reasoning.split(text) == expected
    whole = ""
    for letter in text:  # what is certain of a beginning is the beginning of the answer
        whole += letter
        assert expected[1].startswith(reasoning.certain(whole))
    assert reasoning.certain(f"{text}.") == f"{expected[1]}." or not expected[1]


@pytest.mark.parametrize("text", [BY_ROLE, BY_ROLE.lstrip(), f"{THOUGHT}{BY_ROLE}", f"{THOUGHT}{WRITTEN['gpt-oss']}"])
def test_calls_of_gpt_oss_are_read_behind_reasoning(text: str) -> None:
    """Before, a call whose function stands behind the role was reasoning."""
    made = form("gpt-oss")
    assert made.reasoning is not None
    reasoning, answer = Reasoning(made.reasoning, False).split(text)
    assert reasoning == ("think" if "think" in text else None)
    assert made.read_calls(answer, TOOLS) == ("", (CALL,))


def test_stop_strings_count_in_the_content_of_a_message() -> None:
    made = form("gpt-oss").reasoning
    assert made is not None
    for header in ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"):
        written = f"{THOUGHT}{header}".encode()
        assert Reasoning(made, False).stops_at(written[:-1]) is None
        assert Reasoning(made, False).stops_at(written + b" \nhi") == len(written) + 2


@pytest.mark.parametrize(("prefix", "left"), [("", "same"), (" \n", "same"), ("a", "open"), ("a</think>b", None)])
def test_what_a_prefix_leaves_of_the_reasoning(prefix: str, left: str | None) -> None:
    marks = form("qwen3").reasoning
    assert marks is not None
    opened, closed = Reasoning(marks, True), Reasoning(marks, False)
    assert opened.after(prefix.encode()) == (opened if left else None)
    assert closed.after(prefix.encode()) == (closed if left == "same" else None)
    assert closed.after(b"<think>a") == opened


# Response templates, which come with some tokenizers

RESPONSES: dict[str, dict[str, Any]] = {
    "cohere-like": {
        "start_anchor": "<|CHATBOT|>",
        "fields": {
            "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
            "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
            "tool_calls": {
                "open": "<|START_ACTION|>",
                "close": "<|END_ACTION|>",
                "content": "json",
                "transform_each": True,
                "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            },
        },
    },
    "open-from-the-beginning": {
        "start_anchor": "Assistant:",
        "fields": {
            "thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            "content": {"close": "</s>"},
        },
    },
    "named-by-a-pattern": {
        "start_anchor": "model\n",
        "fields": {
            "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": "<turn|>"},
        },
    },
}


def by_template(name: str) -> AnswerForm:
    return form_of("", {}, RESPONSES[name], template_reader(RESPONSES[name]))


def test_marks_of_a_response_template() -> None:
    marks = {name: by_template(name).reasoning for name in RESPONSES}
    assert {name: part and (part.begin, part.ends) for name, part in marks.items()} == {
        "cohere-like": ("<|START_THINKING|>", ("<|START_RESPONSE|>",)),
        "open-from-the-beginning": ("", ("</think>",)),
        "named-by-a-pattern": ("<|channel>thought\n", ("<channel|>",)),
    }
    opened = marks["open-from-the-beginning"]
    assert opened is not None
    for text, thought in (("think</think>\nhi", "think"), ("<think> think</think>hi", "<think> think")):
        assert Reasoning(opened, True).split(text) == (thought, "hi")


def test_calls_are_those_that_transformers_reads() -> None:
    texts = {
        "cohere-like": '<|START_ACTION|>[{"tool_name": "now", "parameters": {"a": "1"}}]<|END_ACTION|>',
        "named-by-a-pattern": 'Look: <|tool_call>call:now{a:<|"|>1<|"|>}<tool_call|>',
    }
    for name, text in texts.items():
        expected = parse_response(text, RESPONSES[name], prefix="")
        rest, calls = by_template(name).read_calls(text, TOOLS)
        assert rest == expected.get("content", "")
        assert calls == (ToolCall("now", '{"a": "1"}'),)
        [read] = expected["tool_calls"]
        assert read["function"] == {"name": "now", "arguments": {"a": "1"}}
        cut = text[: len(text) // 2 + 8]
        assert by_template(name).read_calls(cut, TOOLS) == (cut, ())


@pytest.mark.parametrize(
    "response", [{}, {"fields": 1}, {"fields": {"thinking": 1}}, {"fields": {"thinking": {"open": 5}}}]
)
def test_a_malformed_response_template_says_nothing(response: dict[str, Any]) -> None:
    """Guards loading: the file of a checkpoint may hold anything."""
    made = form_of(TEMPLATES["qwen3"], {}, response, template_reader(response))
    assert made == form("qwen3")


# Marks that are special tokens


@pytest.mark.parametrize("kind", KINDS)
def test_marks_that_are_special_tokens_are_text(kind: str) -> None:
    """Before, `a</think>hX` was `ahX`."""
    tokenizer = wrap(KINDS[kind](), chat_template=TEMPLATES["qwen3"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<note>"]})
    codec = HFCodec(tokenizer, (2,))
    begin, end, note, eos = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<note>", "</s>"])
    [thought, answer] = codec.encode_pieces(["so", "fox"])
    ids = [begin, *thought, note, end, *answer, eos]
    text = codec.decode(ids)
    assert text.replace(" ", "").replace("▁", "") == "<think>so</think>fox"
    assert form("qwen3").reasoning is not None
    assert Reasoning(codec.form.reasoning, False).split(text)[0] == "so"  # type: ignore[arg-type]
    table = codec.token_bytes()
    assert (table[begin], table[end], table[note], table[eos]) == (b"<think>", b"</think>", b"", b"")
    assert codec.decode([*thought, note]) == codec.decode(thought), "other special tokens are left out as before"
    plain = HFCodec(wrap(KINDS[kind]()), (2,))
    assert plain.form == AnswerForm()


def test_an_end_token_is_no_text_though_marks_name_it() -> None:
    """gpt-oss ends a call with <|call|>, which is one of its end tokens."""
    tokenizer = wrap(KINDS["byte-level"](), chat_template=TEMPLATES["gpt-oss"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel|>", "<|message|>", "<|call|>"]})
    call = tokenizer.convert_tokens_to_ids("<|call|>")
    assert HFCodec(tokenizer, (2, call)).token_bytes()[call] == b""
    assert HFCodec(tokenizer, (2,)).token_bytes()[call] == b"<|call|>"
