"""The nodes of one iteration in one piece of memory, as the kernels `begin` and `extend` write them.

Letters: R requests, W0 roots, K drafts per layer, D layers, N = W0 + D*K nodes, T tail window, S slots. A forest over a
sheet is views of it, so that whatever reads a forest may read this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsbd_cli.engine.core.beams import Beams
from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.distribution import Warp
from dsbd_cli.engine.core.nodes import DraftLaw, LayerNodes
from dsbd_cli.engine.core.noise import STREAMS
from dsbd_cli.engine.core.slots import SlotTable
from dsbd_cli.engine.protocols import ForestInput

__all__ = ["ForestBuffer", "warp_flags", "warp_tensors"]


def warp_tensors(warp: Warp) -> list[Tensor]:
    """Settings of each row, as kernels take them."""
    return [warp.temperature, warp.top_k, warp.top_p, warp.min_p, warp.cold]


def warp_flags(warp: Warp, *, stops: bool, warps: bool) -> list[bool]:
    """Return what the host knows of all rows, as kernels take it. stops: there are stop strings; warps: the rule
    samples."""
    cuts = [bool(warp.max_top_k), warp.any_top_p, warp.any_min_p, warp.any_cold, warp.scope == "beam"]
    return [stops, *(warps and one for one in cuts)]


@dataclass(slots=True)
class ForestBuffer:
    """Memory of one iteration, and what kernels need to know of it.

    Attributes:
        rule: name of the verification rule. roots, drafts: W0 and K. last_position: largest position of a model.
        tensors: FIELDS [8, R, N] int64 and FLAGS [3, R, N] bool of ops/triton/draft.py, weight [R, N], path tokens
            [R, N, D], ancestors [R, N, T], mask [R, N, S].
        keys: [R, D + 1, STREAMS] int64. joined: input of the forward that runs late tokens before the roots.
        table: used, trunk, positions, tokens; depth: [R] int64, position of the roots.
        law: of `extend`, where a rule compares with it; made at the first layer.
    """

    rule: str
    roots: int
    drafts: int
    last_position: int
    tensors: list[Tensor]
    keys: Tensor
    joined: list[Tensor]
    table: list[Tensor]
    depth: Tensor
    law: list[Tensor] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        rule: str,
        beams: Beams,
        table: SlotTable,
        noise: tuple[Tensor, Tensor],
        *,
        layers: int,
        drafts: int,
        slots: int,
        late: int,
        last_position: int,
    ) -> ForestBuffer:
        """With the roots in it. noise: row_key, iteration. layers: D. slots: S. late: tokens that the draft has not
        run, 0 for none."""
        from dsbd_cli.ops.triton import draft

        (rows, roots), device = beams.token.shape, beams.token.device
        nodes, window = roots + layers * drafts, beams.ancestors.shape[2]

        def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self = cls(
            rule,
            roots,
            drafts,
            last_position,
            [
                new(len(draft.FIELDS), rows, nodes),
                new(len(draft.FLAGS), rows, nodes, dtype=torch.bool),
                new(rows, nodes, dtype=torch.float32),
                new(rows, nodes, layers),
                new(rows, nodes, window, dtype=torch.bool),
                new(rows, nodes, slots, dtype=torch.bool),
            ],
            new(rows, layers + 1, STREAMS),
            [new(3, rows, late + roots), new(rows, late + roots, slots if late else 0, dtype=torch.bool)],
            [table.used, table.trunk, table.positions, table.tokens],
            beams.depth,
        )
        own = [beams.token, beams.path, beams.stop_state, beams.valid, beams.weight, beams.ancestors, beams.depth]
        own = [value.contiguous() for value in own]  # one root alone may be a part of W beams
        trash = table.positions.shape[1] - 1
        draft.begin(own, self.table, list(noise), self.tensors, self.keys, self.joined, trash, last_position)
        return self

    @property
    def layers(self) -> int:
        """D."""
        return self.keys.shape[1] - 1

    @property
    def nodes(self) -> LayerNodes:
        """All N nodes."""
        return self.part(0, self.tensors[2].shape[1])

    def part(self, first: int, count: int) -> LayerNodes:
        """The nodes first .. first + count."""
        ints, flags, weight, paths, ancestors, _ = (
            value.narrow(2 if place < 2 else 1, first, count) for place, value in enumerate(self.tensors)
        )
        token, parent, root, path, stop_state, source, _, _ = ints.unbind(0)
        valid, ends, sampled = flags.unbind(0)
        return LayerNodes(token, parent, root, path, stop_state, valid, ends, sampled, weight, paths, ancestors, source)

    def layer(self, number: int) -> LayerNodes:
        """The nodes of a layer."""
        if number == 0:
            return self.part(0, self.roots)
        return self.part(self.offset(number), self.drafts)

    def offset(self, layer: int) -> int:
        """Index of the first node of a layer."""
        return 0 if layer == 0 else self.roots + (layer - 1) * self.drafts

    def input(self, first: int, count: int) -> ForestInput:
        """Return the input of a forward over the nodes first .. first + count."""
        ints, mask = self.tensors[0].narrow(2, first, count), self.tensors[5].narrow(1, first, count)
        return ForestInput(ints[0], ints[7], ints[6], mask, self._positions)

    def late(self) -> ForestInput:
        """Return the input of a forward over the late tokens and the roots."""
        (tokens, positions, slots), mask = self.joined[0].unbind(0), self.joined[1]
        return ForestInput(tokens, positions, slots, mask, self._positions)

    @property
    def _positions(self) -> Tensor:
        return self.table[2][:, : self.tensors[5].shape[2]]

    def extend(
        self,
        layer: int,
        candidates: Candidates,
        endings: list[Tensor],
        warp: list[Tensor],
        flags: list[bool],
        law: bool,
    ) -> None:
        """Draft layer + 1 below `layer`, whose nodes have these candidates. endings: eos and the automaton's table.
        flags: of warp_flags. law: record what the drafts are drawn from."""
        from dsbd_cli.ops.triton import draft

        tokens, logprobs = candidates.tokens.contiguous(), candidates.logprobs.contiguous()
        rows, above, width = tokens.shape
        if law and not self.law:
            size = (rows, self.tensors[2].shape[1], width)
            left = tokens.new_empty((2, rows, self.layers, self.drafts), dtype=torch.float64)
            self.law = [tokens.new_empty(size), logprobs.new_empty(size), left]
        shape, record = [self.offset(layer), above, layer, self.drafts], self.law if law else []
        draft.extend(
            *(tokens, logprobs, self.tensors, self.table, self.depth, self.keys, endings, warp, record, shape),
            *(self.rule, flags, self.last_position),
        )

    def drafted_law(self, layer: int, candidates: Candidates) -> DraftLaw | None:
        """The law below `layer`, where it was recorded."""
        if not self.law:
            return None
        _, log_q, left = self.law
        here = log_q.narrow(1, self.offset(layer), candidates.tokens.shape[1])
        return DraftLaw(candidates, here, left[0, :, layer], left[1, :, layer])
