"""Counters of one layer, one iteration and one request. Names hold units: _s seconds, _bytes, _slots cache slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

SUMMED = (
    *("prompt_tokens_reused", "target_calls", "draft_calls", "steps", "drafted", "accepted", "width_sum"),
    *("draft_s", "target_s", "verify_s", "total_s"),
)


@dataclass(slots=True)
class DrafterStats:
    """Node counts of one of two merged drafters. A node that both proposed counts for the first."""

    drafted: int = 0
    accepted: int = 0

    def add(self, other: DrafterStats) -> None:
        """Add the counts of another to this one."""
        self.drafted += other.drafted
        self.accepted += other.accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafted nodes that were accepted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(slots=True)
class LayerStats:
    """Counts of one drafted layer that was verified: `accepted` of `drafted` nodes became live beams or finished
    hypotheses.

    drafters: the same counts by drafter, where there are two.
    """

    layer: int
    drafted: int
    live_parents: int
    width: int
    accepted: int
    passed: bool
    drafters: dict[str, DrafterStats] = field(default_factory=dict)


@dataclass(slots=True)
class StepStats:
    """Counts of one iteration (one target forward) of one request.

    Times are those of the iteration, divided by the number of requests that shared it.
    """

    id: str
    iteration: int
    passed_layers: int
    steps: int
    nodes: int
    kv_slots: int
    trunk: int
    layers: list[LayerStats]
    draft_s: float
    target_s: float
    verify_s: float


@dataclass(slots=True)
class RequestStats:
    """Sums over the iterations of one request.

    prompt_tokens_reused: leading tokens of the prompt whose keys and values were already in the target's cache.
    drafters: counts by drafter, where there are two.
    """

    target_calls: int = 0
    draft_calls: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    width_sum: int = 0
    kv_peak_slots: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens_reused: int = 0
    drafters: dict[str, DrafterStats] = field(default_factory=dict)
    step_log: list[StepStats] = field(default_factory=list)

    @classmethod
    def total(cls, parts: Iterable[RequestStats]) -> RequestStats:
        """Return the sums of several requests, with their step logs joined."""
        whole = cls()
        for part in parts:
            whole.add(part)
            whole.step_log += part.step_log
        return whole

    def add(self, other: RequestStats) -> None:
        """Add the counts of another request, and keep the larger peak.

        The step log is left alone, so that sums over many requests stay small.
        """
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kv_peak_slots = max(self.kv_peak_slots, other.kv_peak_slots)
        for name, part in other.drafters.items():
            self.drafters.setdefault(name, DrafterStats()).add(part)

    @property
    def steps_per_call(self) -> float:
        """Steps that one target call yields."""
        return self.steps / self.target_calls if self.target_calls else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafted nodes that were accepted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_width(self) -> float:
        """Live beams per step."""
        return self.width_sum / self.steps if self.steps else 0.0
