"""Lines of an OpenAI batch file: what is accepted, what is refused and how the refusal reads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.io.records.request_fields import REFUSED as REFUSED_FIELDS
from dsbd_cli.io.records.row import Row
from dsbd_cli.requests import Request, derive_seed

RUN = RowReader(SamplingConfig(), seed=3, num_beams=4)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def line(body: object, url: object = "/v1/chat/completions", **outer: object) -> dict[str, object]:
    return {"custom_id": "x", "method": "POST", "url": url, "body": body, **outer}


def formatted(properties: object, **more: object) -> dict[str, object]:
    """A chat that wants JSON under a schema."""
    schema = {"type": "object", "properties": properties}
    return {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}}


def read(row: object, reader: RowReader = RUN) -> Row:
    return reader.read(json.dumps(row).encode(), index=5, number=12)


def test_a_chat() -> None:
    body = {
        **CHAT,
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "seed": 7,
        "stop": ["a", "b"],
        "metadata": {"k": "v"},
    }
    row = read(line(body))
    sampling = SamplingConfig(temperature=0.5, top_p=0.9, max_new_tokens=9, n_best=2, stop=("a", "b"))
    assert row.request == Request(id="x", seed=7, messages=({"role": "user", "content": "hi"},), sampling=sampling)
    assert (row.id, row.metadata, row.warnings) == ("x", {"k": "v"}, ())


def test_a_response_format_is_a_grammar() -> None:
    properties = {"b": {"type": "string"}, "a": {"type": "integer"}}
    row = read(line(formatted(properties, strict=True)))
    assert row.request is not None
    assert row.request.grammar == Grammar.json_schema({"type": "object", "properties": properties})
    assert read(line({**CHAT, "response_format": {"type": "json_object"}})).request.grammar == Grammar.json_object()  # type: ignore[union-attr]
    of_run = replace(RUN, grammar=Grammar.regex("a+"))
    assert read(line(CHAT), of_run).request.grammar == Grammar.regex("a+")  # type: ignore[union-attr]
    assert read(line({**CHAT, "response_format": {"type": "text"}}), of_run).request.grammar is None  # type: ignore[union-attr]


def test_the_order_of_properties_is_part_of_a_row() -> None:
    """Answers have the properties in the order of the schema, so another order is another question."""
    properties, other = {"a": {}, "b": {}}, {"b": {}, "a": {}}
    assert read(line(formatted(properties))).key == read(line(formatted(dict(properties)))).key
    assert read(line(formatted(properties))).key != read(line(formatted(other))).key


def test_a_completion() -> None:
    row = read(line({"model": "m", "prompt": "p"}, "/v1/completions"))
    assert row.request == Request(id="x", seed=derive_seed(3, "x"), prompt="p", sampling=SamplingConfig())
    assert row.key == read({"id": "x", "prompt": "p"}).key


def test_what_says_nothing_is_passed_over_even_when_strict() -> None:
    neutral = {name: field.neutral[0] for name, field in REFUSED_FIELDS.items() if field.neutral}
    nothing = dict.fromkeys(REFUSED_FIELDS)
    idle = {"user": "u", "store": True, "service_tier": "auto", "stream_options": {}, "parallel_tool_calls": True}
    for fields in (neutral, nothing, idle):
        row = read(line({**CHAT, **fields}), replace(RUN, strict=True))
        assert (row.error, row.warnings) == (None, ())


REFUSED: list[tuple[dict[str, object], str]] = [
    (line(CHAT, method="GET"), "method is 'GET', but must be POST"),
    (line(CHAT, "/v1/embeddings"), "url is '/v1/embeddings', but must be /v1/completions, /v1/chat"),
    (line(CHAT, None), "url is null, but must be /v1/completions, /v1/chat/completions or /v1/r"),
    (line(CHAT, ["/v1/completions"]), "url is ['/v1/completions'], but must be"),
    (line("x"), "body is 'x', but must be an object"),
    (line(None), "body is null, but must be an object"),
    (line({}), "neither prompt nor messages is given"),
    (line({"prompt": "p"}), "body.prompt is given, but url is /v1/chat/completions, which takes messages"),
    (line(CHAT, "/v1/completions"), "body.messages is given, but url is /v1/completions, which takes prompt"),
    (line({"prompt": ["p", "q"]}, "/v1/completions"), "body.prompt is ['p', 'q'], but must be a non-empty string"),
    (line({**CHAT, "id": "y"}), "body has an id of its own"),
    (line({**CHAT, "metadata": {}}, metadata={}), "metadata is given beside body and inside: drop one"),
    (
        line({**CHAT, "max_tokens": 1, "max_completion_tokens": 1}),
        "body.max_completion_tokens is 1, but max_new_tokens",
    ),
    (line({**CHAT, "max_tokens": 0}), "body.max_tokens is 0, but must be 1 or more"),
    (line({**CHAT, "n": 9}), "body.n is 9, but num_beams is 4: lower it, or raise that"),
    (line({**CHAT, "temperature": -1}), "body.temperature is -1.0, but must be 0, or from 1e-38 to 1000000"),
    (line({**CHAT, "temperature": "hot"}), "body.temperature is 'hot', but must be a number"),
    (line({**CHAT, "seed": -1}), "body.seed is -1, but must be an integer from 0"),
    (line({"messages": [{"role": "user", "content": 1}]}), "body.messages[0].content is 1, but must be a string"),
    (line({**CHAT, "stream": True}), "body.stream is true, which is not supported (records are written as rows are"),
    (line({**CHAT, "tools": [{"type": "function"}]}), "body.tools[0].function is {}, but must be an object with a"),
    (line({**CHAT, "tools": [{"type": "web_search"}]}), "body.tools[0].type is 'web_search', but only functions are"),
    (line({**CHAT, "tool_choice": "required"}), "body.tool_choice is 'required', but there are no tools"),
    (line({**CHAT, "tool_choice": {"type": "x"}}), "body.tool_choice is {'type': 'x'}, but must be auto, none,"),
    (line({**CHAT, "logit_bias": {"a": 1}}), "body.logit_bias has 'a', but must have token ids"),
    (
        line({**CHAT, "logit_bias": {"5": 101}}),
        "body.logit_bias is [[5, 101.0]], but must be token ids, each",
    ),
    (line({**CHAT, "presence_penalty": 3}), "body.presence_penalty is 3.0, but must be from -2 to 2"),
    (line({**CHAT, "best_of": 3}), "body.best_of is 3, but the number of beams is 4 (--num-beams): drop it"),
    (line({**CHAT, "echo": True}), "body.echo is true, which is not supported"),
    (line({**CHAT, "logprobs": 0}), "body.logprobs is 0, but must be true or false"),
    (line({"prompt": "p", "logprobs": True}, "/v1/completions"), "body.logprobs is true, but must be an integer"),
    (line({**CHAT, "logprobs": True, "top_logprobs": 21}), "body.top_logprobs is 21, but must be between 0 and 20"),
    (line({**CHAT, "top_logprobs": 2}), "body.top_logprobs is 2, but token_logprobs is not asked for"),
    (line({**CHAT, "response_format": "json"}), "body.response_format is 'json'"),
    (line({**CHAT, "response_format": {"type": "xml"}}), "body.response_format.type is 'xml', but must be text, json_"),
    (line({**CHAT, "guided_regex": "("}), "body.guided_regex cannot be used: unclosed group"),
    (line({**CHAT, "extra_body": {"guided_regex": "("}}), "body.extra_body.guided_regex cannot be used: unclosed"),
    (line({**CHAT, "extra_body": {"top_k": -2}}), "body.extra_body.top_k is -2, but must be 0 (keep all) or more"),
    (line({**CHAT, "extra_body": {"id": "y"}}), "body.extra_body has an id of its own"),
    (line({**CHAT, "response_format": {"type": "text", "x": 1}}), "body.response_format.'x' is 1, but only type"),
    (line({**CHAT, "response_format": {"type": "json_schema"}}), "body.response_format.json_schema is null"),
    (line(formatted({"a": {"type": "strng"}}, strict=3)), "body.response_format.json_schema.strict is 3"),
    (
        line(formatted({"a": {"type": "strng"}})),
        "body.response_format.json_schema.schema cannot be used: Invalid",
    ),
    (line({**formatted({}), "stop": "x"}), "body.stop is ['x'], but a grammar alone says where a text may end"),
]


@pytest.mark.parametrize(("row", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refused(row: dict[str, object], message: str) -> None:
    got = read(row)
    assert got.request is None
    assert got.id == "x"
    assert str(got.error).startswith(f"line 12: {message}")
    assert "\n" not in str(got.error)


def test_unknown_fields_are_told_with_their_place() -> None:
    reader = replace(RUN)
    row = read(line({**CHAT, "max_token": 1}, extra=1), reader)
    assert row.warnings == (
        "line 12: unknown field 'extra' (value 1): the fields are custom_id, method, url, body; not used",
        "line 12: unknown field 'body.max_token' (value 1): did you mean max_tokens?; not used",
    )
    assert read(line({**CHAT, "max_token": 2}), reader).warnings == ()
    assert "unknown field 'extra'" in str(read(line(CHAT, extra=1), replace(RUN, strict=True)).error)


def test_a_data_set_with_a_url_or_a_body_of_its_own_is_flat() -> None:
    row = read({"prompt": "p", "url": "https://example.org", "body": "text"}, replace(RUN))
    assert (row.error, len(row.warnings)) == (None, 2)
