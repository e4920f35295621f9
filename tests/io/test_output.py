"""Output records of all forms, and what identifies a run."""

from __future__ import annotations

import json
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from dsbd_cli.cli.run.summary import Totals
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.errors import InvalidRowError, NumericalError, OutOfMemoryRowError, PromptTooLongError, RowError
from dsbd_cli.io.records.native_record import native_record, step_records, text_record
from dsbd_cli.io.records.openai_record import openai_record
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.io.records.record_parts import MethodRecord, fingerprint_difference, row_error, run_fingerprint
from dsbd_cli.io.records.row import Row
from dsbd_cli.requests import Hypothesis, RequestResult, TokenDetail
from dsbd_cli.stats import DrafterStats, LayerStats, RequestStats, StepStats

METHOD = MethodRecord(MethodConfig(), "t", "d")
HOSTILE = 'a\n\r\x00\x1b[31m\x7f\x85\x9b0m\u2028\u2029 "\\" \ud7ff\ue000\U0010ffff </s>\t{}'
CONTROLS = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\u2028", "\u2029"]


def row_of(**fields: object) -> Row:
    return RowReader().read(json.dumps({"id": "x", "prompt": "p", **fields}).encode(), index=3, number=7)


def answered(row: Row, error: RowError | None = None, **beam: object) -> RequestResult:
    assert row.request is not None
    best = {"text": "t", "token_ids": (1, 2), "finish_reason": "stop", "logprob": -1.0, "score": -0.5, **beam}
    second = {**best, "token_ids": (1,), "finish_reason": "length"}
    beams = () if error else (Hypothesis(**best), Hypothesis(**second))  # type: ignore[arg-type]
    return RequestResult(row.request, beams, 3, RequestStats(), error)


def test_the_fields_of_a_native_record_in_their_order() -> None:
    row = row_of(metadata={"b": 1, "a": [None]})
    record = orjson.loads(native_record(row, answered(row), METHOD))
    first = ["schema", "index", "id", "metadata", "key", "text", "finish_reason", "logprob", "score", "num_tokens"]
    assert list(record) == [*first, "beams", "usage", "seed", "exactness", "method", "stats"]
    assert record["metadata"] == {"b": 1, "a": [None]}
    assert (record["index"], record["id"], record["key"], record["text"]) == (3, "x", row.key, "t")
    assert record["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert record["method"] == {**METHOD.fields(), "threads": None}
    assert record["stats"]["acceptance_rate"] is None
    assert "metadata" not in orjson.loads(native_record(row_of(), answered(row_of()), METHOD))
    shortened = replace(answered(row), truncated_tokens=4)
    assert orjson.loads(native_record(row, shortened, METHOD))["usage"]["truncated_tokens"] == 4


def test_two_drafters_are_told_apart() -> None:
    row = row_of()
    result, parts = answered(row), {"beam": DrafterStats(12, 3), "ngram": DrafterStats(0, 0)}
    result.stats.drafters = parts
    expected = {
        "beam": {"drafted": 12, "accepted": 3, "acceptance_rate": 0.25},
        "ngram": {"drafted": 0, "accepted": 0, "acceptance_rate": None},
    }
    assert orjson.loads(native_record(row, result, METHOD))["stats"]["drafters"] == expected
    layer = LayerStats(1, 8, 4, 4, 4, True, parts)
    [step] = step_records([StepStats("x", 1, 1, 2, 12, 40, 7, [layer], 0.1, 0.2, 0.3)])
    assert orjson.loads(step)["layers"][0]["drafters"] == expected
    assert "drafters" not in orjson.loads(native_record(row, answered(row), METHOD))["stats"]
    totals = Totals()
    for _ in range(2):
        result.stats.drafted, result.stats.accepted = 12, 3
        totals.add(result)
    assert totals.numbers()["drafters"] == {
        "beam": {"drafted": 24, "accepted": 6, "acceptance_rate": 0.25},
        "ngram": expected["ngram"],
    }
    assert "25% accepted (beam 25%)" in totals.line()
    for may_draft in (False, True):
        idle = Totals()
        idle.may_draft = may_draft
        idle.stats.target_calls, idle.stats.steps = 3, 3
        assert ("nothing drafted" in idle.line()) is may_draft


def test_an_error_is_a_record() -> None:
    row = row_of(metadata="m", top_k=-2)
    record = orjson.loads(native_record(row, None, METHOD))
    assert list(record) == ["schema", "index", "id", "metadata", "key", "error"]
    assert record["error"] == {"type": "InvalidRowError", "message": str(row.error), "line": 7}
    assert text_record(row, None, METHOD) == b""
    row = row_of()
    failed = answered(row, PromptTooLongError("prompt has 9 tokens"))
    record = orjson.loads(native_record(row, failed, METHOD))
    assert record["error"] == {"type": "PromptTooLongError", "message": "line 7: prompt has 9 tokens", "line": 7}


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"prompt": "p", "max_tokens": 99}, "max_tokens"),
        ({"prompt": "p", "max_new_tokens": 99}, "max_new_tokens"),
        (
            {"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "p", "max_tokens": 99}},
            "body.max_tokens",
        ),
    ],
)
def test_an_error_of_the_engine_has_the_names_of_the_row(row: dict[str, object], name: str) -> None:
    read = RowReader().read(json.dumps(row).encode(), index=3, number=7)
    failed = answered(read, PromptTooLongError("prompt has 9 tokens and max_new_tokens is 99"))
    assert str(row_error(read, failed)) == f"line 7: prompt has 9 tokens and {name} is 99"


