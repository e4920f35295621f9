"""Deterministic drafts as weighted paths of tokens below the beams, and the tree they form layer by layer.

Letters: R requests, M paths of a request, D layers, K nodes per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.engine.constraints.legal import DEAD
from dsbd_cli.engine.core.beams import Beams
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.base import DraftContext, Drafter, LayerDrafts, children, following, goes_on


@dataclass(slots=True)
class Paths:
    """Continuations of the beams.

    Attributes:
        root: [R, M] int64, the beam that a path continues.
        tokens: [R, M, D] int64, any id in 0 .. V-1 where a path has ended.
        length: [R, M] int64, tokens of each path; 0: absent.
        weight: [R, M] float32, above 0. The weight of a node of the tree is the sum over the paths through it.
    """

    root: Tensor
    tokens: Tensor
    length: Tensor
    weight: Tensor


def beam_share(beams: Beams) -> Tensor:
    """Return the share of each live beam in the beams' mass: [R, W] float32. By it likelier beams get more nodes."""
    weight = torch.where(beams.valid, beams.weight, NEG_INF)
    return torch.softmax(weight, 1).nan_to_num(nan=0.0)  # a row without live beams


class PathTree:
    """A tree under construction. It knows where each path is in the layer that was built last."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._at = paths.root  # [R, M] place in the layer above, -1 where the path has left the tree
        self._group = paths.root

    def drafts(self, context: DraftContext, forest: Forest, layer: int, count: int) -> LayerDrafts:
        """Return the `count` heaviest nodes below one layer, heaviest first. Their weights are logs."""
        nodes, paths = forest.layers[layer], self._paths
        above, token = self._at.clamp(min=0), paths.tokens[:, :, layer]
        here = (self._at >= 0) & (paths.length > layer)
        here &= (nodes.valid & ~nodes.ends).gather(1, above)
        if not context.drafts_end:
            here &= ~context.endings.ends(nodes.stop_state.gather(1, above), token)
        if context.legal is not None:
            here &= following(context, nodes, above, token) != DEAD
        first = _first_equal(torch.where(here, (above << 40) + token, -1))
        weight = torch.where(here, paths.weight, 0.0)
        total = torch.zeros_like(weight).scatter_add(1, first, weight)
        index = torch.arange(first.shape[1], device=first.device)
        leads = here & (first == index)
        total = torch.where(leads, torch.log(total), NEG_INF)
        order = total.argsort(dim=1, descending=True, stable=True)[:, :count]
        self._group = _positions_of_paths(order, first, here)
        valid = leads.gather(1, order)
        needed = context.num_beams if context.row_beams is None else context.row_beams
        return _pad(
            LayerDrafts(
                above=above.gather(1, order),
                token=token.gather(1, order),
                valid=valid,
                sampled=torch.zeros_like(valid),
                weight=total.gather(1, order),
                confidence=(valid.sum(1) >= needed).to(total.dtype),  # fewer than W cannot pass
            ),
            count - order.shape[1],
        )

    def follow(self, place: Tensor | None = None) -> None:
        """Move every path to its node among those that `drafts` returned.

        place: [R, count] int64, index of each of these nodes in the layer that was made of them, -1 where one was
        dropped; None: the layer has them as `drafts` returned them.
        """
        at = self._group if place is None else place.gather(1, self._group.clamp(min=0))
        self._at = torch.where(self._group >= 0, at, -1)


class PathDrafter(Drafter):
    """A drafter whose drafts are paths. It needs no model, and its nodes are deterministic. Subclasses define
    `paths`."""

    needs_text = True

    def paths(self, context: DraftContext) -> Paths:
        """Return paths of at most context.depth tokens. They may be looked up in context.prompts."""
        raise NotImplementedError

    def propose(self, context: DraftContext) -> Forest:
        """Draft the K heaviest nodes of every layer."""
        count = context.drafts_per_layer
        forest = Forest(context.buffer)
        if context.depth == 0:
            return forest
        tree = PathTree(self.paths(context))
        for layer in range(context.depth):
            drafts = tree.drafts(context, forest, layer, count)
            tree.follow()
            if not goes_on(context, forest, drafts.confidence):
                break
            children(context, forest, layer, drafts)
        return forest


def _first_equal(key: Tensor) -> Tensor:
    """Return for each entry the index of the first entry of its row with the same key: [R, M] int64."""
    order = key.argsort(dim=1, stable=True)
    ranked = key.gather(1, order)
    index = torch.arange(key.shape[1], device=key.device).expand_as(key)
    new = torch.nn.functional.pad(ranked[:, 1:] != ranked[:, :-1], (1, 0), value=True)
    start = torch.where(new, index, 0).cummax(1).values
    return torch.empty_like(order).scatter_(1, order, order.gather(1, start))


def _positions_of_paths(order: Tensor, first: Tensor, here: Tensor) -> Tensor:
    """Return the position of each path's node among the taken entries, -1 where it is not taken: [R, M]. order: [R, m],
    taken entries. first: [R, M], the entry that stands for each path's node. here: [R, M] bool, paths that have a
    node."""
    rank = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank_of_path = torch.full_like(first, -1).scatter(1, order, rank).gather(1, first)
    return torch.where(here, rank_of_path, -1)


def _pad(drafts: LayerDrafts, more: int) -> LayerDrafts:
    """Append `more` absent drafts."""
    if more <= 0:
        return drafts
    pad = torch.nn.functional.pad
    return LayerDrafts(
        above=pad(drafts.above, (0, more)),
        token=pad(drafts.token, (0, more)),
        valid=pad(drafts.valid, (0, more)),
        sampled=pad(drafts.sampled, (0, more)),
        weight=pad(drafts.weight, (0, more), value=NEG_INF),
        confidence=drafts.confidence,
    )
