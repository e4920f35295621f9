"""Reasoning and calls of functions in records of every form. The openai package parses what clients parse."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import orjson
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from dsbd_cli.config.chat import ChatConfig
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.variants import BEAM_COLUMNS
from dsbd_cli.io.records.beam_record import csv_record, parquet_record
from dsbd_cli.io.records.native_record import native_record, text_record
from dsbd_cli.io.records.openai_record import openai_record
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.io.records.record_parts import MethodRecord
from dsbd_cli.io.records.row import Form, Row
from dsbd_cli.pick.candidate_rows import record_row
from dsbd_cli.requests import Hypothesis, RequestResult, TokenDetail, ToolCall
from dsbd_cli.stats import RequestStats

METHOD = MethodRecord(MethodConfig(), "t", "d", created=1_700_000_000)
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALLS = (ToolCall("f", '{"a": 1}'), ToolCall("g", "{}"))
URLS: dict[str, Form] = {"/v1/completions": "openai-completions", "/v1/chat/completions": "openai-chat"}


def row_of(form: Form = "openai-chat", **chat: object) -> Row:
    asked = (
        {"prompt": "p"} if form in ("flat", "openai-completions") else {"messages": [{"role": "user", "content": "p"}]}
    )
    row = RowReader().read(json.dumps({"id": "x", "metadata": {"k": 1}, **asked}).encode(), index=3, number=7)
    assert row.request is not None
    request = replace(row.request, chat=ChatConfig(**chat)) if chat else row.request  # type: ignore[arg-type]
    return replace(row, form=form, request=request)


def answered(row: Row, **beam: object) -> RequestResult:
    assert row.request is not None
    best = {"text": "t", "token_ids": (1, 2), "finish_reason": "stop", "logprob": -1.0, "score": -0.5, **beam}
    other = Hypothesis("u", (1,), "stop", -2.0, -2.0)
    return RequestResult(row.request, (Hypothesis(**best), other), 3, RequestStats())  # type: ignore[arg-type]


def body_of(row: Row, result: RequestResult) -> dict[str, object]:
    line = openai_record(row, result, METHOD)
    body: dict[str, object] = orjson.loads(line)["response"]["body"]
    return body


def test_native_records_have_them_beside_the_text() -> None:
    row = row_of()
    line = native_record(row, answered(row, text="", reasoning="r", tool_calls=CALLS, reasoning_tokens=1), METHOD)
    record = orjson.loads(line)
    calls = [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}]
    expected = {"text": "", "reasoning": "r", "tool_calls": calls}
    for part in (record, record["beams"][0]):
        assert {name: part[name] for name in expected} == expected
    assert not {"reasoning", "tool_calls"} & record["beams"][1].keys()
    assert record["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert "completion_tokens_details" not in orjson.loads(native_record(row, answered(row), METHOD))["usage"]


def test_a_text_alone_is_the_answer_or_its_calls() -> None:
    row = row_of()
    assert text_record(row, answered(row, reasoning="r"), METHOD) == b"t"
    assert text_record(row, answered(row, text="", reasoning="r"), METHOD) == b""
    calls = text_record(row, answered(row, text="", tool_calls=CALLS[1:]), METHOD)
    assert json.loads(json.loads(b'"' + calls + b'"')) == [{"name": "g", "arguments": "{}"}]


def test_columns_of_flat_records() -> None:
    row = row_of()
    result = answered(row, reasoning="r", tool_calls=CALLS[1:])
    [first, second] = list(csv.DictReader(csv_record(row, result, METHOD).decode().splitlines(), BEAM_COLUMNS))
    assert (first["reasoning"], json.loads(first["tool_calls"])) == ("r", [{"name": "g", "arguments": "{}"}])
    assert (second["reasoning"], second["tool_calls"]) == ("", "")
    assert [
        (record["reasoning"], record["tool_calls"]) for record in orjson.loads(parquet_record(row, result, METHOD))
    ] == [
        ("r", '[{"name":"g","arguments":"{}"}]'),
        (None, None),
    ]


def test_a_chat_completion() -> None:
    row = row_of(tools=(TOOL,))
    body = body_of(row, answered(row, text="", reasoning="r", tool_calls=CALLS))
    best, other = ChatCompletion.model_validate(body).choices
    assert (best.finish_reason, best.message.content) == ("tool_calls", None)
    assert best.message.model_extra == {"reasoning_content": "r"}
    calls = best.message.tool_calls or []
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [  # type: ignore[union-attr]
        ("function", "f", '{"a": 1}'),
        ("function", "g", "{}"),
    ]
    ids = {call.id for call in calls}
    assert len(ids) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids), "templates of Mistral accept no other ids"
    assert body_of(row, answered(row, text="", reasoning="r", tool_calls=CALLS)) == body
    assert (other.finish_reason, other.message.content, other.message.tool_calls) == ("stop", "u", None)


@pytest.mark.parametrize(
    ("beam", "reason", "content"),
    [
        ({"tool_calls": CALLS, "finish_reason": "length", "text": ""}, "length", None),  # a second call was cut
        ({"tool_calls": CALLS, "text": "say"}, "tool_calls", "say"),
        ({"reasoning": "r", "finish_reason": "length", "text": ""}, "length", ""),
    ],
)
def test_what_ended_a_chat(beam: dict[str, object], reason: str, content: str | None) -> None:
    row = row_of()
    best = ChatCompletion.model_validate(body_of(row, answered(row, **beam))).choices[0]
    assert (best.finish_reason, best.message.content) == (reason, content)


def test_a_completion_has_its_reasoning() -> None:
    row = row_of("openai-completions")
    best, other = Completion.model_validate(body_of(row, answered(row, reasoning="r"))).choices
    assert (best.text, best.model_extra, other.model_extra) == ("t", {"reasoning_content": "r"}, {})


def test_a_response() -> None:
    row = row_of("openai-responses", tools=(TOOL,), tool_choice="f")
    token = TokenDetail(1, b"t", -1.0, 0, ((1, b"t", -1.0),))
    result = answered(row, reasoning="r", tool_calls=CALLS, tokens=(token, TokenDetail(2, b"", 0.0, 0)))
    body = body_of(row, replace(result, hypotheses=result.hypotheses[:1]))
    response = Response.model_validate(body)
    assert (response.object, response.status, response.output_text) == ("response", "completed", "t")
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[0].content[0].text == "r"  # type: ignore[union-attr, index]
    assert response.output[1].content[0].logprobs[0].token == "t"  # type: ignore[union-attr, index]
    assert response.output[2].arguments == '{"a": 1}'  # type: ignore[union-attr]
    assert response.tool_choice.name == response.tools[0].name == "f"  # type: ignore[union-attr]
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 2, 5)
    assert response.metadata == {"k": "1"}
    assert "beams" not in body


def test_a_response_that_was_cut() -> None:
    row = row_of("openai-responses")
    cut = answered(row, text="", reasoning="r", finish_reason="length", reasoning_tokens=2)
    response = Response.model_validate(body_of(row, replace(cut, hypotheses=cut.hypotheses[:1])))
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 2


def test_a_failed_response_is_a_failed_line() -> None:
    row = replace(row_of("openai-responses"), request=None)
    failed = RowReader().read(b'{"prompt": "p", "top_p": 7}', index=3, number=7)
    line = orjson.loads(openai_record(replace(row, error=failed.error), None, METHOD))
    assert (line["response"]["status_code"], list(line["response"]["body"])) == (400, ["error"])


@pytest.mark.parametrize("form", ["openai-chat", "openai-responses"])
def test_pick_reads_the_answers_alone(form: Form) -> None:
    row = row_of(form)
    result = answered(row, reasoning="r", tool_calls=CALLS)
    for record in (native_record, openai_record):
        read = record_row(record(row, result, METHOD), index=0, number=1)
        assert read.error is None
        assert [candidate.text for candidate in read.candidates] == ["t", "u"]
    calls = record_row(openai_record(row, answered(row, text="", tool_calls=CALLS), METHOD), index=0, number=1)
    assert [candidate.text for candidate in calls.candidates] == ["", "u"]
