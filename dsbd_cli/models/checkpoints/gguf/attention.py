"""Scale of attention scores in GGUF files. Gemma's 27B models have their own, which no metadata tell: llama.cpp knows
these models by their number of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsbd_cli.models.checkpoints.gguf.file import GgufFile

LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # by llama.cpp's architecture


def scale_attention(config: Any, file: GgufFile) -> None:
    """Give a config that transformers has made of a GGUF file of a 27B Gemma its scale of attention, in place."""
    if config.model_type.startswith("gemma") and config.num_hidden_layers == LAYERS_OF_27B.get(file.architecture):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
