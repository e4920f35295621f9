"""What every generator of records follows."""

from __future__ import annotations

import hashlib
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from dsbd_cli.lab.tasks.record import TaskRecord

SPLITS = ("train", "dev", "test")
TOP_LEVEL = 2
Drawn = tuple[str, str, Mapping[str, object]]


class Generator(ABC):
    """Endless records of one task.

    Attributes:
        name: of the task, the first part of its records' ids.
    """

    name: str

    def records(self, split: str, seed: int) -> Iterator[TaskRecord]:
        """Endless records of a split at the full level; the same (split, seed) gives the same records."""
        for group in self.groups(split, seed, 1, TOP_LEVEL):
            yield group[0]

    def groups(self, split: str, seed: int, size: int, level: int) -> Iterator[list[TaskRecord]]:
        """Endless groups of `size` records that share one context; level 0 is the easiest."""
        _check_split(split)
        for index in itertools.count():
            rng, name = _rng_for(self.name, split, seed, size, level, index), f"{self.name}-{split}-{seed}-{index}"
            drawn = self.draw(split, rng, size, level)
            yield [TaskRecord(name + (f"-{at}" if size > 1 else ""), *parts) for at, parts in enumerate(drawn)]

    @abstractmethod
    def draw(self, split: str, rng: random.Random, size: int, level: int) -> list[Drawn]:
        """Prompt, gold answer and what scoring needs of each record of one group."""


def _rng_for(*key: object) -> random.Random:
    """A random stream that depends on the key alone, not on the process or the platform."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


def _check_split(split: str) -> None:
    """Raise ValueError unless `split` is one of SPLITS."""
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
