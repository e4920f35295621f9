"""Common random numbers: the draft never changes what is drawn. And Gumbel draws have the distribution of beam_step.

False-alarm odds: the statistical tests are seeded, so they are deterministic; over seeds their alpha is 1e-6.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Literal

import pytest

from tests.oracles.rules import (
    LayerResult,
    NoiseChooser,
    Pair,
    beam_step,
    coupled_layer,
    draft_layer,
    enumerate_distribution,
    greedy_distribution,
    greedy_step,
    pool_distribution,
    verify_layer_rejection,
)

from .cases import LayerCase, random_row, without_replacement_cases
from .trees import ROOT, Beam, Model, Path, child

CASES = {case.name: case for case in without_replacement_cases()}


class PathNoise:
    """G(x, v): Gumbel noise as a function of seed and token path, remembered while a case runs."""

    def __init__(self, seed: int) -> None:
        self.seed, self.noise = seed, dict[Path, float]()

    def at(self, path: Path) -> float:
        if path not in self.noise:
            self.noise[path] = gumbel(random.Random(f"{self.seed} {path}"))
        return self.noise[path]

    def of(self, beams: Mapping[int, Beam], pairs: Mapping[Pair, float]) -> dict[Pair, float]:
        return {pair: self.at((*beams[pair[0]].path, pair[1])) for pair in pairs}


def gumbel(rng: random.Random) -> float:
    return -math.log(-math.log1p(-(rng.random() + 2.0**-54)))


def choose_nodes(kind: str, draft: Model, nodes: dict[int, Beam], count: int, noise: PathNoise) -> list[Pair]:
    """Drafted pairs: with the target's noise, by rank, or picked blindly; coupled takes them all."""
    pool = draft.pool(nodes)
    shared = noise.of(nodes, pool.distribution)
    if kind == "coupled":
        return sorted(
            pool.distribution, key=lambda pair: math.log(pool.distribution[pair]) + shared[pair], reverse=True
        )[:count]
    if kind == "best":
        return sorted(pool.distribution, key=lambda pair: pool.distribution[pair], reverse=True)[:count]
    return random.Random(count).sample(sorted(pool.weights), min(count, len(pool.weights)))


def decode(
    target: Model, draft: Model, noise: PathNoise, kind: str, count: int, depth: int, width: int, ends: frozenset[int]
) -> tuple[list[list[Beam]], int]:
    """Draws of three steps and how many layers passed."""
    live, record, passed = ROOT, [], 0
    while len(record) < 3:
        nodes = live
        for layer in range(depth + 1):
            pool = target.pool(live)
            pairs = choose_nodes(kind, draft, nodes, count, noise) if layer < depth else []
            result: LayerResult = coupled_layer(
                pool.distribution, noise.of(live, pool.distribution), pairs, ends, width, width
            )
            record.append([child(live, pool, draw.pair) for draw in result.draws])
            beams = [child(live, pool, draw.pair) for draw in result.live]
            keys = [draw.source if result.passed else number for number, draw in enumerate(result.live)]
            live = {key: beam for key, beam in zip(keys, beams, strict=True) if key is not None}
            passed += result.passed
            if not result.passed or len(record) == 3:
                break
            drafted = draft.pool(nodes)
            children = {number: child(nodes, drafted, pair) for number, pair in enumerate(pairs)}
            nodes = {number: beam for number, beam in children.items() if beam.path[-1] not in ends}
        live = dict(enumerate(live.values()))
    return record, passed


def plain(target: Model, noise: PathNoise, width: int, ends: frozenset[int]) -> list[list[Beam]]:
    """Plain beam sampling by drawing through the chooser, with the same noise."""
    live, record = ROOT, []
    for _ in range(3):
        pool = target.pool(live)
        chooser = NoiseChooser((), {"completion": noise.of(live, pool.distribution)})
        record.append([child(live, pool, pair) for pair in beam_step(pool.distribution, ends, width, chooser)])
        live = dict(enumerate(beam for beam in record[-1] if beam.path[-1] not in ends))
    return record


@pytest.mark.parametrize("kind", ["coupled", "best", "blind"])
def test_output_does_not_depend_on_the_draft(kind: str) -> None:
    """1000 random cases per kind of draft, against plain decoding under the same noise."""
    rng, passed = random.Random(kind), 0
    for case in range(1000):
        tokens, width = rng.randint(3, 5), rng.randint(1, 3)
        warp = rng.choice([{}, {"top_k": 5}, {"temperature": 0.6}, {"scope": "beam", "top_k": 3}])
        target = Model(rng.randrange(10**6), tokens, rng.choice([0, 1]), warp)
        draft = target if case % 4 == 0 else Model(rng.randrange(10**6), tokens, 0, warp)
        ends = frozenset(rng.sample(range(tokens), rng.choice([0, 1])))
        noise = PathNoise(case)
        record, layers = decode(target, draft, noise, kind, rng.randint(1, 8), rng.randint(0, 2), width, ends)
        assert record == plain(target, noise, width, ends), case
        passed += layers
    assert passed > 100  # the fast path was taken


def test_the_same_model_as_its_own_draft_passes_every_layer() -> None:
    """With K = W * (1 + number of end tokens) nodes every live draw from the roots is drafted.

    Deeper layers may still stop: children of nodes that will not survive compete for the K places.
    """
    for seed in range(100):
        model, noise = Model(seed, 5), PathNoise(seed)
        _, passed = decode(model, model, noise, "coupled", 4, 1, 2, frozenset({0}))
        assert passed == 2


