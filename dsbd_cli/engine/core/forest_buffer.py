"""The nodes of one iteration and their cache slots. Drafters write them, by tensor code or by kernels.

Letters: R requests, W0 roots, K drafts per layer, D layers, N = W0 + D*K nodes, T suffix window, S slots, L tokens of
the backlog.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from operator import itemgetter
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
from dsbd_cli.ops.layout import BEGIN, EXTEND, FIELDS, FLAGS, empty

# no kernel writes legal states
_of_nodes = itemgetter(*(item.name for item in fields(LayerNodes) if item.name != "legal_state"))


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
        distribution: draft distributions that a kernel has recorded, where a rule compares with them: the fields of
            `draft` in ops/layout.py.
    """

    def __init__(self, sizes: ForestSizes, beams: Beams, table: SlotTable, keys: Tensor) -> None:
        self.sizes, self.beams, self.table, self.keys = sizes, beams, table, keys
        self.distribution: dict[str, Tensor] = {}

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
        forest, backlog: its results, by the fields that ops/layout.py declares for these owners.
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
        rows, window, slots, device = len(beams.token), beams.ancestors.shape[2], sizes.slots, beams.token.device
        shape = {"rows": rows, "depth": sizes.layers, "backlog_nodes": sizes.draft_backlog + sizes.roots}
        super().__init__(sizes, beams, table, empty("noise", device, **shape)["keys"])
        self.rule, self.kernel = rule, kernel
        self.forest = empty("forest", device, nodes=sizes.nodes, window=window, slots=slots, **shape)
        self.backlog = empty("backlog", device, slots=slots if sizes.draft_backlog else 0, **shape)
        state = dict(zip(("row_key", "iteration"), noise, strict=True))
        tensors = BEGIN.gather(
            beam=beams, table=table, state=state, forest=self.forest, noise={"keys": self.keys}, backlog=self.backlog
        )
        kernel.begin(tensors, table.positions.shape[1] - 1, sizes.last_position)
        numbers, flags = self.forest["numbers"].unbind(0), self.forest["flags"].unbind(0)
        self._all = dict(zip(FIELDS + FLAGS, numbers + flags, strict=True))
        self._all |= {name: value for name, value in self.forest.items() if name not in ("numbers", "flags")}
        self._layers = [self._all]
        if sizes.layers:  # a call for each field: to cut out one layer after the other takes several times as long
            counts = [sizes.roots] + [sizes.drafts] * sizes.layers
            parts = zip(*(value.split_with_sizes(counts, 1) for value in self._all.values()), strict=True)
            self._layers = [dict(zip(self._all, part, strict=True)) for part in parts]
        self._nodes: LayerNodes | None = None

    @property
    def nodes(self) -> LayerNodes:
        if self._nodes is None:
            self._nodes = LayerNodes(*_of_nodes(self._views(None)))
        return self._nodes

    def layer(self, number: int) -> LayerNodes:
        return LayerNodes(*_of_nodes(self._layers[number]))

    def input(self, number: int | None = None) -> ForestInput:
        own = self._views(number)
        return ForestInput(own["token"], own["position"], own["slot"], own["mask"], self._positions)

    def backlog_and_roots(self) -> ForestInput:
        tokens, positions, slots = self.backlog["numbers"].unbind(0)
        mask = self.backlog["mask"]
        return ForestInput(tokens, positions, slots, mask, self._positions, late=self.sizes.draft_backlog)

    def extend(
        self,
        layer: int,
        candidates: Candidates,
        endings: Mapping[str, Tensor],
        warp: Warp,
        flags: list[bool],
        distribution: bool,
    ) -> None:
        """Draft layer + 1 below the nodes of `layer`, which have these candidates. endings: the end tokens `eos` and
        the table `stops` of the stop automaton. flags: of warp_flags. distribution: record the distribution that the
        drafts are drawn from."""
        sizes, (rows, _, count) = self.sizes, candidates.tokens.shape
        if distribution and not self.distribution:
            shape = {"rows": rows, "nodes": sizes.nodes, "depth": sizes.layers, "drafts": sizes.drafts}
            self.distribution = empty("draft", self.keys.device, draft_candidates=count, **shape)
        tensors = EXTEND.gather(
            beam=self.beams, table=self.table, forest=self.forest, noise={"keys": self.keys}, candidate=candidates,
            draft=self.distribution if distribution else {}, endings=endings, warp=warp,
        )  # fmt: skip
        first = sizes.offset(layer)
        self.kernel.extend(tensors, first, layer, sizes.drafts, sizes.last_position, self.rule, flags)

    def drafted_distribution(self, layer: int, candidates: Candidates) -> DraftDistribution | None:
        """Return the distribution that the layer below `layer` was drawn from; None where it was not recorded."""
        if not self.distribution:
            return None
        left = self.distribution["log_left"]
        here = self.distribution["log_q"].narrow(1, self.sizes.offset(layer), candidates.tokens.shape[1])
        return DraftDistribution(candidates, here, left[0, :, layer], left[1, :, layer])

    def _views(self, number: int | None) -> dict[str, Tensor]:
        """Return what kernels write about the nodes of a layer, by name; None: about all nodes."""
        if number is not None:
            return self._layers[number]
        if self.sizes.layers == len(self._layers) - 1:
            return self._all
        return {name: value.narrow(1, 0, self.sizes.nodes) for name, value in self._all.items()}  # a gate ended it
