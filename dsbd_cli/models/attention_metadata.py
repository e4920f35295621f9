"""Slots that the nodes of a forward see, split into prompt slots and suffix as models/forest_attention.py says.

Shape letters as there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsbd_cli.ops.cpu.attention import SlotPaths
from dsbd_cli.ops.processor import on_amd

PROMPT_SLOTS_STEP = 32  # prompt slots are counted in steps of this size: torch uses another kernel for a remainder
LEAST_PROMPT_SLOTS = 64  # a shorter prompt is all suffix
QUERY_STEP = 4  # queries are filled up to such steps: torch uses another kernel for fewer than four remaining rows
# Torch takes queries in blocks of a multiple of 32. Where heads are wider than 64, it also uses another kernel for a
# remainder of fewer than 12 rows: in float32, and in half types where the processor multiplies these as float32. On
# AMD's processors it does not.
QUERY_BLOCK, LEAST_REST, NARROW_DIM = 32, 12, 64
LEAST_SUFFIX = 16  # slots: torch uses another kernel for products of fewer than twelve columns
AttentionFunction = Callable[..., Tensor | None]
"""The operation `Ops.attention` with its argument `exact` bound."""
PathKernel = Callable[..., Tensor]
"""The operation `Ops.path_attention`."""
PromptKernel = Callable[..., tuple[Tensor, Tensor]]
"""The operation `Ops.prompt_attention`."""
# exp2 takes the same time for every number; exp takes longer where its result is zero or subnormal
MASKED = torch.finfo(torch.float32).min


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask [R, 1, n, S] that is added to scores, of the slots that nodes see [R, n, S] bool. It holds no
    -inf, because a row of nothing else would give NaN."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


@dataclass(slots=True)
class LayerMask:
    """The mask of the layers of one kind, and what these layers need of it, which is computed once for all of them.

    Attributes:
        additive: [R, 1, n, S], added to scores. seen: [R, n, S] bool, the same. whole: all nodes see all prompt slots.
        paths: the suffix slots that each node sees. suffix: [R, 1, 1, n, T] float32, added to the scores of the suffix.
        heads: by number of queries, what is added to the scores of prompt slots.
    """

    additive: Tensor
    seen: Tensor
    whole: bool
    paths: SlotPaths | None = None
    suffix: Tensor | None = None
    heads: dict[int, Tensor] = field(default_factory=dict)


class AttentionMetadata:
    """Slots that the nodes of the current forward see, split into prompt slots and suffix. Made once per forward and
    used by every layer.

    Attributes:
        prompt_slots: number of leading slots of each row that count as prompt slots.
        width: T, number of slots of the suffix.
        used: number of layers that have attended by it or by `across`. A layer with an attention function of its own
            does not.
        across: metadata of the source's places, which the nodes see in addition to their own slots; None without a
            source.
    """

    def __init__(
        self,
        prompt_slots: tuple[int, ...],
        suffix: int,
        *,
        masked: bool = False,
        kernel: AttentionFunction | None = None,
        path_attention: PathKernel | None = None,
        prompt_attention: PromptKernel | None = None,
        prompt: Tensor | None = None,
        positions: Tensor | None = None,
        fast: bool = False,
    ) -> None:
        """prompt_slots: leading slots of each row that hold its prompt. suffix: number of slots behind them that may
        hold anything.

        masked: all slots are prompt slots, rounded up to whole steps, and those past a row's own number are masked.
        Otherwise the number is rounded down, and the suffix begins with the remainder.

        kernel: serves the layers that it fits. prompt [R]: number of leading slots of a row that the kernel takes as
        prompt slots. path_attention: serves suffixes whose slots are listed. prompt_attention: serves prompt slots that
        all nodes see. positions [R, S]: depth of the token in each slot; None: the slots themselves are in order of
        depth. fast: no bits are promised, and torch serves the layers that the kernel does not fit.
        """
        self.fast = fast
        self.kernel = None if prompt is None else kernel
        self.path_attention = path_attention
        self.prompt_attention = prompt_attention
        self.prompt = prompt
        if masked:
            self.prompt_slots = tuple(-(-count // PROMPT_SLOTS_STEP) * PROMPT_SLOTS_STEP for count in prompt_slots)
        else:
            self.prompt_slots = tuple(
                0 if count < LEAST_PROMPT_SLOTS else count - count % PROMPT_SLOTS_STEP for count in prompt_slots
            )
        self.used = 0
        rests = (count - own for count, own in zip(prompt_slots, self.prompt_slots, strict=True))
        self.width = 0 if masked else suffix + max(rests)
        self.across: AttentionMetadata | None = None
        self._masks: dict[object, LayerMask] = {}  # by address and shape of the mask that the model is given
        self._all_suffix: AttentionMetadata | None = None
        self._positions = positions
        self._at: Tensor | None = None
        self._counts: Tensor | None = None

    def add(self, additive: Tensor, seen: Tensor, whole: bool) -> None:
        """Register the mask of one kind of layer: additive [R, 1, n, S], which the model is given, and seen [R, n, S]
        bool.

        whole: all nodes see all prompt slots.
        """
        self._masks[self._key(additive)] = LayerMask(additive, seen, whole)

    def all_suffix(self) -> AttentionMetadata:
        """Return the same with no prompt slots, for layers that the fused kernel cannot serve."""
        if self._all_suffix is None:
            slots = max(one.seen.shape[-1] for one in self._masks.values())
            self._all_suffix = AttentionMetadata(
                (0,) * len(self.prompt_slots), slots, path_attention=self.path_attention, positions=self._positions
            )
            for one in self._masks.values():
                self._all_suffix.add(one.additive, one.seen, whole=True)
        return self._all_suffix

    def of(self, mask: Tensor | None) -> tuple[AttentionMetadata, Tensor] | None:
        """Return the metadata that the mask was registered with, which is this one or `across`, and the mask. None for
        a mask that the model has made itself.

        A layer without a mask reads the whole source, because the tokens of the answer always have a mask.
        """
        if mask is not None and self.knows(mask):
            return self, mask
        if self.across is not None and (mask is None or self.across.knows(mask)):
            return self.across, next(iter(self.across._masks.values())).additive
        return None

    def knows(self, mask: Tensor | None) -> bool:
        """Return whether the mask was given to `add`; a model may make masks of its own."""
        return mask is not None and self._key(mask) in self._masks

    def served(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor | None:
        """Return the attention that the kernel computes; None where it does not serve this kind of layer."""
        one = self._masks[self._key(mask)]
        if not one.whole:
            return None
        assert self.kernel is not None
        return self.kernel(query, key, value, one.seen, self.prompt, scale)

    def paths(self, mask: Tensor) -> SlotPaths:
        """Return the suffix slots that each node sees, in order of depth."""
        one = self._masks[self._key(mask)]
        if one.paths is None:
            width = self._suffix_width(one.seen.shape[-1])
            one.paths = SlotPaths.of(one.seen, self.counts, width, self._positions)
        return one.paths

    def suffix(self, mask: Tensor) -> Tensor:
        """Return the mask [R, 1, 1, n, T] float32 that is added to the scores of the suffix."""
        one = self._masks[self._key(mask)]
        if one.suffix is None:
            rows, nodes, slots = one.seen.shape
            places = self._suffix_slots(slots, one.seen.device)
            at = places.unsqueeze(1).expand(-1, nodes, -1)
            found = one.seen.gather(2, at.clamp(max=slots - 1)) & (at < slots)
            hidden = torch.full((rows, 1, 1, nodes, at.shape[2]), MASKED, device=one.seen.device)
            one.suffix = hidden.masked_fill_(found[:, None, None], 0.0)
        return one.suffix

    def _suffix_slots(self, slots: int, device: torch.device) -> Tensor:
        """Return the slots [R, T] int64 of the suffix. Numbers past the last slot stand for no slot."""
        if self._at is None:
            at = torch.arange(self._suffix_width(slots), device=device)
            if len(set(self.prompt_slots)) == 1:  # always on a GPU, where a capture takes nothing from the host
                self._at = (at + self.prompt_slots[0]).expand(len(self.prompt_slots), -1)
            else:
                self._at = torch.tensor(self.prompt_slots, device=device).unsqueeze(1) + at
        return self._at

    def _suffix_width(self, slots: int) -> int:
        """Return T. A source may be all prompt slots."""
        return max(LEAST_SUFFIX, min(self.width, slots - min(self.prompt_slots)))

    def head(self, mask: Tensor, queries: int) -> Tensor | None:
        """Return the mask [R, 1, m, S] whose prompt slots are added to their scores; None where nothing is masked. The
        nodes are repeated to fill m queries."""
        one = self._masks[self._key(mask)]
        if one.whole:
            return None
        if queries not in one.heads:
            nodes = torch.arange(queries, device=mask.device) % one.additive.shape[2]
            one.heads[queries] = one.additive[:, :, nodes]
        return one.heads[queries]

    @property
    def counts(self) -> Tensor:
        """`prompt_slots` as [R, 1] int64."""
        if self._counts is None:
            self._counts = torch.tensor(self.prompt_slots).unsqueeze(1)
        return self._counts

    def head_for(self, mask: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the mask of `head` for queries [R, H * G, n, E] and keys [R, H, S, E]."""
        _, heads, count, dim = query.shape
        return self.head(mask, filled_queries(heads, key.shape[1], count, dim))

    def pick(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the suffix [R, H, T, E] of keys or values [R, H, S, E]. Slots past the last one are 0."""
        rows, heads, slots, dim = states.shape
        width = self._suffix_slots(slots, states.device).shape[1]
        if len(set(self.prompt_slots)) == 1 and self.prompt_slots[0] + width <= slots:
            # each head's numbers side by side: otherwise a product would copy them number by number
            part = states[:, :, self.prompt_slots[0] : self.prompt_slots[0] + width]
            return part.to(dtype, memory_format=torch.contiguous_format).contiguous()
        found = states.new_empty((rows, heads, width, dim), dtype=dtype)
        for row, start in enumerate(self.prompt_slots):  # one index over rows and slots would copy number by number
            part = states[row, :, start : start + width]
            found[row, :, : part.shape[1]] = part
            found[row, :, part.shape[1] :] = 0
        return found

    @staticmethod
    def _key(mask: Tensor) -> object:
        return mask.data_ptr(), mask.shape


def filled_queries(heads: int, kv_heads: int, count: int, dim: int) -> int:
    """Return m, the number of queries per kv head that torch's kernel is given so that the bits of each stay the
    same."""
    queries = heads // kv_heads * count
    missing = -queries % QUERY_STEP
    rest = (queries + missing) % QUERY_BLOCK
    if 0 < rest < LEAST_REST and dim > NARROW_DIM and not on_amd():
        missing += LEAST_REST - rest
    return queries + missing
