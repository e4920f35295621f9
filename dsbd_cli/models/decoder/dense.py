"""Families without mixtures of experts and recurrent layers: the settings that all families share, and those in which
each differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from dsbd_cli.models.checkpoints.generation import positions_of
from dsbd_cli.models.decoder.config import Rotary

ACTIVATIONS = {"silu": False, "gelu_pytorch_tanh": True}  # activation -> whether it is gelu (in its form with tanh)
# families whose MLPs have no gate -> their activation
UNGATED = {"arcee": "relu2", "apertus": "xielu", "nemotron_h": "relu2"}
ROTARY_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


# kinds of layers, as configs name them, that have a recurrent mixer in place of attention, or beside it
RECURRENT_KINDS = frozenset(("linear_attention", "conv", "hybrid"))
MLP_KINDS = frozenset(("mlp", "moe"))  # of layers that do not mix tokens


class UnfitError(Exception):
    """The config asks for something that is not known here."""


def common_settings(config: Any, recurrent: bool = False) -> dict[str, Any]:
    """Return the settings that all families share. recurrent: of a family that may have recurrent layers."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    activation: Any = first_of(config, "mlp_hidden_act", "hidden_activation", "hidden_act")
    if activation is None and recurrent:  # LFM2 has no other
        activation = "silu"
    ungated = UNGATED.get(config.model_type)
    if activation not in ACTIVATIONS if ungated is None else activation != ungated:
        raise UnfitError(f"its activation is {activation}, which is not known here")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnfitError("its attention looks at later tokens")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None)
    strange = set(kinds or ()) - {"full_attention", "sliding_attention"}
    if recurrent:
        strange -= RECURRENT_KINDS | MLP_KINDS
    if strange:
        raise UnfitError(f"it has {sorted(strange)[0]} layers")
    named = sorted(key for key in rope if isinstance(rope[key], Mapping))  # parameters of each kind of layer
    rotaries = tuple(rotary_of(config, rope[key], dim, key) for key in named)
    if recurrent and rope.get("rope_theta") is None:  # OLMo hybrid and Granite do not rotate then
        rotaries = rotaries or (Rotary(None),)
    rotaries = rotaries or (rotary_of(config, rope, dim, None),)
    rotary = tuple(named.index(kinds[layer]) if kinds and kinds[layer] in named else 0 for layer in range(layers))
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        window = None
    switching = any(rotary.long is not None for rotary in rotaries)
    slides = [kinds is None or kinds[layer] == "sliding_attention" for layer in range(layers)]
    return {
        "hidden": config.hidden_size,
        "inner": getattr(config, "intermediate_size", 0),  # 0: all layers have a mixture
        "layers": layers,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": dim,
        "vocabulary": config.vocab_size,
        "eps": first_of(config, "norm_eps", "rms_norm_eps"),
        "windows": tuple(window if slide else None for slide in slides),
        "rotaries": rotaries,
        "rotary": rotary,
        "scale": dim**-0.5,
        "positions": positions_of(config, switching=switching),
        "switch_position": positions_of(config) if switching else None,
        "gelu": ungated is None and ACTIVATIONS[activation],
        "ungated": ungated,
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
    }


