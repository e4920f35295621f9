"""Read a transformers config into a DecoderConfig. Configs that are not known here are left to transformers.

`FAMILIES` says in which settings each family differs from the common ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dsbd_cli.errors import one_line
from dsbd_cli.models.checkpoints.generation import positions_of
from dsbd_cli.models.decoder.config import DecoderConfig, Rotary

ACTIVATIONS = {"silu": False, "gelu_pytorch_tanh": True}  # activation -> whether it is gelu (in its form with tanh)
ROTARY_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
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
    eod_token_id num_local_experts position_embedding_type shared_intermediate_size use_bias use_post_norm
    mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads
    mamba_proj_bias num_experts_per_tok router_aux_loss_coef time_step_limit
    """.split()
)


class _UnknownError(Exception):
    """The config asks for something that is not known here."""


def decoder_config_of(config: Any) -> DecoderConfig | str:
    """Return the DecoderConfig of a transformers (text) config, or the reason why there is none."""
    family, text = config.model_type, config.get_text_config(decoder=True)
    if family not in FAMILIES and text is not config and not getattr(config, "is_encoder_decoder", False):
        decoder_config = decoder_config_of(text)
        if isinstance(decoder_config, str):
            return f"{family} is no standard decoder that is known here: {decoder_config}"
        return replace(decoder_config, tied=bool(getattr(config, "tie_word_embeddings", decoder_config.tied)))
    if family not in FAMILIES:
        return f"{family} is no standard decoder that is known here"
    # a key that transformers' class does not declare changes nothing there
    declared, changed = type(config)().to_dict(), config.to_diff_dict()
    stated = {key for key in changed if key in declared and key[0] != "_" and not _idle(changed[key])}
    strange = sorted(stated - KNOWN)
    if strange:
        return f"its config says {strange[0]} = {changed[strange[0]]!r}, which is not known here"
    try:
        return DecoderConfig(**{**_common(config), **FAMILIES[family](config)})
    except _UnknownError as error:
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
    if activation not in ACTIVATIONS:
        raise _UnknownError(f"its activation is {activation}, which is not known here")
    if getattr(config, "use_bidirectional_attention", None):
        raise _UnknownError("its attention looks at later tokens")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise _UnknownError(f"it has {sorted(set(kinds) - {'full_attention', 'sliding_attention'})[0]} layers")
    named = sorted(key for key in rope if isinstance(rope[key], Mapping))  # parameters of each kind of layer
    rotaries = tuple(_rotary(config, rope[key], dim, key) for key in named) or (_rotary(config, rope, dim, None),)
    rotary = tuple(named.index(kinds[layer]) if named and kinds else 0 for layer in range(layers))
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        window = None
    switching = any(rotary.long is not None for rotary in rotaries)
    slides = [kinds is None or kinds[layer] == "sliding_attention" for layer in range(layers)]
    return {
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "layers": layers,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": dim,
        "vocabulary": config.vocab_size,
        "eps": config.rms_norm_eps,
        "windows": tuple(window if slide else None for slide in slides),
        "rotaries": rotaries,
        "rotary": rotary,
        "scale": dim**-0.5,
        "positions": positions_of(config, switching=switching),
        "switch_position": positions_of(config) if switching else None,
        "gelu": ACTIVATIONS[activation],
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
    }


def _rotary(config: Any, parameters: Mapping[str, Any], dim: int, kind: str | None) -> Rotary:
    """Read the rotary parameters of one kind of layer. kind: its name; None where all layers are alike."""
    way, theta = parameters.get("rope_type", "default"), parameters.get("rope_theta")
    if way == "dynamic" and config.model_type.startswith("hunyuan") and (alpha := parameters.get("alpha")):
        way, theta = "default", theta * alpha ** (dim / (dim - 2))
    if way not in ROTARY_TYPES:
        raise _UnknownError(f"its rotary positions are {way}, which is not known here")
    rotated = int(dim * (parameters.get("partial_rotary_factor") or 1.0))
    if rotated % 2 or (rotated != dim and dim % 2) or not 0 < rotated <= dim:
        raise _UnknownError(f"it rotates {rotated} of {dim} numbers of a head")
    if way == "default":
        if theta is None:
            raise _UnknownError("its rotary base is missing")
        inverse = 1.0 / (theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))
        return Rotary(tuple(inverse.tolist()), 1.0, rotated)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    more = {} if kind is None else {"layer_type": kind}
    frequencies, scale = ROPE_INIT_FUNCTIONS[way](config, torch.device("cpu"), **more)
    rotary = Rotary(tuple(frequencies.tolist()), float(scale), 2 * len(frequencies))
    if way != "longrope":
        return rotary
    beyond = parameters["original_max_position_embeddings"] + 1
    long, _ = ROPE_INIT_FUNCTIONS[way](config, torch.device("cpu"), seq_len=beyond, **more)
    return rotary if torch.equal(long, frequencies) else replace(rotary, long=tuple(long.tolist()))


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


