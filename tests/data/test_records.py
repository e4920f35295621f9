"""Input rows: what is accepted, what is refused and how the refusal reads."""

from __future__ import annotations

import json
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsbd_cli.config import MethodConfig, SamplingConfig
from dsbd_cli.records import ROW_FIELDS, FailedRow, MethodRecord, RowReader, checked, output_record
from dsbd_cli.requests import Hypothesis, Request, RequestResult, derive_seed
from dsbd_cli.stats import RequestStats

RUN = RowReader(SamplingConfig(top_k=7), seed=3, num_beams=4)


def read(row: object, reader: RowReader = RUN, index: int = 5) -> Request | FailedRow:
    return reader.read(json.dumps(row).encode(), index=index, number=12)


def test_a_row_inherits_from_the_run() -> None:
    assert read({"prompt": "p"}) == Request("5", derive_seed(3, "5"), "p", None, None, SamplingConfig(top_k=7))


def test_a_seed_depends_on_run_and_id_only() -> None:
    first, second = read({"prompt": "p", "id": "x"}, index=0), read({"prompt": "q", "id": "x"}, index=9)
    assert isinstance(first, Request)
    assert isinstance(second, Request)
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
    }
    sampling = SamplingConfig(1.0, 0, 0.5, 0.1, 9, ("END",), 0.0, True, 4)
    assert read(row) == Request("17", 2**63 - 1, None, ({"role": "user", "content": "hi"},), None, sampling)


def test_null_means_not_given() -> None:
    nothing = dict.fromkeys(name for name in ROW_FIELDS if name != "prompt")
    assert read({"prompt": "p", **nothing}) == read({"prompt": "p"})


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
    ({"prompt": "p", "id": ""}, "id is ''"),
    ({"prompt": "p", "id": True}, "id is True"),
    ({"prompt": "p", "id": "a", "custom_id": "b"}, "custom_id is 'b', but id is given under another name too"),
    ({"prompt": "p", "n": 1, "n_best": 1}, "n_best is 1, but n_best is given under another name too"),
    ({"prompt": "p", "temprature": 1}, "unknown field 'temprature' (value 1): did you mean temperature?"),
    ({"prompt": "p", "zzz": 1}, "unknown field 'zzz' (value 1): the fields are id, prompt"),
    ({"prompt": "p", "temperature": 0}, "temperature is 0.0, but must be above 0 (temperature 0 is beam search"),
    ({"prompt": "p", "temperature": "1"}, "temperature is '1', but must be a number"),
    ({"prompt": "p", "temperature": True}, "temperature is True, but must be a number"),
    ({"prompt": "p", "top_k": 1.0}, "top_k is 1.0, but must be an integer"),
    ({"prompt": "p", "top_k": False}, "top_k is False, but must be an integer"),
    ({"prompt": "p", "top_k": -1}, "top_k is -1, but must be 0"),
    ({"prompt": "p", "top_p": 0}, "top_p is 0.0"),
    ({"prompt": "p", "max_tokens": 0}, "max_new_tokens is 0"),
    ({"prompt": "p", "stop": ""}, "stop is '', but must be a non-empty string"),
    ({"prompt": "p", "stop": ["a", 1]}, "stop is ['a', 1]"),
    ({"prompt": "p", "early_stopping": 1}, "early_stopping is 1, but must be true or false"),
    ({"prompt": "p", "seed": -1}, "seed is -1, but must be from 0"),
    ({"prompt": "p", "seed": 2**63}, "seed is 9223372036854775808"),
    ({"prompt": "p", "seed": "3"}, "seed is '3', but must be an integer"),
    ({"prompt": "p", "n": 5}, "n_best is 5, but the run has num_beams 4"),
]


@pytest.mark.parametrize(("row", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refused(row: object, message: str) -> None:
    failed = read(row)
    assert isinstance(failed, FailedRow)
    assert str(failed.error).startswith(f"line 12: {message}")
    assert type(failed.error).__name__ == "InvalidRowError"


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_search_takes_no_warping(name: str) -> None:
    failed = read({"prompt": "p", name: 1}, replace(RUN, rule="search"))
    assert isinstance(failed, FailedRow)
    assert f"{name} is 1, but the rule search draws nothing" in str(failed.error)


def test_a_failed_row_keeps_its_id_where_it_can_be_read() -> None:
    for row in ({"id": "x", "prompt": 3}, {"custom_id": "x", "bogus": 1}, {"custom_id": "x", "n": 5, "prompt": "p"}):
        assert read(row).id == "x"
    assert RUN.read(b"{", index=8, number=9).id == "8"


def test_messages_of_errors_are_short_and_on_one_line() -> None:
    for row in (
        {"prompt": ["x\n" * 5_000_000]},
        {"y" * 10_000: "z" * 10_000},
        {"prompt": "p", "stop": ["s", 1] * 9_999},
    ):
        failed = read(row)
        assert isinstance(failed, FailedRow)
        assert len(str(failed.error)) < 320
        assert "\n" not in str(failed.error)


@given(st.binary(max_size=200))
def test_no_bytes_raise(line: bytes) -> None:
    assert isinstance(RUN.read(line, index=0, number=1), Request | FailedRow)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*ROW_FIELDS, "custom_id", "n", "max_tokens", "other"]), VALUES, max_size=6))
def test_no_row_raises(row: dict[str, object]) -> None:
    assert isinstance(read(row), Request | FailedRow)


def result(**beam: object) -> RequestResult:
    fields = {"text": "t", "token_ids": (1, 2), "finish_reason": "stop", "logprob": -1.0, "score": -0.5, **beam}
    return RequestResult(Request("x", 1, "p"), (Hypothesis(**fields),), 3, RequestStats())  # type: ignore[arg-type]


def test_output_escapes_control_characters() -> None:
    """A text cannot write outside its record."""
    method = MethodRecord(MethodConfig(), "t", "d")
    line = output_record(0, result(text="a\n\x00\x1b[31m\u2028"), method)
    assert b"\n" not in line
    assert orjson.loads(line)["text"] == "a\n\x00\x1b[31m\u2028"
    assert orjson.loads(line)["stats"]["acceptance_rate"] is None


@pytest.mark.parametrize("broken", [{"logprob": float("nan")}, {"score": float("-inf")}])
def test_nan_is_never_written(broken: dict[str, float]) -> None:
    failed = checked(result(**broken))
    assert type(failed.error).__name__ == "NumericalError"
    good = result()
    assert checked(good) is good
