"""Bodies of answers to rows for /v1/responses: lists of items, which are reasoning, messages and calls of functions."""

from __future__ import annotations

from collections.abc import Mapping

from dsbd_cli.config.chat import ChatConfig
from dsbd_cli.io.records.native_record import usage
from dsbd_cli.io.records.openai_parts import call_id, chat_token, shown_tokens, string_values
from dsbd_cli.io.records.record_parts import MethodRecord
from dsbd_cli.io.records.row import Fields, Row
from dsbd_cli.requests import Hypothesis, RequestResult


def responses_body(row: Row, result: RequestResult, method: MethodRecord) -> Fields:
    """Return the body of an answered row. `output` is the best text; with several, `beams` has the output of each."""
    best, sampling, chat = result.hypotheses[0], result.request.sampling, result.request.chat
    complete = best.finish_reason == "stop"
    outputs = [_output(row.key, rank, beam) for rank, beam in enumerate(result.hypotheses)]
    counts = usage(result)
    body: Fields = {
        "id": f"resp_{row.key}",
        "object": "response",
        "created_at": method.created,
        "status": "completed" if complete else "incomplete",
        "error": None,
        "incomplete_details": None if complete else {"reason": "max_output_tokens"},
        "instructions": None,
        "max_output_tokens": sampling.max_new_tokens,
        "metadata": None if row.metadata is None else string_values(row.metadata),
        "model": method.target,
        "output": outputs[0],
        "parallel_tool_calls": True,
        "temperature": sampling.temperature,
        "tool_choice": _tool_choice(chat),
        "tools": [_tool(tool) for tool in chat.tools],
        "top_p": sampling.top_p,
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": sum(beam.reasoning_tokens for beam in result.hypotheses)},
            "total_tokens": counts["total_tokens"],
        },
        "system_fingerprint": method.fingerprint,
    }
    if best.valid is not None:
        body["valid"] = best.valid
    if len(outputs) > 1:
        body["beams"] = outputs
    return body


def _output(key: str, rank: int, beam: Hypothesis) -> list[Fields]:
    """Return the items of a text. Their ids are hashes of what the row asks for."""
    name = f"{key}{rank or ''}"
    status = "completed" if beam.finish_reason == "stop" else "incomplete"
    items: list[Fields] = []
    if beam.reasoning is not None:
        text = {"type": "reasoning_text", "text": beam.reasoning}
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [text]})
    if beam.text or not beam.tool_calls:
        content: Fields = {"type": "output_text", "text": beam.text, "annotations": []}
        tokens = shown_tokens(beam)
        if tokens is not None:
            content["logprobs"] = [chat_token(token) for token in tokens]
        about = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status}
        items.append({**about, "content": [content]})
    for index, call in enumerate(beam.tool_calls):
        own = call_id(key, rank, index)
        named = {"call_id": own, "name": call.name, "arguments": call.arguments}
        items.append({"id": f"fc_{own}", "type": "function_call", **named, "status": "completed"})
    return items


def _tool_choice(chat: ChatConfig) -> str | Fields:
    choice = chat.tool_choice
    return choice if choice in ("auto", "none", "required") else {"type": "function", "name": choice}


def _tool(tool: Mapping[str, object]) -> Fields:
    """Return a tool in the form of this endpoint, in which the function is no object of its own."""
    function = tool.get("function")
    parts = function if isinstance(function, Mapping) else tool
    return {"type": "function", **{name: parts.get(name) for name in ("name", "description", "parameters", "strict")}}
