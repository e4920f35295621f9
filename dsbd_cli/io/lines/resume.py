"""Support for resuming: what an earlier run has left in an output file, however it ended.

The records themselves say which rows are done, by id, key (a hash of what the row asks for) and error. So an output
file may be cut, sorted or filtered between two runs. The settings of the run are in FILE.dsbd-run. That file is written
whole before the first record, and only replaced together with the output file.
"""

from __future__ import annotations

import io
import os
import stat
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import orjson

from dsbd_cli.errors import UsageError
from dsbd_cli.io.lines.jsonl import read_object
from dsbd_cli.io.lines.replace import replacing, write_atomically
from dsbd_cli.io.schemas.contracts import STEP

AGAIN = "name another file, or replace it with --existing overwrite"
SETTINGS_SCHEMA = "dsbd.run/1"
OPENAI_ID = "batch_req_"
STEP_SCHEMA = STEP.id.partition("/")[0]  # of any version
STEP_BEGIN = b'{"schema":"%b/' % STEP_SCHEMA.encode()
TAIL_BYTES = 1 << 20

Settings = dict[str, object]


@dataclass(frozen=True, slots=True)
class InputEnd:
    """Facts about an input that was read to its end: the number of its rows, and a digest of all its lines. Parts whose
    inputs differ anywhere do not belong together."""

    rows: int
    digest: str


Found = Literal["answered", "failed"]


@dataclass(slots=True)
class DoneRows:
    """The rows whose records an output file holds. 16-byte digests of ids and keys are kept, not the texts.

    An id is None where it could not be read, which only failed rows have.

    Attributes:
        answered, failed: records that no row of the input has asked for yet, by digest. ids: of all records.
    """

    answered: Counter[bytes] = field(default_factory=Counter)
    failed: Counter[bytes] = field(default_factory=Counter)
    ids: set[bytes] = field(default_factory=set)

    def add(self, row_id: str | None, key: str, *, failed: bool) -> None:
        """Count one record."""
        records = self.failed if failed else self.answered
        records[record_digest(row_id, key)] += 1
        if row_id is not None:
            self.ids.add(_digest(row_id))

    def take(self, row_id: str | None, key: str) -> Found | None:
        """Return which record an earlier run has written of a row of the input, an answer rather than an error; None if
        it has written none. Each record counts for one row."""
        if not self.answered and not self.failed:
            return None
        name = record_digest(row_id, key)
        if take_one(self.answered, name):
            return "answered"
        return "failed" if take_one(self.failed, name) else None

    def has_id(self, row_id: str) -> bool:
        """Return whether a record has this id."""
        return _digest(row_id) in self.ids


def take_one(counts: Counter[bytes], name: bytes) -> bool:
    """Take one from a count above 0, and return whether there was one."""
    left = counts.get(name, 0)
    if left == 1:
        del counts[name]
    elif left:
        counts[name] = left - 1
    return left > 0


def record_digest(row_id: str | None, key: str) -> bytes:
    """Return what a record is known by."""
    return _digest(row_id or "", key)  # no id is empty


def _digest(*parts: str) -> bytes:
    return blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


# The settings file


def settings_file(output: Path) -> Path:
    """Return out.jsonl.dsbd-run for out.jsonl."""
    return output.with_name(output.name + ".dsbd-run")


def write_settings(output: Path, settings: Settings, created: int, end: InputEnd | None = None) -> None:
    """Write the settings file whole or not at all. It is on the disk before the first record is.

    created: Unix time at which the run began. end: facts about the whole input, given once its end was reached.
    """
    content: Settings = {"schema": SETTINGS_SCHEMA, "created": created, "settings": settings}
    if end is not None:
        content |= {"rows": end.rows, "input_digest": end.digest}
    write_atomically(settings_file(output), orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")


def read_run(output: Path, wanted_by: str, help_: str = AGAIN) -> tuple[Settings, int, InputEnd | None]:
    """Return the settings of the run that wrote `output`, when it began, and the end of its input.

    The last is None if the end was not reached. wanted_by, help_: for messages. Raises UsageError if the settings file
    is missing or unreadable.
    """
    path = settings_file(output)
    try:
        run = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"{wanted_by}: {path} is missing, so nobody knows what {output} was made with: {help_}"
        ) from None
    except (OSError, ValueError):
        run = None
    if isinstance(run, dict) and run.get("schema") == SETTINGS_SCHEMA:
        settings, created = run.get("settings"), run.get("created")
        rows, digest = run.get("rows"), run.get("input_digest")
        if isinstance(settings, dict) and isinstance(created, int):
            ended = InputEnd(rows, digest) if isinstance(rows, int) and isinstance(digest, str) else None
            return settings, created, ended
    raise UsageError(f"{wanted_by}: {path} is not what dsbd wrote: {help_}")


# The output file


def whole_size(stream: io.FileIO) -> int:
    """Return the size of the file up to the end of its last whole line, in bytes.

    A line with zero bytes is torn too, because a crash of the machine leaves zeros where a block was not written.
    """
    for end, line in _lines_from_end(stream, stream.seek(0, os.SEEK_END)):
        if line.endswith(b"\n") and b"\0" not in line:
            return end
    return 0


