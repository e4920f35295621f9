"""Under a catalogue speculation still changes nothing: distributions of pools over legal pairs, every branch
enumerated.

The distribution: what is legal keeps its raw log-probability, what is not has none, and nothing is normalised again
before the pool is. No randomness, so no false alarms.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from dataclasses import replace

import pytest

from tests.oracles.rules import Pool, beam_step, enumerate_distribution, pool_distribution, total_variation
from tests.oracles.width import expected_width

from .cases import EXACT
from .test_coupled import PathNoise, decode, plain
from .test_search import plain_search, speculative_search
from .test_two_steps import distribution_error, drawn, given_width_error
from .trees import ROOT, Beam, Model, Path, Setting, Step, plain_steps, speculative_steps

END = 0
ANSWERS = ((1, END), (1, 2, END), (2, 1, END), (2, 2, 1, END), (2, 3, END), (3, END))
VISIBLE = 1e-3


def pair(**warp: object) -> tuple[Model, Model]:
    """A target and a draft that may say the same answers."""
    return Model(1, 4, 0, warp, ANSWERS), Model(2, 4, 0, warp, ANSWERS)


def led(**warp: object) -> tuple[Model, Model]:
    """A pair that is led to the end of answers of two tokens at most: (2, 2, 1) leaves its beginning (2,) alone."""
    target, draft = pair(**warp)
    return replace(target, limit=2), replace(draft, limit=2)


CASES = {
    "D=2 K=2 W=2": Setting(*pair(), 2, 2, 2, frozenset({END})),
    "D=1 K=3 W=2": Setting(*pair(), 2, 3, 1, frozenset({END})),
    "D=2 K=2 W=2, drafted ahead": Setting(*pair(), 2, 2, 2, frozenset({END}), eager=True),
    "D=2 K=3 W=2, top-k": Setting(*pair(top_k=3), 2, 3, 2, frozenset({END})),
    "D=2 K=2 W=2, per beam": Setting(*pair(scope="beam", top_p=0.8), 2, 2, 2, frozenset({END})),
    "D=2 K=2 W=2, led to the end": Setting(*led(), 2, 2, 2, frozenset({END})),
    "D=2 K=3 W=2, led, top-k, drafted ahead": Setting(*led(top_k=3), 2, 3, 2, frozenset({END}), eager=True),
    "D=2 K=2 W=2, a draft that is not led": Setting(led()[0], pair()[1], 2, 2, 2, frozenset({END})),
    "D=2 K=2 W=2, a draft that does not know the catalogue": Setting(pair()[0], Model(2, 4), 2, 2, 2, frozenset({END})),
}


@pytest.mark.parametrize("name", CASES)
def test_rejection_has_the_distribution_of_plain_beam_sampling(name: str) -> None:
    assert distribution_error(CASES[name], 2) < EXACT


def test_three_steps_reach_ends_and_dead_rows() -> None:
    setting = replace(CASES["D=2 K=2 W=2"], full_width=1)
    assert distribution_error(setting, 3) < EXACT


@pytest.mark.parametrize("policy", ["w=1", "threshold"])
def test_dynamic_width_is_exact_given_the_widths(policy: str) -> None:
    widths = {"w=1": lambda p, q: 1, "threshold": lambda p, q: expected_width(p, q, 2, 0.4, 1, 2)}
    setting = replace(CASES["D=2 K=2 W=2"], policy=widths[policy])
    records = enumerate_distribution(lambda chooser: speculative_steps(setting, 2, chooser))
    groups: defaultdict[tuple[Step, int], dict[Step, float]] = defaultdict(dict)
    firsts: defaultdict[Step, float] = defaultdict(float)
    for (first, second), mass in records.items():
        groups[first, second.width][second] = mass
        firsts[first] += mass
    error = given_width_error(setting, tuple(ROOT.values()), firsts)
    for (first, _), distribution in groups.items():
        live = tuple(beam for beam in first.drawn if beam.path[-1] != END)
        error += given_width_error(setting, live, distribution) if live else 0.0
    assert error < EXACT


def test_one_beam_draws_each_answer_by_its_own_steps() -> None:
    """The distribution written down: with one beam every step is p over the legal tokens."""
    model, _ = pair()
    setting = Setting(model, model, 1, 1, 0, frozenset({END}))
    distribution: dict[Path, float] = defaultdict(float)
    for steps, mass in enumerate_distribution(lambda chooser: plain_steps(setting, 4, chooser)).items():
        ended = [beam.path for step in steps for beam in step.drawn if beam.path[-1] == END]
        for first in ended[:1]:
            distribution[first] += mass
    # the step that ends a text draws on until one goes on, so its distribution is that of the first end in each pool
    for path in {answer[:at] for answer in ANSWERS for at in range(len(answer))}:
        masses = {token: math.exp(model.row(path)[token]) for token in model.legal(path)}
        pool = model.pool({0: Beam(path, -1.5)})
        assert total_variation({(0, t): m / sum(masses.values()) for t, m in masses.items()}, pool.distribution) < EXACT
        assert all(abs(pool.weights[0, token] - (model.row(path)[token] - 1.5)) < EXACT for token in model.legal(path))
    assert set(distribution) <= set(ANSWERS)
    assert len(distribution) > 3


@pytest.mark.parametrize("kind", ["coupled", "best", "blind"])
def test_coupled_draws_depend_on_no_draft(kind: str) -> None:
    rng, passed = random.Random(kind), 0
    for case in range(300):
        tokens, width = rng.randint(3, 5), rng.randint(1, 3)
        answers = tuple({(*(rng.randrange(1, tokens) for _ in range(rng.randint(1, 3))), END) for _ in range(8)})
        warp = rng.choice([{}, {"top_k": 5}, {"temperature": 0.6}, {"scope": "beam", "top_k": 3}])
        target = Model(rng.randrange(10**6), tokens, 0, warp, answers, rng.choice([None, 2]))
        draft = rng.choice([target, replace(target, seed=1, rows={}, pools={})])
        noise = PathNoise(case)
        record, layers = decode(
            target, draft, noise, kind, rng.randint(1, 8), rng.randint(0, 2), width, frozenset({END})
        )
        assert record == plain(target, noise, width, frozenset({END})), case
        assert all(any(answer[: len(beam.path)] == beam.path for answer in answers) for step in record for beam in step)
        limit = target.limit or 3
        assert all(
            any(answer[: len(beam.path)] == beam.path and len(answer) - 1 <= limit for answer in answers)
            for step in record
            for beam in step
        )
        passed += layers
    assert passed > 30


def test_speculative_search_finds_the_same_answers() -> None:
    rng, passed = random.Random(0), 0
    for case in range(200):
        answers = tuple({(*(rng.randrange(1, 5) for _ in range(rng.randint(1, 3))), END) for _ in range(12)})
        target = Model(rng.randrange(10**6), 5, answers=answers)
        draft = target if case % 3 == 0 else replace(target, seed=case, rows={}, pools={})
        width, drafts, depth = rng.randint(1, 3), rng.randint(1, 8), rng.randint(0, 2)
        record, layers = speculative_search(target, draft, width, drafts, depth, frozenset({END}))
        assert record == plain_search(target, width, 3, frozenset({END}))
        passed += layers
    assert passed > 50


class FilteredLate(Model):
    """The best 2W tokens of a beam first, then the legal ones of them: vLLM's way."""

    def distribution(
        self, weights: dict[int, float], rows: dict[int, dict[int, float]], legal: dict[int, set[int]] | None
    ) -> Pool:
        assert legal is not None
        best = {beam: sorted(row, key=row.__getitem__, reverse=True)[:2] for beam, row in rows.items()}
        kept = {beam: legal[beam] & set(best[beam]) for beam in rows}
        return pool_distribution(weights, rows, legal=kept, **self.warp)  # type: ignore[arg-type]


