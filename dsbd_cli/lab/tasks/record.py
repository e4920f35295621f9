"""The record and the task that every generator of this package follows."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One prompt with its gold answer and what scoring it needs."""

    id: str
    prompt: str
    reference: str
    meta: Mapping[str, object]


class Task(Protocol):
    """A generator of records and the scorer of answers to them."""

    @property
    def name(self) -> str:
        """The task's name, the first part of its records' ids."""
        ...

    @property
    def metric(self) -> str:
        """What `score` measures, in words."""
        ...

    def records(self, split: str, seed: int) -> Iterator[TaskRecord]:
        """Endless records of a split; the same (split, seed) gives the same records."""
        ...

    def groups(self, split: str, seed: int, size: int, level: int) -> Iterator[list[TaskRecord]]:
        """Endless groups of `size` records that share one context; level 0 is the easiest."""
        ...

    def score(self, record: TaskRecord, text: str) -> bool:
        """Whether `text` answers the record."""
        ...


def rng_for(*key: object) -> random.Random:
    """A random stream that depends on the key alone, not on the process or the platform."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


def check_split(split: str) -> None:
    """Raise ValueError unless `split` is one of SPLITS."""
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
