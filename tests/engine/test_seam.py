"""What every drafter promises about its nodes (core/forest.py), checked on the forests it really proposes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.drafting.base import DraftContext
from tests.engine.test_drafters import ALONE, FUSED, decode, index, make_engine, name_of

__all__ = ["index"]


@pytest.mark.parametrize("options", [*ALONE, *FUSED], ids=name_of)
def test_sampled_nodes_stand_first_and_have_a_law(options: dict[str, Any], index: str) -> None:
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
        for nodes, law in zip(forest.layers[1:], forest.laws, strict=True):
            first = 0 if law is None else law.log_drawn.shape[1]
            assert nodes.sampled.shape == nodes.valid.shape
            assert not (nodes.sampled & ~nodes.valid).any()
            assert not nodes.sampled[:, first:].any()
            sampled += int(nodes.sampled.sum())
            deterministic += int((nodes.valid & ~nodes.sampled).sum())
            if law is None:
                continue
            assert not (nodes.valid & ~nodes.sampled)[:, :first].any()
            total = law.log_q.double().exp().sum(2)
            if law.scope == "pool":
                assert ((total.sum(1) - 1).abs() < 1e-5).logical_or(total.sum(1) == 0).all()
            else:
                assert ((total - 1).abs() < 1e-5).all()
            drawn = nodes.sampled[:, :first]
            assert (law.log_drawn[drawn] <= law.log_rest[drawn] + 1e-9).all()
            assert torch.isfinite(law.log_rest[drawn]).all()
    names = options["drafter"].split("+")
    ranked = names[0] in ("ngram", "retrieval", "trigram") or options.get("tree") == "top-k"
    assert (sampled == 0) == ranked
    assert (deterministic > 0) == (ranked or len(names) == 2)
