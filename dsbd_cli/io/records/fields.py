"""Readers of a row's fields, one per type. Errors name the field and its value."""

from __future__ import annotations

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.errors import InvalidRowError, shorten
from dsbd_cli.io.records.row import Fields


def text(row: Fields, name: str) -> str:
    """Return a field that must be a non-empty string. Raises InvalidRowError."""
    value = row[name]
    if not isinstance(value, str) or not value:
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be a non-empty string")
    return value


def messages(value: object) -> tuple[dict[str, str], ...]:
    """Return the messages of a chat, which are objects with role and content. Raises InvalidRowError.

    The content is a string, or a list of parts of type text, which are joined.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRowError(f"messages is {shorten(value)}, but must be a non-empty list of objects")
    return tuple([_message(message, f"messages[{place}]") for place, message in enumerate(value)])


def response_format(value: object) -> Grammar | None:
    """Return the grammar of an OpenAI request's response_format: text, json_object, or json_schema with a schema.

    None for text, which has no grammar. Raises InvalidRowError.
    """
    kinds = "text, json_object or json_schema"
    if not isinstance(value, dict):
        raise InvalidRowError(f"response_format is {shorten(value)}, but must be an object with type {kinds}")
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRowError(f"response_format.type is {shorten(kind)}, but must be {kinds}")
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    _refuse_unknown(value, known, "response_format")
    if kind != "json_schema":
        return Grammar.json_object() if kind == "json_object" else None
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise InvalidRowError(
            f"response_format.json_schema is {shorten(inner)}, but must be an object with name and schema"
        )
    _refuse_unknown(inner, ("name", "description", "schema", "strict"), "response_format.json_schema")
    if not isinstance(inner.get("strict"), bool | None):
        raise InvalidRowError(
            f"response_format.json_schema.strict is {shorten(inner['strict'])}, but must be true or false"
        )
    schema = inner.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRowError(f"response_format.json_schema.schema is {shorten(schema)}, but must be an object")
    return Grammar.json_schema(schema)


def _refuse_unknown(value: dict[str, object], known: tuple[str, ...], where: str) -> None:
    """Raise InvalidRowError for a field that is not known, because it might change the text."""
    for name, one in value.items():
        if name not in known and one is not None:
            raise InvalidRowError(f"{where}.{shorten(name)} is {shorten(one)}, but only {', '.join(known)} are used")


def _message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or "role" not in message or "content" not in message:
        raise InvalidRowError(f"{where} is {shorten(message)}, but must be an object with role and content")
    for name, value in message.items():
        # a null, which clients send for tool_calls and refusal, asks for nothing
        if name not in ("role", "content") and value is not None:
            raise InvalidRowError(f"{where}.{shorten(name)} is {shorten(value)}, but only role and content are used")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not role:
        raise InvalidRowError(f"{where}.role is {shorten(role)}, but must be a non-empty string")
    if isinstance(content, list):
        content = "".join([_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)])
    if not isinstance(content, str):
        raise InvalidRowError(f"{where}.content is {shorten(content)}, but must be a string or a list of text parts")
    return {"role": role, "content": content}


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRowError(f"{where} is {shorten(part)}, but only parts of type text with a text are accepted")
    value = part["text"]
    assert isinstance(value, str)
    return value
