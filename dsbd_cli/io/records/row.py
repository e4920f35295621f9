"""An input row, answered or not, which readers return and writers take."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import orjson

from dsbd_cli.errors import InvalidRowError, RowError, shorten
from dsbd_cli.requests import Request

Fields = dict[str, object]
Form = Literal["flat", "openai-completions", "openai-chat", "openai-responses"]

MAX_LINE_BYTES = 16 << 20  # a line of brackets takes 25 times its size in memory when it is parsed


@dataclass(frozen=True, slots=True)
class LongLine:
    """A stand-in for a line that is too long to be held, or for a table's row that cannot be read.

    Attributes:
        size: bytes of the line. beginning: its first bytes.
        reason: why it cannot be read; empty: it is too long.
        fields: the fields that say the row's id, where these could be read; None where they could not.
    """

    size: int
    beginning: bytes = b""
    reason: str = ""
    fields: Fields | None = None


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table.

    Attributes:
        line: the JSON line that asks for the same.
        carried: JSON object of the cells that are no fields, by column: they go into the metadata.
        names: field -> name of its column.
    """

    line: bytes
    carried: bytes
    names: Mapping[str, str]


Line = bytes | TableRow | LongLine


def readable(line: Line) -> bytes:
    """Return the line. Raises InvalidRowError for one that is too long, or was no row of its table."""
    if isinstance(line, TableRow):
        return line.line
    if not isinstance(line, LongLine):
        return line
    if line.reason:
        raise InvalidRowError(line.reason)
    shown = shorten(line.beginning.decode("utf-8", "replace"))
    raise InvalidRowError(f"the line has {line.size} bytes, but must have at most {MAX_LINE_BYTES}: {shown}")


def held_bytes(line: Line) -> bytes:
    """Return the bytes of a line, or the first ones of a line that is not held."""
    if isinstance(line, TableRow):
        return line.line + line.carried
    return line.beginning if isinstance(line, LongLine) else line


def with_carried(metadata: object | None, line: Line) -> object | None:
    """Return the metadata of a row, and the other cells of its table's row, by column.

    A name that both have stands for the cell. Metadata that are no object then stand under the name metadata.
    """
    carried = orjson.loads(line.carried) if isinstance(line, TableRow) else {}
    if not carried:
        return metadata
    own = {} if metadata is None else metadata if isinstance(metadata, dict) else {"metadata": metadata}
    return {**own, **carried}


@dataclass(frozen=True, slots=True)
class Row:
    """An input row. Exactly one of `request` and `error` is given.

    Attributes:
        index: index among the rows, from 0.
        number: number of its line in the input, from 1; blank lines count here, though they are no rows.
        id: `id` or `custom_id` of the row, its index where it has neither; None for a row that failed and whose id
            cannot be read.
        request: the request for the engine.
        error: why the row cannot be answered; the message begins with `line <number>: `.
        metadata: any JSON value that came with the row and is written into its record.
        key: hash of what the row asks for, whatever form it is written in. The index counts only where it is the id.
        warnings: messages about fields that are not used; a reader warns of a field name once.
        written: our name and the row's, of each field that the row gives under another name.
        form: what the row is written as; flat too for a line that cannot be read. An OpenAI line is answered in its
            own form.
        overruled: the row asks for sampling, and the run searches.
    """

    index: int
    number: int
    id: str | None
    request: Request | None
    error: RowError | None
    metadata: object | None
    key: str
    warnings: tuple[str, ...] = ()
    written: tuple[tuple[str, str], ...] = ()
    form: Form = "flat"
    overruled: bool = False


def content_key(content: bytes) -> str:
    """Return a hash of the bytes that define a request, its id included, as 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
