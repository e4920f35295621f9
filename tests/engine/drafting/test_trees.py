"""Drafters that run a model: which nodes they draw, and that a node's tag and its distribution say how it came about.

Guards: children drawn from another node's row, a stochastic beam search that forgets its parent's perturbation, a
layer chosen by looking at the draws, more or fewer children than asked for.
"""

from __future__ import annotations

import math

import pytest
import torch

from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.noise import gumbel, stream_keys
from dsbd_cli.engine.drafting.base import DraftContext, children
from dsbd_cli.engine.drafting.beam import BeamDrafter
from dsbd_cli.engine.drafting.dynamic_tree import DynamicTree
from dsbd_cli.engine.drafting.logits import DraftLogits
from dsbd_cli.engine.drafting.rsd import ConstantBranching, RowDraws, StochasticBeams, _conditioned
from dsbd_cli.engine.verify.base import Rule
from dsbd_cli.engine.verify.rejection import Rejection
from dsbd_cli.engine.verify.search import Search
from tests.engine.drafting.test_lookup import make_context
from tests.helpers.toy import TableModel

VOCABULARY = 50
MODEL = TableModel(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2)
TEXTS = [[[1, 2, 3, 4]], [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 1]]]


class Grown:
    """A forest over the table, without a cache: logits of a node are the row of its token."""

    def __init__(self, drafter: BeamDrafter, count: int, depth: int, rule: Rule | None = None) -> None:
        self.context: DraftContext = make_context(TEXTS, 3, count, depth)
        rule = rule or Rejection()
        self.context.sampler, self.context.drafts_end, self.context.record_distribution = (
            rule.sampler,
            rule.drafts_end,
            True,
        )
        self.forest = Forest(self.context.buffer)
        self.rows: list[RowDraws] = []
        for layer in range(depth):
            values = MODEL.table[self.forest.layers[layer].token]
            logits = DraftLogits(values, None, values.shape[-1])
            self.rows.append(RowDraws(self.context, self.forest, layer, logits))
            drafts, distribution = drafter.drafts(self.context, self.forest, layer, logits, count)
            children(self.context, self.forest, layer, drafts, distribution)

    def below(self, row: int, layer: int) -> dict[int, list[int]]:
        """Parent (place in its layer) -> tokens of its children, in order."""
        nodes, offset = self.forest.layers[layer + 1], self.forest.offset(layer)
        children: dict[int, list[int]] = {}
        for k in range(nodes.token.shape[1]):
            if nodes.valid[row, k]:
                children.setdefault(int(nodes.parent[row, k]) - offset, []).append(int(nodes.token[row, k]))
        return children


def make(name: str) -> BeamDrafter:
    return {
        "rsd-c": ConstantBranching(MODEL, VOCABULARY),
        "rsd-s": StochasticBeams(MODEL, VOCABULARY),
        "greedy": DynamicTree(MODEL, VOCABULARY, "greedy"),
        "top-k": DynamicTree(MODEL, VOCABULARY, "top-k"),
    }[name]


@pytest.mark.parametrize("name", ["rsd-c", "rsd-s", "greedy"])
def test_children_are_the_first_draws_of_their_parent(name: str) -> None:
    """In draw order, sampled, and with the distribution of their own row."""
    grown = Grown(make(name), 8, 3)
    for layer in range(3):
        order = grown.rows[layer].keys.argsort(dim=2, descending=True)
        for row in range(2):
            for parent, tokens in grown.below(row, layer).items():
                assert tokens == order[row, parent, : len(tokens)].tolist()
        nodes, distribution = grown.forest.layers[layer + 1], grown.forest.distributions[layer]
        assert torch.equal(nodes.sampled, nodes.valid)
        assert distribution is not None
        assert distribution.scope == "parent"
        assert torch.allclose(distribution.log_q.exp().sum(-1), torch.ones(()))


def test_constant_branching_shares_the_nodes() -> None:
    """8 nodes: 8 below one root, 2 each below three; then one each. With branching 3, three."""
    grown = Grown(make("rsd-c"), 8, 2)
    assert [len(tokens) for tokens in grown.below(0, 0).values()] == [8]
    assert [len(tokens) for tokens in grown.below(1, 0).values()] == [2, 2, 2]
    assert {len(tokens) for tokens in grown.below(0, 1).values()} == {1}
    fixed = Grown(ConstantBranching(MODEL, VOCABULARY, 3), 8, 2)
    assert [len(tokens) for tokens in fixed.below(0, 0).values()] == [3]
    assert [len(tokens) for tokens in fixed.below(0, 1).values()] == [2, 2, 2]


