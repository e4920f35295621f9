"""One-layer cases: a target pool P, a draft pool Q and the sizes of the layer."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from tests.oracles.rules import Pair, pool_distribution

EXACT = 1e-12


@dataclass(frozen=True)
class LayerCase:
    """`drafts` is K, `width` w, `full_width` W; `limit` bounds draws with replacement."""

    name: str
    target: dict[Pair, float]
    draft: dict[Pair, float]
    drafts: int
    width: int
    full_width: int
    ends: frozenset[int] = frozenset()
    limit: int | None = None


def random_row(rng: random.Random, tokens: int, zeros: int = 0) -> dict[int, float]:
    """log p(v | x) of a random next-token distribution with `zeros` impossible tokens."""
    masses = [rng.expovariate(1.0) + 0.01 for _ in range(tokens)]
    for token in rng.sample(range(tokens), zeros):
        masses[token] = 0.0
    total = sum(masses)
    return {token: math.log(mass / total) if mass else -math.inf for token, mass in enumerate(masses)}


def _pool(seed: int, weights: dict[int, float], tokens: int, zeros: int = 0, **warp: object) -> dict[Pair, float]:
    rng = random.Random(seed)
    return pool_distribution(weights, {beam: random_row(rng, tokens, zeros) for beam in weights}, **warp).distribution  # type: ignore[arg-type]


ONE = {0: 0.0}
TWO = {0: -0.3, 1: -1.9}  # unequal weights: the pool must know them
THREE = {0: -0.3, 1: -1.9, 2: -0.8}


def without_replacement_cases() -> list[LayerCase]:
    """Every situation named by the specification, in sizes that can be enumerated."""
    two, both = _pool(3, TWO, 3), _pool(5, THREE, 3)
    return [
        LayerCase("V=5 K=4 w=3", _pool(1, ONE, 5), _pool(2, ONE, 5), 4, 3, 3),
        LayerCase("W=1 K=1", _pool(1, ONE, 5), _pool(2, ONE, 5), 1, 1, 1),
        LayerCase("W=1 K=4 multi-draft", _pool(7, ONE, 5), _pool(2, ONE, 5), 4, 1, 1),
        LayerCase("W=3 K=4, two beams", _pool(14, TWO, 3), _pool(15, TWO, 3), 4, 3, 3),
        LayerCase("two beams, weights", two, _pool(4, TWO, 3), 3, 2, 2),
        LayerCase("draft forgets the weights", two, _pool(4, {0: 0.0, 1: 0.0}, 3), 3, 2, 2),
        LayerCase("dead parent in the draft", two, {p: both[p] for p in both if p[0] != 0}, 3, 2, 2),
        LayerCase("one of three parents live", _pool(3, {1: -0.4}, 3), _pool(6, THREE, 2), 3, 2, 2),
        LayerCase("all parents dead", _pool(3, {0: 0.0}, 4), _pool(4, {1: 0.0}, 4), 3, 2, 2),
        LayerCase("K=0: plain beam sampling", two, {}, 0, 2, 2),
        LayerCase("one end token", _pool(8, ONE, 4), _pool(9, ONE, 4), 4, 2, 2, frozenset({0})),
        LayerCase("two end tokens, two beams", _pool(8, TWO, 3), _pool(9, TWO, 3), 2, 2, 2, frozenset({0, 2})),
        LayerCase("only end tokens", _pool(8, ONE, 3), _pool(9, ONE, 3), 2, 2, 2, frozenset({0, 1, 2})),
        LayerCase("zeros in both", _pool(10, ONE, 5, 2), _pool(11, ONE, 5, 2), 3, 2, 2),
        LayerCase("disjoint supports", {(0, 0): 0.2, (0, 1): 0.5, (0, 4): 0.3}, {(0, 2): 0.6, (0, 3): 0.4}, 2, 2, 2),
        LayerCase("p = q", two, two, 3, 2, 2),
        LayerCase("p = q, K = W = 1", _pool(1, ONE, 5), _pool(1, ONE, 5), 1, 1, 1),
        LayerCase(
            "temperature and top-k", _pool(3, TWO, 4, temperature=0.6, top_k=4), _pool(4, TWO, 4, top_k=3), 3, 2, 2
        ),
        LayerCase(
            "warped per beam",
            _pool(3, TWO, 4, scope="beam", top_k=2),
            _pool(4, TWO, 4, scope="beam", top_p=0.7),
            3,
            2,
            2,
        ),
        LayerCase("top-p, min-p", _pool(12, TWO, 4, top_p=0.8), _pool(13, TWO, 4, min_p=0.2), 3, 3, 3),
        LayerCase("draft support below K", _pool(1, ONE, 5), {(0, 1): 0.7, (0, 3): 0.3}, 4, 3, 3),
        LayerCase("target support below W", {(0, 1): 0.7, (0, 3): 0.3}, _pool(2, ONE, 4), 3, 3, 3),
        LayerCase("nearly one-hot", {(0, 0): 1 - 1e-9, (0, 1): 1e-9}, {(0, 0): 1e-9, (0, 1): 1 - 1e-9}, 2, 1, 1),
    ]


def random_case(seed: int) -> LayerCase:
    """A small layer with anything in it: zeros, end tokens, dead parents, unequal weights, cuts, w = W."""
    rng = random.Random(seed)
    tokens, width = rng.randint(3, 5), rng.randint(1, 3)
    nodes = list(range(rng.randint(1, 3)))
    live = rng.sample(nodes, min(len(nodes), 2))
    pools = []
    for beams in (live, nodes):
        warp = rng.choice([{}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 0.5}, {"scope": "beam", "top_k": 2}])
        weights = {beam: -2.0 * rng.random() for beam in beams}
        pools.append(_pool(rng.randrange(10**6), weights, tokens, rng.choice([0, 0, 1, 2]), **warp))
    ends = frozenset(rng.sample(range(tokens), rng.choice([0, 0, 1, 2])))
    drafts = rng.randint(1, 3)
    if max(len(pool) for pool in pools) > 8:  # keep the number of branches small
        drafts, width, ends = min(drafts, 2), min(width, 2), frozenset(list(ends)[:1])
    return LayerCase(f"random {seed}", pools[0], pools[1], drafts, width, width, ends)


def with_replacement_cases() -> list[LayerCase]:
    """The same situations for the i.i.d. distribution; with end tokens only a limit makes the draws finite."""
    ends = frozenset({0})
    return [
        LayerCase("V=3 K=4 w=3", _pool(1, ONE, 3), _pool(2, ONE, 3), 4, 3, 3),
        LayerCase("W=1 K=4", _pool(1, ONE, 4), _pool(2, ONE, 4), 4, 1, 1),
        LayerCase("two beams, weights", _pool(3, TWO, 3), _pool(4, TWO, 3), 2, 2, 2),
        LayerCase("dead parent in the draft", _pool(3, TWO, 2), _pool(5, THREE, 2), 3, 2, 2),
        LayerCase("end token", _pool(8, ONE, 3), _pool(9, ONE, 3), 3, 2, 2, ends, 4),
        LayerCase("only end tokens", _pool(8, ONE, 2), _pool(9, ONE, 2), 2, 2, 2, frozenset({0, 1}), 3),
        LayerCase("zeros in both", _pool(10, ONE, 5, 2), _pool(11, ONE, 5, 2), 3, 2, 2),
        LayerCase("disjoint supports", {(0, 0): 0.2, (0, 1): 0.8}, {(0, 2): 0.6, (0, 3): 0.4}, 2, 2, 2),
        LayerCase("p = q", _pool(3, TWO, 2), _pool(3, TWO, 2), 3, 2, 2),
        LayerCase("top-k", _pool(3, TWO, 4, temperature=0.6, top_k=3), _pool(4, TWO, 4, top_k=3), 3, 2, 2),
    ]


def narrow_cases() -> list[LayerCase]:
    """Dynamic width: w below W, so a layer either passes with w or is completed to W."""
    return [
        LayerCase("w=1 W=3", _pool(1, ONE, 5), _pool(2, ONE, 5), 3, 1, 3),
        LayerCase("w=2 W=3", _pool(1, ONE, 5), _pool(2, ONE, 5), 3, 2, 3),
        LayerCase("w=1 W=2, dead parent", _pool(3, TWO, 3), _pool(6, THREE, 2), 2, 1, 2),
        LayerCase("w=1 W=2, end token", _pool(8, TWO, 3), _pool(9, TWO, 3), 2, 1, 2, frozenset({0})),
        LayerCase("w=1 W=3, draft support below K", _pool(1, ONE, 4), {(0, 1): 1.0}, 3, 1, 3),
        LayerCase("w=2 W=3, p = q", _pool(1, ONE, 4), _pool(1, ONE, 4), 3, 2, 3),
    ]


def case_id(case: LayerCase) -> str:
    return case.name
