"""CSV and Parquet files as input, known by the ending of their name. Each row is read as the JSON line that asks for
the same."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dsbd_cli.errors import (
    MAX_NAMES,
    InvalidRowError,
    UsageError,
    one_line,
    plural,
    reading,
    require_package,
    shown_name,
    shown_names,
)
from dsbd_cli.io.lines.compression import ending, open_input
from dsbd_cli.io.lines.encoding import check_text_file
from dsbd_cli.io.lines.jsonl import BLOCK_BYTES, BOM, FIRST_BYTES, NumberedLine, ReadLines, read_lines
from dsbd_cli.io.records.cells import BY_NAME, SETTING, ColumnRules, Columns, columns_of, id_fields, table_row
from dsbd_cli.io.records.input_forms import SOURCES
from dsbd_cli.io.records.row import MAX_LINE_BYTES, Fields, LongLine, TableRow

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch, Schema
    from pyarrow.parquet import ParquetFile

DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
MAX_COUNTED_BYTES = 16 << 20  # of a CSV file whose rows are counted in advance
MAX_BATCH_ROWS, BATCH_BYTES = 1024, 4 << 20  # of Parquet, most that are held at a time


def is_table(path: Path) -> bool:
    """Return whether a name is that of a table, compressed or not."""
    return ending(path) in (*DELIMITERS, PARQUET)


@dataclass(frozen=True, slots=True)
class Header:
    """The columns of a table that was looked at.

    Attributes:
        left_out: names of columns that are no fields and hold bytes, which metadata cannot: they are not read. kinds:
            types of the other ones as pyarrow spells them, for numbers and booleans of Parquet.
    """

    columns: Columns
    left_out: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)

    def notes(self, path: Path) -> list[str]:
        """Return lines about columns that somebody may have meant otherwise."""
        notes = []
        source = next((name for name in (*SOURCES, "body") if name in self.columns.fields), "")
        if unused := self.columns.unused:
            names, one = shown_names(list(unused)), len(unused) == 1
            notes.append(
                f"{path}: the column{'' if one else 's'} {names} {'is' if one else 'are'} carried, and no field of the "
                f"rows ({SETTING}={','.join(unused.values())} changes that, {SETTING}={source} ends this line)"
            )
        for name, use in list(self.columns.refused.items())[:MAX_NAMES]:
            reason = f"carried, because no row has a field of this name ({use}; {SETTING}={source} ends this line)"
            notes.append(f"{path}: the column {name} is {reason}")
        if self.left_out:
            notes.append(f"{path}: left out, because bytes are not carried: {shown_names(self.left_out)}")
        return notes


def lines_reader(path: Path, rules: ColumnRules = BY_NAME) -> ReadLines:
    """Return the function that reads the rows of a file of this name as lines of JSON. rules: which columns of a table
    are fields."""
    if ending(path) == PARQUET:
        return partial(_parquet_lines, path, rules)
    delimiter = DELIMITERS.get(ending(path))
    return read_lines if delimiter is None else partial(read_csv, name=str(path), delimiter=delimiter, rules=rules)


def table_header(path: Path, rules: ColumnRules = BY_NAME) -> Header | None:
    """Return the columns of a table; None where the file is empty. Raises UsageError and OSError."""
    if ending(path) == PARQUET:
        with _parquet_file(path) as file:
            return _parquet_header(file.schema_arrow, str(path), rules)
    with open_input(path) as stream:
        header = next(_records(_CsvLines(stream, MAX_LINE_BYTES), DELIMITERS[ending(path)]), None)
    return None if header is None else Header(_header(*header, str(path), rules))


def check_table(path: Path, rules: ColumnRules = BY_NAME) -> None:
    """Check the column names of a table. Raises UsageError if it cannot be read, or no row could be answered."""
    if ending(path) == PARQUET:
        if path.suffix.lower() != PARQUET:
            raise UsageError(f"{path}: a Parquet file is compressed inside: unpack it, and name it .parquet")
        require_package(str(path), "pyarrow", "parquet")
        if not path.is_file():
            raise UsageError(f"{path} is no ordinary file: Parquet is not read from a pipe")
    if path.is_file():
        with reading(str(path)):
            if ending(path) != PARQUET:
                check_text_file(path)
            with open_input(path) as stream:
                next(lines_reader(path, rules)(stream), None)


def count_table_rows(path: Path) -> int | None:
    """Return the number of rows of a table; None for a CSV file that is too large to be counted. Raises OSError.

    A Parquet file holds the number; a CSV file is read through.
    """
    if ending(path) == PARQUET:
        from pyarrow.parquet import read_metadata

        return int(read_metadata(path).num_rows)
    if path.stat().st_size > MAX_COUNTED_BYTES:
        return None
    with open_input(path) as stream:
        records = _records(_CsvLines(stream, MAX_LINE_BYTES), DELIMITERS[ending(path)])
        next(records, None)  # the header
        return sum(1 for _ in records)


# CSV


def read_csv(
    stream: BinaryIO,
    *,
    name: str,
    delimiter: str = ",",
    limit: int = MAX_LINE_BYTES,
    rules: ColumnRules = BY_NAME,
) -> Iterator[NumberedLine]:
    """Yield the number of its first line and a TableRow for every row after the header. Blank lines are skipped.

    A row that cannot be read, or has more than `limit` bytes, is yielded as a LongLine with the reason. name: for
    messages. Raises UsageError for a header that cannot be used.
    """
    names: list[str] = []
    columns: Columns | None = None
    lines = _CsvLines(stream, limit)
    for cells, reason in _records(lines, delimiter):
        if columns is None:
            columns = _header(cells, reason, name, rules)
            names = [cell.strip() for cell in cells or ()]
            continue
        try:
            if cells is None or reason:
                raise InvalidRowError(reason)
            if len(cells) != len(names):
                raise InvalidRowError(f"the row has {plural(len(cells), 'cell')}, but the header has {len(names)}")
            yield lines.first, table_row(dict(zip(names, cells, strict=True)), columns)
        except InvalidRowError as error:
            yield lines.first, LongLine(lines.size, lines.beginning, str(error), _known_id(names, cells, columns))


def _known_id(names: list[str], cells: list[str] | None, columns: Columns) -> Fields | None:
    """Return the field of the id of a row that cannot be read; None where nobody knows its cell.

    In a row with too many or too few cells only the first one is surely that of its column.
    """
    name = columns.fields.get("id", columns.fields.get("custom_id"))
    if name is None:
        return {}
    if cells is None or (len(cells) != len(names) and name != names[0]):
        return None
    return id_fields(dict(zip(names, cells, strict=False)), columns)


def _records(lines: _CsvLines, delimiter: str) -> Iterator[tuple[list[str] | None, str]]:
    """Yield the cells of every record, while `lines` tells where it stands.

    The cells of a record that cannot be read are None, with a reason; the reason is empty if the record is too long.
    """
    csv.field_size_limit(max(lines.limit, csv.field_size_limit()))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.begin()
        try:
            cells = next(reader, None)
            if cells is None:
                return
            if cells:
                yield cells, ""
        except _LongRecordError:
            lines.skip()
            yield None, ""
        except csv.Error as error:
            wording = "a line end stands in a cell without quotes" if "new-line" in str(error) else one_line(error)
            yield None, f"not valid CSV: {wording}"


def _header(cells: list[str] | None, reason: str, file: str, rules: ColumnRules) -> Columns:
    """Return the columns that a header names. Raises UsageError."""
    if cells is None:
        raise UsageError(f"the header of {file} cannot be read: {reason or 'it is too long'}")
    names = [name.strip() for name in cells]
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        raise UsageError(f"the header of {file} is not UTF-8: save the file in UTF-8") from None
    return _columns(names, file, rules)


def _columns(names: list[str], file: str, rules: ColumnRules) -> Columns:
    try:
        return columns_of(names, rules)
    except UsageError as error:
        raise UsageError(f"the header of {file} cannot be used: {error}") from None


class _LongRecordError(Exception):
    """A record has more bytes than may be held."""


class _CsvLines:
    """The lines of a stream as text, for a csv.reader, which takes as many lines as a record has.

    Bytes that are not UTF-8 are kept as surrogates, so that the rest of the record can be read.

    Attributes:
        limit: bytes that a record may have. first: number of the record's first line, from 1. size: bytes of the record
            so far. beginning: its first bytes.
    """

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream, self.limit = stream, limit
        self._number = self._quotes = self.size = 0
        self._ended = True  # the last line was read to its end
        self.beginning = b""
        self.first = 1

    def begin(self) -> None:
        """Begin a new record at the next line."""
        self.first, self.size, self._quotes, self.beginning = self._number + 1, 0, 0, b""

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = self._read(self.limit - self.size + len(BOM) + 1)
        if not line:
            raise StopIteration
        if self.size > self.limit:
            raise _LongRecordError
        return line.decode("utf-8", "surrogateescape")

    def skip(self) -> None:
        """Skip to the end of the record, which is the end of a line after which no quote is open."""
        while (not self._ended or self._quotes % 2) and self._read(BLOCK_BYTES):
            pass

    def _read(self, most: int) -> bytes:
        """Read a line, or its next `most` bytes."""
        line = self._stream.readline(most)
        if not line:
            return b""
        self._number += self._ended
        if self._number == 1 and self._ended:
            line = line.removeprefix(BOM)
        self._ended = line.endswith(b"\n")
        self.beginning += line[: FIRST_BYTES - len(self.beginning)]
        self.size += len(line)
        self._quotes += line.count(b'"')
        return line


# Parquet


@contextmanager
def _parquet_file(path: Path) -> Iterator[ParquetFile]:
    """Yield an open Parquet file. Raises OSError for whatever is wrong with it."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path, buffer_size=BLOCK_BYTES) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise OSError(f"no Parquet that can be read: {one_line(error)}") from None


