"""Response templates of tokenizers, by which transformers reads answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dsbd_cli.answer_forms import TemplateReader, Tools
from dsbd_cli.requests import ToolCall


def template_reader(template: Mapping[str, Any]) -> TemplateReader:
    """Return a function that reads answers by a response template. transformers is imported at its first call, which
    takes a second."""

    def read(text: str, tools: Tools) -> tuple[str, tuple[ToolCall, ...]]:
        from transformers.utils.chat_parsing import parse_response

        message = parse_response(text, dict(template), prefix="", tools=[dict(tool) for tool in tools])
        calls = [_call(call) for call in message.get("tool_calls") or ()]
        content = message.get("content")
        return content if isinstance(content, str) else "", tuple(calls)

    return read


def _call(call: Any) -> ToolCall:
    """Return a call as we have it. Raises ValueError for what is none."""
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no call of a function")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
