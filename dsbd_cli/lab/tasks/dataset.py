"""Records to measure on, wherever they come from, and how answers to them are scored."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dsbd_cli.errors import UsageError
from dsbd_cli.lab.tasks.record import TaskRecord, shipped
from dsbd_cli.pick.sandbox import StatementResult, is_ordered

Score = Callable[[TaskRecord, str], Mapping[str, float]]
Execute = Callable[[TaskRecord, str], StatementResult | None]

EXECUTION = "execution accuracy"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Records and their scorer.

    Attributes:
        name: as the user chose it: sql, squad, ...
        metrics: names of the scores, the main one first; empty where answers cannot be scored.
        records: returns the records, in order.
        score: record and text -> one number from 0 to 1 for each metric.
        notes: what the user should know about the data.
        ranks: record and all answers, best first -> the metrics. Where it is given, all hypotheses are requested, and
            it takes the place of `score`. An answer is its id, or its text where it has none.
        dev: other records of the same kind, shown solved by `with_shots`; None where the data has no such split.
        execute: record and text -> the result of the text on the record's database, None where it fails. The field is
            None for data without databases.
        asks: options that some record sets and that not every method supports: `grammar`, `allow`, `seed`, `greedy`.
    """

    name: str
    metrics: tuple[str, ...]
    records: Callable[[], Iterator[TaskRecord]]
    score: Score
    notes: tuple[str, ...] = ()
    dev: Dataset | None = None
    execute: Execute | None = None
    ranks: Callable[[TaskRecord, Sequence[str]], Mapping[str, float]] | None = None
    asks: frozenset[str] = frozenset()


def builtin_dataset(name: str, metrics: tuple[str, ...], score: Score, execute: Execute | None = None) -> Dataset:
    """Return the test records of a built-in task as a data set, with its dev records."""
    dev = Dataset(f"{name} dev", metrics, partial(shipped, name, "dev"), score, execute=execute)
    return dataclasses.replace(dev, name=name, records=partial(shipped, name, "test"), dev=dev)


def execution_score(gold: StatementResult | None, result: StatementResult | None, *, ordered: bool) -> dict[str, float]:
    """Return 1 where a statement returns what the gold one returns, else 0: same columns in order, same rows with
    repeats, in the same order where the gold statement orders them (`ordered`)."""
    return {EXECUTION: float(gold is not None and result is not None and gold.same(result, ordered=ordered))}


def execution_scorer(execute: Execute) -> Score:
    """Return the score of SQL answers to records that hold the gold statement's `result`."""

    def score(record: TaskRecord, text: str) -> Mapping[str, float]:
        gold = record.meta["result"]
        assert isinstance(gold, StatementResult)
        return execution_score(gold, execute(record, text), ordered=is_ordered(record.reference))

    return score


def with_shots(dataset: Dataset, count: int) -> Dataset:
    """Return the data set with the first `count` dev records, solved, in front of every prompt.

    The solved records are turns of a conversation where the target's tokenizer has a chat template, else text.
    Conversations cannot be given as text.

    Raises UsageError where there are no such records, or they have no answers.
    """
    if dataset.dev is None:
        raise UsageError(f"--shots {count}: {dataset.name} has no dev records to show: drop it, or give --dev-data")
    shown = list(itertools.islice(dataset.dev.records(), count))
    if len(shown) < count:
        raise UsageError(f"--shots {count}: {dataset.dev.name} has {len(shown)} dev records: ask for as many or fewer")
    for record in shown:
        if not record.reference:
            raise UsageError(f"--shots {count}: dev record {record.id} has no reference to show as its answer")
    turns = [
        turn
        for record in shown
        for turn in (*_conversation(record), {"role": "assistant", "content": record.reference.strip()})
    ]
    before = "".join(f"{record.prompt} {record.reference.strip()}\n\n" for record in shown)
    as_text = all(record.prompt for record in shown)

    def with_examples(records: Iterator[TaskRecord]) -> Iterator[TaskRecord]:
        for record in records:
            meta = {**record.meta, "messages": [*turns, *_conversation(record)]}
            yield dataclasses.replace(
                record, prompt=before + record.prompt if as_text and record.prompt else "", meta=meta
            )

    notes = (*dataset.notes, f"{dataset.name}: {count} solved dev records stand in front of every prompt")
    return dataclasses.replace(dataset, records=lambda: with_examples(dataset.records()), notes=notes)


def _conversation(record: TaskRecord) -> list[dict[str, str]]:
    """Return a record's conversation, or its prompt as one. Raises UsageError for speech and pictures."""
    for field, what in (("audio", "speech"), ("image", "a picture")):
        if field in record.meta:
            raise UsageError(f"--shots: record {record.id} is {what}, which takes no examples: drop --shots")
    messages = record.meta.get("messages")
    return list(messages) if isinstance(messages, list) else [{"role": "user", "content": record.prompt}]
