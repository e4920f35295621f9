"""Clocks and sizes on small real models: that what is counted is what there is. No timing is asserted."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli import DsbdError, Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.engine.decoding.encode import Encoder
from dsbd_cli.lab.profiling.machine import describe_machine, machine_rates
from dsbd_cli.lab.profiling.measurements import ProfiledPair, method_for, phases_of, setting_of
from dsbd_cli.lab.profiling.profile import _one_forward, _prompt_tokens
from dsbd_cli.lab.profiling.timers import PHASES, EngineLog
from dsbd_cli.lab.reports.profile_data import NO_DRAFT, ForestSize
from dsbd_cli.models.forest_model import size_of
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.models.transformers_backend.patching import pack, plain_linears
from dsbd_cli.ops.cpu import linear
from dsbd_cli.ops.select import packing_works
from dsbd_cli.requests import EngineInfo
from tests.helpers.kernels import only
from tests.helpers.tiny import build
from tests.helpers.toys import NumberCodec, TableLM, table_pair

CPU = torch.device("cpu")
METHOD = MethodConfig(num_beams=2, drafts_per_layer=4, depth=2)
INFO = EngineInfo("t", "d", "float32", "cpu")


def bench(count: int = 3) -> ProfiledPair:
    target, draft = table_pair(2, 8, 0.5)
    sampling = SamplingConfig(top_k=0, max_new_tokens=10)
    requests = tuple(Request(id=str(i), seed=i, prompt=f"{i} 1 2", sampling=sampling) for i in range(count))
    return ProfiledPair(Engine(target, draft, NumberCodec(8, (3,)), METHOD, info=INFO), requests, 2)


@pytest.mark.parametrize("tied", [True, False])
def test_the_size_of_a_model_counts_shared_weights_once(tied: bool) -> None:
    module = build("llama", tie_word_embeddings=tied, hidden_size=64, intermediate_size=96)
    size = size_of(CausalForestModel(module, "tiny"))
    assert size is not None
    parameters = sum(parameter.numel() for parameter in module.parameters())
    table = module.get_input_embeddings().weight.numel()
    read = parameters if tied else parameters - table
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    assert size.held_bytes == parameters * 4 + buffers
    assert size.flops_per_node == 2 * read
    assert size.read_bytes == size.held_bytes - (0 if tied else table * 4)
    assert size_of(TableLM(torch.zeros(2, 2, 2))) is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("way", ["CompiledLinear", "TorchLinear"])
def test_packed_weights_are_counted_as_they_are_stored(way: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the outputs that they are filled up with."""
    with only(monkeypatch, getattr(linear, way)):
        if not packing_works(torch.float32):
            pytest.skip("does not serve on this processor")
        module = build("llama", tie_word_embeddings=tied, hidden_size=64, intermediate_size=96)
        size = size_of(CausalForestModel(module, "tiny"))
        linears = [(linear.out_features, linear.in_features) for _, _, linear in plain_linears(module, least=1)]
        more = [-outputs % 64 if way == "CompiledLinear" else max(0, 64 - outputs) for outputs, _ in linears]
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


def test_what_the_machine_does_is_measured() -> None:
    copied, multiplied = machine_rates(CPU, torch.float32, 1 << 20)
    assert copied > 1e6
    assert multiplied > 1e6


def test_one_forward_of_a_real_model_is_measured() -> None:
    model = CausalForestModel(build("llama"), "tiny")
    ticks = iter(range(99))
    assert _one_forward(model, 40, 9, lambda: float(next(ticks))) == 1.0, "the second of two"


def test_a_run_is_split_into_phases_without_remainder() -> None:
    run = bench().timed(METHOD)
    phases = {phase.name: phase.total_s for phase in phases_of(run)}
    assert sum(phases.values()) == pytest.approx(run.seconds)
    assert set(PHASES) <= set(phases)
    stats = [result.stats for result in run.results]
    assert phases["draft"] == pytest.approx(sum(stat.draft_s for stat in stats))
    assert phases["target"] == pytest.approx(sum(stat.target_s for stat in stats))
    assert phases["verify"] + phases["compact"] == pytest.approx(sum(stat.verify_s for stat in stats))
    assert phases["compact"] > 0
    assert len(run.log._spans["compact"]) == run.log.iterations


def test_everything_is_logged_once() -> None:
    run = bench().timed(METHOD)
    log, stats = run.log, run.stats
    assert log.rows == stats.target_calls
    assert len(log._spans["tokenise"]) == len(run.results)
    assert len(log._spans["detokenise"]) <= len(run.results)
    assert len(log._spans["prefill"]) == 2 * 2  # of both models: a batch of two, then one that joins
    assert log.nodes <= log.rows * (2 + 2 * 4)
    assert run.peak_memory_bytes is None or run.peak_memory_bytes > 1 << 20


def test_no_clock_runs_within_a_captured_iteration() -> None:
    """A clock that is recorded into a CUDA graph would break the capture."""
    log = EngineLog([CPU], captured=True)
    for name in ("tokenise", "prefill", "compact"):
        with log.span(name):
            pass
    assert [len(log._spans[name]) for name in ("tokenise", "prefill", "compact")] == [1, 1, 0]


def test_clocks_change_no_text() -> None:
    some = bench()
    loaded = some.loaded
    plain = list(Engine(loaded.target, loaded.draft, loaded.codec, METHOD, batch_size=2).run(some.requests))
    timed = some.timed(METHOD).results
    assert [result.hypotheses for result in timed] == [result.hypotheses for result in plain]


def test_a_row_that_fails_ends_the_profile() -> None:
    some = bench(1)
    wrong = ProfiledPair(some.loaded, (Request(id="x", seed=0, prompt="77"),), 2)
    with pytest.raises(DsbdError, match="the prompt with id 'x' cannot be profiled"):
        wrong.timed(METHOD)


def test_prompts_are_counted_where_several_answers_are_asked_for() -> None:
    """Guards a time and a cache that are planned for prompts of no tokens."""
    target, _ = table_pair(1, 9, 0.0, {2: 1.0})
    encoder = Encoder.alone(target, NumberCodec(9, (2,)), MethodConfig(num_beams=3, depth=0))
    asked = [Request(prompt_ids=(3, 4, 5), sampling=SamplingConfig(n_best=count)) for count in (1, 3, 4)]
    assert [_prompt_tokens(encoder, request) for request in asked] == [3, 3, 0], "four of three beams cannot be had"


def test_settings_and_methods_go_back_and_forth() -> None:
    dynamic = MethodConfig(num_beams=3, drafts_per_layer=6, depth=2, width="threshold:min=2")
    assert setting_of(dynamic) == ForestSize(2, 6, 2)
    assert method_for(dynamic, ForestSize(1, 4, 3)) == MethodConfig(
        num_beams=3, drafts_per_layer=4, depth=1, width="threshold:min=3"
    )
    plain = method_for(dynamic, NO_DRAFT)
    assert (plain.depth, plain.width, setting_of(plain)) == (0, "fixed", NO_DRAFT)


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0}, raising=False)
    machine = describe_machine(CPU)
    assert machine.device
    assert machine.threads == torch.get_num_threads()
    assert machine.cores == 1  # of many, that this process may use
    assert str(machine.versions["torch"]).split("+")[0] == torch.__version__.split("+")[0]
