"""`coupled` and `search` give the very text of plain decoding, whatever the draft, K, D and batch size; compared with
the scalar plain decoder.

Guards: noise that depends on the row, the batch or the draft; a commit that mixes up beams; an end test that runs at
the wrong step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.core.noise import extend_path, path_gumbel, seed_key
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.requests import Request, RequestResult
from tests.helpers.plain import Path, Settings, coupled, decode
from tests.helpers.toys import NumberCodec, table_pair, table_rows

VOCABULARY = 12


def run(
    settings: Settings,
    rule: str,
    count: int,
    batch_size: int = 8,
    drafted: bool = True,
    noise: float = 0.7,
    **method: Any,
) -> list[RequestResult]:
    target, draft = table_pair(1, VOCABULARY, noise)
    depth = method.pop("depth", 3) if drafted else 0
    config = MethodConfig(
        rule=rule, num_beams=settings.width, depth=depth, warp_scope=settings.scope, **{"width": "fixed", **method}
    )
    codec = NumberCodec(VOCABULARY, tuple(settings.ends))
    engine = Engine(target, draft if depth else None, codec, config, batch_size=batch_size)
    sampling = SamplingConfig(
        temperature=settings.temperature,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new,
        length_penalty=settings.length_penalty,
        early_stopping=settings.early,
        n_best=settings.width,
    )
    return list(
        engine.run(Request(id=str(i), seed=i, prompt_ids=(i % 5, i % 7), sampling=sampling) for i in range(count))
    )


def texts(results: list[RequestResult]) -> list[list[tuple[int, ...]]]:
    return [[hypothesis.token_ids for hypothesis in result.hypotheses] for result in results]


@cache
def path_key(seed: int, path: Path) -> torch.Tensor:
    return extend_path(path_key(seed, path[:-1]), torch.tensor([path[-1]])) if path else seed_key(torch.tensor([seed]))


@cache
def noise_after(seed: int, path: Path) -> list[float]:
    """Of all tokens of the vocabulary."""
    return path_gumbel(path_key(seed, path).unsqueeze(0), torch.arange(VOCABULARY).view(1, 1, -1)).flatten().tolist()


def path_noise(seed: int, path: Path, token: int) -> float:
    return noise_after(seed, path)[token]


CASES = [
    Settings(width=1, max_new=6, ends=(2,)),
    Settings(width=3, max_new=6, ends=(2, 5), temperature=0.8, top_k=5),
    Settings(width=4, max_new=7, ends=(2, 5, 7), length_penalty=0.0, early=True),
    Settings(width=2, max_new=5, ends=(2,), temperature=1.4, length_penalty=2.0, scope="beam", top_k=4),
]


@pytest.mark.parametrize("settings", CASES, ids=["one-beam", "warped", "early", "beam-scope"])
@pytest.mark.parametrize("drafted", [False, True])
def test_coupled_equals_the_plain_decoder(settings: Settings, drafted: bool) -> None:
    results = run(settings, "coupled", 24, drafted=drafted)
    for i, tokens in enumerate(texts(results)):
        rows = table_rows(1, VOCABULARY, (i % 5, i % 7))
        expected = decode(rows, settings, coupled(lambda path, token, i=i: path_noise(i, path, token), settings))
        assert tokens == [text.tokens for text in expected]
        for hypothesis, text in zip(results[i].hypotheses, expected, strict=True):
            assert hypothesis.logprob == pytest.approx(text.logprob, abs=1e-4)
            assert hypothesis.score == pytest.approx(text.score, abs=1e-4)
            assert hypothesis.finish_reason == ("length" if text.by_length else "stop")


@pytest.mark.parametrize("settings", CASES[:3], ids=["one-beam", "three-beams", "early"])
@pytest.mark.parametrize("drafted", [False, True])
def test_search_equals_the_plain_decoder(settings: Settings, drafted: bool) -> None:
    for i, tokens in enumerate(texts(run(settings, "search", 40, drafted=drafted))):
        assert tokens == [text.tokens for text in decode(table_rows(1, VOCABULARY, (i % 5, i % 7)), settings)]


@pytest.mark.parametrize("rule", ["coupled", "search"])
def test_text_does_not_depend_on_the_draft_or_the_batch(rule: str) -> None:
    settings = Settings(width=3, max_new=12, ends=(2,))
    plain = texts(run(settings, rule, 20, batch_size=1, drafted=False))
    for drafts, depth, batch, noise in ((4, 1, 20, 0.2), (8, 5, 7, 0.5), (12, 2, 3, 3.0), (3, 9, 1, 0.0)):
        results = run(settings, rule, 20, batch, noise=noise, drafts_per_layer=drafts, depth=depth)
        assert texts(results) == plain
        assert sum(result.stats.accepted for result in results) > 0


def test_a_good_draft_saves_target_calls() -> None:
    """Guards a forest that is verified but never passes a layer."""
    settings = Settings(width=3, max_new=12)
    results = run(settings, "search", 10, noise=0.0, drafts_per_layer=9, depth=3)
    assert all(result.stats.steps == 12 for result in results)
    assert sum(result.stats.target_calls for result in results) <= 4 * len(results)


def test_cold_sampling_is_beam_search() -> None:
    """Temperature to zero: the same best text as `search` where no end token can fall behind the W best pairs."""
    greedy = Settings(width=4, max_new=9, temperature=1e-4)
    warm = Settings(width=4, max_new=9)
    expected = texts(run(warm, "search", 30))
    for rule in ("coupled", "rejection"):
        assert texts(run(greedy, rule, 30, width="fixed")) == expected
