"""The flow of rows through an engine, which keeps them in input order. Rows that are done are skipped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from dsbd_cli.cli.run.progress import Reporter
from dsbd_cli.cli.run.shard import Shard
from dsbd_cli.errors import DsbdError, InvalidRowError, RowError, UsageError, shorten
from dsbd_cli.io.lines.jsonl import LineWriter, NumberedLine
from dsbd_cli.io.lines.resume import DoneRows, InputEnd
from dsbd_cli.io.records.native_record import step_records
from dsbd_cli.io.records.record_parts import row_error
from dsbd_cli.io.records.row import Line, LongLine, Row, held_bytes
from dsbd_cli.requests import Request, RequestResult

if TYPE_CHECKING:
    from dsbd_cli.scale.worker import RunsRequests

MAX_KNOWN_IDS = 1_000_000

MakeRecord = Callable[[Row, RequestResult | None], bytes]


class ReadRow(Protocol):
    """Interface of RowReader.read and RowReader.read_text."""

    def __call__(self, line: Line, *, index: int, number: int) -> Row: ...


class TooManyErrorsError(DsbdError):
    """The end of a run in which as many rows have failed as --set max-errors says."""


def check_errors(failed: int, most: int | None, details: str) -> None:
    """Raise TooManyErrorsError if as many rows have failed as --set max-errors says. details: the end of the
    message."""
    if most is not None and failed >= most:
        rows = "a row has" if most == 1 else f"{most} rows have"
        raise TooManyErrorsError(f"{rows} failed{details}")


class RowFlow:
    """The rows of one run. What was written stays, whatever ends it early."""

    def __init__(
        self,
        lines: Iterable[NumberedLine | None],
        read: ReadRow,
        reporter: Reporter,
        *,
        done: DoneRows,
        max_errors: int | None,
        stopping: Callable[[], bool],
        begin: Callable[[], tuple[LineWriter, LineWriter | None]],
        ordered: bool,
        shard: Shard | None,
        require_valid: bool,
    ) -> None:
        """done: rows that an earlier run has answered. stopping: returns whether a signal has come. begin: returns the
        writers of records and steps, before the first record. ordered: records come in input order, else as they are
        ready. shard: only the rows of this part. require_valid: a row fails if its best text does not match its
        grammar."""
        self._lines, self._read_row, self._reporter = iter(lines), read, reporter
        self._begin = begin
        self._writers: tuple[LineWriter, LineWriter | None] | None = None
        self._done, self._max_errors, self._stopping = done, max_errors, stopping
        self._index = self._position = 0
        self._next: tuple[int, Row] | None = None
        self._ordered, self._shard, self._require_valid = ordered, shard, require_valid
        self._pending: dict[int, tuple[int, Row]] = {}  # by id() of the request or error that the engine was given
        self._ids: set[int] = set()
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def input_end(self) -> InputEnd:
        """Rows of the input so far, those of other parts too. Only the digest of a part is taken."""
        return InputEnd(self._index, self._digest.hexdigest())

    def needs_engine(self, record: MakeRecord) -> bool:
        """Skip the rows that are done, and write those that cannot be read, up to the first row that needs an engine.

        Return False if there is no such row, so that no model is needed.
        """
        self._record = record
        for item in self._rows():
            if self._stopping():
                return False
            if item is None:
                self._flush()
            elif item[1].request is not None:
                self._next = item
                return True
            else:
                self._write(*item, None)
        self._flush()
        return False

    def run(self, engine: RunsRequests, record: MakeRecord) -> None:
        """Answer every row that is not done."""
        self._record = record
        try:
            for result in engine.run(self._requests(), ordered=self._ordered):
                name = id(result.request) if id(result.request) in self._pending else id(result.error)
                assert not self._ordered or name == next(iter(self._pending)), "the engine answers in input order"
                position, row = self._pending.pop(name)
                self._write(position, row, None if row.request is None else result)
        except UsageError:
            if not self._stopping():  # a signal may have stopped the engine before its run began
                raise
        assert self._stopping() or not self._pending, "the engine answers every row"
        self._flush()

    def _flush(self) -> None:
        if self._writers is not None:
            self._writers[0].flush()

    def _requests(self) -> Iterator[Request | RowError | None]:
        for item in self._rows():
            if self._stopping():
                return
            if item is None:
                self._flush()
                yield None
                continue
            handed = item[1].request or item[1].error
            self._pending[id(handed)] = item
            yield handed

    def _rows(self) -> Iterator[tuple[int, Row] | None]:
        """Yield the rows that are not done, each with the bytes of all lines up to its end; None if nothing is ready.

        Blank lines and carriage returns are not among these bytes.
        """
        if self._next is not None:
            yield self._next
            self._next = None
        for item in self._lines:
            if item is None:
                yield None
                continue
            number, line = item
            index = self._index
            self._index += 1
            self._position += (line.size if isinstance(line, LongLine) else len(held_bytes(line))) + 1
            if self._shard is not None:
                self._digest.update(held_bytes(line) + b"\n")
                if not self._shard.has(index):
                    continue
            row = self._read_row(line, index=index, number=number)
            self._note_id(row)
            if (done := self._done.take(row.id, row.key)) is not None:
                self._reporter.totals.skip(done)
                self._reporter.at(self._position, skipped=True)
                continue
            for warning in row.warnings:
                self._reporter.warn(warning)
            self._reporter.totals.overruled_rows += row.overruled
            yield self._position, row

    def _note_id(self, row: Row) -> None:
        """Warn of an id that was used before, because it matters to whoever joins on ids. Memory for this is
        bounded."""
        if row.id is None:
            return
        name = hash(row.id)
        if name in self._ids:
            self._reporter.totals.duplicates += 1
            self._reporter.warn(f"line {row.number}: the id {shorten(row.id)} has been used before", kind="duplicate")
        elif len(self._ids) < MAX_KNOWN_IDS:
            self._ids.add(name)

    def _write(self, position: int, row: Row, result: RequestResult | None) -> None:
        """Write a row's steps, and then its record, because a record says that all of its row is written."""
        if self._require_valid and result is not None and result.error is None and result.invalid:
            limit = result.request.sampling.max_new_tokens
            reason = (
                f"max_new_tokens is {limit}, which cut the text before it matched its grammar: raise it, or bound what "
                "the grammar leaves open"
                if result.hypotheses[0].finish_reason == "length"
                else "the text is not valid under its schema, in what the grammar cannot enforce"
            )
            result = replace(result, error=InvalidRowError(reason))
        error = row_error(row, result)
        self._writers = self._writers or self._begin()
        writer, steps = self._writers
        if result is not None:
            if steps is not None:
                for line in step_records(result.stats.step_log):
                    steps.write(line)
            self._reporter.totals.add(result)
        writer.write(self._record(row, result))
        self._reporter.at(position)
        self._reporter.row(row.index, row.id, error)
        if error is not None:
            check_errors(self._reporter.totals.failed, self._max_errors, f", the last one at {error}")
