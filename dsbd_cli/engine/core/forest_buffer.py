"""The nodes of one iteration and their cache slots. Drafters write them, by tensor code or by kernels.

Letters: R requests, W0 roots, K drafts per layer, D layers, N = W0 + D*K nodes, T suffix window, S slots, L tokens of
the backlog.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import ModuleType

import torch
from torch import Tensor

from dsbd_cli.engine.core.beams import Beams
from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.distribution import Warp
from dsbd_cli.engine.core.nodes import DraftDistribution, LayerNodes
from dsbd_cli.engine.core.noise import stream_keys
from dsbd_cli.engine.core.slots import Layout, SlotTable, backlog_slots
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.ops.layout import FIELDS, FLAGS, STREAMS


def warp_tensors(warp: Warp) -> list[Tensor]:
    """Return the settings of each row, in the order in which kernels take them."""
    return [warp.temperature, warp.top_k, warp.top_p, warp.min_p, warp.greedy]


def warp_flags(warp: Warp, *, stops: bool, warps: bool) -> list[bool]:
    """Return what holds for the whole batch, in the order in which kernels take it. stops: there are stop strings;
    warps: the rule samples."""
    cuts = [bool(warp.max_top_k), warp.any_top_p, warp.any_min_p, warp.any_greedy, warp.scope == "beam"]
    return [stops, *(warps and one for one in cuts)]


@dataclass(frozen=True, slots=True)
class ForestSizes:
    """Sizes of a forest. roots, drafts, layers: W0, K and D. slots: S. draft_backlog: L, at least as many as the slots
    in use that the draft has not run; 0 for none. last_position: largest position of the models."""

    roots: int
    drafts: int
    layers: int
    slots: int
    draft_backlog: int = 0
    last_position: int = 2**31 - 1

    @property
    def nodes(self) -> int:
        """N, nodes of a forward."""
        return self.roots + self.layers * self.drafts

    def offset(self, layer: int) -> int:
        """Return the index of the first node of a layer."""
        return 0 if layer == 0 else self.roots + (layer - 1) * self.drafts


class ForestBuffer:
    """Nodes of one iteration, and their cache slots. The roots are in it from the beginning: the beams' pending tokens,
    whose weights are the target's.

    `TensorBuffer` and `KernelBuffer` say who writes the layers below.

    Attributes:
        sizes: of the forest. table: slots of the rows. beams: the live ones.
        keys: [R, D + 1, STREAMS] int64, stream keys.
        distribution: draft distributions that a kernel has recorded, where a rule compares with them.
    """

    def __init__(self, sizes: ForestSizes, beams: Beams, table: SlotTable, keys: Tensor) -> None:
        self.sizes, self.beams, self.table, self.keys = sizes, beams, table, keys
        self.distribution: list[Tensor] = []

    @property
    def nodes(self) -> LayerNodes:
        """All N nodes. The forest must be complete."""
        raise NotImplementedError

    def layer(self, number: int) -> LayerNodes:
        """Return the nodes of a layer."""
        raise NotImplementedError

    def input(self, number: int | None = None) -> ForestInput:
        """Return the input of a forward over the nodes of a layer. None: over all nodes, whose tokens are then in the
        slot table."""
        raise NotImplementedError

    def backlog_and_roots(self) -> ForestInput:
        """Return the input of a forward over the tokens of the backlog and the roots."""
        raise NotImplementedError

    def end(self, layers: int) -> None:
        """Reduce the forest to the roots and the first `layers` layers, the only ones that are written."""
        self.sizes = replace(self.sizes, layers=layers)

    def _range(self, number: int | None) -> tuple[int, int]:
        """Return the index of a layer's first node and the number of its nodes; for None those of all layers
        together."""
        sizes = self.sizes
        if number is None:
            return 0, sizes.nodes
        return sizes.offset(number), sizes.roots if number == 0 else sizes.drafts

    @property
    def _positions(self) -> Tensor:
        return self.table.positions[:, : self.sizes.slots]


class TensorBuffer(ForestBuffer):
    """Nodes that tensor code writes, layer after layer. The layers are joined once: to write each field into one block
    of memory, as kernels do, would take a hundred more operations.

    Attributes:
        layout: slots of the nodes and slots that they see. written: the layers so far.
    """

    def __init__(
        self, sizes: ForestSizes, beams: Beams, table: SlotTable, noise: tuple[Tensor, Tensor], *, legal: bool = False
    ) -> None:
        """noise: row_key, iteration, [R] int64 each. legal: a constraint acts."""
        super().__init__(sizes, beams, table, stream_keys(*noise, sizes.layers + 1))
        rows, roots = beams.token.shape
        device = beams.token.device
        self.layout = layout = Layout.of(table, sizes.nodes, beams.ancestors.shape[2], sizes.slots)
        layer_of = torch.arange(sizes.nodes, device=device) - roots
        layer_of = torch.div(layer_of, sizes.drafts, rounding_mode="floor") + 1
        layer_of[:roots] = 0
        # drafts past the last position can never be accepted, but must be embeddable
        positions = (beams.depth.unsqueeze(1) + layer_of).clamp(max=sizes.last_position)
        table.positions.scatter_(1, layout.slots, positions)
        index = torch.arange(roots, device=device).expand(rows, roots)
        first = LayerNodes(
            token=beams.token,
            parent=index,
            root=index,
            path=beams.path,
            stop_state=beams.stop_state,
            valid=beams.valid,
            ends=torch.zeros_like(beams.valid),
            sampled=torch.zeros_like(beams.valid),
            weight=beams.weight,
            path_tokens=torch.zeros(rows, roots, sizes.layers, dtype=torch.int64, device=device),
            ancestors=beams.ancestors | layout.own[:, :roots],
            drafter_id=torch.zeros_like(index),
            legal_state=beams.legal_state if legal else None,
        )
        self.written = [first]
        self._nodes: LayerNodes | None = None

    @property
    def nodes(self) -> LayerNodes:
        if self._nodes is None:
            first = self.written[0]
            names = [item.name for item in fields(LayerNodes) if getattr(first, item.name) is not None]
            joined = {name: torch.cat([getattr(one, name) for one in self.written], 1) for name in names}
            self._nodes = LayerNodes(**joined)
        return self._nodes

    def layer(self, number: int) -> LayerNodes:
        return self.written[number]

    def end(self, layers: int) -> None:
        assert len(self.written) == layers + 1
        super().end(layers)

    def own(self, number: int) -> Tensor:
        """Return each node's own slot in the suffix window, as a mask [R, n, T] bool, for the nodes of a layer."""
        first, count = self._range(number)
        return self.layout.own[:, first : first + count]

    def input(self, number: int | None = None) -> ForestInput:
        first, count = self._range(number)
        nodes = self.nodes if number is None else self.written[number]
        slots = self.layout.slots[:, first : first + count]
        if number is None:
            self.table.tokens.scatter_(1, slots, nodes.token)
        mask = self.layout.mask(nodes.ancestors)
        return ForestInput(nodes.token, self.table.positions.gather(1, slots), slots, mask, self._positions)

    def draft_backlog(self) -> ForestInput:
        """Return the input of a forward over the last L slots in use: those that the draft has not run, and as many
        others as fill the shape."""
        table = self.table
        behind, mask = backlog_slots(table, self.layout, self.beams.ancestors, self.sizes.draft_backlog)
        known, trash = behind.clamp(min=0), table.positions.shape[1] - 1
        return ForestInput(
            tokens=table.tokens.gather(1, known),
            positions=table.positions.gather(1, known),
            slots=torch.where(behind >= 0, behind, trash),
            mask=mask,
            slot_positions=self._positions,
        )

    def backlog_and_roots(self) -> ForestInput:
        draft_backlog, own = self.draft_backlog(), self.input(0)
        tokens, positions, slots, mask = (
            torch.cat((getattr(draft_backlog, name), getattr(own, name)), 1)
            for name in ("tokens", "positions", "slots", "mask")
        )
        return ForestInput(tokens, positions, slots, mask, self._positions, late=self.sizes.draft_backlog)


