"""Rule `rejection` over mixed layers and distributions per parent: tensors against the scalar oracle under the same
noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.core.distribution import row_distribution
from dsbd_cli.engine.core.noise import gumbel
from dsbd_cli.engine.core.sampler import entry_index
from dsbd_cli.engine.drafting.base import LayerDrafts, merge_nodes, record_distribution
from dsbd_cli.engine.verify.base import DraftedLayer
from dsbd_cli.engine.verify.rules import make_rule
from dsbd_cli.ops.layout import DRAFT
from tests.engine.verify.test_oracles import LayerNoise, RowNoise, assert_same
from tests.helpers.layers import WARPED, Layer, random_layer, warp_of
from tests.oracles.mixed import MixedRule, Node, parent_nodes, pool_nodes

ROWS = 120


def redraft(layer: Layer, scope: str, settings: tuple[float, int, float, float], others: int) -> Tensor:
    """Replace the drafts of a layer by three drawn ones of this scope and `others` deterministic ones, some of them
    the same pairs. Returns log_q [R, n, C]."""
    candidates, view = layer.draft_candidates, layer.view
    rows, nodes, wide = candidates.tokens.shape
    log_q = row_distribution(candidates, warp_of(rows, settings, "beam")) if scope == "parent" else layer.draft.log_p
    stream = view.key(DRAFT).view(-1, 1, 1)
    keys = (log_q + gumbel(stream, entry_index(candidates.tokens))).flatten(1)
    value, index = torch.topk(keys, 3, dim=1)
    valid = value > -torch.inf
    drawn = LayerDrafts(
        above=index // wide,
        token=candidates.tokens.flatten(1).gather(1, index),
        valid=valid,
        sampled=valid,
        weight=value.float(),
    )
    generator = torch.Generator().manual_seed(rows + others)
    fixed = LayerDrafts(
        above=torch.randint(nodes, (rows, others), generator=generator),
        token=torch.randint(7, (rows, others), generator=generator),
        valid=torch.rand(rows, others, generator=generator) < 0.8,
        sampled=torch.zeros(rows, others, dtype=torch.bool),
        weight=torch.randn(rows, others, generator=generator),
    )
    fused, _ = merge_nodes(drawn, fixed, fixed.weight, 3 + others)
    assert view.drafts is not None
    view.drafts = DraftedLayer(
        parent=fused.above + 3,
        token=fused.token,
        valid=fused.valid,
        sampled=fused.sampled,
        offset=view.drafts.offset,
        distribution=record_distribution(candidates, log_q, index, valid, scope),  # type: ignore[arg-type]
        above_weight=view.drafts.above_weight,
    )
    return log_q


def oracle_nodes(layer: Layer, row: int, scope: str, log_q: Tensor) -> list[Node]:
    layer.draft.log_p = log_q
    distribution, drafts = layer.draft_distribution(row), layer.view.drafts
    assert drafts is not None
    pairs, count = layer.drafts(row), int(drafts.sampled[row].sum())
    make = parent_nodes if scope == "parent" else pool_nodes
    return [*make(distribution, pairs[:count]), *(Node(pair) for pair in pairs[count:])]


@pytest.mark.parametrize("settings", WARPED)
@pytest.mark.parametrize("scope", ["pool", "parent"])
@pytest.mark.parametrize("others", [0, 4])
def test_mixed_layers_equal_their_oracle(scope: str, others: int, settings: tuple[float, int, float, float]) -> None:
    rule = make_rule(MethodConfig(rule="rejection"))
    layer = random_layer(rule, ROWS, 17 + others, settings)
    log_q = redraft(layer, scope, settings, others)
    draws, noise = rule.verify(layer.view), LayerNoise(layer)
    taken = 0
    for row in range(ROWS):
        nodes = oracle_nodes(layer, row, scope, log_q)
        width = int(layer.view.width[row])
        expected = MixedRule().verify_nodes(
            layer.distribution(row), nodes, layer.ends(), width, 3, RowNoise(noise, row)
        )
        assert_same(layer, row, draws, expected)
        drafts = layer.view.drafts
        assert drafts is not None
        real = drafts.valid[row].nonzero().flatten().tolist()
        places = [-1 if draw.source is None else drafts.offset + real[draw.source] for draw in expected.live]
        assert draws.node[row, : len(places)].tolist() == places
        taken += sum(draw.source is not None and nodes[draw.source].distribution is None for draw in expected.live)
    assert (taken > 3) == (others > 0)  # deterministic nodes are taken


def test_a_layer_without_a_distribution_has_only_deterministic_nodes() -> None:
    rule = make_rule(MethodConfig(rule="rejection"))
    layer = random_layer(rule, ROWS, 3, WARPED[0])
    assert layer.view.drafts is not None
    layer.view.drafts.distribution = None
    layer.view.drafts.sampled = torch.zeros_like(layer.view.drafts.sampled)
    draws, noise = rule.verify(layer.view), LayerNoise(layer)
    passed = 0
    for row in range(ROWS):
        nodes = [Node(pair) for pair in layer.drafts(row)]
        width = int(layer.view.width[row])
        expected = MixedRule().verify_nodes(
            layer.distribution(row), nodes, layer.ends(), width, 3, RowNoise(noise, row)
        )
        assert_same(layer, row, draws, expected)
        passed += expected.passed
    assert 5 < passed < ROWS - 5


def test_fusing_keeps_the_first_and_drops_its_equals() -> None:
    def drafts(pairs: list[tuple[int, int]], weight: list[float], sampled: bool) -> LayerDrafts:
        above, token = torch.tensor([[a for a, _ in pairs]]), torch.tensor([[t for _, t in pairs]])
        real = torch.ones_like(above, dtype=torch.bool)
        return LayerDrafts(above, token, real, real & sampled, torch.tensor([weight]))

    first = drafts([(0, 1), (1, 2)], [-5.0, -6.0], True)
    second = drafts([(0, 3), (1, 2), (1, 4), (0, 5)], [-3.0, -1.0, -2.0, -9.0], False)
    second.valid[0, 3] = False
    fused, index = merge_nodes(first, second, second.weight, 3)
    assert fused.token.tolist() == [[1, 2, 4]]
    assert fused.above.tolist() == [[0, 1, 1]]
    assert fused.sampled.tolist() == [[True, True, False]]
    assert index.tolist() == [[-1, 1, 2, -1]]
    wide, index = merge_nodes(first, second, second.weight, 7)
    assert wide.valid.tolist() == [[True, True, True, True, False, False, False]]
    assert wide.token[0, :4].tolist() == [1, 2, 4, 3]
    assert index.tolist() == [[3, 1, 2, -1]]
