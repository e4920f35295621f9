"""The table of request fields: it has every name that there is, and each is honoured or is the row's error, in every
form of input."""

from __future__ import annotations

import csv
import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses
from transformers import GenerationConfig

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.config.token_rules import TokenRules
from dsbd_cli.io.lines.tables import lines_reader, table_header
from dsbd_cli.io.records.cells import ColumnRules, column_rules
from dsbd_cli.io.records.reader import AGREEING_FIELDS, RowReader
from dsbd_cli.io.records.request_fields import (
    ALIASES,
    CONTAINERS,
    DATA,
    FIELDS,
    NAMED,
    REFUSED,
    REFUSED_IN_RESPONSES,
    RESPONSES,
    ROW_FIELDS,
    WITHOUT_EFFECT,
)
from dsbd_cli.io.records.row import Row
from dsbd_cli.requests import Request

RUN = RowReader(SamplingConfig(), seed=3, num_beams=4)
STRICT = replace(RUN, strict=True)
EVERY = {*NAMED, *REFUSED, *WITHOUT_EFFECT, *CONTAINERS}

# Names of request fields that are no attributes of an installed package.
VLLM = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt chat_template
    chat_template_kwargs continue_final_message detokenize documents ec_transfer_params echo extra_args flat_logprobs
    frequency_penalty guided_choice guided_decoding guided_decoding_backend guided_grammar guided_json guided_regex
    guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty
    logit_bias logits_processors logprob_token_ids logprobs lora_request max_completion_tokens max_tokens
    media_io_kwargs min_p min_tokens mm_processor_kwargs n output_kind presence_penalty priority prompt_embeds
    prompt_logprobs prompt_token_ids reasoning_effort repetition_detection repetition_penalty request_id
    response_format return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
    return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_clone skip_reading_prefix_cache
    skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
    structural_tag structured_outputs temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
    trace_decode_token_ids truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
    beam_width enable_response_messages previous_input_messages previous_response
"""
SGLANG = """
    custom_logit_processor custom_params ebnf frequency_penalty ignore_eos json_schema logit_bias max_new_tokens
    min_new_tokens min_p n no_stop_trim presence_penalty regex repetition_penalty sampling_params sampling_seed
    skip_special_tokens spaces_between_special_tokens stop stop_regex stop_token_ids stream_interval structural_tag
    temperature top_k top_p rid session_id session_params input_ids input_embeds image_data audio_data video_data
    return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs lora_path lora_id
    return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
    return_prompt_token_ids return_meta_info separate_reasoning stream_reasoning task images_config max_dynamic_patch
    min_dynamic_patch use_audio_in_video extra_key ngram_corpus_id priority custom_labels background require_reasoning
    max_thinking_tokens no_logs log_metrics return_entropy return_sampling_mask conversation_id
"""
TGI = """
    adapter_id best_of decoder_input_details details do_sample frequency_penalty grammar max_new_tokens parameters
    repetition_penalty return_full_text seed stop temperature top_k top_n_tokens top_p truncate typical_p watermark
