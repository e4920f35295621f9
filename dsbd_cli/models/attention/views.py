"""Ways in which the nodes of one forward attend to cached keys, in all layers with the same window. `view_of` chooses
among them. Layers of transformers call `attend`, which asks `view_of` where slots are split, and torch elsewhere.

A program holds copies of a forward's views. For a later forward of the same shape their contents are replaced.

Letters: R rows, n nodes, m queries of a kv head, Q query heads, K kv heads, E head dim, S slots, T suffix slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.models.attention.forest import (
    Scoring,
    by_blocks,
    by_kernel,
    by_mask,
    by_parts,
    over_all_slots,
    prompt_attention,
)
from dsbd_cli.models.attention.metadata import AttentionMetadata, LayerMask, filled_queries
from dsbd_cli.ops import recording
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.layout import SlotPaths

LEAST_DIM = 32  # torch uses other kernels for smaller heads
LEAST_PADDED = 64  # slots that a program has room for in a path, and between its ends; more are a power of two


class View:
    """The way in which the nodes of one forward attend, in all layers with the same window."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Return attention [R, n, Q, E] of query [R, Q, n, E] over key and value [R', K, S', E]."""
        raise NotImplementedError

    def key(self) -> Hashable:
        """Return the properties that a program depends on. None: no program can hold the view, because a later forward
        of its shape may differ in more than the contents of tensors."""
        return None

    def copy(self) -> View:
        """Return a copy for a program, with room for longer paths."""
        raise NotImplementedError

    def load(self, other: Any) -> None:
        """Replace the contents of this copy by those of another view of its kind with the same key."""
        raise NotImplementedError


def view_of(
    metadata: AttentionMetadata,
    mask: LayerMask,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    rows: Tensor | None = None,
) -> View:
    """Return the first way that serves layers with this mask.

    Of query [R, Q, n, E], key and value [R', K, S', E] only dtypes, layouts, heads and E count.
    rows: [R], those of key and value; None for the first ones.
    """
    split, paths = mask.split, metadata.ops.path_attention
    # torch reads a source: its leading places are no prompt of ours
    prompts = None if mask is metadata.source else prompt_kernel(metadata.ops, query, key, value, scoring)
    # the kernel of a GPU reads no mask of the prompt and computes no caps
    if split is not None and split.kernel is not None and mask.whole and scoring.plain:
        return MaskView(mask, by_kernel, rows)
    # a prompt is read by the kernel of prompts, which computes each query by itself
    if split is None and metadata.by_prefix and mask.whole and prompts is not None:
        assert mask.seen[..., 0].all(), "each node sees its row from slot 0 on"
        return PrefixView(mask.seen.sum(-1), prompts, rows)
    # no bits are promised, or the nodes are those of a prompt: torch takes all slots at once, or block by block
    if split is None or not split.exact:
        return MaskView(mask, over_all_slots, rows)
    # torch's kernel over the prompt slots offers neither caps nor biases, and no bits for narrow heads
    unlike = key.shape[-1] != value.shape[-1] or key.shape[-1] < LEAST_DIM
    if split.kernel is not None or unlike or scoring.softcap is not None or scoring.bias is not None:
        mask = mask.unsplit
    # kernels of a CPU visit the slots that each node sees
    if paths is not None and paths.fits(query, key, value) and mask.split is not None and mask.split.width:
        queries = filled_queries(query.shape[1], key.shape[1], mask.seen.shape[1], query.shape[3])
        return PathView.of(mask, paths, prompts, queries)
    # torch over all slots of the suffix, in float64
    return MaskView(mask, by_parts, rows)