@pytest.mark.parametrize("broken", [{"logprob": float("nan")}, {"score": float("-inf")}])
def test_nan_is_never_written(broken: dict[str, float]) -> None:
    row = row_of()
    result = answered(row, **broken)
    assert type(row_error(row, result)) is NumericalError
    assert orjson.loads(native_record(row, result, METHOD))["error"]["type"] == "NumericalError"
    assert orjson.loads(openai_record(row, result, METHOD))["response"]["status_code"] == 500
    assert row_error(row, answered(row)) is None


def contained(record: bytes) -> bool:
    text = record.decode()
    return len(text.splitlines()) <= 1 and not any(control in text for control in CONTROLS)


def test_a_text_cannot_write_outside_its_record() -> None:
    row = row_of(id=HOSTILE, metadata={HOSTILE: HOSTILE})
    result = answered(row, text=HOSTILE)
    native, openai = native_record(row, result, METHOD), openai_record(row, result, METHOD)
    step = StepStats(HOSTILE, 1, 1, 2, 12, 40, 7, [LayerStats(1, 8, 4, 4, 4, True)], 0.1234567, 0.2, 0.3)
    text = text_record(row, result, METHOD)
    assert all(contained(record) for record in (native, openai, text, *step_records([step])))
    assert orjson.loads(native)["text"] == HOSTILE
    assert orjson.loads(native)["metadata"] == {HOSTILE: HOSTILE}
    assert orjson.loads(openai)["response"]["body"]["choices"][0]["text"] == HOSTILE
    assert orjson.loads(b'"' + text + b'"') == HOSTILE
    failed = row_of(id=HOSTILE, metadata=HOSTILE, prompt=3, stop=HOSTILE)
    assert contained(native_record(failed, None, METHOD))
    assert contained(openai_record(failed, None, METHOD))


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    row = row_of()
    result = answered(row, text=text)
    for record in (native_record(row, result, METHOD), text_record(row, result, METHOD)):
        assert contained(record)
    assert orjson.loads(native_record(row, result, METHOD))["text"] == text
    assert json.loads(b'"' + text_record(row, result, METHOD) + b'"') == text


def test_a_folder_with_a_name_that_is_no_text() -> None:
    method = MethodRecord(MethodConfig(), "folder\udcff", None)
    assert orjson.loads(native_record(row_of(), answered(row_of()), method))["method"]["target"] == "folder\\udcff"
    assert orjson.loads(openai_record(row_of(), answered(row_of()), method))["response"]["body"]["model"]


# OpenAI batch output lines


def response(line: bytes) -> dict[str, object]:
    """The line as a client takes it apart."""
    record = orjson.loads(line)
    assert {"id", "custom_id", "response", "error"} <= set(record)
    assert record["custom_id"] == "x"
    assert record["id"].startswith("batch_req_")
    assert set(record["response"]) == {"status_code", "request_id", "body"}
    assert (record["response"]["status_code"] == 200) is (record["error"] is None)
    response: dict[str, object] = record["response"]
    return response


