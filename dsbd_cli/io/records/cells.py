"""Conversion of a table's row to the JSON line that asks for the same."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from decimal import Decimal

import orjson

from dsbd_cli.errors import KINDS, InvalidRowError, UsageError, shorten
from dsbd_cli.io.records.request_fields import CONTAINERS, NAMED, REFUSED, WITHOUT_EFFECT, types_of
from dsbd_cli.io.records.row import Fields

PROMPTS = ("prompt", "messages", "audio", "image", "body")  # a row has one of these
_TYPES = {name: types_of(one.schema) for name, one in NAMED.items()}
TEXTS = {"id", "custom_id", "reference"} | {name for name, types in _TYPES.items() if types == {"string"}}
TEXT_OR_JSON = {"metadata"} | {
    name for name, types in _TYPES.items() if "string" in types and types & {"array", "object"}
}
FIELDS = {*NAMED, *REFUSED, *WITHOUT_EFFECT, *CONTAINERS, "body"}  # cells of any other column stay text
MAX_COLUMNS = 1000

_NUMBER = re.compile(r"[+-]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?")  # takes each digit once
_LARGEST_WHOLE = 2.0**53  # a larger float may differ from the number that was written


def check_columns(names: list[str]) -> None:
    """Refuse a header under which no row can be answered. Raises UsageError."""
    if len(names) > MAX_COLUMNS:
        raise UsageError(f"it has {len(names)} columns, but may have {MAX_COLUMNS}")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"the column {shorten(name)} stands twice in it: drop one")
    if not any(name in PROMPTS for name in names):
        shown = shorten(", ".join(names))
        apart = "; .csv has commas between cells, .tsv has tabs"
        hint = apart if len(names) == 1 and {",", ";", "\t"} & set(names[0]) else ""
        raise UsageError(f"no column is called {', '.join(PROMPTS[:-2])} or {PROMPTS[-2]}; there are {shown}{hint}")


def row_line(row: Iterable[tuple[str, object]]) -> bytes:
    """Return the JSON line of a row, given as pairs of column and cell. Empty cells are left out. Raises
    InvalidRowError."""
    fields: Fields = {}
    for name, cell in row:
        value = cell_value(name, cell)
        if value is not None:
            fields[name] = value
    try:
        return orjson.dumps(fields)
    except TypeError:
        with suppress(TypeError):  # maps of Parquet may have numbers as keys
            return orjson.dumps(fields, option=orjson.OPT_NON_STR_KEYS)
        raise InvalidRowError(_why_not_json(fields)) from None


def cell_value(name: str, cell: object) -> object:
    """Return the value that a cell has in a JSON line; None for an empty cell, and for a float that is not finite.

    The cell of a text field stays text. Of a field that takes texts, lists and objects (`stop`, `allow`, `metadata`) it
    is JSON where it begins with a bracket and is JSON, else text. In other fields numbers, true and false are
    converted, and a whole float becomes an integer. What nobody reads may be of a type or size that no line takes: of a
    list, a struct or bytes in an unknown column only the name of its type is kept.
    """
    if isinstance(cell, float):
        return whole(cell) if math.isfinite(cell) else None
    if isinstance(cell, Decimal) and name in FIELDS:
        return _number(cell)
    if not isinstance(cell, str):
        if name in FIELDS or cell is None or isinstance(cell, bool | int):
            return cell
        return KINDS.get(type(cell), "bytes") if isinstance(cell, list | dict | bytes) else str(cell)
    if not cell:
        return None
    if name in TEXTS or name not in FIELDS:
        return cell
    if cell.lstrip()[:1] in ("[", "{"):
        return _json_or_text(cell)
    return cell if name in TEXT_OR_JSON else _scalar(cell)


def _json_or_text(cell: str) -> object:
    """Return a cell's JSON as it is written, so that the row reader checks it as it checks a line; else the cell's
    text."""
    try:
        orjson.loads(cell)
    except orjson.JSONDecodeError:
        return cell
    return orjson.Fragment(cell)


def _scalar(cell: str) -> object:
    """Return true, false or a number; for any other text the text itself, which the row reader refuses with the field's
    name."""
    text = cell.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not _NUMBER.fullmatch(text):
        return cell
    if re.fullmatch(r"[+-]?[0-9]{1,20}", text):
        return int(text) if -(2**63) <= int(text) < 2**64 else cell
    number = float(text)
    return whole(number) if math.isfinite(number) else cell


def whole(number: float) -> int | float:
    """Return an integer for a whole float. pandas writes integers as floats in a column with empty cells."""
    return int(number) if number.is_integer() and abs(number) < _LARGEST_WHOLE else number


def _number(decimal: Decimal) -> object:
    """Return the integer or the float that equals a decimal; else the decimal itself, which the row is refused for."""
    if decimal == decimal.to_integral_value() and -(2**63) <= decimal < 2**64:
        return int(decimal)
    return float(decimal) if Decimal(repr(float(decimal))) == decimal else decimal


def _why_not_json(fields: Fields) -> str:
    for name, value in fields.items():
        try:
            orjson.dumps({name: value})
        except TypeError:
            shown = name if name.isidentifier() else shorten(name)
            if isinstance(value, str):  # bytes that are not UTF-8 were decoded to surrogates
                byte = next(ord(letter) & 0xFF for letter in value if "\ud800" <= letter <= "\udfff")
                return f"{shown} is not UTF-8: byte 0x{byte:02x} in {shorten(value)}"
            return f"{shown} is {shorten(value)} of type {type(value).__name__}, which no field takes"
    return "the row is no JSON"
