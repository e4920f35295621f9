"""Quantised checkpoints of families that are no Llama: mixtures whose routers are quantised, too, and Mamba-2.

Guards a router that the first load packs and a later one does not, a router that computes in another dtype than the
model's, and an embedding table of another name, of which the checks take the first rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsbd_cli import ModelSpec, load
from dsbd_cli.models.decoder import pack
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.load_model import TOKENS_CHECKED
from dsbd_cli.ops.cpu.int4 import CompiledInt4
from dsbd_cli.ops.select import quantize_missing
from tests.models.checkpoints.quantized.packing import Layer, compressed_config
from tests.models.decoders import build_decoder, save_decoder

compiled = pytest.mark.skipif(quantize_missing("stored") is not None, reason="no kernel reads quantised files here")
TOKENS = torch.arange(3, 43).unsqueeze(0)


def write(folder: Path, name: str, parts_of_names: set[str], **changes: Any) -> Path:
    """A tiny model with weights in four bits where a part of their names is one of these."""
    save_decoder(folder, build_decoder(name, **changes))
    file, tensors = folder / "model.safetensors", {}
    for seed, (tensor_name, tensor) in enumerate(load_file(file).items()):
        if not tensor_name.endswith(".weight") or not parts_of_names & {*tensor_name.split(".")}:
            tensors[tensor_name] = tensor
            continue
        layer = Layer.draw(*tensor.shape, seed=seed)
        layer.scales /= 32
        parts = layer.compressed(symmetric=False)
        tensors |= {f"{tensor_name.removesuffix('weight')}{part}": values for part, values in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | vars(compressed_config(symmetric=False))
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@compiled
@pytest.mark.parametrize(("name", "dtype"), [("qwen3 moe", "float32"), ("glm4 moe", "bfloat16")])
def test_quantised_routers_run_dequantised(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in (pack.pack_as_stored, pack.quantize_decoder):
        monkeypatch.setattr(function, "__defaults__", (1,))
    folder, logits = write(tmp_path / "model", name, {"gate", "experts"}), []
    for _ in range(2):
        forest = load(ModelSpec(str(folder), dtype=dtype, device="cpu")).target
        assert isinstance(forest, DecoderForestModel)
        assert forest.stored_form == "compressed-tensors"
        products = {name: getattr(owner, field) for name, owner, field in forest.decoder.weights.layers[1].products}
        assert isinstance(products["mixture.down"].backend, CompiledInt4)
        assert not hasattr(products["mixture.router"], "backend")
        logits.append(forest.plain(TOKENS))
    assert torch.equal(*logits)


@compiled
def test_mamba2_with_a_large_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack.pack_as_stored, "__defaults__", (1,))
    folder = write(tmp_path / "model", "mamba2", {"in_proj", "out_proj"}, vocab_size=TOKENS_CHECKED + 8)
    forest = load(ModelSpec(str(folder), dtype="float32", device="cpu")).target
    assert isinstance(forest, DecoderForestModel)
    assert forest.stored_form == "compressed-tensors"
