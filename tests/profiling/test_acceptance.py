"""Replaying smaller forests: against the engine's own verdicts, and against engines that really draft less."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dsbd_cli import Engine, MethodConfig, Request, RequestResult, SamplingConfig
from dsbd_cli.lab.profiling.acceptance import LayerProbe, Rates, acceptance_rates, first_drafts, passes
from dsbd_cli.lab.profiling.probe import DraftProbe, SlotProbe
from dsbd_cli.lab.profiling.profile import _acceptance, _drafts, _forests
from dsbd_cli.lab.profiling.runs import ProfiledPair
from dsbd_cli.lab.profiling.watch import watch
from dsbd_cli.variants import MIN_WIDTH, WIDTH_THRESHOLD
from tests.engine.toys import NumberCodec, table_pair

VOCABULARY = 12
METHODS = [
    MethodConfig(rule="coupled", num_beams=3, drafts_per_layer=8, depth=3),
    MethodConfig(rule="search", num_beams=3, drafts_per_layer=8, depth=3),
    MethodConfig(rule="rejection", num_beams=3, drafts_per_layer=8, depth=3, width="fixed"),
    MethodConfig(rule="with-replacement", num_beams=3, drafts_per_layer=8, depth=3, width="fixed"),
    MethodConfig(rule="coupled", num_beams=3, drafts_per_layer=8, depth=3, width="threshold"),
    MethodConfig(rule="rejection", num_beams=3, drafts_per_layer=8, depth=3, width="threshold:min=2"),
]


def run(method: MethodConfig, count: int, probe: DraftProbe | SlotProbe | None = None) -> list[RequestResult]:
    target, draft = table_pair(1, VOCABULARY, 0.6)
    engine = Engine(target, draft if method.depth else None, NumberCodec(VOCABULARY, (3,)), method, log_steps=True)
    if probe is not None:
        watch(engine, probe)
    sampling = SamplingConfig(top_k=0, max_new_tokens=16)
    return list(
        engine.run(Request(id=str(i), seed=i, prompt_ids=(i % 5, i % 7), sampling=sampling) for i in range(count))
    )


def name(method: MethodConfig) -> str:
    return f"{method.rule}-{method.width}-{method.value(MIN_WIDTH)}"


def probe_for(method: MethodConfig, drafts: list[int]) -> DraftProbe:
    threshold = method.value(WIDTH_THRESHOLD) if method.width == "threshold" else None
    return DraftProbe(drafts, method.num_beams, threshold)


@pytest.mark.parametrize("method", METHODS, ids=name)
def test_the_replay_of_what_was_drafted_is_what_the_engine_said(method: MethodConfig) -> None:
    """Guards against draws looked up in the wrong layer, and widths that differ from those in use."""
    probe = probe_for(method, [8])
    results = run(method, 12, probe)
    chains = probe.chains(results)
    logged = [step.layers for result in results for step in result.stats.step_log]
    assert len(chains) == len(logged)
    verdicts: Counter[bool] = Counter()
    for chain, layers in zip(chains, logged, strict=True):
        kept: list[bool] | None = None
        for probed, layer in zip(chain, layers, strict=True):
            kept = first_drafts(probed, kept, 8)
            width = method.num_beams
            if probed.widths is not None:
                width = max(min(probed.widths[8], method.num_beams), method.value(MIN_WIDTH))
                assert width == layer.width
            assert passes(probed, kept, width)[0] == layer.passed
            verdicts[layer.passed] += 1
    assert min(verdicts.values()) > 5


@pytest.mark.parametrize("method", METHODS, ids=name)
def test_watching_changes_no_text(method: MethodConfig) -> None:
    plain = run(method, 6)
    watched = run(method, 6, probe_for(method, [8]))
    assert [result.hypotheses for result in watched] == [result.hypotheses for result in plain]


def test_no_kernel_verifies_behind_the_back_of_an_observer() -> None:
    """Guards profiles on a GPU, where the kernel would walk without telling anybody."""
    target, _ = table_pair(1, VOCABULARY, 0.6)
    engine = Engine(target, None, NumberCodec(VOCABULARY, (3,)), MethodConfig(depth=0))
    engine.stepper.kernels = frozenset({"walk", "commit"})
    watch(engine, probe_for(METHODS[0], [8]))
    assert engine.stepper.kernels == {"commit"}


@pytest.mark.parametrize("method", METHODS[:3], ids=name)
def test_the_replay_foretells_engines_that_draft_less(method: MethodConfig) -> None:
    """Steps per call at K=5, D=2, foretold from K=8, D=3. Seeds are fixed, so that this cannot fail by chance."""
    probe = probe_for(method, [5, 8])
    results = run(method, 40, probe)
    rates = acceptance_rates(probe.chains(results), [5, 8], [None], method.num_beams, method.depth)
    for drafts, depth in ((5, 2), (5, 3), (8, 1)):
        real = run(replace(method, drafts_per_layer=drafts, depth=depth), 40)
        calls = sum(result.stats.target_calls for result in real)
        steps = sum(result.stats.steps for result in real) / calls
        assert rates[drafts, None].steps_per_call(depth) == pytest.approx(steps, rel=0.12)
    assert rates[5, None].steps_per_call(3) < rates[8, None].steps_per_call(3)


def test_a_drafter_that_reads_text_drafts_for_each_size() -> None:
    """Guards rates of few drafts that are replayed from many: `ngram` gives its places to other nodes then."""
    target, _ = table_pair(1, VOCABULARY, 0.6)
    codec = NumberCodec(VOCABULARY, (3,))
    sampling = SamplingConfig(top_k=0, max_new_tokens=16)
    requests = tuple(Request(id=str(i), seed=i, prompt_ids=(i % 5, i % 7) * 4, sampling=sampling) for i in range(3))
    method = MethodConfig(rule="search", num_beams=3, drafts_per_layer=8, depth=3, drafter="ngram")
    forests = _forests(method)
    assert {one.drafts_per_layer for one in forests} == set(_drafts(method))
    assert len(forests) > 3
    rates = _acceptance(ProfiledPair(target, None, codec, requests, 2, ("t", None)), method, forests)
    for one in forests[1:]:
        if one.drafts_per_layer != method.drafts_per_layer:
            engine = Engine(target, None, codec, one, batch_size=2, log_steps=True)
            steps = [step.layers for result in engine.run(requests) for step in result.stats.step_log]
            found = rates[one.drafts_per_layer, None]
            for layer in range(one.depth):
                looked_at = [layers[layer].passed for layers in steps if len(layers) > layer]
                assert (found.reached[layer], found.passed[layer]) == (len(looked_at), sum(looked_at))
    assert len({rate.passed for rate in rates.values()}) > 2


def test_a_smaller_forest_by_hand() -> None:
    """K=4 of two layers. At K'=2 nodes 0 and 1 are kept, and below them the first two with such a parent: 0 and 3."""
    upper = LayerProbe(parents=(0, 0, 1, 1), real=(True, True, True, True), draws=(1, 0))
    lower = LayerProbe(parents=(0, 2, 3, 1), real=(True, True, True, False), draws=(2, 0))
    kept = first_drafts(upper, None, 2)
    assert kept == [True, True, False, False]
    below = first_drafts(lower, kept, 2)
    assert below == [True, False, False, False]
    assert passes(upper, kept, 2) == (True, 2)
    assert passes(lower, below, 1) == (False, 1)
    assert passes(lower, first_drafts(lower, [True] * 4, 4), 2) == (True, 2)
    assert passes(LayerProbe((), (), ()), [], 1) == (False, 0)
    # fewer pairs than W are left to draw: the layer passes when all of them are drafted
    assert passes(LayerProbe((0,), (True,), (0,)), [True], 4) == (True, 1)


