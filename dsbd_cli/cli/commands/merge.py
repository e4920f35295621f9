"""`dsbd merge`: the parts that `dsbd generate --shard` has written, merged into the file that a single run writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from dsbd_cli.cli.options.declare import Existing, Output, Quiet
from dsbd_cli.cli.options.settings import TYPED
from dsbd_cli.cli.run.files import NO_KEY, SETTINGS_FILE, check_no_input, check_replaced
from dsbd_cli.cli.run.messages import say, set_style, warn
from dsbd_cli.cli.run.shard import SHARD_SETTINGS, shard_of
from dsbd_cli.cli.run.summary import ROWS_FAILED
from dsbd_cli.errors import DsbdError, UsageError, plural
from dsbd_cli.io.lines.compression import frame_maker
from dsbd_cli.io.lines.jsonl import LineWriter
from dsbd_cli.io.lines.lock import open_locked, open_shared
from dsbd_cli.io.lines.parts import PartFile, in_order, one_after_another, scan
from dsbd_cli.io.lines.replace import replacing
from dsbd_cli.io.lines.resume import Settings, read_run, settings_file, write_settings
from dsbd_cli.io.lines.tables import is_table
from dsbd_cli.io.records.record_parts import fingerprint_difference

SHOWN = 5  # parts that are named in a message, at most
BESIDE = "give parts, with the file beside each of them"

Parts = Annotated[
    list[Path], typer.Argument(help="part files, such as out.jsonl.*-of-16", metavar="PART", show_default=False)
]
Partial = Annotated[
    bool, typer.Option("--partial", help="write what there is, though rows or whole parts are missing", metavar="")
]


def merge(
    parts: Parts, output: Output, existing: Existing = "error", partial: Partial = False, quiet: Quiet = False
) -> None:
    """Put the parts of dsbd generate --shard together: the records of all rows, in the order of the input.

    Nothing is written unless all parts are there, come from one input and the same settings, and hold every row once.

    OpenAI lines have no row number, so the parts are written one after the other.

    Exit code 3 where a row has failed or, with --partial, is missing.
    """
    set_style(quiet=quiet)
    check_replaced(output, existing=existing)
    if any(path.resolve() == output.resolve() for path in parts):
        raise UsageError(f"--output {output} is a part: name another file")
    check_no_input("--output", output, map(settings_file, parts))
    check_no_input(SETTINGS_FILE, settings_file(output), parts)
    with ExitStack() as stack:
        if output.exists():  # a run that is writing it would go on in a file without a name
            stack.enter_context(open_locked(output, create_only=False))
        part_files, settings, created = _parts(parts, stack, partial=partial)
        indexed = settings.get("output_format") != "openai"
        # if no part has come to its end, the input has at most as many rows as bytes, unless it is compressed
        size = None if settings.get("input_compressed") else int(str(settings["input_bytes"]))
        most = max([part.rows for part in part_files if part.rows is not None], default=size)
        for part in part_files:
            scan(part, indexed=indexed, most=most)
        missing = _missing_rows(part_files, indexed=indexed, partial=partial)
        common: Settings = {name: value for name, value in settings.items() if name not in SHARD_SETTINGS}
        _write(output, in_order(part_files) if indexed else one_after_another(part_files), common, created)
    records, failed = sum(part.records for part in part_files), sum(part.failed for part in part_files)
    of = f"{plural(records, 'record')} of {plural(len(part_files), 'part')}"
    say(f"{output}: {of}" + (f", {failed} failed" if failed else ""))
    if failed or missing:
        raise typer.Exit(ROWS_FAILED)


def _write(output: Path, lines: Iterable[bytes], settings: Settings, created: int) -> None:
    """Write the whole file and its settings, or leave the old file.

    A merge that is killed between the two leaves a file without settings, never one with the settings of another file,
    so that no run can resume it.
    """
    with replacing(output) as stream:
        left = "nothing is changed"
        with LineWriter(stream, str(output), owned=False, frame=frame_maker(output), left=left) as writer:
            for line in lines:
                writer.write(line.removesuffix(b"\n"))
        settings_file(output).unlink(missing_ok=True)
    stream.close()
    write_settings(output, settings, created)


def _parts(paths: Sequence[Path], stack: ExitStack, *, partial: bool) -> tuple[list[PartFile], Settings, int]:
    """Open the parts, so that nobody writes them meanwhile, and return them with their settings and the time they
    began.

    stack: closes them. The settings and the time (Unix) are those of the first part; all parts must have the same
    settings. Raises UsageError if they do not belong together, OutputError if a part is being written.
    """
    part_files: dict[int, PartFile] = {}
    first: tuple[Path, Settings, int] | None = None
    first_ended: tuple[Path, str] | None = None  # first part that has come to the end of its input, with a digest of it
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path} is no file")
        if is_table(path):
            raise UsageError(f"merge takes parts of native or openai lines, but {path} is a table{NO_KEY}")
        stream = _opened(path, stack)
        settings, created, end = read_run(path, "merge", BESIDE)
        if "shard" not in settings:
            raise UsageError(f"{path} is no part: it was written without --shard")
        try:
            shard = shard_of(str(settings["shard"]), {})
            int(str(settings["input_bytes"]))
        except (UsageError, LookupError, ValueError):
            raise UsageError(f"merge: {settings_file(path)} is not what dsbd wrote: {BESIDE}") from None
        if shard.part in part_files:
            raise UsageError(f"{part_files[shard.part].path} and {path} are both part {shard.part} of {shard.count}")
        if first is not None and (difference := _difference(first[1], settings)):
            raise UsageError(f"{first[0]} and {path} do not belong together: {difference}")
        first = first or (path, settings, created)
        part_files[shard.part] = PartFile(path, stream, shard.part, shard.count, None if end is None else end.rows)
        if end is not None:
            first_ended = first_ended or (path, end.digest)
            if end.digest != first_ended[1]:
                raise UsageError(
                    f"{first_ended[0]} and {path} do not belong together: the input was changed between them"
                )
        elif not partial:
            raise UsageError(f"{path} has not come to its end: go on with that part first, or take --partial")
    assert first is not None
    count = next(iter(part_files.values())).count
    if missing := [part for part in range(count) if part not in part_files]:
        shown = ", ".join(map(str, missing[:SHOWN])) + (", ..." if len(missing) > SHOWN else "")
        message = f"{shown} of {count} {'is' if len(missing) == 1 else 'are'} missing"
        if not partial:
            raise UsageError(f"part {message}: give all parts, or take --partial")
        warn(f"part {message}")
    return list(part_files.values()), first[1], first[2]


def _opened(path: Path, stack: ExitStack) -> BinaryIO:
    try:
        return stack.enter_context(open_shared(path))
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror} (ulimit -n bounds how many files are open)"
        raise UsageError(message) from None


def _difference(old: Settings, new: Settings) -> str | None:
    """Describe how the settings of two parts differ, as for a resumed run; None if they do not.

    The number of parts and the input count, too.
    """
    names = {**TYPED, "shard": "N of --shard", "input_bytes": "the input's size", "input_head": "the input's beginning"}
    before, now = ({**settings, "shard": str(settings["shard"]).partition("/")[2]} for settings in (old, new))
    return fingerprint_difference(before, now, names)


def _missing_rows(parts: Sequence[PartFile], *, indexed: bool, partial: bool) -> int:
    """Return how many rows of the input have no record, plus one if nobody knows how many rows there are.

    Raises DsbdError unless `partial`.
    """
    rows = max((part.rows for part in parts if part.rows is not None), default=None)
    unknown = rows is None
    if rows is None:
        warn("no part has come to its end, so nobody knows how many rows the input has")
        rows = max((part.indices[-1] + 1 for part in parts if part.indices), default=0)
    missing = unknown + rows - sum(part.wanted(rows) for part in parts)  # rows of the parts that were not given
    if unknown and not indexed:
        return missing
    for part in parts:
        wanted = part.wanted(rows if part.rows is None else part.rows)
        lacks = wanted - part.records
        if lacks < 0:
            raise DsbdError(f"{part.path} holds {-lacks} records more than its rows: was the input changed?")
        missing += lacks
        if lacks:
            first = f", the first one row {part.first_absent()}" if indexed else ""
            message = f"{part.path} lacks {lacks} of its {wanted} rows{first}"
            if not partial:
                raise DsbdError(f"{message}: go on with that part first, or take --partial")
            warn(message)
    return missing
