"""Rule `fuzzy` on tensors: equal to its scalar oracle under the same noise, and its two ends through the engine."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.variants import DIVERGENCE, FUZZY_THRESHOLD, RULES
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.verify.fuzzy import Fuzzy, divergence, layer_divergence
from dsbd_cli.engine.verify.rules import make_rule
from dsbd_cli.errors import UsageError
from tests.engine.decoding.test_distribution import exact_distribution, excess, run_engine
from tests.engine.verify.test_oracles import LayerNoise, RowNoise, assert_same
from tests.helpers.layers import WARPED, Layer, random_layer
from tests.helpers.plain import Settings
from tests.helpers.toys import NumberCodec, TableLM, table_pair
from tests.oracles.fuzzy import divergence as oracle_divergence
from tests.oracles.fuzzy import fuzzy_layer
from tests.oracles.rules import Pair, normalise

ROWS = 120
# alpha as in test_distribution; the other distribution of the last statistical test is found with these
REQUESTS = 3_000


def distributions(layer: Layer, row: int, distribution: str) -> tuple[dict[Pair, float], dict[Pair, float]]:
    """The two distributions that are compared, over the live beams."""
    view, drafts = layer.view, layer.view.drafts
    assert drafts is not None
    nodes = {int(node): beam for beam, node in enumerate(view.node[row]) if view.valid[row, beam]}
    live = set(nodes.values())
    if distribution == "warped":
        p, q = layer.distribution(row), layer.draft_distribution(row)
    else:
        p = {
            (beam, int(token)): math.exp(float(value))
            for beam in live
            for token, value in zip(view.tokens[row, beam], view.logprob[row, beam], strict=True)
        }
        raw = layer.draft_candidates.logprobs[row].double() + drafts.above_weight[row].double().unsqueeze(-1)
        q = {
            (nodes[node + 3], token): math.exp(float(raw[node, token]))
            for node in range(raw.shape[0])
            if node + 3 in nodes
            for token in range(raw.shape[1])
        }
    return normalise(p), normalise({pair: mass for pair, mass in q.items() if pair[0] in live})


@pytest.mark.parametrize("name", DIVERGENCE.choices)
@pytest.mark.parametrize("distribution", ["raw", "warped"])
@pytest.mark.parametrize("settings", WARPED[:2])
def test_divergence_equals_its_oracle(settings: tuple[float, int, float, float], distribution: str, name: str) -> None:
    layer = random_layer(Fuzzy(0.1), 40, 5, settings)
    assert layer.view.drafts is not None
    divergence = layer_divergence(layer.view, layer.view.drafts, name, distribution)
    for row in range(40):
        assert float(divergence[row]) == pytest.approx(
            oracle_divergence(*distributions(layer, row, distribution), name), rel=1e-4, abs=1e-5
        )


@pytest.mark.parametrize("settings", WARPED)
@pytest.mark.parametrize("fallback", ["target", "strict"])
def test_fuzzy_equals_its_oracle(settings: tuple[float, int, float, float], fallback: str) -> None:
    rule = Fuzzy(0.2, divergence="js", fallback=fallback, distribution="raw")
    layer = random_layer(rule, ROWS, 8, settings)
    view = layer.view
    view.logprob = view.logprob.clamp(min=-50)  # no token is impossible: which ones are is no business of this rule
    view.width = torch.full_like(view.width, 3)
    draws, noise, close = rule.verify(view), LayerNoise(layer), 0
    for row in range(ROWS):
        distance = oracle_divergence(*distributions(layer, row, "raw"), "js")
        expected = fuzzy_layer(
            layer.distribution(row),
            layer.draft_distribution(row),
            layer.drafts(row),
            distance,
            0.2,
            fallback,
            [beam for beam in range(3) if view.valid[row, beam]],
            layer.ends(),
            3,
            RowNoise(noise, row),
        )
        assert_same(layer, row, draws, expected)
        close += distance <= 0.2
    assert ROWS // 10 < close < ROWS - ROWS // 10


def test_equal_distributions_have_no_divergence() -> None:
    p = torch.rand(5, 9, dtype=torch.float64)
    p = p / p.sum(1, keepdim=True)
    for name in DIVERGENCE.choices:
        assert divergence(p, p, name).tolist() == [0.0] * 5


def fuzzy_engine(draft: TableLM | None, settings: Settings, **method: object) -> Engine:
    target, other = table_pair(7, 3, noise=1.0)
    config = MethodConfig.of({"rule": "fuzzy", "num_beams": settings.width, **method})
    return Engine(target, draft or other, NumberCodec(3, tuple(settings.ends)), config, batch_size=2000)


ONE = Settings(width=1, max_new=3, ends=())
TWO = Settings(width=2, max_new=2, ends=())


@pytest.mark.parametrize(("settings", "fallback"), [(ONE, "target"), (TWO, "target"), (TWO, "strict")])
def test_at_zero_the_distribution_is_the_target_s(settings: Settings, fallback: str) -> None:
    engine = fuzzy_engine(None, settings, fuzzy_threshold=0.0, fallback=fallback, depth=2, drafts_per_layer=2)
    assert excess(run_engine(engine, settings, REQUESTS), exact_distribution(7, 3, settings)) < 1


def test_at_zero_with_the_target_as_its_own_draft() -> None:
    """Every divergence is 0, so every layer is taken; its distribution is still the target's."""
    target, _ = table_pair(7, 3, noise=1.0)
    engine = fuzzy_engine(TableLM(target.table), TWO, fuzzy_threshold=0.0, depth=2, drafts_per_layer=4)
    assert excess(run_engine(engine, TWO, REQUESTS), exact_distribution(7, 3, TWO)) < 1


