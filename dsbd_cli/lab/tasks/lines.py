"""Prompts from JSON lines: MT-Bench's question.jsonl (Zheng et al. 2023), and the user's own file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import orjson

from dsbd_cli.errors import InvalidRowError, UsageError, as_utf8, reading, shorten
from dsbd_cli.io.lines.compression import open_input
from dsbd_cli.io.lines.encoding import check_text_file
from dsbd_cli.io.lines.tables import check_table, is_table, lines_reader, table_header
from dsbd_cli.io.records.cells import BY_NAME, ColumnRules
from dsbd_cli.io.records.file_roots import FILE_FIELDS, files_root
from dsbd_cli.io.records.parse import parse_object
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.io.records.row import Fields, Row, readable, with_carried
from dsbd_cli.lab.tasks.dataset import Dataset
from dsbd_cli.lab.tasks.ranking import DEFAULT_METRICS, ranked_scores, read_metrics
from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.lab.tasks.scores import DEFAULT_SCORE, AnswerScore, read_score
from dsbd_cli.requests import Request, derive_seed

MOST_ASKED = 1 << 20  # answers that a line may ask for; the methods set the real limit
PLAIN_ROWS = RowReader()

Message = dict[str, str]


def mt_bench_dataset(path: Path) -> Dataset:
    """Read the first turn of every question as a conversation. Nothing is scored: people or models judge the answers.

    Raises UsageError naming line and field.
    """
    records = []
    for number, row in _rows(path):
        where = f"{path} line {number}"
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise UsageError(f"{where}: turns is {shorten(turns)}, but must be a list of texts")
        name = row.get("question_id")
        if not isinstance(name, int | str):
            raise UsageError(f"{where}: question_id is {shorten(name)}, but must be a number or a text")
        messages: list[Message] = [{"role": "user", "content": turns[0]}]
        records.append(TaskRecord(f"mt-bench-{name}", turns[0], "", {"messages": messages}))
    return Dataset("mt-bench", (), lambda: iter(records), _nothing)


def jsonl_dataset(
    path: Path,
    metric: str | None = None,
    files_under: Path | None = None,
    score: str | None = None,
    rows: RowReader = PLAIN_ROWS,
    columns: ColumnRules = BY_NAME,
) -> Dataset:
    """Read lines as `dsbd generate` does, options of their own included. Either all lines or none have a `reference`,
    or `relevant`: the ids of the answers that a ranking should contain. The file's name is the name of the data set.

    metric: of the ranking. score: kind of the score against references, see scores.read_score. files_under: the only
    folder in which lines may name files, by default that of the data. rows: what lines inherit from the run. columns:
    which columns of a table are fields.

    Raises UsageError naming line and field.
    """
    how = read_score(DEFAULT_SCORE if score is None else score)
    reader = dataclasses.replace(rows, num_beams=MOST_ASKED, files_root=files_root(files_under, path))
    records: list[TaskRecord] = []
    asks: set[str] = set()
    header = table_header(path, columns) if is_table(path) and path.is_file() else None
    notes = [] if header is None else header.notes(path)
    scored: str | None = None
    for index, (number, line) in enumerate(_rows(path, columns)):
        gold: Fields = {name: line.pop(name) for name in ("reference", "relevant") if name in line}
        if len(gold) == 2:
            raise UsageError(f"{path} line {number}: reference and relevant are both given: give one of them")
        has = next(iter(gold), "")
        if scored is not None and has != scored:
            name = scored or has
            raise UsageError(f"{path} line {number}: {name} is on some lines only: give one to every line, or to none")
        scored = has
        row = reader.read(orjson.dumps(line), index=index, number=number)
        if row.request is None:
            raise UsageError(f"{path} {row.error}")
        notes += [f"{path} {warning}" for warning in row.warnings]
        asks.update(_asks(row.request, reader.seed))
        try:
            records.append(how.check(_record(row, row.request, gold, how)))
        except InvalidRowError as error:
            raise UsageError(f"{path} line {number}: {error}") from None
    names = read_metrics(DEFAULT_METRICS if metric is None else metric)
    if metric is not None and scored != "relevant":
        raise UsageError(f"--metric {metric} needs relevant, a list of ids, on every line of {path}")
    if score is not None and scored != "reference":
        raise UsageError(f"--score {score} needs a reference on every line of {path}")
    data = Dataset(as_utf8(path.name), (), lambda: iter(records), _nothing, tuple(notes), asks=frozenset(asks))
    if scored == "relevant":
        return dataclasses.replace(data, metrics=names, ranks=partial(_ranks, names))
    if not scored:
        return data

    def completed() -> Iterator[TaskRecord]:
        for record in records:
            try:
                yield how.complete(record)
            except InvalidRowError as error:
                raise UsageError(f"{path} record {record.id}: {error}") from None

    return dataclasses.replace(data, metrics=(how.metric,), records=completed, score=how.score, execute=how.execute)


def _ranks(names: Sequence[str], record: TaskRecord, ranked: Sequence[str]) -> Mapping[str, float]:
    relevant = record.meta["relevant"]
    assert isinstance(relevant, frozenset)
    return ranked_scores(names, relevant, ranked)


def _asks(request: Request, seed: int) -> Iterator[str]:
    """Yield the options of a line that not every method supports. seed: of the run."""
    if request.grammar is not None:
        yield "grammar"
    if request.allow is not None:
        yield "allow"
    if request.sampling.prefix is not None:
        yield "prefix"
    if request.sampling.truncate_prompt_tokens is not None:
        yield "truncated"
    if request.seed != derive_seed(seed, request.id):
        yield "seed"
    if request.sampling.temperature == 0:
        yield "greedy"


def _record(row: Row, request: Request, gold: Fields, how: AnswerScore) -> TaskRecord:
    """Make the record of a row. Raises InvalidRowError for a reference that cannot be scored against."""
    meta: dict[str, object] = {} if row.metadata is None else {"metadata": row.metadata}
    if request.messages is not None:
        meta["messages"] = list(request.messages)
    for field in FILE_FIELDS:
        if (file := getattr(request, field)) is not None:
            meta[field] = file
    if "relevant" in gold:
        relevant = gold["relevant"]
        if not isinstance(relevant, list) or not relevant or not all(type(item) in (str, int) for item in relevant):
            raise InvalidRowError(f"relevant is {shorten(relevant)}, but must be a list of ids")
        meta["relevant"] = frozenset(str(item).strip() for item in relevant)
    reference = how.reference(gold["reference"]) if "reference" in gold else ""
    # only the best answer is scored; how many are requested is up to the method
    sampling = dataclasses.replace(request.sampling, n_best=1, token_logprobs=False, top_logprobs=0)
    return TaskRecord(
        request.id, request.prompt or "", reference, meta, dataclasses.replace(request, sampling=sampling)
    )


def _nothing(record: TaskRecord, text: str) -> Mapping[str, float]:
    return {}


def _rows(path: Path, columns: ColumnRules = BY_NAME) -> Iterator[tuple[int, Fields]]:
    """Yield number and object of every line that is not blank, or of every row of a table. Raises UsageError."""
    if is_table(path):
        check_table(path, columns)
    elif path.is_file():
        with reading(str(path)):
            check_text_file(path)
    any_row = False
    with reading(str(path)), open_input(path) as stream:
        for number, line in lines_reader(path, columns)(stream):
            any_row = True
            try:
                row = parse_object(readable(line))
                metadata = with_carried(row.get("metadata"), line)
                yield number, row if metadata is None else {**row, "metadata": metadata}
            except InvalidRowError as error:
                raise UsageError(f"{path} line {number}: {error}") from None
    if not any_row:
        raise UsageError(f"{path} holds no line")
