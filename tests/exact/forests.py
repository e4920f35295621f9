"""Drafters over table models, scalar and enumerable, and the decoder that verifies what they propose.

A forest is a list of layers of nodes; a node's pair is (index of its parent in the layer above, token). All of it is
drafted before anything is tested, as an engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.oracles.choice import normalise, without
from tests.oracles.mixed import MixedRule, Node, parent_nodes, pool_nodes
from tests.oracles.rules import Chooser, Distribution, Pair, beam_step

from .trees import ROOT, Beam, Model, Path, child

Layers = list[list[Node]]
Propose = Callable[[Model, dict[int, Beam], int, Chooser], Layers]


def rows(model: Model, beams: dict[int, Beam]) -> dict[Pair, float]:
    """q(v | beam) of each beam, as masses over pairs; each row sums to 1."""
    distribution = {}
    for index, beam in beams.items():
        distribution.update(
            {(index, token): mass for (_, token), mass in model.pool({0: Beam(beam.path, 0.0)}).distribution.items()}
        )
    return distribution


def below(model: Model, beams: dict[int, Beam], nodes: list[Node]) -> dict[int, Beam]:
    """The nodes as beams with their draft weights."""
    pool = model.pool(beams)
    return {index: child(beams, pool, node.pair) for index, node in enumerate(nodes)}


def draw(distribution: Distribution, count: int, chooser: Chooser) -> list[Pair]:
    distribution, pairs = normalise(distribution), []
    while distribution and len(pairs) < count:
        pairs.append(chooser.draw(distribution, "draft"))
        distribution = without(distribution, pairs[-1])
    return pairs


def layered(extend: Callable[[Model, dict[int, Beam], Chooser], list[Node]]) -> Propose:
    """A drafter that proposes one layer after another."""

    def propose(model: Model, beams: dict[int, Beam], depth: int, chooser: Chooser) -> Layers:
        layers: Layers = []
        for _ in range(depth):
            layers.append(extend(model, beams, chooser))
            beams = below(model, beams, layers[-1])
        return layers

    return propose


def pool(count: int) -> Propose:
    """The beam drafter: `count` draws from the pool of the layer."""

    def extend(model: Model, beams: dict[int, Beam], chooser: Chooser) -> list[Node]:
        distribution = model.pool(beams).distribution
        return pool_nodes(distribution, draw(distribution, count, chooser))

    return layered(extend)


def constant(branches: int) -> Propose:
    """RSD-C: every node gets `branches` children, drawn from its row."""

    def extend(model: Model, beams: dict[int, Beam], chooser: Chooser) -> list[Node]:
        distribution = rows(model, beams)
        pairs = [
            pair
            for index in beams
            for pair in draw({pair: mass for pair, mass in distribution.items() if pair[0] == index}, branches, chooser)
        ]
        return parent_nodes(distribution, pairs)

    return layered(extend)


def best(count: int) -> Propose:
    """Deterministic: the `count` likeliest pairs of the draft's pool."""

    def extend(model: Model, beams: dict[int, Beam], chooser: Chooser) -> list[Node]:
        distribution = model.pool(beams).distribution
        return [Node(pair) for pair in sorted(distribution, key=lambda pair: -distribution[pair])[:count]]

    return layered(extend)


def mixed(sampled: int, others: int, drop: bool = True, last: bool = True) -> Propose:
    """Draws from the pool and the likeliest pairs below all nodes; what was drawn already is dropped, or stays twice.

    last: sampled nodes first.
    """

    def extend(model: Model, beams: dict[int, Beam], chooser: Chooser) -> list[Node]:
        distribution = model.pool(beams).distribution
        drawn = draw(distribution, sampled, chooser)
        ranked = sorted(distribution, key=lambda pair: -distribution[pair])[:others]
        fixed = [Node(pair) for pair in ranked if not drop or pair not in drawn]
        return pool_nodes(distribution, drawn) + fixed if last else fixed + pool_nodes(distribution, drawn)

    return layered(extend)


def stochastic(
    count: int, order: str = "value", nodes_of: Callable[[Distribution, list[Pair]], list[Node]] = parent_nodes
) -> Propose:
    """RSD-S: stochastic beam search (Kool et al. 2019), the `count` largest perturbed log-probabilities of every layer.

    The perturbed values of a layer are those of the leaves, each node's being the largest below it. So the nodes of all
    layers, in descending order, are the first distinct prefixes of leaves drawn without replacement: enumerable without
    any real number. order: `value` as drawn, over all parents; `parent`: regrouped, one parent after another.
    known: what is recorded of the draws.
    """

    def propose(model: Model, beams: dict[int, Beam], depth: int, chooser: Chooser) -> Layers:
        levels: list[list[tuple[int, Path]]] = []
        for level in range(depth, 0, -1):
            masses = _prefix_masses(model, beams, level)
            # the order of the finer level goes on in the coarser one; further prefixes in order of their own draws
            prefixes = list(dict.fromkeys((root, path[:level]) for root, path in (levels[0] if levels else [])))
            rest = normalise({prefix: mass for prefix, mass in masses.items() if prefix not in prefixes})
            while rest and len(prefixes) < count:
                prefixes.append(chooser.draw(rest, "draft"))  # type: ignore[arg-type]
                rest = normalise({prefix: mass for prefix, mass in rest.items() if prefix != prefixes[-1]})
            levels.insert(0, prefixes)
        layers: Layers = []
        above: list[tuple[int, Path]] = [(root, ()) for root in beams]
        for prefixes in levels:
            pairs = [(above.index((root, path[:-1])), path[-1]) for root, path in prefixes]
            names = list(prefixes)
            if order == "parent":
                ranked = sorted(range(len(pairs)), key=lambda at: pairs[at][0])
                pairs, names = [pairs[at] for at in ranked], [names[at] for at in ranked]
            nodes = {index: Beam((*beams[root].path, *path), 0.0) for index, (root, path) in enumerate(above)}
            layers.append(nodes_of(rows(model, nodes), pairs))
            above = names
        return layers

    return propose