def test_rates_by_hand() -> None:
    good = LayerProbe((0, 0), (True, True), (0, 1), {2: 1})
    bad = LayerProbe((0, 0), (True, True), (1, -1), {2: 1})
    rates = acceptance_rates([[good, good], [good, bad], [bad]], [2], [None, 1], 2, 2)
    assert rates[2, None] == Rates((3, 2), (2, 1), (4, 2))
    assert rates[2, None].steps_per_call(2) == pytest.approx(1 + 2 / 3 + 2 / 3 * 1 / 2)
    assert rates[2, None].steps_per_call(1) == pytest.approx(1 + 2 / 3)
    assert rates[2, None].mean_width(2, 2) == pytest.approx(2.0)
    # W_min 1: the estimate says one beam is enough, so `bad`, whose first draw was drafted, passes too
    assert rates[2, 1] == Rates((3, 2), (3, 2), (3, 2))
    assert rates[2, 1].steps_per_call(2) == pytest.approx(3.0)
    assert rates[2, 1].mean_width(2, 2) == pytest.approx((2 + 1 + 1) / 3)


def test_a_forest_says_nothing_about_larger_ones() -> None:
    small = LayerProbe((0,), (True,), (0,))
    large = LayerProbe((0, 0), (True, True), (1,))
    rates = acceptance_rates([[small], [large]], [1, 2], [None], 1, 1)
    assert rates[1, None] == Rates((2,), (1,), (1,))
    assert rates[2, None] == Rates((1,), (1,), (1,))


def test_slots_at_the_peak_are_the_engines_own() -> None:
    for method in (METHODS[0], METHODS[2], MethodConfig(num_beams=3, depth=0)):
        probe = SlotProbe(method.num_beams)
        (result,) = run(method, 1, probe)
        log = result.stats.step_log
        assert probe.peak.total == max(step.kv_slots for step in log) == result.stats.kv_peak_slots
        peak = max(log, key=lambda step: step.kv_slots)
        assert (probe.peak.trunk, probe.peak.in_flight) == (peak.trunk, peak.nodes)
        assert probe.peak.path <= 2 + 16
