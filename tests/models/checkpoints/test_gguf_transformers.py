"""transformers' readers of GGUF, which are given what ours has read: what they make of it is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, Lfm2Config, Lfm2ForCausalLM
from transformers import modeling_gguf_pytorch_utils as legacy
from transformers.integrations import gguf as seam
from transformers.integrations.gguf import reader
from transformers.quantizers import quantizer_gguf

from dsbd_cli.models.checkpoints.checkpoint import quiet
from dsbd_cli.models.checkpoints.gguf.file import GgufFile
from dsbd_cli.models.checkpoints.gguf.for_transformers import read_by_transformers
from tests.helpers.raw_gguf import random_blocks
from tests.helpers.tiny_gguf import WORDS, tiny_qwen2, write_gguf

LFM2 = {
    "embedding_norm": "token_embd_norm", "embed_tokens": "token_embd", "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj", "conv.conv": "shortconv.conv",
}  # fmt: skip


def lfm2_name(name: str) -> str:
    """The name of a weight in GGUF."""
    for theirs, own in LFM2.items():
        name = name.replace(f".{theirs}.", f".{own}.")
    return name.replace("model.layers.", "blk.").removeprefix("model.")


def write_lfm2(path: Path, most_tensors: int = 0) -> None:
    """A model with a layer of convolutions and one of attention, for transformers' newer reader."""
    with torch.device("meta"):
        model = Lfm2ForCausalLM(
            Lfm2Config(
                vocab_size=64, hidden_size=64, intermediate_size=96, block_auto_adjust_ff_dim=False,
                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                layer_types=["conv", "full_attention"],
            )
        )  # fmt: skip
    writer = gguf.GGUFWriter(path, "lfm2", split_max_tensors=most_tensors)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv([0, 2])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_shortconv_l_cache(3)
    add_tokenizer(writer, "gpt2")
    generator = np.random.default_rng(5)
    for full, weight in model.state_dict().items():
        if full == "lm_head.weight":
            continue
        name, shape = lfm2_name(full), weight.squeeze().shape
        if name.endswith(("ffn_up.weight", "attn_q.weight", "shortconv.in_proj.weight")):
            writer.add_tensor(name, random_blocks("Q8_0", *shape), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            kind = np.float16 if name == "token_embd.weight" else np.float32
            writer.add_tensor(name, generator.normal(size=shape).astype(kind))
    close(writer)


def add_tokenizer(writer: gguf.GGUFWriter, model: str) -> None:
    writer.add_tokenizer_model(model)
    writer.add_token_list([*(["<s>", "</s>", "▁"] if model == "llama" else ["<pad>", "<end>", "é"]), *WORDS, "AB"])
    writer.add_token_scores([float(-number) / 7 for number in range(64)])
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 62)
    if model == "gpt2":
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges(["! !", "A B"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0].content }}")


def write_llama(path: Path) -> None:
    """Metadata of a Llama with a tokenizer of pieces."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a model")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(16)
    add_tokenizer(writer, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((64, 64), np.float32))
    close(writer)


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@contextmanager
def ours(path: Path, layers: int | None = None, vocabulary: int | None = None) -> Iterator[None]:
    with read_by_transformers(GgufFile.open(path, "x"), layers, vocabulary):
        yield


def pretrained(path: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "local_files_only": True}


def model_of(path: Path, config: Any = None) -> dict[str, torch.Tensor]:
    model, report = AutoModelForCausalLM.from_pretrained(
        **pretrained(path),
        **({} if config is None else {"config": config}),
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    assert not report["missing_keys"]
    return dict(model.state_dict())


def write(path: Path, kind: str) -> None:
    if kind == "qwen2":
        write_gguf(tiny_qwen2(), path)
    else:
        {"lfm2": write_lfm2, "llama": write_llama}[kind](path)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "lfm2"])
def test_config_and_tokenizer_are_the_same(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.gguf"
    write(path, kind)
    config = AutoConfig.from_pretrained(**pretrained(path))
    tokenizer = AutoTokenizer.from_pretrained(**pretrained(path))
    with ours(path):
        assert AutoConfig.from_pretrained(**pretrained(path)).to_dict() == config.to_dict()
        read = AutoTokenizer.from_pretrained(**pretrained(path))
    assert read.get_vocab() == tokenizer.get_vocab()
    assert read.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert read.special_tokens_map == tokenizer.special_tokens_map
    assert read.chat_template == tokenizer.chat_template
    assert read("AB !! CAB").input_ids == tokenizer("AB !! CAB").input_ids


@pytest.mark.parametrize("kind", ["qwen2", "lfm2"])
def test_models_are_the_same(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.gguf"
    write(path, kind)
    wanted = model_of(path)
    with ours(path):
        read = model_of(path)
    assert set(read) == set(wanted)
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)


def test_the_newer_reader_is_given_all_parts(tmp_path: Path) -> None:
    write_lfm2(tmp_path / "whole.gguf")
    write_lfm2(tmp_path / "x.gguf", most_tensors=6)
    wanted = model_of(tmp_path / "whole.gguf")
    [*parts] = sorted(tmp_path.glob("x-*.gguf"))
    assert len(parts) > 2
    with ours(parts[0]):
        config, read = AutoConfig.from_pretrained(**pretrained(parts[0])), model_of(parts[0])
    assert config.to_dict() == AutoConfig.from_pretrained(**pretrained(tmp_path / "whole.gguf")).to_dict()
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", ["qwen2", "lfm2"])
def test_the_first_layers_and_tokens_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.gguf"
    write(path, kind)
    wanted = model_of(path)
    config = AutoConfig.from_pretrained(**pretrained(path))
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 40, None
    config.layer_types = config.layer_types[:1]
    with ours(path, 1, 40):
        shown = [tensor.name for tensor in gguf.GGUFReader(path).tensors]
        assert shown == [name for name in GgufFile.open(path, "x").tensors if not name.startswith("blk.1.")]
        read = model_of(path, config)
    assert not any("layers.1." in name for name in read)
    assert any("layers.0." in name for name in read)
    assert read["model.embed_tokens.weight"].shape == read["lm_head.weight"].shape == (40, config.hidden_size)
    for name, weight in read.items():
        assert torch.equal(weight, wanted[name][: len(weight)]), name


def test_types_that_the_newer_reader_does_not_know_are_told(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_tensor("blk.0.ffn_up.weight", random_blocks("Q5_0", 2, 64), raw_dtype=gguf.GGMLQuantizationType.Q5_0)
    close(writer)
    with ours(path), pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight is in Q5_0, which transformers does not"):
        reader.GgufHeader.from_file(str(path))


def test_nothing_stays_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_llama(path)
    places = [
        (gguf, "GGUFReader"),
        (legacy, "_gguf_parse_value"),
        (reader.GgufHeader, "from_file"),
        (quantizer_gguf, "load_gguf_state_dict"),
        (quantizer_gguf, "read_gguf_metadata"),
        (seam, "read_gguf_metadata"),
        (reader, "read_gguf_metadata"),
    ]
    before = [getattr(owner, name) for owner, name in places]
    with ours(path):
        assert all(getattr(owner, name) != old for (owner, name), old in zip(places, before, strict=True))
    assert [getattr(owner, name) for owner, name in places] == before
    with pytest.raises(OSError, match=r"y\.gguf"), ours(path):
        AutoConfig.from_pretrained(tmp_path, gguf_file="y.gguf", local_files_only=True)
    assert [getattr(owner, name) for owner, name in places] == before
    with read_by_transformers(None):
        assert [getattr(owner, name) for owner, name in places] == before
