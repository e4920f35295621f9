"""Our own decoder with the kernels of a GPU: transformers' logits, the same bits in any company, few launches; what
fails is left out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from torch.utils._python_dispatch import TorchDispatchMode

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models import load_model as stages
from dsbd_cli.models.attention import metadata
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.generation import CheckpointSettings
from dsbd_cli.models.checks.invariance import Surroundings, _logits
from dsbd_cli.models.checks.selftest import self_test
from dsbd_cli.models.decoder import load as decoder_load
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.families import decoder_config_of
from dsbd_cli.models.decoder.forward import Decoder
from dsbd_cli.models.decoder.weights import PlainLinear, read_weights
from dsbd_cli.ops import reference
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.select import triton_ops
from dsbd_cli.ops.triton import attention as kernels_attention
from dsbd_cli.ops.triton.attention import attention
from tests.models.decoders import build_decoder, save_decoder
from tests.ops.triton import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="these models are on the CPU, where no kernel runs then")
WITHOUT_PRODUCTS = ("norm", "gated", "rotate")


def forest_of(family: str, *kernels: str, **changes: Any) -> DecoderForestModel:
    """A decoder whose operations are those kernels, and plain torch elsewhere."""
    model = build_decoder(family, **changes)
    spec, state = decoder_config_of(model.config), model.state_dict()
    assert isinstance(spec, DecoderConfig)
    tensors = {name: partial(state.__getitem__, name) for name in state}
    ops = Ops(**triton_ops(kernels))
    weights = read_weights(spec, tensors, torch.float32)
    if "linear" in kernels:
        for layer in weights.layers:
            for name, linear in [*layer.linears]:
                setattr(layer, name, ops.linear(linear.weights, linear.biases))
        assert isinstance(weights.lm_head, PlainLinear)
        weights.lm_head = ops.linear(weights.lm_head.weights, weights.lm_head.biases)
    return DecoderForestModel(Decoder(spec, weights, ops), family, CheckpointSettings.of(model.config, {}))


def chain() -> ForestInput:
    """Five tokens in a row, in scattered slots of one request."""
    slots = torch.tensor([[3, 60, 7, 0, 31]])
    mask = torch.zeros(1, 5, 64, dtype=torch.bool)
    for node in range(5):
        mask[0, node, slots[0, : node + 1]] = True
    positions = torch.zeros(1, 64, dtype=torch.int64)
    positions[0, slots[0]] = torch.arange(5)
    return ForestInput(torch.arange(5)[None] + 3, torch.arange(5)[None], slots, mask, positions)


def close(ours: Any, theirs: Any) -> bool:
    return bool((ours - theirs).square().mean().sqrt() <= 1e-5 * theirs.std())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi4 partial rotary"])
def test_kernels_give_the_logits_of_plain_torch(family: str) -> None:
    logits = []
    for kernels in ((), WITHOUT_PRODUCTS, (*WITHOUT_PRODUCTS, "linear")):
        forest = forest_of(
            family, *kernels, num_hidden_layers=1, **({"layer_types": None} if "gemma" in family else {})
        )
        assert all(getattr(forest.ops, name) is not getattr(Ops(), name) for name in kernels)
        forest.reserve(1, 64)
        logits.append(forest.forward(chain()))
    for outcome in logits[1:]:
        assert close(outcome, logits[0])


def test_logits_of_a_node_have_the_same_bits_in_any_company() -> None:
    """Products and attention by kernels. Guards one of them that goes by the number of rows, slots or nodes; the other
    kernels of a layer have one program per row (tests/ops/triton/test_layers.py)."""
    # with heads of 32 numbers, and of 16 at some tokens, the interpreter's attention sums in an order that goes by the
    # number of queries: the last token is looked at
    forest = forest_of("llama", "linear", num_hidden_layers=1, head_dim=16)
    forest.attention = partial(attention, exact=True)
    alone = _logits(forest, Surroundings(others=0))
    assert forest.by_parts
    beside = Surroundings(rows=2, row=1, others=5, ahead=2, spread=2, at_once=2)
    assert torch.equal(_logits(forest, beside)[-1], alone[-1])


@pytest.mark.parametrize("family", ["llama", "mistral window"])
def test_a_long_prompt_goes_through_the_kernel_without_bits_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A common prefix of 40 slots, a suffix of 24. Guards a kernel that serves a window, whose slots not all nodes
    see."""
    monkeypatch.setattr(metadata, "LONG", 64)
    calls: list[Any] = []

    def noted(*arguments: Any, exact: bool) -> torch.Tensor:
        calls.append(arguments[4])
        return attention(*arguments, exact)

    forest = forest_of(family, num_hidden_layers=1)
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(3, 60, (1, 46), generator=generator)
    slots = torch.cat((torch.arange(40), 40 + torch.randperm(24, generator=generator)[:6].sort().values))[None]
    slot_positions = torch.zeros(1, 64, dtype=torch.int64).scatter_(1, slots, torch.arange(46)[None])
    logits = []
    for kernel in (None, partial(noted, exact=False)):
        forest.attention = kernel
        forest.reserve(1, 64)
        for first, last, prompt in ((0, 40, None), (40, 46, torch.tensor([40]))):
            seen = torch.zeros(1, last - first, 64, dtype=torch.bool)
            for node in range(first, last):
                seen[0, node - first, slots[0, : node + 1]] = True
            part = (item[:, first:last] for item in (text, torch.arange(46)[None], slots))
            output = forest.forward(ForestInput(*part, seen, slot_positions, prompt=prompt))
        logits.append(output)
        forest.release()
    assert close(logits[1], logits[0])
    assert [prompt.tolist() for prompt in calls] == ([[40]] if family == "llama" else [])


