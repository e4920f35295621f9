"""Function-preserving expansion of a small Llama checkpoint to the shape, and so to the cost, of a large one.

    python -m benchmarks.inflate --shape tinyllama-1.1b --role target --out DIR

Shapes and cost of the result are real, its weights are not: it computes the small model's function. Nobody learns
anything about a large
model's text from it, only about time and memory with realistic acceptance.

How: the residual stream is padded with zeros (RMSNorm weights times sqrt(d/D) keep its values), but for one channel
that
holds a constant: it takes the part of the norm's eps, and makes the logits of padding ids very low. Heads keep their
rotary frequencies by spreading over the larger head size (queries scaled, since attention divides by the root of it).
New heads, neurons and layers have random weights that end in zero output columns. Weights that no real value reaches
are random, not zero: zeros run faster and cooler.
"""

from __future__ import annotations

import argparse
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dsbd_cli.models.checkpoints.registry import resolve

PADDING_LOGIT = 2000.0  # over the root mean square of the last hidden state

__all__ = ["SHAPES", "Shape", "inflate"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama shape: hidden size, layers, query heads, key-value heads, head size, inner size, vocabulary."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int


# TinyLlama has 4 key-value heads; the built-in target's 8 do not fit into them, so its inflated copy has 8.
SHAPES = {
    "tinyllama-1.1b": Shape(2048, 22, 32, 8, 64, 5632, 32000),
    "llama-68m": Shape(768, 2, 12, 12, 64, 3072, 32000),
    "qwen3-1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151936),
    "llama-7b": Shape(4096, 32, 32, 32, 128, 11008, 32000),
    "llama-13b": Shape(5120, 40, 40, 40, 128, 13824, 32000),
}


def inflate(
    small: LlamaForCausalLM,
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LlamaForCausalLM:
    """A model of the given shape with the small model's logits; padding ids get the lowest logits. Made where it is to
    run: a host would take a minute for the random weights of a 7B shape.

    Raises ValueError where the small model does not fit into the shape.
    """
    config = small.config
    _check(config, shape)
    small = small.to(device)
    with torch.device("meta"):
        large = LlamaForCausalLM(_large_config(config, shape, dtype)).to(dtype)
    large.to_empty(device=device)
    # the frequencies are no weights: computed, and in float32 whatever the weights are
    large.model.rotary_emb = type(large.model.rotary_emb)(large.config).to(device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in large.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
        _fill(small, large, shape)
    large.generation_config = small.generation_config
    return large.eval()


def _large_config(config: LlamaConfig, shape: Shape, dtype: torch.dtype) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=config.rope_parameters,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        dtype=dtype,
    )


def _check(config: LlamaConfig, shape: Shape) -> None:
    small = config.hidden_size // config.num_attention_heads
    fits = (
        config.hidden_size < shape.hidden
        and config.num_hidden_layers <= shape.layers
        and config.num_attention_heads <= shape.heads
        and config.num_key_value_heads == config.num_attention_heads
        and config.num_attention_heads <= shape.kv_heads
        and shape.head_dim % small == 0
        and config.intermediate_size <= shape.inner
        and config.vocab_size <= shape.vocabulary
    )
    if not fits:
        raise ValueError(f"a Llama of hidden size {config.hidden_size} does not fit into {shape}")


def _fill(small: LlamaForCausalLM, large: LlamaForCausalLM, shape: Shape) -> None:
    """Overwrite the random weights where the small model's values go, and with zeros where nothing may come out."""
    config = small.config
    width, vocabulary = config.hidden_size, config.vocab_size
    constant = width  # the channel that holds a constant
    embedding, head = large.model.embed_tokens.weight, large.lm_head.weight
    embedding.zero_()
    embedding[:vocabulary, :width] = small.model.embed_tokens.weight
    embedding[:, constant] = math.sqrt(width * config.rms_norm_eps)
    head[:vocabulary, :width] = small.lm_head.weight
    head[:vocabulary, constant] = 0.0
    head[vocabulary:, :width] = 0.0
    head[vocabulary:, constant] = -1.0
    _norm(small.model.norm, large.model.norm, shape)
    large.model.norm.weight[constant] = PADDING_LOGIT / math.sqrt(width * config.rms_norm_eps)
    for number, layer in enumerate(large.model.layers):
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        layer.input_layernorm.weight[constant] = layer.post_attention_layernorm.weight[constant] = 0.0
        if number < config.num_hidden_layers:
            source = small.model.layers[number]
            _norm(source.input_layernorm, layer.input_layernorm, shape)
            _norm(source.post_attention_layernorm, layer.post_attention_layernorm, shape)
            _attention(source.self_attn, layer.self_attn, config, shape)
            inner = config.intermediate_size
            for name in ("gate_proj", "up_proj"):
                getattr(layer.mlp, name).weight[:inner, :width] = getattr(source.mlp, name).weight
            layer.mlp.down_proj.weight[:width, :inner] = source.mlp.down_proj.weight


def _norm(source: torch.nn.Module, target: torch.nn.Module, shape: Shape) -> None:
    """Real channels keep their values; the constant channel, the first behind them, is not passed on."""
    width = source.weight.shape[0]
    target.weight[:width] = source.weight * math.sqrt(width / shape.hidden)
    target.weight[width] = 0.0


def _attention(source: torch.nn.Module, target: torch.nn.Module, config: LlamaConfig, shape: Shape) -> None:
    width, heads = config.hidden_size, config.num_attention_heads
    small = width // heads
    spread = _spread(small, shape.head_dim)
    groups = shape.heads // shape.kv_heads
    scale, dtype = math.sqrt(shape.head_dim / small), target.q_proj.weight.dtype
    for head in range(heads):
        rows = slice(head * small, (head + 1) * small)
        query = torch.arange(shape.head_dim) + head * groups * shape.head_dim
        key = torch.arange(shape.head_dim) + head * shape.head_dim
        target.q_proj.weight[query] = 0.0
        target.q_proj.weight[query[spread], :width] = (source.q_proj.weight[rows] * scale).to(dtype)
        target.k_proj.weight[key[spread], :width] = source.k_proj.weight[rows].to(dtype)
        target.v_proj.weight[key[:small], :width] = source.v_proj.weight[rows].to(dtype)
        target.o_proj.weight[:width, query[:small]] = source.o_proj.weight[:, rows].to(dtype)


def _spread(small: int, large: int) -> Tensor:
    """Places in a larger head with the same rotary frequencies: channel i of each half goes to i * large / small."""
    half = torch.arange(small // 2) * (large // small)
    return torch.cat((half, half + large // 2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Expand a small Llama checkpoint to a large shape.")
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--role", choices=("target", "draft"), required=True, help="which of the built-in pair")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    source = Path(resolve(f"builtin:{arguments.role}").path)
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    inflate(small, SHAPES[arguments.shape], getattr(torch, arguments.dtype)).save_pretrained(arguments.out)
    for file in source.glob("tokenizer*"):
        shutil.copy(file, arguments.out)


if __name__ == "__main__":
    main()
