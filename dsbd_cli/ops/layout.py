"""The layout of what kernels of an iteration write, on every device, and of slots that a kernel lists for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FIELDS = ("token", "parent", "root", "path", "stop_state", "drafter_id", "slot", "position")  # numbers of a node
FLAGS = ("valid", "ends", "sampled")  # of a node
STREAMS = 8  # of noise
FIRST, COLUMNS = 7, 9  # counters of a row before those of its layers, and of each layer


@dataclass(frozen=True, slots=True)
class SlotPaths:
    """The suffix slots that each node sees, in order of depth.

    slots [R, n, T] int32, relative to the row's lowest; counts [R, n] int32, how many of them are used; bounds [R, 2]
    int32: the lowest slot that a node of the row sees, and one past the highest. span: the largest difference of these
    two. total: S.
    """

    slots: Tensor
    counts: Tensor
    bounds: Tensor
    span: int
    total: int
