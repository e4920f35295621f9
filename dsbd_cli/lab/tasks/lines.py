"""Prompts from JSON lines: MT-Bench's question.jsonl (Zheng et al. 2023), and the user's own file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from dsbd_cli.errors import InvalidRowError, UsageError, reading, shorten
from dsbd_cli.io.lines.compression import open_input
from dsbd_cli.io.lines.tables import check_table, is_table, lines_reader
from dsbd_cli.io.records.file_roots import FILE_FIELDS, file_of_row, files_root
from dsbd_cli.io.records.parse import parse_object
from dsbd_cli.io.records.row import LongLine
from dsbd_cli.lab.tasks.dataset import Dataset
from dsbd_cli.lab.tasks.ranking import DEFAULT_METRICS, ranked_scores, read_metrics
from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.lab.tasks.task_files import read_text

KNOWN = {"id", "prompt", "messages", *FILE_FIELDS, "reference", "relevant"}

Message = dict[str, str]


def mt_bench_dataset(path: Path) -> Dataset:
    """The first turn of every question, as a conversation. Nothing is scored: answers are judged by people or models.

    Raises UsageError naming line and field.
    """
    records = []
    for place, row in _rows(path):
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise UsageError(f"{place}: turns is {shorten(turns)}, but must be a list of texts")
        name = row.get("question_id")
        if not isinstance(name, int | str):
            raise UsageError(f"{place}: question_id is {shorten(name)}, but must be a number or a text")
        messages: list[Message] = [{"role": "user", "content": turns[0]}]
        records.append(TaskRecord(f"mt-bench-{name}", turns[0], "", {"messages": messages}))
    return Dataset("mt-bench", (), lambda: iter(records), _nothing)


def jsonl_dataset(path: Path, metric: str | None = None, files_under: Path | None = None) -> Dataset:
    """Lines with `prompt`, `messages`, `audio` or `image`, an `id` if wanted, and on all lines or none a `reference` to
    be met exactly, or `relevant`, the ids of the answers that a ranking should bring. metric: of the ranking.
    files_under: the only folder that lines may name files in, by default that of the data.

    Raises UsageError naming line and field.
    """
    records: list[TaskRecord] = []
    unused: set[str] = set()
    scored: str | None = None
    root = files_root(files_under, path)
    for number, (place, row) in enumerate(_rows(path)):
        record = _record(place, row, number, root)
        has = next((name for name in ("reference", "relevant") if name in row), "")
        if "reference" in row and "relevant" in row:
            raise UsageError(f"{place}: reference and relevant are both given: give one of them")
        if scored is not None and has != scored:
            name = scored or has
            raise UsageError(f"{place}: {name} is on some lines only: give one to every line, or to none")
        scored = has
        unused |= row.keys() - KNOWN
        records.append(record)
    left = ", ".join(sorted(unused))
    notes = (f"{path}: {left} is not looked at: every record is run with the same settings",) if unused else ()
    if scored == "relevant":
        names = read_metrics(metric or DEFAULT_METRICS)
        ranks = partial(_ranks, names)
        return Dataset("jsonl", names, lambda: iter(records), _nothing, notes, ranks=ranks)
    if metric is not None:
        raise UsageError(f"--metric {metric} needs relevant, a list of ids, on every line of {path}")
    metrics = ("exact match",) if scored else ()
    return Dataset("jsonl", metrics, lambda: iter(records), _exact if scored else _nothing, notes)


def _ranks(names: Sequence[str], record: TaskRecord, ranked: Sequence[str]) -> Mapping[str, float]:
    relevant = record.meta["relevant"]
    assert isinstance(relevant, frozenset)
    return ranked_scores(names, relevant, ranked)


def _record(place: str, row: Mapping[str, object], number: int, root: str) -> TaskRecord:
    """root: the folder that lines may name files in."""
    prompt, messages, reference = row.get("prompt"), row.get("messages"), row.get("reference", "")
    given = [name for name in ("prompt", "messages", *FILE_FIELDS) if row.get(name) is not None]
    if len(given) != 1 and given != ["prompt", "image"]:
        raise UsageError(f"{place}: give prompt, messages, audio or image, one of them")
    for field in ("prompt", *FILE_FIELDS):
        if field in given and (not isinstance(row[field], str) or not row[field]):
            raise UsageError(f"{place}: {field} is {shorten(row[field])}, but must be a text that is not empty")
    if messages is not None and not _are_messages(messages):
        raise UsageError(
            f"{place}: messages is {shorten(messages)}, but must be a list of objects with role and content"
        )
    if not isinstance(reference, str):
        raise UsageError(f"{place}: reference is {shorten(reference)}, but must be a text")
    name = row.get("id", f"line-{number + 1}")
    if not isinstance(name, str | int):
        raise UsageError(f"{place}: id is {shorten(name)}, but must be a text")
    meta: dict[str, object] = {} if messages is None else {"messages": messages}
    for field in FILE_FIELDS:
        if field in given:
            try:
                meta[field] = file_of_row(root, field, str(row[field]))
            except InvalidRowError as error:
                raise UsageError(f"{place}: {error}") from None
    if "relevant" in row:
        relevant = row["relevant"]
        if not isinstance(relevant, list) or not relevant or not all(type(one) in (str, int) for one in relevant):
            raise UsageError(f"{place}: relevant is {shorten(relevant)}, but must be a list of ids")
        meta["relevant"] = frozenset(str(one).strip() for one in relevant)
    return TaskRecord(str(name), prompt if isinstance(prompt, str) else "", reference, meta)


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(one, dict) and set(one) == {"role", "content"} and all(isinstance(v, str) for v in one.values())
            for one in value
        )
    )


def _table_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The rows of a table as lines of JSON. Raises UsageError."""
    check_table(path)
    with reading(str(path)), closing(open_input(path)) as stream:
        for number, line in lines_reader(path)(stream):
            if isinstance(line, LongLine):
                raise UsageError(f"{path} line {number}: {line.reason or 'it is too long'}")
            yield number, line.decode()


def _exact(record: TaskRecord, text: str) -> Mapping[str, float]:
    return {"exact match": float(text.strip() == record.reference.strip())}


def _nothing(record: TaskRecord, text: str) -> Mapping[str, float]:
    return {}


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Place and object of every line that is not blank, or of every row of a table."""
    found = False
    for number, line in _table_lines(path) if is_table(path) else enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            found = True
            try:
                yield f"{path} line {number}", parse_object(line.encode())
            except InvalidRowError as error:
                raise UsageError(f"{path} line {number}: {error}") from None
    if not found:
        raise UsageError(f"{path} holds no line")
