"""Sizes and schedules of the pair."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig

EOS = "<|end|>"
VOCAB_SIZE = 2048
MAX_POSITIONS = 1024
BRANCHES = 4
TOKENIZER_RECORDS = 12_000


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a model."""

    hidden: int
    inner: int
    layers: int
    heads: int


@dataclass(frozen=True, slots=True)
class Role:
    """A model of the pair: its shape, and the steps and peak learning rate on gold answers."""

    size: Size
    steps: int
    rate: float


ROLES = {
    "target": Role(Size(hidden=256, inner=512, layers=6, heads=8), 750, 2e-3),
    "draft": Role(Size(hidden=128, inner=256, layers=2, heads=4), 6_000, 3e-3),
}
OLD_LAYERS = (0, 3)
DISTILL_STEPS = 600
DISTILL_RATE = 1e-3
GENERATED_GROUPS = 400


def llama_config(size: Size, eos: int) -> LlamaConfig:
    """The configuration of a model of this size."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.03,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=eos,
    )
