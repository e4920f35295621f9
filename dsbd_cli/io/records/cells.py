"""Columns of a table, and conversion of its rows to the JSON lines that ask for the same."""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal

import orjson

from dsbd_cli.errors import InvalidRowError, UsageError, shorten, shown_name
from dsbd_cli.io.records.input_forms import SOURCES
from dsbd_cli.io.records.request_fields import CONTAINERS, FIELDS, NAMED, REFUSED, types_of
from dsbd_cli.io.records.row import Fields, TableRow

ENVELOPE = ("method", "url", "body")
SCORED = ("reference", "relevant")  # which bench reads; generate carries them like any other column
# fields of one word that a column of this name gives; any table may have a column called `stop`, `prefix` or `tools`
WORDS = ("temperature", "seed", "metadata")
_TYPES = {name: types_of(field.schema) for name, field in FIELDS.items()}
TEXTS = {"id", "custom_id", "reference"} | {name for name, types in _TYPES.items() if types == {"string"}}
TEXT_OR_JSON = {"metadata"} | {
    name for name, types in _TYPES.items() if "string" in types and types & {"array", "object"}
}
MAX_COLUMNS = 1000
SETTING = "--set columns"

_NUMBER = re.compile(r"[+-]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?")  # takes each digit once
_LARGEST_WHOLE = 2.0**53  # a larger float may differ from the number that was written


@dataclass(frozen=True, slots=True)
class ColumnRules:
    """Rules of which columns of a table are fields of its rows.

    Attributes:
        named: field -> name of its column, "" for none; a field that is not here may have a column of its own name.
        strict: a column that is no field is an error.
    """

    named: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False


BY_NAME = ColumnRules()


def column_rules(text: str | None, *, strict: bool = False) -> ColumnRules:
    """Return the rules of --set columns: `prompt=question,id=key`, with quotes around an item that holds a comma. A
    field alone stands for the column of its name, and `field=` for none. Raises UsageError."""
    if text is None:
        return ColumnRules(strict=strict)
    named: dict[str, str] = {}
    try:
        [items] = csv.reader([text], strict=True, skipinitialspace=True)
    except (csv.Error, ValueError):
        raise UsageError(f"{SETTING} is {shorten(text)}, which is no list with commas") from None
    for item in items or [""]:
        name, equals, column = (part.strip() for part in item.partition("="))
        if name not in FIELDS and name in NAMED:
            raise UsageError(f"{SETTING}: a table's field {name} is called {NAMED[name].name}")
        if name not in FIELDS and name not in SCORED:
            near = difflib.get_close_matches(name, (*FIELDS, *SCORED), n=1)
            hint = f"did you mean {near[0]}?" if near else "sample_inputs/README.md lists them"
            raise UsageError(f"{SETTING} names {shorten(name)}, which is no field: {hint}")
        if name in named:
            raise UsageError(f"{SETTING} names {name} twice: drop one")
        named[name] = column if equals else name
    return ColumnRules(named, strict)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of one table.

    Attributes:
        fields: field of a row -> name of its column.
        carried: names of the columns that go into the rows' metadata.
        unused: of these, the ones that lines of JSON would have for fields: name -> how --set columns makes it one.
        refused: of these, the ones that lines of JSON would fail for: name -> what to use.
    """

    fields: Mapping[str, str]
    carried: tuple[str, ...] = ()
    unused: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


def columns_of(names: list[str], rules: ColumnRules = BY_NAME) -> Columns:
    """Return which columns of a header are fields. Raises UsageError for a header under which no row can be
    answered."""
    if len(names) > MAX_COLUMNS:
        raise UsageError(f"it has {len(names)} columns, but may have {MAX_COLUMNS}")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"the column {shorten(name)} stands twice in it: drop one")
    for name, column in rules.named.items():
        if column and column not in names:
            shown = shorten(", ".join(names))
            raise UsageError(f"it has no column {shorten(column)}, which {SETTING} names for {name}; there are {shown}")
    fields = {name: column for name, column in rules.named.items() if column}
    taken = {*fields.values(), *(name for name, column in rules.named.items() if not column)}
    free = [name for name in names if name not in taken]
    fields |= {name: name for name in _by_name(free, fields)}
    if not fields.keys() & {*SOURCES, "body"}:
        raise UsageError(_without_source(names))
    used = {column for name, column in fields.items() if name not in SCORED}
    carried = tuple(name for name in names if name not in used)
    unknown = [name for name in carried if name not in SCORED]
    if rules.strict and unknown:
        raise UsageError(f"the column {shorten(unknown[0])} is no field, which --input-format strict refuses")
    if rules.named:
        return Columns(fields, carried)
    refused = {name: REFUSED[name].use for name in carried if name in REFUSED}
    refused |= {name: "its fields may be columns" for name in carried if name in CONTAINERS}
    return Columns(fields, carried, _unused(carried, fields), refused)


def _by_name(names: list[str], mapped: Mapping[str, str]) -> list[str]:
    """Return the columns that are fields because of their names. mapped: fields that have a column already."""
    fields = list[str]()
    if "id" not in mapped:
        fields += [name for name in ("id", "custom_id") if name in names][:1]
    sources = [name for name in SOURCES if name in mapped]
    if sources == ["image"]:
        fields += [name for name in ("prompt",) if name in names]
    elif not sources:
        fields += [name for name in SOURCES if name in names][:1]
        if fields[-1:] == ["prompt"] and "image" in names:  # a picture with the beginning of what is read from it
            fields.append("image")
    if not sources and not set(fields) & set(SOURCES) and {"url", "body"} <= set(names):
        return [*fields, *(name for name in (*ENVELOPE, "metadata") if name in names)]
    options = [name for name in FIELDS if ("_" in name or name in WORDS) and name not in mapped]
    return fields + [name for name in (*options, *SCORED) if name in names and name not in mapped]


def _unused(carried: Iterable[str], fields: Mapping[str, str]) -> dict[str, str]:
    named = {name: NAMED[name].name for name in carried if name in NAMED}
    return {name: own if name == own else f"{own}={name}" for name, own in named.items() if own not in fields}


def _without_source(names: list[str]) -> str:
    shown = shorten(", ".join(names))
    message = f"no column is called {', '.join(SOURCES[:-1])} or {SOURCES[-1]}; there are {shown}"
    if len(names) == 1 and {",", ";", "\t"} & set(names[0]):
        return f"{message}; .csv has commas between cells, .tsv has tabs"
    return f"{message}; {SETTING}=prompt=NAME names the column of the prompts"


def table_row(cells: Mapping[str, object], columns: Columns) -> TableRow:
    """Return a row of a table, given by column. Empty cells are left out. Raises InvalidRowError."""
    fields: Fields = {}
    for name, column in columns.fields.items():
        value = cell_value(name, cells.get(column))
        if value is not None:
            fields[name] = value
    carried = {name: value for name in columns.carried if (value := carried_value(cells.get(name))) is not None}
    return TableRow(_line(fields), _line(carried, plain=True), columns.fields)


def id_fields(cells: Mapping[str, object], columns: Columns) -> Fields:
    """Return the field of a row's id alone, as far as its cell holds one."""
    names = [name for name in ("id", "custom_id") if name in columns.fields]
    cell_values = {name: cell_value(name, cells.get(columns.fields[name])) for name in names}
    return {name: value for name, value in cell_values.items() if value is not None}


