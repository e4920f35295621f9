"""Lines of an OpenAI batch output file, as the clients of that format parse them.

    {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}, and the row's "key", by
    which a resumed run recognises it

The body is a `text_completion` or a `chat.completion`. For a failed row it is {"error": {...}} with status code 400
(the fault is in the row) or 500 (the fault is in the run), and `error` repeats its code and message. Ids are hashes of
what the row asks for, so that a resumed run writes the same bytes.
"""

from __future__ import annotations

import orjson

from dsbd_cli.errors import InvalidRowError, OutOfMemoryRowError, PromptTooLongError, RowError
from dsbd_cli.io.records.native_record import usage
from dsbd_cli.io.records.record_parts import MethodRecord, row_error
from dsbd_cli.io.records.row import Fields, Row
from dsbd_cli.io.schemas.contracts import OPENAI
from dsbd_cli.requests import Hypothesis, Request, RequestResult, TokenDetail


def openai_record(row: Row, result: RequestResult | None, method: MethodRecord) -> bytes:
    """Return the line of a row, answered or failed.

    result: the engine's answer; None for a row with an error of its own.
    """
    error = row_error(row, result)
    if error is not None or result is None:
        assert error is not None, "a row without a result has an error"
        status, body = _failed(error)
        failure: Fields | None = {"code": body["code"], "message": body["message"]}
        return _line(row, status, {"error": body}, failure)
    return _line(row, 200, _body(row, result, method), None)


def _line(row: Row, status: int, body: Fields, error: Fields | None) -> bytes:
    response = {"status_code": status, "request_id": f"req_{row.key}", "body": body}
    line = {"id": f"batch_req_{row.key}", "custom_id": row.id, "response": response, "error": error, "key": row.key}
    return OPENAI.line(line)


def _body(row: Row, result: RequestResult, method: MethodRecord) -> Fields:
    chat = result.request.messages is not None
    body: Fields = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{row.key}",
        "object": "chat.completion" if chat else "text_completion",
        "created": method.created,
        "model": method.target,
        "choices": _choices(result.request, result),
        "usage": usage(result),
        "system_fingerprint": method.fingerprint,
    }
    if row.metadata is not None:
        body["metadata"] = _string_values(row.metadata)
    return body


def _choices(request: Request, result: RequestResult) -> list[Fields]:
    choices: list[Fields] = []
    for rank, beam in enumerate(result.hypotheses):
        choice: Fields = {"index": rank}
        if request.messages is not None:
            choice["message"] = {"role": "assistant", "content": beam.text, "refusal": None}
        else:
            choice["text"] = beam.text
        choice["logprobs"] = _logprobs(beam, chat=request.messages is not None)
        choice["finish_reason"] = beam.finish_reason
        # fields of our own: the id of an allowed answer, and whether the whole text matches the row's grammar
        choice.update({name: value for name in ("answer_id", "valid") if (value := getattr(beam, name)) is not None})
        choices.append(choice)
    return choices


def _logprobs(beam: Hypothesis, *, chat: bool) -> Fields | None:
    """Return the log-probabilities of the tokens of a text; None where tokens were not asked for.

    The token that ended the text is left out; tokens of a stop string are kept.
    """
    if beam.tokens is None:
        return None
    tokens = [token for place, token in enumerate(beam.tokens) if token.text or place + 1 < len(beam.tokens)]
    if chat:
        return {"content": [_chat_token(token) for token in tokens], "refusal": None}
    ends = [0]
    for token in tokens:
        ends.append(ends[-1] + len(_text(token.text)))
    tops = [{_text(text): value for _, text, value in token.top} for token in tokens]
    return {
        "tokens": [_text(token.text) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": ends[:-1],
    }


def _chat_token(token: TokenDetail) -> Fields:
    return {
        **_token(token.text, token.logprob),
        "top_logprobs": [_token(text, value) for _, text, value in token.top],
    }


def _token(text: bytes, logprob: float) -> Fields:
    return {"token": _text(text), "logprob": logprob, "bytes": list(text)}


def _text(data: bytes) -> str:
    """Return bytes as text, with a replacement character for half a character; the field `bytes` has the bytes
    themselves."""
    return data.decode(errors="replace")


def _string_values(metadata: object) -> dict[str, str]:
    """Return metadata with string values only, as the format demands; any other value is written as JSON."""
    items = metadata if isinstance(metadata, dict) else {"metadata": metadata}
    return {
        str(name): value if isinstance(value, str) else orjson.dumps(value).decode() for name, value in items.items()
    }


def _failed(error: RowError) -> tuple[int, Fields]:
    """Return the status code and the error object of the body."""
    if isinstance(error, PromptTooLongError):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, InvalidRowError):
        status, code = 400, "invalid_request"
    elif isinstance(error, OutOfMemoryRowError):
        status, code = 500, "out_of_memory"
    else:
        status, code = 500, "model_error"
    kind = "invalid_request_error" if status == 400 else "server_error"
    return status, {"message": str(error), "type": kind, "param": None, "code": code}
