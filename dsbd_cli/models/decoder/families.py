"""Read a transformers config into a DecoderConfig. Configs that are not known here are left to transformers.

`FAMILIES` says in which settings each family differs from the common ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dsbd_cli.errors import one_line
from dsbd_cli.models.checkpoints.generation import positions_of
from dsbd_cli.models.decoder import recurrent_families
from dsbd_cli.models.decoder.config import DecoderConfig, Rotary
from dsbd_cli.models.decoder.recurrent_families import (
    RECURRENT_FAMILIES,
    WITHOUT_ATTENTION,
    UnfitError,
    without_attention,
)

ACTIVATIONS = {"silu": False, "gelu_pytorch_tanh": True}  # activation -> whether it is gelu (in its form with tanh)
ROTARY_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
# Keys that a config declares and that do not change what a forward computes, or that are read below.
KNOWN = frozenset(
    """
    architectures attention_bias attention_dropout attention_multiplier attn_logit_softcapping bos_token_id
    chunk_size_feed_forward classifier_dropout cls_token_id decoder_start_token_id dtype embd_pdrop embedding_multiplier
    eos_token_id
    final_logit_softcapping forced_bos_token_id forced_eos_token_id gradient_checkpointing head_dim hidden_act
    hidden_activation hidden_size id2label initializer_range intermediate_size is_decoder is_encoder_decoder label2id
    layer_types logits_scaling max_length max_position_embeddings max_window_layers mlp_bias model_type name_or_path
    no_rope_layer_interval no_rope_layers num_attention_heads num_hidden_layers num_key_value_heads
    original_max_position_embeddings output_attentions output_hidden_states output_router_logits pad_token_id
    partial_rotary_factor pretraining_tp problem_type query_pre_attn_scalar residual_multiplier resid_pdrop return_dict
    rms_norm_eps rope_local_base_freq rope_parameters rope_scaling rope_theta sep_token_id sliding_window
    sliding_window_pattern tie_word_embeddings task_specific_params tokenizer_class torch_dtype transformers_version
    unsloth_fixed unsloth_version use_bidirectional_attention use_cache use_sliding_window vocab_size
    attention_out_bias residual_dropout cache_implementation
    """.split()
)


def decoder_config_of(config: Any) -> DecoderConfig | str:
    """Return the DecoderConfig of a transformers (text) config, or the reason why there is none."""
    family = config.model_type
    if family not in FAMILIES and family not in RECURRENT_FAMILIES:
        return f"{family} is no standard decoder that is known here"
    # a key that transformers' class does not declare changes nothing there
    declared, changed = type(config)().to_dict(), config.to_diff_dict()
    stated = {key for key in changed if key in declared and key[0] != "_" and not _idle(changed[key])}
    strange = sorted(stated - KNOWN - recurrent_families.KNOWN)
    if strange:
        return f"its config says {strange[0]} = {changed[strange[0]]!r}, which is not known here"
    try:
        common = without_attention(config) if family in WITHOUT_ATTENTION else _common(config)
        own = RECURRENT_FAMILIES[family](config, common) if family in RECURRENT_FAMILIES else FAMILIES[family](config)
        return DecoderConfig(**{**common, **own})
    except UnfitError as error:
        return str(error)
    except Exception as error:  # settings of wrong types, for transformers to refuse
        return f"its config cannot be read ({type(error).__name__}: {one_line(error)})"


def _idle(value: object) -> bool:
    """Return whether a setting is off or empty."""
    return value is None or value is False or value in ("", [], {}, ())


def _common(config: Any) -> dict[str, Any]:
    """Return the settings that all families share."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    recurrent = config.model_type in RECURRENT_FAMILIES
    if activation is None and recurrent:  # LFM2 has no other
        activation = "silu"
    if activation not in ACTIVATIONS:
        raise UnfitError(f"its activation is {activation}, which is not known here")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnfitError("its attention looks at later tokens")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None)
    strange = set(kinds or ()) - {"full_attention", "sliding_attention"}
    if recurrent:
        strange -= recurrent_families.KINDS
    if strange:
        raise UnfitError(f"it has {sorted(strange)[0]} layers")
    named = sorted(key for key in rope if isinstance(rope[key], Mapping))  # parameters of each kind of layer
    rotaries = tuple(_rotary(config, rope[key], dim, key) for key in named)
    if recurrent and rope.get("rope_theta") is None:  # OLMo hybrid and Granite do not rotate then
        rotaries = rotaries or (Rotary(None),)
    rotaries = rotaries or (_rotary(config, rope, dim, None),)
    rotary = tuple(named.index(kinds[layer]) if kinds and kinds[layer] in named else 0 for layer in range(layers))
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        window = None
    slides = [kinds is None or kinds[layer] == "sliding_attention" for layer in range(layers)]
    return {
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "layers": layers,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": dim,
        "vocabulary": config.vocab_size,
        "eps": config.norm_eps if hasattr(config, "norm_eps") else config.rms_norm_eps,
        "windows": tuple(window if slide else None for slide in slides),
        "rotaries": rotaries,
        "rotary": rotary,
        "scale": dim**-0.5,
        "positions": positions_of(config),
        "gelu": ACTIVATIONS[activation],
        "tied": bool(config.tie_word_embeddings),
    }


