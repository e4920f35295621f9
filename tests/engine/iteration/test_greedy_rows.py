"""Temperature 0 is the limit of the distribution: the likeliest pairs, without noise. Guards: noise left in draft or
target, a distribution of zeros, a row without noise that changes the rows beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import InvalidRowError
from dsbd_cli.requests import Request, RequestResult
from tests.engine.decoding.test_same_text import CASES, VOCABULARY, run, texts
from tests.helpers.plain import Settings, decode, greedy
from tests.helpers.toys import NumberCodec, table_pair, table_rows

GREEDY = [replace(settings, temperature=0.0) for settings in CASES]


@pytest.mark.parametrize("settings", GREEDY, ids=["one-beam", "three-beams", "early", "beam-scope"])
@pytest.mark.parametrize("drafted", [False, True])
def test_temperature_0_equals_the_plain_decoder_without_noise(settings: Settings, drafted: bool) -> None:
    results = run(settings, "coupled", 30, drafted=drafted)
    for i, tokens in enumerate(texts(results)):
        expected = decode(table_rows(1, VOCABULARY, (i % 5, i % 7)), settings, greedy(settings))
        assert tokens == [text.tokens for text in expected]
    if drafted:
        assert sum(result.stats.accepted for result in results) > 0


def test_without_end_tokens_it_is_beam_search() -> None:
    settings = Settings(width=4, max_new=9)
    expected = texts(run(settings, "search", 30))
    assert texts(run(replace(settings, temperature=0.0), "coupled", 30)) == expected
    assert texts(run(replace(settings, temperature=0.0), "search", 30)) == expected


def test_a_good_draft_saves_target_calls() -> None:
    """The draft draws without noise too."""
    results = run(Settings(width=3, max_new=12, temperature=0.0), "coupled", 10, noise=0.0, drafts_per_layer=9, depth=3)
    assert sum(result.stats.target_calls for result in results) <= 4 * len(results)


def engine(batch_size: int, **method: Any) -> Engine:
    target, draft = table_pair(1, VOCABULARY, 0.7)
    return Engine(target, draft, NumberCodec(VOCABULARY, (2,)), MethodConfig.of(method), batch_size=batch_size)


def mixed_rows(**fields: Any) -> list[Request]:
    warm = SamplingConfig(max_new_tokens=8, n_best=3, top_k=6)
    kinds = (warm, replace(warm, temperature=0.0, **fields), replace(warm, top_k=0, temperature=0.7))
    return [Request(id=str(i), seed=i, prompt_ids=(i % 5, i % 7), sampling=kinds[i % 3]) for i in range(30)]


def facts(results: list[RequestResult]) -> list[object]:
    return [[(text.token_ids, text.logprob) for text in result.hypotheses] for result in results]


@pytest.mark.parametrize("method", [{}, {"width": "threshold", "min_width": 2}, {"drafter": "rsd-s"}], ids=str)
def test_rows_beside_it_stay_as_they_are(method: dict[str, Any]) -> None:
    whole = {"rule": "coupled", "num_beams": 3, "drafts_per_layer": 8, "depth": 3, **method}
    rows = mixed_rows()
    together = facts(list(engine(7, **whole).run(rows)))
    assert together == [facts(list(engine(1, **whole).run([row])))[0] for row in rows]


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"min_p": 0.1}])
def test_top_p_and_min_p_leave_the_best_pair_alone(fields: dict[str, float]) -> None:
    """All mass of the limit is on it, as at a temperature that is merely low."""
    low = mixed_rows(**fields)
    low = [replace(row, sampling=replace(row.sampling, temperature=row.sampling.temperature or 1e-4)) for row in low]
    method = {"num_beams": 3, "drafts_per_layer": 8, "depth": 3}
    assert facts(list(engine(7, **method).run(mixed_rows(**fields)))) == facts(list(engine(7, **method).run(low)))


@pytest.mark.parametrize("rule", ["rejection", "with-replacement", "fuzzy"])
def test_other_rules_refuse_the_row(rule: str) -> None:
    more = {"fuzzy_threshold": 0.5} if rule == "fuzzy" else {}
    results = list(engine(4, rule=rule, **more).run(mixed_rows()[:3]))
    assert [type(result.error) for result in results] == [type(None), InvalidRowError, type(None)]
    assert str(results[1].error) == f"temperature is 0, which {rule} does not take: use coupled, or search"
