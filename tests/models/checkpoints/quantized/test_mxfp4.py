"""gpt-oss in MXFP4: experts run as their file has them, in four bits.

Guards halves of bytes, rows of gates and values, and scales that are read in another order than they are written, and
a second rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsbd_cli import ModelSpec, load
from dsbd_cli.errors import ModelError
from dsbd_cli.models.checkpoints.quantized.mxfp4 import Mxfp4Weight, mxfp4_tensors
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.ops.cpu.int4 import CompiledInt4
from dsbd_cli.ops.select import quantize_missing
from tests.models.decoders import build_decoder, save_decoder

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = torch.tensor([*E2M1, *(-number for number in E2M1)])


def quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales and numbers [E, i, o] of weights as transformers has them, [E, i, o]: nearest numbers of E2M1."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))  # [E, o, g, 32]
    power = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True).clamp_min(1e-9))) - 2
    levels = (groups.div(2**power).unsqueeze(-1) - NUMBERS).abs().argmin(-1)
    blocks = (levels[..., 0::2] | levels[..., 1::2] << 4).to(torch.uint8)
    numbers = (NUMBERS[levels] * 2**power).flatten(2).transpose(1, 2).contiguous()
    return blocks, (power.squeeze(-1) + 127).to(torch.uint8), numbers


def write(folder: Path) -> tuple[Path, Any]:
    """A tiny gpt-oss whose experts are in MXFP4, and transformers' model of the same numbers."""
    model = build_decoder("gpt oss", intermediate_size=128, hidden_size=128)
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            state[f"{name}_blocks"], state[f"{name}_scales"], numbers = quantized(tensor)
            tensor.copy_(numbers)
    save_decoder(folder, model)
    file = folder / "model.safetensors"
    plain = {
        name: tensor for name, tensor in load_file(file).items() if not name.endswith(("gate_up_proj", "down_proj"))
    }
    save_file({**plain, **state}, file, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder, model


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return write(tmp_path_factory.mktemp("mxfp4"))


def apart(model: Any, theirs: Any) -> float:
    """Root mean square of the difference of logits, in standard deviations of what is wanted."""
    tokens = torch.arange(5, 45).unsqueeze(0)
    with torch.inference_mode():
        ours, wanted = model.plain(tokens).float(), theirs(input_ids=tokens, use_cache=False).logits
    return float((ours - wanted).square().mean().sqrt() / wanted.std())


def test_a_weight_is_its_formula() -> None:
    weight = torch.randn(3, 64, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)
    blocks, scales, numbers = quantized(weight)
    tensors = mxfp4_tensors({"x_blocks": lambda: blocks, "x_scales": lambda: scales}, "M")
    made: Any = tensors["x"]()
    assert isinstance(made, Mxfp4Weight)
    assert made.shape == (120, 64)
    assert torch.equal(made.stacked(), numbers)
    rows = torch.tensor([119, 3, 40])
    assert torch.equal(made.take(rows).dequantize(), numbers.transpose(1, 2).flatten(0, 1)[rows])
    form = made.take(rows).fourbit()
    assert torch.equal(form.columns(torch.arange(64)), made.dequantize(rows))


def test_it_runs_as_stored(stored: tuple[Path, Any]) -> None:
    if quantize_missing("stored") is not None:
        pytest.skip("no kernel of int4 on this processor")
    path, theirs = stored
    engine = load(ModelSpec(str(path), dtype="float32"), None, batch_size=1)
    assert engine.info.quantize == "mxfp4"
    assert engine.exactness == "same-text"
    assert not engine.info.notes
    target: Any = engine.target
    assert isinstance(target, DecoderForestModel)
    mixture = target.decoder.weights.layers[0].mixture
    assert type(mixture.gate_up.backend) is type(mixture.down.backend) is CompiledInt4
    assert 1e-4 < apart(target, theirs) < 0.1, "inputs are in int8, and rounding may choose another expert"


def test_it_is_dequantised_where_none_is_asked_for(stored: tuple[Path, Any]) -> None:
    path, theirs = stored
    engine = load(ModelSpec(str(path), dtype="float32", quantize="none"), None, batch_size=1)
    assert engine.info.quantize in (None, "none")
    assert isinstance(engine.target, DecoderForestModel)
    assert apart(engine.target, theirs) < 1e-5


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("gate_up_proj_scales", lambda tensor: tensor.fill_(255), "holds NaN"),
        ("gate_up_proj_scales", lambda tensor: tensor.fill_(254), "too large"),
        ("gate_up_proj_scales", lambda tensor: tensor[:, :, :1].contiguous(), "do not fit"),
        ("down_proj_blocks", lambda tensor: tensor.int(), "must be uint8"),
        ("down_proj_scales", lambda tensor: None, "is missing"),
    ],
)
def test_broken_parts_are_told(tmp_path: Path, part: str, change: Any, message: str) -> None:
    path, _ = write(tmp_path / "model")
    file, name = path / "model.safetensors", f"model.layers.2.mlp.experts.{part}"
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file({**tensors, **({} if changed is None else {name: changed})}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(ModelSpec(str(path), dtype="float32"), None, batch_size=1)
