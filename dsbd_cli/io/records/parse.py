"""A strict parser of one line of JSON: no duplicate keys, no number that changes on the way, no deep nesting."""

from __future__ import annotations

import json

import orjson

from dsbd_cli.errors import MAX_SHOWN, InvalidRowError, shorten
from dsbd_cli.io.records.row import Fields

MAX_DEPTH = 64
ARRAY_HINT = "jq -c '.[]' makes lines of a JSON array"
LARGEST_EXACT = 2.0**63


def parse_object(line: bytes) -> Fields:
    """Return the JSON object on this line. Raises InvalidRowError with a one-line message."""
    try:
        row: object = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidRowError(_not_json(line, error)) from None
    if not isinstance(row, dict):
        raise InvalidRowError(f"not a JSON object: {_shown(line)}{_hint(line)}")
    names, colons, large = _survey(row)
    # Every colon of the line follows a name or is in a string. A name that the line has twice is once in the dict, so
    # that one colon of the line is left over. An escaped colon is not counted in the line: it needs the slow check.
    if line.count(b":") != names + colons or large or b"\\u003a" in line or b"\\u003A" in line:
        _check_slowly(line)
    return row


def readable_fields(line: bytes) -> Fields | None:
    """Return the fields of a line that `parse_object` refuses, as far as they can be read; None where it is no object.

    Numbers out of range and NaN are accepted. A name that stands twice has a list of its values.
    """
    try:
        pairs: object = json.loads(line.decode("utf-8", "surrogateescape"), object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, tuple):
        return None
    fields: Fields = {}
    for name, value in pairs:
        fields[name] = [fields[name], value] if name in fields else value
    return fields


def decoded(line: bytes) -> str:
    """Return a line as text. Raises InvalidRowError if it is not UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as bad:
        where = f"byte 0x{line[bad.start]:02x} at byte {bad.start + 1}"
        raise InvalidRowError(f"not UTF-8: {where}: {_shown(line)}") from None


def _survey(row: Fields) -> tuple[int, int, bool]:
    """Count the names in all dicts and the colons in all strings, and say whether some float may have been an integer.

    A float of 2**63 or more may have been an integer of more than 64 bits. Types are compared with `type`, which is
    faster than isinstance and enough, because orjson makes no subclass of a type. Raises InvalidRowError for deep
    nesting.
    """
    names = colons = 0
    large = False
    level: list[object] = [row]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for value in level:
            if type(value) is str:
                colons += value.count(":")
            elif type(value) is dict:
                names += len(value)
                for name in value:
                    if ":" in name:
                        colons += name.count(":")
                below += value.values()
            elif type(value) is list:
                below += value
            elif type(value) is float and abs(value) >= LARGEST_EXACT:
                large = True
        if not below:
            return names, colons, large
        level = below
    raise InvalidRowError(f"nested deeper than {MAX_DEPTH} levels: flatten it")


def _check_slowly(line: bytes) -> None:
    """Check every name and every number as it is written. Raises InvalidRowError."""
    try:
        json.loads(line, object_pairs_hook=_distinct, parse_int=_exact, parse_float=lambda _: 0.0)
    except RecursionError:
        raise InvalidRowError(f"nested deeper than {MAX_DEPTH} levels: flatten it") from None


def _distinct(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidRowError(f"duplicate field {shorten(name)}: drop one")
        seen.add(name)


def _exact(digits: str) -> int:
    """Refuse integers outside 64 bits, which would come back as rounded floats."""
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        shown = digits if len(digits) <= MAX_SHOWN else f"{digits[: MAX_SHOWN - 1]}…"
        raise InvalidRowError(f"{shown} is an integer of more than 64 bits: write it as a string")
    return 0


def _not_json(line: bytes, error: orjson.JSONDecodeError) -> str:
    decoded(line)  # a line that is not UTF-8 is told as such
    reason = error.msg
    if "depth" in reason or "memory" in reason:
        reason = "nested too deep"
    elif "surrogate" in reason:
        reason = "half of a surrogate pair"
    return f"not valid JSON: {reason} at character {error.pos + 1}: {_shown(line)}{_hint(line)}"


def _hint(line: bytes) -> str:
    """Return advice for a file that is not lines of JSON; empty where the line looks like one."""
    begin = line.lstrip()[:1]
    if begin == b"[":
        return f"; {ARRAY_HINT}"
    return "" if begin in b'{"' else "; plain text needs dsbd generate --input-format text, CSV a file named .csv"


def _shown(line: bytes) -> str:
    return shorten(line[: 4 * MAX_SHOWN].decode("utf-8", "replace"))
