"""Counters of one iteration, on the host. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SECOND = 1  # drafter id of the second of two drafters
SOURCE_BITS = 10  # of a count in the sum of drafter ids: a layer has fewer nodes than 2 ** SOURCE_BITS


class RowCounters(NamedTuple):
    """Counters of a row in one iteration.

    Attributes:
        done: its request has ended, or is invalid. invalid: the target returned NaN. Both are 0 or 1.
        steps: steps taken. width_sum: live beams, summed over the steps.
        used, common_prefix, drafted: slots of the row in use, slots that all live beams share, slots that the draft has
            run.
    """

    done: int
    invalid: int
    steps: int
    width_sum: int
    used: int
    common_prefix: int
    drafted: int


class LayerCounters(NamedTuple):
    """Counters of a drafted layer of a row.

    Attributes:
        reached: 0 where verification stopped above, else 1. drafted: valid nodes, also where the layer was not reached.
        live_parents: valid nodes below a live beam. width: live beams that the layer had to yield.
        accepted: live draws that were drafted. passed: 0 or 1.
        needed: number of drafts, in draw order, that were enough to fill the layer; 0 where it did not pass. With two
            drafters only drafts of the first count.
        drafted_by, accepted_by: the same counts by `drafter_id`: the sums of these numbers over the nodes.
    """

    reached: int = 0
    drafted: int = 0
    live_parents: int = 0
    width: int = 0
    accepted: int = 0
    passed: int = 0
    needed: int = 0
    drafted_by: int = 0
    accepted_by: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Counters of every row and of its drafted layers, from the first one down, and the number of draft forwards."""

    rows: Sequence[RowCounters]
    layers: Sequence[Sequence[LayerCounters]]
    draft_calls: int
