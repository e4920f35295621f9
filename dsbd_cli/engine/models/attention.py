"""Attention for grouped-query models under a forest mask, without repeating keys and values.

The stock sdpa path copies the cache `groups` times in every layer once a forward has a mask and more than one query.
Here the query heads of one kv head are laid side by side as more queries instead, and only the small mask is repeated.

Shape letters: R rows, H kv heads, G query heads per kv head, n queries, S slots, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["NAME", "grouped_attention", "use_grouped_attention"]

NAME = "dsbd_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """query [R, H * G, n, E], key and value [R, H, S, E], mask [R, 1, n, S] -> [R, n, H * G, E].

    Without a mask shared by all heads, and in prefills so long that the repeated mask is larger than repeated keys and
    values would be, transformers' own sdpa function is called.
    """
    rows, heads, count, dim = query.shape
    kv_heads = key.shape[1]
    shared = attention_mask is not None and attention_mask.shape[1] == 1 and kwargs.get("position_bias") is None
    if attention_mask is None or not shared or heads == kv_heads or count > 2 * kv_heads * dim:
        stock: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
        return stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    groups = heads // kv_heads
    out = nn.functional.scaled_dot_product_attention(
        query.reshape(rows, kv_heads, groups * count, dim),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, groups, 1),
        dropout_p=dropout,
        scale=scaling,
    )
    return out.reshape(rows, heads, count, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch a model that runs on sdpa and looks its attention function up by name; leave any other as it is."""
    looks_up = getattr(model, "_supports_attention_backend", False)
    if looks_up and getattr(model.config, "_attn_implementation", None) == "sdpa":
        model.set_attn_implementation(NAME)
