"""Rows in flat form and plain text: what is accepted, what is refused and how the refusal reads."""

from __future__ import annotations

import json
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.io.records.native_record import native_record
from dsbd_cli.io.records.openai_record import openai_record
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.io.records.record_parts import MethodRecord
from dsbd_cli.io.records.request_fields import ROW_FIELDS
from dsbd_cli.io.records.row import LongLine, Row
from dsbd_cli.requests import Request, derive_seed

RUN = RowReader(SamplingConfig(top_k=7), seed=3, num_beams=4)


def read(row: object, reader: RowReader = RUN, index: int = 5) -> Row:
    return reader.read(json.dumps(row).encode(), index=index, number=12)


def request(row: object, reader: RowReader = RUN, index: int = 5) -> Request:
    got = read(row, reader, index)
    assert got.error is None
    assert got.request is not None
    return got.request


def refusal(row: object, reader: RowReader = RUN) -> str:
    got = read(row, reader)
    assert got.request is None
    assert type(got.error).__name__ == "InvalidRowError"
    return str(got.error)


def test_a_row_inherits_from_the_run() -> None:
    row = read({"prompt": "p"})
    assert row.request == Request(id="5", seed=derive_seed(3, "5"), prompt="p", sampling=SamplingConfig(top_k=7))
    assert (row.index, row.number, row.id, row.metadata, row.warnings) == (5, 12, "5", None, ())


def test_a_seed_depends_on_run_and_id_only() -> None:
    first, second = request({"prompt": "p", "id": "x"}, index=0), request({"prompt": "q", "id": "x"}, index=9)
    assert first.seed == second.seed == derive_seed(3, "x")
    assert derive_seed(4, "x") != first.seed


def test_every_override() -> None:
    row = {
        "custom_id": 17,
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 1,
        "top_k": 0,
        "top_p": 0.5,
        "min_p": 0.1,
        "max_tokens": 9,
        "stop": "END",
        "seed": 2**63 - 1,
        "n": 4,
        "length_penalty": 0,
        "early_stopping": True,
        "metadata": {"a": [1, None]},
    }
    sampling = SamplingConfig(1.0, 0, 0.5, 0.1, 9, ("END",), 0.0, True, 4)
    assert request(row) == Request(
        id="17", seed=2**63 - 1, messages=({"role": "user", "content": "hi"},), sampling=sampling
    )
    assert read(row).metadata == {"a": [1, None]}


def test_rows_with_the_same_overrides_share_them_and_others_do_not() -> None:
    """Overrides are remembered, also of rows that take turns; 1, 1.0 and true are equal in Python but not here."""
    reader = replace(RUN)
    first = request({"prompt": "p", "top_k": 1}, reader)
    assert request({"prompt": "q", "top_k": 1}, reader).sampling is first.sampling
    assert "top_k is true" in refusal({"prompt": "p", "top_k": True}, reader)
    assert "top_k is 1.0" in refusal({"prompt": "p", "top_k": 1.0}, reader)
    assert request({"prompt": "q", "top_k": 2}, reader).sampling.top_k == 2
    assert request({"prompt": "q", "top_k": 1}, reader).sampling is first.sampling
    assert request({"prompt": "q"}, reader).sampling == SamplingConfig(top_k=7)


def test_null_means_not_given() -> None:
    nothing = dict.fromkeys(name for name in ROW_FIELDS if name != "prompt")
    assert read({"prompt": "p", **nothing}) == read({"prompt": "p"})


def test_a_prompt_beside_an_image_is_the_decoders() -> None:
    """Guards --chat, which would put it through a template, and a folder where none is named."""
    row = replace(RUN, chat=True).read(b'{"image": "../a.png", "prompt": "<s>"}', index=0, number=1)
    assert row.request is not None
    assert (row.request.image, row.request.prompt, row.request.messages) == ("../a.png", "<s>", None)


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"messages": [{"role": "user", "content": parts, "tool_calls": None}]}
    assert request(row).messages == ({"role": "user", "content": "ab"},)


