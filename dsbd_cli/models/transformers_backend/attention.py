"""Our attention as a function that transformers finds by name. Models that look their attention function up are
switched to it.

Layers of TrOCR and BLIP, which compute attention themselves and look no function up, get a forward that calls ours.
Those of GPT-J, CodeGen, GPT-Neo and GPT-NeoX-Japanese have a method for it, which is replaced.

A context variable says which forward is under way: LongT5, Moonshine, BLIP and decoders of pictures pass no keyword of
ours on to the function.

Shape letters: B sequences, T tokens, S slots or places, H kv heads, G query heads per kv head, E head dim, d width.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dsbd_cli.models.attention.forest import Scoring
from dsbd_cli.models.attention.metadata import AttentionMetadata
from dsbd_cli.models.attention.views import attend
from dsbd_cli.models.verdicts import LIMITS

NAME = "dsbd_grouped"

_metadata: ContextVar[AttentionMetadata | None] = ContextVar("metadata", default=None)


@contextlib.contextmanager
def attention_over(metadata: AttentionMetadata) -> Iterator[None]:
    """Enclose the forward that `metadata` was prepared for."""
    token = _metadata.set(metadata)
    try:
        yield
    finally:
        _metadata.reset(token)


def node_positions() -> Tensor | None:
    """Return the positions [R, n] of the nodes of the forward under way; None outside of a forest."""
    metadata = _metadata.get()
    return None if metadata is None else metadata.positions


def slot_positions() -> Tensor | None:
    """Return the positions [R, S] of the tokens in the slots of the forward under way; None outside of a forest."""
    metadata = _metadata.get()
    return None if metadata is None else metadata.slot_positions


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Return attention [R, n, H * G, E] of query [R, H * G, n, E] over key and value [R, H, S, E], and no weights.

    attention_mask: [R, 1, n, S]. softcap: scores become softcap * tanh(score / softcap). s_aux: [H * G], a score per
    head that takes weight and has no value (attention sinks). position_bias in kwargs: [R or 1, H * G, n, S], added to
    the scores (T5).
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    bias = kwargs.get("position_bias")
    assert bias is None or isinstance(bias, Tensor)
    out = attend(_metadata.get(), query, key, value, attention_mask, Scoring(scale, softcap, s_aux, bias))
    if out is not None:
        return out, None
    stock: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
    return stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_grouped_attention(model: Any) -> None:
    """Switch a model that looks its attention function up by name; leave any other as it is.

    A model may run on transformers' eager function because torch's kernel has no caps and no sinks. It is switched only
    if its logits stay the same, because its function might do more.
    """
    stock = getattr(model.config, "_attn_implementation", None)
    has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    if not (getattr(model, "_supports_attention_backend", False) or has_encoder or _looks_up(model)):
        return
    model.stock_attention = stock  # for comparators
    if stock == "sdpa":
        model.set_attn_implementation(NAME)
    elif stock == "eager" and (
        (has_encoder and model.main_input_name == "input_ids")
        or getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
        or any(hasattr(module, "sinks") for module in model.modules())
    ):
        embeddings = model.get_input_embeddings().weight
        tokens = torch.arange(24, device=embeddings.device).remainder(len(embeddings)).unsqueeze(0)
        inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if has_encoder else {})
        with torch.no_grad():
            before = model(**inputs, use_cache=False).logits
            model.set_attn_implementation(NAME)
            after = model(**inputs, use_cache=False).logits
        if not same_logits(before, after):
            model.set_attn_implementation(stock)


def same_logits(before: Tensor, after: Tensor) -> bool:
    """Return whether two passes over the same tokens give the same logits, up to rounding."""
    error = (after.float() - before.float()).square().mean().sqrt()
    return bool(error <= LIMITS[before.dtype] * before.float().std())


def _looks_up(model: Any) -> bool:
    """Return whether a model looks its attention function up by name though it does not say so, as most hybrids do."""
    forwards = (getattr(inspect.unwrap(type(module).forward), "__code__", None) for module in model.modules())
    return any("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in forwards if code is not None)


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


def replace_methods(model: nn.Module) -> None:
    """Have the layers of the classes in _METHODS attend by our function. The own method of GPT-NeoX-Japanese takes keys
    that lie row after row, which those of a cache with several rows do not, and that of GPT-Neo masks by slot."""
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ in _METHODS]
    for layer in layers:
        layer._attn = partial(_METHODS[type(layer).__name__], layer, layer._attn)


def _attend_in_neox(layer: Any, stock: object, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
    """Return attention [R, H, n, E], and no weights."""
    out, weights = grouped_attention(layer, query, key, value, mask, scaling=1 / layer.norm_factor)
    return out.transpose(1, 2), weights


def _attend_in_gptj(layer: Any, stock: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
    """Return attention [R, H, n, E], and no weights; outside of a forest what the layer's own method returns."""
    if _metadata.get() is None:
        return stock(query, key, value, mask)
    out, weights = grouped_attention(layer, query, key, value, mask, scaling=1 / float(layer.scale_attn))
    return out.transpose(1, 2), weights


def _attend_in_neo(layer: Any, stock: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
    """Return attention [R, H, n, E], and no weights; outside of a forest what the layer's own method returns. The model
    hands all layers the mask without a window."""
    metadata = _metadata.get()
    if metadata is None:
        return stock(query, key, value, mask)
    if layer.attention_type == "local":
        whole = metadata.find(mask)
        mask = next(other.additive for other in metadata.masks if other is not whole)
    out, weights = grouped_attention(layer, query, key, value, mask, scaling=1.0)
    return out.transpose(1, 2), weights


_METHODS: dict[str, Callable[..., Any]] = {
    "GPTNeoXJapaneseAttention": _attend_in_neox,
    "GPTNeoSelfAttention": _attend_in_neo,
    "GPTJAttention": _attend_in_gptj,
    "CodeGenAttention": _attend_in_gptj,
}


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
    is_kept = False
    if isinstance(cache, EncoderDecoderCache):
        is_kept = source is not None and bool(cache.is_updated.get(layer.layer_idx))
        cache = cache.self_attention_cache if source is None else cache.cross_attention_cache
    if is_kept:
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
