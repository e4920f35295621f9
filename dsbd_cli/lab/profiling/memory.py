"""Who holds memory at the peak of a run: weights, keys and values by kind of slot, and what is left as workspace."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsbd_cli.lab.metrics.memory import peak_rss_bytes, reset_peak_rss
from dsbd_cli.lab.profiling.probe import SlotPeak
from dsbd_cli.lab.reports.profile_data import Owner

__all__ = ["owners", "peak_bytes", "reset_peak"]


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
