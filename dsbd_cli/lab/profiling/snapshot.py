"""The forest of one iteration of one prompt, with the verifier's verdict on each node, for people to look at."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.noise import seed_key
from dsbd_cli.engine.drafting.base import DraftContext
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.verify.base import LayerDraws, LayerView
from dsbd_cli.lab.reports.profile_data import NodeOutcome, ShownForest, ShownNode


@dataclass(slots=True)
class _Layer:
    """One verified layer of the row, on the host: live beams as forest nodes, P of pairs, draws and ends."""

    live: dict[int, int]  # forest node -> beam
    distribution: dict[tuple[int, int], float]  # (forest node, token) -> P
    drawn_nodes: set[int]  # drafted nodes that were drawn
    completed: list[tuple[int, int]]  # (forest node, token) drawn and not drafted
    finished: set[tuple[int, int]]


@dataclass(slots=True)
class Snapshot(Observer):
    """An observer that keeps iteration `number` (from 1) of the request with this seed."""

    seed: int
    number: int
    forest: Forest | None = None
    layers: list[_Layer] = field(default_factory=list)
    row: int = 0
    attached: bool = True
    _is_wanted: bool = False

    def drafted(self, context: DraftContext, forest: Forest) -> None:
        """Keep the forest if its row and iteration are the wanted ones."""
        key = int(seed_key(torch.tensor(self.seed, dtype=torch.int64)))
        wanted = (context.row_key == key) & (context.iteration == self.number - 1) & context.beams.valid.any(1)
        self._is_wanted = bool(wanted.any())
        if self._is_wanted:
            self.row, self.forest = int(wanted.to(torch.int8).argmax()), forest

    def verified(self, view: LayerView, draws: LayerDraws) -> None:
        """Keep the layer of the wanted row."""
        if not self._is_wanted:
            return
        row = self.row
        nodes, valid = _numbers(view.node, row), _numbers(view.valid, row)
        live = {node: beam for beam, node in enumerate(nodes) if valid[beam]}
        tokens = view.tokens[row].tolist()
        distribution = view.log_p[row].to(torch.float64).exp().tolist()
        size = len(tokens[0])
        pairs = {
            (node, t): p for node, beam in live.items() for t, p in zip(tokens[beam], distribution[beam], strict=True)
        }
        index, drawn = _numbers(draws.index, row), _numbers(draws.valid, row)
        drawn_nodes, completed = set(), []
        for number, node in enumerate(_numbers(draws.node, row)):
            if drawn[number] and node >= 0:
                drawn_nodes.add(node)
            elif drawn[number]:
                beam, column = divmod(index[number], size)
                completed.append((nodes[beam], tokens[beam][column]))
        ends = torch.nonzero(draws.ends[row]).flatten().tolist()
        finished = {(nodes[at // size], tokens[at // size][at % size]) for at in ends}
        self.layers.append(_Layer(live, pairs, drawn_nodes, completed, finished))

    def shown(self, prompt_id: str, rule: str, verified: int, names: list[str], drafter: str = "") -> ShownForest:
        """Return the tree. verified: layers that yielded a step. names: texts of the tokens, by id. drafter: as in
        MethodConfig."""
        assert self.forest is not None
        forest, row = self.forest, self.row
        nodes: list[ShownNode] = []
        index_of: dict[int, int] = {}
        for number in range(forest.depth + 1):
            layer = forest.layers[number]
            above = self.layers[number - 1] if 0 < number <= verified else None
            log_q, proposers = _drawn(forest, number, row), _proposers(forest, number, row, drafter)
            tokens, parents = _numbers(layer.token, row), _numbers(layer.parent, row)
            valid = _numbers(layer.valid, row)
            for at, token in enumerate(tokens):
                if not valid[at]:
                    continue
                index, parent = forest.offset(number) + at, parents[at]
                pair = (parent, token)
                state = "root" if number == 0 else _outcome(above, index, pair)
                p = above.distribution.get(pair, 0.0) if above is not None and parent in above.live else None
                q = math.exp(log_q[at]) if at < len(log_q) else None
                index_of[index] = len(nodes)
                nodes.append(
                    ShownNode(names[token], number, index_of[parent] if number else None, state, p, q, proposers[at])
                )
            if above is not None:
                drafted = {(parents[at], token) for at, token in enumerate(tokens) if valid[at]}
                nodes += _undrafted(above, number, drafted, index_of, names)
        if verified > forest.depth:
            nodes += _undrafted(self.layers[forest.depth], forest.depth + 1, set(), index_of, names)
        return ShownForest(prompt_id, self.number, rule, forest.num_beams, verified, forest.depth, tuple(nodes))


def _outcome(above: _Layer | None, index: int, pair: tuple[int, int]) -> NodeOutcome:
    """Return what became of a drafted node. above: the verified layer that decides on it; None where none does."""
    if above is None:
        return "unreached"
    if index in above.drawn_nodes:
        return "accepted"
    if pair in above.finished:
        return "finished"
    return "rejected" if pair[0] in above.live else "dead"


def _undrafted(
    layer: _Layer, number: int, drafted: set[tuple[int, int]], index_of: dict[int, int], names: list[str]
) -> list[ShownNode]:
    """Return the pairs that the exact distribution drew and no drafter proposed: live beams, and ended hypotheses.

    number: of their layer. drafted: pairs of (forest node, token) in it. index_of: place of each forest node among the
    shown nodes. names: texts of the tokens, by id.
    """
    ended = sorted(layer.finished - drafted, key=lambda pair: -layer.distribution[pair])
    drawn: list[tuple[NodeOutcome, list[tuple[int, int]]]] = [("completed", layer.completed), ("finished", ended)]
    return [
        ShownNode(names[pair[1]], number, index_of[pair[0]], state, layer.distribution[pair], None)
        for state, pairs in drawn
        for pair in pairs
    ]


def _drawn(forest: Forest, number: int, row: int) -> list[float]:
    """Return log Q of the first nodes of a drafted layer. Nodes beyond them were not drawn from a distribution."""
    distribution = forest.distributions[number - 1] if number else None
    drawn: list[float] = [] if distribution is None else distribution.log_drawn[row].tolist()
    return drawn


def _proposers(forest: Forest, number: int, row: int, drafter: str) -> list[str | None]:
    """Return which of two drafters proposed each node of a layer; None for roots, and where there is one drafter."""
    layer = forest.layers[number]
    names = drafter.split("+")
    if not number or len(names) == 1:
        return [None] * layer.token.shape[1]
    return [names[drafter_id] for drafter_id in _numbers(layer.drafter_id, row)]


def _numbers(value: Tensor, row: int) -> list[int]:
    numbers: list[int] = value[row].tolist()
    return numbers
