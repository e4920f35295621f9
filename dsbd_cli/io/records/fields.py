"""Readers of a row's fields, one per type. Errors name the field and its value."""

from __future__ import annotations

from functools import lru_cache

from dsbd_cli.config.grammars import Grammar
from dsbd_cli.errors import InvalidRowError, one_line, shorten
from dsbd_cli.io.records.parse import parse_object
from dsbd_cli.io.records.row import Fields

Messages = tuple[Fields, ...]

OF_JSON_SCHEMA = ("name", "description", "schema", "strict")
FORMATS = ("text", "json_object", "json_schema", "json", "regex", "grammar")
STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
# of vLLM's structured_outputs: which library follows it, and what is so here
NO_CONSTRAINT = ("backend", "_backend", "disable_fallback", "disable_any_whitespace", "disable_additional_properties")
# what a message may hold beside role and content, each a text
TEXTS_OF_MESSAGE = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
OF_MESSAGE = ("role", "content", "tool_calls", "tools", "prefix", *TEXTS_OF_MESSAGE)


def text(row: Fields, name: str) -> str:
    """Return a field that must be a non-empty string. Raises InvalidRowError."""
    value = row[name]
    if not isinstance(value, str) or not value:
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be a non-empty string")
    return value


# Messages of a chat


def messages(value: object) -> tuple[Messages, bool]:
    """Return the messages of a chat, and whether `prefix` of the last one says that the answer continues it. Raises
    InvalidRowError.

    Messages are objects with role and content. The content is a string, or a list of parts of type text, which are
    joined; that of an assistant who calls functions may be null. Of what else a message may hold, nulls and empty lists
    are left out.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRowError(f"messages is {shorten(value)}, but must be a non-empty list of objects")
    read = tuple([_message(message, f"messages[{index}]") for index, message in enumerate(value)])
    return read, _is_prefix(value)


def has_functions(value: object) -> bool:
    """Return whether some message of a list of objects holds functions or calls of them."""
    assert isinstance(value, list)
    return any("tool_calls" in message or "tools" in message for message in value)


def _message(message: object, where: str) -> Fields:
    if not isinstance(message, dict):
        raise InvalidRowError(f"{where} is {shorten(message)}, but must be an object with role and content")
    fields: Fields = {"role": message.get("role"), "content": message.get("content")}
    if len(message) > 2 or "content" not in message:
        _add_others(fields, message, where)
    role, content = fields["role"], fields["content"]
    if content is None and not (role == "assistant" and "tool_calls" in fields):
        raise InvalidRowError(f"{where} is {shorten(message)}, but must be an object with role and content")
    if not isinstance(role, str) or not role:
        raise InvalidRowError(f"{where}.role is {shorten(role)}, but must be a non-empty string")
    if isinstance(content, list):
        content = fields["content"] = "".join(
            [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
        )
    if not isinstance(content, str | None):
        raise InvalidRowError(f"{where}.content is {shorten(content)}, but must be a string or a list of text parts")
    return fields


def _add_others(fields: Fields, message: Fields, where: str) -> None:
    """Add what a message holds beside role and content. Raises InvalidRowError."""
    for name, value in message.items():
        if value is None or name in ("role", "content") or (isinstance(value, list) and not value):
            continue
        if name in TEXTS_OF_MESSAGE:
            if not isinstance(value, str):
                raise InvalidRowError(f"{where}.{name} is {shorten(value)}, but must be a string")
            fields[name] = value
        elif name == "tool_calls":
            fields[name] = _tool_calls(value, f"{where}.{name}")
        elif name == "tools":
            fields[name] = tools(f"{where}.{name}", value)
        elif name == "weight":  # of a file for training
            continue
        elif name == "prefix":
            if not isinstance(value, bool):
                raise InvalidRowError(f"{where}.prefix is {shorten(value)}, but must be true or false")
        else:
            allowed = ", ".join(OF_MESSAGE)
            raise InvalidRowError(f"{where}.{shorten(name)} is {shorten(value)}, but only {allowed} are used")


def _is_prefix(value: list[Fields]) -> bool:
    """Return whether the last message is one that the answer continues. Raises InvalidRowError for another one that is
    marked so."""
    for index, message in enumerate(value):
        if "prefix" in message and message["prefix"] is True:
            if index + 1 < len(value) or message["role"] != "assistant":
                reason = "only the assistant's last message may be one"
                raise InvalidRowError(f"messages[{index}].prefix is true, but {reason}")
            return True
    return False


def _tool_calls(value: object, where: str) -> list[Fields]:
    if not isinstance(value, list):
        raise InvalidRowError(f"{where} is {shorten(value)}, but must be a list of calls")
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRowError(f"{where}[{index}] is {shorten(call)}, but must be an object with function, its name")
        if not isinstance(arguments := function.get("arguments"), str | dict | None):
            raise InvalidRowError(
                f"{where}[{index}].function.arguments is {shorten(arguments)}, but must be an object or its JSON"
            )
    return value


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRowError(f"{where} is {shorten(part)}, but only parts of type text with a text are accepted")
    value = part["text"]
    assert isinstance(value, str)
    return value


# Functions that may be called


def tools(name: str, value: object) -> list[Fields]:
    """Return functions in the form of chats: {"type": "function", "function": {name, description, parameters}}.

    In that of /v1/responses the function's fields stand beside `type`. Raises InvalidRowError.
    """
    if not isinstance(value, list):
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be a list of functions")
    return [_tool(tool, f"{name}[{index}]") for index, tool in enumerate(value)]


def _tool(value: object, where: str) -> Fields:
    if not isinstance(value, dict):
        raise InvalidRowError(f"{where} is {shorten(value)}, but must be an object with type and function")
    if value.get("type", "function") != "function":
        raise InvalidRowError(f"{where}.type is {shorten(value['type'])}, but only functions are supported")
    tool: Fields = value
    if value.get("function") is None:
        named = {inner: item for inner, item in value.items() if inner not in ("type", "function")}
        tool = {"type": "function", "function": named}
    function = tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRowError(f"{where}.function is {shorten(function)}, but must be an object with a name")
    if not isinstance(parameters := function.get("parameters"), dict | None):
        raise InvalidRowError(f"{where}.function.parameters is {shorten(parameters)}, but must be a JSON schema")
    return tool


def tool_choice(name: str, value: object) -> str:
    """Return auto, none, required, or the name of a function, from such a text or from OpenAI's object. Raises
    InvalidRowError."""
    if value in ("auto", "none", "required"):
        assert isinstance(value, str)
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function", value)
        chosen = function.get("name") if isinstance(function, dict) else None
        if isinstance(chosen, str) and chosen not in ("", "auto", "none", "required"):
            return chosen
    raise InvalidRowError(f"{name} is {shorten(value)}, but must be auto, none, required, or name a function")


# What the whole answer must match


def response_format(value: object) -> Grammar | None:
    """Return the grammar of a response_format: of OpenAI's types text, json_object and json_schema, or of json, regex
    and grammar.

    None for text, which has no grammar. Raises InvalidRowError.
    """
    kinds = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    if not isinstance(value, dict):
        raise InvalidRowError(f"response_format is {shorten(value)}, but must be an object with type {kinds}")
    kind = value.get("type")
    if kind not in FORMATS:
        raise InvalidRowError(f"response_format.type is {shorten(kind)}, but must be {kinds}")
    if kind == "text":
        _refuse_unknown(value, ("type",), "response_format")
        return None
    if kind == "grammar":
        _refuse_unknown(value, ("type", "grammar"), "response_format")
        return Grammar.lark(_lark(_text_of(value, "grammar")))
    if kind == "regex":
        _refuse_unknown(value, ("type", "value"), "response_format")
        return Grammar.regex(_text_of(value, "value"))
    if kind == "json_object" and value.get("schema") is None:
        _refuse_unknown(value, ("type",), "response_format")
        return Grammar.json_object()
    return Grammar.json_schema(_schema(value, kind))


def _schema(value: Fields, kind: str) -> Fields:
    """Return the JSON schema of a response_format: OpenAI's has it in json_schema.schema, others in schema or value."""
    inner, where = value, "response_format"
    if kind == "json_schema" and value.get("schema") is None:
        holder = "value" if value.get("json_schema") is None and "value" in value else "json_schema"
        _refuse_unknown(value, ("type", holder), where)
        inner, where = value.get(holder), f"response_format.{holder}"  # type: ignore[assignment] # it is checked below
        if not isinstance(inner, dict):
            raise InvalidRowError(f"{where} is {shorten(inner)}, but must be an object with name and schema")
        _refuse_unknown(inner, OF_JSON_SCHEMA, where)
        if not isinstance(inner.get("strict"), bool | None):
            raise InvalidRowError(f"{where}.strict is {shorten(inner['strict'])}, but must be true or false")
    name = "value" if kind == "json" else "schema"
    if inner is value:
        _refuse_unknown(value, ("type", name), where)
    schema = inner.get(name)
    if not isinstance(schema, dict):
        raise InvalidRowError(f"{where}.{name} is {shorten(schema)}, but must be an object")
    return schema