@pytest.mark.parametrize("scope", ["pool", "beam"])
def test_temperature_0_is_the_limit_of_the_distribution(scope: Literal["pool", "beam"]) -> None:
    """Enumerated: at temperature 0.012 nearly all mass is on the draws of the limit, unless two pairs nearly tie.

    Two pairs that are 0.1 apart are drawn in the other order with a chance of exp(-0.1 / 0.012) = 2.4e-4.
    """
    rng, looked_at, cool = random.Random(scope), 0, 0.012
    for case in range(1000):
        tokens, width, top_k = rng.randint(3, 5), rng.randint(1, 3), rng.choice([0, 4])
        rows = {beam: random_row(rng, tokens) for beam in range(rng.randint(1, 2))}
        weights = {beam: -rng.random() for beam in rows}
        ends = frozenset(rng.sample(range(tokens), rng.choice([0, 1])))
        limit = greedy_distribution(weights, rows, scope, top_k)
        joint = sorted(limit.weights.values())
        if min(after - before for before, after in itertools.pairwise(joint)) < 0.1 or joint[-1] - joint[0] > 8:
            continue
        looked_at += 1
        # weights of scope beam are sums of warped logs, which grow as 1 / T
        scaled = {beam: weight / cool for beam, weight in weights.items()} if scope == "beam" else weights
        distribution = pool_distribution(scaled, rows, scope, cool, top_k).distribution
        enumerated = enumerate_distribution(partial(beam_step, distribution, ends, width))
        assert enumerated[greedy_step(limit.distribution, ends, width)] > 0.99, case
    assert looked_at > 100


def quantile_chi2(freedom: int, z: float) -> float:
    """Wilson-Hilferty approximation of the chi-square quantile at the normal quantile z."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts: Mapping[object, int], distribution: Mapping[object, float]) -> float:
    n = sum(counts.values())
    if any(outcome not in distribution for outcome in counts):
        return math.inf
    return sum((counts.get(outcome, 0) - n * chance) ** 2 / (n * chance) for outcome, chance in distribution.items())


ALPHA_Z = 4.7534  # normal quantile of 1 - 1e-6
SAMPLES = 20000


def noise_chooser(rng: random.Random, case: LayerCase) -> NoiseChooser:
    pairs = sorted(case.target.keys() | case.draft.keys())
    streams = {stream: {pair: gumbel(rng) for pair in pairs} for stream in ("draft", "residual", "completion")}
    return NoiseChooser([rng.random() for _ in range(case.drafts)], streams)


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "rejection"])
def test_noise_gives_the_enumerated_distribution(drafted: bool) -> None:
    """Chi-square, 30 outcomes, alpha 1e-6; power above 0.999 against the distribution that forgets the beams'
    weights."""
    case, rng = CASES["two beams, weights"], random.Random(1)
    distribution = enumerate_distribution(lambda chooser: beam_step(case.target, case.ends, case.width, chooser))
    counts: Counter[object] = Counter()
    for _ in range(SAMPLES):
        chooser = noise_chooser(rng, case)
        if drafted:
            nodes = draft_layer(case.draft, case.drafts, chooser)
            result = verify_layer_rejection(case.target, case.draft, nodes, (), case.width, case.width, chooser)
            counts[result.pairs] += 1
        else:
            counts[beam_step(case.target, case.ends, case.width, chooser)] += 1
    cut = quantile_chi2(len(distribution) - 1, ALPHA_Z)
    assert chi_square(counts, distribution) < cut
    # undoes the weights of the two beams
    other = {pair: mass * math.exp(1.6 * pair[0]) for pair, mass in case.target.items()}
    wrong = enumerate_distribution(lambda chooser: beam_step(other, case.ends, case.width, chooser))
    shift = SAMPLES * sum(
        (wrong[outcome] - distribution[outcome]) ** 2 / distribution[outcome] for outcome in distribution
    )
    freedom = len(distribution) - 1
    assert (freedom + shift - cut) / math.sqrt(2 * (freedom + 2 * shift)) > 3.1  # normal approximation of the power
    wrong_counts = Counter(beam_step(other, case.ends, case.width, noise_chooser(rng, case)) for _ in range(SAMPLES))
    assert chi_square(wrong_counts, distribution) > cut


@pytest.mark.parametrize("fresh", [False, True], ids=["same noise", "fresh noise"])
def test_a_stop_below_full_width_biases_the_further_draws(fresh: bool) -> None:
    """With w < W the extra draws of a stopped coupled layer are NOT exact given the stop; fresh noise for them is.

    The stop says that a drafted node outside the first w had large noise, so it is drawn next too often. With 7000
    stops or more a proportion has a standard error below 0.006: 0.03 is five of them (alpha 6e-7). The bias is 0.176
    (200000 samples), so it exceeds 0.1 with power above 0.999.
    """
    target = {(0, 0): 0.5, (0, 1): 0.25, (0, 2): 0.25}
    draft = {(0, 0): 0.3, (0, 1): 0.7}
    rng, stops, seconds = random.Random(5), 0, 0
    for _ in range(40000):
        noise = {pair: gumbel(rng) for pair in target}
        node = max(draft, key=lambda pair: math.log(draft[pair]) + noise[pair])
        result = coupled_layer(target, noise, [node], (), 1, 2)
        if result.passed or result.pairs[0] != (0, 0):
            continue
        stops += 1
        rest = {pair: mass for pair, mass in target.items() if pair != (0, 0)}
        again = coupled_layer(rest, {pair: gumbel(rng) for pair in rest}, [], (), 1, 1)
        seconds += (again.pairs[0] if fresh else result.pairs[1]) == (0, 1)
    assert stops > 7000
    bias = seconds / stops - 0.5
    assert abs(bias) < 0.03 if fresh else bias > 0.1
