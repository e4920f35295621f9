"""int8 linear layers: the products of integers they claim to be, rows that do not depend on each other, refusals."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import UsageError
from dsbd_cli.models.checkpoints import loader
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.pack import quantize_decoder
from dsbd_cli.models.load_model import load_model
from dsbd_cli.models.pair import load_pair
from dsbd_cli.models.transformers_backend.patching import QuantizedLinear, quantize
from dsbd_cli.models.transformers_backend.seq2seq import sample_encoder_input
from dsbd_cli.ops import select
from dsbd_cli.ops.cpu.int8 import Int8Product
from dsbd_cli.ops.select import quantize_missing
from tests.helpers.checkpoints import numbers, save
from tests.helpers.kernels import forget, only
from tests.helpers.pairs import DISTANT
from tests.helpers.tiny import V

module = sys.modules["dsbd_cli.ops.cpu.int8"]

needs_int8 = pytest.mark.skipif(quantize_missing("int8") is not None, reason=f"{quantize_missing('int8')}")


class Attention(nn.Module):
    """Two layers that read the same tensor, and one that reads another."""

    def __init__(self, dtype: torch.dtype, bias: bool) -> None:
        super().__init__()
        self.left = nn.Linear(160, 72, bias=bias, dtype=dtype)
        self.right = nn.Linear(160, 72, bias=bias, dtype=dtype)
        self.out = nn.Linear(72, 160, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.left(x) * self.right(x))


# torch's is exact where the processor adds products of 8 bits in 32
WAYS = [
    backend
    for backend in (module.TorchInt8, module.CompiledInt8)
    if any(
        kernel.op is backend and select._missing(kernel, torch.float32, frozenset()) is None for kernel in select.TABLE
    )
]


@pytest.fixture(params=WAYS, ids=lambda backend: backend.__name__)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torch's operators, and our kernel where the processor has its instructions."""
    with only(monkeypatch, request.param, "int8"):
        yield request.param


def block(dtype: torch.dtype = torch.float32, bias: bool = True) -> Attention:
    torch.manual_seed(1)
    return Attention(dtype, bias).requires_grad_(False)


def inputs(rows: int, dtype: torch.dtype = torch.float32, seed: int = 2) -> Tensor:
    """Rows with a few channels a hundred times as large as the others."""
    x = torch.randn(rows, 160, generator=torch.Generator().manual_seed(seed))
    x[:, 5:150:29] *= 100
    return x.to(dtype)


def small(model: nn.Module, x: Tensor) -> int:
    """int8 for layers of any size, calibrated with x."""
    return quantize(model, lambda: model(x), "int8", least=1)


@needs_int8
@pytest.mark.parametrize("shape", [(9, 160, 72), (5, 72, 160), (210, 64, 130), (7, 5000, 3)])
def test_the_sums_are_those_of_the_integers_exactly(backend: Any, shape: tuple[int, int, int]) -> None:
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(4)
    weight = torch.randint(-127, 128, (outputs, inputs), generator=generator)
    weight[:, 0], weight[:, 1] = 0, 127  # an outlier, and the largest number, so that a level is worth 1
    x = torch.randn(rows, inputs, generator=generator)
    ordinary = x.clone()
    ordinary[:, 0] = 0
    with torch.inference_mode():
        made = backend([weight.float()], torch.tensor([0]), torch.zeros(outputs), select.packed_linear)
        assert torch.equal(made.scales[:outputs], torch.ones(outputs))
        levels, steps, few = made.levels(x)
        sums = made.multiply(levels, torch.ones(rows, 1), few)
    centred = levels[:, :inputs].long() - made.zero_point
    assert centred.abs().max() == 127  # symmetric: -128 is never used
    assert torch.equal(centred, torch.floor(ordinary / steps + 128.5).long() - 128)
    assert torch.equal(few, x[:, :1])
    exact = centred @ weight.t()
    assert exact.abs().max() < 2**24  # float32 holds them
    assert torch.equal(sums.long(), exact)