def _parquet_header(schema: Schema, name: str, rules: ColumnRules) -> Header:
    """Return the columns of a Parquet file. Raises UsageError."""
    from pyarrow.types import is_boolean, is_floating, is_integer

    columns, types = _columns(schema.names, name, rules), dict(zip(schema.names, schema.types, strict=True))
    left_out = tuple(name for name in columns.carried if _holds_bytes(types[name]))
    carried = tuple(name for name in columns.carried if name not in left_out)
    plain = [name for name in carried if any(fits(types[name]) for fits in (is_boolean, is_floating, is_integer))]
    return Header(replace(columns, carried=carried), left_out, {name: str(types[name]) for name in plain})


def _holds_bytes(kind: DataType) -> bool:
    from pyarrow.types import is_binary, is_binary_view, is_fixed_size_binary, is_large_binary

    inside = any(_holds_bytes(kind.field(number).type) for number in range(kind.num_fields))
    return inside or any(fits(kind) for fits in (is_binary, is_binary_view, is_fixed_size_binary, is_large_binary))


def _parquet_lines(path: Path, rules: ColumnRules, stream: BinaryIO) -> Iterator[NumberedLine]:
    """Yield the number of every row, from 1, and a TableRow. Rows are read in batches.

    stream: the same file, which is not used: the path is opened again, because Parquet needs a file that can be sought
    in. Raises OSError, and UsageError for columns that cannot be used.
    """
    with _parquet_file(path) as file:
        header = _parquet_header(file.schema_arrow, str(path), rules)
        columns, wanted = header.columns, None
        if header.left_out:
            wanted = [name for name in file.schema_arrow.names if name not in header.left_out]
        size = sum(file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups))
        rows = min(MAX_BATCH_ROWS, max(1, BATCH_BYTES * file.metadata.num_rows // max(size, 1)))
        number = 0
        for batch in file.iter_batches(batch_size=rows, columns=wanted, use_threads=False):
            for line in _batch_lines(batch, columns):
                number += 1
                yield number, line


def _batch_lines(batch: RecordBatch, columns: Columns) -> Iterator[TableRow | LongLine]:
    """Yield every row of a batch. A cell of a field for which Python has no value, such as a date after the year 9999,
    costs its row alone."""
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except Exception:  # what a conversion raises depends on the column's type
        for number in range(batch.num_rows):
            yield _row_alone(batch.slice(number, 1), columns)
    else:
        for row in rows:
            yield _parquet_row(row, columns)


def _row_alone(batch: RecordBatch, columns: Columns) -> TableRow | LongLine:
    """Return a batch's only row, or the reason why a cell of it cannot be read."""
    from pyarrow.types import is_string

    row: dict[str, object] = {}
    reason = ""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            [row[name]] = column.to_pylist(maps_as_pydicts="strict")
        except Exception as error:
            if name in columns.carried and column.type.num_fields == 0 and not is_string(column.type):
                [row[name]] = column.cast("string").to_pylist()
            else:
                reason = reason or f"{shown_name(name)} cannot be read as {column.type}: {one_line(error)}"
    if not reason:
        return _parquet_row(row, columns)
    ids = id_fields(row, columns) if columns.fields.get("id", "") in {"", *row} else None
    return LongLine(0, reason=reason, fields=ids)


def _parquet_row(row: dict[str, object], columns: Columns) -> TableRow | LongLine:
    try:
        row_fields = table_row(row, columns)
    except InvalidRowError as error:
        return LongLine(0, reason=str(error), fields=id_fields(row, columns))
    size = len(row_fields.line) + len(row_fields.carried)
    if size <= MAX_LINE_BYTES:
        return row_fields
    return LongLine(size, row_fields.line[:FIRST_BYTES], fields=id_fields(row, columns))
