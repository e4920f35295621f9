"""Clocks, sizes and curves on small real models: that what is counted is what there is. No timing is asserted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from dsbd_cli import DsbdError, Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.engine.decoding.encode import Encoder
from dsbd_cli.engine.models import packing
from dsbd_cli.engine.models.causal import CausalForestModel
from dsbd_cli.engine.models.packing import packing_works
from dsbd_cli.engine.models.patching import pack, plain_linears
from dsbd_cli.engine.models.sizes import size_of
from dsbd_cli.lab.profiling.curves import forest_input, measure_forwards
from dsbd_cli.lab.profiling.machine import describe_machine, machine_rates
from dsbd_cli.lab.profiling.profile import _prompt_tokens, costs_of
from dsbd_cli.lab.profiling.runs import ProfiledPair, method_for, phases_of, setting_of
from dsbd_cli.lab.profiling.timers import PHASES, RunLog, TimedModel
from dsbd_cli.lab.reports.profile_data import NO_DRAFT, Curve, CurvePoint, ForestSize, spread_of
from tests.engine.toys import NumberCodec, TableLM, table_pair
from tests.models.tiny import build

CPU = torch.device("cpu")
METHOD = MethodConfig(num_beams=2, drafts_per_layer=4, depth=2)


def bench(count: int = 3) -> ProfiledPair:
    target, draft = table_pair(2, 8, 0.5)
    sampling = SamplingConfig(top_k=0, max_new_tokens=10)
    requests = tuple(Request(id=str(i), seed=i, prompt=f"{i} 1 2", sampling=sampling) for i in range(count))
    return ProfiledPair(target, draft, NumberCodec(8, (3,)), requests, 2, ("t", "d"))


@pytest.mark.parametrize("tied", [True, False])
def test_the_size_of_a_model_counts_shared_weights_once(tied: bool) -> None:
    module = build("llama", tie_word_embeddings=tied, hidden_size=64, intermediate_size=96)
    size = size_of(CausalForestModel(module, "tiny"))
    assert size is not None
    parameters = sum(one.numel() for one in module.parameters())
    table = module.get_input_embeddings().weight.numel()
    read = parameters if tied else parameters - table
    buffers = sum(one.numel() * one.element_size() for one in module.buffers())
    assert size.held_bytes == parameters * 4 + buffers
    assert size.flops_per_node == 2 * read
    assert size.read_bytes == size.held_bytes - (0 if tied else table * 4)
    assert size_of(TableLM(torch.zeros(2, 2, 2))) is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("way", ["_Compiled", "_Torch"])
def test_packed_weights_are_counted_as_they_are_stored(way: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the outputs that they are filled up with."""
    works = packing._works
    monkeypatch.setattr(packing, "_works", lambda one, dtype: one.__name__ == way and works(one, dtype))
    if not packing_works(torch.float32):
        pytest.skip("does not serve on this processor")
    module = build("llama", tie_word_embeddings=tied, hidden_size=64, intermediate_size=96)
    size = size_of(CausalForestModel(module, "tiny"))
    linears = [(one.out_features, one.in_features) for _, _, one in plain_linears(module, least=1)]
    more = [-outputs % 64 if way == "_Compiled" else max(0, 64 - outputs) for outputs, _ in linears]
    filled = sum(outputs * inputs for outputs, (_, inputs) in zip(more, linears, strict=True))
    assert filled
    assert pack(module) == len(linears)
    packed = size_of(CausalForestModel(module, "tiny"))
    assert size is not None
    assert packed is not None
    # the embeddings stay beside a packed head, and are not read
    twice = module.get_input_embeddings().weight.numel() if tied else 0
    assert packed.held_bytes == size.held_bytes + 4 * (twice + filled)
    assert packed.read_bytes == size.read_bytes + 4 * filled
    assert packed.flops_per_node == size.flops_per_node + 2 * filled


def test_forwards_of_a_real_model_are_measured_at_every_count() -> None:
    model = CausalForestModel(build("llama"), "tiny")
    measured = measure_forwards(model, 2, 40, [1, 4, 9], rounds=3, budget_s=5.0)
    assert [count for count, _ in measured] == [1, 4, 9]
    assert all(spread.count == 3 and 0 < spread.low <= spread.median <= spread.high for _, spread in measured)
    batch = forest_input(model, 2, 40, 9)
    assert (batch.tokens.shape, batch.mask.shape) == ((2, 9), (2, 9, 40))
    assert batch.slots.tolist() == [list(range(31, 40))] * 2
    rates = machine_rates(CPU, torch.float32, 1 << 20)
    assert rates.copy_bytes_per_s > 1e6
    assert rates.matmul_flops_per_s > 1e6


