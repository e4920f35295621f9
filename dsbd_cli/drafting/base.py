"""What a drafter is given and what it returns. A drafter never looks at the target's logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsbd_cli.core.beams import Beams
from dsbd_cli.core.forest import Forest, LayerNodes
from dsbd_cli.core.pool import DraftRequest
from dsbd_cli.core.probs import Warp
from dsbd_cli.core.slots import SlotTable
from dsbd_cli.core.stops import StopTable

__all__ = ["DraftContext", "Drafter", "DrawRule", "Endings", "own_bit", "roots"]


class DrawRule(Protocol):
    """What a drafter needs of a verification rule (see verify.base.Rule)."""

    drafts_end: bool
    warps: bool

    def candidates(self, num_beams: int, num_eos: int, max_top_k: int, vocab_size: int) -> int:
        """Candidates per node that are enough to find every draw."""
        ...

    def draft(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Draw pairs of the draft's pool: flat index [R, K] and which are real."""
        ...


@dataclass(slots=True)
class Endings:
    """Which pairs end a sequence: end tokens [V] bool and the stop automaton."""

    eos: Tensor
    stops: StopTable

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Stop states after the tokens. state [R, n]; tokens [R, n] or [R, n, C]."""
        if self.stops.used:
            return self.stops.step(state, tokens)
        return torch.ones_like(tokens)

    def ends(self, state: Tensor, tokens: Tensor) -> Tensor:
        """[R, n, C] bool (or [R, n])."""
        ending = self.eos[tokens]
        return ending | (self.stops.step(state, tokens) == 0) if self.stops.used else ending


@dataclass(slots=True)
class DraftContext:
    """One iteration as a drafter sees it.

    Attributes:
        beams, table: live beams and slots. rule: how drafts are drawn. warp, endings: the rows' settings.
        depth: D. drafts_per_layer: K. window: T, tail window. slots: S, active cache slots. trash: slot absent nodes
            write to.
        row_key, iteration: [R] int64. lag: most used slots of a row that the draft has not run, or more.
        record_law: the layer laws Q are needed.
    """

    beams: Beams
    table: SlotTable
    rule: DrawRule
    warp: Warp
    endings: Endings
    depth: int
    drafts_per_layer: int
    slots: int
    trash: int
    row_key: Tensor
    iteration: Tensor
    lag: int
    record_law: bool


class Drafter(Protocol):
    """Proposes a forest. `calls` is how many draft forwards the last proposal took."""

    calls: int

    def propose(self, context: DraftContext) -> Forest:
        """Roots and D layers of K nodes."""
        ...


def own_bit(table: SlotTable, offset: int, count: int, window: int) -> Tensor:
    """[R, count, T] bool: each of the nodes offset .. offset+count sees its own slot."""
    relative = (table.used - table.trunk).unsqueeze(1) + torch.arange(offset, offset + count, device=table.used.device)
    return relative.unsqueeze(-1) == torch.arange(window, device=table.used.device)


def roots(beams: Beams, table: SlotTable, depth: int) -> LayerNodes:
    """Layer 0: the beams' pending tokens. Root weights are the target's."""
    rows, width = beams.token.shape
    index = torch.arange(width, device=beams.token.device).expand(rows, width)
    return LayerNodes(
        token=beams.token,
        parent=index,
        root=index,
        path=beams.path,
        stop_state=beams.stop_state,
        valid=beams.valid,
        ends=torch.zeros_like(beams.valid),
        weight=beams.weight,
        path_tokens=torch.zeros(rows, width, depth, dtype=torch.int64, device=beams.token.device),
        ancestors=beams.ancestors | own_bit(table, 0, width, beams.ancestors.shape[-1]),
    )
