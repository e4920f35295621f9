"""Merging of the part files of one input, in the order of its rows. It takes two passes and keeps 16 bytes per row."""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from dsbd_cli.errors import DsbdError
from dsbd_cli.io.lines.jsonl import read_object


@dataclass(slots=True)
class PartFile:
    """One part file: rows `part`, `part + count`, `part + 2 count`, ... of the input.

    Attributes:
        stream: its file, open for as long as the part is read.
        rows: number of rows of the whole input; None if the part's run has not come to its end.
        indices: row indices of its records, ascending. offsets: byte at which each of these records begins.
        failed: number of records with an error. records: number of all records.
    """

    path: Path
    stream: BinaryIO
    part: int
    count: int
    rows: int | None
    indices: array[int] = field(default_factory=lambda: array("Q"))
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    records: int = 0
    failed: int = 0

    def wanted(self, rows: int) -> int:
        """Return how many of the input's `rows` rows belong to this part."""
        return len(range(self.part, rows, self.count))

    def first_absent(self) -> int:
        """Return the first row of the part that has no record."""
        pairs = itertools.zip_longest(itertools.count(self.part, self.count), self.indices)
        return next(wanted for wanted, index in pairs if wanted != index)


def scan(part: PartFile, *, indexed: bool, most: int | None) -> None:
    """Read a part to its end, count its records, and note the index and the offset of each, in order of the indices.

    indexed: its records hold the index of their row; without it no indices are noted. most: most rows that the input
    can have; None if that is unknown. Raises DsbdError for a line that is no record of this part's rows, and for a row
    that is there twice.
    """
    position = 0
    part.stream.seek(0)
    for number, line in enumerate(part.stream, start=1):
        if not line.endswith(b"\n"):
            raise DsbdError(f"{part.path}: line {number}, the last one, is torn: go on with that part first")
        record = read_object(line)
        if record is None:
            raise DsbdError(f"{part.path}: line {number} is no record of dsbd")
        part.records += 1
        part.failed += record.get("error") is not None
        if indexed:
            part.indices.append(_index(part, record.get("index"), number, most))
            part.offsets.append(position)
        position += len(line)
    _sort(part)


def _index(part: PartFile, index: object, number: int, most: int | None) -> int:
    if type(index) is not int or index < 0:
        raise DsbdError(f"{part.path}: line {number} is no record of dsbd: it has no index")
    other = index % part.count
    if other != part.part:
        raise DsbdError(f"{part.path}: line {number} is row {index}, which belongs to part {other} of {part.count}")
    if most is not None and index >= most:
        had = f"{most} rows" + ("" if part.rows is not None else " at the most")
        raise DsbdError(f"{part.path}: line {number} is row {index}, but the input had {had}")
    return index


def _sort(part: PartFile) -> None:
    import numpy as np  # only here, so that other commands do not wait for it

    order = np.asarray(part.indices).argsort(kind="stable")
    indices, offsets = (np.asarray(column)[order] for column in (part.indices, part.offsets))
    if len(twice := np.flatnonzero(indices[1:] == indices[:-1])):
        number, index = order[twice[0] + 1] + 1, indices[twice[0]]
        raise DsbdError(f"{part.path}: line {number} is row {index}, which stands there twice")
    part.indices, part.offsets = array("Q", indices.tobytes()), array("Q", offsets.tobytes())


def in_order(parts: Sequence[PartFile]) -> Iterator[bytes]:
    """Iterate over the records with their line ends, in the order of the input."""
    return (line for _, line in heapq.merge(*[_numbered(part) for part in parts], key=itemgetter(0)))


def _numbered(part: PartFile) -> Iterator[tuple[int, bytes]]:
    """Yield the index of every record of a part, and the record."""
    part.stream.seek(0)
    at = 0
    for index, offset in zip(part.indices, part.offsets, strict=True):
        if at != offset:
            part.stream.seek(offset)
        line = part.stream.readline()
        at = offset + len(line)
        yield index, line


def one_after_another(parts: Sequence[PartFile]) -> Iterator[bytes]:
    """Yield the records of all parts, part by part."""
    for part in sorted(parts, key=lambda part: part.part):
        part.stream.seek(0)
        yield from part.stream
