"""Lines of an OpenAI batch output file, as the clients of that format parse them.

    {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}, and the row's "key", by
    which a resumed run recognises it

The body is a `text_completion`, a `chat.completion` or a `response`. For a failed row it is {"error": {...}} with
status code 400 (the fault is in the row) or 500 (the fault is in the run), and `error` repeats its code and message.
Ids are hashes of what the row asks for, so that a resumed run writes the same bytes.
"""

from __future__ import annotations

from dsbd_cli.errors import InvalidRowError, OutOfMemoryRowError, PromptTooLongError, RowError
from dsbd_cli.io.records.native_record import usage
from dsbd_cli.io.records.openai_parts import call_id, chat_token, shown, shown_tokens, string_values
from dsbd_cli.io.records.record_parts import MethodRecord, call_fields, row_error
from dsbd_cli.io.records.responses_record import responses_body
from dsbd_cli.io.records.row import Fields, Row
from dsbd_cli.io.schemas.contracts import OPENAI
from dsbd_cli.requests import Hypothesis, RequestResult


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
    if row.form == "openai-responses":
        return responses_body(row, result, method)
    chat = result.request.messages is not None
    body: Fields = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{row.key}",
        "object": "chat.completion" if chat else "text_completion",
        "created": method.created,
        "model": method.target,
        "choices": [_choice(row.key, rank, beam, chat=chat) for rank, beam in enumerate(result.hypotheses)],
        "usage": usage(result),
        "system_fingerprint": method.fingerprint,
    }
    if row.metadata is not None:
        body["metadata"] = string_values(row.metadata)
    return body


def _choice(key: str, rank: int, beam: Hypothesis, *, chat: bool) -> Fields:
    choice: Fields = {"index": rank}
    if chat:
        choice["message"] = _message(key, rank, beam)
        choice["logprobs"] = _chat_logprobs(beam)
    else:
        choice["text"] = beam.text
        choice["logprobs"] = _text_logprobs(beam)
        if beam.reasoning is not None:
            choice["reasoning_content"] = beam.reasoning  # a field of our own, as in chats
    called = chat and beam.tool_calls and beam.finish_reason == "stop"
    choice["finish_reason"] = "tool_calls" if called else beam.finish_reason
    # fields of our own: the id of an allowed answer, and whether the whole text matches the row's grammar
    choice.update({name: value for name in ("answer_id", "valid") if (value := getattr(beam, name)) is not None})
    return choice


def _message(key: str, rank: int, beam: Hypothesis) -> Fields:
    message: Fields = {"role": "assistant", "content": beam.text, "refusal": None}
    if beam.reasoning is not None:
        message["reasoning_content"] = beam.reasoning
    if beam.tool_calls:
        message["content"] = beam.text or None
        message["tool_calls"] = [
            {"id": call_id(key, rank, index), "type": "function", "function": function}
            for index, function in enumerate(call_fields(beam))
        ]
    return message


def _text_logprobs(beam: Hypothesis) -> Fields | None:
    tokens = shown_tokens(beam)
    if tokens is None:
        return None
    ends = [0]
    for token in tokens:
        ends.append(ends[-1] + len(shown(token.text)))
    tops = [{shown(text): value for _, text, value in token.top} for token in tokens]
    return {
        "tokens": [shown(token.text) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": ends[:-1],
    }


def _chat_logprobs(beam: Hypothesis) -> Fields | None:
    tokens = shown_tokens(beam)
    return None if tokens is None else {"content": [chat_token(token) for token in tokens], "refusal": None}


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