def test_siblings_keep_their_order_and_their_best_is_the_parent() -> None:
    """Kool et al. 2019, algorithm 1."""
    key = gumbel(torch.arange(40).view(2, 4, 5), torch.tensor(1)) - 3
    above = torch.tensor([0.7, -5.0, 2.0, -0.1], dtype=torch.float64).view(1, 4, 1).expand(2, 4, 1)
    moved = _conditioned(key, above)
    assert torch.equal(moved.argsort(-1), key.argsort(-1))
    assert torch.allclose(moved.amax(-1, keepdim=True), above)
    # Gumbel numbers with location phi, all of them below a bound: their distribution function is exp(exp(-T) - exp(-g))
    largest = key.amax(-1, keepdim=True)
    expected = -torch.log(torch.exp(-above) - torch.exp(-largest) + torch.exp(-key))
    assert torch.allclose(moved, expected)


def test_stochastic_beams_draw_paths_without_replacement() -> None:
    """The first path of two layers is a draw from the distribution of paths (Kool et al. 2019): 5 sigma over 4000
    rows."""
    table = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 0.5], [2.0, 0.3, 0.0]]).log_softmax(-1)
    rows = 4000
    context = make_context([[[1, 1, 1, 2]]] * rows, 3, 2, 2)
    context.sampler, context.drafts_end = Rejection.sampler, True
    context.buffer.keys = stream_keys(torch.arange(rows) * 7919, context.iteration, 3)
    drafter, forest = StochasticBeams(TableModel(table), 3), Forest(context.buffer)
    for layer in range(2):
        logits = DraftLogits(table[forest.layers[layer].token], None, 3)
        drafts, _ = drafter.drafts(context, forest, layer, logits, 2)
        children(context, forest, layer, drafts)
    path = forest.layers[2].path_tokens[:, 0]
    share = torch.bincount(path[:, 0] * 3 + path[:, 1], minlength=9).view(3, 3) / rows
    distribution = table[2].exp().unsqueeze(1) * table.exp()
    distribution[0] = 0  # token 0 ends a text, so no path of two tokens begins with it
    distribution = distribution / distribution.sum()
    assert ((share - distribution).abs() <= 5 * torch.sqrt(distribution * (1 - distribution) / rows)).all()


def test_the_greedy_tree_takes_the_most_valuable_draws() -> None:
    """Value of a draw: q along the path to its parent times what its earlier siblings have left of the row."""
    grown = Grown(make("greedy"), 6, 2)
    log_q, keys = grown.rows[0].log_q[0, 0].double(), grown.rows[0].keys[0, 0]
    drawn = keys.argsort(descending=True)[:6]
    assert grown.below(0, 0) == {0: drawn.tolist()}
    worth = {}
    for parent, token in enumerate(drawn.tolist()):
        row = grown.rows[1].log_q[0, parent].double()
        order = grown.rows[1].keys[0, parent].argsort(descending=True)
        left = 1.0
        for rank, child in enumerate(order.tolist()[:6] if token else []):  # token 0 ends
            worth[parent, rank] = math.exp(log_q[token]) * left
            left -= math.exp(row[child])
    best = sorted(worth, key=lambda pair: -worth[pair])[:6]
    draws = {(parent, rank) for parent, tokens in grown.below(0, 1).items() for rank in range(len(tokens))}
    assert draws == set(best)


def test_the_deterministic_tree_is_not_sampled() -> None:
    """The K best products of q, tagged deterministic and without a distribution, so rejection tests them as point
    masses."""
    grown = Grown(make("top-k"), 5, 2)
    for layer in range(2):
        nodes = grown.forest.layers[layer]
        weight = nodes.weight.unsqueeze(-1) + grown.rows[layer].candidates.logprobs
        weight = weight.masked_fill(~grown.rows[layer].allowed, -math.inf).flatten(1)
        assert torch.allclose(grown.forest.layers[layer + 1].weight, weight.topk(5, dim=1).values)
        assert not grown.forest.layers[layer + 1].sampled.any()
        assert grown.forest.distributions[layer] is None


@pytest.mark.parametrize("name", ["rsd-c", "rsd-s", "greedy"])
def test_under_search_nothing_is_sampled(name: str) -> None:
    """The best children, without noise."""
    grown = Grown(make(name), 4, 2, Search())
    assert not grown.forest.flat.sampled.any()
    for parent, tokens in grown.below(0, 0).items():
        best = MODEL.table[TEXTS[0][parent][-1]].clone()
        best[0] = -math.inf  # the end token is no draft for search
        assert tokens == best.argsort(descending=True)[: len(tokens)].tolist()
