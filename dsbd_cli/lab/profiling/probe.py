"""Memory: the slots of the caches, and which owner holds what at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsbd_cli.lab.reports.profile_data import MemoryOwner


@dataclass(frozen=True, slots=True)
class SlotPeak:
    """Slots of all rows at the iteration that used the most. path: tokens of one beam of each row, prompts included."""

    common_prefix: int = 0
    suffix: int = 0
    in_flight: int = 0
    path: int = 0

    @property
    def total(self) -> int:
        """Slots in use."""
        return self.common_prefix + self.suffix + self.in_flight


def owners(
    weights: Sequence[tuple[str, int | None]],
    slots: SlotPeak,
    slot_bytes: int,
    reserved_bytes: int,
    num_beams: int,
    peak: int,
    before: int | None,
) -> tuple[MemoryOwner, ...]:
    """Return the table of owners of memory.

    weights: role and bytes of each model, None where they are not known. slot_bytes: of one slot in the models that
    share slots. reserved_bytes: of the caches. before: bytes that the process held before it loaded a model (0 on a
    GPU). The cache of a bridged draft, which has tokens of its own, is in the workspace.
    """
    known = sum(size or 0 for _, size in weights) + reserved_bytes + (before or 0)
    in_use = slots.total * slot_bytes
    found = [MemoryOwner(f"weights, {role}", size) for role, size in weights]
    found += [
        MemoryOwner(
            "KV common prefix",
            slots.common_prefix * slot_bytes,
            f"{slots.common_prefix} slots that all live beams of a row share",
        ),
        MemoryOwner("KV suffix", slots.suffix * slot_bytes, f"{slots.suffix} slots where beams differ"),
        MemoryOwner("KV in flight", slots.in_flight * slot_bytes, f"{slots.in_flight} nodes of one iteration"),
        MemoryOwner("KV reserved, free", max(reserved_bytes - in_use, 0), "room to grow, padding"),
    ]
    if before:
        found.append(MemoryOwner("Python and libraries", before, "before the models were loaded"))
    if all(size is not None for _, size in weights):
        note = "peak less all of the above" if peak >= known else "peak less all of the above: below what can be told"
        found.append(MemoryOwner("workspace", max(peak - known, 0), note))
    else:
        found.append(MemoryOwner("workspace", None, "cannot be told here"))
    found.append(MemoryOwner("peak", peak, "measured"))
    if num_beams > 1:
        note = f"KV of the same texts held {num_beams} times, without drafts (computed)"
        found.append(MemoryOwner("one cache per beam", num_beams * slots.path * slot_bytes, note))
    return tuple(found)
