"""The distribution of whole results through the whole engine, against the exact distribution of the plain decoder
(enumerated, not sampled).

Chi-square over complete results (all hypotheses in order), bins of expectation under 5 pooled, alpha = 1e-5 per case
with fixed seeds: a
false alarm needs a new seed and then has odds of about 1e-4 over the file. Power: at 6,000 requests a total-variation
error of 0.04 is
found with more than 99 % probability; two wrong engines at the end of the file must be found.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.verify.rejection import Rejection
from dsbd_cli.requests import Request
from tests.helpers.plain import Settings, decode, results_distribution, sampled
from tests.helpers.toys import NumberCodec, table_pair, table_rows
from tests.oracles.rules import enumerate_distribution

REQUESTS = 6_000
Results = tuple[tuple[int, ...], ...]


@cache
def exact_distribution(seed: int, vocabulary: int, settings: Settings) -> dict[Results, float]:
    return results_distribution(table_rows(seed, vocabulary), settings)


def run_engine(engine: Engine, settings: Settings, requests: int = REQUESTS) -> Counter[Results]:
    sampling = SamplingConfig(
        temperature=settings.temperature,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new,
        length_penalty=settings.length_penalty,
        early_stopping=settings.early,
        n_best=settings.width,
    )
    stream = (Request(id=str(i), seed=i, prompt_ids=(0,), sampling=sampling) for i in range(requests))
    return Counter(tuple(h.token_ids for h in result.hypotheses) for result in engine.run(stream))


def excess(counts: Counter[Results], distribution: dict[Results, float]) -> float:
    """Chi-square statistic over its critical value at alpha = 1e-5 (Wilson-Hilferty); above 1 rejects. Impossible
    results are infinite."""
    total = sum(counts.values())
    if set(counts) - set(distribution):
        return math.inf
    bins = [(counts[key], total * mass) for key, mass in distribution.items()]
    small = [item for item in bins if item[1] < 5]
    bins = [item for item in bins if item[1] >= 5]
    if small:
        bins.append((sum(item[0] for item in small), sum(item[1] for item in small)))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in bins)
    freedom = len(bins) - 1
    critical = freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic / critical


def make_engine(seed: int, vocabulary: int, settings: Settings, **method: object) -> Engine:
    target, draft = table_pair(seed, vocabulary, noise=1.0)
    config = MethodConfig(
        num_beams=settings.width, warp_scope=settings.scope, **{"depth": 4, "width": "fixed", **method}
    )  # type: ignore[arg-type]
    codec = NumberCodec(vocabulary, tuple(settings.ends))
    return Engine(target, draft if config.depth else None, codec, config, batch_size=2000)


ENDING = Settings(width=2, max_new=3, ends=(2,))
WARPED = Settings(width=2, max_new=3, ends=(2,), temperature=0.7, top_k=3, length_penalty=0.0)
PLAIN = Settings(width=2, max_new=2)
BEAM = Settings(width=2, max_new=3, ends=(2,), temperature=1.5, scope="beam")


@pytest.mark.parametrize(
    ("settings", "vocabulary"),
    [(ENDING, 3), (WARPED, 3), (PLAIN, 4), (BEAM, 3)],
    ids=["ending", "warped", "plain", "beam-scope"],
)
@pytest.mark.parametrize(("rule", "depth"), [("coupled", 2), ("rejection", 0), ("rejection", 2)])
def test_distribution_of_the_results(settings: Settings, vocabulary: int, rule: str, depth: int) -> None:
    """With `coupled` the text is the same with a draft and without (test_same_text.py)."""
    engine = make_engine(7, vocabulary, settings, rule=rule, depth=depth, drafts_per_layer=4)
    counts = run_engine(engine, settings)
    assert excess(counts, exact_distribution(7, vocabulary, settings)) < 1


def test_distribution_at_one_beam_is_ancestral_sampling() -> None:
    """W=1, K=1 is speculative sampling (Leviathan et al. 2023)."""
    settings = Settings(width=1, max_new=4, ends=(2,))
    engine = make_engine(3, 3, settings, rule="rejection", depth=3, drafts_per_layer=1)
    assert excess(run_engine(engine, settings), exact_distribution(3, 3, settings)) < 1


@pytest.mark.parametrize("settings", [PLAIN, Settings(width=1, max_new=4, ends=(2,))], ids=["two beams", "one beam"])
def test_steps_one_by_one_have_the_distribution_of_whole_runs(settings: Settings) -> None:
    rows, distribution = table_rows(7, 4), results_distribution(table_rows(7, 4), settings)
    whole = enumerate_distribution(
        lambda chooser: tuple(text.tokens for text in decode(rows, settings, sampled(chooser, settings)))
    )
    assert distribution == pytest.approx(whole, abs=1e-12)


class AlwaysAccept(Rejection):
    """Mutant: every draft with a live parent is taken."""

    def decide(self, view, drafts):  # type: ignore[no-untyped-def]
        return None, torch.ones_like(view.width, dtype=torch.bool)


def test_a_mutant_is_found() -> None:
    engine = make_engine(7, 3, ENDING, rule="rejection", depth=2, drafts_per_layer=4)
    engine._stepper.rule = AlwaysAccept()
    assert excess(run_engine(engine, ENDING, 4000), exact_distribution(7, 3, ENDING)) > 1


def test_the_other_distribution_is_found() -> None:
    """Draws with replacement are another distribution; the test must tell them apart, or it proves nothing."""
    engine = make_engine(7, 3, ENDING, rule="with-replacement", depth=2, drafts_per_layer=4)
    assert excess(run_engine(engine, ENDING, 4000), exact_distribution(7, 3, ENDING)) > 1


def test_results_do_not_repeat_a_sequence() -> None:
    """Draws without replacement never give the same beam twice."""
    for result in run_engine(make_engine(7, 3, ENDING, rule="rejection", depth=2, drafts_per_layer=4), ENDING, 2000):
        assert len(set(result)) == len(result)


def test_equal_seeds_share_their_noise_and_others_do_not() -> None:
    engine = make_engine(7, 4, PLAIN, rule="coupled", depth=0)
    sampling = SamplingConfig(max_new_tokens=24, temperature=2.0)
    results = list(engine.run(Request(id=str(i), seed=i // 3, prompt_ids=(0,), sampling=sampling) for i in range(12)))
    texts = [result.hypotheses[0].token_ids for result in results]
    assert all(texts[3 * group] == texts[3 * group + 1] == texts[3 * group + 2] for group in range(4))
    assert len(set(texts)) == 4
