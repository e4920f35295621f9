"""Observers of an engine: they change nothing, and what they are told is what the engine counts."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from dsbd_cli import Engine, MethodConfig, Request, RequestResult, SamplingConfig
from dsbd_cli.config.variants import MIN_WIDTH
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.forest_buffer import ForestSizes
from dsbd_cli.engine.drafting.base import DraftContext
from dsbd_cli.engine.iteration import iteration
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.verify.base import LayerDraws, LayerView
from dsbd_cli.lab.profiling.measurements import ProfiledPair
from dsbd_cli.lab.profiling.profile import depth_rates
from dsbd_cli.lab.profiling.timers import EngineLog
from dsbd_cli.ops.interface import Ops
from dsbd_cli.requests import EngineInfo
from tests.helpers.toys import NumberCodec, table_pair

VOCABULARY = 12
METHODS = [
    MethodConfig(rule="coupled", num_beams=3, drafts_per_layer=8, depth=3),
    MethodConfig(rule="search", num_beams=3, drafts_per_layer=8, depth=3),
    MethodConfig(rule="rejection", num_beams=3, drafts_per_layer=8, depth=3, width="fixed"),
    MethodConfig(rule="with-replacement", num_beams=3, drafts_per_layer=8, depth=3, width="fixed"),
    MethodConfig(rule="coupled", num_beams=3, drafts_per_layer=8, depth=3, width="threshold"),
    MethodConfig(rule="rejection", num_beams=3, drafts_per_layer=8, depth=3, width="threshold:min=2"),
]


class Counting(Observer):
    """Counts what it is told."""

    attached = True

    def __init__(self) -> None:
        self.forests = self.layers = self.iterations = 0
        self.distributions = True

    def drafted(self, context: DraftContext, forest: Forest) -> None:
        self.forests += 1
        self.layers += forest.depth + 1
        self.distributions = self.distributions and all(
            distribution is not None for distribution in forest.distributions
        )

    def verified(self, view: LayerView, draws: LayerDraws) -> None:
        self.layers -= 1

    def iterated(self, jobs: object, nodes: int, seconds: object) -> None:
        self.iterations += 1


def engine_of(method: MethodConfig) -> Engine:
    target, draft = table_pair(1, VOCABULARY, 0.6)
    return Engine(target, draft if method.depth else None, NumberCodec(VOCABULARY, (3,)), method, log_steps=True)


def run(engine: Engine, count: int) -> list[RequestResult]:
    sampling = SamplingConfig(top_k=0, max_new_tokens=16)
    return list(
        engine.run(Request(id=str(i), seed=i, prompt_ids=(i % 5, i % 7), sampling=sampling) for i in range(count))
    )


def name(method: MethodConfig) -> str:
    return f"{method.rule}-{method.width}-{method.value(MIN_WIDTH)}"


@pytest.mark.parametrize("method", METHODS, ids=name)
def test_watching_changes_no_text(method: MethodConfig) -> None:
    plain, looked_at, timed = engine_of(method), engine_of(method), engine_of(method)
    seen = Counting()
    looked_at.observe(seen)
    timed.observe(EngineLog([timed.target.device]))
    texts = [[result.hypotheses for result in run(engine, 6)] for engine in (plain, looked_at, timed)]
    assert texts[0] == texts[1] == texts[2]
    assert seen.forests == seen.iterations > 0
    assert seen.layers == 0, "each layer of each forest, and the completed one below, is told once"
    assert seen.distributions


def test_no_kernel_works_behind_the_back_of_an_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards profiles on a GPU, where kernels would draft and verify, and graphs repeat, without telling anybody."""
    step = object.__new__(iteration.Iteration)
    vars(step).update(ops=Ops(), observer=Observer(), legal=None, forest=None, rule=None, endings=None)
    vars(step).update(state=SimpleNamespace(own_ids=None))
    vars(step).update(best_tokens=lambda: None, context=SimpleNamespace(keys=None))
    vars(step).update(drafter=SimpleNamespace(by_kernel=True, learn=lambda *_: None))
    monkeypatch.setattr(iteration, "verification_kernel", lambda *_: "kernel")
    monkeypatch.setattr(iteration, "verify_with_kernel", lambda *_: "by the kernel")
    monkeypatch.setattr(iteration, "verify_forest", lambda *_: "by tensor code")
    step.verify()
    assert step.outcome == "by the kernel"
    step.observer = Counting()
    step.verify()
    assert step.outcome == "by tensor code"
    assert step._draft_kernel(ForestSizes(3, 8, 2, 64)) is None
    monkeypatch.undo()
    looked_at = engine_of(METHODS[0])
    seen = Counting()
    looked_at.observe(seen)
    looked_at.stepper.graphs = SimpleNamespace(forget=lambda: None)  # type: ignore[assignment]
    assert len(run(looked_at, 2)) == 2, "graphs that cannot run were not asked to"
    assert seen.forests > 0


def test_the_acceptance_of_a_profile_is_what_the_walks_looked_at() -> None:
    """By hand from the step log: a layer counts as reached where the one above it passed."""
    target, draft = table_pair(1, VOCABULARY, 0.6)
    sampling = SamplingConfig(top_k=0, max_new_tokens=16)
    requests = tuple(Request(id=str(i), seed=i, prompt=f"{i % 5} {i % 7}", sampling=sampling) for i in range(6))
    loaded = Engine(target, draft, NumberCodec(VOCABULARY, (3,)), info=EngineInfo("t", "d", "float32", "cpu"))
    pair = ProfiledPair(loaded, requests, 3)
    run = pair.timed(METHODS[0], log_steps=True)
    steps = [step for result in run.results for step in result.stats.step_log]
    rates = depth_rates(run.stats, run.method.depth)
    assert [rate.depth for rate in rates] == [1, 2, 3]
    assert rates[0].reached == len([step for step in steps if step.layers])
    for depth, rate in enumerate(rates):
        assert rate.passed == sum(step.passed_layers > depth for step in steps)
    for above, below in pairwise(rates):
        assert 0 < below.reached <= above.passed < above.reached


def test_nodes_and_slots_are_the_engines_own() -> None:
    for method in (METHODS[0], METHODS[2], MethodConfig(num_beams=3, depth=0)):
        engine = engine_of(method)
        log = EngineLog([engine.target.device])
        engine.observe(log)
        (result,) = run(engine, 1)
        steps = result.stats.step_log
        assert (log.iterations, log.rows) == (len(steps), len(steps))
        assert log.nodes == sum(step.nodes for step in steps)
        assert log.slots == sum(step.kv_slots for step in steps)
