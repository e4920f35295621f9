"""Whole engines with kernels give the texts, scores and counters that they give without. Guards: a state that a kernel
leaves otherwise than the next iteration, an admission or the reading of results expects it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from triton.runtime.errors import OutOfResources

from dsbd_cli import MethodConfig, ModelSpec, Request, UsageError, load
from dsbd_cli.config.model import BUILTIN_DRAFT, BUILTIN_TARGET
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.models import pair
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.ops import reference
from dsbd_cli.ops.interface import OpChoice, Ops
from dsbd_cli.ops.triton import verify
from tests.helpers.toys import NumberCodec, table_pair
from tests.models.decoders import V
from tests.ops.triton import DEVICE
from tests.ops.triton.test_decoders import forest_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
VOCABULARY = 10


def answers(rule: str, kernels: bool, told: list[str] | None = None) -> list[object]:
    method = MethodConfig.of({"rule": rule, "num_beams": 2, "drafts_per_layer": 3, "depth": 2, "width": "fixed"})
    target, draft = table_pair(1, VOCABULARY, 0.5, {2: 1.0})
    engine = Engine(target, draft, NumberCodec(VOCABULARY, (2,)), method, batch_size=2, kernels=kernels)
    assert bool(engine.stepper.ops.by("triton")) == kernels
    engine.tell = pytest.fail if told is None else told.append
    cut = {} if rule == "search" else {"top_k": 5}
    stops = [(), ("7 7",), ()]
    sampling = [SamplingConfig(max_new_tokens=5 + i, n_best=2, stop=stops[i], **cut) for i in range(3)]
    requests = [Request(id=str(i), seed=i, prompt_ids=(1, i, i), sampling=sampling[i]) for i in range(3)]
    return [
        [
            [(beam.text, round(beam.logprob, 4), round(beam.score, 4)) for beam in result.hypotheses],
            [result.stats.steps, result.stats.target_calls, result.stats.drafted, result.stats.accepted],
        ]
        for result in engine.run(requests)
    ]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="these models are on the CPU: see benchmarks/gpu_texts.py")
@pytest.mark.parametrize("rule", ["coupled", "search", "rejection"])
def test_texts_are_those_of_tensor_code(rule: str) -> None:
    assert answers(rule, kernels=True) == answers(rule, kernels=False)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="these models are on the CPU")
def test_a_kernel_that_fails_at_a_shape_is_left_out_in_mid_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a run that ends because a kernel which passed its trial needs more of the GPU at the shapes in use."""
    real, calls = verify.verify, []

    def fails(*arguments: object) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise OutOfResources(300_000, 232_448, "shared memory")
        real(*arguments)

    monkeypatch.setattr(verify, "verify", fails)
    told: list[str] = []
    assert answers("coupled", kernels=True, told=told) == answers("coupled", kernels=False)
    assert len(calls) == 3
    (line,) = told
    assert line.startswith("the run goes on without kernels")
    assert "shared memory" in line


@pytest.mark.skipif(DEVICE.type == "cuda", reason="these models are on the CPU")
def test_a_kernel_of_a_layer_that_fails_is_left_out_in_mid_run() -> None:
    """Guards a run that ends at a layer's kernel after those of iterations are left out, and records that promise bits
    which only kernels give."""
    calls, last = [0], [-1]

    def fails(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls[0] += 1
        if calls == last:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return reference.norm(*arguments)

    def texts(target: DecoderForestModel, told: list[str]) -> tuple[list[tuple[int, ...]], str]:
        engine = Engine(target, None, NumberCodec(V, (2,)), MethodConfig(rule="search", num_beams=2), batch_size=2)
        engine.tell = told.append
        rows = [
            Request(id=str(i), prompt_ids=(3, 4, 5 + i), sampling=SamplingConfig(max_new_tokens=8)) for i in range(3)
        ]
        return [result.hypotheses[0].token_ids for result in engine.run(rows)], engine.exactness

    plain, target = (forest_of("llama") for _ in range(2))
    target.decoder.ops = Ops(norm=fails, report=(OpChoice("norm", "triton", "for this test"),))
    for model in (plain, target):
        model.trust(None, True)
    last = [calls[0] + 30]
    said, told = list[str](), list[str]()
    (wanted, before), (ours, after) = texts(plain, said), texts(target, told)
    assert ours == wanted
    assert (before, after) == ("same-text", "same-law")
    assert said == []
    (line,) = told
    assert line.startswith("the run goes on without kernels")
    assert calls == last
    assert target.ops.norm is reference.norm


def test_kernels_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match="kernels cannot be had"):
        answers("search", kernels=True)


def test_no_model_is_loaded_for_kernels_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(pair, "load_pair", lambda *specs, bridged: pytest.fail("a model is loaded"))
    with pytest.raises(UsageError, match="kernels cannot be had"):
        load(ModelSpec(BUILTIN_TARGET, device="cpu"), ModelSpec(BUILTIN_DRAFT), kernels=True)


def test_without_kernels_the_draft_has_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):  # noqa: N818
        pass

    def told(*models: Checkpoint, bridged: bool) -> None:
        raise Reached([model.spec.kernels for model in models])

    monkeypatch.setattr(pair, "load_pair", told)
    with pytest.raises(Reached, match="False, False"):
        load(ModelSpec(BUILTIN_TARGET), ModelSpec(BUILTIN_DRAFT), kernels=False)
