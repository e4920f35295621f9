"""Attention of TrOCR and BLIP through our function. In transformers their layers compute attention themselves and look
no function up.

Shape letters: B sequences, T tokens, S places, H heads, E head dim, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from dsbd_cli.models.adapted.attention import grouped_attention, same_logits


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's products, of its number of heads and of the argument that holds the source. out: None where
    another module projects the output."""

    query: str
    key: str
    value: str
    out: str | None
    heads: str
    source: str


LAYERS = {
    "TrOCRAttention": LayerNames("q_proj", "k_proj", "v_proj", "out_proj", "num_heads", "key_value_states"),
    "BlipTextSelfAttention": LayerNames("query", "key", "value", None, "num_attention_heads", "encoder_hidden_states"),
}


def attend_by_function(model: nn.Module, logits: Callable[[], Tensor]) -> None:
    """Have the layers named in LAYERS attend by our function, unless this changes their model's logits."""
    layers = [module for module in model.modules() if type(module).__name__ in LAYERS]
    before = logits() if layers else None
    for layer in layers:
        layer.forward = partial(_forward, layer, LAYERS[type(layer).__name__])
    if before is not None and not same_logits(before, logits()):
        for layer in layers:
            vars(layer).pop("forward", None)


def _forward(
    layer: Any,
    names: LayerNames,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the layer's output [B, T, d] for hidden_states [B, T, d], and no weights of the attention.

    It attends to the source [B, S, d] where one is given. Then `attention_mask` is the mask of the source, [B, 1, T,
    S]; otherwise it is that of the layer's own tokens.
    """
    source = kwargs.get(names.source)
    heads = getattr(layer, names.heads)

    def split(states: Tensor) -> Tensor:
        return states.unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, H, T, E]

    cache = past_key_values
    known = False
    if isinstance(cache, EncoderDecoderCache):
        known = source is not None and bool(cache.is_updated.get(layer.layer_idx))
        cache = cache.self_attention_cache if source is None else cache.cross_attention_cache
    if known:
        keys, values = cache.layers[layer.layer_idx].keys, cache.layers[layer.layer_idx].values
    else:
        read = hidden_states if source is None else source
        keys, values = split(getattr(layer, names.key)(read)), split(getattr(layer, names.value)(read))
        if cache is not None:
            keys, values = cache.update(keys, values, layer.layer_idx)
        if source is not None and isinstance(past_key_values, EncoderDecoderCache):
            past_key_values.is_updated[layer.layer_idx] = True
    queries = split(getattr(layer, names.query)(hidden_states))
    out, _ = grouped_attention(layer, queries, keys, values, attention_mask, is_causal=source is None)
    out = out.flatten(2)
    return (out if names.out is None else getattr(layer, names.out)(out)), None
