"""What every drafter promises about its nodes (core/forest.py), checked on the forests it really proposes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.drafting.base import DraftContext
from dsbd_cli.engine.protocols import ForestInput
from tests.engine.drafting.test_drafters import ALONE, FUSED, decode, index, make_engine, name_of
from tests.helpers.toys import NumberCodec, TableLM, table_pair

__all__ = ["index"]


@pytest.mark.parametrize("options", [*ALONE, *FUSED], ids=name_of)
def test_sampled_nodes_stand_first_and_have_a_distribution(options: dict[str, Any], index: str) -> None:
    engine = make_engine(options, index, rule="rejection", num_beams=2, drafts_per_layer=6, depth=2)
    inner, forests = engine._drafter.propose, list[Forest]()

    def propose(context: DraftContext) -> Forest:
        forests.append(inner(context))
        return forests[-1]

    engine._drafter.propose = propose  # type: ignore[method-assign]
    decode(engine, 4)
    sampled = deterministic = 0
    for forest in forests:
        assert not forest.layers[0].sampled.any()
        for nodes, distribution in zip(forest.layers[1:], forest.distributions, strict=True):
            first = 0 if distribution is None else distribution.log_drawn.shape[1]
            assert nodes.sampled.shape == nodes.valid.shape
            assert not (nodes.sampled & ~nodes.valid).any()
            assert not nodes.sampled[:, first:].any()
            sampled += int(nodes.sampled.sum())
            deterministic += int((nodes.valid & ~nodes.sampled).sum())
            if distribution is None:
                continue
            assert not (nodes.valid & ~nodes.sampled)[:, :first].any()
            total = distribution.log_q.double().exp().sum(2)
            if distribution.scope == "pool":
                assert ((total.sum(1) - 1).abs() < 1e-5).logical_or(total.sum(1) == 0).all()
            else:
                assert ((total - 1).abs() < 1e-5).all()
            drawn = nodes.sampled[:, :first]
            assert (distribution.log_drawn[drawn] <= distribution.log_rest[drawn] + 1e-9).all()
            assert torch.isfinite(distribution.log_rest[drawn]).all()
    names = options["drafter"].split("+")
    ranked = names[0] in ("ngram", "suffix", "retrieval") or options.get("tree") == "top-k"
    assert (sampled == 0) == ranked
    assert (deterministic > 0) == (ranked or len(names) == 2)


class Promised(TableLM):
    """Checks what a model is promised of prefills and of the common prefix."""

    chains = moves = 0
    common_prefix: Tensor | None = None

    def move(self, src_slots: Tensor, dst_slots: Tensor, common_prefix: Tensor) -> None:
        super().move(src_slots, dst_slots, common_prefix)
        below = dst_slots < common_prefix.unsqueeze(1)
        if self.common_prefix is not None:
            assert (common_prefix >= self.common_prefix).all()
            assert (src_slots == dst_slots)[below & (dst_slots < self.common_prefix.unsqueeze(1))].all()
        self.common_prefix, self.moves = common_prefix.clone(), self.moves + 1

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        assert batch.chain == (batch.rows is not None)
        if batch.chain:
            self.chains += 1
            self.common_prefix = None  # another request begins
            causal = torch.arange(batch.mask.shape[2]) <= batch.positions.unsqueeze(2)
            assert torch.equal(batch.mask, causal)
        elif self.common_prefix is not None:
            seen = torch.arange(batch.mask.shape[2]) < self.common_prefix.view(-1, 1, 1)
            assert (batch.mask | ~seen).all()
        return super().forward(batch, logits=logits)


def test_what_a_model_is_told_of_prefills_and_of_the_common_prefix() -> None:
    """Guards models that keep a state instead of slots: a prefill is one chain, and the common prefix only grows, never
    moves, and is seen by every node."""
    tables = [Promised(model.table) for model in table_pair(3, 12, 0.5)]
    method = MethodConfig(num_beams=3, depth=3, adaptive_depth=False)
    engine = Engine(tables[0], tables[1], NumberCodec(12, (2,)), method, batch_size=1)
    sampling = SamplingConfig(max_new_tokens=20, top_k=6)
    for number in range(4):
        engine.generate(Request(f"{number} 4 5 6", sampling=sampling))
    assert all(table.chains == 4 and table.moves > 8 for table in tables)


@pytest.mark.parametrize("options", [*ALONE, *FUSED], ids=name_of)
@pytest.mark.parametrize("rule", ["coupled", "rejection", "search"])
def test_the_confidence_of_a_layer_is_not_made_of_its_draws(options: dict[str, Any], rule: str, index: str) -> None:
    """Guards `rejection`: what keeps a layer from the target must have been known before its draws. So it is the same
    with any seed; and where a model drafts, it is the mass of the model's W likeliest pairs."""
    prompt, beams, seeds = (3, 4, 5, 3, 4), 3, 6
    engine = make_engine(options, index, rule=rule, num_beams=beams, drafts_per_layer=7, depth=2)
    told: list[list[float]] = []
    engine._planner.gate = lambda *arguments: lambda confidence: told.append(confidence) or True  # type: ignore[assignment, return-value, func-returns-value]
    sampling = SamplingConfig(max_new_tokens=6, top_k=0)
    results = engine.run(Request(id=str(i), seed=i, prompt_ids=prompt, sampling=sampling) for i in range(seeds))
    drawn, first = {result.hypotheses[0].token_ids for result in results}, told[0][:seeds]
    assert first == [first[0]] * seeds
    assert len(drawn) > 1 or rule == "search"
    if isinstance(engine.draft, TableLM):
        expected = engine.draft.table[prompt[-2], prompt[-1]].softmax(-1).topk(beams).values.sum()
        assert first[0] == pytest.approx(float(expected), rel=1e-5)
    else:
        assert 0 <= first[0] <= 1
