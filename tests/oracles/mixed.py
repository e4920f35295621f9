"""Scalar reference of rule `rejection` over layers whose nodes come from anywhere: each drawn from a distribution of
its own, or deterministic."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tests.oracles.choice import normalise, without
from tests.oracles.rules import Chooser, Distribution, Draw, LayerResult, Pair, RejectionRule

__all__ = ["MixedRule", "Node", "parent_nodes", "pool_nodes", "row_of"]


@dataclass(frozen=True, slots=True)
class Node:
    """A drafted pair. distribution: Q'_j, the exact distribution it was drawn from given the nodes before it in the
    layer; None for a deterministic node."""

    pair: Pair
    distribution: tuple[tuple[Pair, float], ...] | None = None

    @classmethod
    def drawn(cls, pair: Pair, distribution: Distribution) -> Node:
        """A sampled node."""
        return cls(pair, tuple(distribution.items()))


def pool_nodes(distribution: Distribution, pairs: Iterable[Pair]) -> list[Node]:
    """Nodes drawn one after another without replacement from one distribution over the whole pool."""
    distribution, nodes = normalise(distribution), []
    for pair in pairs:
        nodes.append(Node.drawn(pair, distribution))
        distribution = without(distribution, pair)
    return nodes


def row_of(distribution: Distribution, parent: int) -> dict[Pair, float]:
    """The distribution given the parent."""
    return normalise({pair: mass for pair, mass in distribution.items() if pair[0] == parent})


def parent_nodes(distribution: Distribution, pairs: Iterable[Pair]) -> list[Node]:
    """Nodes drawn without replacement from the row of their parent, in the order of the draws."""
    rows, nodes = {parent: row_of(distribution, parent) for parent in {pair[0] for pair in distribution}}, []
    for pair in pairs:
        nodes.append(Node.drawn(pair, rows[pair[0]]))
        rows[pair[0]] = without(rows[pair[0]], pair)
    return nodes


class MixedRule(RejectionRule):
    """Sampled nodes are tested in order against P' and the distribution that each was drawn from; deterministic ones
    are not tested but drawn: the missing draws come from P', then from P, and one that is a node is taken as that node.

    So a deterministic node v is accepted with probability P'(v), and not drawing it leaves P' without v (point-mass
    verification), whatever the order of the nodes.
    """

    def distribution_of(self, node: Node, before: Sequence[Node]) -> Distribution | None:
        """Q'_j of a node, None where it is not to be tested."""
        return None if node.distribution is None else dict(node.distribution)

    def verify_nodes(
        self,
        target: Distribution,
        nodes: Sequence[Node],
        ends: Collection[int],
        width: int,
        full_width: int,
        chooser: Chooser,
    ) -> LayerResult:
        """One layer, as RejectionRule.verify."""
        draws: list[Draw] = []
        target = normalise(target)
        residual: Distribution = target
        for number, node in enumerate(nodes):
            if sum(not draw.ends for draw in draws) == width:
                break
            distribution = self.distribution_of(node, nodes[:number])
            if distribution is None:
                continue
            if chooser.accept(self.accept_probability(residual, distribution, node.pair), number):
                draws.append(Draw(node.pair, number, node.pair[1] in ends))
                target = residual = self.take(target, node.pair)
            else:
                residual = self.after_rejection(target, residual, distribution)
        pairs = [node.pair for node in nodes]
        return self.complete(target, residual, draws, pairs, ends, width, full_width, chooser)
