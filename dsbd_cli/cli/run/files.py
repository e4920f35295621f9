"""Checks of the files that a command names, and its input. Both come before any model is loaded or anything is
measured."""

from __future__ import annotations

import hashlib
import itertools
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from dsbd_cli.cli.options.options import STANDARD, FileOptions
from dsbd_cli.cli.run.messages import quote_command
from dsbd_cli.config.variant import Format
from dsbd_cli.config.variants import FORMATS
from dsbd_cli.errors import UsageError, is_utf8, reading, require_package, shorten
from dsbd_cli.io.lines.compression import check_whole, compression, open_input
from dsbd_cli.io.lines.encoding import check_text_file
from dsbd_cli.io.lines.jsonl import BOM, check_new, read_lines
from dsbd_cli.io.lines.replace import check_replaceable
from dsbd_cli.io.lines.resume import settings_file
from dsbd_cli.io.lines.tables import Header, check_table, count_table_rows, is_table, table_header
from dsbd_cli.io.records.cells import BY_NAME, SETTING, ColumnRules, column_rules
from dsbd_cli.io.records.parse import ARRAY_HINT

MAX_COUNTED_BYTES = 256 << 20
SETTINGS_FILE = "the settings file of --output"
NO_KEY = ", whose lines do not say what was asked: native and openai lines have a key that does"


def is_special(path: Path) -> bool:
    """Return whether a path is a device or a named pipe. It may be written to, and holds nothing that could be lost.

    A path that may not be looked at is none: whoever opens it says why.
    """
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def output_format(files: FileOptions) -> Format:
    """Return the output format. Raises UsageError for one that does not exist."""
    name = "native" if files.output_format is None else files.output_format
    if name not in FORMATS:
        raise UsageError(f"--output-format is {shorten(name)}, but must be one of {', '.join(FORMATS)}")
    return FORMATS[name]


def resumes(files: FileOptions) -> bool:
    """Return whether this run resumes an earlier one."""
    return files.existing in ("resume", "retry")


def _why_not_resumed(files: FileOptions) -> str | None:
    """Return why no run can go on with these files, to stand behind an option's name; None where one can."""
    if files.output is None or files.output == STANDARD:
        return " needs the file to go on with: name it with --output"
    if is_special(files.output):
        return f": {files.output} is no ordinary file, so nothing can be read back from it"
    for path in (files.output, files.stats):
        if path is not None and compression(path):
            return f" cannot go on with {path}, which is compressed: write plain lines"
    if not output_format(files).resumable:
        return f" cannot go on with --output-format {files.output_format}{NO_KEY}"
    return None


def how_to_resume(files: FileOptions, arguments: Sequence[str], formats: str) -> str:
    """Return the command that resumes the run with these arguments, or say why it cannot be resumed.

    formats: those of the command's output that can be resumed, for the message.
    """
    if _why_not_resumed(files) is not None:
        return f"what is written is complete, but only a plain {formats} --output FILE can be resumed"
    again = " with the same input" if files.input in (None, STANDARD) else ""
    kept = [
        word
        for before, word in zip(("", *arguments), arguments, strict=False)
        if not word.startswith("--existing=") and "--existing" not in (word, before)
    ]
    command = quote_command(shlex.join(["dsbd", *kept, "--existing", "resume"]))
    return f"what is written is complete; go on{again} with: {command}"


