"""`dsbd generate`: lines in, one record per line out, in input order, each written as soon as it is done."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import typer

from dsbd_cli.cli.options import (
    DeviceOptions,
    FileOptions,
    MethodOptions,
    PairOptions,
    SamplingOptions,
    TalkOptions,
    grouped,
)
from dsbd_cli.cli.output import STANDARD, Reporter, open_writer
from dsbd_cli.cli.settings import RunSettings, run_settings
from dsbd_cli.data.jsonl import LineWriter, check_new, read_lines
from dsbd_cli.errors import UsageError
from dsbd_cli.records import FailedRow, MethodRecord, RowReader, checked, error_record, output_record, step_records
from dsbd_cli.requests import Request, RequestResult

if TYPE_CHECKING:
    from dsbd_cli.decoding.engine import Engine

__all__ = ["RowFlow", "generate"]

ROWS_FAILED = 3


@grouped
def generate(
    files: FileOptions,
    pair: PairOptions,
    method: MethodOptions,
    sampling: SamplingOptions,
    devices: DeviceOptions,
    talk: TalkOptions,
) -> None:
    """Answer prompts with speculative beam decoding: JSON lines in, one JSON line per input line out.

    A line is an object with prompt (or messages), an id if you like, and any of the sampling options for that row.
    """
    if talk.quiet and talk.verbose:
        raise UsageError("--quiet and --verbose cannot be used together: give one of them")
    settings = run_settings(pair, method, sampling, devices)
    with ExitStack() as stack:
        source = _open_input(files, stack)
        _check_outputs(files)
        engine = _load(settings, devices, log_steps=files.stats is not None)
        writer = stack.enter_context(open_writer(files.output, overwrite=files.overwrite))
        steps = _open_steps(files, stack)
        on_terminal = files.output in (None, STANDARD) and sys.stdout.isatty()
        reporter = Reporter(quiet=talk.quiet, verbose=talk.verbose, records_on_terminal=on_terminal)
        stack.callback(reporter.stop)
        record = MethodRecord(settings.method, settings.target, settings.draft)
        flow = RowFlow(settings.rows, record, writer, steps, reporter)
        reporter.begin(_describe(settings))
        try:
            flow.run(engine, source)
        except KeyboardInterrupt:
            reporter.summary(f"interrupted: {reporter.totals.line()}; what is written is complete")
            raise
        reporter.summary(reporter.totals.line())
    if reporter.totals.failed:
        raise typer.Exit(ROWS_FAILED)


class RowFlow:
    """Keeps rows in input order: requests go to the engine as it asks for them, failed rows wait for their turn."""

    def __init__(
        self,
        rows: RowReader,
        method: MethodRecord,
        writer: LineWriter,
        steps: LineWriter | None,
        reporter: Reporter,
    ) -> None:
        self._rows, self._method = rows, method
        self._writer, self._steps, self._reporter = writer, steps, reporter
        self._pending: deque[tuple[int, int, Request | FailedRow]] = deque()

    def run(self, engine: Engine, source: BinaryIO) -> None:
        """Answer every line of the source. What was written stays, whatever ends this early."""
        for result in engine.run(self._requests(source)):
            index, number, request = self._pending.popleft()
            assert request is result.request, "the engine answers in input order"
            self._write(index, number, checked(result))
            self._write_failed()
        self._write_failed()
        assert not self._pending, "the engine answers every request"

    def _requests(self, source: BinaryIO) -> Iterator[Request]:
        for index, (number, line) in enumerate(read_lines(source)):
            row = self._rows.read(line, index=index, number=number)
            self._pending.append((index, number, row))
            if isinstance(row, Request):
                yield row
            else:
                self._write_failed()

    def _write_failed(self) -> None:
        """Failed rows at the front need not wait for anybody."""
        while self._pending and isinstance(row := self._pending[0][2], FailedRow):
            index, _, _ = self._pending.popleft()
            self._writer.write(error_record(index, row.id, row.error))
            self._reporter.row(error=f"row {index} (id {row.id}): {row.error}")

    def _write(self, index: int, number: int, result: RequestResult) -> None:
        row_id, told = result.request.id, None
        if result.error is not None:
            error = type(result.error)(f"line {number}: {result.error}")
            told = f"row {index} (id {row_id}): {error}"
            self._writer.write(error_record(index, row_id, error))
        else:
            self._writer.write(output_record(index, result, self._method))
        if self._steps is not None:
            for line in step_records(result.stats.step_log):
                self._steps.write(line)
        self._reporter.totals.add(result)
        self._reporter.row(error=told)


def _open_input(files: FileOptions, stack: ExitStack) -> BinaryIO:
    if files.input is not None and files.input != STANDARD:
        try:
            return stack.enter_context(files.input.open("rb"))
        except OSError as error:
            raise UsageError(f"--input {files.input} cannot be read: {error.strerror}") from None
    if sys.stdin is None:
        raise UsageError("standard input is closed: name a file with --input")
    if files.input is None and sys.stdin.isatty():
        raise UsageError("no input: use dsbd generate < prompts.jsonl, or --input FILE (--input - reads the terminal)")
    return sys.stdin.buffer


def _check_outputs(files: FileOptions) -> None:
    named = [
        (option, path)
        for option, path in (("--output", files.output), ("--stats", files.stats))
        if path is not None and path != STANDARD
    ]
    if files.stats == STANDARD:
        raise UsageError("--stats needs a file: on standard output its lines would mix with the records")
    if files.overwrite and not named:
        raise UsageError("--overwrite replaces the --output and --stats files, but neither is given: drop it")
    for option, path in named:
        if files.input is not None and _same(path, files.input):
            raise UsageError(f"{option} {path} is the input: name another file")
        check_new(path, option=option, overwrite=files.overwrite)
    if len(named) == 2 and _same(named[0][1], named[1][1]):
        raise UsageError(f"--output and --stats are both {named[0][1]}: name two files")


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve() and not (one.exists() and not one.is_file())


def _open_steps(files: FileOptions, stack: ExitStack) -> LineWriter | None:
    if files.stats is None:
        return None
    return stack.enter_context(LineWriter.create(files.stats, overwrite=files.overwrite))


def _load(settings: RunSettings, devices: DeviceOptions, *, log_steps: bool) -> Engine:
    """Where torch is imported."""
    from dsbd_cli.decoding import load as loading

    return loading.load(
        settings.target,
        settings.draft,
        method=settings.method,
        batch_size=settings.batch_size,
        log_steps=log_steps,
        dtype=devices.dtype or "auto",
        device=devices.device or "auto",
        device_map=devices.device_map,
        draft_device=devices.draft_device,
        trust_remote_code=devices.trust_remote_code,
        allow_pickle=devices.allow_pickle,
    )


def _describe(settings: RunSettings) -> str:
    method = settings.method
    drafts = f"{method.depth} layers of {method.drafts_per_layer} drafts" if method.depth else "no draft"
    models = f"target {settings.target}" + (f", draft {settings.draft}" if settings.draft else "")
    return (
        f"{models}; rule {method.rule}, {method.num_beams} beams, {drafts}, width {method.width} ({method.exactness})"
    )