@needs_int8
def test_the_channels_with_the_largest_values_are_kept_as_they_are() -> None:
    model, x = block(), inputs(16)
    exact = model(x)
    small(model, inputs(16, seed=3))
    assert isinstance(model.left, QuantizedLinear)
    assert set(range(5, 150, 29)) <= set(model.left.product.linear.backend._outliers.tolist())
    error = (model(x) - exact).norm() / exact.norm()
    blind = block()
    small(blind, torch.randn(16, 160) * (1 + 9 * (torch.arange(160) % 29 != 5)))  # finds others
    blind_error = (blind(x) - exact).norm() / exact.norm()
    assert error < 0.01 < blind_error


@needs_int8
def test_layers_that_read_one_tensor_share_its_integers() -> None:
    model = block()
    small(model, inputs(4, seed=3))
    left, right, out = model.left, model.right, model.out
    assert isinstance(left, QuantizedLinear)
    assert isinstance(right, QuantizedLinear)
    assert isinstance(out, QuantizedLinear)
    assert left.product is right.product
    assert left.product.linear.parts == [72, 72]
    assert out.product.linear.parts == [160]
    x, y = inputs(5), inputs(5, seed=9)
    with torch.inference_mode():
        expected = left(y), right(y)  # the second takes what the first has made, and nothing is left of it
        assert left.product._kept is None
        left(x)  # nobody asks for the second half
        assert torch.equal(right(y), expected[1])
        assert torch.equal(left(y), expected[0])


@needs_int8
def test_layers_apart_do_not_share() -> None:
    class Changing(Attention):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            left = self.left(x)
            return self.out(left * self.right(x.mul_(2)))  # the same tensor with other numbers

    model = Changing(torch.float32, bias=False).requires_grad_(False)
    small(model, inputs(4))
    assert isinstance(model.left, QuantizedLinear)
    assert isinstance(model.right, QuantizedLinear)
    assert model.left.product is not model.right.product


@needs_int8
def test_a_row_of_zeros_gives_the_bias() -> None:
    model = block()
    bias = model.left.bias
    small(model, inputs(4))
    with torch.inference_mode():
        assert torch.equal(model.left(torch.zeros(2, 160)), bias.expand(2, -1))


@needs_int8
def test_layers_that_calibration_does_not_reach_stay() -> None:
    model = nn.ModuleDict({"used": nn.Linear(64, 64), "idle": nn.Linear(64, 64)}).requires_grad_(False)
    assert quantize(model, lambda: model["used"](torch.randn(3, 64)), "int8", least=1) == 1
    assert isinstance(model["used"], QuantizedLinear)
    assert type(model["idle"]) is nn.Linear
    assert not model["idle"]._forward_pre_hooks


def test_a_backend_that_fails_is_not_said_to_be_torch() -> None:
    class Fails(module.CompiledInt8):  # type: ignore[misc,name-defined]
        def __init__(self, *arguments: object) -> None:
            raise RuntimeError("no room")

    assert module.fault(Fails, select.packed_linear) == "int8 linear layers fail on this processor: no room"


@needs_int8
def test_small_products_stay() -> None:
    model = block()
    assert quantize(model, lambda: model(inputs(4)), "int8", least=2 * 160 * 72) == 2  # the first two are one product
    assert isinstance(model.left, QuantizedLinear)
    assert isinstance(model.right, QuantizedLinear)
    assert type(model.out) is nn.Linear
    assert quantize(block(), lambda: None, "int8") == 0


WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for replaces in (quantize, quantize_decoder):
        monkeypatch.setattr(replaces, "__defaults__", (1,))