def json_format(name: str, value: object) -> Fields:
    """Return the response_format of a JSON schema, given as an object or as text. Raises InvalidRowError."""
    schema = value
    if isinstance(value, str):
        try:
            schema = parse_object(value.encode("utf-8", "surrogatepass"))
        except InvalidRowError as error:
            raise InvalidRowError(f"{name} is {shorten(value)}, but must be a JSON schema: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be a JSON schema")
    if isinstance(inner := schema.get("schema"), dict) and schema.keys() <= set(OF_JSON_SCHEMA):
        schema = inner  # OpenAI's object around a schema, in which no keyword of a schema stands
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def object_format(name: str, value: object) -> Fields:
    """Return the response_format of any JSON object. Raises InvalidRowError."""
    if value is not True:
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be true or false")
    return {"type": "json_object"}


def regex_format(name: str, value: object) -> Fields:
    """Return the response_format of a regular expression. Raises InvalidRowError."""
    return {"type": "regex", "value": _some_text(name, value)}


def grammar_format(name: str, value: object) -> Fields:
    """Return the response_format of a Lark or GBNF grammar, or TGI's object as it is. Raises InvalidRowError."""
    if isinstance(value, dict) and name.rpartition(".")[2] == "grammar":
        return value
    return {"type": "grammar", "grammar": _some_text(name, value)}


