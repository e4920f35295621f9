"""A GGUF file made from a random model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter, TokenType
from transformers import Qwen2Config, Qwen2ForCausalLM

WORDS = [*(chr(code) for code in range(33, 33 + 59)), "!!"]
LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def named(name: str) -> str:
    """The name of a weight in GGUF."""
    for ours, theirs in {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}.items():
        if name.startswith(f"{ours}."):
            return name.replace(ours, theirs)
    _, _, layer, rest = name.split(".", 3)
    inner, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYERS[inner]}.{kind}"


def tiny_qwen2() -> Qwen2ForCausalLM:
    """Two layers, 64 tokens."""
    torch.manual_seed(3)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=61,
            initializer_range=0.4,
        )
    ).eval()


def write_gguf(original: Qwen2ForCausalLM, path: Path, *, most_tensors: int = 0, dtype: type = np.float32) -> None:
    """The model, and a tokenizer of one character a token. most_tensors: of each part; 0: a single file."""
    config, writer = original.config, GGUFWriter(path, "qwen2", split_max_tensors=most_tensors)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*WORDS, "<pad>", "<end>", "<a>", "<b>"])
    writer.add_token_types([TokenType.NORMAL] * 60 + [TokenType.CONTROL] * 4)
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(61)
    writer.add_pad_token_id(60)
    for name, weight in original.state_dict().items():
        writer.add_tensor(named(name), weight.numpy().astype(dtype if weight.dim() > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