def prompt_kernel(ops: Ops, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> ModuleType | None:
    """Return the kernel that attends to prompts in layers with such states; None where torch does."""
    kernel = ops.prompt_attention
    return kernel if kernel is not None and scoring.softcap is None and kernel.fits(query, key, value) else None


@dataclass(slots=True)
class LayerViews:
    """Views of a forward of our own decoder, one for each kind of layers: the batch of `Ops.attend`.

    kinds: numbers of views, by layer that attends. scoring: of each layer. planes: returns keys and values
    [R', S', K, E] of a layer.
    """

    views: Sequence[View]
    kinds: Mapping[int, int]
    scoring: Sequence[Scoring]
    planes: Callable[[int], tuple[Tensor, Tensor]]

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Return attention [R, n, Q, E] of a layer's query [R, Q, n, E]."""
        key, value = (plane.transpose(1, 2) for plane in self.planes(layer))
        return self.views[self.kinds[layer]].attend(query, key, value, self.scoring[layer])

    def key(self) -> Hashable:
        """Return the properties that a program depends on; None: no program can hold the views."""
        keys = tuple(view.key() for view in self.views)
        return None if None in keys else keys

    def copy(self) -> LayerViews:
        """Return a copy for a program."""
        return replace(self, views=[view.copy() for view in self.views])

    def load(self, other: LayerViews) -> None:
        """Replace the contents of this copy."""
        for view, given_view in zip(self.views, other.views, strict=True):
            view.load(given_view)


def attend(
    metadata: AttentionMetadata | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: Tensor | None,
    scoring: Scoring,
) -> Tensor | None:
    """Return attention [R, n, Q, E] of query [R, Q, n, E] over key and value [R, K, S, E] in a layer of transformers.

    given: the mask that the layer has. metadata: None outside of a forest. Returns None where torch's own function
    serves (`forest.by_mask`).
    """
    if metadata is not None and (mask := metadata.find(given)) is not None and mask.split is not None:
        if mask is metadata.source:
            scoring = replace(scoring, bias=None)  # T5 passes zeros, because a source has no distance to an answer
        if mask.split.exact or (mask.whole and scoring.plain):
            metadata.used += 1
            return view_of(metadata, mask, query, key, value, scoring).attend(query, key, value, scoring)
    first = None if metadata is None or scoring.bias is not None else metadata.first_slot
    if first is not None and given is not None and given.shape[1] == 1:  # else heads have masks of their own
        return by_blocks(first, query, key, value, given, scoring)
    return by_mask(query, key, value, given, scoring)


@dataclass(slots=True)
class PrefixView(View):
    """A view of the first slots of each row, as many as each node sees, for a CPU kernel.

    counts: [R, n or 1] int64, how many. kernel: Ops.prompt_attention. rows: [R] int64, rows of the planes; None for the
    first ones.
    """

    counts: Tensor
    kernel: ModuleType
    rows: Tensor | None = None

    def part(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return attention [R, K, m, E] and its natural log-sums [R, K, m]."""
        part: tuple[Tensor, Tensor] = self.kernel.attend(query, key, value, self.counts, scale, rows=self.rows)
        return part

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        out, sums = self.part(query, key, value, scoring.scale)

        def compute() -> Tensor:
            result = out
            if scoring.sinks is not None:  # float64 as in forest.by_parts: bits of float32 depend on the place
                sinks = scoring.sinks.double().view(1, key.shape[1], -1, 1).expand(-1, -1, -1, query.shape[2])
                share = (sums.double() - sinks.flatten(2)).sigmoid_()
                result = (out.double() * share.unsqueeze(-1)).to(out.dtype)
            return result.view(query.shape).transpose(1, 2).contiguous()

        return recording.compute(compute)

    def key(self) -> Hashable:
        return self.counts.shape, self.rows is None

    def copy(self) -> PrefixView:
        return replace(self, counts=self.counts.clone(), rows=None if self.rows is None else self.rows.clone())

    def load(self, other: PrefixView) -> None:
        self.counts.copy_(other.counts)
        if self.rows is not None and other.rows is not None:
            self.rows.copy_(other.rows)


@dataclass(slots=True)
class PathView(View):
    """A view that lists the slots which each node sees, for a CPU kernel that joins them with the prompt slots.

    prompt_slots: leading slots of each row that torch's attention serves, none or one number per row. paths: the other
    slots. prompt_mask: [R, 1, m, S or fewer], added to the scores of prompt slots; None where all nodes see all of
    them. kernel: Ops.path_attention. prompt: serves the prompt slots in place of torch.
    """

    prompt_slots: tuple[int, ...]
    paths: SlotPaths
    prompt_mask: Tensor | None
    kernel: ModuleType
    prompt: PrefixView | None = None

    @classmethod
    def of(cls, mask: LayerMask, kernel: ModuleType, prompts: ModuleType | None, queries: int) -> PathView:
        """Return the view of split slots. prompts: Ops.prompt_attention where it serves. queries: m."""
        assert mask.split is not None
        paths, slots = mask.paths(kernel), mask.split.prompt_slots
        if not (most := max(slots)):
            return cls((), paths, None, kernel)
        prompt_mask = mask.prompt_mask(queries)
        if prompt_mask is not None:
            return cls(slots, paths, prompt_mask[..., :most], kernel)
        if prompts is None:
            return cls(slots, paths, None, kernel)
        return cls((), paths, None, kernel, PrefixView(mask.split.counts, prompts))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        key, value, scale = key[: len(query)], value[: len(query)], scoring.scale
        part: tuple[Tensor, Tensor] | None = None
        if self.prompt is not None:
            part = self.prompt.part(query, key, value, scale)
        elif self.prompt_slots:
            part = recording.compute(
                lambda: prompt_attention(self.prompt_slots, query, key, value, self.prompt_mask, scale)
            )
        more = {"softcap": scoring.softcap, "sinks": scoring.sinks, "bias": scoring.bias}
        out: Tensor = self.kernel.attend(self.paths, query, key, value, scale, prompt_part=part, **more)
        return out

    def key(self) -> Hashable:
        return self.prompt is None, self.prompt_slots, _padded(self.paths.slots.shape[2]), _padded(self.paths.span)

    def copy(self) -> PathView:
        paths = self.paths
        slots = torch.zeros(*paths.slots.shape[:2], _padded(paths.slots.shape[2]), dtype=torch.int32)
        slots[:, :, : paths.slots.shape[2]].copy_(paths.slots)
        wide = SlotPaths(slots, paths.counts.clone(), paths.bounds.clone(), _padded(paths.span), 0)
        hidden = None if self.prompt_mask is None else self.prompt_mask.clone(memory_format=torch.contiguous_format)
        prompt = None if self.prompt is None else self.prompt.copy()
        return replace(self, paths=wide, prompt_mask=hidden, prompt=prompt)

    def load(self, other: PathView) -> None:
        self.paths.slots[:, :, : other.paths.slots.shape[2]].copy_(other.paths.slots)
        self.paths.counts.copy_(other.paths.counts)
        self.paths.bounds.copy_(other.paths.bounds)
        if self.prompt_mask is not None and other.prompt_mask is not None:
            self.prompt_mask.copy_(other.prompt_mask)
        if self.prompt is not None and other.prompt is not None:
            self.prompt.load(other.prompt)


def _padded(size: int) -> int:
    """Return how many slots a program has room for, where a forward has `size` of them."""
    return max(LEAST_PADDED, 1 << (size - 1).bit_length())


@dataclass(slots=True)
class MaskView(View):
    """A view by a mask, for a function of forest.py. rows: [R], rows of the planes; None for the first ones."""

    mask: LayerMask
    compute: Callable[[LayerMask, Tensor, Tensor, Tensor, Scoring], Tensor]
    rows: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        def compute() -> Tensor:
            planes = [states.transpose(1, 2)[:, : self.mask.seen.shape[-1]] for states in (key, value)]
            count, rows = len(query), self.rows
            planes = [plane[:count] if rows is None else plane.index_select(0, rows) for plane in planes]
            return self.compute(self.mask, query, planes[0].transpose(1, 2), planes[1].transpose(1, 2), scoring)

        return recording.compute(compute)

    def key(self) -> Hashable:
        fixed = self.compute is over_all_slots and self.rows is None and self.mask.first_slot is None
        return self.mask.seen.shape if fixed else None

    def copy(self) -> MaskView:
        return replace(self, mask=self.mask.copy())

    def load(self, other: MaskView) -> None:
        self.mask.additive.copy_(other.mask.additive)