def _prefix_masses(model: Model, beams: dict[int, Beam], level: int) -> dict[tuple[int, Path], float]:
    """Probability of every path of `level` tokens below the beams, which are as likely as their weights say."""
    distribution: dict[tuple[int, Path], float] = {}
    share = {
        index: sum(mass for pair, mass in model.pool(beams).distribution.items() if pair[0] == index) for index in beams
    }
    front = {(index, ()): share[index] for index in beams}
    for _ in range(level):
        distribution = {}
        for (root, path), mass in front.items():
            row = rows(model, {0: Beam((*beams[root].path, *path), 0.0)})
            distribution.update({(root, (*path, token)): mass * chance for (_, token), chance in row.items()})
        front = distribution
    return distribution


def dynamic(budget: int) -> Propose:
    """DySpec, greedy: always below the entry of the largest value, until `budget` nodes are drawn."""

    def propose(model: Model, beams: dict[int, Beam], depth: int, chooser: Chooser) -> Layers:
        layers: Layers = [[] for _ in range(depth)]
        heap = [
            (1.0 / len(beams), 0, index, Beam(beam.path, 0.0), normalise(rows(model, {index: beam})))
            for index, beam in beams.items()
        ]
        drawn = 0
        while heap and drawn < budget:
            heap.sort(key=lambda entry: -entry[0])
            value, layer, index, beam, distribution = heap.pop(0)
            pair = chooser.draw(distribution, "draft")
            drawn += 1
            layers[layer].append(Node.drawn(pair, distribution))
            chance, rest = distribution[pair], without(distribution, pair)
            if rest:
                heap.append((value * (1 - chance), layer, index, beam, rest))
            if layer + 1 < depth:
                name = len(layers[layer]) - 1
                after = Beam((*beam.path, pair[1]), 0.0)
                heap.append((value * chance, layer + 1, name, after, normalise(rows(model, {name: after}))))
        return layers

    return propose


def by_value(count: int) -> Propose:
    """DySpec in layers: the `count` draws of the largest value, which is known before each draw."""

    def propose(model: Model, beams: dict[int, Beam], depth: int, chooser: Chooser) -> Layers:
        layers: Layers = []
        front = {index: (1.0 / len(beams), beam) for index, beam in beams.items()}
        for _ in range(depth):
            distribution = rows(model, {index: beam for index, (_, beam) in front.items()})
            left = {index: normalise({p: m for p, m in distribution.items() if p[0] == index}) for index in front}
            worth = {index: value for index, (value, _) in front.items()}
            pairs, values = [], []
            while any(left.values()) and len(pairs) < count:
                index = max((index for index in left if left[index]), key=lambda index: worth[index])
                pair = chooser.draw(left[index], "draft")
                pairs.append(pair)
                values.append(front[index][0] * distribution[pair])
                worth[index] -= values[-1]
                left[index] = without(left[index], pair)
            layers.append(parent_nodes(distribution, pairs))
            front = {
                number: (values[number], Beam((*front[parent][1].path, token), 0.0))
                for number, (parent, token) in enumerate(pairs)
            }
        return layers

    return propose


@dataclass(frozen=True)
class DraftSetting:
    """One iteration of D = `depth` layers with W = `full_width`, then plain beam sampling up to `steps` steps."""

    target: Model
    draft: Model
    full_width: int
    depth: int
    propose: Propose
    steps: int = 2
    ends: frozenset[int] = frozenset()
    rule: MixedRule = field(default_factory=MixedRule)
    start: Mapping[int, Beam] = field(default_factory=lambda: ROOT)


Record = tuple[tuple[Beam, ...], ...]


def decode(setting: DraftSetting, chooser: Chooser) -> tuple[Record, int]:
    """Ordered draws of each step, and how many layers passed."""
    live = dict(setting.start)
    layers = setting.propose(setting.draft, live, setting.depth, chooser)
    record: list[tuple[Beam, ...]] = []
    passed = 0
    for nodes in layers:
        distribution = setting.target.pool(live)
        width = setting.full_width
        result = setting.rule.verify_nodes(distribution.distribution, nodes, setting.ends, width, width, chooser)
        record.append(tuple(child(live, distribution, item.pair) for item in result.draws))
        live = {
            item.source if result.passed and item.source is not None else number: child(live, distribution, item.pair)
            for number, item in enumerate(result.live)
        }
        passed += result.passed
        if not result.passed or len(record) == setting.steps:
            break
    return (*record, *_plain(setting, live, setting.steps - len(record), chooser)), passed


def plain(setting: DraftSetting, chooser: Chooser) -> Record:
    """The distribution to reproduce."""
    return _plain(setting, dict(setting.start), setting.steps, chooser)


def _plain(setting: DraftSetting, live: dict[int, Beam], steps: int, chooser: Chooser) -> Record:
    record = []
    for _ in range(steps):
        distribution = setting.target.pool(live)
        drawn = [
            child(live, distribution, pair)
            for pair in beam_step(distribution.distribution, setting.ends, setting.full_width, chooser)
        ]
        record.append(tuple(drawn))
        live = dict(enumerate(beam for beam in drawn if beam.path[-1] not in setting.ends))
    return tuple(record)
