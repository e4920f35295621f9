"""Scalar twin of rule `rejection` over layers whose nodes come from anywhere: each drawn from a law of its own, or
deterministic."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tests.oracles.choice import normalise, without
from tests.oracles.rules import Chooser, Draw, Law, LayerResult, Pair, RejectionRule

__all__ = ["MixedRule", "Node", "parent_nodes", "pool_nodes", "row_of"]


@dataclass(frozen=True, slots=True)
class Node:
    """A drafted pair. law: Q'_j, the exact law it was drawn from given the nodes before it in the layer; None for a
    deterministic node."""

    pair: Pair
    law: tuple[tuple[Pair, float], ...] | None = None

    @classmethod
    def drawn(cls, pair: Pair, law: Law) -> Node:
        """A sampled node."""
        return cls(pair, tuple(law.items()))


def pool_nodes(law: Law, pairs: Iterable[Pair]) -> list[Node]:
    """Nodes drawn one after another without replacement from one law over the whole pool."""
    law, nodes = normalise(law), []
    for pair in pairs:
        nodes.append(Node.drawn(pair, law))
        law = without(law, pair)
    return nodes


def row_of(law: Law, parent: int) -> dict[Pair, float]:
    """The law given the parent."""
    return normalise({pair: mass for pair, mass in law.items() if pair[0] == parent})


def parent_nodes(law: Law, pairs: Iterable[Pair]) -> list[Node]:
    """Nodes drawn without replacement from the row of their parent, in the order of the draws."""
    rows, nodes = {parent: row_of(law, parent) for parent in {pair[0] for pair in law}}, []
    for pair in pairs:
        nodes.append(Node.drawn(pair, rows[pair[0]]))
        rows[pair[0]] = without(rows[pair[0]], pair)
    return nodes


class MixedRule(RejectionRule):
    """Sampled nodes are tested in order against P' and the law that each was drawn from; deterministic ones are not
    tested but drawn: the missing draws come from P', then from P, and one that is a node is taken as that node.

    So a deterministic node v is accepted with probability P'(v), and not drawing it leaves P' without v (point-mass
    verification), whatever the order of the nodes.
    """

    def law_of(self, node: Node, before: Sequence[Node]) -> Law | None:
        """Q'_j of a node, None where it is not to be tested."""
        return None if node.law is None else dict(node.law)

    def verify_nodes(
        self,
        target: Law,
        nodes: Sequence[Node],
        ends: Collection[int],
        width: int,
        full_width: int,
        chooser: Chooser,
    ) -> LayerResult:
        """One layer, as RejectionRule.verify."""
        draws: list[Draw] = []
        target = normalise(target)
        residual: Law = target
        for number, node in enumerate(nodes):
            if sum(not draw.ends for draw in draws) == width:
                break
            law = self.law_of(node, nodes[:number])
            if law is None:
                continue
            if chooser.accept(self.accept_probability(residual, law, node.pair), number):
                draws.append(Draw(node.pair, number, node.pair[1] in ends))
                target = residual = self.take(target, node.pair)
            else:
                residual = self.after_rejection(target, residual, law)
        pairs = [node.pair for node in nodes]
        return self.complete(target, residual, draws, pairs, ends, width, full_width, chooser)
