"""Under token rules speculation still changes nothing: every branch of two and three steps enumerated, for each rule.

A rule changes p(v | x) by what the path x holds. The distributions are compared with plain beam sampling from the
changed p, and, for one beam, with vLLM's formulas written down once more. No randomness, so no false alarms.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from dsbd_cli.config.token_rules import TokenRules
from tests.oracles.rules import enumerate_distribution, total_variation
from tests.oracles.token_rules import ruled

from .cases import EXACT
from .test_coupled import PathNoise, decode, plain
from .test_search import plain_search, speculative_search
from .test_two_steps import distribution_error, drawn
from .trees import Model, Path, Setting, plain_steps

END, NEW = 0, 9
ENDS = frozenset({END})
PROMPT = (1, 2, 2)
VISIBLE = 1e-3
RULES = {
    "repetition": TokenRules(repetition_penalty=1.8),
    "presence": TokenRules(presence_penalty=1.3),
    "frequency": TokenRules(frequency_penalty=-0.9),
    "bias": TokenRules(logit_bias=((1, 2.0), (3, -1.5))),
    "allowed": TokenRules(allowed_token_ids=(0, 2, 3)),
    "bad words": TokenRules(bad_words_ids=((2, 3), (1, 1), (2, 1, 0), (0, 0, 2))),
    "n-grams": TokenRules(no_repeat_ngram_size=2),
    "least": TokenRules(min_new_tokens=2),
    "normalised": TokenRules(allowed_token_ids=(0, 1, 3), frequency_penalty=0.5, renormalize_logits=True),
    "together": TokenRules(
        repetition_penalty=0.7,
        frequency_penalty=0.8,
        logit_bias=((2, 1.0),),
        bad_words_ids=((3, 3), (1,)),
        min_new_tokens=1,
    ),
}


@dataclass(frozen=True)
class Ruled(Model):
    """A table model whose rows go through token rules. on_logits: biases and penalties act on logits."""

    rules: TokenRules = TokenRules()  # noqa: RUF009 - it is frozen
    on_logits: bool = False

    def row(self, path: Path) -> dict[int, float]:
        if path not in self.rows:
            raw = Model(self.seed, self.tokens, self.zeros).row(path)
            total = random.Random(f"{self.seed} {path} total").uniform(-3, 3) if self.on_logits else None
            self.rows[path] = dict(enumerate(self.apply([raw[token] for token in range(self.tokens)], path, total)))
        return self.rows[path]

    def apply(self, raw: list[float], path: Path, total: float | None) -> list[float]:
        """The rules; what a mutant gets wrong."""
        return ruled(raw, self.rules, PROMPT, path, {END}, NEW, total=total)


def pair(name: str, *, on_logits: bool, kind: type[Ruled] = Ruled, **warp: object) -> tuple[Ruled, Ruled]:
    """A target and a draft with the same rules."""
    target, draft = (kind(seed, 4, 0, warp, rules=RULES[name], on_logits=on_logits) for seed in (1, 2))
    return target, draft


SIZES = {"beams": (2, False, {"top_k": 4}), "one beam": (1, True, {})}  # few branches for two beams
MORE = {
    "drafted ahead": replace(Setting(*pair("together", on_logits=False), 2, 3, 2, ENDS), eager=True),
    "top-k": Setting(*pair("frequency", on_logits=False, top_k=3), 2, 3, 2, ENDS),
    "per beam": Setting(*pair("bias", on_logits=False, scope="beam", top_p=0.8), 2, 2, 2, ENDS),
    "a draft without rules": Setting(pair("together", on_logits=True)[0], Model(2, 4), 1, 2, 2, ENDS),
    "a draft with other rules": Setting(
        pair("bad words", on_logits=False)[0], pair("allowed", on_logits=False)[1], 2, 2, 2, ENDS
    ),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RULES)
def test_rejection_has_the_distribution_of_plain_beam_sampling(name: str, size: str) -> None:
    width, on_logits, warp = SIZES[size]
    setting = Setting(*pair(name, on_logits=on_logits, **warp), width, 2, 2, ENDS)
    assert distribution_error(setting, 2) < EXACT


@pytest.mark.parametrize("name", MORE)
def test_other_settings_have_it_too(name: str) -> None:
    assert distribution_error(MORE[name], 2) < EXACT


def test_three_steps() -> None:
    assert distribution_error(Setting(*pair("together", on_logits=True), 1, 2, 2, ENDS), 3) < EXACT


@pytest.mark.parametrize("kind", ["coupled", "best", "blind"])
def test_coupled_draws_depend_on_no_draft(kind: str) -> None:
    rng, passed = random.Random(kind), 0
    for case in range(200):
        rules, width = rng.choice(list(RULES.values())), rng.randint(1, 3)
        warp = rng.choice([{}, {"top_k": 5}, {"temperature": 0.6}, {"scope": "beam", "top_k": 3}])
        target = Ruled(rng.randrange(10**6), 4, 0, warp, rules=rules, on_logits=width == 1)
        draft = rng.choice([target, replace(target, seed=1, rows={}, pools={}), Model(3, 4)])
        noise = PathNoise(case)
        record, layers = decode(target, draft, noise, kind, rng.randint(1, 8), rng.randint(0, 2), width, ENDS)
        assert record == plain(target, noise, width, ENDS), case
        passed += layers
    assert passed > 30


def test_speculative_search_finds_the_same_beams() -> None:
    rng, passed = random.Random(0), 0
    for case in range(200):
        target = Ruled(rng.randrange(10**6), 4, rules=rng.choice(list(RULES.values())))
        draft = target if case % 3 == 0 else replace(target, seed=case, rows={}, pools={})
        width, drafts, depth = rng.randint(1, 3), rng.randint(1, 8), rng.randint(0, 2)
        record, layers = speculative_search(target, draft, width, drafts, depth, ENDS)
        assert record == plain_search(target, width, 3, ENDS)
        passed += layers
    assert passed > 50


def texts(model: Ruled, width: int, steps: int) -> dict[object, float]:
    """The distribution of the ordered draws of all steps, without their weights."""
    setting = Setting(model, model, width, 1, 0)
    return enumerate_distribution(
        lambda chooser: tuple(tuple(beam.path for beam in step) for step in drawn(plain_steps(setting, steps, chooser)))
    )


def vllm(logits: list[float], rules: TokenRules, generated: Path) -> dict[int, float]:
    """The distribution of vLLM's sampler: bias, then the penalties of its documentation, then a softmax."""
    for token, number in rules.logit_bias:
        logits[token] += number
    for token in range(len(logits)):
        if token in (*PROMPT, *generated):
            penalty = rules.repetition_penalty
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        logits[token] -= rules.frequency_penalty * generated.count(token)
        logits[token] -= rules.presence_penalty * (generated.count(token) > 0)
    total = sum(map(math.exp, logits))
    return {token: math.exp(logit) / total for token, logit in enumerate(logits)}


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "bias"])
def test_samples_have_vllms_distribution(name: str) -> None:
    """With one beam, three tokens: the product of vLLM's distributions, and log-probabilities that are their logs."""
    model = pair(name, on_logits=True)[0]
    want: dict[object, float] = {((), 0.0): 1.0}
    for _ in range(3):
        further: defaultdict[object, float] = defaultdict(float)
        for (path, weight), mass in want.items():  # type: ignore[misc]
            raw = Model(1, 4).row(path)
            total = random.Random(f"1 {path} total").uniform(-3, 3)
            law = vllm([raw[token] + total for token in range(4)], RULES[name], path)
            for token, share in law.items():
                further[(*path, token), weight + math.log(share)] += mass * share
        want = dict(further)
    setting = Setting(model, model, 1, 1, 0)
    distribution = enumerate_distribution(lambda chooser: drawn(plain_steps(setting, 3, chooser))[-1][0])
    by_path = {beam.path: mass for beam, mass in distribution.items()}
    assert total_variation(by_path, {path: mass for (path, _), mass in want.items()}) < EXACT  # type: ignore[misc]
    weights = {path: weight for path, weight in want}  # type: ignore[misc]  # noqa: C416
    assert all(abs(weights[beam.path] - beam.weight) < EXACT for beam in distribution)


