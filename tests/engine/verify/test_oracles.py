"""The tensor rules against the scalar oracles under the same noise: thousands of random layers, every decision equal.

Guards: a tensor rule that has the right distribution on average but takes another path (wrong order, wrong node, wrong
stop) on some layer.
Near-ties could differ between float32 and float64; none occurs with these seeds, so equality is exact and there are
no false alarms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.core.noise import gumbel, path_gumbel, uniform
from dsbd_cli.engine.core.sampler import entry_index
from dsbd_cli.engine.verify.base import LayerDraws
from dsbd_cli.engine.verify.rejection import draft_log_probs_at
from dsbd_cli.engine.verify.rules import make_rule
from dsbd_cli.engine.verify.width import expected_width as expected_width_tensor
from dsbd_cli.ops.layout import ACCEPT, COMPLETION, RESIDUAL
from tests.helpers.layers import WARPED, Layer, random_layer
from tests.oracles.rules import (
    Distribution,
    LayerResult,
    Pair,
    coupled_layer,
    search_layer,
    verify_layer_rejection,
    verify_layer_with_replacement,
)
from tests.oracles.width import expected_width

ROWS = 150


class LayerNoise:
    """The tensor rules' own noise of all rows of a layer, as numbers of Python, made when it is first asked for."""

    def __init__(self, layer: Layer) -> None:
        self.view, self.tokens = layer.view, layer.view.tokens.tolist()
        self._uniform = dict[int, list[float]]()
        self._gumbel = dict[tuple[int, int], list[list[list[float]]]]()

    def uniform(self, row: int, index: int) -> float:
        """Of the test of a draft."""
        if index not in self._uniform:
            self._uniform[index] = uniform(self.view.key(ACCEPT), torch.tensor([index])).tolist()
        return self._uniform[index][row]

    def gumbel(self, row: int, stream: int, number: int) -> list[list[float]]:
        """Of all pairs of a row, beam by beam, for the draw of this number."""
        if (stream, number) not in self._gumbel:
            key = self.view.key(stream) + (number << 48)
            self._gumbel[stream, number] = gumbel(key.view(-1, 1, 1), entry_index(self.view.tokens)).tolist()
        return self._gumbel[stream, number][row]


class RowNoise:
    """A chooser that reads the tensor rules' own noise of one row."""

    def __init__(self, noise: LayerNoise, row: int) -> None:
        self.noise, self.row = noise, row
        self.completions = 0

    def accept(self, probability: float, index: int) -> bool:
        return self.noise.uniform(self.row, index) < probability

    def draw(self, distribution: Distribution, stream: str) -> Pair:
        name, number = stream.split("/", maxsplit=1)[0], 0
        if stream.startswith("completion/"):  # with replacement every draw has noise of its own
            number = self.completions
            self.completions += 1
        noise = self.noise.gumbel(self.row, RESIDUAL if name == "residual" else COMPLETION, number)
        keys: dict[Pair, float] = {}
        for beam, tokens in enumerate(self.noise.tokens[self.row]):
            for column, token in enumerate(tokens):
                mass = distribution.get((beam, token), 0.0)
                if mass > 0:
                    keys[beam, token] = math.log(mass) + noise[beam][column]
        return max(keys, key=lambda pair: keys[pair])


