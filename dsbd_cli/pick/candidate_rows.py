"""Candidates of a row, the n best. They are read back from records that dsbd generate wrote, or from plain lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsbd_cli.errors import InvalidRowError, shorten
from dsbd_cli.io.records.input_forms import as_written
from dsbd_cli.io.records.parse import decoded, parse_object
from dsbd_cli.io.records.reader import id_of_failed, own_id
from dsbd_cli.io.records.row import Fields, Line, content_key, held_bytes, readable


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate's text. `logprob` and `score` are None where its record has none (openai, lines). `fields` goes
    into the output record as it came."""

    text: str
    logprob: float | None
    score: float | None
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """A row and its candidates, best first. Exactly one of `candidates` and `error` is set.

    number: line in the input, from 1. id: the row's number where the record has none; None where it cannot be read, or
    was not when the record was made. key: hash of the line, by which a resumed run recognises the row.
    """

    index: int
    number: int
    id: str | None
    key: str
    candidates: tuple[Candidate, ...] = ()
    metadata: object | None = None
    error: InvalidRowError | None = None


def record_row(line: Line, *, index: int, number: int) -> CandidateRow:
    """Read the row of a native record or of a line of an OpenAI batch output. Whatever is wrong with the line becomes
    the row's error, and is never raised."""
    key = content_key(held_bytes(line))
    record: Fields = {}
    try:
        record = parse_object(readable(line))
        row_id = own_id(record, str(index), *_id_names(record))
        if (failed := record.get("error")) is not None:
            message = failed.get("message") if isinstance(failed, dict) else failed
            raise InvalidRowError(f"the row had failed before: {shorten(message)}")
        candidates, metadata = _of_openai(record) if "response" in record else _of_native(record)
    except InvalidRowError as error:
        failure = InvalidRowError(f"line {number}: {as_written(str(error), record)}")
        return CandidateRow(index, number, _failed_id(record, line, index), key, error=failure)
    return CandidateRow(index, number, row_id, key, candidates, metadata)


def _id_names(record: Fields) -> tuple[str, ...]:
    """Return the names of the field that holds a row's id. The `id` of an OpenAI line is that of its response."""
    return ("custom_id",) if "custom_id" in record else ("id",)


def _failed_id(record: Fields, line: Line, index: int) -> str | None:
    """Return the id of a row without candidates; None where its record says that it could not be read."""
    names = _id_names(record)
    if "error" in record and record.get(names[0]) is None:
        return None
    return id_of_failed(record, line, index, *names)


def group_of_lines(lines: Sequence[Line], *, index: int, number: int) -> CandidateRow:
    """Make the row of several lines that are a candidate each. number: line number of the first."""
    key = content_key(b"%d\n" % index + b"\n".join(map(held_bytes, lines)))
    try:
        texts = [decoded(readable(line)) for line in lines]
    except InvalidRowError as fault:
        error = InvalidRowError(f"line {number}: one of {len(lines)} lines from here on: {fault}")
        return CandidateRow(index, number, str(index), key, error=error)
    candidates = tuple(Candidate(text.strip(), None, None, {"text": text.strip()}) for text in texts)
    return CandidateRow(index, number, str(index), key, candidates)


def _of_native(record: Fields) -> tuple[tuple[Candidate, ...], object | None]:
    beams = record.get("beams")
    if not isinstance(beams, list) or not beams:
        raise InvalidRowError("beams is missing: give records that dsbd generate --n-best wrote (native or openai)")
    candidates = []
    for index, beam in enumerate(beams):
        if not isinstance(beam, dict) or not isinstance(beam.get("text"), str):
            raise InvalidRowError(f"beams[{index}] is {shorten(beam)}, but must be an object with a text")
        candidates.append(Candidate(beam["text"], _number(beam, "logprob", index), _number(beam, "score", index), beam))
    return tuple(candidates), record.get("metadata")


def _of_openai(record: Fields) -> tuple[tuple[Candidate, ...], object | None]:
    response = record["response"]
    body = response.get("body") if isinstance(response, dict) else None
    if not isinstance(body, dict):
        raise InvalidRowError("response.body is missing: this is no line of a batch output")
    if body.get("object") == "response":
        return _of_response(body), body.get("metadata")
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise InvalidRowError("response.body.choices is missing: this is no line of a batch output")
    candidates = []
    for index, choice in enumerate(choices):
        message = choice.get("message") if isinstance(choice, dict) else None
        text = message.get("content") if isinstance(message, dict) else None
        if isinstance(message, dict) and text is None and message.get("tool_calls"):
            text = ""  # calls of functions alone
        if isinstance(choice, dict) and message is None:
            text = choice.get("text")
        if not isinstance(text, str):
            raise InvalidRowError(f"response.body.choices[{index}] is {shorten(choice)}, but must have a text")
        fields = {"text": text, "finish_reason": choice.get("finish_reason")}
        candidates.append(Candidate(text, None, None, fields))
    return tuple(candidates), body.get("metadata")


def _of_response(body: Fields) -> tuple[Candidate, ...]:
    """Return the candidates of a body of /v1/responses, which has the texts in the items of a message."""
    outputs = body.get("beams", [body.get("output")])
    candidates = []
    for index, items in enumerate(outputs if isinstance(outputs, list) else []):
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise InvalidRowError(f"response.body: output {index} is {shorten(items)}, but must be a list of items")
        parts = [part for item in items if item.get("type") == "message" for part in _list(item.get("content"))]
        texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "output_text"]
        text = "".join(part for part in texts if isinstance(part, str))
        candidates.append(Candidate(text, None, None, {"text": text}))
    if not candidates:
        raise InvalidRowError("response.body.output is missing: this is no line of a batch output")
    return tuple(candidates)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _number(beam: Fields, name: str, index: int) -> float | None:
    value = beam.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise InvalidRowError(f"beams[{index}].{name} is {shorten(value)}, but must be a number")
    return None if value is None else float(value)
