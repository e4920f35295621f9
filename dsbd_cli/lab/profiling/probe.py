"""An observer that takes down, of every layer, which of the target's draws were drafted; and slots of the caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.noise import seed_key
from dsbd_cli.engine.drafting.base import DraftContext
from dsbd_cli.engine.verify.base import LayerDraws, LayerView, Rule
from dsbd_cli.engine.verify.rejection import draft_law_at
from dsbd_cli.engine.verify.width import expected_width
from dsbd_cli.lab.profiling.acceptance import LayerProbe
from dsbd_cli.lab.profiling.watch import Observer
from dsbd_cli.requests import RequestResult

__all__ = ["DraftProbe", "SlotPeak", "SlotProbe"]


class DraftProbe(Observer):
    """Collects LayerProbes by (row key, iteration). Reads back to the host, so nothing is timed beside it."""

    def __init__(self, drafts: Sequence[int], num_beams: int, threshold: float | None) -> None:
        """drafts: values of K' whose widths are estimated, with the threshold t; None for fixed width."""
        self._drafts, self._num_beams, self._threshold = drafts, num_beams, threshold
        self._layers: dict[tuple[int, int], list[LayerProbe]] = {}
        self._offsets: list[int] = []

    def proposed(self, context: DraftContext, forest: Forest) -> None:
        """Where the layers of the forest begin."""
        self._offsets = [forest.offset(layer) for layer in range(forest.depth + 1)]

    def verified(self, rule: Rule, view: LayerView, draws: LayerDraws) -> None:
        """Look the layer's draws up among the drafts, at full width whatever width was in use."""
        if view.drafts is None:
            return
        if view.dynamic:
            draws = rule.verify(replace(view, width=torch.full_like(view.width, view.num_beams), dynamic=False))
        drafts = view.drafts
        parents = (drafts.parent - self._offsets[view.layer]).tolist()
        real, live = drafts.valid.tolist(), draws.valid.tolist()
        places = torch.where(draws.node >= 0, draws.node - drafts.offset, -1).tolist()
        widths = self._widths(view)
        for row, key in enumerate(zip(view.row_key.tolist(), view.iteration.tolist(), strict=True)):
            taken = tuple(place for place, valid in zip(places[row], live[row], strict=True) if valid)
            estimate = {k: column[row] for k, column in widths.items()} if widths else None
            probe = LayerProbe(tuple(parents[row]), tuple(real[row]), taken, estimate)
            if view.layer == 0:
                self._layers[key] = []  # a free row keeps its old key: what it says is written over
            self._layers.setdefault(key, []).append(probe)

    def _widths(self, view: LayerView) -> dict[int, list[int]]:
        if self._threshold is None or view.drafts is None:
            return {}
        q = draft_law_at(view, view.drafts).exp()
        p = view.log_p.flatten(1).to(torch.float64).exp()
        beams = self._num_beams
        return {k: expected_width(p, q, k, self._threshold, 1, beams).tolist() for k in self._drafts}

    def chains(self, results: Sequence[RequestResult]) -> list[list[LayerProbe]]:
        """The layers that the walks of these results really looked at; the results need their step logs."""
        chains = []
        for result in results:
            key = int(seed_key(torch.tensor(result.request.seed, dtype=torch.int64)))
            for number, step in enumerate(result.stats.step_log):
                chains.append(self._layers[key, number][: len(step.layers)])
        return chains


@dataclass(slots=True)
class SlotPeak:
    """Slots of all rows at the iteration that used most of them. path: tokens of the rows' beams, prompts included."""

    trunk: int = 0
    tail: int = 0
    in_flight: int = 0
    path: int = 0

    @property
    def total(self) -> int:
        """Slots in use."""
        return self.trunk + self.tail + self.in_flight


@dataclass(slots=True)
class SlotProbe(Observer):
    """Watches the caches fill up."""

    num_beams: int
    peak: SlotPeak = field(default_factory=SlotPeak)

    def proposed(self, context: DraftContext, forest: Forest) -> None:
        """Count the slots of rows that hold a request."""
        live = context.beams.valid.any(1)
        used, trunk = context.table.used, context.table.trunk
        columns = (trunk, used - trunk, context.beams.depth + 1, live.to(torch.int64))
        trunk_sum, tail, path, rows = _sums(columns, live)
        now = SlotPeak(trunk_sum, tail, rows * forest.offset(forest.depth + 1), path)
        if now.total > self.peak.total:
            self.peak = now


def _sums(columns: Sequence[Tensor], live: Tensor) -> list[int]:
    sums: list[int] = (torch.stack(list(columns)) * live).sum(1).tolist()
    return sums