def _line(fields: Fields, *, plain: bool = False) -> bytes:
    """Return fields as JSON. plain: a value for which JSON has no form becomes text. Raises InvalidRowError."""
    try:
        return orjson.dumps(fields)
    except TypeError:
        with suppress(TypeError):  # maps of Parquet may have numbers as keys
            default = str if plain else None
            return orjson.dumps(fields, default=default, option=orjson.OPT_NON_STR_KEYS)
        raise InvalidRowError(_why_not_json(fields)) from None


def carried_value(cell: object) -> object:
    """Return a cell of a column that is no field, as it goes into metadata; None for an empty one."""
    if isinstance(cell, float):
        return whole(cell) if math.isfinite(cell) else None
    return None if cell == "" else cell


def cell_value(name: str, cell: object) -> object:
    """Return the value that a cell has in a JSON line; None for an empty cell, and for a float that is not finite.

    name: of the field. The cell of a text field stays text. Of a field that takes texts, lists and objects (`stop`,
    `allow`, `metadata`) it is JSON where it begins with a bracket and is JSON, else text. In other fields numbers, true
    and false are converted, and a whole float becomes an integer.
    """
    if isinstance(cell, float):
        return whole(cell) if math.isfinite(cell) else None
    if isinstance(cell, Decimal):
        return _number(cell)
    if not isinstance(cell, str):
        return cell
    if not cell:
        return None
    if name in TEXTS:
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
            shown = shown_name(name)
            if isinstance(value, str):  # bytes that are not UTF-8 were decoded to surrogates
                byte = next(ord(letter) & 0xFF for letter in value if "\ud800" <= letter <= "\udfff")
                return f"{shown} is not UTF-8: byte 0x{byte:02x} in {shorten(value)}"
            return f"{shown} is {shorten(value)} of type {type(value).__name__}, which no field takes"
    return "the row is no JSON"
