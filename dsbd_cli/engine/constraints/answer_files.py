"""Names and tables of allowed answers, which are checked before any model is loaded. No torch is imported here."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import orjson

from dsbd_cli.errors import UsageError, one_line, plural, shorten

FIELDS = ("text", "token_ids", "id", "catalogue")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
REFUSED = {".parquet": "is Parquet", ".gz": "is compressed", ".zst": "is compressed"}


def is_answer_table(path: Path) -> bool:
    """Return whether a file of answers is a table, by its name."""
    return path.suffix.lower() in DELIMITERS


def check_answer_file(path: Path) -> None:
    """Refuse a file that cannot hold answers, by its name or, of a table, by its header. Raises UsageError."""
    if (reason := REFUSED.get(path.suffix.lower())) is not None:
        raise UsageError(f"allow {path} {reason}, which is not read: give a .jsonl, .csv or .tsv file, or a plain list")
    if is_answer_table(path):
        next(table_answers(path), None)


def table_answers(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the first line of every row of a table, and its fields as a line of a .jsonl file would hold them. Columns
    that are no FIELDS are not read. Raises UsageError."""
    csv.field_size_limit(max(csv.field_size_limit(), 1 << 24))
    first, names = 1, list[str]()
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, delimiter=DELIMITERS[path.suffix.lower()], strict=True)
            for cells in reader:
                number, first = first, reader.line_num + 1
                if not names:
                    names = _header(path, cells)
                elif cells:
                    yield number, _fields(f"{path} line {number}", names, cells)
    except csv.Error as error:
        raise UsageError(f"{path} line {first}: not valid CSV: {one_line(error)}") from None
    except UnicodeDecodeError:
        raise UsageError(f"allow {path} is not UTF-8: save the file in UTF-8") from None
    except OSError as error:
        raise UsageError(f"allow {path} cannot be read: {error.strerror or error}") from None


def _header(path: Path, cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if "text" not in names and "token_ids" not in names:
        raise UsageError(
            f"allow {path} is a table, but no column is called text or token_ids; there are "
            f"{shorten(', '.join(names))}: rename the column of the answers, or name a plain list of them .txt"
        )
    if twice := [name for name in FIELDS if names.count(name) > 1]:
        raise UsageError(f"allow {path}: the column {twice[0]} stands twice in it: drop one")
    return names


def _fields(where: str, names: list[str], cells: list[str]) -> dict[str, object]:
    if len(cells) != len(names):
        raise UsageError(f"{where}: the row has {plural(len(cells), 'cell')}, but the header has {len(names)}")
    row = dict(zip(names, cells, strict=True))
    fields: dict[str, object] = {name: row[name] for name in FIELDS if row.get(name)}
    if "token_ids" in fields:
        try:
            fields["token_ids"] = orjson.loads(row["token_ids"])
        except orjson.JSONDecodeError:
            raise UsageError(f"{where}: token_ids is {shorten(row['token_ids'])}, but must be a list") from None
    return fields
