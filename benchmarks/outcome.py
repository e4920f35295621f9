"""What one run of a method gives, shared by the speed benchmark and its comparators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Outcome", "Runner", "delivered"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One method on all requests: seconds, tokens of the best texts, steps per target call and drafted nodes per target
    call (None for others' code)."""

    seconds: float
    tokens: int
    steps_per_call: float | None = None
    nodes_per_call: float | None = None


Runner = Callable[[], Outcome]


def delivered(row: Sequence[int], eos: Sequence[int]) -> int:
    """Tokens up to and with the first end token."""
    return next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