"""
OTHERS = "extra_body random_seed system choice custom_id metadata num_return_sequences stop_sequences"


def test_the_table_has_every_name() -> None:
    openai = [
        *chats.CompletionCreateParamsBase.__annotations__,
        *completions.CompletionCreateParamsBase.__annotations__,
        "stream",
    ]
    config = [name for name in vars(GenerationConfig()) if name != "_commit_hash"]
    names = [*openai, *config, *" ".join((VLLM, SGLANG, TGI, OTHERS)).split()]
    assert len(config) > 50
    assert {name for name in names if name not in EVERY} == set()
    of_responses = {*EVERY, *(field.name for field in RESPONSES), *REFUSED_IN_RESPONSES}
    assert set(responses.ResponseCreateParamsBase.__annotations__) - of_responses == set()


def test_no_name_stands_twice_in_it() -> None:
    names = [*NAMED, *REFUSED, *WITHOUT_EFFECT, *CONTAINERS]
    assert len(names) == len(set(names))


def test_page_and_schema_are_made_from_it() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate_fields.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run make docs"
    assert script["SCHEMA"].read_text(encoding="utf-8") == script["schema"](), "run make docs"


# What each field asks for

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
JSON = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
GBNF = 'root ::= "a" | "b"'


def sampling(name: str) -> Callable[[Request], object]:
    return lambda request: getattr(request.sampling, name)


def kwargs(request: Request) -> object:
    return request.chat.template_kwargs


def grammar(request: Request) -> object:
    return request.grammar and (request.grammar.kind, request.grammar.text)


def system(request: Request) -> object:
    assert request.messages is not None
    return request.messages[0]["content"]


# Field -> what is looked at, and pairs of a value and what it comes to.
ASKED: dict[str, tuple[Callable[[Request], object], list[tuple[Any, object]]]] = {
    **{
        name: (sampling(name), [(value, value) for value in values])
        for name, values in {
            "temperature": (0.5, 0.0, 1.5),
            "top_k": (5, 7),
            "top_p": (0.5, 0.9),
            "min_p": (0.5, 0.1),
            "max_new_tokens": (5, 6),
            "min_new_tokens": (0, 3),
            "min_length": (0, 3),
            "length_penalty": (0.5, 2.0),
            "early_stopping": (True, "never"),
            "n_best": (2, 3),
            "num_beams": (1, 2),
            "token_logprobs": (True,),
            "source_lang": ("en", "fr"),
            "target_lang": ("en", "fr"),
            "prefix": ("a", "b"),
            "repetition_penalty": (1.0, 1.5),
            "presence_penalty": (0.5, -1.0),
            "frequency_penalty": (0.5, -1.0),
            "no_repeat_ngram_size": (0, 3),
            "ignore_eos": (True,),
            "include_stop_str_in_output": (True,),
            "skip_special_tokens": (False,),
            "truncate_prompt_tokens": (-1, 5),
            "token_rules": ("none", "min_length=3"),
            "reasoning": ("keep", "drop"),
        }.items()
    },
    "prompt": (lambda request: request.prompt, [("a", "a"), ("b", "b")]),
    "messages": (
        lambda request: request.messages,
        [([{"role": "user", "content": "a"}], ({"role": "user", "content": "a"},))],
    ),
    "audio": (lambda request: request.audio, [("a.wav", "a.wav")]),
    "image": (lambda request: request.image, [("a.png", "a.png")]),
    "seed": (lambda request: request.seed, [(5, 5), (0, 0)]),
    "system": (system, [("x", "x"), ("y", "y")]),
    "stop": (sampling("stop"), [("x", ("x",)), (["x", "y"], ("x", "y"))]),
    "stop_token_ids": (sampling("stop_token_ids"), [([5], (5,)), ([5, 6], (5, 6))]),
    "eos_token_id": (sampling("eos_token_id"), [(5, (5,)), ([5, 6], (5, 6))]),
    "allowed_token_ids": (sampling("allowed_token_ids"), [([5], (5,)), ([5, 6], (5, 6))]),
    "bad_words": (sampling("bad_words"), [(["a"], ("a",)), (["a b", "c"], ("a b", "c"))]),
    "bad_words_ids": (sampling("bad_words_ids"), [([[5]], ((5,),)), ([[5, 6], [7]], ((5, 6), (7,)))]),
    "logit_bias": (sampling("logit_bias"), [({"5": -100}, ((5, -100.0),)), ({"5": 1.5, "0": 2}, ((5, 1.5), (0, 2.0)))]),
    "suppress_tokens": (sampling("token_rules"), [([5, 6], "suppress_tokens=5+6"), ([7], "suppress_tokens=7")]),
    "begin_suppress_tokens": (sampling("token_rules"), [([5], "begin_suppress_tokens=5")]),
    "forced_bos_token_id": (sampling("token_rules"), [(5, "forced_bos_token_id=5"), (6, "forced_bos_token_id=6")]),
    "forced_eos_token_id": (sampling("token_rules"), [(5, "forced_eos_token_id=5"), (6, "forced_eos_token_id=6")]),
    "renormalize_logits": (
        sampling("token_rules"),
        [(True, "renormalize_logits=1"), (False, "renormalize_logits=0")],
    ),
    "add_special_tokens": (sampling("add_special_tokens"), [(False, False)]),
    "top_logprobs": (sampling("top_logprobs"), [(2, 2), (3, 3)]),
    "logprobs": (sampling("token_logprobs"), [(True, True)]),
    "top_n_tokens": (sampling("top_logprobs"), [(2, 2), (3, 3)]),
    "include_reasoning": (sampling("reasoning"), [(False, "drop")]),
    "separate_reasoning": (sampling("reasoning"), [(False, "keep")]),
    "allow": (lambda request: request.allow, [("names", "names"), (["a", "b"], ("a", "b"))]),
    "guided_choice": (lambda request: request.allow, [(["a"], ("a",)), (["a", "b"], ("a", "b"))]),
    "response_format": (
        grammar,
        [
            (JSON, ("json_schema", json.dumps(SCHEMA))),
            ({"type": "json_schema", "schema": SCHEMA}, ("json_schema", json.dumps(SCHEMA))),
            ({"type": "json_schema", "value": {"schema": SCHEMA}}, ("json_schema", json.dumps(SCHEMA))),
            ({"type": "json_object", "schema": SCHEMA}, ("json_schema", json.dumps(SCHEMA))),
            ({"type": "json", "value": SCHEMA}, ("json_schema", json.dumps(SCHEMA))),
            ({"type": "json_object"}, ("json_schema", '{"type": "object"}')),
            ({"type": "regex", "value": "a+"}, ("regex", "a+")),
            ({"type": "grammar", "grammar": 'start: "a"'}, ("lark", 'start: "a"')),
        ],
    ),
    "guided_json": (
        grammar,
        [(SCHEMA, ("json_schema", json.dumps(SCHEMA))), (json.dumps(SCHEMA), ("json_schema", json.dumps(SCHEMA)))],
    ),
    "guided_json_object": (grammar, [(True, ("json_schema", '{"type": "object"}'))]),
    "guided_regex": (grammar, [("a+", ("regex", "a+")), ("b", ("regex", "b"))]),
    "guided_grammar": (grammar, [('start: "a"', ("lark", 'start: "a"'))]),
    "grammar": (
        grammar,
        [('start: "a"', ("lark", 'start: "a"')), ({"type": "regex", "value": "a+"}, ("regex", "a+"))],
    ),
    "structured_outputs": (
        lambda request: (grammar(request), request.allow),
        [
            ({"json": SCHEMA, "backend": "x"}, (("json_schema", json.dumps(SCHEMA)), None)),
            ({"json_object": True}, (("json_schema", '{"type": "object"}'), None)),
            ({"regex": "a+", "json_object": False}, (("regex", "a+"), None)),
            ({"grammar": 'start: "a"'}, (("lark", 'start: "a"'), None)),
            ({"choice": ["a"]}, (None, ("a",))),
        ],
    ),
    "tools": (
        lambda request: request.chat.tools,
        [([TOOL], (TOOL,)), ([{"type": "function", **TOOL["function"]}], (TOOL,))],  # type: ignore[dict-item]
    ),
    "tool_choice": (
        lambda request: request.chat.tool_choice,
        [
            ("none", "none"),
            ("required", "required"),
            ({"type": "function", "function": {"name": "f"}}, "f"),
            ({"type": "function", "name": "f"}, "f"),
        ],
    ),
    "documents": (lambda request: request.chat.documents, [([{"text": "a"}], ({"text": "a"},))]),
    "chat_template_kwargs": (kwargs, [({"a": 1}, {"a": 1}), ({"b": [None]}, {"b": [None]})]),
    "reasoning_effort": (
        kwargs,
        [("low", {"reasoning_effort": "low"}), ("none", {"reasoning_effort": "none", "enable_thinking": False})],
    ),
    "continue_final_message": (lambda request: request.chat.continue_final_message, [(True, True)]),
    "add_generation_prompt": (lambda request: request.chat.continue_final_message, [(False, True)]),
}
# Fields that only agree with a run or with other fields, and those of the row itself.
APART = {*AGREEING_FIELDS, "parallel_tool_calls", "id", "metadata"}
SOURCES = {"prompt", "messages", "audio", "image"}
CHATS = {"system", "tools", "tool_choice", "documents", "chat_template_kwargs", "reasoning_effort"}
CHATS |= {"continue_final_message", "add_generation_prompt"}
# What must stand beside a field.
BESIDE: dict[str, dict[str, object]] = {
    "top_logprobs": {"token_logprobs": True},
    "tool_choice": {"tools": [TOOL]},
    "add_generation_prompt": {"continue_final_message": True},
}
ASSISTANT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]


def test_every_field_is_looked_at() -> None:
    assert {field.name for field in NAMED.values()} == ASKED.keys() | APART


def messages_for(name: str) -> list[dict[str, str]]:
    own = NAMED[name].name if name in NAMED else name
    return ASSISTANT if own in ("continue_final_message", "add_generation_prompt") else ASSISTANT[:1]


def flat(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    if NAMED[name].name in SOURCES:
        return fields
    return {**({"messages": messages_for(name)} if NAMED[name].name in CHATS else {"prompt": "p"}), **fields}


def held(holder: str) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    return lambda name, fields: {**flat(name, {}), holder: fields}


def body(url: str, source: dict[str, Any]) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    def made(name: str, fields: dict[str, Any]) -> dict[str, Any]:
        told = messages_for(name) if url != "/v1/completions" else None
        replaced = {key: told if told and key in ("messages", "input") else value for key, value in source.items()}
        return {"custom_id": "x", "method": "POST", "url": url, "body": {**replaced, **fields}}

    return made


def in_extra_body(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    line = CHAT_BODY(name, {})
    return {**line, "body": {**line["body"], "extra_body": fields}}


CHAT_BODY = body("/v1/chat/completions", {"messages": None})
FORMS: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "flat": flat,
    **{holder: held(holder) for holder in CONTAINERS},
    "completions": body("/v1/completions", {"prompt": "p"}),
    "chat": CHAT_BODY,
    "responses": body("/v1/responses", {"input": None}),
    "extra_body of chat": in_extra_body,
}
# Fields that a form does not have.
NOT_IN = {
    "completions": {*SOURCES, *CHATS, "logprobs"},
    "chat": {*SOURCES, "add_special_tokens"},
    "responses": {*SOURCES, "add_special_tokens", "reasoning"},
    "extra_body of chat": {*SOURCES, "add_special_tokens"},
    **dict.fromkeys(CONTAINERS, SOURCES),
}


def read(row: object, reader: RowReader = STRICT) -> Row:
    return reader.read(json.dumps(row).encode(), index=0, number=1)


def of_row(row: object) -> Request:
    got = read(row)
    assert (got.error, got.warnings) == (None, ())
    assert got.request is not None
    return got.request


CASES = [
    (form, name)
    for form in FORMS
    for name, field in NAMED.items()
    if field.name in ASKED and field.name not in NOT_IN.get(form, ())
]


@pytest.mark.parametrize(("form", "name"), CASES)
def test_a_field_is_honoured_in_every_form(form: str, name: str) -> None:
    """Also that it is the field that does it: without it the request is another one."""
    looked_at, values = ASKED[NAMED[name].name]
    beside = BESIDE.get(NAMED[name].name, {})
    for value, expected in values:
        request = of_row(FORMS[form](name, {**beside, name: value}))
        assert looked_at(request) == expected
    if NAMED[name].name not in SOURCES | {"add_generation_prompt"}:
        plain = read(FORMS[form](name, beside)).request
        assert plain is not None
        assert looked_at(request) != looked_at(plain)


@pytest.mark.parametrize(
    ("form", "name"), [(form, name) for form in FORMS for name in REFUSED if form != "flat" or name not in DATA]
)
def test_a_field_that_cannot_be_honoured_is_the_rows_error(form: str, name: str) -> None:
    row = FORMS[form]("temperature", {name: {"some": "value"}})
    inside = form if form in CONTAINERS else {"extra_body of chat": "body.extra_body", "flat": ""}.get(form, "body")
    got = read(row)
    assert got.request is None
    path = f"{inside}.{name}".removeprefix(".")
    assert (
        str(got.error)
        == f"line 1: {path} is {{'some': 'value'}}, which is not supported ({REFUSED[name].use}): drop it"
    )


@pytest.mark.parametrize("form", FORMS)
def test_values_that_change_nothing_are_as_good_as_none(form: str) -> None:
    plain = FORMS[form]("temperature", {})
    neutral = {name: value for name, field in REFUSED.items() for value in field.neutral[:1]}
    neutral |= {name: value for name, field in NAMED.items() for value in field.neutral[:1]}
    nothing = dict.fromkeys(sorted(EVERY - SOURCES - {*CONTAINERS}))
    for fields in (neutral, nothing, {name: {"any": ["value"]} for name in WITHOUT_EFFECT}):
        got = read(FORMS[form]("temperature", fields))
        assert (got.error, got.warnings) == (None, ())
        assert (got.request, got.key) == (read(plain).request, read(plain).key)


@pytest.mark.parametrize("name", [*ROW_FIELDS, *ALIASES])
def test_a_wrong_type_is_the_rows_error_with_the_rows_name(name: str) -> None:
    if NAMED[name].name == "metadata":
        return
    wrong: object = 5 if name == "documents" else [{"a": [1]}]
    got = read(flat(name, {**BESIDE.get(NAMED[name].name, {}), name: wrong}))
    assert got.request is None
    assert str(got.error).startswith(f"line 1: {name}"), got.error


# Columns of a table


def rows_of_table(path: Path, columns: dict[str, Any], rules: ColumnRules) -> list[Row]:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerow([cell if isinstance(cell, str) else json.dumps(cell) for cell in columns.values()])
    with path.open("rb") as stream:
        lines = list(lines_reader(path, rules)(stream))
    return [STRICT.read(line, index=index, number=number) for index, (number, line) in enumerate(lines)]


@pytest.mark.parametrize("name", sorted(FIELDS.keys() & ASKED.keys()))
def test_a_column_is_honoured(name: str, tmp_path: Path) -> None:
    """Where --set columns names it, and else where its name is no everyday word."""
    for value, _ in ASKED[name][1]:
        row = flat(name, {**BESIDE.get(name, {}), name: value})
        wanted = read(row)
        [named] = rows_of_table(tmp_path / "in.csv", row, column_rules(",".join(row)))
        assert (named.error, named.request) == (None, wanted.request)
        # 1.0 is 1 in a table, as pandas writes integers beside empty cells
        assert named.key == wanted.key or (isinstance(value, float) and value.is_integer())
        if all("_" in column for column in row.keys() - SOURCES):
            [parsed] = rows_of_table(tmp_path / "in.csv", row, ColumnRules())
            assert (parsed.error, parsed.request, parsed.key) == (None, wanted.request, named.key)


def test_columns_that_no_row_has_a_field_for_are_carried_and_told(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("prompt,max_length,extra_body,regex,n,other\np,5,{},a,2,x\n", encoding="utf-8")
    header = table_header(path)
    assert header is not None
    told = header.notes(path)
    assert [note.removeprefix(f"{path}: the column").split(" carried")[0] for note in told] == [
        "s regex, n are",
        " max_length is",
        " extra_body is",
    ]
    assert "(it counts the prompt too: max_new_tokens counts the answer; --set columns=prompt ends" in told[1]
    quiet = table_header(path, column_rules("prompt"))
    assert quiet is not None
    assert quiet.notes(path) == []


# What a row says in which form does not matter, but what it says

ASKING = [name for name in ROW_FIELDS if name in ASKED]


@given(st.data())
def test_rows_that_differ_in_one_field_have_different_keys(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(ASKING))
    beside = BESIDE.get(name, {})
    values: list[object] = [value for value, _ in ASKED[name][1]]
    rows = [flat(name, {**beside, name: value}) for value in values]
    if name not in SOURCES:
        rows.append(flat(name, beside))
    if name == "add_generation_prompt":  # it says what the field beside it says
        rows = rows[:1]
    asked = [json.dumps(ASKED[name][0](request), default=str) for row in rows if (request := read(row).request)]
    keys = [read(row).key for row in rows]
    for index, key in enumerate(keys):
        for other in range(index):
            if asked[index] != asked[other]:
                assert key != keys[other], (rows[index], rows[other])


@pytest.mark.parametrize("name", ALIASES)
def test_another_name_asks_for_the_same(name: str) -> None:
    own = ALIASES[name]
    if own in APART:
        return
    value = ASKED[own][1][0][0]
    beside = BESIDE.get(own, {})
    assert read(flat(name, {**beside, name: value})).key == read(flat(own, {**beside, own: value})).key
    both = read(flat(name, {**beside, name: value, own: value}))
    assert "is given under another name too: drop one" in str(both.error)


@pytest.mark.parametrize(
    ("form", "other"),
    [
        ({"guided_json": SCHEMA}, {"response_format": JSON}),
        ({"json_schema": json.dumps(SCHEMA)}, {"response_format": JSON}),
        ({"guided_choice": ["a"]}, {"allow": ["a"]}),
        ({"structured_outputs": {"choice": ["a"]}}, {"allow": ["a"]}),
        ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
        ({"grammar": 'start: "a"'}, {"ebnf": 'start: "a"'}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"extra_body": {"min_p": 0.5}}, {"min_p": 0.5}),
        ({"sampling_params": {"min_new_tokens": 5}}, {"min_tokens": 5}),
        ({"do_sample": True}, {}),
        ({"best_of": 4}, {}),
    ],
)
def test_forms_of_the_same_have_the_same_key(form: dict[str, object], other: dict[str, object]) -> None:
    assert read(flat("temperature", form)).key == read(flat("temperature", other)).key
    assert of_row(flat("temperature", form)) == of_row(flat("temperature", other))


def test_the_order_of_what_a_template_writes_is_asked_for_too() -> None:
    """Of a function's parameters, and of the arguments of a call."""
    parameters = [{"a": {}, "b": {}}, {"b": {}, "a": {}}]
    tools = [
        [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
        for properties in parameters
    ]
    assert len({read(flat("tools", {"tools": functions})).key for functions in tools}) == 2
    calls = [[{"function": {"name": "f", "arguments": arguments}}] for arguments in parameters]
    chats_of = [[ASSISTANT[0], {"role": "assistant", "tool_calls": tool_calls}, ASSISTANT[0]] for tool_calls in calls]
    assert len({read({"messages": messages}).key for messages in chats_of}) == 2


# What only agrees


@pytest.mark.parametrize(
    ("reader", "row", "message"),
    [
        (RUN, {"do_sample": True}, None),
        (RUN, {"do_sample": False}, "do_sample is false, but the run samples: give temperature 0, or --decode search"),
        (RUN, {"do_sample": False, "temperature": 0}, None),
        (RUN, {"do_sample": True, "temperature": 0}, "do_sample is true, but temperature is 0"),
        (RUN, {"use_beam_search": True}, "use_beam_search is true, but the run samples"),
        (RUN, {"use_beam_search": True, "temperature": 0}, None),
        (RUN, {"best_of": 4}, None),
        (RUN, {"best_of": 2}, "best_of is 2, but the number of beams is 4 (--num-beams): drop it"),
        (RUN, {"best_of": 2, "num_beams": 2}, None),
        (RUN, {"num_beams": 5}, "num_beams is 5, but the run has 4"),
        (replace(RUN, rule="search"), {"do_sample": False, "use_beam_search": True}, None),
        (replace(RUN, rule="search"), {"do_sample": "no"}, "do_sample is 'no', but must be true or false"),
    ],
)
def test_what_says_how_the_run_decodes_agrees_or_fails(
    reader: RowReader, row: dict[str, object], message: str | None
) -> None:
    got = read({"prompt": "p", **row}, reader)
    assert (got.error is None) if message is None else str(got.error).startswith(f"line 1: {message}")


# Chats


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "tools": [TOOL]}, "tools is [{'function': {"),
        ({"prompt": "p", "system": "s"}, "system is 's', but a plain prompt has no such message: give messages, or"),
        ({"prompt": "p", "reasoning_effort": "low"}, "reasoning_effort is 'low', but it is about a chat"),
        (
            {"messages": [{"role": "system", "content": "a"}], "system": "b"},
            "system is 'b', but messages[0] is one too: drop one",
        ),
        (
            {"messages": ASSISTANT[:1], "continue_final_message": True},
            "continue_final_message is true, but the last message is {'content': 'q', 'role': 'user'}: it must be",
        ),
        ({"messages": ASSISTANT[:1], "add_generation_prompt": False}, "add_generation_prompt is false, but an answer"),
        ({"messages": ASSISTANT[:1], "add_special_tokens": True}, "add_special_tokens is true, but a chat template"),
        ({"messages": ASSISTANT[:1], "tool_choice": "required"}, "tool_choice is 'required', but there are no tools"),
        (
            {"messages": ASSISTANT[:1], "tools": [TOOL], "parallel_tool_calls": False},
            "parallel_tool_calls is false, but whether a model calls",
        ),
        (
            {"messages": ASSISTANT[:1], "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}},
            "reasoning_effort is 'low', but chat_template_kwargs has 'x': drop one",
        ),
        (
            {"messages": [{**ASSISTANT[1], "prefix": True}, ASSISTANT[0]]},
            "messages[0].prefix is true, but only the assistant's last message may be one",
        ),
    ],
)
def test_what_is_wrong_with_a_chat(row: dict[str, object], message: str) -> None:
    assert str(read(row).error).startswith(f"line 1: {message}")