def _rotary(config: Any, parameters: Mapping[str, Any], dim: int, kind: str | None) -> Rotary:
    """Read the rotary parameters of one kind of layer. kind: its name; None where all layers are alike."""
    way = parameters.get("rope_type", "default")
    if way not in ROTARY_TYPES:
        raise UnfitError(f"its rotary positions are {way}, which is not known here")
    rotated = int(dim * (parameters.get("partial_rotary_factor") or 1.0))
    if rotated % 2 or (rotated != dim and dim % 2) or not 0 < rotated <= dim:
        raise UnfitError(f"it rotates {rotated} of {dim} numbers of a head")
    if way == "default":
        theta = parameters.get("rope_theta")
        if theta is None:
            raise UnfitError("its rotary base is missing")
        inverse = 1.0 / (theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))
        return Rotary(tuple(inverse.tolist()), 1.0, rotated)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    more = {} if kind is None else {"layer_type": kind}
    frequencies, scale = ROPE_INIT_FUNCTIONS[way](config, torch.device("cpu"), **more)
    return Rotary(tuple(frequencies.tolist()), float(scale), 2 * len(frequencies))


# Families: the settings in which each differs from the common ones.


def _attention_bias(config: Any) -> dict[str, Any]:
    """Return whether the products of attention have a bias, all of them or none."""
    bias = bool(getattr(config, "attention_bias", False))
    return {"qkv_bias": bias, "out_bias": bias}


def _biases(config: Any) -> dict[str, Any]:
    """Return whether the products of attention have a bias, and those of the MLP."""
    return {**_attention_bias(config), "mlp_bias": bool(getattr(config, "mlp_bias", False))}


def _no_windows(config: Any) -> tuple[None, ...]:
    return (None,) * int(config.num_hidden_layers)


def _as_common(config: Any) -> dict[str, Any]:
    return {}


def _llama(config: Any) -> dict[str, Any]:
    return {**_biases(config), "windows": _no_windows(config)}


def _qwen2(config: Any) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(config: Any) -> dict[str, Any]:
    return {**_attention_bias(config), "head_norms": True}


def _rotating(config: Any, rotates: Sequence[object]) -> dict[str, Any]:
    """Return the rotary positions of a model some of whose layers do not rotate: their angles are 0.

    rotates: per layer, whether it does.
    """
    common = _common(config)
    return {
        "rotaries": (*common["rotaries"], Rotary(None)),
        "rotary": tuple(0 if rotates[layer] else 1 for layer in range(common["layers"])),
    }


def _smollm3(config: Any) -> dict[str, Any]:
    return {**_biases(config), **_rotating(config, config.no_rope_layers)}


def _gemma(config: Any) -> dict[str, Any]:
    return {
        **_attention_bias(config),
        "unit_offset": True,
        "embedding_scale": config.hidden_size**0.5,
        "windows": _no_windows(config),
    }


def _gemma2(config: Any) -> dict[str, Any]:
    return {
        **_gemma(config),
        "windows": _common(config)["windows"],
        "post_norms": True,
        "scale": config.query_pre_attn_scalar**-0.5,
        "softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
    }


def _gemma3(config: Any) -> dict[str, Any]:
    return {**_gemma2(config), "head_norms": True}


def _phi3(config: Any) -> dict[str, Any]:
    return {"fused": True}


def _granite(config: Any) -> dict[str, Any]:
    return {
        **_llama(config),
        "scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _olmo2(config: Any) -> dict[str, Any]:
    return {
        **_attention_bias(config),
        "norms_over_all_heads": True,
        "pre_norms": False,
        "post_norms": True,
        "wide_rotary": True,
        "windows": _common(config)["windows"] if config.model_type == "olmo3" else _no_windows(config),
    }


def _exaone4(config: Any) -> dict[str, Any]:
    """Return the settings of EXAONE 4. Where it has windows, layers without one do not rotate."""
    windows = config.sliding_window is not None
    return {
        **_rotating(config, [not windows or kind == "sliding_attention" for kind in config.layer_types]),
        "head_norms": True,
        "pre_norms": False,
        "post_norms": True,
    }


def _seed_oss(config: Any) -> dict[str, Any]:
    return {
        "qkv_bias": bool(config.attention_bias),
        "out_bias": bool(config.attention_out_bias),
        "mlp_bias": bool(config.mlp_bias),
        "windows": _no_windows(config),
    }


FAMILIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _as_common,
    "ministral": _as_common,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "exaone4": _exaone4,
    "seed_oss": _seed_oss,
}
