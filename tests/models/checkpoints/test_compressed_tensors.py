"""Checkpoints that the package compressed-tensors has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

from dsbd_cli import ModelSpec, load
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint, quiet
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from dsbd_cli.ops.select import quantize_missing


def quantized(folder: Path, scheme: str, form: str) -> LlamaForCausalLM:
    """Write a small random Llama in this form; returns it as it was before."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from dsbd_cli.models.checkpoints.loader import load as load_checkpoint

    _, tokenizer = load_checkpoint(Checkpoint.open(ModelSpec("builtin:target")))
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(shape)
    before = LlamaForCausalLM(shape)
    before.load_state_dict(model.state_dict())
    groups = {"group_0": quantization.preset_name_to_scheme(scheme, ["Linear"])}
    config = quantization.QuantizationConfig(config_groups=groups, ignore=["lm_head"], format=form)
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        scale = getattr(module, "weight_scale", None)
        if isinstance(module, torch.nn.Linear) and scale is not None:
            highest = 2 ** (module.quantization_scheme.weights.num_bits - 1) - 1
            blocks = module.weight.data.reshape(scale.shape[0], scale.shape[1], -1)
            scale.data = (blocks.abs().amax(-1) / highest).to(scale.dtype)
            module.quantization_status = quantization.QuantizationStatus.FROZEN
    compressor = compressors.ModelCompressor.from_pretrained_model(model, quantization_format=form)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    compressor.update_config(folder)
    return before.eval()


@pytest.mark.parametrize(
    ("scheme", "form", "off"), [("W8A16", "pack-quantized", 0.02), ("W4A16", "pack-quantized", 0.4)]
)
def test_it_loads_and_is_near_what_was_quantised(
    tmp_path: Path, scheme: str, form: str, off: float, capfd: pytest.CaptureFixture[str]
) -> None:
    before = quantized(tmp_path, scheme, form)
    capfd.readouterr()
    engine: Any = load(ModelSpec(str(tmp_path)), None)
    assert not capfd.readouterr().err
    tokens = torch.arange(5, 25).unsqueeze(0)
    with torch.inference_mode():
        logits, exact = engine.target.plain(tokens).float(), before(tokens).logits
    error = (logits - exact).norm() / exact.norm()
    assert 0 < error < off
    assert engine.exactness == "same-text"


def test_int8_on_top(tmp_path: Path) -> None:
    quantized(tmp_path, "W8A16", "pack-quantized")
    spec = ModelSpec(str(tmp_path), device="cpu", quantize="int8")
    if (reason := quantize_missing("int8")) is not None:
        pytest.skip(reason)
    info = load(spec, None).info
    assert info is not None
    assert info.quantize == "int8"


@pytest.mark.parametrize(
    ("scheme", "form"), [("W8A16", "pack-quantized"), ("W4A16", "pack-quantized"), ("W8A8", "int-quantized")]
)
def test_its_packed_weights_are_those_that_transformers_makes(tmp_path: Path, scheme: str, form: str) -> None:
    quantized(tmp_path, scheme, form)
    with quiet():
        theirs = LlamaForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
        ).state_dict()
    packed = 0
    for name, read in Checkpoint.open(ModelSpec(str(tmp_path), device="cpu")).tensors.items():
        weight = read()
        packed += isinstance(weight, QuantizedWeight)
        plain = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        assert torch.allclose(plain, theirs[name], rtol=1e-6, atol=0), name
    assert packed == 14
