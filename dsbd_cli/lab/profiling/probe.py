"""Observers: which of the target's draws were drafted, layer by layer; the caches' slots, and who holds memory at their
peak."""

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
from dsbd_cli.lab.metrics.memory import peak_rss_bytes, reset_peak_rss
from dsbd_cli.lab.profiling.acceptance import LayerProbe
from dsbd_cli.lab.profiling.watch import Observer
from dsbd_cli.lab.reports.profile_data import Owner
from dsbd_cli.requests import RequestResult

__all__ = ["DraftProbe", "SlotPeak", "SlotProbe", "owners", "peak_bytes", "reset_peak"]


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


def reset_peak(devices: Sequence[torch.device]) -> None:
    """Forget earlier peaks, as far as the system allows it."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    reset_peak_rss()


def peak_bytes(devices: Sequence[torch.device]) -> int:
    """Of the devices where they are GPUs, else of the process."""
    cuda = [device for device in devices if device.type == "cuda"]
    return sum(torch.cuda.max_memory_allocated(device) for device in cuda) if cuda else peak_rss_bytes()


def owners(
    weights: Sequence[tuple[str, int | None]],
    slots: SlotPeak,
    slot_bytes: int,
    reserved_bytes: int,
    num_beams: int,
    peak: int,
    before: int | None,
    apart_bytes: int = 0,
) -> tuple[Owner, ...]:
    """The table. slot_bytes: of one slot in the models that share slots. before: bytes that the process held before it
    loaded a model (0 on a GPU). apart_bytes: cache of a draft with tokens of its own."""
    known = sum(size or 0 for _, size in weights) + reserved_bytes + apart_bytes + (before or 0)
    in_use = slots.total * slot_bytes
    found = [Owner(f"weights, {role}", size) for role, size in weights]
    found += [
        Owner("KV trunk", slots.trunk * slot_bytes, f"{slots.trunk} slots that all live beams of a row share"),
        Owner("KV tail", slots.tail * slot_bytes, f"{slots.tail} slots where beams differ"),
        Owner("KV in flight", slots.in_flight * slot_bytes, f"{slots.in_flight} nodes of one iteration"),
        Owner("KV reserved, free", max(reserved_bytes - in_use, 0), "room to grow, padding"),
    ]
    if apart_bytes:
        found.append(Owner("KV of the draft", apart_bytes, "its own tokens of the same texts, reserved"))
    if before:
        found.append(Owner("Python and libraries", before, "before the models were loaded"))
    if all(size is not None for _, size in weights):
        note = "peak less all of the above" if peak >= known else "peak less all of the above: below what can be told"
        found.append(Owner("workspace", max(peak - known, 0), note))
    else:
        found.append(Owner("workspace", None, "cannot be told here"))
    found.append(Owner("peak", peak, "measured"))
    if num_beams > 1:
        note = f"KV of the same texts held {num_beams} times, without drafts (computed)"
        found.append(Owner("one cache per beam", num_beams * slots.path * slot_bytes, note))
    return tuple(found)
