"""The result of a profile: plain numbers, from which the table, the tree and the JSON document are made.

Letters: W beams, K drafts per layer, D layers, N nodes of a target forward. Names of fields end in their units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

NodeOutcome = Literal["root", "accepted", "rejected", "dead", "completed", "finished", "unreached"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of repeated measurements."""

    median: float
    low: float
    high: float
    count: int

    @property
    def relative(self) -> float:
        """Width of the range relative to the median; 0 where the median is 0."""
        return (self.high - self.low) / self.median if self.median else 0.0


def spread_of(values: list[float]) -> Spread:
    """Return the spread of at least one value."""
    return Spread(median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class ForestSize:
    """The part of a method that a profile varies. min_width: None with fixed width. depth: 0 is no draft."""

    depth: int
    drafts_per_layer: int
    min_width: int | None = None

    def nodes(self, num_beams: int) -> int:
        """Return N."""
        return num_beams + self.depth * self.drafts_per_layer

    @property
    def label(self) -> str:
        """Name as in `D=4 K=8`, with W_min where there is one."""
        if not self.depth:
            return "no draft"
        return f"D={self.depth} K={self.drafts_per_layer}" + (f" W_min={self.min_width}" if self.min_width else "")


NO_DRAFT = ForestSize(0, 0)


@dataclass(frozen=True, slots=True)
class Phase:
    """Measured seconds of a phase: of a whole measurement (the median one), of one iteration, and as a share of it."""

    name: str
    total_s: float
    per_iteration_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least time that a target forward may take by the machine's measured rates.

    weight_bytes: read by each forward. flops_per_node: 2 x parameters. kv_bytes_per_slot: keys and values of a cache
    slot. copy_bytes_per_s: bytes read + written.
    """

    weight_bytes: int
    flops_per_node: int
    kv_bytes_per_slot: int
    copy_bytes_per_s: float
    matmul_flops_per_s: float

    def floor(self, nodes: float, slots: float) -> tuple[float, Literal["memory", "arithmetic"]]:
        """Return the seconds of a forward of `nodes` nodes over `slots` cache slots, both of all rows, and what bounds
        it: the bytes of weights and slots at the copy rate, or the operations of the weights at the matmul rate."""
        memory = (self.weight_bytes + slots * self.kv_bytes_per_slot) / self.copy_bytes_per_s
        arithmetic = self.flops_per_node * nodes / self.matmul_flops_per_s
        return (memory, "memory") if memory >= arithmetic else (arithmetic, "arithmetic")


@dataclass(frozen=True, slots=True)
class TargetForward:
    """The measured mean target forward of a measurement. rows, nodes, slots: means; nodes and slots are of all rows
    together. floor_s, bound: of the roofline, None where that was not measured."""

    rows: float
    nodes: float
    slots: float
    seconds: float
    floor_s: float | None = None
    bound: Literal["memory", "arithmetic"] | None = None

    @property
    def share_of_floor(self) -> float | None:
        """Floor divided by measured seconds; 1 is the roofline."""
        return self.floor_s / self.seconds if self.floor_s is not None and self.seconds else None


@dataclass(frozen=True, slots=True)
class DepthRate:
    """Measured acceptance of a layer with the setting in use: how often it was verified (`reached`), and passed."""

    depth: int
    reached: int
    passed: int


@dataclass(frozen=True, slots=True)
class DrafterRate:
    """Measured number of nodes that one of two drafters proposed, and of those accepted. A node that both proposed
    counts for the first."""

    name: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class MeasuredSetting:
    """Whole measurements with one setting. tokens: of the best texts. peak_memory_bytes: of the whole process, or of
    the GPUs; None where it is unknown."""

    setting: ForestSize
    seconds: Spread
    tokens: int
    tokens_per_s: Spread
    steps_per_call: float
    iterations: int
    mean_width: float
    phases: tuple[Phase, ...]
    forward: TargetForward
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of the measurements. load_average: of the minute before the first measurement, None where unknown."""

    device: str
    threads: int
    cores: int
    load_average: float | None
    versions: Mapping[str, str | None]
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class ShownNode:
    """A node of a shown forest. p, q: None where they are not defined. parent: index in the list, None for a root.
    proposer: which of two drafters; None where one drafts."""

    token: str
    layer: int
    parent: int | None
    state: NodeOutcome
    p: float | None
    q: float | None
    proposer: str | None = None


@dataclass(frozen=True, slots=True)
class ShownForest:
    """One iteration of one prompt. `verified` layers yielded a step, the last of them completed. Parents come first."""

    prompt_id: str
    iteration: int
    rule: str
    num_beams: int
    verified: int
    depth: int
    nodes: tuple[ShownNode, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything that one `dsbd profile` found out. `now` is the setting in use, `best` the recommended one.

    draft: name of the draft model, None where none runs. drafter: name of the drafter, None where nothing is drafted.
    drafters: nodes of each, where there are two. tree: how drafter dynamic-tree chooses, None where it does not draft.
    seconds: limit of the time for measuring. left_out: what there was no time for. complete: False where a signal ended
    it.
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
    roofline: Roofline | None
    acceptance: tuple[DepthRate, ...]
    best: ForestSize
    notes: tuple[str, ...]
    recommended_command: str
    forest: ShownForest | None
    drafters: tuple[DrafterRate, ...]
    tree: str | None
    seconds: float
    left_out: tuple[str, ...]
    complete: bool
