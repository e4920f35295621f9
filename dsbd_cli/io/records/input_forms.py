"""Forms of an input row, normalised to one: fields under our own names, and the fields that were not used.

flat      {id | custom_id, prompt | messages | audio | image, request fields, metadata}; a prompt may be given with an
          image
envelope  {custom_id, method: "POST", url, body: {...}}, a line of an OpenAI batch file; URLS has the urls
Request fields are those of request_fields.py, also inside of its CONTAINERS. `null` means not given.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

from dsbd_cli.config.sampling import ReasoningMode
from dsbd_cli.errors import MAX_SHOWN, InvalidRowError, shorten
from dsbd_cli.io.records.fields import (
    grammar_format,
    json_format,
    object_format,
    regex_format,
    structured_format,
    tool_choice,
    tools,
)
from dsbd_cli.io.records.request_fields import (
    ALIASES,
    CONTAINERS,
    DATA,
    FIELDS,
    READ_AS,
    REFUSED,
    REFUSED_IN_RESPONSES,
    RESPONSES,
    ROW_FIELDS,
    WITHOUT_EFFECT,
    RefusedField,
    RequestField,
    is_neutral,
)
from dsbd_cli.io.records.responses_items import responses_messages, text_format
from dsbd_cli.io.records.row import Fields, Form

URLS: dict[str, Form] = {
    "/v1/completions": "openai-completions",
    "/v1/chat/completions": "openai-chat",
    "/v1/responses": "openai-responses",
}
SOURCE_OF: dict[Form, str] = {"openai-completions": "prompt", "openai-chat": "messages", "openai-responses": "input"}
SOURCES = ("prompt", "messages", "audio", "image")
ENVELOPE = ("custom_id", "method", "url", "body")
KNOWN = (*ROW_FIELDS, *ALIASES, *READ_AS)
READ_AS_IN_RESPONSES = {**READ_AS, **{field.name: field.becomes for field in RESPONSES}}
_HOLDERS = frozenset(CONTAINERS)
RENAMED = _HOLDERS | ALIASES.keys()


@dataclass(slots=True)
class ParsedRow:
    """A normalised row, which is filled field by field.

    Attributes:
        fields: what it asks for under our own names, without nulls.
        unused: names of unknown fields with their values.
    """

    form: Form
    fields: Fields = field(default_factory=dict)
    unused: list[tuple[str, object]] = field(default_factory=list)

    def explain(self, name: str, value: object) -> str:
        """Return the message about an unused field. This is slow, and a line may have a million of them."""
        outside = self.form != "flat" and not name.startswith("body.")
        last = name.rpartition(".")[2][:MAX_SHOWN]
        near = difflib.get_close_matches(last, ENVELOPE if outside else KNOWN, n=1)
        message = f"unknown field {shorten(name)} (value {shorten(value)})"
        if near and near[0] != last:
            return f"{message}: did you mean {near[0]}?"
        return f"{message}: the fields are {', '.join(ENVELOPE)}" if outside else message

    def take(self, raw: Fields, prefix: str) -> None:
        """Take the fields of a row, of a body or of an object in one, but those that are null, that have no effect or
        whose value changes nothing.

        prefix: what their names begin with in messages. Raises InvalidRowError for one that cannot be honoured.
        """
        ways = _WAYS_IN_RESPONSES if self.form == "openai-responses" else _WAYS
        fields = self.fields
        for name, value in raw.items():
            if value is None:
                continue
            way = ways.get(name)
            if type(way) is str:  # most fields
                if way in fields:
                    self.put(way, name, value, prefix)
                fields[way] = value
            elif way is None:
                self.unused.append((prefix + name, value))
            else:
                way(self, name, value, prefix)  # type: ignore[operator] # mypy does not narrow by `type(..) is str`

    def put(self, own: str, name: str, value: object, prefix: str) -> None:
        """Store a field under our own name. Raises InvalidRowError for one that is there already."""
        if own in self.fields:
            raise InvalidRowError(
                f"{prefix}{name} is {shorten(value)}, but {own} is given under another name too: drop one"
            )
        if value is not None:
            self.fields[own] = value

    def finish(self) -> ParsedRow:
        """Return the row, once all of it is taken."""
        fields = self.fields
        if self.form == "openai-responses":
            fields["messages"] = responses_messages(fields.pop("input", None), fields.pop("instructions", None))
        if "top_k" in fields and fields["top_k"] == -1:
            fields["top_k"] = 0
        if "tool_choice" in fields and fields["tool_choice"] in (("auto",) if "tools" in fields else ("auto", "none")):
            del fields["tool_choice"]
        return self


def parsed_row(raw: Fields) -> ParsedRow:
    """Return a row's form and its fields under our own names. Raises InvalidRowError."""
    url = raw.get("url")
    if ("body" in raw or (isinstance(url, str) and url in URLS)) and raw.keys().isdisjoint((*SOURCES, "inputs")):
        return _envelope(raw)
    row = ParsedRow("flat")
    row.take(raw, "")
    return row.finish()