def test_completions_are_read_by_the_types_of_the_client() -> None:
    row = row_of(metadata={"k": "v"})
    line = openai_record(row, answered(row), replace(METHOD, created=1_700_000_000))
    completion = Completion.model_validate(response(line)["body"], strict=True)
    assert [choice.text for choice in completion.choices] == ["t", "t"]
    assert [choice.finish_reason for choice in completion.choices] == ["stop", "length"]
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.id.startswith("cmpl-")
    assert (completion.model, completion.created) == ("t", 1_700_000_000)
    assert completion.usage is not None
    assert completion.usage.total_tokens == 6


def test_answer_id_and_valid_stand_in_choices_too() -> None:
    row = row_of(prompt=None, messages=[{"role": "user", "content": "hi"}])
    body = response(openai_record(row, answered(row, answer_id=0, valid=False), METHOD))["body"]
    assert [(choice["answer_id"], choice["valid"]) for choice in body["choices"]] == [(0, False)] * 2
    assert ChatCompletion.model_validate(body).choices[0].message.content == "t"
    plain = response(openai_record(row, answered(row), METHOD))["body"]["choices"][0]
    assert not {"answer_id", "valid"} & set(plain)


@pytest.mark.parametrize("metadata", [None, {"k": "v"}, {"k": 1, "l": [True]}, ["a"], "text", 0])
def test_chats_are_read_by_the_types_of_the_client(metadata: object) -> None:
    row = row_of(prompt=None, messages=[{"role": "user", "content": "hi"}], metadata=metadata)
    chat = ChatCompletion.model_validate(
        response(openai_record(row, answered(row), replace(METHOD, created=5)))["body"], strict=True
    )
    assert chat.choices[0].message.content == "t"
    assert chat.choices[0].message.role == "assistant"
    assert chat.id.startswith("chatcmpl-")
    expected = {"k": "1", "l": "[true]"} if metadata == {"k": 1, "l": [True]} else metadata
    assert chat.metadata == (expected if isinstance(expected, dict | None) else {"metadata": chat.metadata["metadata"]})


FAILURES = [
    (InvalidRowError("i"), 400, "invalid_request", "invalid_request_error"),
    (PromptTooLongError("p"), 400, "context_length_exceeded", "invalid_request_error"),
    (NumericalError("n"), 500, "model_error", "server_error"),
    (OutOfMemoryRowError("o"), 500, "out_of_memory", "server_error"),
]


@pytest.mark.parametrize(("error", "status", "code", "kind"), FAILURES, ids=[code for _, _, code, _ in FAILURES])
def test_a_failed_row_has_a_status_code_and_an_error(error: RowError, status: int, code: str, kind: str) -> None:
    row = row_of()
    line = openai_record(row, answered(row, error), METHOD)
    message = f"line 7: {error}"
    assert response(line)["status_code"] == status
    assert response(line)["body"] == {"error": {"message": message, "type": kind, "param": None, "code": code}}
    assert orjson.loads(line)["error"] == {"code": code, "message": message}
    assert response(openai_record(row_of(top_k=-2), None, METHOD))["status_code"] == 400


def test_the_same_row_gives_the_same_line() -> None:
    row = row_of()
    line = openai_record(row, answered(row), replace(METHOD, created=5))
    again = RowReader().read(b'{"custom_id": "x", "prompt": "p"}', index=99, number=100)
    assert openai_record(again, answered(again), replace(METHOD, created=5)) == line
    other = openai_record(row_of(prompt="q"), answered(row_of(prompt="q")), replace(METHOD, created=5))
    assert orjson.loads(other)["id"] != orjson.loads(line)["id"]
    changed = MethodRecord(MethodConfig(num_beams=2), "t", "d")
    assert (
        orjson.loads(openai_record(row, answered(row), replace(changed, created=5)))["response"]["body"][
            "system_fingerprint"
        ]
        != (orjson.loads(line)["response"]["body"]["system_fingerprint"])
    )


# What identifies a run