def test_a_prompt_of_chat_is_a_message() -> None:
    chat = replace(STRICT, chat=True)
    got = read({"prompt": "p", "system": "s", "tools": [TOOL]}, chat)
    assert got.request is not None
    expected = ({"role": "system", "content": "s"}, {"role": "user", "content": "p"})
    assert (got.request.messages, got.request.chat.tools) == (expected, (TOOL,))


def test_messages_hold_what_templates_read_and_no_nulls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    history = [
        {"role": "user", "content": "q", "name": "al", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r", **empty},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}],
            "tool_call_id": "c1",
        },
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "c1", "prefix": False},
    ]
    assert of_row({"messages": history}).messages == (
        {"role": "user", "content": "q", "name": "al"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "c1"},
    )


def test_an_answer_continues_a_message_where_row_or_message_says_so() -> None:
    for row in ({"messages": ASSISTANT, "continue_final_message": True}, {"messages": marked_as_prefix()}):
        request = of_row(row)
        assert request.chat.continue_final_message
        assert request.messages == tuple(ASSISTANT)
    assert not of_row({"messages": ASSISTANT}).chat.continue_final_message


def marked_as_prefix() -> list[dict[str, object]]:
    return [{**ASSISTANT[0]}, {**ASSISTANT[1], "prefix": True}]


