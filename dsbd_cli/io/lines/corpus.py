"""Texts of a corpus: plain files, or one field of every line of a JSON Lines file; .gz and .zst are unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson

from dsbd_cli.errors import UsageError, reading
from dsbd_cli.io.lines.compression import ending, open_input
from dsbd_cli.io.lines.jsonl import BOM

PIECE_CHARACTERS = 1 << 18


def read_documents(path: Path, field: str) -> Iterator[Iterator[str]]:
    """Yield the documents of a file, each as pieces of text: the whole of a plain file, or `field` of each JSON line.

    The pieces of a plain file end with a line. Raises UsageError, naming the line and the field.
    """
    if ending(path) in (".jsonl", ".ndjson"):
        for number, line in _lines(path):
            if line.strip():
                yield iter((_text(line, f"{path}, line {number}", field),))
    else:
        yield _pieces(path)


def _pieces(path: Path) -> Iterator[str]:
    piece: list[str] = []
    size = 0
    for _, line in _lines(path):
        piece.append(line)
        size += len(line)
        if size >= PIECE_CHARACTERS:
            yield "".join(piece)
            piece, size = [], 0
    yield "".join(piece)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines with their line ends, numbered from 1. Raises UsageError."""
    with reading(str(path)), open_input(path) as stream:
        for number, line in enumerate(stream, 1):
            text = line.removeprefix(BOM) if number == 1 else line
            try:
                yield number, text.decode()
            except UnicodeDecodeError:
                raise UsageError(f"{path}, line {number} is not UTF-8") from None


def _text(line: str, where: str, field: str) -> str:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON: {error}") from None
    value = record.get(field) if isinstance(record, dict) else None
    if not isinstance(value, str):
        raise UsageError(f"{where} has no text in its field {field!r}: --field names another one")
    return value