class KernelBuffer(ForestBuffer):
    """Nodes that kernels write into one block of memory, of which the layers are views.

    Attributes:
        rule: name of the verification rule. kernel: the module of ops that writes the forest.
        tensors: its output, FIELDS [8, R, N] int64 and FLAGS [3, R, N] bool of ops/layout.py, weight [R, N], path
            tokens [R, N, D], ancestors [R, N, T], mask [R, N, S].
        backlog_input: input of the forward that runs tokens of the backlog before the roots, [3, R, L + W0] int64 and
            mask [R, L + W0, S].
    """

    def __init__(
        self,
        rule: str,
        sizes: ForestSizes,
        beams: Beams,
        table: SlotTable,
        noise: tuple[Tensor, Tensor],
        kernel: ModuleType,
    ) -> None:
        """noise: row_key, iteration, [R] int64 each."""
        rows, nodes, device = len(beams.token), sizes.nodes, beams.token.device

        def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        super().__init__(sizes, beams, table, new(rows, sizes.layers + 1, STREAMS))
        self.rule, self.kernel = rule, kernel
        self.tensors = [
            new(len(FIELDS), rows, nodes),
            new(len(FLAGS), rows, nodes, dtype=torch.bool),
            new(rows, nodes, dtype=torch.float32),
            new(rows, nodes, sizes.layers),
            new(rows, nodes, beams.ancestors.shape[2], dtype=torch.bool),
            new(rows, nodes, sizes.slots, dtype=torch.bool),
        ]
        wide = sizes.draft_backlog + sizes.roots
        slots = sizes.slots if sizes.draft_backlog else 0
        self.backlog_input = [new(3, rows, wide), new(rows, wide, slots, dtype=torch.bool)]
        own = [beams.token, beams.path, beams.stop_state, beams.valid, beams.weight, beams.ancestors, beams.depth]
        own = [value.contiguous() for value in own]  # a single root may be a slice of W beams
        trash = table.positions.shape[1] - 1
        kernel.begin(
            *(own, self._table, list(noise), self.tensors, self.keys, self.backlog_input, trash, sizes.last_position)
        )
        self._nodes: LayerNodes | None = None

    @property
    def nodes(self) -> LayerNodes:
        if self._nodes is None:
            self._nodes = self._part(0, self.sizes.nodes)
        return self._nodes

    def layer(self, number: int) -> LayerNodes:
        return self._part(*self._range(number))

    def input(self, number: int | None = None) -> ForestInput:
        first, count = self._range(number)
        ints, mask = self.tensors[0].narrow(2, first, count), self.tensors[5].narrow(1, first, count)
        return ForestInput(ints[0], ints[7], ints[6], mask, self._positions)

    def backlog_and_roots(self) -> ForestInput:
        (tokens, positions, slots), mask = self.backlog_input[0].unbind(0), self.backlog_input[1]
        return ForestInput(tokens, positions, slots, mask, self._positions, late=self.sizes.draft_backlog)

    def extend(
        self,
        layer: int,
        candidates: Candidates,
        endings: list[Tensor],
        warp: list[Tensor],
        flags: list[bool],
        distribution: bool,
    ) -> None:
        """Draft layer + 1 below the nodes of `layer`, which have these candidates. endings: eos and the stop
        automaton's table. warp, flags: of warp_tensors and warp_flags. distribution: record the distribution that the
        drafts are drawn from."""
        tokens, logprobs, sizes = candidates.tokens.contiguous(), candidates.logprobs.contiguous(), self.sizes
        rows, _, width = tokens.shape
        if distribution and not self.distribution:
            size = (rows, sizes.nodes, width)
            left = tokens.new_empty((2, rows, sizes.layers, sizes.drafts), dtype=torch.float64)
            self.distribution = [tokens.new_empty(size), logprobs.new_empty(size), left]
        shape, record = [sizes.offset(layer), layer, sizes.drafts], self.distribution if distribution else []
        self.kernel.extend(
            *(tokens, logprobs, self.tensors, self._table, self.beams.depth, self.keys, endings, warp, record, shape),
            *(self.rule, flags, sizes.last_position),
        )

    def drafted_distribution(self, layer: int, candidates: Candidates) -> DraftDistribution | None:
        """Return the distribution that the layer below `layer` was drawn from; None where it was not recorded."""
        if not self.distribution:
            return None
        _, log_q, left = self.distribution
        here = log_q.narrow(1, self.sizes.offset(layer), candidates.tokens.shape[1])
        return DraftDistribution(candidates, here, left[0, :, layer], left[1, :, layer])

    @property
    def _table(self) -> list[Tensor]:
        """The slot table's tensors, in the order in which kernels take them."""
        return [self.table.used, self.table.common_prefix, self.table.positions, self.table.tokens]

    def _part(self, first: int, count: int) -> LayerNodes:
        ints, flags, weight, paths, ancestors, _ = (
            value.narrow(2 if place < 2 else 1, first, count) for place, value in enumerate(self.tensors)
        )
        token, parent, root, path, stop_state, drafter_id, _, _ = ints.unbind(0)
        valid, ends, sampled = flags.unbind(0)
        return LayerNodes(
            token, parent, root, path, stop_state, valid, ends, sampled, weight, paths, ancestors, drafter_id
        )