# The body of /v1/responses


def response(**fields: object) -> dict[str, object]:
    return {"custom_id": "x", "url": "/v1/responses", "body": {"model": "m", **fields}}


def test_a_response_is_asked_for_as_a_chat() -> None:
    schema = {"name": "n", "schema": SCHEMA, "strict": True}
    asked = response(
        input="hi",
        instructions="Be brief.",
        max_output_tokens=9,
        text={"format": {"type": "json_schema", **schema}, "verbosity": "medium"},
        reasoning={"effort": "low", "summary": "auto"},
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
        tool_choice="none",  # a demanded call goes with no format
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        truncation="auto",
        store=False,
    )
    chat = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "response_format": {"type": "json_schema", "json_schema": schema},
        "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}],
        "tool_choice": "none",
        "logprobs": True,
        "top_logprobs": 2,
        "truncate_prompt_tokens": -1,
    }
    got, same = read(asked), read({"custom_id": "x", "url": "/v1/chat/completions", "body": chat})
    assert (got.error, same.error) == (None, None)
    assert (got.request, got.key) == (same.request, same.key)
    assert (got.form, same.form) == ("openai-responses", "openai-chat")
    assert got.request is not None
    assert got.request.grammar == Grammar.json_schema(SCHEMA)


def test_items_of_a_response_are_messages() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "q"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [{"type": "output_text", "text": "c", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
    ]
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in (("1", "f"), ("2", "g"))
    ]
    assert of_row(response(input=items)).messages == (
        {"role": "developer", "content": "ab"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "c", "tool_calls": calls, "reasoning_content": "t"},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "tool", "content": "y", "tool_call_id": "2"},
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "input is null, but must be a non-empty string or list of items"),
        ({"input": []}, "input is [], but must be"),
        ({"input": [1]}, "input[0] is 1, but must be an object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type is 'item_reference', but must be message,"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0] is {'type': 'input"),
        ({"input": [{"role": "user", "content": "a", "mood": 1}]}, "input[0].'mood' is 1, but only role, content,"),
        ({"input": [{"content": "a"}]}, "input[0].role is null, but must be a non-empty string"),
        ({"input": [{"type": "function_call", "name": 1}]}, "input[0].name is 1, but must be a string"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].'encrypted_content' is 'x', but only"),
        ({"input": "a", "instructions": 3}, "instructions is 3, but must be a non-empty string"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text is 'xml', but must be text, json_object"),
        ({"input": "a", "text": {"verbosity": "low"}}, "text.verbosity is 'low', which is not supported"),
        ({"input": "a", "text": {"more": 1}}, "text.'more' is 1, but only format is used"),
        ({"input": "a", "reasoning": {"effort": 3}}, "reasoning is 3, but must be a non-empty string"),
        ({"input": "a", "reasoning": {"more": 3}}, "reasoning.'more' is 3, but only effort is used"),
        ({"input": "a", "include": ["x"]}, "include is ['x'], but only message.output_text.logprobs is included"),
        ({"input": "a", "truncation": "left"}, "truncation is 'left', but must be auto or disabled"),
        (
            {"input": "a", "previous_response_id": "x"},
            "previous_response_id is 'x', which is not supported (nothing is",
        ),
        ({"input": "a", "conversation": "x"}, "conversation is 'x', which is not supported (nothing is kept"),
        ({"prompt": "a", "input": "a"}, "prompt is given, but url is /v1/responses, which takes input"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens is 0, but must be 1 or more"),
    ],
)
def test_what_is_wrong_with_a_response(fields: dict[str, object], message: str) -> None:
    assert str(read(response(**fields)).error).startswith(f"line 1: body.{message}")


# Grammars of other forms


def test_a_grammar_of_llama_cpp_is_read_or_refused() -> None:
    request = of_row({"prompt": "p", "guided_grammar": GBNF})
    assert request.grammar is not None
    assert (request.grammar.kind, request.grammar.source() != "") == ("lark", True)
    assert str(read({"prompt": "p", "ebnf": "root ::= ("}).error).startswith("line 1: ebnf cannot be read as GBNF: ")
    assert str(read({"prompt": "p", "ebnf": "start: (("}).error).startswith("line 1: ebnf cannot be used: ")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"guided_json": "{"}, "guided_json is '{', but must be a JSON schema"),
        ({"guided_json": {"type": "strng"}}, "guided_json cannot be used: Invalid"),
        (
            {"guided_json": {"type": "object"}, "regex": "a"},
            "regex is {'type': 'regex', 'value': 'a'}, but response_",
        ),
        ({"guided_choice": []}, "guided_choice is [], but must be a catalogue's name or a list of answers"),
        ({"guided_choice": ["a"], "regex": "a"}, "guided_choice and grammar both say what may be answered"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs is {'structural_tag': 'x'}, but must have",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs is {'choice': ['b'], 'regex': 'a'}",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type is 'structural_tag', but must be text"),
        ({"suppress_tokens": 5}, "suppress_tokens is 5, but must be a list of token ids"),
        ({"renormalize_logits": 1}, "renormalize_logits is 1, but must be true or false"),
        ({"forced_eos_token_id": [5]}, "forced_eos_token_id is [5], but must be a token id"),
        (
            {"suppress_tokens": [5], "token_rules": "suppress_tokens=6"},
            "suppress_tokens is [5], but token_rules has it too: drop one",
        ),
    ],
)
def test_what_is_wrong_with_a_constraint(row: dict[str, object], message: str) -> None:
    assert str(read({"prompt": "p", **row}).error).startswith(f"line 1: {message}")