def _vaultgemma(config: Any) -> dict[str, Any]:
    """Return the settings of VaultGemma, a Gemma 2 without the norms behind attention and MLP."""
    return {**_gemma2(config), "post_norms": False, "names": {"mlp_norm": "pre_feedforward_layernorm"}}


def _phi3(config: Any) -> dict[str, Any]:
    return {"fused_qkv": True, "fused_gate_up": True}


def _granite(config: Any) -> dict[str, Any]:
    return {
        **_llama(config),
        "scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _granitemoehybrid(config: Any) -> dict[str, Any]:
    """Return the settings of Granite 4 without experts and Mamba layers. Its MLP is the shared expert."""
    if config.num_local_experts:
        raise _UnknownError(f"it has {config.num_local_experts} experts in each layer")
    rotates = config.position_embedding_type == "rope"
    return {
        **_granite(config),
        **_rotating(config, [rotates] * config.num_hidden_layers),
        "mlp_bias": False,
        "inner": config.shared_intermediate_size,
        "fused_gate_up": True,
        "names": {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"},
    }


def _hyperclovax(config: Any) -> dict[str, Any]:
    """Return the settings of HyperCLOVA X, a Granite whose logits are multiplied, in place of divided."""
    names = {"mlp_norm": "post_attention_layernorm", "attention_norm": "post_norm1", "output_norm": "post_norm2"}
    return {
        **_granite(config),
        "logit_scale": 1 / config.logits_scaling,
        "post_norms": config.use_post_norm,
        "names": names,
    }


def _helium(config: Any) -> dict[str, Any]:
    return {**_llama(config), "out_bias": False, "interleaved": True, "wide_rotary": True}


def _ernie4_5(config: Any) -> dict[str, Any]:
    bias = bool(config.use_bias)
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "interleaved": True,
        "wide_rotary": True,
        "windows": _no_windows(config),
    }


def _glm(config: Any) -> dict[str, Any]:
    return {
        "qkv_bias": bool(getattr(config, "attention_bias", False)),
        "interleaved": True,
        "fused_gate_up": True,
        "windows": _no_windows(config),
    }


def _glm4(config: Any) -> dict[str, Any]:
    names = {
        "mlp_norm": "post_attention_layernorm",
        "attention_norm": "post_self_attn_layernorm",
        "output_norm": "post_mlp_layernorm",
    }
    return {**_glm(config), "post_norms": True, "names": names}


def _glm4v(config: Any) -> dict[str, Any]:
    return {**_glm4(config), "qkv_bias": config.model_type == "glm4v_text"}


def _paddleocr(config: Any) -> dict[str, Any]:
    return {**_ernie4_5(config), "interleaved": False, "wide_rotary": False}


def _ministral3(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {"query_growth": (rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])}


def _hunyuan(config: Any) -> dict[str, Any]:
    """Return the settings of HunYuan, whose queries and keys go through their norms after the rotation."""
    return {
        **_attention_bias(config),
        "head_norms": True,
        "query_weights": True,
        "names": {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
        "windows": _no_windows(config),
    }


def _cwm(config: Any) -> dict[str, Any]:
    return {"mlp_bias": bool(config.mlp_bias)}


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
    "ministral3": _ministral3,
    "internlm3": _llama,
    "iquestcoder": _llama,
    "cwm": _cwm,
    "vaultgemma": _vaultgemma,
    "granitemoehybrid": _granitemoehybrid,
    "hyperclovax": _hyperclovax,
    "helium": _helium,
    "ernie4_5": _ernie4_5,
    "glm": _glm,
    "glm4": _glm4,
    "hunyuan_v1_dense": _hunyuan,
    # Text parts of models that also read images or sound. The positions of their axes are all alike in a text.
    "emu3_text_model": _llama,
    "glm4v_text": _glm4v,
    "glm_ocr_text": _glm4v,
    "granite4_vision_text": _granite,
    "granite_docling_text": _granite,
    "paddleocr_vl_text": _paddleocr,
    "qwen2_vl_text": _qwen2,
    "qwen2_5_vl_text": _qwen2,
    "qwen2_5_omni_text": _qwen2,
    "qwen3_vl_text": _qwen3,
}