def structured_format(name: str, value: object) -> tuple[str, object]:
    """Return the field that vLLM's structured_outputs asks for, and its value: response_format, or allow. Raises
    InvalidRowError."""
    if not isinstance(value, dict):
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be an object with one of {', '.join(STRUCTURED)}")
    asked = {inner: item for inner, item in value.items() if item is not None and inner not in NO_CONSTRAINT}
    if asked.get("json_object") is False:
        del asked["json_object"]
    if len(asked) != 1 or next(iter(asked)) not in STRUCTURED:
        raise InvalidRowError(f"{name} is {shorten(value)}, but must have one of {', '.join(STRUCTURED)}, and no more")
    [(kind, item)] = asked.items()
    where = f"{name}.{kind}"
    if kind == "choice":
        return "allow", item
    if kind == "json_object":
        if item is not True:
            raise InvalidRowError(f"{where} is {shorten(item)}, but must be true or false")
        return "response_format", {"type": "json_object"}
    made = {"json": json_format, "regex": regex_format}.get(kind)
    return "response_format", made(where, item) if made else {"type": "grammar", "grammar": _some_text(where, item)}


@lru_cache(maxsize=256)
def _lark(grammar: str) -> str:
    """Return a grammar in Lark's form; one in GBNF, which has ::=, is converted. Raises InvalidRowError."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the library raises plain exceptions
        raise InvalidRowError(f"response_format.grammar cannot be read as GBNF: {one_line(error)}") from None


def _text_of(value: Fields, name: str) -> str:
    return _some_text(f"response_format.{name}", value.get(name))


def _some_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be a non-empty string")
    return value


def _refuse_unknown(value: Fields, allowed: tuple[str, ...], where: str) -> None:
    """Raise InvalidRowError for a field that is not known, because it might change the text."""
    for name, item in value.items():
        if name not in allowed and item is not None:
            raise InvalidRowError(f"{where}.{shorten(name)} is {shorten(item)}, but only {', '.join(allowed)} are used")
