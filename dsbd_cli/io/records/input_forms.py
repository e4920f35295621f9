"""Forms of an input row, normalised to one: fields under our own names, and the fields that were not used.

flat      {id | custom_id, prompt | messages | audio | image, overrides of the run's sampling options, metadata}; a
          prompt may be given with an image
envelope  {custom_id, method: "POST", url: "/v1/completions" | "/v1/chat/completions", body: {...}}, a line of an
          OpenAI batch file
`null` means not given.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.errors import MAX_SHOWN, InvalidRowError, shorten
from dsbd_cli.io.records.row import Fields, Form

ALIASES = {
    "custom_id": "id",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n": "n_best",
    "language": "source_lang",
}
ROW_FIELDS = (
    *("id", "prompt", "messages", "audio", "image", "seed", "allow"),
    *(item.name for item in fields(SamplingConfig)),
    *("response_format", "metadata"),
)
URLS: dict[str, Form] = {"/v1/completions": "openai-completions", "/v1/chat/completions": "openai-chat"}
PROMPT_OF: dict[Form, str] = {"openai-completions": "prompt", "openai-chat": "messages"}

# Fields of other servers that have no effect on the text.
WITHOUT_EFFECT = frozenset(
    "model user store service_tier safety_identifier prompt_cache_key prompt_cache_retention stream_options "
    "parallel_tool_calls prediction reference relevant".split()
)
# Fields that would change the text but cannot be honoured, with the values under which they change nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": ([],),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0, 0.0),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1, 1.0),
    "stop_token_ids": ([],),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
HINTS = {
    "min_tokens": "token_rules has min_new_tokens",
    "repetition_penalty": "token_rules has one",
    "best_of": "the number of beams is the run's --num-beams",
    "stream": "records are written as rows are done",
}
KNOWN = (*ROW_FIELDS, *ALIASES)
OWN = frozenset(KNOWN)
ENVELOPE = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """A normalised row. `fields` holds no null; `unused` holds the unknown fields with their values."""

    form: Form
    fields: Fields
    unused: list[tuple[str, object]]

    def explain(self, name: str, value: object, listed: set[str] | None = None) -> str:
        """Return the message about an unused field. This is slow, and a line may have a million of them.

        listed: the lists of fields in earlier messages. One that is among them is not repeated; a new one is added.
        """
        outside = self.form != "flat" and not name.startswith("body.")
        known = ENVELOPE if outside else KNOWN
        near = difflib.get_close_matches(name.removeprefix("body.")[:MAX_SHOWN], known, n=1)
        message = f"unknown field {shorten(name)} (value {shorten(value)})"
        if near:
            return f"{message}: did you mean {near[0]}?"
        fields = f"the fields are {', '.join(known[: len(ROW_FIELDS)])}"
        if listed is not None:
            if fields in listed:
                return message
            listed.add(fields)
        return f"{message}: {fields}"


def parsed_row(raw: Fields) -> ParsedRow:
    """Return a row's form and its fields under our own names. Raises InvalidRowError."""
    if ("body" in raw or "url" in raw) and not {"prompt", "messages", "audio", "image"} & raw.keys():
        return _envelope(raw)
    unused: list[tuple[str, object]] = []
    return ParsedRow("flat", _under_own_names(raw, unused, "flat"), unused)


def as_written(message: str, raw: Fields) -> str:
    """Return a message that begins with a field's name, with the name that the row uses: `body.max_tokens is ...`."""
    name = re.split(r"[ .\[]", message, maxsplit=1)[0]
    if name not in ROW_FIELDS:
        return message
    for prefix, row in _places(raw):
        written = [key for key, value in row.items() if ALIASES.get(key, key) == name and value is not None]
        if written:
            return prefix + (name if name in written else written[0]) + message[len(name) :]
    return message


def other_names(raw: Fields) -> tuple[tuple[str, str], ...]:
    """Return our name and the row's, of each option that a row gives under another name, as in `body.max_tokens`."""
    if "body" not in raw and ALIASES.keys().isdisjoint(raw):  # most rows
        return ()
    return tuple(
        (own, prefix + name)
        for prefix, row in _places(raw)
        for name, own in ALIASES.items()
        if own != "id" and row.get(name) is not None
    )


