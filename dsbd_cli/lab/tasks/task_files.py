"""Readers of data files, whose errors name the file, the place in it, and what is expected there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from dsbd_cli.errors import KINDS, UsageError, reading, shorten

T = TypeVar("T")


def read_json(path: Path) -> object:
    """Read the JSON document in a file. Raises UsageError."""
    with reading(str(path)):
        text = path.read_text(encoding="utf-8-sig")
    try:
        document: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} cannot be read: a value has too many digits or levels") from None
    return document


def field(value: object, name: str, kind: type[T], where: str) -> T:
    """Return `value[name]`, which must be of type `kind`. where: the file and the path to `value`, for messages. Raises
    UsageError."""
    if not isinstance(value, dict):
        raise UsageError(f"{where} is {shorten(value)}, but must be an object")
    if name not in value:
        raise UsageError(f"{where} has no field {name}")
    content = value[name]
    if not isinstance(content, kind) or (kind is int and isinstance(content, bool)):
        raise UsageError(f"{where}.{name} is {shorten(content)}, but must be {KINDS[kind]}")
    return content


def items(value: object, name: str, where: str) -> list[tuple[str, object]]:
    """Return the list `value[name]` as pairs of place and item. Raises UsageError."""
    return [(f"{where}.{name}[{number}]", item) for number, item in enumerate(field(value, name, list, where))]
