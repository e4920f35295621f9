"""GGUF files made from transformers models, as llama.cpp's converter makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from tests.helpers.raw_gguf import random_blocks

WORDS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "!!"]


def write_model(
    path: Path,
    model: Any,
    architecture: str,
    *,
    kind: str | None = None,
    scale: float = 1.0,
    others: Mapping[str, tuple[str, float]] | None = None,
    more: Callable[[GGUFWriter], object] = lambda writer: None,
) -> None:
    """Write a model and a tokenizer of one byte a token.

    kind: of random blocks, which take the place of its matrices; None: they are in float32. scale: of these blocks.
    others: kind and scale of matrices that have another kind, by the last part of their names. more: writes more
    metadata and tensors.
    """
    config, writer = model.config, begin(path, model.config, architecture)
    more(writer)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    state = model.state_dict()
    for seed, (name, theirs) in enumerate(get_gguf_hf_weights_map(model, processor).items()):
        if name == "output.weight" and config.tie_word_embeddings:
            continue
        values = state[theirs].float()
        if kind is not None and values.dim() == 2:
            own, size = (others or {}).get(name.removesuffix(".weight").rpartition(".")[2], (kind, scale))
            blocks = random_blocks(own, *values.shape, seed, size)
            writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[own])
        else:
            writer.add_tensor(name, _changed(name, values, config, architecture).numpy().astype(np.float32))
    finish(writer)


def begin(path: Path, config: Any, architecture: str) -> GGUFWriter:
    """Begin a file with a model's metadata and a tokenizer of one byte a token."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture == "gemma3":
        writer.add_key_length(head_dim)
        writer.add_sliding_window(config.sliding_window)
    else:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    tokens = [*WORDS, *(f"<x{number}>" for number in range(config.vocab_size - len(WORDS)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * len(WORDS) + [TokenType.CONTROL] * (len(tokens) - len(WORDS)))
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_pad_token_id(len(tokens) - 2)
    return writer


def finish(writer: GGUFWriter) -> None:
    """Write a file that has all its tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _changed(name: str, values: Tensor, config: Any, architecture: str) -> Tensor:
    """Return a tensor with llama.cpp's changes."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    return values


def random_model(kind: type, **settings: Any) -> Any:
    """Return a random model of a transformers config class."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(kind(**settings)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.15)
        else:
            parameter.normal_(0.8, 0.2)
    return model
