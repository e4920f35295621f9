"""Part files of one input, put together in the order of its rows. Two passes; 8 bytes are kept per row."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import orjson

from dsbd_cli.errors import DsbdError, UsageError

__all__ = ["Part", "in_order", "one_after_another", "scan"]

ABSENT = (1 << 64) - 1
SHOWN = 5


@dataclass(slots=True)
class Part:
    """One part file: rows `part`, `part + count`, `part + 2 count`, ... of the input.

    Attributes:
        rows: of the whole input; None where the part's run has not come to its end.
        offsets: where the records of its rows begin. failed: records with an error. records: all there are.
    """

    path: Path
    part: int
    count: int
    rows: int | None
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    records: int = 0
    failed: int = 0

    def wanted(self, rows: int) -> int:
        """How many of so many rows of the input belong to this part."""
        return max(0, -(-(rows - self.part) // self.count))

    def first_absent(self) -> int:
        """The first row of the part that has no record."""
        place = next((place for place, offset in enumerate(self.offsets) if offset == ABSENT), len(self.offsets))
        return self.part + place * self.count


def scan(part: Part, *, indexed: bool, most: int) -> None:
    """Read a part through. indexed: its records say which row they are. most: rows that the input has at the most.

    Raises DsbdError for what is no record of its rows, or stands twice.
    """
    position = 0
    with part.path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                raise DsbdError(f"{part.path}: line {number}, the last one, is torn: go on with that part first")
            record = _record(line, part.path, number)
            part.records += 1
            part.failed += record.get("error") is not None
            if indexed:
                _note(part, record.get("index"), number, position, most)
            position += len(line)


def _record(line: bytes, path: Path, number: int) -> dict[str, object]:
    with contextlib.suppress(orjson.JSONDecodeError):
        record = orjson.loads(line)
        if isinstance(record, dict):
            return record
    raise DsbdError(f"{path}: line {number} is no record of dsbd")


def _note(part: Part, index: object, number: int, position: int, most: int) -> None:
    if type(index) is not int or index < 0:
        raise DsbdError(f"{part.path}: line {number} is no record of dsbd: it has no index")
    place, other = divmod(index, part.count)
    if other != part.part:
        raise DsbdError(f"{part.path}: line {number} is row {index}, which belongs to part {other} of {part.count}")
    if index >= most:
        had = f"{most} rows" + ("" if part.rows is not None else " at the most")
        raise DsbdError(f"{part.path}: line {number} is row {index}, but the input had {had}")
    while len(part.offsets) <= place:
        part.offsets.append(ABSENT)
    if part.offsets[place] != ABSENT:
        raise DsbdError(f"{part.path}: line {number} is row {index}, which stands there twice")
    part.offsets[place] = position


def in_order(parts: Sequence[Part], stack: ExitStack) -> Iterator[tuple[int, bytes | None]]:
    """The index of every row and its record with its line end, in the order of the input; None for a row that has none.
    stack: closes the parts. Raises UsageError where they cannot all be open."""
    by_part = {part.part: part for part in parts}
    streams = {part.part: _opened(part.path, stack) for part in parts}
    at = dict.fromkeys(streams, 0)
    count = parts[0].count
    total = max(part.rows or 0 for part in parts)
    total = max([total, *(part.part + (len(part.offsets) - 1) * count + 1 for part in parts if part.offsets)])
    for index in range(total):
        place, number = divmod(index, count)
        part = by_part.get(number)
        offset = part.offsets[place] if part is not None and place < len(part.offsets) else ABSENT
        if offset == ABSENT:
            yield index, None
            continue
        stream = streams[number]
        if at[number] != offset:
            stream.seek(offset)
        line = stream.readline()
        at[number] = offset + len(line)
        yield index, line


def one_after_another(parts: Sequence[Part]) -> Iterator[bytes]:
    """The records of all parts, part by part."""
    for part in sorted(parts, key=lambda one: one.part):
        with part.path.open("rb") as stream:
            yield from stream


def _opened(path: Path, stack: ExitStack) -> BinaryIO:
    try:
        return stack.enter_context(path.open("rb"))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror} (ulimit -n bounds how many files are open)"
        ) from None