def _places(raw: Fields) -> list[tuple[str, Fields]]:
    """Return a row, and the body of an envelope, each with what the names of its fields begin with in messages."""
    body = raw.get("body")
    return [("", raw), ("body.", body)] if isinstance(body, dict) else [("", raw)]


def _envelope(raw: Fields) -> ParsedRow:
    method, url, body = raw.get("method"), raw.get("url"), raw.get("body")
    if method not in ("POST", None):
        raise InvalidRowError(f"method is {shorten(method)}, but must be POST")
    if not isinstance(url, str) or url not in URLS:
        raise InvalidRowError(f"url is {shorten(url)}, but must be {' or '.join(URLS)}")
    if not isinstance(body, dict):
        raise InvalidRowError(f"body is {shorten(body)}, but must be an object")
    unused: list[tuple[str, object]] = []
    row: Fields = {}
    for name, value in raw.items():
        if name in ("id", "custom_id", "metadata"):
            _put(row, name, value, prefix="")
        elif name not in ENVELOPE and value is not None:
            unused.append((name, value))
    if body.get("id") is not None or body.get("custom_id") is not None:
        raise InvalidRowError("body has an id of its own: give custom_id beside body, not inside")
    if body.get("metadata") is not None and row.get("metadata") is not None:
        raise InvalidRowError("metadata is given beside body and inside: drop one")
    if body.get("audio") is not None:
        raise InvalidRowError(f"body.audio is {shorten(body['audio'])}, but spoken answers are not supported: drop it")
    if body.get("image") is not None:
        raise InvalidRowError(f"body.image is {shorten(body['image'])}, but pictures stand in flat rows: drop it")
    form = URLS[url]
    row.update(_under_own_names(body, unused, form))
    other = "messages" if PROMPT_OF[form] == "prompt" else "prompt"
    if other in row:
        raise InvalidRowError(f"body.{other} is given, but url is {url}, which takes {PROMPT_OF[form]}")
    return ParsedRow(form, row, unused)


def _under_own_names(raw: Mapping[str, object], unused: list[tuple[str, object]], form: Form) -> Fields:
    """Return the fields of a row under our own names, without those that are null or have no effect.

    Unknown fields are added to `unused`. Raises InvalidRowError for a field that is not supported.
    """
    row: Fields = {}
    prefix = "" if form == "flat" else "body."
    for name, value in raw.items():
        if name in OWN:
            _put(row, name, value, prefix=prefix)
        elif value is None or name in WITHOUT_EFFECT:
            continue
        elif name == "logprobs":
            _put_logprobs(row, value, form, prefix)
        elif name in UNSUPPORTED:
            _refuse_unsupported(name, value, prefix)
        else:
            unused.append((prefix + name, value))
    return row


def _put(row: Fields, name: str, value: object, *, prefix: str) -> None:
    if value is None:
        return
    known = ALIASES.get(name, name)
    if known in row:
        raise InvalidRowError(
            f"{prefix}{name} is {shorten(value)}, but {known} is given under another name too: drop one"
        )
    row[known] = value


def _put_logprobs(row: Fields, value: object, form: Form, prefix: str) -> None:
    """Store `logprobs`, a switch in chats and a number of likeliest tokens in completions. A flat row may have
    either."""
    if form != "openai-completions" and isinstance(value, bool):
        _put(row, "token_logprobs", value, prefix=prefix)
    elif form != "openai-chat" and isinstance(value, int) and not isinstance(value, bool):
        _put(row, "token_logprobs", True, prefix=prefix)
        _put(row, "top_logprobs", value, prefix=prefix)
    elif value is not False:
        expected = {"openai-chat": "true or false", "openai-completions": "an integer"}.get(
            form, "true, false or an integer"
        )
        raise InvalidRowError(f"{prefix}logprobs is {shorten(value)}, but must be {expected}")


def _refuse_unsupported(name: str, value: object, prefix: str) -> None:
    """Raise InvalidRowError unless the value changes nothing. Its type must agree too, because 0 == False and 1 ==
    True."""
    if not any(type(value) is type(neutral) and value == neutral for neutral in UNSUPPORTED[name]):
        hint = f" ({HINTS[name]})" if name in HINTS else ""
        raise InvalidRowError(f"{prefix}{name} is {shorten(value)}, which is not supported{hint}: drop it")