@pytest.mark.parametrize("fault", ["none", "wrong", "raises"])
def test_a_kernel_of_attention_that_fails_at_the_sizes_of_a_model_serves_nothing(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, exact: bool) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        return attention(*arguments, exact) * (1.5 if fault == "wrong" else 1)

    monkeypatch.setattr(stages, "ops_for", lambda *_: Ops(**triton_ops(["attention"])))
    monkeypatch.setattr(kernels_attention, "attention", broken)
    forest = forest_of("llama", num_hidden_layers=1)
    notes = stages._try_split_attention(forest)
    if fault == "none":
        assert forest.attention is not None
        assert notes == ()
        return
    assert forest.attention is None
    (line,) = notes
    assert ("off by" if fault == "wrong" else "out of resource") in line
    if fault == "raises":  # nor does it end the load of a target whose bits are asked for
        forest.attention = partial(broken, exact=True)
        assert "out of resource" in (stages._verdict(forest).varies or "")


@pytest.mark.parametrize("fault", ["wrong", "raises", "wrong in a forest"])
def test_kernels_of_layers_that_fail_are_left_out(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a load that ends with an error of triton's, at a width that was not tried; a later one that takes what the
    first one found to be at fault."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, asked = save_decoder(tmp_path / "model", build_decoder("llama")), list[frozenset[str]]()

    def ops_for(spec: DecoderConfig, device: Any, dtype: Any, kernels: frozenset[str]) -> Ops:
        asked.append(kernels)
        return Ops(norm=norm, rotate=rotate) if "gated" in kernels else Ops()

    def norm(*arguments: Any) -> Any:
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        out, summed = reference.norm(*arguments)
        return out * (1.5 if fault == "wrong" else 1), summed

    def rotate(*arguments: Any, **named: Any) -> Any:
        slots, keys = arguments[3], arguments[4]
        out = reference.rotate(*arguments, **named)
        if fault == "wrong in a forest" and len(slots) < 24:  # plain forwards have more tokens
            keys.flatten(0, 1)[slots] *= 1.5
        return out

    monkeypatch.setattr(decoder_load, "decoder_ops", ops_for)
    monkeypatch.setattr(
        stages._DecoderLoad,
        "_attempts",
        lambda own: [frozenset({"gated"}), frozenset()] if own._kept is None else real(own),
    )
    for number in range(2):
        spec = ModelSpec(str(folder), dtype="float32", device="cpu")
        forest, _, report = stages.load_model(Checkpoint.open(spec))
        assert isinstance(forest, DecoderForestModel)
        assert report.notes == ()
        assert asked[-1] == frozenset()
        assert len(asked) == 2 + number
        self_test(forest)


real = stages._DecoderLoad._attempts


class Launches(TorchDispatchMode):
    """Operations that a GPU would launch a small kernel for: no views, no products, no attention."""

    FREE = ("view", "unsafe_view",
            "reshape", "transpose", "t", "slice", "select", "unsqueeze", "split", "expand", "alias", "detach",
            "squeeze", "empty", "permute", "as_strided", "chunk", "new_empty", "unflatten", "lift_fresh")  # fmt: skip
    LARGE = ("mm", "addmm", "bmm", "linear", "attention")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name.strip("_") not in self.FREE and not any(large in name for large in self.LARGE):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("same_text", [False, True])
def test_a_layer_launches_eight_small_kernels_at_most(same_text: bool) -> None:
    def launches(layers: int) -> list[str]:
        forest = forest_of("llama", *WITHOUT_PRODUCTS, *(["linear"] if same_text else []), num_hidden_layers=layers)
        forest.reserve(1, 64)
        batch = chain()
        if same_text:  # as a step gives it on a GPU
            forest.attention = partial(attention, exact=True)
            batch = replace(batch, prompt_slots=(0,), suffix=64, prompt=torch.tensor([0]))
        forest.forward(batch)
        with Launches() as counting:
            forest.forward(batch)
        return counting.seen

    one, two = launches(1), launches(2)

    assert len(two) - len(one) <= 8, two
    assert two.count("norm") == 5