def check_files(files: FileOptions, read: Iterable[str | Path | None]) -> None:
    """Refuse names and switches that cannot work together. read: what the run reads beside --input, files or not.
    Raises UsageError."""
    output_format(files).load()
    _check_parquet(files)
    input_columns(files)
    check_files_under(files.files_under, "every line is a prompt" if files.input_format == "text" else None)
    named = [
        (option, path)
        for option, path in (("--output", files.output), ("--set stats", files.stats), ("--set summary", files.summary))
        if path is not None and path != STANDARD
    ]
    for option, path in (("--set stats", files.stats), ("--set summary", files.summary)):
        if path == STANDARD:
            raise UsageError(f"{option} needs a file: on standard output its lines would mix with the records")
    if files.summary is not None:
        _check_plain("--set summary", files.summary)
    if files.existing == "overwrite" and not named:
        raise UsageError(
            "--existing overwrite replaces --output, --set stats and --set summary, but none is given: drop it"
        )
    why_not = _why_not_resumed(files)
    if resumes(files) and why_not is not None:
        raise UsageError(f"--existing {files.existing}{why_not}")
    inputs = [Path(name) for name in read if name is not None and os.path.isfile(name)]
    if files.input is not None:
        inputs.append(files.input)
    for option, path in named:
        check_no_input(option, path, inputs)
        resumable = option == "--output" and why_not is None
        instead = "name another file" + (", go on with it with --existing resume" if resumable else "")
        check_new(path, option=option, overwrite=files.existing not in (None, "error"), instead=instead)
    if why_not is None and files.output is not None:
        settings = settings_file(files.output)
        check_no_input(SETTINGS_FILE, settings, inputs)
        named.append((SETTINGS_FILE, settings))
        if not resumes(files):  # a resumed run may only append
            check_replaceable(files.output)
            check_replaceable(settings)
    _check_apart(named)


def _check_parquet(files: FileOptions) -> None:
    """Refuse a Parquet output that is no ordinary file. Raises UsageError."""
    if not output_format(files).parquet:
        return
    output = f"--output-format {files.output_format}"
    if files.output is None or files.output == STANDARD or is_special(files.output):
        raise UsageError(f"{output} needs an ordinary file, which a pipe is not: name it with --output")
    if compression(files.output):
        raise UsageError(f"{output} is compressed inside: name --output without {files.output.suffix}")
    require_package(output, "pyarrow", "parquet")


def _check_apart(named: Sequence[tuple[str, Path]]) -> None:
    for (option, path), (other, taken) in itertools.combinations(named, 2):
        if _same(path, taken):
            raise UsageError(f"{option} and {other} are both {path}: name two files")


def _same(path: Path, other: Path) -> bool:
    """Return whether two names are one file, links of any kind included."""
    if os.path.isfile(path) and os.path.isfile(other):  # False where it may not be looked at
        return path.samefile(other)
    return path.resolve() == other.resolve() and not os.path.exists(path)