REFUSED: list[tuple[object, str]] = [
    ([], "not a JSON object: '[]'"),
    ({}, "neither prompt nor messages is given"),
    ({"prompt": ""}, "prompt is '', but must be a non-empty string"),
    ({"prompt": 3}, "prompt is 3, but must be"),
    ({"prompt": "p", "messages": []}, "prompt and messages are both given"),
    ({"messages": []}, "messages is [], but must be a non-empty list"),
    ({"messages": "hi"}, "messages is 'hi'"),
    ({"messages": ["hi"]}, "messages[0] is 'hi', but must be an object with role and content"),
    ({"messages": [{"role": "user"}]}, "messages[0] is {'role': 'user'}"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3, but must be a string"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role is '', but must be a non-empty string"),
    ({"messages": [{"role": "user"}, {"role": "user", "content": "x"}]}, "messages[0] is {'role': 'user'}, but must"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0] is {'content': null, 'role': 'user'}"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].'mood' is 1, but only role, content,"),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name is 1, but must be a string"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls[0] is 1, but must"),
    ({"messages": [{"role": "user", "content": "x", "prefix": True}]}, "messages[0].prefix is true, but only the"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0] is {'type': 'image_url'}, but only parts of type text",
    ),
    ({"prompt": "p", "id": ""}, "id is ''"),
    ({"prompt": "p", "id": True}, "id is true"),
    ({"prompt": "p", "custom_id": 1.5}, "custom_id is 1.5, but must be a non-empty string or an integer"),
    ({"prompt": "p", "id": "a", "custom_id": "b"}, "custom_id is 'b', but id is given under another name too"),
    ({"prompt": "p", "n": 1, "n_best": 1}, "n_best is 1, but n_best is given under another name too"),
    ({"prompt": "p", "temperature": -1}, "temperature is -1.0, but must be 0, or from 1e-38 to 1000000"),
    ({"prompt": "p", "temperature": 1e300}, "temperature is 1e+300, but must be 0, or from 1e-38 to 1000000"),
    ({"prompt": "p", "temperature": "1"}, "temperature is '1', but must be a number"),
    ({"prompt": "p", "temperature": True}, "temperature is true, but must be a number"),
    ({"prompt": "p", "top_k": 1.0}, "top_k is 1.0, but must be an integer"),
    ({"prompt": "p", "top_k": False}, "top_k is false, but must be an integer"),
    ({"prompt": "p", "top_k": -2}, "top_k is -2, but must be 0"),
    ({"prompt": "p", "top_k": 2**31}, "top_k is 2147483648, but must be at most 2147483647"),
    ({"prompt": "p", "top_k": 2**64 - 1}, "top_k is 18446744073709551615, but must be at most"),
    ({"prompt": "p", "top_p": 0}, "top_p is 0.0"),
    ({"prompt": "p", "min_p": 2}, "min_p is 2.0"),
    ({"prompt": "p", "max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"prompt": "p", "max_tokens": 0}, "max_tokens is 0"),
    ({"prompt": "p", "max_completion_tokens": 2**40}, "max_completion_tokens is 1099511627776, but must be at most"),
    ({"prompt": "p", "stop": ""}, "stop is '', but must be a non-empty string or a list of them"),
    ({"prompt": "p", "stop": ["a", 1]}, "stop is ['a', 1]"),
    ({"prompt": "p", "stop": ["a"] * 17}, "stop is a list of 17 strings, but must be of at most 16"),
    ({"prompt": "p", "stop": "a" * 300}, "stop is ['aaa"),
    ({"prompt": "p", "length_penalty": -1e9}, "length_penalty is -1000000000.0, but must be between -10 and 10"),
    ({"prompt": "p", "early_stopping": 1}, "early_stopping is 1, but must be true or false or one of never"),
    ({"prompt": "p", "seed": -1}, "seed is -1, but must be an integer from 0"),
    ({"prompt": "p", "seed": 2**63}, "seed is 9223372036854775808"),
    ({"prompt": "p", "seed": "3"}, "seed is '3', but must be an integer"),
    ({"prompt": "p", "n": 5}, "n is 5, but num_beams is 4: lower it, or raise that"),
    ({"prompt": "p", "stream": True}, "stream is true, which is not supported (records are written as rows"),
    ({"prompt": "p", "presence_penalty": 3}, "presence_penalty is 3.0, but must be from -2 to 2"),
]


@pytest.mark.parametrize(("row", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refused(row: object, message: str) -> None:
    assert refusal(row).startswith(f"line 12: {message}")


BROKEN: list[tuple[bytes, str]] = [
    (b"{", "not valid JSON: "),
    (b'{"prompt": "p"} {}', "not valid JSON: "),
    (b'{"prompt": "a\tb"}', "not valid JSON: "),
    (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at byte 13: "),
    (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8: byte 0xed at byte 13: "),
    (b'{"prompt": "\\ud800"}', "not valid JSON: half of a surrogate pair at character "),
    (b'{"prompt": "p", "temperature": NaN}', "not valid JSON: "),
    (b'{"prompt": "p", "temperature": -Infinity}', "not valid JSON: "),
    (b'{"prompt": "p", "temperature": 1e999}', "not valid JSON: number is infinity"),
    (b'{"prompt": "p", "seed": 18446744073709551616}', "18446744073709551616 is an integer of more than 64 bits"),
    (b'{"prompt": "p", "metadata": [-9223372036854775809]}', "-9223372036854775809 is an integer of more than 64"),
    (b'{"prompt": "p", "metadata": ' + b"1" * 300 + b"}", "1111"),
    (b'{"prompt": "p", "prompt": "q"}', "duplicate field 'prompt': drop one"),
    (b'{"prompt" :"p","prompt" :":q"}', "duplicate field 'prompt': drop one"),
    (b'{"prompt":"p","pr\\u006fmpt":"q"}', "duplicate field 'prompt': drop one"),
    (b'{"prompt":"\\u003a","prompt":"q"}', "duplicate field 'prompt': drop one"),
    (b'{"prompt":"p\\u003A","metadata":{"a":1,"a":2}}', "duplicate field 'a': drop one"),
    (b'{"prompt":"p","a:":1,"a:":2}', "duplicate field 'a:': drop one"),
    (b'{"prompt":"p","metadata":' + b"[" * 70 + b"]" * 70 + b"}", "nested deeper than 64 levels"),
    (b'{"prompt":"p","x":' + b'{"a":' * 70 + b"1" + b"}" * 70 + b"}", "nested deeper than 64 levels"),
    (b"[" * 1_025, "not valid JSON: nested too deep"),
    (b"[" * 100_000, "not valid JSON: nested too deep"),
    (b'{"a":' * 100_000, "not valid JSON: nested too deep"),
    (b'{"x":' + b"[" * 600 + b"]" * 600 + b',"x":1,"prompt":"p"}', "duplicate field 'x': drop one"),
]


def test_plain_text_is_told_from_broken_json() -> None:
    """What a newcomer meets who has a file of prompts."""
    said = [
        str(RUN.read(line, index=0, number=1).error)
        for line in (b"Once upon a time", b" 3 apples", b'{"prompt": x}', b"[")
    ]
    assert [
        error.endswith("; plain text needs dsbd generate --input-format text, CSV a file named .csv") for error in said
    ] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(("line", "message"), BROKEN, ids=[repr(line[:30]) for line, _ in BROKEN])
def test_lines_that_are_no_row(line: bytes, message: str) -> None:
    row = RUN.read(line, index=5, number=12)
    assert row.request is None
    assert str(row.error).startswith(f"line 12: {message}")
    assert len(str(row.error)) < 320


def test_what_only_looks_like_a_fault() -> None:
    """Colons in strings and names, escaped or not, equal names in different objects, and a large float."""
    for line in (
        b'{"prompt":"a: b","metadata":{"a":{"a":":"},"b":{"a":1}}}',
        b'{"prompt":"a\\u003a \\u003A:","metadata":{"a\\u003A":{},":":[":",{":":":"}]}}',
        b'{"prompt":"\\u0000 \\ud83d\\ude00 \x7f","metadata":[1e300,18446744073709551615,-9223372036854775808]}',
        b'{"prompt":"\\\\u003a"}',
    ):
        assert RUN.read(line, index=0, number=1).error is None, line
    row = RUN.read(b'{"prompt":"a\\u0000b"}', index=0, number=1)
    assert row.request is not None
    assert row.request.prompt == "a\0b"


def test_a_line_too_long_to_be_held() -> None:
    for read_line in (RUN.read, RUN.read_text):
        row = read_line(LongLine(70_000_000, b'{"prompt": "x\xff'), index=1, number=2)
        assert str(row.error).startswith("line 2: the line has 70000000 bytes, but must have at most 16777216: '{")
        assert row.key != read_line(LongLine(70_000_001, b'{"prompt": "x\xff'), index=1, number=2).key


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k", "do_sample"])
def test_search_wins_over_a_rows_sampling(name: str) -> None:
    """Told once, and counted by the run. What is no number at all is still refused."""
    search = replace(RUN, rule="search")
    wish = {"top_k": 3, "do_sample": True}.get(name, 0.5)
    first, second = read({"prompt": "p", name: wish}, search), read({"prompt": "q", name: wish}, search)
    assert first.request is not None
    assert first.request.sampling == RUN.sampling
    assert (first.overruled, second.overruled) == (True, True)
    assert "line 12: temperature, top_k, top_p, min_p and do_sample of rows are not used" in first.warnings[0]
    assert second.warnings == ()
    assert f"{name} is 'hot'" in refusal({"prompt": "p", name: "hot"}, search)


def test_search_takes_what_draws_nothing() -> None:
    """Files made for other servers say temperature 0 on each row, often with top_p beside it, or all the defaults."""
    search = replace(RUN, rule="search")
    for fields in ({"temperature": 0, "top_p": 0.9}, {"temperature": 0.0}, {"temperature": 1, "top_p": 1}, DEFAULTS):
        row = read({"prompt": "p", **fields}, search)
        assert row.request is not None
        assert (row.request.sampling, row.overruled, row.warnings) == (RUN.sampling, False, ())
    assert "top_k is false" in refusal({"prompt": "p", "top_k": False}, search)


DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0, "top_k": -1, "do_sample": False, "use_beam_search": False}


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_temperature_of_1_is_never_an_error(temperature: float) -> None:
    greedy = replace(RUN, sampling=SamplingConfig(temperature=temperature))
    assert request({"prompt": "p", "temperature": 1, "top_p": 1}, greedy).sampling.temperature == 1


def test_temperature_0_is_for_the_rules_that_take_it() -> None:
    for value in (0, 0.0):
        assert request({"prompt": "p", "temperature": value, "top_p": 0.9}, RUN).sampling.temperature == 0
        message = refusal({"prompt": "p", "temperature": value}, replace(RUN, rule="rejection"))
        assert message == "line 12: temperature is 0, which rejection does not take: use coupled, or search"


def test_unknown_fields_are_told_once() -> None:
    reader = replace(RUN)
    first = read({"prompt": "p", "temprature": 1, "zzz": None, "q\n": [1]}, reader)
    assert first.error is None
    assert first.warnings[0] == ("line 12: unknown field 'temprature' (value 1): did you mean temperature?; not used")
    assert first.warnings[1] == "line 12: unknown field 'q\\n' (value [1]); not used"
    assert read({"prompt": "p", "temprature": 2}, reader).warnings == ()
    assert read({"prompt": "p", "other": 2}, reader).warnings == ("line 12: unknown field 'other' (value 2); not used",)


def test_unknown_fields_without_end_are_not_remembered_without_end() -> None:
    reader = replace(RUN)
    told = [read({"prompt": "p", f"field {number}": 1}, reader).warnings for number in range(300)]
    assert sum(len(item) for item in told) == 101
    assert told[100] == ("line 12: more unknown fields: not named any more",)


def test_strict_refuses_unknown_fields() -> None:
    strict = replace(RUN, strict=True)
    message = refusal({"prompt": "p", "temprature": 1}, strict)
    assert message == "line 12: unknown field 'temprature' (value 1): did you mean temperature?"
    assert read({"prompt": "p", "model": "m", "user": "u", "stream": False}, strict).error is None


def test_a_failed_row_keeps_its_id_and_metadata_where_they_can_be_read() -> None:
    rows = ({"id": "x", "prompt": 3}, {"custom_id": "x", "stream": True}, {"custom_id": "x", "n": 5, "prompt": "p"})
    for row in rows:
        assert read(row).id == "x"
    assert read({"prompt": 3, "metadata": 7}).metadata == 7
    assert read({"prompt": 3}, index=8).id == "8", "the id of a row that names none"


FAILED_IDS: list[tuple[bytes | LongLine, str | None]] = [
    (b"{", None),
    (b'["a"]', None),
    (b'{"id": "a", "prompt": ', None),
    (b'{"id": ["a"], "prompt": "p"}', None),
    (b'{"id": true, "prompt": "p"}', None),
    (b'{"id": "", "prompt": "p"}', None),
    (b'{"id": "a", "id": "b", "prompt": "p"}', None),
    (b'{"id": "\xff", "prompt": "p"}', None),
    (b'{"id": "\\ud800", "prompt": "p"}', None),
    (LongLine(1 << 25, b'{"id": "a"'), None),
    (b'{"prompt": "p", "prompt": "q"}', "5"),
    (b'{"id": "a", "prompt": "p", "prompt": "q"}', "a"),
    (b'{"id": "a", "prompt": "p", "temperature": NaN}', "a"),
    (b'{"id": "a", "prompt": "caf\xe9"}', "a"),
    (b'{"custom_id": 7, "body": {"x": "\\ud800"}}', "7"),
    (b'{"id": 18446744073709551616, "prompt": "p"}', "18446744073709551616"),
    (b'{"id": "a", "prompt": ' + b"[" * 70 + b"]" * 70 + b"}", "a"),
    (LongLine(9, reason="the row has 3 cells", fields={"id": "a"}), "a"),
    (LongLine(9, reason="the row has 3 cells", fields={}), "5"),
]


@pytest.mark.parametrize(("line", "row_id"), FAILED_IDS, ids=[repr(line)[:40] for line, _ in FAILED_IDS])
def test_a_failed_row_has_its_own_id_or_none(line: bytes | LongLine, row_id: str | None) -> None:
    """Guards an index in place of the id, which is the id of another row: a join then gives that row the error."""
    row = RUN.read(line, index=5, number=6)
    assert (row.id, row.request) == (row_id, None)
    assert RUN.read_prompt(line, index=5)[0] == row_id
    method = MethodRecord(MethodConfig(), "t", "d")
    record, openai = (orjson.loads(make(row, None, method)) for make in (native_record, openai_record))
    assert (record["id"], record["index"], openai["custom_id"]) == (row_id, 5, row_id)


def test_a_key_says_what_is_asked() -> None:
    row = {"id": "x", "prompt": "p", "max_tokens": 3, "metadata": {"a": 1}}
    same = {"metadata": {"a": 1}, "prompt": "p", "custom_id": "x", "max_new_tokens": 3, "model": "m", "seed": None}
    keys = {read(row, index=1).key, read(same, index=9).key, read(row, replace(RUN, seed=9)).key}
    assert len(keys) == 1
    others = [
        {**row, name: value} for name, value in (("id", "y"), ("prompt", "q"), ("max_tokens", 4), ("metadata", 2))
    ]
    assert len(keys | {read(other).key for other in others}) == 5
    assert read({"prompt": "p"}, index=1).key != read({"prompt": "p"}, index=2).key
    assert read({"prompt": "p"}, index=1).key == read({"prompt": "p", "id": 1}).key


def test_messages_of_errors_are_short_and_on_one_line() -> None:
    for row in (
        {"prompt": ["x\n" * 5_000_000]},
        {"prompt": "p", "messages": {"y" * 10_000: "z" * 10_000}},
        {"prompt": "p", "stop": ["s", 1] * 9_999},
        {"messages": [{"role": "r", "content": "c", "\n" * 999: 1}]},
        {"messages": [{"role": "r", "content": {str(n): {"a": [[[[n]]]]} for n in range(9_999)}}]},
    ):
        message = refusal(row)
        assert len(message) < 320
        assert "\n" not in message


def test_text_lines() -> None:
    row = RUN.read_text(' a\t"b" {}\u2028 '.encode(), index=5, number=7)
    assert row.request == Request(id="5", seed=derive_seed(3, "5"), prompt=' a\t"b" {}\u2028 ', sampling=RUN.sampling)
    assert (row.id, row.error) == ("5", None)
    failed = RUN.read_text(b"ab\xff", index=5, number=7)
    assert str(failed.error) == "line 7: not UTF-8: byte 0xff at byte 3: 'ab\ufffd'"


@given(st.binary(max_size=200))
def test_no_bytes_raise(line: bytes) -> None:
    for row in (RUN.read(line, index=0, number=1), RUN.read_text(line, index=0, number=1)):
        assert (row.request is None) is not (row.error is None)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*ROW_FIELDS, "custom_id", "n", "max_tokens", "other"]), VALUES, max_size=6))
def test_no_row_raises(row: dict[str, object]) -> None:
    got = read(row)
    assert (got.request is None) is not (got.error is None)


def test_a_schema_of_many_rows_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad one too, whose fault takes longest to find."""
    read, real = [0], Grammar.source

    def source(self: Grammar) -> str:
        read[0] += 1
        return real(self)

    monkeypatch.setattr(Grammar, "source", source)
    reader = replace(RUN)
    for schema, fault in (({"type": "object"}, None), ({"type": "object", "minProperties": "x"}, "cannot be used")):
        read[0] = 0
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for _ in range(3):
            error = reader.read(json.dumps({"prompt": "p", "response_format": form}).encode(), index=0, number=1).error
            assert (error is None) if fault is None else (fault in str(error))
        assert read[0] == 1


def test_what_is_kept_of_rows_is_small() -> None:
    """Guards memory, as a field can have megabytes."""
    reader = replace(RUN)
    for number in range(3):
        row = {"prompt": "p", "prefix": "x" * 9000 + str(number), "y" * 9000 + str(number): 1}
        assert reader.read(json.dumps(row).encode(), index=0, number=1).error is None
    assert not reader._known_sampling
    assert len(reader._warned) == 3
    assert all(type(key) is int for key in reader._warned)
