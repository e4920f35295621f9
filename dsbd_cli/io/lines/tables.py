"""CSV and Parquet files as input, known by the ending of their name. Each row is read as the JSON line that asks for
the same."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dsbd_cli.errors import InvalidRowError, UsageError, one_line, plural, reading, require_package, shorten
from dsbd_cli.io.lines.compression import ending, open_input
from dsbd_cli.io.lines.jsonl import BLOCK_BYTES, BOM, HEAD_BYTES, NumberedLine, ReadLines, read_lines
from dsbd_cli.io.records.cells import FIELDS, check_columns, row_line
from dsbd_cli.io.records.row import MAX_LINE_BYTES, LongLine

if TYPE_CHECKING:
    from pyarrow import RecordBatch

DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
MAX_COUNTED_BYTES = 16 << 20  # of a CSV file whose rows are counted in advance
MAX_BATCH_ROWS, BATCH_BYTES = 1024, 4 << 20  # of Parquet, most that are held at a time


def is_table(path: Path) -> bool:
    """Return whether a name is that of a table, compressed or not."""
    return ending(path) in (*DELIMITERS, PARQUET)


def lines_reader(path: Path) -> ReadLines:
    """Return the function that reads the rows of a file of this name as lines of JSON."""
    if ending(path) == PARQUET:
        return partial(_parquet_lines, path)
    delimiter = DELIMITERS.get(ending(path))
    return read_lines if delimiter is None else partial(read_csv, name=str(path), delimiter=delimiter)


def check_table(path: Path) -> None:
    """Check the column names of a table. Raises UsageError if it cannot be read, or no row could be answered."""
    if ending(path) == PARQUET:
        if path.suffix.lower() != PARQUET:
            raise UsageError(f"{path}: a Parquet file is compressed inside: unpack it, and name it .parquet")
        require_package(str(path), "pyarrow", "parquet")
        if not path.is_file():
            raise UsageError(f"{path} is no ordinary file: Parquet is not read from a pipe")
    if path.is_file():
        with reading(str(path)), open_input(path) as stream:
            next(lines_reader(path)(stream), None)


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
        records = _records(_RecordLines(stream, MAX_LINE_BYTES), DELIMITERS[ending(path)])
        next(records, None)  # the header
        return sum(1 for _ in records)


# CSV


def read_csv(
    stream: BinaryIO, *, name: str, delimiter: str = ",", limit: int = MAX_LINE_BYTES
) -> Iterator[NumberedLine]:
    """Yield the number of the first line and the JSON of every row after the header. Blank lines are skipped.

    A row that cannot be read, or has more than `limit` bytes, is yielded as a LongLine with the reason. name: for
    messages. Raises UsageError for a header that cannot be used.
    """
    names: list[str] | None = None
    lines = _RecordLines(stream, limit)
    for cells, reason in _records(lines, delimiter):
        if names is None:
            names = _header(cells, reason, name)
            continue
        try:
            if cells is None or reason:
                raise InvalidRowError(reason)
            if len(cells) != len(names):
                raise InvalidRowError(f"the row has {plural(len(cells), 'cell')}, but the header has {len(names)}")
            yield lines.first, row_line(zip(names, cells, strict=True))
        except InvalidRowError as error:
            yield lines.first, LongLine(lines.size, lines.head, str(error))


def _records(lines: _RecordLines, delimiter: str) -> Iterator[tuple[list[str] | None, str]]:
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


def _header(cells: list[str] | None, reason: str, file: str) -> list[str]:
    """Return the names of the columns. Raises UsageError."""
    if cells is None:
        raise UsageError(f"the header of {file} cannot be read: {reason or 'it is too long'}")
    names = [name.strip() for name in cells]
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        raise UsageError(f"the header of {file} is not UTF-8: save the file in UTF-8") from None
    _check_header(names, file)
    return names


def _check_header(names: list[str], file: str) -> None:
    try:
        check_columns(names)
    except UsageError as error:
        raise UsageError(f"the header of {file} cannot be used: {error}") from None


class _LongRecordError(Exception):
    """A record has more bytes than may be held."""


class _RecordLines:
    """The lines of a stream as text, for a csv.reader, which takes as many lines as a record has.

    Bytes that are not UTF-8 are kept as surrogates, so that the rest of the record can be read.

    Attributes:
        limit: bytes that a record may have. first: number of the record's first line, from 1. size: bytes of the record
            so far. head: its first bytes.
    """

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream, self.limit = stream, limit
        self._number = self._quotes = self.size = 0
        self._ended = True  # the last line was read to its end
        self.head = b""
        self.first = 1

    def begin(self) -> None:
        """Begin a new record at the next line."""
        self.first, self.size, self._quotes, self.head = self._number + 1, 0, 0, b""

    def __iter__(self) -> _RecordLines:
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
        self.head += line[: HEAD_BYTES - len(self.head)]
        self.size += len(line)
        self._quotes += line.count(b'"')
        return line


# Parquet


def _parquet_lines(path: Path, stream: BinaryIO) -> Iterator[NumberedLine]:
    """Yield the number of every row, from 1, and its JSON line. Rows are read in batches.

    stream: the same file, which is not used: the path is opened again, because Parquet needs a file that can be sought
    in. Raises OSError, and UsageError for columns that cannot be used.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path, buffer_size=BLOCK_BYTES) as file:
            names = file.schema_arrow.names
            _check_header(names, str(path))
            size = sum(file.metadata.row_group(place).total_byte_size for place in range(file.num_row_groups))
            rows = min(MAX_BATCH_ROWS, max(1, BATCH_BYTES * file.metadata.num_rows // max(size, 1)))
            number = 0
            for batch in file.iter_batches(batch_size=rows, use_threads=False):
                for line in _batch_lines(batch):
                    number += 1
                    yield number, line
    except (OSError, pyarrow.ArrowException) as error:
        raise OSError(f"no Parquet that can be read: {one_line(error)}") from None


def _batch_lines(batch: RecordBatch) -> Iterator[bytes | LongLine]:
    """Yield the JSON line of every row of a batch. A cell for which Python has no value, such as a date after the
    year 9999, costs its row alone."""
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except Exception:  # what a conversion raises depends on the column's type
        for place in range(batch.num_rows):
            yield _row_alone(batch.slice(place, 1))
    else:
        yield from map(_parquet_line, rows)


def _row_alone(batch: RecordBatch) -> bytes | LongLine:
    """Return the JSON line of a batch's only row, or the reason why a cell of it cannot be read."""
    row: dict[str, object] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            [row[name]] = column.to_pylist(maps_as_pydicts="strict")
        except Exception as error:
            if name not in FIELDS:  # nobody reads it
                row[name] = str(column.type)
                continue
            shown = name if name.isidentifier() else shorten(name)
            return LongLine(0, reason=f"{shown} cannot be read as {column.type}: {one_line(error)}")
    return _parquet_line(row)


def _parquet_line(row: dict[str, object]) -> bytes | LongLine:
    try:
        line = row_line(row.items())
    except InvalidRowError as error:
        return LongLine(0, reason=str(error))
    return line if len(line) <= MAX_LINE_BYTES else LongLine(len(line), line[:HEAD_BYTES])