def as_written(message: str, raw: Fields) -> str:
    """Return a message that begins with a field's name, with the name that the row uses: `body.max_tokens is ...`."""
    name = re.split(r"[ .\[]", message, maxsplit=1)[0]
    if name not in ROW_FIELDS:
        return message
    read_as = READ_AS_IN_RESPONSES if raw.get("url") == "/v1/responses" else READ_AS
    for prefix, row in _places(raw):
        names = [key for key, value in row.items() if value is not None]
        if name in names and name not in read_as:
            return prefix + message
        for key in names:
            if ALIASES.get(key) == name:
                return prefix + key + message[len(name) :]
            if name in read_as.get(key, ()):  # places inside of the field that it is read as are not the row's
                return prefix + key + message[message.index(" ") :]
    return message


def other_names(raw: Fields) -> tuple[tuple[str, str], ...]:
    """Return our name and the row's, of each option that a row gives under another name, as in `body.max_tokens`."""
    if "body" not in raw and RENAMED.isdisjoint(raw):  # most rows
        return ()
    return tuple(
        [
            (ALIASES[name], prefix + name)
            for prefix, row in _places(raw)
            for name, value in row.items()
            if name in ALIASES and value is not None and name != "custom_id"
        ]
    )


def _places(raw: Fields) -> list[tuple[str, Fields]]:
    """Return a row and the objects in it that hold request fields, each with what the names of its fields begin with in
    messages."""
    body = raw.get("body")
    places = [("", raw), ("body.", body)] if isinstance(body, dict) else [("", raw)]
    for prefix, row in places:  # which grows
        if not _HOLDERS.isdisjoint(row):
            places += [(f"{prefix}{name}.", inner) for name in CONTAINERS if isinstance(inner := row.get(name), dict)]
    return places


def _envelope(raw: Fields) -> ParsedRow:
    method, url, body = raw.get("method"), raw.get("url"), raw.get("body")
    if method not in ("POST", None):
        raise InvalidRowError(f"method is {shorten(method)}, but must be POST")
    if not isinstance(url, str) or url not in URLS:
        *most, last = URLS
        raise InvalidRowError(f"url is {shorten(url)}, but must be {', '.join(most)} or {last}")
    if not isinstance(body, dict):
        raise InvalidRowError(f"body is {shorten(body)}, but must be an object")
    form = URLS[url]
    row = ParsedRow(form)
    for name, value in raw.items():
        if name in ("id", "custom_id"):
            row.put("id", name, value, "")
        elif name == "metadata":
            row.put(name, name, value, "")
        elif name not in ENVELOPE and value is not None:
            if name in _WAYS and name not in WITHOUT_EFFECT:
                raise InvalidRowError(f"{name} is {shorten(value)}, but stands beside body: put it inside")
            row.unused.append((name, value))
    if body.get("id") is not None or body.get("custom_id") is not None:
        raise InvalidRowError("body has an id of its own: give custom_id beside body, not inside")
    if body.get("metadata") is not None and raw.get("metadata") is not None:
        raise InvalidRowError("metadata is given beside body and inside: drop one")
    if body.get("audio") is not None:
        raise InvalidRowError(f"body.audio is {shorten(body['audio'])}, but spoken answers are not supported: drop it")
    if body.get("image") is not None:
        raise InvalidRowError(f"body.image is {shorten(body['image'])}, but pictures stand in flat rows: drop it")
    row.take(body, "body.")
    wanted = SOURCE_OF[form]
    for other in ("prompt", "messages"):
        if other != wanted and other in row.fields:
            raise InvalidRowError(f"body.{other} is given, but url is {url}, which takes {wanted}")
    return row.finish()


