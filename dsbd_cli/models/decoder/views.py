"""Ways in which the nodes of one forward attend to cached keys: by a mask, by the first slots of each row, or by a list
of slots for each node.

A program holds copies of a forward's views. For a later forward of the same shape their contents are replaced.

Letters: R rows, n nodes, m = R * n, Q query heads, K kv heads, E head dim, S slots, T suffix slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dsbd_cli.models.attention_metadata import AttentionMetadata
from dsbd_cli.models.forest_attention import Blocks, Scoring, attention, prompt_attention
from dsbd_cli.ops import run
from dsbd_cli.ops.cpu.attention import SlotPaths

LEAST_PADDED = 64  # slots that a program has room for in a path, and between its ends; more are a power of two


class View(Protocol):
    """The way in which the nodes of one forward attend to cached keys, in all layers with the same window."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Return attention [R, n, Q, E] of query [R, Q, n, E] over planes [R', S', K, E]."""
        ...

    def key(self) -> Hashable:
        """Return the properties that a program depends on. None: no program can hold the view, because a later forward
        of its shape may differ in more than the contents of tensors."""
        ...

    def copy(self) -> View:
        """Return a copy for a program, with room for longer paths."""
        ...

    def load(self, given: Any) -> None:
        """Replace the contents of this copy by those of another view of its kind with the same key."""
        ...


@dataclass(slots=True)
class PrefixView:
    """A view of the first slots of each row, as many as each node sees, for a CPU kernel.

    counts: [R, n or 1] int64, how many. kernel: Ops.prompt_attention. rows: [R] int64, rows of the planes; None for the
    first ones.
    """

    counts: Tensor
    kernel: Callable[..., tuple[Tensor, Tensor]]
    rows: Tensor | None = None

    def part(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return attention [R, K, m, E] and its natural log-sums [R, K, m]."""
        key, value = keys.transpose(1, 2), values.transpose(1, 2)
        return self.kernel(query, key, value, self.counts, scale, rows=self.rows)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
        assert softcap is None
        found = self.part(query, keys, values, scale)[0]
        return run.compute(lambda: found.view(query.shape).transpose(1, 2).contiguous())

    def key(self) -> Hashable:
        return self.counts.shape, self.rows is None

    def copy(self) -> PrefixView:
        return replace(self, counts=self.counts.clone(), rows=None if self.rows is None else self.rows.clone())

    def load(self, given: PrefixView) -> None:
        self.counts.copy_(given.counts)
        if self.rows is not None and given.rows is not None:
            self.rows.copy_(given.rows)


@dataclass(slots=True)
class PathView:
    """A view that lists the slots which each node sees, for a CPU kernel that joins them with the prompt slots.

    prompt_slots: leading slots of each row that torch's attention serves, none or one number per row. paths: the other
    slots. head: [R, 1, m, S or fewer], added to the scores of prompt slots; None where all nodes see all of them.
    kernel: Ops.path_attention. prompt: serves the prompt slots in place of torch.
    """

    prompt_slots: tuple[int, ...]
    paths: SlotPaths
    head: Tensor | None
    kernel: Callable[..., Tensor]
    prompt: PrefixView | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
        key, value = (plane[: len(query)].transpose(1, 2) for plane in (keys, values))
        known: tuple[Tensor, Tensor] | None = None
        if self.prompt is not None:
            known = self.prompt.part(query, keys, values, scale)
        elif max(self.prompt_slots, default=0):
            known = run.compute(lambda: prompt_attention(self.prompt_slots, query, key, value, self.head, scale))
        return self.kernel(self.paths, query, key, value, scale, prompt_part=known, softcap=softcap)

    def key(self) -> Hashable:
        return self.prompt is None, self.prompt_slots, _padded(self.paths.slots.shape[2]), _padded(self.paths.span)

    def copy(self) -> PathView:
        paths = self.paths
        slots = torch.zeros(*paths.slots.shape[:2], _padded(paths.slots.shape[2]), dtype=torch.int32)
        slots[:, :, : paths.slots.shape[2]].copy_(paths.slots)
        wide = SlotPaths(slots, paths.counts.clone(), paths.bounds.clone(), _padded(paths.span), 0)
        head = None if self.head is None else self.head.clone(memory_format=torch.contiguous_format)
        return PathView(self.prompt_slots, wide, head, self.kernel, None if self.prompt is None else self.prompt.copy())

    def load(self, given: PathView) -> None:
        self.paths.slots[:, :, : given.paths.slots.shape[2]].copy_(given.paths.slots)
        self.paths.counts.copy_(given.paths.counts)
        self.paths.bounds.copy_(given.paths.bounds)
        if self.head is not None and given.head is not None:
            self.head.copy_(given.head)
        if self.prompt is not None and given.prompt is not None:
            self.prompt.load(given.prompt)


def _padded(size: int) -> int:
    """Return how many slots a program has room for, where a forward has `size` of them."""
    return max(LEAST_PADDED, 1 << (size - 1).bit_length())


@dataclass(slots=True)
class MaskView:
    """A view by a mask [R, 1, n, S] that is added to the scores. rows: [R], rows of the planes; None for the first
    ones.

    metadata: how the slots are split, or the blocks in which a prompt is read; None: torch's attention takes all slots.
    """

    mask: Tensor
    rows: Tensor | None = None
    metadata: AttentionMetadata | Blocks | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
        active = self.mask.shape[-1]

        def attended() -> Tensor:
            seen = [plane[:, :active] for plane in (keys, values)]
            seen = [one[: len(query)] if self.rows is None else one.index_select(0, self.rows) for one in seen]
            key, value = (one.transpose(1, 2) for one in seen)
            found = attention(self.metadata, query, key, value, self.mask, Scoring(scale, softcap))
            assert found is not None, "the mask is one of all heads"
            return found

        return run.compute(attended)

    def key(self) -> Hashable:
        return self.mask.shape if self.rows is None and self.metadata is None else None

    def copy(self) -> MaskView:
        return replace(self, mask=self.mask.clone(memory_format=torch.contiguous_format))

    def load(self, given: MaskView) -> None:
        self.mask.copy_(given.mask)