@needs_int8
@pytest.mark.parametrize("family", ["llama", "qwen2", "opt", "gemma3 window"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_loaded_model_is_close_and_invariant(
    family: str, dtype: str, weights: Any, any_size: None, tmp_path: Path
) -> None:
    """Guards the whole way from a folder: the logits are the checkpoint's but for rounding, and same-text holds."""
    if (reason := quantize_missing(weights)) is not None:
        pytest.skip(reason)
    changes = WIDE if family != "opt" else {"hidden_size": 128, "ffn_dim": 192, "word_embed_proj_dim": 128}
    if "gemma3" not in family:
        changes = {name: size for name, size in changes.items() if name != "head_dim"}
    folder = str(save(tmp_path, family, **changes))
    spec = ModelSpec(folder, device="cpu", dtype=dtype, quantize=weights)
    pair = load_pair(Checkpoint.open(spec), None)
    assert pair.target_dtype == f"{weights}+{dtype}"
    target: Any = pair.target
    assert isinstance(target, DecoderForestModel) == (family != "opt")
    if family == "opt":
        layers = target.module.model.decoder.layers
        rough = [layer for block in layers for layer in (block.self_attn.out_proj, block.fc1, block.fc2)]
        fine = [layer for block in layers for layer in (block.self_attn.q_proj, block.self_attn.v_proj)]
        assert {type(layer) for layer in (*rough, *fine)} == {QuantizedLinear}
        rough, fine = ([layer.product.linear for layer in layers] for layers in (rough, fine))
    else:
        decoder = target.decoder.weights
        rough = [getattr(layer, name) for layer in decoder.layers for name in ("out", "gate_up", "down")]
        fine = [decoder.lm_head, *(layer.qkv for layer in decoder.layers)]
        assert {type(product) for product in (*rough, *fine)} == {Int8Product}
    assert {isinstance(product.backend, select.int4.CompiledInt4) for product in rough} == {weights == "int4"}
    assert not any(isinstance(product.backend, select.int4.CompiledInt4) for product in fine)
    assert target.invariant
    exact: Any = load_model(Checkpoint.open(ModelSpec(folder, device="cpu", dtype="float32"))).model
    tokens = torch.randint(0, V, (2, 19), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        ours, theirs = target.plain(tokens).float(), exact.plain(tokens)
    error = (ours - theirs).norm() / theirs.norm()
    assert 1e-5 < error < {"int8": 0.05, "int4": 0.3}[weights]


@needs_int8
def test_what_stays_as_it_is_is_told(any_size: None, tmp_path: Path) -> None:
    """Guards a mixture that takes as much memory as before, and says nothing."""
    sizes = {**WIDE, "intermediate_size_mlp": 192, "num_local_experts": 8}
    spec = ModelSpec(str(save(tmp_path / "llama4", "llama4 chunks", **sizes)), device="cpu", quantize="int8")
    (note,) = load_model(Checkpoint.open(spec)).report.notes
    assert re.fullmatch(r"82% of the target's weights stay in float32, not int8: those of Llama4TextExperts", note)


@needs_int8
def test_falcon_is_quantized_whole(any_size: None, tmp_path: Path) -> None:
    """Guards Falcon's own class of linear layers, of which only the LM head was none."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4}
    spec = ModelSpec(str(save(tmp_path / "falcon", "falcon rotary", **sizes)), device="cpu", quantize="int8")
    loaded: Any = load_model(Checkpoint.open(spec))
    assert not loaded.report.notes
    assert not [module for module in loaded.model.module.modules() if isinstance(module, nn.Linear)]
    assert sum(isinstance(module, QuantizedLinear) for module in loaded.model.module.modules()) == 2 * 4 + 1


@needs_int8
def test_a_later_load_keeps_the_outliers(any_size: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, without the tokens by which outliers are found."""
    spec = ModelSpec(str(save(tmp_path / "model", "llama", **WIDE)), device="cpu", dtype="float32", quantize="int8")
    first: Any = load_model(Checkpoint.open(spec)).model
    monkeypatch.setattr("dsbd_cli.models.decoder.load.find_outliers", lambda *_: pytest.fail("looked for"))
    again: Any = load_model(Checkpoint.open(spec)).model
    tokens = torch.randint(0, V, (2, 19), generator=torch.Generator().manual_seed(5))
    assert torch.equal(first.plain(tokens), again.plain(tokens))
    assert again.invariant
    assert isinstance(again.decoder.weights.layers[0].down, Int8Product)


@needs_int8
def test_an_encoder_decoder_model(any_size: None, tmp_path: Path) -> None:
    """Guards the layers of an encoder and those that read it: all are reached and their texts stay invariant. Sources
    share a forward, which they did not while that was settled before the layers were int8."""
    folder = tmp_path / "t5"
    torch.manual_seed(6)
    config = transformers.T5Config(**{**DISTANT, "d_model": 128, "d_ff": 192, "d_kv": 32})
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    numbers().save_pretrained(folder)
    model: Any = load_model(
        Checkpoint.open(ModelSpec(str(folder), device="cpu", dtype="float32", quantize="int8"))
    ).model
    linear = [layer for layer in model.module.modules() if isinstance(layer, nn.Linear)]
    int8 = [layer for layer in model.module.modules() if isinstance(layer, QuantizedLinear)]
    assert not linear
    assert len(int8) == 2 * 6 + 2 * 10 + 1
    assert model.invariant
    runs = []
    model._encoder.register_forward_hook(lambda *_: runs.append(1))
    sources = [sample_encoder_input(model, size, seed) for seed, size in enumerate((9, 31, 20))]
    model.reserve(3, 8)
    model.encode([0, 1, 2], sources)
    together = [stored.clone() for layer in model._cross._own for stored in layer.stored]
    assert len(runs) == 1
    for row, source in enumerate(sources):
        model.encode([row], [source])
    apart = [stored for layer in model._cross._own for stored in layer.stored]
    assert all(map(torch.equal, together, apart))


def test_a_draft_is_loaded_as_its_target() -> None:
    spec = ModelSpec("t", quantize="int8").of_draft("d")
    assert (spec.role, spec.quantize) == ("draft", "int8")


def test_refusals(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    """Guards options that would do nothing: each says the reason in one line."""
    for other, said in (({"device_map": "balanced"}, "device_map"), ({"tensor_parallel": 2}, "tensor_parallel")):
        with pytest.raises(UsageError, match=f"quantize is 'int8', but {said} is"):
            ModelSpec("t", quantize="int8", **other)
    with pytest.raises(UsageError, match="quantize is 'int2', but must be one of int8, int4"):
        ModelSpec("t", quantize="int2")  # type: ignore[arg-type]
    spec = ModelSpec(str(checkpoint), device="cpu", quantize="int8")
    monkeypatch.setattr(loader, "quantize_missing", lambda _, **more: None)  # on any processor
    with pytest.raises(UsageError, match=r"quantize is int8, but .* has no linear layer of 100000 weights or more"):
        load_model(Checkpoint.open(spec))
    monkeypatch.setattr(
        loader, "quantize_missing", lambda _, **more: "this build of torch has no int8 linear layers (oneDNN)"
    )
    with pytest.raises(UsageError, match="quantize is int8, but this build of torch has no int8 linear layers"):
        load_model(Checkpoint.open(spec))
    # what the command says is looked at first: the other question compiles kernels
    monkeypatch.setattr(loader, "quantize_missing", lambda _, **more: pytest.fail("asked though it cannot matter"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    with pytest.raises(UsageError, match=r"but int8 runs on the CPU only: .*--device cpu"):
        load_model(Checkpoint.open(ModelSpec(str(checkpoint), quantize="int8")))


def test_a_processor_that_saturates_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards processors whose 8-bit products stop at 16 bits, and builds without the operators."""
    monkeypatch.setattr(module.TorchInt8, "multiply", lambda *_: torch.full((5, 96), 32767.0))
    with only(monkeypatch, module.TorchInt8, "int8"):
        assert quantize_missing("int8") == "this processor's int8 products are not exact"
        monkeypatch.setattr(torch.ops, "onednn", object())
        forget()
        assert quantize_missing("int8") == "this build of torch has no int8 linear layers (oneDNN)"