# How a field is taken: under this name of our own, or by this function of the row, the field's name and value, and
# the prefix of its name in messages.
_Way = str | Callable[[ParsedRow, str, object, str], None]


def _pass_over(row: ParsedRow, name: str, value: object, prefix: str) -> None:
    """Take a field that has no effect."""


def _take_container(row: ParsedRow, name: str, value: object, prefix: str) -> None:
    if not isinstance(value, dict):
        raise InvalidRowError(f"{prefix}{name} is {shorten(value)}, but must be an object")
    if value.get("id") is not None or value.get("custom_id") is not None:
        raise InvalidRowError(f"{prefix}{name} has an id of its own: give the row's beside it")
    row.take(value, f"{prefix}{name}.")


def _take_logprobs(row: ParsedRow, name: str, value: object, prefix: str) -> None:
    """Take `logprobs`, a switch in chats and a number of likeliest tokens in completions. A flat row may have
    either."""
    form = row.form
    if form != "openai-completions" and isinstance(value, bool):
        row.put("token_logprobs", name, value, prefix)
    elif form not in ("openai-chat", "openai-responses") and isinstance(value, int) and not isinstance(value, bool):
        _take_top_logprobs(row, name, value, prefix)
    elif value is not False:
        expected = {"flat": "true, false or an integer", "openai-completions": "an integer"}
        raise InvalidRowError(f"{prefix}{name} is {shorten(value)}, but must be {expected.get(form, 'true or false')}")


def _take_top_logprobs(row: ParsedRow, name: str, value: object, prefix: str) -> None:
    row.put("token_logprobs", name, True, prefix)
    row.put("top_logprobs", name, value, prefix)


def _take_structured(row: ParsedRow, name: str, value: object, prefix: str) -> None:
    own, converted = structured_format(f"{prefix}{name}", value)
    row.put(own, name, converted, prefix)


def _take_include(row: ParsedRow, name: str, value: object, prefix: str) -> None:
    if value != ["message.output_text.logprobs"]:
        raise InvalidRowError(f"{prefix}{name} is {shorten(value)}, but only message.output_text.logprobs is included")
    row.put("token_logprobs", name, True, prefix)


def _take_truncation(row: ParsedRow, name: str, value: object, prefix: str) -> None:
    if value != "auto":
        raise InvalidRowError(f"{prefix}{name} is {shorten(value)}, but must be auto or disabled")
    row.put("truncate_prompt_tokens", name, -1, prefix)


def _take_reasoning(row: ParsedRow, name: str, value: object, prefix: str) -> None:
    """Take `reasoning`, which says what becomes of it, or is an object; in /v1/responses it is an object. Another text
    is data of somebody else, as a file of answers has it."""
    if not isinstance(value, dict):
        if row.form == "openai-responses":
            raise InvalidRowError(f"{prefix}{name} is {shorten(value)}, but must be an object with effort")
        if isinstance(value, str) and value not in get_args(ReasoningMode):
            row.unused.append((prefix + name, value))
        else:
            row.put("reasoning", name, value, prefix)
        return
    for inner, item in value.items():
        if inner == "effort":
            row.put("reasoning_effort", f"{name}.{inner}", item, prefix)
        elif inner not in ("summary", "generate_summary") and item is not None:  # these two are about what is shown
            raise InvalidRowError(f"{prefix}{name}.{shorten(inner)} is {shorten(item)}, but only effort is used")


