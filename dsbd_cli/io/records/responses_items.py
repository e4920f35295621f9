"""The body of /v1/responses as a chat: its input items as messages, its text format as a response_format."""

from __future__ import annotations

from dsbd_cli.errors import InvalidRowError, shorten
from dsbd_cli.io.records.row import Fields

IGNORED = ("id", "status", "type")  # of an item: where it came from
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")


def responses_messages(items: object, instructions: object) -> list[Fields]:
    """Return the messages of a chat that asks for the same. instructions: a message of the system before them.

    A call of a function belongs to the assistant's message before it, a text of reasoning to the one behind it. Raises
    InvalidRowError.
    """
    messages: list[Fields] = []
    if instructions is not None:
        if not isinstance(instructions, str) or not instructions:
            raise InvalidRowError(f"body.instructions is {shorten(instructions)}, but must be a non-empty string")
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str) and items:
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise InvalidRowError(f"body.input is {shorten(items)}, but must be a non-empty string or list of items")
    reasoning = ""
    for index, item in enumerate(items):
        where = f"body.input[{index}]"
        if not isinstance(item, dict):
            raise InvalidRowError(f"{where} is {shorten(item)}, but must be an object")
        kind = item.get("type")
        if kind == "reasoning":
            reasoning += _reasoning(item, where)
            continue
        if kind == "function_call":
            message = _call(item, where)
            if messages and messages[-1]["role"] == "assistant" and not reasoning:
                calls = [*_list(messages[-1].get("tool_calls")), *_list(message["tool_calls"])]
                messages[-1]["tool_calls"] = calls
                continue
        elif kind == "function_call_output":
            _refuse_others(item, ("call_id", "output"), where)
            output = _text(item.get("output"), f"{where}.output")
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        elif kind in ("message", None):
            _refuse_others(item, ("role", "content", "phase"), where)
            message = {"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")}
            if not isinstance(message["role"], str) or not message["role"]:
                raise InvalidRowError(f"{where}.role is {shorten(message['role'])}, but must be a non-empty string")
        else:
            kinds = "message, function_call, function_call_output or reasoning"
            raise InvalidRowError(f"{where}.type is {shorten(kind)}, but must be {kinds}")
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
        elif reasoning:
            raise InvalidRowError(f"{where} follows reasoning, but must be the assistant's: drop the reasoning")
        reasoning = ""
        messages.append(message)
    if reasoning:
        raise InvalidRowError("input ends with reasoning, which no answer follows: drop it")
    return messages


def text_format(name: str, value: object) -> Fields:
    """Return what the field `text` asks for: `format` as a response_format of chats, and `verbosity`. Raises
    InvalidRowError."""
    if not isinstance(value, dict):
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be an object with format")
    asked = {inner: item for inner, item in value.items() if item is not None}
    for inner, item in asked.items():
        if inner not in ("format", "verbosity"):
            raise InvalidRowError(f"{name}.{shorten(inner)} is {shorten(item)}, but only format is used")
    wanted = asked.get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema" and "json_schema" not in wanted:
        schema = {inner: item for inner, item in wanted.items() if inner != "type"}
        asked["format"] = {"type": "json_schema", "json_schema": schema}
    return asked


def _call(item: Fields, where: str) -> Fields:
    _refuse_others(item, ("call_id", "name", "arguments"), where)
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    for inner, value in function.items():
        if not isinstance(value, str):
            raise InvalidRowError(f"{where}.{inner} is {shorten(value)}, but must be a string")
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _reasoning(item: Fields, where: str) -> str:
    """Return the text of reasoning. Its summary is for people."""
    _refuse_others(item, ("summary", "content"), where)
    return "" if item.get("content") is None else _text(item["content"], f"{where}.content")


def _text(value: object, where: str) -> str:
    """Return a text, or the texts of parts, which are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRowError(f"{where} is {shorten(value)}, but must be a string or a list of text parts")
    return "".join([_part(part, f"{where}[{index}]") for index, part in enumerate(value)])


def _part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") in TEXT_PARTS else None
    if not isinstance(text, str):
        raise InvalidRowError(f"{where} is {shorten(part)}, but only parts with a text are accepted")
    return text


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _refuse_others(item: Fields, allowed: tuple[str, ...], where: str) -> None:
    """Raise InvalidRowError for a field of an item that is not known, because it might change the text."""
    for name, value in item.items():
        if name not in allowed and name not in IGNORED and value not in (None, [], {}):
            used = ", ".join(allowed)
            raise InvalidRowError(f"{where}.{shorten(name)} is {shorten(value)}, but only {used} are used")