def mutant(change: Callable[[Ruled, list[float], Path, float | None], list[float]]) -> type[Ruled]:
    class Wrong(Ruled):
        def apply(self, raw: list[float], path: Path, total: float | None) -> list[float]:
            return change(self, raw, path, total)

    return Wrong


def rules_with(model: Ruled, **values: object) -> TokenRules:
    return replace(model.rules, **values)  # type: ignore[arg-type]


def lags(model: Ruled, raw: list[float], path: Path, total: float | None) -> list[float]:
    """By the history of the node above."""
    return ruled(raw, model.rules, PROMPT, path[:-1], {END}, NEW, total=total)


def of_the_root(model: Ruled, raw: list[float], path: Path, total: float | None) -> list[float]:
    """By the history of the live beam that a drafted node stands below, not its own."""
    return ruled(raw, model.rules, PROMPT, (), {END}, NEW, total=total)


def counts_the_prompt(model: Ruled, raw: list[float], path: Path, total: float | None) -> list[float]:
    return ruled(raw, model.rules, (), (*PROMPT, *path), {END}, NEW, total=total)


def counts_once(model: Ruled, raw: list[float], path: Path, total: float | None) -> list[float]:
    """A frequency that is a presence."""
    rules = rules_with(model, presence_penalty=model.rules.frequency_penalty, frequency_penalty=0.0)
    return ruled(raw, rules, PROMPT, path, {END}, NEW, total=total)