def test_a_run_is_split_into_phases_without_remainder() -> None:
    run = bench().timed(METHOD)
    phases = {one.name: one.total_s for one in phases_of(run)}
    assert sum(phases.values()) == pytest.approx(run.seconds)
    assert set(PHASES) <= set(phases)
    stats = [result.stats for result in run.results]
    assert phases["draft"] == pytest.approx(sum(one.draft_s for one in stats))
    assert phases["target"] == pytest.approx(sum(one.target_s for one in stats))
    assert phases["verify"] + phases["compact"] == pytest.approx(sum(one.verify_s for one in stats))
    assert phases["compact"] > 0
    assert len(run.log.moves) == 2 * run.log.iterations  # of both models


def test_every_forward_is_logged_once() -> None:
    run = bench().timed(METHOD)
    counts = Counter((one.role, one.kind) for one in run.log.forwards)
    assert counts["target", "forest"] == run.log.iterations
    assert counts["draft", "forest"] == run.log.iterations * METHOD.depth
    assert counts["target", "prefill"] == counts["draft", "prefill"] == 2  # a batch of two, then one that joins
    firsts = Counter(one.role for one in run.log.forwards if one.first)
    assert firsts == {"target": run.log.iterations, "draft": run.log.iterations}
    assert {one.nodes for one in run.log.forwards if one.role == "target" and one.kind == "forest"} == {2 + 2 * 4}
    assert run.log.reserved["target"] >= 2 * run.results[0].stats.kv_peak_slots


def test_clocks_change_no_text() -> None:
    some = bench()
    assert some.draft is not None
    plain = list(Engine(some.target, some.draft, some.codec, METHOD, batch_size=2).run(some.requests))
    timed = some.timed(METHOD).results
    assert [result.hypotheses for result in timed] == [result.hypotheses for result in plain]


