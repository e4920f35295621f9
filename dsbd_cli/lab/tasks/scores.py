"""Scores of an answer against the reference of its line: the kinds of `dsbd bench --score`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import orjson

from dsbd_cli.errors import InvalidRowError, UsageError, require_package, shorten
from dsbd_cli.io.records.cells import whole
from dsbd_cli.lab.tasks.dataset import EXECUTION, Execute, Score, execution_scorer
from dsbd_cli.lab.tasks.qa import f1
from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.pick.choosers import last_answer, normalised, read_regex
from dsbd_cli.pick.execution import ByExecution, database_path
from dsbd_cli.pick.sandbox import StatementResult

DEFAULT_SCORE = "exact"
KINDS = ("exact", "prefix", "contains", "regex:PATTERN", "number", "f1", "chrf", "json", "exec:DB")
# a number in a text: not a part of a word or of a longer number; commas only between thousands
NUMBER = re.compile(
    r"(?<![\w.])[-+−]?[$€£]?(?:\d{1,3}(?:,\d{3})++|\d++|(?=\.\d))(?:\.\d++)?(?:e[-+]?\d++)?(?!\d)", re.IGNORECASE
)
FENCED = re.compile(r"```\w*+\n(.*?)```", re.DOTALL)

Accept = Callable[[TaskRecord], TaskRecord]


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """A way to score answers.

    Attributes:
        metric: its name in reports.
        score: record and text -> the metric, from 0 to 1.
        reference: returns the text of a line's reference. Raises InvalidRowError for one that cannot be scored against.
        check: called with a record before a model is loaded; `complete`: with one that is about to be answered. Both
            return the record with what its score needs. Raise InvalidRowError.
        execute: as in Dataset.
    """

    metric: str
    score: Score
    reference: Callable[[object], str]
    check: Accept = lambda record: record
    complete: Accept = lambda record: record
    execute: Execute | None = None


def read_score(text: str) -> AnswerScore:
    """Return the score that `--score` names. Raises UsageError for an unknown kind, a wrong pattern, a database that
    cannot be read, or a missing library."""
    if text == "chrf":
        return _chrf()
    if text in _PLAIN:
        return _PLAIN[text]
    kind, _, detail = text.partition(":")
    if kind in _DETAILED and detail:
        return _DETAILED[kind](detail)
    raise UsageError(f"--score is {shorten(text)}, but must be one of {', '.join(KINDS)}")


@cache
def score_library(name: str) -> ModuleType:
    """Import a library of the extra `scores`. Raises UsageError where it is not installed."""
    require_package("this score", name.partition(".")[0], "scores")
    return import_module(name)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRowError(f"reference is {shorten(value)}, but must be a text")
    return value


def _not_blank(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidRowError(f"reference is {shorten(value)}, but must be a text that is not blank")
    return value


def _numeric(value: object) -> str:
    """Return a reference that is a number, or a text that holds one, as text. Raises InvalidRowError for others."""
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or _last_number(text) is None:
        raise InvalidRowError(f"reference is {shorten(value)}, but must be a number, or a text that holds one")
    return text


def _json(value: object) -> str:
    """Return a reference as a text that holds JSON; a value that is no text is written as JSON. Raises
    InvalidRowError."""
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    if _canonical(text) is None:
        raise InvalidRowError(f"reference is {shorten(value)}, but must be JSON, or a text that holds it")
    return text


def _plain(metric: str, right: Callable[[str, str], float], reference: Callable[[object], str] = _text) -> AnswerScore:
    """Make a score of reference and answer alone."""

    def score(record: TaskRecord, text: str) -> Mapping[str, float]:
        return {metric: float(right(record.reference, text))}

    return AnswerScore(metric, score, reference)


def _folded(text: str) -> str:
    """Return the text without capitals and repeated spaces."""
    return " ".join(text.casefold().split())


def _last_number(text: str) -> str | None:
    """Return the last number in a text, in one normal form; None where there is none."""
    answer = last_answer(NUMBER, text)
    return None if answer is None else normalised(answer.replace("−", "-"))


def _canonical(text: str) -> bytes | None:
    """Return the JSON value in a text, or in its last block between ``` fences, in one normal form, or None."""
    try:
        value = orjson.loads(last_answer(FENCED, text) or text)
        return orjson.dumps(_same_numbers(value), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):
        return None


def _same_numbers(value: object) -> object:
    """Return a JSON value in which floats that are whole numbers are integers, so that 1.0 equals 1."""
    if isinstance(value, dict):
        return {name: _same_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_same_numbers(item) for item in value]
    return whole(value) if isinstance(value, float) else value


def _chrf() -> AnswerScore:
    chrf = score_library("sacrebleu.metrics").CHRF()
    return _plain("chrF", lambda gold, text: as_share(chrf.sentence_score(text, [gold]).score))


def as_share(percents: float) -> float:
    """Return a score of sacrebleu from 0 to 1. A perfect one may come as 100.00000000000004, and then would be none of
    0 and 1, for which Wilson's interval is taken."""
    return round(percents / 100, 9)


def _by_regex(pattern: str) -> AnswerScore:
    expression = read_regex("--score regex", pattern)

    def right(gold: str, text: str) -> bool:
        answer = last_answer(expression, text)
        return answer is not None and normalised(answer) == normalised(gold)

    return _plain("regex match", right)


def _by_execution(database: str) -> AnswerScore:
    """Make the score that compares the rows of an SQL answer with those of the reference. The database is named as in
    `dsbd pick --by exec --database`."""
    runner = ByExecution(database)
    runner.check("--score exec")

    def check(record: TaskRecord) -> TaskRecord:
        path = database_path(database, record.meta.get("metadata"))
        return dataclasses.replace(record, meta={**record.meta, "database": path})

    def complete(record: TaskRecord) -> TaskRecord:
        result = run(record, record.reference)
        if isinstance(result, str):
            raise InvalidRowError(f"reference fails on {record.meta['database']}: {result}")
        return dataclasses.replace(record, meta={**record.meta, "result": result})

    def run(record: TaskRecord, text: str) -> StatementResult | str:
        path = record.meta["database"]
        assert isinstance(path, Path)
        return runner.run(path, text)

    def execute(record: TaskRecord, text: str) -> StatementResult | None:
        result = run(record, text)
        return result if isinstance(result, StatementResult) else None

    return AnswerScore(EXECUTION, execution_scorer(execute), _not_blank, check, complete, execute)


_PLAIN = {
    "exact": _plain("exact match", lambda gold, text: gold.strip() == text.strip()),
    "prefix": _plain("prefix", lambda gold, text: _folded(text).startswith(_folded(gold)), _not_blank),
    "contains": _plain("contains", lambda gold, text: _folded(gold) in _folded(text), _not_blank),
    "number": _plain("number", lambda gold, text: _last_number(gold) == _last_number(text), _numeric),
    "f1": _plain("F1", f1),
    "json": _plain("JSON", lambda gold, text: _canonical(text) == _canonical(gold), _json),
}
_DETAILED = {"regex": _by_regex, "exec": _by_execution}
