"""Facts that the attention layers of one forward share, prepared once: which slots each node sees, and how they are
split into prompt slots and suffix (forest.py).

Shape letters as in forest.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.ops.interface import Ops, host_reads
from dsbd_cli.ops.layout import SlotPaths
from dsbd_cli.ops.processor import on_amd

PROMPT_SLOTS_STEP = 32  # prompt slots are counted in steps of this size: torch uses another kernel for a remainder
LEAST_PROMPT_SLOTS = 64  # a shorter prompt is all suffix
QUERY_STEP = 4  # queries are filled up to such steps: torch uses another kernel for fewer than four remaining rows
# Torch takes queries in blocks of a multiple of 32. Where heads are wider than 64, it also uses another kernel for a
# remainder of fewer than 12 rows: in float32, and in half types where the processor multiplies these as float32. On
# AMD's processors it does not.
QUERY_BLOCK, LEAST_REST, NARROW_DIM = 32, 12, 64
LEAST_SUFFIX = 16  # slots: torch uses another kernel for products of fewer than twelve columns
LONG = 2048  # from so many slots on the attention kernel of a GPU also serves forwards whose bits are not promised
Reading = Literal["prefix", "blocks", "all slots"]  # how a prompt is read on a CPU
# exp2 takes the same time for every number; exp takes longer where its result is zero or subnormal
MASKED = torch.finfo(torch.float32).min


@dataclass(eq=False)
class Split:
    """The slots of each row as prompt slots and suffix.

    Attributes:
        prompt_slots: number of leading slots of each row that count as prompt slots, in whole steps.
        width: T, number of slots of the suffix.
        positions: [R, S], depth of the token in each slot; None: the slots are in order of depth.
        exact: a node's bits must not depend on what else is in the forward.
        kernel: the attention kernel of a GPU, which takes the first `prompt` [R] slots of a row as its prompt slots;
            None without one.
    """

    prompt_slots: tuple[int, ...]
    width: int
    positions: Tensor | None = None
    exact: bool = True
    kernel: Callable[..., Tensor | None] | None = None
    prompt: Tensor | None = None

    @classmethod
    def of(cls, prompt_slots: tuple[int, ...], suffix: int, **more: Any) -> Split:
        """Round numbers of prompt slots down to steps; the suffix begins with the remainders. suffix: number of slots
        behind the prompts."""
        steps = tuple(0 if count < LEAST_PROMPT_SLOTS else count - count % PROMPT_SLOTS_STEP for count in prompt_slots)
        remainders = (count - own for count, own in zip(prompt_slots, steps, strict=True))
        return cls(steps, suffix + max(remainders), **more)

    @classmethod
    def without_suffix(cls, prompt_slots: tuple[int, ...]) -> Split:
        """Round numbers of prompt slots up to steps. Those past a row's own number must be masked."""
        return cls(tuple(-(-count // PROMPT_SLOTS_STEP) * PROMPT_SLOTS_STEP for count in prompt_slots), 0)

    @cached_property
    def counts(self) -> Tensor:
        """`prompt_slots` as [R, 1] int64."""
        return torch.tensor(self.prompt_slots).unsqueeze(1)

    def suffix_width(self, slots: int) -> int:
        """Return T where rows have this number of slots. A source may be all prompt slots."""
        return max(LEAST_SUFFIX, min(self.width, slots - min(self.prompt_slots)))

    def suffix_of(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the suffix [R, H, T, E] of keys or values [R, H, S, E]. Slots past the last one are 0."""
        rows, heads, slots, dim = states.shape
        width = self.suffix_width(slots)
        if len(set(self.prompt_slots)) == 1 and self.prompt_slots[0] + width <= slots:
            # each head's numbers side by side: otherwise a product would copy them number by number
            part = states[:, :, self.prompt_slots[0] : self.prompt_slots[0] + width]
            return part.to(dtype, memory_format=torch.contiguous_format).contiguous()
        suffix = states.new_empty((rows, heads, width, dim), dtype=dtype)
        for row, start in enumerate(self.prompt_slots):  # one index over rows and slots would copy number by number
            part = states[row, :, start : start + width]
            suffix[row, :, : part.shape[1]] = part
            suffix[row, :, part.shape[1] :] = 0
        return suffix


class LayerMask:
    """The slots that nodes see in the layers of one kind, and what these layers need of it, computed once for all.

    Attributes:
        seen: [R, n, S] bool.
        split: how the slots are split; None: they are not.
        whole: all nodes see all prompt slots.
        first_slot: slot of the first token of a prompt that is read in blocks; None where nothing is.
    """

    def __init__(
        self, seen: Tensor, dtype: torch.dtype, split: Split | None, *, whole: bool, first_slot: int | None = None
    ) -> None:
        """dtype: of the scores."""
        self.seen, self.split, self.whole, self.first_slot, self._dtype = seen, split, whole, first_slot, dtype
        self._prompt_masks: dict[int, Tensor] = {}  # by number of queries
        self._paths: SlotPaths | None = None

    @cached_property
    def additive(self) -> Tensor:
        """The mask [R, 1, n, S] that is added to scores. It holds no -inf: a row of nothing else would give NaN."""
        mask = torch.zeros(self.seen.shape, dtype=self._dtype, device=self.seen.device)
        return mask.masked_fill_(~self.seen, torch.finfo(self._dtype).min)[:, None]

    def copy(self) -> LayerMask:
        """Return a mask that is not split, with memory of its own."""
        mask = LayerMask(self.seen, self._dtype, None, whole=True)
        mask.additive = self.additive.clone(memory_format=torch.contiguous_format)
        return mask

    @cached_property
    def unsplit(self) -> LayerMask:
        """The same with all slots as suffix."""
        assert self.split is not None
        split = Split((0,) * len(self.seen), self.seen.shape[-1], self.split.positions)
        return LayerMask(self.seen, self._dtype, split, whole=True)

    @cached_property
    def suffix_mask(self) -> Tensor:
        """The mask [R, 1, 1, n, T] float32 that is added to the scores of the suffix."""
        assert self.split is not None
        rows, nodes, slots = self.seen.shape
        starts, device = self.split.prompt_slots, self.seen.device
        # all alike on a GPU, where a capture takes nothing from the host
        first = starts[0] if len(set(starts)) == 1 else torch.tensor(starts, device=device).view(-1, 1, 1)
        places = (torch.arange(self.split.suffix_width(slots), device=device) + first).expand(rows, nodes, -1)
        seen = self.seen.gather(2, places.clamp(max=slots - 1)) & (places < slots)
        hidden = torch.full((rows, 1, 1, nodes, places.shape[2]), MASKED, device=self.seen.device)
        return hidden.masked_fill_(seen[:, None, None], 0.0)

    def paths(self, kernel: ModuleType) -> SlotPaths:
        """Return the suffix slots that each node sees, in order of depth, as the kernel of the suffix reads them."""
        assert self.split is not None
        if self._paths is None:
            width = self.split.suffix_width(self.seen.shape[-1])
            self._paths = kernel.list_slots(self.seen, self.split.counts, width, self.split.positions)
        return self._paths

    def prompt_mask(self, queries: int) -> Tensor | None:
        """Return the mask [R, 1, m, S] whose prompt slots are added to their scores; None where nothing is masked. The
        nodes are repeated to fill m queries."""
        if self.whole:
            return None
        if queries not in self._prompt_masks:
            nodes = torch.arange(queries, device=self.seen.device) % self.seen.shape[1]
            self._prompt_masks[queries] = self.additive[:, :, nodes]
        return self._prompt_masks[queries]


@dataclass(eq=False)
class AttentionMetadata:
    """Facts that the attention layers of one forward share.

    Attributes:
        ops: operations whose kernels serve.
        split: how slots are split into prompt slots and suffix; None: every layer attends to all slots at once.
        first_slot: as in LayerMask.
        by_prefix: a prompt is read by the kernel of prompts where it serves.
        masks: one for each kind of layers.
        source: the places of the source, which nodes see in addition to their own slots; None without a source.
        positions: [R, n] of the nodes.
        slot_positions: [R, S] of the tokens in the slots.
        used: number of layers that have attended by split slots. A layer with an attention function of its own has not.
    """

    ops: Ops
    split: Split | None = None
    first_slot: int | None = None
    by_prefix: bool = False
    masks: list[LayerMask] = field(default_factory=list)
    source: LayerMask | None = None
    positions: Tensor | None = None
    slot_positions: Tensor | None = None
    used: int = 0

    @classmethod
    def of(
        cls,
        batch: ForestInput,
        ops: Ops,
        kernel: Callable[..., Tensor | None] | None,
        reading: Reading,
    ) -> AttentionMetadata:
        """Prepare a forward.

        kernel: the attention kernel of a GPU. reading: how a prompt is read on a CPU; `prefix`: by the kernel of
        prompts, and in blocks where it does not serve.
        """
        metadata = cls(ops, positions=batch.positions, slot_positions=batch.slot_positions)
        kernel = None if batch.prompt is None else kernel
        if batch.prompt_slots is not None and not batch.chain:
            served = {"positions": batch.slot_positions, "kernel": kernel, "prompt": batch.prompt}
            metadata.split = Split.of(batch.prompt_slots, batch.suffix, **served)
        elif kernel is not None and (slots := batch.mask.shape[-1]) >= LONG:
            metadata.split = Split((0,) * len(batch.tokens), slots, None, False, kernel, batch.prompt)
        elif batch.chain:
            metadata.by_prefix = reading == "prefix"
            # on other devices torch's kernels are checked at load
            if reading != "all slots" and batch.prompt_slots is not None and host_reads(batch.tokens.device):
                metadata.first_slot = batch.prompt_slots[0]
        return metadata

    def add(self, seen: Tensor, dtype: torch.dtype, *, whole: bool) -> LayerMask:
        """Add the mask of one kind of layers, in which nodes see the slots `seen` [R, n, S] bool. whole: they see all
        prompt slots."""
        mask = LayerMask(seen, dtype, self.split, whole=whole, first_slot=self.first_slot)
        self.masks.append(mask)
        return mask

    def find(self, additive: Tensor | None) -> LayerMask | None:
        """Return the mask that a layer was given as `additive`, or as a view of it; None where the model has made it
        itself. A layer without a mask reads the whole source, because the tokens of the answer always have a mask."""
        masks = self.masks if self.source is None else [*self.masks, self.source]
        if additive is None:
            return self.source
        for mask in masks:
            if additive is mask.additive:
                return mask
        same = (mask for mask in masks if mask.seen.device == additive.device and additive.is_set_to(mask.additive))
        return next(same, None)


def filled_queries(heads: int, kv_heads: int, count: int, dim: int) -> int:
    """Return m, the number of queries per kv head that torch's kernel is given so that the bits of each stay the
    same."""
    queries = heads // kv_heads * count
    missing = -queries % QUERY_STEP
    rest = (queries + missing) % QUERY_BLOCK
    if 0 < rest < LEAST_REST and dim > NARROW_DIM and not on_amd():
        missing += LEAST_REST - rest
    return queries + missing