def test_rules_of_a_row_go_before_those_of_the_run() -> None:
    """Guards a row that is refused, or overruled, because the run names the same rule."""
    run = replace(STRICT, sampling=SamplingConfig(token_rules="checkpoint, repetition_penalty=1.3,min_length=3"))
    got = read({"prompt": "p", "repetition_penalty": 1.1}, run)
    assert got.request is not None
    sampling = got.request.sampling
    assert (sampling.repetition_penalty, sampling.token_rules) == (1.1, "checkpoint,min_length=3")
    got = read({"prompt": "p", "min_new_tokens": 2}, run)
    assert got.request is not None
    assert got.request.sampling.token_rules == "checkpoint, repetition_penalty=1.3"
    both = {"prompt": "p", "repetition_penalty": 1.1, "token_rules": {"repetition_penalty": 1.2}}
    assert "token_rules has repetition_penalty 1.2: drop one" in str(read(both, run).error)


def test_rules_of_a_row_are_added_to_those_of_the_run() -> None:
    run = replace(STRICT, sampling=SamplingConfig(token_rules="checkpoint,min_length=3"))
    got = read({"prompt": "p", "suppress_tokens": [5], "forced_eos_token_id": 7}, run)
    assert got.request is not None
    expected = "checkpoint,min_length=3,suppress_tokens=5,forced_eos_token_id=7"
    assert got.request.sampling.token_rules == expected