def draft_distribution(settings: Settings) -> dict[object, float]:
    """Distribution of the draft's own text, by multiplication."""
    _, draft = table_pair(7, 3, noise=1.0)
    logs = torch.log_softmax(draft.table.double(), -1)
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(settings.max_new):
        distribution = {
            (*path, token): mass * math.exp(float(logs[((0, 0, *path))[-2], ((0, 0, *path))[-1], token]))
            for path, mass in distribution.items()
            for token in range(3)
        }
    return {((path,)): mass for path, mass in distribution.items()}


def test_at_the_largest_divergence_the_text_is_the_draft_s() -> None:
    """tv is at most 1. All tokens are drafted, since D is more than their number."""
    engine = fuzzy_engine(None, ONE, fuzzy_threshold=1.0, divergence="tv", depth=4, drafts_per_layer=1)
    counts = run_engine(engine, ONE, REQUESTS)
    assert excess(counts, draft_distribution(ONE)) < 1
    assert excess(counts, exact_distribution(7, 3, ONE)) > 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "fuzzy_threshold is missing"),
        ({"fuzzy_threshold": -1.0}, "fuzzy_threshold is -1.0"),
        ({"fuzzy_threshold": math.inf}, "fuzzy_threshold is inf"),
        ({"fuzzy_threshold": 0.1, "divergence": "l2"}, "divergence is 'l2'"),
        ({"fuzzy_threshold": 0.1, "depth": 0}, "raise it"),
        ({"fuzzy_threshold": 0.1, "drafter": "rsd-c"}, "use beam"),
        ({"fuzzy_threshold": 0.1, "drafter": "beam+ngram"}, "use beam"),
        ({"fuzzy_threshold": 0.1, "width": "threshold"}, "use fixed"),
        ({"fuzzy_threshold": 0.1, "warp_scope": "beam"}, "use pool"),
        ({"rule": "coupled", "fuzzy_threshold": 0.1}, "only rule fuzzy has one"),
        ({"rule": "rejection", "fallback": "strict"}, "only rule fuzzy has one"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MethodConfig.of({"rule": "fuzzy", **settings})


def test_the_output_is_lossy() -> None:
    method = MethodConfig(rule="fuzzy:0.3")
    assert method.exactness == "lossy"
    assert (method.rule, method.value(FUZZY_THRESHOLD), method.value(DIVERGENCE)) == ("fuzzy", 0.3, "kl")
    assert dataclasses.replace(method, memory_saving=True).exactness == "lossy"


def test_every_rule_of_the_settings_can_be_made() -> None:
    for name, rule in RULES.items():
        made = make_rule(MethodConfig(rule="fuzzy:0.1" if name == "fuzzy" else name))
        assert type(made) is rule.load()
