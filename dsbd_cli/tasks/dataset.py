"""Records to measure on, wherever they come from, and how answers to them are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dsbd_cli.tasks.record import Task, TaskRecord

__all__ = ["Dataset", "builtin_dataset"]


@dataclass(frozen=True, slots=True)
class Dataset:
    """Records and their scorer.

    Attributes:
        name: as the user chose it: sql, squad, ...
        metrics: names of the scores, the main one first; empty where answers cannot be scored.
        records: of the data, in order; may be endless.
        score: record and text -> one number from 0 to 1 for each metric.
        notes: what the user should know of the data.
    """

    name: str
    metrics: tuple[str, ...]
    records: Callable[[], Iterator[TaskRecord]]
    score: Callable[[TaskRecord, str], Mapping[str, float]]
    notes: tuple[str, ...] = ()


def builtin_dataset(task: Task, seed: int) -> Dataset:
    """The test records of a built-in task."""

    def score(record: TaskRecord, text: str) -> Mapping[str, float]:
        found = {task.metric: float(task.score(record, text))}
        overlap = getattr(task, "f1", None)
        return found if overlap is None else {**found, "F1": overlap(record, text)}

    metrics = (task.metric, "F1") if hasattr(task, "f1") else (task.metric,)
    return Dataset(task.name, metrics, lambda: task.records("test", seed), score)
