"""The record of a task, and the records that the package ships."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson

from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.requests import Request

RECORDS = Path(__file__).parent / "records"  # TASK-SPLIT.jsonl.gz, written by training.tasks.ship


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One prompt with its gold answer and what scoring it needs. request: the request that `dsbd generate` would make
    of the user's line, whose options take the place of the run's; None for records without options."""

    id: str
    prompt: str
    reference: str
    meta: Mapping[str, object]
    request: Request | None = None

    def sampling(self, run: SamplingConfig) -> SamplingConfig:
        """Return the options of the record's own request, else those of the run."""
        return run if self.request is None else self.request.sampling


def shipped(task: str, split: Literal["dev", "test"]) -> Iterator[TaskRecord]:
    """Read the records of `dev` (200) or `test` (500), whose names occur in no training record."""
    with gzip.open(RECORDS / f"{task}-{split}.jsonl.gz") as lines:
        for line in lines:
            yield TaskRecord(**orjson.loads(line))