def test_the_sample_of_other_tools_is_read() -> None:
    """Each of its rows is a request without a warning, or fails for the one field that cannot be had."""
    refused = {
        "vllm-17": "prompt_logprobs",
        "vllm-18": "lora_request",
        "chat-9": "body.audio",
        "chat-10": "body.messages[0].content[1]",
        "completion-2": "body.echo",
        "response-4": "body.previous_response_id",
    }
    lines = (Path(__file__).parents[2] / "sample_inputs" / "other_tools.jsonl").read_bytes().splitlines()
    search = replace(STRICT, rule="search")
    rows = [search.read(line, index=index, number=index + 1) for index, line in enumerate(lines)]
    failed = {row.id: str(row.error).partition(": ")[2].partition(" is ")[0] for row in rows if row.error is not None}
    assert failed == refused
    assert {row.form for row in rows} == {"flat", "openai-completions", "openai-chat", "openai-responses"}
    assert not any(row.warnings for row in rows if row.error is None)


def test_the_reasoning_of_a_data_set_costs_no_row() -> None:
    """Guards files of answers that have a text under the name of our own field."""
    got = read({"prompt": "p", "reasoning": "First I count."}, RUN)
    assert got.request is not None
    assert got.warnings == ("line 1: unknown field 'reasoning' (value 'First I count.'); not used",)
    assert "unknown field" in str(read({"prompt": "p", "reasoning": "First I count."}, STRICT).error)