def truncate_at(stream: io.FileIO, end: int) -> int:
    """Cut off the bytes after `end` and seek to it; return how many bytes were cut off."""
    size = stream.seek(0, os.SEEK_END)
    if end < size:
        stream.truncate(end)
    stream.seek(end)
    return size - end


def _lines_from_end(stream: io.FileIO, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines before `end`, the last one first, each with the offset of its end."""
    held, size, begin = b"", 0, end  # held[:size] are the bytes from `begin` to `end`
    while end:
        while (start := held.rfind(b"\n", 0, max(size - 1, 0)) + 1) == 0 and begin:
            more = min(begin, max(TAIL_BYTES, size), 1 << 30)  # one call reads less than 2 GiB
            begin -= more
            stream.seek(begin)
            held, size = stream.read(more) + held[:size], size + more
        yield end, held[start:size]
        end, size = end - size + start, start


def read_done(stream: io.FileIO, path: Path, end: int) -> DoneRows:
    """Return the rows in the first `end` bytes. Raises UsageError for a line that is no record with id and key."""
    done = DoneRows()
    for number, line in _lines(stream, end):
        row_id, key, failed = _id_key_failed(line, path, number)
        done.add(row_id, key, failed=failed)
    return done


def _lines(stream: io.FileIO, end: int) -> Iterator[tuple[int, bytes]]:
    stream.seek(0)
    with os.fdopen(os.dup(stream.fileno()), "rb", TAIL_BYTES) as reader:
        for number, line in enumerate(reader, start=1):
            end -= len(line)
            if end < 0:
                return
            yield number, line


def _id_key_failed(line: bytes, path: Path, number: int) -> tuple[str | None, str, bool]:
    """Return id and key of a native record or of a line of an OpenAI batch output, and whether its row failed. The id
    of a row that failed may be None.

    Raises UsageError for any other line.
    """
    if (record := read_object(line)) is not None:
        openai = "custom_id" in record
        row_id = record.get("custom_id" if openai else "id")
        key = record.get("id" if openai else "key")
        failed = record.get("error") is not None
        if isinstance(key, str) and (isinstance(row_id, str) or (row_id is None and failed)):
            return row_id, key.removeprefix(OPENAI_ID), failed
    raise UsageError(
        f"--existing resume: line {number} of {path} is no record of dsbd: take it out, or use --existing overwrite"
    )


def earlier_texts(path: Path, most: int) -> Iterator[list[str]]:
    """Yield the texts of the last `most` answers in an output file, in both forms of records, the best one first."""
    with path.open("rb") as stream:
        records = [read_object(line) or {} for line in deque(stream, most)]
    for record in records:
        response = record.get("response")
        body = response.get("body") if isinstance(response, dict) else record
        beams = body.get("beams", body.get("choices")) if isinstance(body, dict) else None
        found = [_text_of(beam) for beam in beams if isinstance(beam, dict)] if isinstance(beams, list) else []
        if texts := [text for text in found if isinstance(text, str) and text]:
            yield texts


def _text_of(beam: dict[str, object]) -> object:
    message = beam.get("message")
    return message.get("content") if isinstance(message, dict) else beam.get("text")


def drop_failed(stream: io.FileIO, path: Path, which: Counter[bytes] | None = None) -> tuple[io.FileIO, int]:
    """Replace a file by one without its failed records, in one step. The new file is locked before the old one is
    closed.

    which: how many of them go, by digest; None: all. Return the new stream and how many records were dropped. Nothing
    is written if none is.
    """
    end, left, bad = stream.seek(0, os.SEEK_END), Counter(which), set[int]()
    for number, line in _lines(stream, end):
        row_id, key, failed = _id_key_failed(line, path, number)
        if failed and (which is None or take_one(left, record_digest(row_id, key))):
            bad.add(number)
    if not bad:
        return stream, 0
    with replacing(path) as fresh:
        out = io.BufferedWriter(fresh, TAIL_BYTES)
        for number, line in _lines(stream, end):
            if number not in bad:
                out.write(line)
        out.detach()  # flushes
        os.fchmod(fresh.fileno(), stat.S_IMODE(path.stat().st_mode))
    stream.close()
    fresh.seek(0, os.SEEK_END)
    return fresh, len(bad)


def finished_steps(stream: io.FileIO, path: Path, done: DoneRows) -> int:
    """Return the size of a --set stats file up to the last line whose row has a record. What comes behind it will be
    written again. Raises UsageError where one of these lines is no step."""
    size, whole = stream.seek(0, os.SEEK_END), whole_size(stream)
    stream.seek(whole)
    torn = stream.read(min(size - whole, len(STEP_BEGIN)))
    ours = STEP_BEGIN.startswith(torn.partition(b"\0")[0])  # a crash of the machine leaves zeros
    for end, line in _lines_from_end(stream, whole) if ours else ():
        record = read_object(line) or {}
        row_id = record.get("id")
        if not isinstance(row_id, str) or not str(record.get("schema")).startswith(STEP_SCHEMA):
            ours = False
            break
        if done.has_id(row_id):
            return end
    if not ours:
        raise UsageError(f"--set stats={path} holds lines that are no steps of dsbd: name another file")
    return 0
