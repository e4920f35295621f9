"""Encoder-decoder targets against transformers' own `generate(num_beams=W)`: every hypothesis and its score, with and
without a draft, alone and in batches of sources of different lengths.

Guards: a source read by another row, positions by slot, an end rule or a token rule that differs, a draft that changes
a text.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dsbd_cli.config import MethodConfig, SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.models.seq2seq import Seq2SeqForestModel
from dsbd_cli.requests import Request, RequestResult
from tests.models.pairs import TEXT, beams, build_pair, pair_codec, perturbed
from tests.models.tiny import V

NEW = 12
ENDS = (2, 3, 4, 5)


@cache
def models(family: str) -> tuple[Any, Seq2SeqForestModel, Seq2SeqForestModel]:
    """The transformers model, and target and draft of it."""
    plain = build_pair(family, scale=3.0)
    target, draft = (build_pair(family, scale=3.0), perturbed(plain, 0.03))
    return plain, Seq2SeqForestModel(target, family), Seq2SeqForestModel(draft, family)


def sources(count: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, V, (3 + 5 * (place % 4),), generator=generator).tolist() for place in range(count)]


def answers(engine: Engine, batch: list[list[int]], sampling: SamplingConfig) -> list[RequestResult]:
    requests = (
        Request(id=str(place), seed=place, prompt_ids=tuple(ids), sampling=sampling) for place, ids in enumerate(batch)
    )
    found = list(engine.run(requests))
    for result in found:
        result.check()
    return found


def engine(family: str, method: MethodConfig, rows: int) -> Engine:
    _, target, draft = models(family)
    codec = pair_codec(target.module, ENDS)
    return Engine(target, draft if method.needs_draft else None, codec, method, batch_size=rows)


def check(found: list[RequestResult], want: list[list[tuple[list[int], float]]]) -> None:
    ids = [[list(one.token_ids) for one in result.hypotheses] for result in found]
    assert ids == [[one for one, _ in each] for each in want]
    for result, each in zip(found, want, strict=True):
        if len(each) > 1:
            assert [one.score for one in result.hypotheses] == pytest.approx([score for _, score in each], abs=2e-4)


CASES = [
    *((family, 4, 1.0, False) for family in TEXT),
    *((family, *case) for family in ("t5", "bart", "m2m100") for case in ((1, 1.0, False), (8, 0.0, True))),
    ("marian", 4, 2.0, True),
]


@pytest.mark.parametrize(("family", "width", "penalty", "early"), CASES)
def test_search_is_transformers_beam_search(family: str, width: int, penalty: float, early: bool) -> None:
    plain = models(family)[0]
    batch = sources(6)
    settings = {"length_penalty": penalty, "early_stopping": early} if width > 1 else {}
    want = [beams(plain, torch.tensor(ids), width, list(ENDS), NEW, **settings) for ids in batch]
    sampling = SamplingConfig(max_new_tokens=NEW, length_penalty=penalty, early_stopping=early, n_best=width)
    check(answers(engine(family, MethodConfig(rule="search", num_beams=width, depth=0), 3), batch, sampling), want)
    drafted = MethodConfig(rule="search", num_beams=width, depth=3, drafts_per_layer=2 * width)
    for rows in (1, 3):
        found = answers(engine(family, drafted, rows), batch, sampling)
        check(found, want)
    assert sum(result.stats.steps - result.stats.target_calls for result in found) > 0


@pytest.mark.parametrize("family", TEXT)
def test_coupled_text_does_not_depend_on_the_draft(family: str) -> None:
    batch, sampling = sources(6, seed=8), SamplingConfig(max_new_tokens=NEW, n_best=4)

    def texts(method: MethodConfig, rows: int) -> list[Any]:
        return [[one.token_ids for one in result.hypotheses] for result in answers(engine(family, method, rows), batch, sampling)]

    want = texts(MethodConfig(depth=0), 1)
    assert texts(MethodConfig(depth=3, drafts_per_layer=10), 3) == want
    assert texts(MethodConfig(depth=4, drafts_per_layer=6, drafter="ngram"), 2) == want