def check_no_input(option: str, output: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that is one of the inputs. Raises UsageError."""
    if any(_same(output, path) for path in inputs):
        raise UsageError(f"{option} {output} is the input: name another file")


def check_files_under(folder: Path | None, idle: str | None = None) -> None:
    """Raise UsageError if --files-under is no folder, or would do nothing. idle: why it would do nothing."""
    if folder is not None and idle is not None:
        raise UsageError(f"--files-under {folder} would do nothing, because {idle}: drop it")
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--files-under is {folder}, which is no folder")


def file_hash(option: str, path: Path) -> str:
    """Return a hash of a file's bytes as 32 hexadecimal digits. Raises UsageError."""
    with reading(f"{option} {path}"), path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def text_hash(text: str) -> str:
    """Return a hash of a file's text as 32 hexadecimal digits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def lacks_input(files: FileOptions) -> bool:
    """Return whether no input is named and standard input is a terminal, which nobody asked to read."""
    return files.input is None and sys.stdin is not None and sys.stdin.isatty()


def open_input_lines(
    files: FileOptions, stack: ExitStack, usage: str = "dsbd generate < prompts.jsonl"
) -> tuple[BinaryIO, str, int | None]:
    """Open the input. Return the stream, its name, and its size in bytes if that is known. Raises UsageError.

    usage: for the message where no input is given.

    A compressed file is read through first, so that a file that is cut off is reported before a model is loaded.
    """
    path = files.input
    if path is not None and path != STANDARD:
        with reading(f"--input {path}"):
            plain = compression(path) is None
            if files.input_format != "text":
                check_rows_file(path, input_columns(files))
            elif path.is_file():
                check_text_file(path)
            size = path.stat().st_size if path.is_file() and plain else None
            if path.is_file() and not plain:
                check_whole(path)
            return stack.enter_context(open_input(path)), str(path), size
    if sys.stdin is None:
        raise UsageError("standard input is closed: name a file with --input")
    if lacks_input(files):
        raise UsageError(f"no input: use {usage}, or --input FILE (--input - reads the terminal)")
    return sys.stdin.buffer, "standard input", None


def check_rows_file(path: Path, rules: ColumnRules = BY_NAME) -> None:
    """Refuse a table whose columns cannot be used, and a file that holds a JSON array. Raises UsageError, OSError."""
    if is_table(path):
        check_table(path, rules)
    elif path.is_file():
        begin = check_text_file(path)
        if begin.removeprefix(BOM).lstrip()[:1] == b"[":
            raise UsageError(f"{path} holds a JSON array, but rows are lines with an object each: {ARRAY_HINT}")


def reads_table(files: FileOptions) -> Path | None:
    """Return the input if it is a table, else None."""
    if files.input is None or files.input == STANDARD or files.input_format == "text":
        return None
    return files.input if is_table(files.input) else None


def input_columns(files: FileOptions) -> ColumnRules:
    """Return which columns of the input, if it is a table, are fields. Raises UsageError."""
    check_columns(files.columns, reads_table(files))
    return column_rules(files.columns, strict=files.input_format == "strict")


def check_columns(columns: str | None, table: Path | None) -> None:
    """Raise UsageError for a --set columns that would do nothing."""
    if columns is not None and (table is None or not is_table(table)):
        raise UsageError(
            f"{SETTING}={columns} would do nothing, because the input is no table, a file that ends in .csv, .tsv or "
            ".parquet: drop it"
        )


def input_header(files: FileOptions) -> Header | None:
    """Return the columns of an input table that is an ordinary file; None for any other input. Raises UsageError."""
    table = reads_table(files)
    if table is None or not table.is_file():
        return None
    with reading(f"--input {table}"):
        return table_header(table, input_columns(files))


def unlike_name(files: FileOptions) -> str | None:
    """Return a warning about an output that has the name of a table and is none, else None."""
    if files.output is None or not is_table(files.output) or output_format(files).columns:
        return None
    return (
        f"{files.output} gets lines of {files.output_format or 'native'}: --output-format csv or parquet writes a table"
    )


def count_rows(files: FileOptions, size: int | None) -> int | None:
    """Count the rows of the input in a pass of its own. Return None for a file that is too large, or no plain file.

    size: as `open_input_lines` returns it. Raises UsageError.
    """
    if files.input is None or size is None or size > MAX_COUNTED_BYTES:
        return None
    with reading(f"--input {files.input}"):
        if (table := reads_table(files)) is not None:
            return count_table_rows(table)
        with files.input.open("rb") as stream:
            return sum(1 for _ in read_lines(stream))


def check_replaced(output: Path, *, existing: str) -> None:
    """Refuse an --output that cannot be replaced in one step. Raises UsageError."""
    check_new(output, option="--output", overwrite=existing == "overwrite")
    if is_special(output):
        raise UsageError(f"--output {output} is no ordinary file, which cannot be replaced in one step: name a file")


def check_report_files(
    files: Mapping[str, Path | None], inputs: Sequence[str | Path | None], *, existing: str | None
) -> None:
    """Check all that can be known about output files, by option, before anything is measured. Raises UsageError, and
    OutputError for one that cannot be written.

    inputs: files that the run reads, which it must not replace.
    """
    read = [Path(name) for name in inputs if name is not None]
    named = [(name, path) for name, path in files.items() if path is not None]
    if existing == "overwrite" and not named:
        raise UsageError(f"--existing overwrite replaces {', '.join(files)}, but none is given: drop it")
    for name, path in named:
        check_new(path, option=name, overwrite=existing == "overwrite")
        check_no_input(name, path, read)
        _check_plain(name, path)
    _check_apart(named)
    for _, path in named:
        check_replaceable(path)
    if (plot := files.get("--plot")) is not None:
        from dsbd_cli.lab.reports.bench_plot import require_plots

        require_plots("--plot", plot)


def _check_plain(option: str, path: Path) -> None:
    """Refuse the name of a compressed file for a report, which is none. Raises UsageError."""
    if compression(path):
        raise UsageError(f"{option} {path} is not compressed: name it without {path.suffix}")


def check_model_folder(output: Path) -> None:
    """Refuse a name that no --draft could give, and no library could read. Raises UsageError."""
    if not is_utf8(str(output)):
        raise UsageError(f"--output is {str(output)!r}, which is not UTF-8")
