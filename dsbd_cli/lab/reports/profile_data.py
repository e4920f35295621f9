"""What a profile holds: plain numbers, from which the tables, the plots and the JSON document are made.

Letters: W beams, K drafts per layer, D layers, N nodes of a target forward. Units stand in the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

__all__ = [
    "NO_DRAFT",
    "Curve",
    "CurvePoint",
    "DepthRate",
    "DrafterRate",
    "ForestSize",
    "Machine",
    "MeasuredSetting",
    "Owner",
    "Phase",
    "Prediction",
    "Profile",
    "ShownForest",
    "ShownNode",
    "Spread",
    "spread_of",
]

NodeState = Literal["root", "accepted", "rejected", "dead", "completed", "finished", "unreached"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of repeated measurements."""

    median: float
    low: float
    high: float
    count: int

    @property
    def relative(self) -> float:
        """(high - low) / median; 0 of nothing."""
        return (self.high - self.low) / self.median if self.median else 0.0


def spread_of(values: list[float]) -> Spread:
    """Of at least one value."""
    return Spread(median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class ForestSize:
    """The part of a method that a profile compares; min_width is None with fixed width, depth 0 is no draft."""

    depth: int
    drafts_per_layer: int
    min_width: int | None = None

    def nodes(self, num_beams: int) -> int:
        """N."""
        return num_beams + self.depth * self.drafts_per_layer

    @property
    def label(self) -> str:
        """D=4 K=8, with W_min where there is one."""
        if not self.depth:
            return "no draft"
        return f"D={self.depth} K={self.drafts_per_layer}" + (f" W_min={self.min_width}" if self.min_width else "")


NO_DRAFT = ForestSize(0, 0)


@dataclass(frozen=True, slots=True)
class Phase:
    """Measured: seconds of a whole run (median), of one iteration, and the share of the run."""

    name: str
    total_s: float
    per_iteration_s: float
    share: float


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A measured forward over `nodes` nodes per row, and the least time that the machine's measured rates allow."""

    nodes: int
    seconds: Spread
    floor_s: float | None
    bound: Literal["memory", "arithmetic"] | None

    @property
    def share_of_floor(self) -> float | None:
        """floor / measured: 1 is the roofline."""
        return self.floor_s / self.seconds.median if self.floor_s is not None and self.seconds.median else None


@dataclass(frozen=True, slots=True)
class Curve:
    """T(N) of one model: measured forwards of `rows` rows that see `slots` cache slots each.

    weight_bytes: read by each forward; flops_per_node: 2 x parameters; None where the weights cannot be seen.
    bandwidth_bytes_per_s: measured copy, bytes read + written; matmul_flops_per_s: measured. in_run_s: mean forward
    of the timed runs, where rows leave the batch as they finish.
    """

    role: Literal["target", "draft"]
    rows: int
    slots: int
    weight_bytes: int | None
    flops_per_node: int | None
    kv_bytes_per_slot: int
    bandwidth_bytes_per_s: float | None
    matmul_flops_per_s: float | None
    in_run_s: float
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class DepthRate:
    """Measured: of `reached` times that a layer was looked at, it passed `passed` times at the setting in use."""

    depth: int
    reached: int
    passed: int


@dataclass(frozen=True, slots=True)
class DrafterRate:
    """Measured: nodes that one of two drafters proposed, and how many were accepted; a node of both is the first's."""

    name: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted from measured costs and acceptance, not measured."""

    setting: ForestSize
    steps_per_call: float
    iteration_s: float
    tokens_per_s: float
    mean_width: float


@dataclass(frozen=True, slots=True)
class MeasuredSetting:
    """Measured: whole runs with one setting. tokens: of the best texts."""

    setting: ForestSize
    seconds: Spread
    tokens: int
    tokens_per_s: Spread
    steps_per_call: float
    iterations: int
    mean_width: float
    phases: tuple[Phase, ...]
    predicted: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Owner:
    """Bytes that one owner holds at the peak; None where it cannot be known."""

    name: str
    bytes: int | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured. load_average: of the minute before the first measurement, None where unknown."""

    device: str
    threads: int
    cores: int
    load_average: float | None
    versions: Mapping[str, str | None]
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class ShownNode:
    """A node of a shown forest. p, q: None where they are not defined; parent: place in the list, None of a root;
    proposer: which of two drafters; None where one drafts."""

    token: str
    layer: int
    parent: int | None
    state: NodeState
    p: float | None
    q: float | None
    proposer: str | None = None


@dataclass(frozen=True, slots=True)
class ShownForest:
    """One iteration of one prompt: `walked` layers yielded a step, the last of them completed. Parents come first."""

    prompt_id: str
    iteration: int
    rule: str
    num_beams: int
    walked: int
    depth: int
    nodes: tuple[ShownNode, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything one `dsbd profile` found out. `now` is the setting in use; `best` the recommended one.

    draft: name of the draft model, None where none runs; drafter: who proposes, None where nobody does; drafters: what
    each brought, where there are two; tree: how drafter dynamic-tree chooses, None where it does not draft.
    seconds: that measuring might take; left_out: what there was no time for; complete: False where a signal ended it.
    """

    command: str
    target: str
    draft: str | None
    drafter: str | None
    dtype: str
    rule: str
    width: str
    num_beams: int
    batch_size: int
    prompts: int
    prompt_tokens: int
    repeats: int
    machine: Machine
    now: MeasuredSetting
    tried: tuple[MeasuredSetting, ...]
    curves: tuple[Curve, ...]
    acceptance: tuple[DepthRate, ...]
    predictions: tuple[Prediction, ...]
    best: ForestSize
    memory: tuple[Owner, ...]
    notes: tuple[str, ...]
    recommended_command: str
    forest: ShownForest | None = None
    drafters: tuple[DrafterRate, ...] = ()
    tree: str | None = None
    seconds: float = float("inf")
    left_out: tuple[str, ...] = ()
    complete: bool = True
