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
from dsbd_cli.models.decoder.config import DecoderConfig, MixtureConfig, Rotary
from dsbd_cli.ops.reference import OUTPUTS_STEP

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
    clip_qkv decoder_sparse_step first_k_dense_replace mlp_layer_types mlp_only_layers moe_intermediate_size n_group
    n_routed_experts n_shared_experts norm_topk_prob num_experts num_experts_per_tok num_local_experts
    num_nextn_predict_layers num_shared_experts qkv_bias routed_scaling_factor router_aux_loss_coef router_jitter_noise
    shared_expert_intermediate_size shared_intermediate_size topk_group use_qk_norm
    swiglu_alpha swiglu_limit
    moe_k moe_layer_end_index moe_layer_interval moe_layer_start_index moe_norm_min moe_num_experts
    moe_num_shared_experts moe_topk
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
    """Return the settings of Granite 4 without Mamba layers. Without experts its MLP is the shared one."""
    rotates = config.position_embedding_type == "rope"
    common = {**_granite(config), **_rotating(config, [rotates] * config.num_hidden_layers), "mlp_bias": False}
    if config.num_local_experts:
        return {**common, **_granite_mixture(config)}
    return {
        **common,
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


# Mixtures of experts


def _mixture(
    config: Any, experts: int, inner: int, layers: Sequence[object] | None = None, **more: Any
) -> dict[str, Any]:
    """Return the mixture of a family. layers: per layer, whether it has the mixture; None: all have."""
    if experts < 2 or 2 * inner % OUTPUTS_STEP or config.hidden_size % OUTPUTS_STEP:
        raise _UnknownError(
            f"it has {experts} experts of width {inner}, and widths must be multiples of {OUTPUTS_STEP // 2}"
        )
    if not all(map(bool, layers or [True])) and config.intermediate_size <= 0:
        raise _UnknownError(f"its MLPs have the width {config.intermediate_size}")
    chosen = more.pop("chosen", None) or config.num_experts_per_tok
    mixture = MixtureConfig(experts, chosen, inner, **more)
    per_layer = tuple(map(bool, layers)) if layers is not None else (True,) * int(config.num_hidden_layers)
    return {"mixture": mixture, "mixtures": per_layer} if any(per_layer) else {}


def _qwen_mixture(config: Any, **more: Any) -> dict[str, Any]:
    """Return the mixture of Qwen 2 and 3: every so many layers, but for those that are listed."""
    layers = [
        number not in config.mlp_only_layers and (number + 1) % config.decoder_sparse_step == 0
        for number in range(config.num_hidden_layers)
    ]
    inner, normalised = config.moe_intermediate_size, bool(config.norm_topk_prob)
    return _mixture(config, config.num_experts, inner, layers, normalised=normalised, **more)


def _qwen2_moe(config: Any) -> dict[str, Any]:
    return {
        "qkv_bias": bool(config.qkv_bias),
        **_qwen_mixture(
            config, shared=config.shared_expert_intermediate_size, shared_name="mlp.shared_expert", shared_gate=True
        ),
    }


def _qwen3_moe(config: Any) -> dict[str, Any]:
    return {**_qwen3(config), **_qwen_mixture(config)}


def _mixtral(config: Any) -> dict[str, Any]:
    return _mixture(config, config.num_local_experts, config.intermediate_size, **_block_sparse_moe(config))


def _block_sparse_moe(config: Any) -> dict[str, Any]:
    """Return the names of Mixtral's tensors."""
    return {
        "router_name": "block_sparse_moe.gate",
        "correction_name": "block_sparse_moe.e_score_correction_bias",
        "experts_name": "block_sparse_moe.experts",
        "parts": ("w1", "w3", "w2"),
    }


def _minimax_m2(config: Any) -> dict[str, Any]:
    names = _block_sparse_moe(config)
    experts, inner = config.num_local_experts, config.intermediate_size
    return {
        "norms_over_all_heads": True,
        "windows": _no_windows(config),
        **_mixture(config, experts, inner, sigmoid=True, corrected=True, **names),
    }


def _olmoe(config: Any) -> dict[str, Any]:
    if config.clip_qkv is not None:
        raise _UnknownError(f"its config says clip_qkv = {config.clip_qkv!r}, which is not known here")
    return {
        **_attention_bias(config),
        "norms_over_all_heads": True,
        "windows": _no_windows(config),
        **_mixture(config, config.num_experts, config.intermediate_size, normalised=bool(config.norm_topk_prob)),
    }


def _flex_olmo(config: Any) -> dict[str, Any]:
    experts, inner = config.num_experts, config.intermediate_size
    return {**_olmo2(config), **_mixture(config, experts, inner, normalised=bool(config.norm_topk_prob))}


def _granite_mixture(config: Any) -> dict[str, Any]:
    return _mixture(
        config,
        config.num_local_experts,
        config.intermediate_size,
        router_name="block_sparse_moe.router.layer",
        experts_name="block_sparse_moe.experts",
        shared=int(getattr(config, "shared_intermediate_size", 0)),
        shared_name="shared_mlp",
        shared_parts=("input_linear", "output_linear"),
        parts=(),
    )


def _granitemoe(config: Any) -> dict[str, Any]:
    return {**_granite(config), **_granite_mixture(config)}


def _ernie4_5_moe(config: Any) -> dict[str, Any]:
    if config.use_bias:
        raise _UnknownError("its LM head has a bias (use_bias)")
    first, last, interval = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
    layers = [(number + 1) % interval == 0 and first <= number <= last for number in range(config.num_hidden_layers)]
    inner = config.moe_intermediate_size
    return {
        **_ernie4_5(config),
        **_mixture(
            config,
            config.moe_num_experts,
            inner,
            layers,
            corrected=True,
            wide_router=True,
            least_sum=float(config.moe_norm_min),
            shared=inner * config.moe_num_shared_experts,
            correction_name="mlp.moe_statics.e_score_correction_bias",
        ),
    }


def _hunyuan_v1_moe(config: Any) -> dict[str, Any]:
    experts, chosen, inner = config.num_experts, config.moe_topk, config.intermediate_size
    if not isinstance(experts, int) or not isinstance(chosen, int):
        raise _UnknownError("its layers have different numbers of experts")
    return {
        **_hunyuan(config),
        **_mixture(
            config,
            experts,
            inner,
            chosen=chosen,
            wide_router=True,
            shared=inner,
            shared_name="mlp.shared_mlp",
            router_name="mlp.gate.wg",
        ),
    }


def _deepseek_mixture(config: Any, experts: int, layers: Sequence[object] | None = None, **more: Any) -> dict[str, Any]:
    """Return a mixture with DeepSeek V3's router. layers: as in `_mixture`; None: all but the first."""
    inner, groups = config.moe_intermediate_size, config.n_group
    if layers is None:
        layers = [number >= config.first_k_dense_replace for number in range(config.num_hidden_layers)]
    if groups < 1 or experts % groups:
        raise _UnknownError(f"its config says n_group = {groups}, with {experts} experts")
    return _mixture(
        config,
        experts,
        inner,
        layers,
        sigmoid=True,
        corrected=True,
        wide_router=True,
        groups=groups,
        chosen_groups=config.topk_group,
        group_size=min(2, experts // groups),
        normalised=bool(config.norm_topk_prob),
        scale=float(config.routed_scaling_factor),
        **{"shared": inner * (config.n_shared_experts or 0), **more},
    )


def _glm4_moe(config: Any) -> dict[str, Any]:
    return {
        "qkv_bias": bool(config.attention_bias),
        "head_norms": bool(getattr(config, "use_qk_norm", False)),
        "windows": _no_windows(config),
        **_deepseek_mixture(config, config.num_local_experts),
    }


def _solar_open(config: Any) -> dict[str, Any]:
    layers = [True] * config.num_hidden_layers
    return {"windows": _no_windows(config), **_deepseek_mixture(config, config.num_local_experts, layers)}


def _dots1(config: Any) -> dict[str, Any]:
    return {**_attention_bias(config), "head_norms": True, **_deepseek_mixture(config, config.num_local_experts)}


def _exaone_moe(config: Any) -> dict[str, Any]:
    """Return the settings of EXAONE MoE. Where it has windows, layers without one do not rotate."""
    windows = config.sliding_window is not None
    layers = [kind == "sparse" for kind in config.mlp_layer_types]
    return {
        **_rotating(config, [not windows or kind == "sliding_attention" for kind in config.layer_types]),
        "head_norms": True,
        **_deepseek_mixture(
            config,
            config.num_experts,
            layers,
            shared=config.moe_intermediate_size * config.num_shared_experts,
            correction_name="mlp.e_score_correction_bias",
        ),
    }


def _gpt_oss(config: Any) -> dict[str, Any]:
    return {
        **_attention_bias(config),
        "sinks": True,
        **_mixture(
            config,
            config.num_local_experts,
            config.intermediate_size,
            biased=True,
            transposed=True,
            limit=float(config.swiglu_limit),
            alpha=float(config.swiglu_alpha),
            router_name="mlp.router",
            parts=(),
        ),
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
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "minimax_m2": _minimax_m2,
    "olmoe": _olmoe,
    "flex_olmo": _flex_olmo,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoe,
    "glm4_moe": _glm4_moe,
    "solar_open": _solar_open,
    "dots1": _dots1,
    "exaone_moe": _exaone_moe,
    "gpt_oss": _gpt_oss,
    "ernie4_5_moe": _ernie4_5_moe,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
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
