"""Tensors of GGUF files under transformers' names, against transformers' own loading of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from dsbd_cli import ModelError
from dsbd_cli.models.checkpoints.gguf.file import GgufFile
from dsbd_cli.models.checkpoints.gguf.formats import GgufWeight
from dsbd_cli.models.checkpoints.gguf.names import ARCHITECTURES
from dsbd_cli.models.decoder.families import FAMILIES, decoder_config_of
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from tests.helpers.gguf_mixtures import MODELS
from tests.helpers.raw_gguf import random_blocks

HEADS, KV_HEADS = 4, 2


def writer_of(path: Path, architecture: str, name: str | None = None) -> gguf.GGUFWriter:
    """A writer that has written the metadata of a model of two layers and 64 tokens."""
    writer = gguf.GGUFWriter(path, architecture)
    if name is not None:
        writer.add_name(name)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(64)
    if architecture == "llama":
        writer.add_rope_dimension_count(16)
    if architecture.startswith("gemma"):
        writer.add_key_length(32)
        writer.add_sliding_window(16)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    return writer


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pretrained(path: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}


def write(path: Path, architecture: str, *, tied: bool = False, more: str = "rope_freqs.weight") -> Any:
    """A file with random tensors in several types, whose names and shapes are transformers' own. more: a tensor beside
    them. Returns the config."""
    first = writer_of(path, architecture)
    first.add_tensor("token_embd.weight" if tied else "output.weight", np.zeros((64, 64), np.float32))
    close(first)
    config = AutoConfig.from_pretrained(**pretrained(path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    named, state = get_gguf_hf_weights_map(model, processor), model.state_dict()
    assert set(state) - set(named.values()) <= ({"lm_head.weight"} if tied else set()), "the test covers all tensors"
    writer, generator = writer_of(path, architecture), np.random.default_rng(3)
    for number, (name, theirs) in enumerate(named.items()):
        shape = tuple(state[theirs].shape)
        if tied and name == "output.weight":
            continue
        kind = ("Q8_0", "Q4_0", "F16", "Q5_1", "F32")[number % 5] if len(shape) == 2 else "F32"
        if kind[0] == "Q":
            writer.add_tensor(name, random_blocks(kind, *shape, number), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, generator.normal(size=shape).astype(np.float16 if kind == "F16" else np.float32))
    writer.add_tensor(more, np.arange(8, dtype=np.float32))
    close(writer)
    return config


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """The weights as transformers loads them."""
    model = AutoModelForCausalLM.from_pretrained(
        **pretrained(path), dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return dict(model.state_dict())


DENSE = [architecture for architecture in ARCHITECTURES if architecture not in MODELS]
CASES = [(architecture, tied) for architecture in DENSE for tied in (False, True)]
CASES.remove(("gemma2", False))  # llama.cpp has no head for it


@pytest.mark.parametrize(("architecture", "tied"), CASES)
def test_tensors_are_those_that_transformers_loads(tmp_path: Path, architecture: str, tied: bool) -> None:
    path = tmp_path / "x.gguf"
    config = write(path, architecture, tied=tied)
    assert config.model_type in FAMILIES
    assert not isinstance(decoder_config_of(config), str)
    wanted = loaded(path)
    file = GgufFile.open(path, "x")
    assert file.reads(config.model_type)
    tensors = file.decoder_tensors
    assert set(tensors) == set(wanted) - ({"lm_head.weight"} if tied else set())
    kinds = set()
    for name, read in tensors.items():
        values = read()
        kinds.add(type(values))
        assert values.shape == wanted[name].shape
        if isinstance(values, torch.Tensor):
            assert torch.equal(values.float(), wanted[name]), name
            assert values.dim() == 2 or values.dtype == torch.float32
        else:
            assert torch.equal(values.dequantize(), wanted[name]), name
            assert torch.equal(values.dequantize(slice(3, 5)), wanted[name][3:5]), name
    assert {torch.Tensor, GgufWeight} <= kinds


def test_mistral_is_a_llama(tmp_path: Path) -> None:
    llama, path = tmp_path / "llama.gguf", tmp_path / "mistral.gguf"
    write(llama, "llama")
    writer = writer_of(path, "llama", "mistral")
    for name, tensor in GgufFile.open(llama, "x").tensors.items():
        data = GgufFile.open(llama, "x").mapped(tensor).numpy().reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(tensor.number))
    close(writer)
    own = AutoConfig.from_pretrained(**pretrained(path))
    assert own.model_type == "mistral"
    assert GgufFile.open(path, "x").reads(own.model_type)
    ours, theirs = (GgufFile.open(file, "x").decoder_tensors for file in (path, llama))
    assert list(ours) == list(theirs)
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(values_of(ours[name]()), values_of(theirs[name]()))


def values_of(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def test_biases_of_queries_are_reordered_as_their_rows(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", "llama", more="blk.1.attn_q.bias")
    file = GgufFile.open(tmp_path / "x.gguf", "x")
    file.metadata["llama.attention.head_count"] = 2
    read = file.decoder_tensors["model.layers.1.self_attn.q_proj.bias"]()
    assert torch.equal(values_of(read), torch.tensor([0.0, 2, 1, 3, 4, 6, 5, 7]))


def test_what_is_not_known_is_left_to_transformers(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    config = write(path, "qwen2")
    file = GgufFile.open(path, "x")
    assert file.reads(config.model_type)
    assert not file.reads("qwen3")
    for more in ("blk.0.ffn_gate_exps.weight", "blk.x.ffn_up.weight", "output.bias", "blk.0.attn_q_norm.weight"):
        config = write(path, "qwen2", more=more)
        assert not GgufFile.open(path, "x").reads(config.model_type)
    other = gguf.GGUFWriter(path, "starcoder2")
    other.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    close(other)
    assert not GgufFile.open(path, "x").reads("starcoder2")


def test_heads_that_do_not_fit_are_told(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", "llama")
    file = GgufFile.open(tmp_path / "x.gguf", "target model 'x'")
    file.metadata["llama.attention.head_count"] = 3
    tensors = file.decoder_tensors
    told = r"^target model 'x': x\.gguf has 64 rows in blk\.0\.attn_q\.weight, which do not fit the 3 heads"
    with pytest.raises(ModelError, match=told):
        tensors["model.layers.0.self_attn.q_proj.weight"]()