def test_what_can_be_captured_is_logged_by_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph calls no Python: clocks inside a forward or a move would break the capture."""
    some = bench()
    assert not some.captures
    with monkeypatch.context() as patch:
        patch.setattr(TableLM, "capturable", True)
        assert some.captures
        assert TimedModel(some.target, "target", RunLog(every=False)).capturable
        assert not TimedModel(some.target, "target", RunLog()).capturable
    run = some.timed(METHOD, every=False)
    assert {one.kind for one in run.log.forwards} == {"prefill"}
    assert run.log.moves == []
    assert sum(one.total_s for one in phases_of(run)) == pytest.approx(run.seconds)
    plain = some.timed(method_for(METHOD, NO_DRAFT), every=False)
    points = tuple(CurvePoint(count, spread_of([0.5]), None, None) for count in (2, 10))
    curves = [
        Curve(role, 2, 32, None, None, 8, None, None, 1.0, points)  # type: ignore[arg-type]
        for role in ("target", "draft")
    ]
    costs = costs_of(run, plain, run, tuple(curves))
    assert costs.target.at(10) == pytest.approx(run.log.phases["target"] / run.log.iterations)
    assert costs.target.at(2) == pytest.approx(plain.log.phases["target"] / plain.log.iterations)
    assert costs.draft is not None
    assert costs.draft.at(2) == pytest.approx(run.log.phases["draft"] / (METHOD.depth * run.log.iterations))


def test_a_timed_model_says_of_itself_what_the_model_says() -> None:
    """Guards a trimmed draft whose columns are taken for tokens, and graphs of a cache that has moved."""
    model = CausalForestModel(build("llama"), "tiny")
    timed = TimedModel(model, "target", RunLog())
    before = timed.generation
    timed.reserve(1, 8)
    assert timed.generation == model.generation > before
    assert timed.head_ids is None
    model.spread(torch.tensor([1, 3]), 4)
    assert timed.head_ids is model.head_ids


def test_a_row_that_fails_ends_the_profile() -> None:
    some = bench(1)
    wrong = ProfiledPair(some.target, some.draft, some.codec, (Request(id="x", seed=0, prompt="77"),), 2, ("t", "d"))
    with pytest.raises(DsbdError, match="prompt x cannot be profiled"):
        wrong.timed(METHOD)


def test_prompts_are_counted_where_several_answers_are_asked_for() -> None:
    """Guards a time and a cache that are planned for prompts of no tokens."""
    target, _ = table_pair(1, 9, 0.0, {2: 1.0})
    encoder = Encoder.alone(target, NumberCodec(9, (2,)), MethodConfig(num_beams=3, depth=0))
    asked = [Request(prompt_ids=(3, 4, 5), sampling=SamplingConfig(n_best=count)) for count in (1, 3, 4)]
    assert [_prompt_tokens(encoder, one) for one in asked] == [3, 3, 0], "four of three beams cannot be had"


def test_costs_give_back_the_run_they_come_from() -> None:
    """Guards against a part of an iteration that is counted twice or not at all."""
    some = bench()
    run, plain = some.timed(METHOD), some.timed(method_for(METHOD, NO_DRAFT))

    def curve(role: str, *nodes: int) -> Curve:
        points = tuple(CurvePoint(count, spread_of([1.0]), None, None) for count in nodes)
        return Curve(role, 2, 32, None, None, 8, None, None, 1.0, points)  # type: ignore[arg-type]

    costs = costs_of(run, plain, run, (curve("target", 2, 10), curve("draft", 2, 4)))
    every = [one for one in run.log.forwards if one.kind == "forest"]
    mean = {
        role: sum(one.seconds() for one in every if one.role == role) / sum(one.role == role for one in every)
        for role in ("target", "draft")
    }
    assert costs.target.at(2) == pytest.approx(plain.log.forward_s("target", "forest") / plain.log.iterations)
    assert (costs.target.at(10), costs.draft and costs.draft.at(4)) == pytest.approx((mean["target"], mean["draft"]))
    once = sum(one.total_s for one in phases_of(run) if one.name in ("tokenise", "prefill", "detokenise", "write"))
    forwards = run.log.forward_s("target", "forest") + run.log.forward_s("draft", "forest")
    rest = (run.seconds - once - forwards) / run.log.iterations
    if rest > costs.iteration_s:  # else noise made no draft the slower one
        assert costs.iteration(ForestSize(2, 4)) == pytest.approx(rest + mean["target"] + 2 * mean["draft"])
    assert (costs.steps, costs.tokens) == (run.stats.steps, run.tokens)
    assert costs.rows == pytest.approx(run.stats.target_calls / run.log.iterations)


@pytest.mark.parametrize("every", [True, False])
def test_the_time_of_lookups_is_in_the_layers_whether_forwards_are_logged_or_not(every: bool) -> None:
    """Guards a phase draft that is taken for forwards of a model that there is not."""
    some = replace(bench(), draft=None)
    method = replace(METHOD, drafter="ngram")
    run, plain = some.timed(method, every=every), some.timed(method_for(method, NO_DRAFT), every=every)
    assert {one.role for one in run.log.forwards} <= {"target"}
    points = tuple(CurvePoint(count, spread_of([1.0]), None, None) for count in (2, 10))
    curve = Curve("target", 2, 32, None, None, 8, None, None, 1.0, points)
    costs = costs_of(run, plain, run, (curve,))
    assert costs.draft is None
    once = sum(one.total_s for one in phases_of(run) if one.name in ("tokenise", "prefill", "detokenise", "write"))
    target = run.log.forward_s("target", "forest") if every else run.log.phases["target"]
    rest = (run.seconds - once - target) / run.log.iterations
    if rest > costs.iteration_s:  # else noise made no draft the slower one
        assert 2 * (costs.layer_s + 4 * costs.draft_s) == pytest.approx(rest - costs.iteration_s)


def test_settings_and_methods_go_back_and_forth() -> None:
    dynamic = MethodConfig(num_beams=3, drafts_per_layer=6, depth=2, width="threshold:min=2")
    assert setting_of(dynamic) == ForestSize(2, 6, 2)
    assert method_for(dynamic, ForestSize(1, 4, 3)) == MethodConfig(
        num_beams=3, drafts_per_layer=4, depth=1, width="threshold:min=3"
    )
    plain = method_for(dynamic, NO_DRAFT)
    assert (plain.depth, plain.width, setting_of(plain)) == (0, "fixed", NO_DRAFT)


def test_the_machine_is_described() -> None:
    machine = describe_machine(CPU)
    assert machine.device
    assert machine.threads == torch.get_num_threads()
    assert machine.cores >= 1
    assert str(machine.versions["torch"]).split("+")[0] == torch.__version__.split("+")[0]
