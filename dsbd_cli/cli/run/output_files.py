"""The output and the stats file. They are opened and locked before any model is loaded, and changed only when there is
a record, or a model."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from dsbd_cli.cli.options.options import STANDARD, FileOptions
from dsbd_cli.cli.options.settings import TYPED
from dsbd_cli.cli.run.files import is_special, output_format, resumes
from dsbd_cli.cli.run.progress import Reporter
from dsbd_cli.errors import OutputError, UsageError, plural, reading
from dsbd_cli.io.lines.compression import frame_maker
from dsbd_cli.io.lines.jsonl import LineWriter
from dsbd_cli.io.lines.lock import open_locked
from dsbd_cli.io.lines.resume import (
    DoneRows,
    InputEnd,
    Settings,
    drop_failed,
    finished_steps,
    read_done,
    read_run,
    settings_file,
    truncate_at,
    whole_size,
    write_settings,
)
from dsbd_cli.io.records.beam_record import csv_line
from dsbd_cli.io.records.record_parts import CarriedColumn, fingerprint_difference


def read_earlier_run(files: FileOptions, settings: Settings) -> tuple[DoneRows, int]:
    """Return the rows that an earlier run has done, and how many failed ones are to be answered again, of a run that
    would go on with --output. Nothing is changed. Raises UsageError as the run would."""
    output = files.output
    if output is None or not resumes(files) or not output.is_file():
        return DoneRows(), 0
    with reading(f"--output {output}"), io.FileIO(output, "rb") as stream:
        if not stream.seek(0, io.SEEK_END):
            return DoneRows(), 0
        _check_settings(files, settings, TYPED)
        done = read_done(stream, output, whole_size(stream))
    retried = done.failed.total() if files.existing == "retry" else 0
    return (DoneRows(done.answered), retried) if retried else (done, 0)


def _check_settings(files: FileOptions, settings: Settings, typed: Mapping[str, str]) -> int:
    """Return when the run began that wrote --output. Raises UsageError where it had other settings."""
    assert files.output is not None
    before, created, _ = read_run(files.output, "--existing resume")
    if difference := fingerprint_difference(before, settings, typed):
        raise UsageError(
            f"--existing {files.existing}: {files.output} was made with other settings: {difference}; use the same, or "
            "name another file"
        )
    return created


class Outputs:
    """Output files of a run. Entering the `with` block opens and locks them; `begin` makes them ready to be written."""

    def __init__(
        self,
        files: FileOptions,
        settings: Settings,
        reporter: Reporter,
        typed: Mapping[str, str] = TYPED,
        carried: tuple[CarriedColumn, ...] = (),
    ) -> None:
        """settings: of the run, which one that goes on must share. reporter: is told what an earlier run has left.
        typed: names of the settings as the user types them. carried: columns of the input that a table repeats."""
        self.done = DoneRows()
        self.created = int(time.time())
        self._files, self._settings, self._reporter, self._typed = files, settings, reporter, typed
        self._carried = carried
        self._stack = ExitStack()
        self._output: io.FileIO | None = None
        self._steps: io.FileIO | None = None
        self._writers: tuple[LineWriter, LineWriter | None] | None = None
        self._special: dict[Path, LineWriter] = {}  # devices and pipes
        self._new_files: list[Path] = []  # created by this run, and removed if they stay empty

    def __enter__(self) -> Self:
        if self._files.output in (None, STANDARD) and sys.stdout is None:
            raise OutputError("standard output is closed: name a file with --output")
        with self._stack:
            self._stack.callback(self._remove_empty)
            self._output = self._claim(self._files.output)
            self._steps = self._claim(self._files.stats)
            if resumes(self._files) and self._output is not None:
                self._read_earlier_run(self._output)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def _remove_empty(self) -> None:
        """Remove files that this run has made and left empty."""
        for path in self._new_files:
            if path.is_file() and path.stat().st_size == 0:
                path.unlink()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in the file yet, so that even a run without rows has to make it."""
        return self._output is None or self._output.tell() == 0

    def begin(self) -> tuple[LineWriter, LineWriter | None]:
        """Return the writers of records and steps, the same ones at every call.

        The first call empties a file that is to be overwritten, and writes the settings file if the output is empty.
        """
        if self._writers is None:
            self._writers = self._make_writers()
        return self._writers

    def _make_writers(self) -> tuple[LineWriter, LineWriter | None]:
        output, steps, form = self._files.output, self._files.stats, output_format(self._files)
        if self._output is not None and output is not None:
            if self._files.existing == "overwrite":
                self._output.truncate(0)
            if self._output.tell() == 0 and form.resumable:
                write_settings(output, self._settings, self.created)
            elif self._output.tell() == 0:
                settings_file(output).unlink(missing_ok=True)
        if self._steps is not None and self._files.existing == "overwrite":
            self._steps.truncate(0)
        self._new_files = []
        if form.parquet:
            from dsbd_cli.io.lines.parquet_writer import TableWriter

            assert self._output is not None, "a Parquet file is an ordinary one"
            records: LineWriter = TableWriter(self._output, str(output), form.columns, self._carried)
            self._stack.enter_context(records)
        else:
            records = self._writer(output, self._output)
            if form.columns:
                records.write(csv_line([*form.columns, *(column.name for column in self._carried)]))
        return records, None if steps is None else self._writer(steps, self._steps)

    def finish(self) -> None:
        """Close the output, if it was begun, so that what is reported afterwards is true. Raises OutputError."""
        if self._writers is not None:
            self._writers[0].close()

    def drop_gone(self) -> None:
        """Drop the failed records of an earlier run whose rows are gone or mended, and tell of it and of answers to
        rows that are gone.

        To be called before `finish`, when all rows of the input are known. Raises OutputError.
        """
        gone, left, output = self.done.failed.total(), self.done.answered.total(), self._files.output
        if gone:
            assert self._output is not None
            assert output is not None
            self._output, _ = drop_failed(self._output, output, self.done.failed)
            self._stack.callback(self._output.close)
            self._reporter.warn(f"{output}: {plural(gone, 'failed record')} dropped, whose rows are gone or mended")
        if left:
            self._reporter.warn(f"{output} holds {plural(left, 'record')} of rows that are not in the input any more")

    def complete(self, end: InputEnd) -> None:
        """Note in the settings file that all rows of a part are written."""
        assert self._files.output is not None
        write_settings(self._files.output, self._settings, self.created, end)

    def _claim(self, path: Path | None) -> io.FileIO | None:
        """Open and lock a file. Return None for standard output, and for devices and pipes, which are opened
        unlocked."""
        if path in (None, STANDARD):
            return None
        if is_special(path):
            self._special[path] = self._stack.enter_context(LineWriter.create(path, overwrite=True))
            return None
        fresh = not path.exists()
        stream = open_locked(path, create_only=self._files.existing in (None, "error"))
        self._stack.callback(stream.close)
        if fresh:
            self._new_files.append(path)
        return stream

    def _read_earlier_run(self, stream: io.FileIO) -> None:
        """Read what an earlier run has left. A file that is not ours is refused before a byte of it is changed."""
        output, totals = self._files.output, self._reporter.totals
        assert output is not None
        if stream.seek(0, io.SEEK_END) > 0:
            self.created = _check_settings(self._files, self._settings, self._typed)
            end = whole_size(stream)
            self.done = read_done(stream, output, end)
            self._check_steps(output)
            if torn := truncate_at(stream, end):
                self._reporter.warn(f"{output}: the last line was torn ({torn} bytes); its row is answered again")
            if self._files.existing == "retry":
                stream, totals.retried = drop_failed(stream, output)
                self._stack.callback(stream.close)
                self._output = stream
                end = stream.seek(0, io.SEEK_END)
                self.done = read_done(stream, output, end)
            stream.seek(end)
        else:
            self._check_steps(output)
        if self._steps is not None:
            assert self._files.stats is not None
            truncate_at(self._steps, finished_steps(self._steps, self._files.stats, self.done))

    def _check_steps(self, output: Path) -> None:
        """Raise UsageError for a --set stats file of another run, before a byte of any file is changed."""
        path, stream = self._files.stats, self._steps
        if stream is None or path is None or not stream.seek(0, io.SEEK_END):
            return
        if not finished_steps(stream, path, self.done) and (self.done.ids or not settings_file(output).exists()):
            raise UsageError(f"--set stats={path} holds no step of a row in {output}: name another file, or remove it")

    def _writer(self, path: Path | None, stream: io.FileIO | None) -> LineWriter:
        if stream is not None:
            assert path is not None
            writer = LineWriter(stream, str(path), owned=True, frame=frame_maker(path))
            return self._stack.enter_context(writer)
        if path is not None and path != STANDARD:
            return self._special[path]
        sys.stdout.flush()
        return LineWriter(sys.stdout.buffer, "standard output", owned=False)