def assert_same(layer: Layer, row: int, draws: LayerDraws, expected: LayerResult) -> None:
    view = layer.view
    assert bool(draws.passed[row]) == expected.passed
    beam, token = view.pair(draws.index)
    count = int(draws.valid[row].sum())
    assert draws.valid[row, :count].all()
    live = list(zip(beam[row, :count].tolist(), token[row, :count].tolist(), strict=True))
    assert live == [draw.pair for draw in expected.live]
    ended = draws.ends[row].nonzero().flatten()
    wide = view.tokens.shape[2]
    pairs = {(int(i) // wide, int(view.tokens[row].flatten()[i])) for i in ended}
    assert pairs == {draw.pair for draw in expected.finished}


def nodes_of(layer: Layer, row: int, expected: LayerResult) -> list[int]:
    """Forest nodes of the oracle's live draws."""
    drafts = layer.view.drafts
    assert drafts is not None
    real = drafts.valid[row].nonzero().flatten().tolist()
    return [drafts.offset + real[draw.source] if draw.source is not None else -1 for draw in expected.live]


@pytest.mark.parametrize("settings", WARPED)
@pytest.mark.parametrize("seed", range(4))
def test_rejection_equals_its_oracle(settings: tuple[float, int, float, float], seed: int) -> None:
    layer = random_layer(make_rule(MethodConfig(rule="rejection")), ROWS, seed, settings)
    draws = make_rule(MethodConfig(rule="rejection")).verify(layer.view)
    noise = LayerNoise(layer)
    for row in range(ROWS):
        expected = verify_layer_rejection(
            layer.distribution(row),
            layer.draft_distribution(row),
            layer.drafts(row),
            layer.ends(),
            int(layer.view.width[row]),
            3,
            RowNoise(noise, row),
        )
        assert_same(layer, row, draws, expected)
        count = len(expected.live)
        assert draws.node[row, :count].tolist() == nodes_of(layer, row, expected)


@pytest.mark.parametrize("settings", WARPED)
@pytest.mark.parametrize("seed", range(4))
def test_with_replacement_equals_its_oracle(settings: tuple[float, int, float, float], seed: int) -> None:
    """Without end tokens: completing draws then have one noise array each on both sides (ends have a test of their
    distribution)."""
    layer = random_layer(make_rule(MethodConfig(rule="with-replacement")), ROWS, seed, settings)
    layer.view.ends = torch.zeros_like(layer.view.ends)
    draws = make_rule(MethodConfig(rule="with-replacement")).verify(layer.view)
    noise = LayerNoise(layer)
    for row in range(ROWS):
        expected = verify_layer_with_replacement(
            layer.distribution(row),
            layer.draft_distribution(row),
            layer.drafts(row),
            (),
            int(layer.view.width[row]),
            3,
            RowNoise(noise, row),
        )
        assert_same(layer, row, draws, expected)


def _named(layer: Layer, row: int, values: torch.Tensor) -> Mapping[Pair, float]:
    """Noise [W, C] of one row by pair."""
    tokens = layer.view.tokens[row]
    return {
        (beam, int(tokens[beam, column])): float(values[beam, column])
        for beam in range(values.shape[0])
        for column in range(values.shape[1])
    }


@pytest.mark.parametrize("settings", WARPED)
@pytest.mark.parametrize("seed", range(4))
def test_coupled_equals_its_oracle(settings: tuple[float, int, float, float], seed: int) -> None:
    layer = random_layer(make_rule(MethodConfig(rule="coupled")), ROWS, seed, settings)
    view = layer.view
    draws = make_rule(MethodConfig(rule="coupled")).verify(view)
    shared = path_gumbel(view.path, view.tokens)
    key = view.key(COMPLETION).view(-1, 1, 1)
    fresh = gumbel(key, entry_index(view.tokens))
    for row in range(ROWS):
        noise, other = _named(layer, row, shared[row]), _named(layer, row, fresh[row])
        width = int(view.width[row])
        expected = coupled_layer(layer.distribution(row), noise, layer.drafts(row), layer.ends(), width, 3, other)
        assert_same(layer, row, draws, expected)


@pytest.mark.parametrize("seed", range(4))
def test_search_equals_its_oracle(seed: int) -> None:
    layer = random_layer(make_rule(MethodConfig(rule="coupled")), ROWS, seed, (1.0, 0, 1.0, 0.0))
    view = layer.view
    view.log_p = torch.where(view.valid.unsqueeze(-1), view.logprob, -torch.inf)
    view.width = torch.full_like(view.width, 3)
    draws = make_rule(MethodConfig(rule="search")).verify(view)
    for row in range(ROWS):
        scores = {
            (beam, int(view.tokens[row, beam, column])): float(view.log_p[row, beam, column])
            for beam in range(3)
            for column in range(view.tokens.shape[2])
            if view.log_p[row, beam, column] > -torch.inf
        }
        expected = search_layer(scores, layer.drafts(row), layer.ends(), 3)
        assert_same(layer, row, draws, expected)


@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("closeness", [0.3, 0.9, 0.97])
def test_width_equals_its_oracle(threshold: float, closeness: float) -> None:
    layer = random_layer(make_rule(MethodConfig(rule="rejection")), ROWS, 11, (1.0, 5, 1.0, 0.0), closeness)
    view = layer.view
    assert view.drafts is not None
    q = draft_log_probs_at(view, view.drafts).exp()
    width = expected_width_tensor(view.log_p.flatten(1).double().exp(), q, 5, threshold, 1, 3)
    for row in range(ROWS):
        assert int(width[row]) == expected_width(
            layer.distribution(row), layer.draft_distribution(row), 5, threshold, 1, 3
        )
    if threshold == 0.3 and closeness > 0.5:
        assert set(width.tolist()) == {1, 2, 3}


def test_every_kind_of_layer_occurs() -> None:
    """The reference tests would say little if the random layers never passed, never failed or never met an end
    token."""
    layer = random_layer(make_rule(MethodConfig(rule="rejection")), 600, 5, (1.0, 0, 1.0, 0.0))
    draws = make_rule(MethodConfig(rule="rejection")).verify(layer.view)
    assert 60 < int(draws.passed.sum()) < 540
    assert int(draws.ends.any(1).sum()) > 60
    assert {0, 1, 2} <= set(draws.accepted.tolist())