def on_log_probabilities(model: Ruled, raw: list[float], path: Path, total: float | None) -> list[float]:
    return ruled(raw, model.rules, PROMPT, path, {END}, NEW)


def last_tokens_alone(model: Ruled, raw: list[float], path: Path, total: float | None) -> list[float]:
    """A bad word is taken for completed wherever its last two tokens are."""
    rules = rules_with(model, bad_words_ids=tuple(word[-2:] for word in model.rules.bad_words_ids))
    return ruled(raw, rules, PROMPT, path, {END}, NEW, total=total)


def answer_alone(model: Ruled, raw: list[float], path: Path, total: float | None) -> list[float]:
    """The text before the answer is not looked at."""
    return ruled(raw, model.rules, (), path, {END}, NEW, total=total)


def never(model: Ruled, raw: list[float], path: Path, total: float | None) -> list[float]:
    return raw


def never_normalised(model: Ruled, raw: list[float], path: Path, total: float | None) -> list[float]:
    return ruled(raw, rules_with(model, renormalize_logits=False), PROMPT, path, {END}, NEW, total=total)


MUTANTS = [
    (never_normalised, "normalised", False),
    *((never, name, on_logits) for name in RULES for on_logits in (False, True)),
    *((lags, name, True) for name in ("repetition", "presence", "frequency", "bad words", "n-grams", "least")),
    *((of_the_root, name, False) for name in ("repetition", "presence", "frequency", "bad words", "n-grams")),
    *((counts_the_prompt, name, False) for name in ("presence", "frequency")),
    (counts_once, "frequency", True),
    (on_log_probabilities, "repetition", True),
    (last_tokens_alone, "bad words", False),
    (answer_alone, "bad words", True),
    (answer_alone, "repetition", False),
    (answer_alone, "n-grams", True),
]


@pytest.mark.parametrize(("change", "name", "on_logits"), MUTANTS)
def test_a_wrong_distribution_is_told_apart(
    change: Callable[[Ruled, list[float], Path, float | None], list[float]], name: str, on_logits: bool
) -> None:
    width, steps = (1, 3) if on_logits else (2, 2)
    right, wrong = (pair(name, on_logits=on_logits, kind=kind)[0] for kind in (Ruled, mutant(change)))
    assert total_variation(texts(right, width, steps), texts(wrong, width, steps)) > VISIBLE
