"""Drafts of all that a grammar allows, where that is few tokens: keys, punctuation, the values of an enumeration. There
is no draft model.

Below a beam every token that may follow is drafted, and below these tokens again, as long as a layer has room for all
of them. If that holds for all live beams of a row, then whatever the target draws is a drafted node, so the layer is
certain to pass. End tokens are not drafted, because no layer needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from dsbd_cli.engine.constraints.grammar import GrammarState, GrammarTable
from dsbd_cli.engine.constraints.legal import FREE
from dsbd_cli.engine.core.beams import Beams
from dsbd_cli.engine.drafting.base import DraftContext, DrafterInputs
from dsbd_cli.engine.drafting.paths import PathDrafter, Paths, beam_share
from dsbd_cli.engine.drafting.text import PromptTable
from dsbd_cli.engine.planning.planner import Prospects

LEAST_SHARE = 1e-30  # least share of a beam, because the weight of a path is above 0
Layer = list[tuple[int, int, GrammarState]]  # place of the parent in the layer above, token, state after it


class GrammarDrafter(PathDrafter):
    """A drafter by the grammar alone: its paths are all that the grammar allows."""

    on_host = True
    needs_text = False

    def __init__(self, table: GrammarTable) -> None:
        self._table = table

    def states(self, beams: Beams) -> list[list[GrammarState | None]]:
        """Return the state of every beam, None where it is not live or has no grammar. It reads the states from the
        device."""
        numbers = torch.where(beams.valid, beams.legal_state, FREE).tolist()
        return [[self._table.at(number) if number < FREE else None for number in row] for row in numbers]

    def paths(self, context: DraftContext) -> Paths:
        """Return the paths below each beam, found for each beam as if it were alone. They divide its share of the
        mass."""
        depth, count = context.depth, context.drafts_per_layer
        proposed: list[list[tuple[int, list[int], float]]] = []
        for states, shares in zip(self.states(context.beams), beam_share(context.beams).tolist(), strict=True):
            proposed.append([])
            for beam, (state, share) in enumerate(zip(states, shares, strict=True)):
                paths = [] if state is None else _leaves(_layers([state], depth, count))
                proposed[-1] += [(beam, path, max(share, LEAST_SHARE) / len(paths)) for path in paths]
        return _padded(proposed, depth, context.beams.token.device)

    def prospects(self, beams: Beams, prompts: PromptTable | None, depth: int, count: int) -> Prospects:
        """Return 1 for layers that are certain to pass, and 0 for all others."""
        rows = []
        for states, runs in zip(self.states(beams), beams.valid.any(1).tolist(), strict=True):
            live = [state for state in states if state is not None]
            if runs:
                rows.append([len(layer) for layer in _layers(live, depth, count)] if live else [])
        return certain(rows)


def certain(rows: Sequence[Sequence[int]]) -> Prospects:
    """Return the prospects of rows whose layers, of these numbers of nodes, are certain to pass."""
    needed = [list(accumulate(row, max)) for row in rows]
    counts = sorted({number for row in needed for number in row}) or [1]
    depth = max([1, *map(len, needed)])
    chances = np.zeros((len(rows), len(counts), depth))
    for row, numbers in enumerate(needed):
        chances[row, :, : len(numbers)] = np.array(counts)[:, None] >= np.array(numbers)
    return Prospects(counts, chances)


def _layers(states: Sequence[GrammarState], depth: int, count: int) -> list[Layer]:
    """Return all tokens that may follow these states, layer by layer. Stop after `depth` layers, or before a layer that
    needs more than `count` nodes."""
    layers: list[Layer] = []
    above = list(states)
    while len(layers) < depth:
        layer: Layer = []
        for parent, state in enumerate(above):
            tokens = state.following(count - len(layer))
            if tokens is None:
                return layers
            for token in tokens:
                after = state.after(token)
                assert after is not None, "it may follow"
                layer.append((parent, token, after))
        if not layer:
            return layers
        layers.append(layer)
        above = [state for _, _, state in layer]
    return layers


def _leaves(layers: Sequence[Layer]) -> list[list[int]]:
    """Return the paths of one beam, one for every node below which nothing is drafted."""
    paths: list[list[int]] = [[]]
    leaves: list[list[int]] = []
    for layer in layers:
        parents = {parent for parent, _, _ in layer}
        leaves += [path for index, path in enumerate(paths) if path and index not in parents]
        paths = [[*paths[parent], token] for parent, token, _ in layer]
    return [*leaves, *(path for path in paths if path)]


def _padded(paths: Sequence[Sequence[tuple[int, list[int], float]]], depth: int, device: torch.device) -> Paths:
    """Return beam, tokens and weight of the paths of every row as tensors, padded with absent paths."""
    most = max(1, *map(len, paths))
    rows = [[*row, *[(0, [], 1.0)] * (most - len(row))] for row in paths]
    return Paths(
        root=torch.tensor([[beam for beam, _, _ in row] for row in rows], device=device),
        tokens=torch.tensor([[path + [0] * (depth - len(path)) for _, path, _ in row] for row in rows], device=device),
        length=torch.tensor([[len(path) for _, path, _ in row] for row in rows], device=device),
        weight=torch.tensor([[weight for _, _, weight in row] for row in rows], device=device),
    )


def make(inputs: DrafterInputs) -> GrammarDrafter:
    """Make drafter `grammar`."""
    return GrammarDrafter(inputs.grammars)
