"""Our attention as a function that transformers finds by name. Models that look their attention function up are
switched to it.

forest_attention.py computes it. transformers calls the function by name and passes nothing of ours on to it, so a
context variable says which forward is under way.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dsbd_cli.models.attention_metadata import AttentionMetadata
from dsbd_cli.models.forest_attention import Blocks, Scoring, attention
from dsbd_cli.models.verdicts import LIMITS

NAME = "dsbd_grouped"

_metadata: ContextVar[AttentionMetadata | Blocks | None] = ContextVar("metadata", default=None)


@contextlib.contextmanager
def attention_over(metadata: AttentionMetadata | Blocks | None) -> Iterator[None]:
    """Enclose forwards of a forest whose slots `metadata` knows, or of a prompt that is read in blocks."""
    token = _metadata.set(metadata)
    try:
        yield
    finally:
        _metadata.reset(token)


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
    out = attention(_metadata.get(), query, key, value, attention_mask, Scoring(scale, softcap, s_aux, bias))
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