def test_a_row_switches_off_rules_of_the_run() -> None:
    """Guards values that change nothing by themselves, but not beside the run's or the checkpoint's rules."""
    run = replace(STRICT, sampling=SamplingConfig(token_rules="checkpoint,presence_penalty=1.5,frequency_penalty=1"))
    off = {"presence_penalty": 0, "suppress_tokens": [], "begin_suppress_tokens": [], "bad_words_ids": []}
    plain, got = read({"prompt": "p"}, run), read({"prompt": "p", **off}, run)
    assert got.request is not None
    rules = got.request.sampling.rules(TokenRules(suppress_tokens=(1,), bad_words_ids=((2,),)), "checkpoint")
    assert rules == TokenRules(frequency_penalty=1.0)
    assert got.key != plain.key


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "guided_json_object": 0}, "guided_json_object is 0, but must be true or false"),
        ({"prompt": "p", "json_schema": '{"type": "integer", "type": "string"}'}, "json_schema is "),
        (
            {"url": "/v1/completions", "body": {"prompt": "p"}, "temperature": 0},
            "temperature is 0, but stands beside body: put it inside",
        ),
        (
            {"url": "/v1/responses", "body": {"input": [{"type": "reasoning", "content": "t"}, USER]}},
            "body.input[1] follows reasoning",
        ),
        (
            {
                "messages": [USER, {"role": "assistant", "content": "a", "prefix": True}],
                "continue_final_message": False,
            },
            "continue_final_message is false, but the last message has prefix",
        ),
    ],
)
def test_what_would_be_lost_is_an_error(row: dict[str, object], message: str) -> None:
    assert f"line 1: {message}" in str(read(row).error)


def test_names_of_data_cost_no_row() -> None:
    for row in (
        {"prompt": "p", "task": "sum"},
        {"inputs": "p", "url": "http://x.org"},
        {"messages": [USER, {"role": "assistant", "content": "a", "weight": 0}, USER]},
    ):
        assert read(row, RUN).error is None


def test_a_schema_in_the_object_of_openai_is_that_schema() -> None:
    """Guards a grammar that would allow anything."""
    wrapped, plain = ({"prompt": "p", "guided_json": value} for value in ({"name": "n", "schema": SCHEMA}, SCHEMA))
    assert read(wrapped).key == read(plain).key