def test_a_fingerprint_tells_what_differs() -> None:
    rows = RowReader(SamplingConfig(temperature=0.7, stop=("a",)), seed=3)
    old = run_fingerprint(METHOD, rows, dtype="float32")
    stored = orjson.loads(orjson.dumps(old))
    assert stored == old
    assert fingerprint_difference(stored, old) is None
    new = run_fingerprint(
        MethodRecord(MethodConfig(num_beams=2), "t", None),
        RowReader(SamplingConfig(temperature=0.7, stop=("b",)), seed=4),
        dtype="float32",
    )
    assert fingerprint_difference(stored, new) == (
        "num_beams was 4 and is 2, draft was 'd' and is not set, stop was ['a'] and is ['b'], seed was 3 and is 4"
    )
    assert fingerprint_difference({**old, "x\n": 1}, old) == "'x\\n' was 1 and is not set"
    assert fingerprint_difference({**old, "seed": True}, {**old, "seed": 1}) == "seed was true and is 1"


def test_options_that_came_later_are_in_a_fingerprint_where_they_act() -> None:
    """Guards runs of versions without them, which could not be resumed."""
    method = MethodRecord(MethodConfig(), "t", "d")
    plain = run_fingerprint(method, RowReader(SamplingConfig()))
    assert not {"presence_penalty", "bad_words_ids", "reasoning", "eos_token_id"} & plain.keys()
    asked = SamplingConfig(presence_penalty=0.5, bad_words_ids=[[1, 2]])
    acting = run_fingerprint(method, RowReader(asked))
    assert acting == {**plain, "presence_penalty": 0.5, "bad_words_ids": [[1, 2]]}
    assert orjson.loads(orjson.dumps(acting)) == acting
    assert "presence_penalty was not set and is 0.5" in str(fingerprint_difference(plain, acting))


def test_what_does_not_act_does_not_count() -> None:
    method = MethodRecord(MethodConfig(rule="search"), "t", "d")
    first = run_fingerprint(method, RowReader(SamplingConfig(), 1, "search"))
    second = run_fingerprint(method, RowReader(SamplingConfig(temperature=2, top_k=3), 2, "search", strict=True))
    assert fingerprint_difference(first, second) is None
    assert first["temperature"] is None


TOKENS = (
    TokenDetail(7, b"caf", -0.5, 0, ((7, b"caf", -0.5), (8, b"t", -2.0))),
    TokenDetail(9, b"\xc3", -0.25, 0, ((9, b"\xc3", -0.25),)),
    TokenDetail(10, b"\xa9", 0.0, 1),
    TokenDetail(2, b"", -0.25, 0),
)


def test_token_logprobs_of_a_native_record() -> None:
    row = row_of(token_logprobs=True, top_logprobs=2)
    assert row.request is not None
    assert row.request.sampling.top_logprobs == 2
    record = orjson.loads(native_record(row, answered(row, token_ids=(7, 9, 10, 2), tokens=TOKENS), METHOD))
    assert "token_ids" not in record
    beam = record["beams"][0]
    assert beam["token_ids"] == [7, 9, 10, 2]
    assert beam["token_logprobs"] == [-0.5, -0.25, 0.0, -0.25]
    assert beam["top_logprobs"] == [[[7, -0.5], [8, -2.0]], [[9, -0.25]], [], []]


def test_openai_types_parse_the_log_probabilities() -> None:
    """Without the end token, which is no text; bytes that are half a character stand in `bytes`."""
    chat = {"messages": [{"role": "user", "content": "p"}], "prompt": None, "logprobs": True, "top_logprobs": 2}
    row = row_of(**chat)
    body = orjson.loads(openai_record(row, answered(row, tokens=TOKENS), METHOD))["response"]["body"]
    logprobs = ChatCompletion.model_validate(body, strict=True).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [item.logprob for item in logprobs.content] == [-0.5, -0.25, 0.0]
    assert b"".join(bytes(item.bytes or []) for item in logprobs.content).decode() == "caf\u00e9"
    assert [item.token for item in logprobs.content[0].top_logprobs] == ["caf", "t"]
    row = row_of(logprobs=2)
    body = orjson.loads(openai_record(row, answered(row, tokens=TOKENS), METHOD))["response"]["body"]
    parts = Completion.model_validate(body, strict=True).choices[0].logprobs
    assert parts is not None
    assert (parts.token_logprobs, parts.text_offset) == ([-0.5, -0.25, 0.0], [0, 3, 4])
    assert parts.top_logprobs is not None
    assert parts.top_logprobs[0] == {"caf": -0.5, "t": -2.0}