class NormalisedAgain(Model):
    """Each beam's legal tokens have mass 1."""

    def distribution(
        self, weights: dict[int, float], rows: dict[int, dict[int, float]], legal: dict[int, set[int]] | None
    ) -> Pool:
        assert legal is not None
        again = {}
        for beam, row in rows.items():
            mass = sum(math.exp(row[token]) for token in legal[beam])
            again[beam] = {token: row[token] - math.log(mass) for token in legal[beam]}
        return pool_distribution(weights, again, **self.warp)  # type: ignore[arg-type]


MUTANTS = (FilteredLate, NormalisedAgain)


@pytest.mark.parametrize("kind", MUTANTS)
def test_a_wrong_distribution_is_told_apart(kind: type[Model]) -> None:
    """In the distribution of sampling, and in what beam search finds."""
    right, wrong = pair()[0], kind(1, 4, 0, {}, ANSWERS)
    for steps, width in itertools.product((2, 3), (1, 2)):
        distributions = [
            enumerate_distribution(
                lambda chooser, model=model, steps=steps, width=width: tuple(
                    tuple(beam.path for beam in step)
                    for step in drawn(plain_steps(Setting(model, model, width, 1, 0, frozenset({END})), steps, chooser))
                )
            )
            for model in (right, wrong)
        ]
        if total_variation(*distributions) > VISIBLE:
            break
    else:
        pytest.fail("the mutant has the same distribution")
    differ = 0
    for seed in range(40):
        models = Model(seed, 4, answers=ANSWERS), kind(seed, 4, answers=ANSWERS)
        searches = [
            [[b.path for b in step] for step in plain_search(model, 2, 3, frozenset({END}))] for model in models
        ]
        differ += searches[0] != searches[1]
    assert differ > 3


def test_what_is_led_is_what_is_legal_and_leaves_an_end() -> None:
    """By the tree of all answers: no beginning that the limit would cut is ever legal, and nothing else is lost."""
    for limit in (1, 2, 3):
        model = replace(pair()[0], limit=limit)
        reached, waiting = set[Path](), [()]
        while waiting:
            path = waiting.pop()
            reached.add(path)
            waiting += [(*path, token) for token in model.legal(path)]
        assert {path for path in reached if path and path[-1] == END} == {a for a in ANSWERS if len(a) - 1 <= limit}
        assert all(any(a[: len(path)] == path for a in ANSWERS if len(a) - 1 <= limit) for path in reached)


def test_a_pool_without_a_legal_pair_draws_nothing() -> None:
    distribution = pool_distribution({0: 0.0}, {0: {1: -0.1}}, legal={0: ()}).distribution
    assert enumerate_distribution(lambda chooser: beam_step(distribution, (), 2, chooser)) == {(): 1.0}
