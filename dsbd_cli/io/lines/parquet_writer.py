"""A writer of beams to a Parquet file, one row group after another. Needs the extra `parquet`."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import orjson
import pyarrow
from pyarrow.parquet import ParquetWriter

from dsbd_cli.errors import OutputError
from dsbd_cli.io.lines.jsonl import LineWriter
from dsbd_cli.io.records.record_parts import CarriedColumn

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_GROUP_ROWS, MAX_GROUP_BYTES = 1 << 16, 8 << 20  # most that are held before they are written
NUMBERS = {"rank": pyarrow.int32(), "logprob": pyarrow.float64(), "score": pyarrow.float64()}


class TableWriter(LineWriter):
    """A writer of the records of `parquet_record`. It holds rows until a row group is full.

    Closing writes the rest and the footer of the file, without which it cannot be read. After a failed write there is
    no footer.
    """

    def __init__(
        self, stream: io.FileIO, name: str, columns: tuple[str, ...], carried: tuple[CarriedColumn, ...] = ()
    ) -> None:
        """stream: closed in the end. name: of the file, for messages. carried: columns behind the others."""
        super().__init__(stream, name, owned=True)
        types = [(column, NUMBERS.get(column, pyarrow.string())) for column in columns]
        types += [(column.name, pyarrow.type_for_alias(column.kind or "string")) for column in carried]
        self._schema = pyarrow.schema(types)
        self._rows: list[dict[str, object]] = []
        self._bytes = 0
        self._table: ParquetWriter | None = None
        self._failed = False

    def write(self, line: bytes) -> None:
        """Add the rows of one record. Raises OutputError."""
        self._rows += orjson.loads(line)
        self._bytes += len(line)
        if len(self._rows) >= MAX_GROUP_ROWS or self._bytes >= MAX_GROUP_BYTES:
            self._write_group()

    def flush(self) -> None:
        """Do nothing, because a pause of the input is no reason for a smaller row group."""

    def close(self) -> None:
        """Write the held rows and the footer, and close the file. Raises OutputError. May be called twice."""
        try:
            if not self._failed:
                self._write_group()
                self._opened().close()
        finally:
            self._stream.close()

    def _opened(self) -> ParquetWriter:
        if self._table is None:
            self._table = ParquetWriter(pyarrow.PythonFile(_Sink(self), mode="w"), self._schema)
        return self._table

    def _write_group(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        if rows:
            self._opened().write_table(pyarrow.Table.from_pylist(rows, schema=self._schema))

    def _put(self, data: bytes) -> None:
        try:
            super()._put(data)
        except OutputError as error:
            self._failed = True
            reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
            raise OutputError(f"cannot write {self._name}: {reason}; the file is cut and cannot be read") from error


class _Sink(io.RawIOBase):
    """The file of a TableWriter, with the interface that pyarrow writes to."""

    def __init__(self, writer: TableWriter) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        raw = bytes(data)
        self._writer._put(raw)
        return len(raw)
