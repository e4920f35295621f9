"""Candidates taken from a head that lacks tokens: those of the same logits written into the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli import Engine, Request, SamplingConfig
from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.core.candidates import CandidateCount, top_candidates
from dsbd_cli.engine.core.topk import BLOCKED_FROM
from dsbd_cli.engine.drafting.logits import DraftLogits, lm_head_ids
from dsbd_cli.engine.protocols import ForestInput
from tests.helpers.toy import HashModel
from tests.helpers.toys import NumberCodec

V = 60
IDS = torch.arange(1, V, 2)  # no end token is drafted, nor any other even one


@pytest.mark.parametrize("vocabulary", [50, BLOCKED_FROM + 100, 3 * BLOCKED_FROM])
@pytest.mark.parametrize("count", [1, 7, 30])
def test_the_candidates_are_those_of_the_whole_vocabulary(vocabulary: int, count: int) -> None:
    """Guards column numbers taken for tokens, and a distribution over other tokens than those that have a column."""
    rng = torch.Generator().manual_seed(vocabulary)
    ids = torch.sort(torch.randperm(vocabulary, generator=rng)[: vocabulary * 2 // 3]).values
    logits = DraftLogits(3 * torch.randn(2, 3, len(ids), generator=rng), ids, vocabulary)
    wanted, candidates = top_candidates(logits.wide(), CandidateCount(count)), logits.candidates(CandidateCount(count))
    assert torch.equal(candidates.tokens, wanted.tokens)
    assert torch.allclose(candidates.logprobs, wanted.logprobs, rtol=0, atol=2e-6)
    assert not candidates.full
    assert set(candidates.tokens.flatten().tolist()) <= set(ids.tolist())


def test_where_all_tokens_are_wanted_those_without_a_column_have_no_mass() -> None:
    logits = DraftLogits(torch.randn(1, 2, 4), torch.tensor([0, 3, 4, 8]), 9)
    for count in (4, 6, 9):
        candidates = logits.candidates(CandidateCount(count))
        assert candidates.tokens.shape == (1, 2, count)
        assert torch.isfinite(candidates.logprobs).sum(-1).tolist() == [[4, 4]]
    assert logits.candidates(CandidateCount(9)).full
    assert logits.candidates(CandidateCount(9)).logprobs.exp().sum(-1).tolist() == [pytest.approx([1.0, 1.0])]


def test_columns_past_the_target_s_vocabulary_are_cut() -> None:
    model: Any = HashModel(V)
    assert lm_head_ids(model, V) is None
    model.lm_head_ids = torch.tensor([1, 5, 58, 59])
    ids = lm_head_ids(model, 59)
    assert ids is not None
    assert ids.tolist() == [1, 5, 58]
    assert DraftLogits.of(torch.ones(1, 1, 4), ids, 59).wide().shape == (1, 1, 59)
    assert DraftLogits.of(torch.ones(1, 1, 70), None, 59).width == 59


class Narrow(HashModel):
    """Has columns for IDS alone."""

    lm_head_ids = IDS

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        output = super().forward(batch, logits=logits)
        return None if output is None else output[..., IDS]


class Scattered(HashModel):
    """The same logits in the whole vocabulary."""

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        output = super().forward(batch, logits=logits)
        if output is None:
            return None
        return torch.full_like(output, float("-inf")).index_copy_(-1, IDS, output[..., IDS])


def answers(draft: HashModel, method: MethodConfig) -> list[object]:
    engine = Engine(HashModel(V, 1), draft, NumberCodec(V, (2,)), method, batch_size=3)
    sampling = SamplingConfig(max_new_tokens=8, top_k=6, temperature=1.3)
    results = list(engine.run(Request(id=str(i), seed=i, prompt_ids=(i, 3, 4, i), sampling=sampling) for i in range(5)))
    assert all(result.error is None for result in results)
    assert sum(result.stats.accepted for result in results) > 0
    return [
        (result.hypotheses[0].token_ids, result.stats.drafted, result.stats.accepted, result.stats.target_calls)
        for result in results
    ]


METHODS: list[dict[str, Any]] = [
    {"rule": "coupled"},
    {"rule": "search"},
    {"rule": "rejection"},
    {"rule": "rejection", "width": "threshold", "min_width": 1},
    {"rule": "with-replacement"},
    {"rule": "fuzzy", "fuzzy_threshold": 0.3},
    *({"rule": rule, "drafter": name} for rule in ("coupled", "rejection") for name in ("rsd-c", "rsd-s")),
    *({"rule": "rejection", "drafter": "dynamic-tree", "tree": tree} for tree in ("greedy", "top-k")),
    {"rule": "rejection", "drafter": "beam+ngram"},
    {"rule": "coupled", "drafter": "rsd-s+ngram"},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: " ".join(str(value) for value in method.values()))
def test_texts_and_counters_are_those_of_the_scattered_head(
    method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MethodConfig.of({"num_beams": 2, "drafts_per_layer": 6, "depth": 3, "width": "fixed", **method})
    narrow = Narrow(V, 1, noise=0.2)
    wanted = answers(Scattered(V, 1, noise=0.2), config)
    if method["rule"] != "fuzzy" and "ngram" not in method.get("drafter", ""):  # these look at the whole vocabulary
        monkeypatch.setattr(DraftLogits, "wide", None)
    assert answers(narrow, config) == wanted