def first_of(config: Any, *names: str) -> Any:
    """Return the first of these settings that a config has; None without any."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def rotary_of(config: Any, parameters: Mapping[str, Any], dim: int, kind: str | None) -> Rotary:
    """Read the rotary parameters of one kind of layer. kind: its name; None where all layers are alike."""
    way, theta = parameters.get("rope_type", "default"), parameters.get("rope_theta")
    if way == "dynamic" and config.model_type.startswith("hunyuan") and (alpha := parameters.get("alpha")):
        way, theta = "default", theta * alpha ** (dim / (dim - 2))
    if way not in ROTARY_TYPES:
        raise UnfitError(f"its rotary positions are {way}, which is not known here")
    rotated = int(dim * (parameters.get("partial_rotary_factor") or 1.0))
    if rotated % 2 or (rotated != dim and dim % 2) or not 0 < rotated <= dim:
        raise UnfitError(f"it rotates {rotated} of {dim} numbers of a head")
    if way == "default":
        if theta is None:
            raise UnfitError("its rotary base is missing")
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


def attention_bias(config: Any) -> dict[str, Any]:
    """Return whether the products of attention have a bias, all of them or none."""
    bias = bool(getattr(config, "attention_bias", False))
    return {"qkv_bias": bias, "out_bias": bias}


def biases(config: Any) -> dict[str, Any]:
    """Return whether the products of attention have a bias, and those of the MLP."""
    return {**attention_bias(config), "mlp_bias": bool(getattr(config, "mlp_bias", False))}


def no_windows(config: Any) -> tuple[None, ...]:
    return (None,) * int(config.num_hidden_layers)


def _as_common(config: Any) -> dict[str, Any]:
    return {}


def _llama(config: Any) -> dict[str, Any]:
    return {**biases(config), "windows": no_windows(config)}


def _apertus(config: Any) -> dict[str, Any]:
    names = {"input_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
    return {**qwen3(config), "windows": no_windows(config), "names": names}


def _qwen2(config: Any) -> dict[str, Any]:
    return {"qkv_bias": True}


def qwen3(config: Any) -> dict[str, Any]:
    return {**attention_bias(config), "head_norms": True}


def rotating(config: Any, rotates: Sequence[object]) -> dict[str, Any]:
    """Return the rotary positions of a model some of whose layers do not rotate: their angles are 0.

    rotates: per layer, whether it does.
    """
    common = common_settings(config)
    return {
        "rotaries": (*common["rotaries"], Rotary(None)),
        "rotary": tuple(0 if rotates[layer] else 1 for layer in range(common["layers"])),
    }


def _smollm3(config: Any) -> dict[str, Any]:
    return {**biases(config), **rotating(config, config.no_rope_layers)}


def _gemma(config: Any) -> dict[str, Any]:
    return {
        **attention_bias(config),
        "unit_offset": True,
        "embedding_scale": config.hidden_size**0.5,
        "windows": no_windows(config),
    }


def _gemma2(config: Any) -> dict[str, Any]:
    return {
        **_gemma(config),
        "windows": common_settings(config)["windows"],
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


def granite(config: Any) -> dict[str, Any]:
    return {
        **_llama(config),
        "scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def granite_swa(config: Any) -> dict[str, Any]:
    """Return the settings of Granite with windows: attention has sinks, and each layer a base of its own for rotary
    positions, which is 0 where it does not rotate."""
    bases = sorted(set(config.layer_rope_theta))
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotaries = []
    for base in bases:
        of_base = copy(config)
        of_base.rope_parameters = {**config.rope_parameters, "rope_theta": base}
        rotaries.append(rotary_of(of_base, of_base.rope_parameters, dim, None) if base else Rotary(None))
    return {
        **granite(config),
        "sinks": True,
        "windows": common_settings(config)["windows"],
        "rotaries": tuple(rotaries),
        "rotary": tuple(bases.index(base) for base in config.layer_rope_theta),
    }


def _hyperclovax(config: Any) -> dict[str, Any]:
    """Return the settings of HyperCLOVA X, a Granite whose logits are multiplied, in place of divided."""
    names = {"mlp_norm": "post_attention_layernorm", "attention_norm": "post_norm1", "output_norm": "post_norm2"}
    return {
        **granite(config),
        "logit_scale": 1 / config.logits_scaling,
        "post_norms": config.use_post_norm,
        "names": names,
    }


def _helium(config: Any) -> dict[str, Any]:
    return {**_llama(config), "out_bias": False, "interleaved": True, "wide_rotary": True}


def ernie4_5(config: Any) -> dict[str, Any]:
    bias = bool(config.use_bias)
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "interleaved": True,
        "wide_rotary": True,
        "windows": no_windows(config),
    }


def _glm(config: Any) -> dict[str, Any]:
    return {
        "qkv_bias": bool(getattr(config, "attention_bias", False)),
        "interleaved": True,
        "fused_gate_up": True,
        "windows": no_windows(config),
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
    return {**ernie4_5(config), "interleaved": False, "wide_rotary": False}


def _ministral3(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {"query_growth": (rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])}


def hunyuan(config: Any) -> dict[str, Any]:
    """Return the settings of HunYuan, whose queries and keys go through their norms after the rotation."""
    return {
        **attention_bias(config),
        "head_norms": True,
        "query_weights": True,
        "names": {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
        "windows": no_windows(config),
    }


def _cwm(config: Any) -> dict[str, Any]:
    return {"mlp_bias": bool(config.mlp_bias)}


def olmo2(config: Any) -> dict[str, Any]:
    return {
        **attention_bias(config),
        "norms_over_all_heads": True,
        "pre_norms": False,
        "post_norms": True,
        "wide_rotary": True,
        "windows": common_settings(config)["windows"] if config.model_type == "olmo3" else no_windows(config),
    }


def _exaone4(config: Any) -> dict[str, Any]:
    """Return the settings of EXAONE 4. Where it has windows, layers without one do not rotate."""
    windows = config.sliding_window is not None
    return {
        **rotating(config, [not windows or kind == "sliding_attention" for kind in config.layer_types]),
        "head_norms": True,
        "pre_norms": False,
        "post_norms": True,
    }


def _seed_oss(config: Any) -> dict[str, Any]:
    return {
        "qkv_bias": bool(config.attention_bias),
        "out_bias": bool(config.attention_out_bias),
        "mlp_bias": bool(config.mlp_bias),
        "windows": no_windows(config),
    }


DENSE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _llama,
    "arcee": _llama,
    "apertus": _apertus,
    "mistral": _as_common,
    "ministral": _as_common,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "granite": granite,
    "granite_swa": granite_swa,
    "olmo2": olmo2,
    "olmo3": olmo2,
    "exaone4": _exaone4,
    "seed_oss": _seed_oss,
    "ministral3": _ministral3,
    "internlm3": _llama,
    "iquestcoder": _llama,
    "cwm": _cwm,
    "vaultgemma": _vaultgemma,
    "hyperclovax": _hyperclovax,
    "helium": _helium,
    "ernie4_5": ernie4_5,
    "glm": _glm,
    "glm4": _glm4,
    "hunyuan_v1_dense": hunyuan,
    # Text parts of models that also read images or sound. The positions of their axes are all alike in a text.
    "emu3_text_model": _llama,
    "glm4v_text": _glm4v,
    "glm_ocr_text": _glm4v,
    "granite4_vision_text": granite,
    "granite_docling_text": granite,
    "paddleocr_vl_text": _paddleocr,
    "qwen2_vl_text": _qwen2,
    "qwen2_5_vl_text": _qwen2,
    "qwen2_5_omni_text": _qwen2,
    "qwen3_vl_text": qwen3,
}