def _take_text(row: ParsedRow, name: str, value: object, prefix: str) -> None:
    for inner, item in text_format(f"{prefix}{name}", value).items():
        if inner == "verbosity":
            _refuse(f"{prefix}{name}.{inner}", item, REFUSED[inner])
        else:
            row.put("response_format", name, item, prefix)


def _converted(own: str, convert: Callable[[str, object], object]) -> _Way:
    """Return the way of a field whose value is converted. convert: takes the name for messages and the value."""

    def take(row: ParsedRow, name: str, value: object, prefix: str) -> None:
        row.put(own, name, convert(f"{prefix}{name}", value), prefix)

    return take


def _switched(name: str, value: object, *, off: str) -> str:
    """Return what becomes of the reasoning by a switch."""
    if not isinstance(value, bool):
        raise InvalidRowError(f"{name} is {shorten(value)}, but must be true or false")
    return "split" if value else off


def _unless_neutral(way: _Way, neutral: tuple[object, ...]) -> _Way:
    """Return the same way, but past values that change nothing."""
    if not neutral:
        return way

    def take(row: ParsedRow, name: str, value: object, prefix: str) -> None:
        if is_neutral(value, neutral):
            return
        if isinstance(way, str):
            row.put(way, name, value, prefix)
        else:
            way(row, name, value, prefix)

    return take


def _refusal(refused: RefusedField) -> _Way:
    return lambda row, name, value, prefix: _refuse(f"{prefix}{name}", value, refused)


def _refuse_in_bodies(row: ParsedRow, name: str, value: object, prefix: str) -> None:
    """Refuse a name that stands for data in a flat row."""
    if row.form == "flat" and not prefix:
        row.unused.append((name, value))
    else:
        _refuse(f"{prefix}{name}", value, REFUSED[name])


def _refuse(name: str, value: object, refused: RefusedField) -> None:
    """Raise InvalidRowError unless the value is null or changes nothing."""
    if value is not None and not is_neutral(value, refused.neutral):
        raise InvalidRowError(f"{name} is {shorten(value)}, which is not supported ({refused.use}): drop it")


_CONVERTED: dict[str, _Way] = {
    "tools": _converted("tools", tools),
    "tool_choice": _converted("tool_choice", tool_choice),
    "guided_choice": "allow",
    "guided_json": _converted("response_format", json_format),
    "guided_json_object": _converted("response_format", object_format),
    "guided_regex": _converted("response_format", regex_format),
    "guided_grammar": _converted("response_format", grammar_format),
    "grammar": _converted("response_format", grammar_format),
    "structured_outputs": _take_structured,
    "logprobs": _take_logprobs,
    "top_n_tokens": _take_top_logprobs,
    "input": "input",
    "instructions": "instructions",
    "text": _take_text,
    "reasoning": _take_reasoning,
    "include_reasoning": _converted("reasoning", partial(_switched, off="drop")),
    "separate_reasoning": _converted("reasoning", partial(_switched, off="keep")),
    "include": _take_include,
    "truncation": _take_truncation,
}


def _ways_of(field: RequestField) -> dict[str, _Way]:
    way = _unless_neutral(_CONVERTED.get(field.name, field.name), field.neutral)
    return dict.fromkeys((field.name, *field.aliases), way)


_WAYS: dict[str, _Way] = {
    **dict.fromkeys(WITHOUT_EFFECT, _pass_over),
    **dict.fromkeys(CONTAINERS, _take_container),
    **{name: _refusal(refused) for name, refused in REFUSED.items()},
    **dict.fromkeys(DATA, _refuse_in_bodies),
    **{name: way for field in FIELDS.values() for name, way in _ways_of(field).items()},
}
_WAYS_IN_RESPONSES: dict[str, _Way] = {
    **_WAYS,
    **{name: _refusal(refused) for name, refused in REFUSED_IN_RESPONSES.items()},
    **{name: way for field in RESPONSES for name, way in _ways_of(field).items()},
}
