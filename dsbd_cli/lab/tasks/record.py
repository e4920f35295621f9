"""The record of a task, and the built-in tasks' base: records that the package ships, and a scorer."""

from __future__ import annotations

import gzip
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

RECORDS = Path(__file__).parent / "records"  # TASK-SPLIT.jsonl.gz, written by training.tasks.ship
SPLITS = ("dev", "test")


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One prompt with its gold answer and what scoring it needs."""

    id: str
    prompt: str
    reference: str
    meta: Mapping[str, object]


class Task(ABC):
    """Shipped records and the scorer of answers to them.

    Attributes:
        name: the first part of its records' ids.
        metric: what `score` measures, in words.
    """

    name: str
    metric: str

    def records(self, split: str) -> Iterator[TaskRecord]:
        """Read the records of `dev` (200) or `test` (500), whose names occur in no training record. Raises ValueError
        for another split."""
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
        return self._read(RECORDS / f"{self.name}-{split}.jsonl.gz")

    def _read(self, path: Path) -> Iterator[TaskRecord]:
        with gzip.open(path) as lines:
            for line in lines:
                yield TaskRecord(**orjson.loads(line))

    @abstractmethod
    def score(self, record: TaskRecord, text: str) -> bool:
        """Whether `text` answers the record."""
