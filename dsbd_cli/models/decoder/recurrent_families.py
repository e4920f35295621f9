"""Families with recurrent layers: the settings of a DecoderConfig in which each differs from the common ones.

A function takes a transformers config and the common settings (families.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsbd_cli.models.decoder.config import MixerConfig, Mixing, Rotary
from dsbd_cli.models.decoder.dense import MLP_KINDS, RECURRENT_KINDS, UnfitError, biases, first_of
from dsbd_cli.models.decoder.mixtures import deepseek_mixture, granite_mixture, mixture_of_experts, qwen_mixture

LAYERS = RECURRENT_KINDS - {"hybrid"}  # that do not attend
# keys of these families' configs that do not change what a forward computes, or that are read below
RECURRENT_KEYS = frozenset(
    """
    attention_in_multiplier attention_out_multiplier attn_layer_indices block_auto_adjust_ff_dim
    block_ffn_dim_multiplier block_multiple_of chunk_size conv_bias conv_kernel conv_L_cache expand full_attn_idxs
    hidden_dropout key_multiplier layer_norm_epsilon layers_block_type linear_a_log_max linear_a_log_min
    linear_allow_neg_eigval linear_conv_kernel_dim linear_dt_init_floor linear_dt_max linear_dt_min linear_key_head_dim
    linear_num_key_heads linear_num_value_heads linear_value_head_dim lm_head_multiplier mamba_chunk_size
    mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state mamba_expand mamba_head_dim mamba_hidden_act
    mamba_n_groups mamba_n_heads mamba_norm_before_gate mamba_num_heads mamba_proj_bias mamba_rms_norm
    mamba_ssm_cache_dtype mlp_hidden_act mlp_multipliers moe_latent_size moe_shared_expert_intermediate_size
    moe_shared_expert_overlap mtp_layers_block_type n_groups norm_eps num_experts_per_tok num_heads num_local_experts
    num_logits_to_keep position_embedding_type projectors_bias rescale_prenorm_residual residual_in_fp32
    router_aux_loss_coef shared_intermediate_size ssm_in_multiplier ssm_multipliers ssm_out_multiplier ssm_state_size
    state_size time_step_floor time_step_limit time_step_max time_step_min time_step_rank use_attention_gate use_bias
    use_conv_bias use_mamba_kernels use_sandwich_norm z_loss_coefficient
    """.split()
)


def without_attention(config: Any) -> dict[str, Any]:
    """Return the common settings of a model whose layers are recurrent mixers alone."""
    layers = config.num_hidden_layers
    nothing = dict.fromkeys(("inner", "heads", "kv_heads", "head_dim"), 0)
    return {
        **nothing,
        "hidden": config.hidden_size,
        "layers": layers,
        "vocabulary": config.vocab_size,
        "eps": config.layer_norm_epsilon,
        "windows": (None,) * layers,
        "rotaries": (),
        "rotary": (0,) * layers,
        "scale": 1.0,
        "positions": None,
        "tied": bool(config.tie_word_embeddings),
        "one_part": True,
        "mixers": ("recurrent",) * layers,
    }


def _mixed(config: Any, mixer: MixerConfig) -> dict[str, Any]:
    """Return the mixers of the layers, as the config names them."""
    mixers: list[Mixing] = [
        "recurrent" if kind in LAYERS else "none" if kind in MLP_KINDS else "attention" for kind in config.layer_types
    ]
    if set(mixers) == {"attention"}:
        return {}
    return {"mixer": mixer if "recurrent" in mixers else None, "mixers": tuple(mixers)}


def _no_windows(common: Mapping[str, Any]) -> dict[str, Any]:
    return {"windows": (None,) * common["layers"]}


def _silu(config: Any) -> None:
    """Raise UnfitError where convolutions and gates have another activation."""
    activation = first_of(config, "mamba_hidden_act", "hidden_act")
    if activation != "silu":
        raise UnfitError(f"the activation of its recurrent layers is {activation}, which is not known here")


def _delta(config: Any, prefix: str, inputs: Sequence[tuple[str, int]], **more: Any) -> MixerConfig:
    """Return mixers of the gated delta rule."""
    _silu(config)
    sizes = {
        "groups": config.linear_num_key_heads,
        "heads": config.linear_num_value_heads,
        "key_dim": config.linear_key_head_dim,
        "value_dim": config.linear_value_head_dim,
        "norm_groups": config.linear_num_value_heads,
    }
    named = tuple(inputs)
    return MixerConfig("delta", config.linear_conv_kernel_dim, prefix, named, gate="norm first", **{**sizes, **more})


def _qwen3_5(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads, values = config.linear_num_value_heads, config.linear_num_value_heads * config.linear_value_head_dim
    inputs = (
        ("in_proj_qkv", 2 * keys + values), ("in_proj_z", values), ("in_proj_b", heads), ("in_proj_a", heads),
    )  # fmt: skip
    return {
        **_mixed(config, _delta(config, "linear_attn", inputs, eps=config.rms_norm_eps)),
        **_no_windows(common),
        **biases(config),
        "output_gate": "channels",
        "head_norms": True,
        "unit_offset": True,
    }


SHARED: dict[str, Any] = {"shared_name": "mlp.shared_expert", "shared_gate": True}


def _qwen3_5_moe(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    mixture = mixture_of_experts(
        config,
        config.num_experts,
        config.moe_intermediate_size,
        shared=config.shared_expert_intermediate_size,
        **SHARED,
    )
    return {**_qwen3_5(config, common), **mixture}


def _qwen3_next(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    keys, heads = config.linear_num_key_heads * config.linear_key_head_dim, config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    inputs = (("in_proj_qkvz", 2 * keys + 2 * values), ("in_proj_ba", 2 * heads))
    return {
        **_qwen3_5(config, common),
        **_mixed(config, _delta(config, "linear_attn", inputs, eps=config.rms_norm_eps, by_group=True)),
        **qwen_mixture(config, shared=config.shared_expert_intermediate_size, **SHARED),
    }


def _olmo_hybrid(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads, values = config.linear_num_value_heads, config.linear_num_value_heads * config.linear_value_head_dim
    inputs = (
        ("q_proj", keys), ("k_proj", keys), ("v_proj", values), ("g_proj", values), ("b_proj", heads),
        ("a_proj", heads),
    )  # fmt: skip
    beta = 2.0 if config.linear_allow_neg_eigval else 1.0
    mixer = _delta(config, "linear_attn", inputs, output="o_proj", norm="o_norm", eps=1e-5, beta=beta)
    return {
        **_mixed(config, mixer),
        **_no_windows(common),
        **biases(config),
        "norms_over_all_heads": True,
        "pre_norms": False,  # of layers that attend
        "post_norms": True,
        "wide_rotary": True,
        "names": {
            "input_norm": "attention_layer_norm",
            "mlp_norm": "feedforward_layer_norm",
            "attention_norm": "feedforward_layer_norm",  # as transformers writes it; released files have Llama's name
        },
    }


# names of tensors in LFM2 and LFM3
FEED_FORWARD = {
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
    "input_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "norm": "embedding_norm",
}
LFM2 = {
    **FEED_FORWARD,
    "out": "self_attn.out_proj",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
}
LFM3 = {
    **FEED_FORWARD,
    "gate_of_heads": "self_attn.gate_proj",
    "attention_norm": "post_operator_norm",
    "output_norm": "post_ffn_norm",
}


def _short_convolution(config: Any) -> dict[str, Any]:
    """Return what layers of LFM2 and LFM3 share."""
    width, bias = config.hidden_size, bool(config.conv_bias)
    mixer = MixerConfig(
        "convolution", config.conv_L_cache, "conv", (("in_proj", 3 * width),), convolution="conv", channels=width,
        bias=bias, out_bias=bias, conv_bias=bias,
    )  # fmt: skip
    return {**_mixed(config, mixer), "head_norms": True}


def _lfm2(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        inner, multiple = int(2 * inner / 3), config.block_multiple_of
        if config.block_ffn_dim_multiplier is not None:
            inner = int(config.block_ffn_dim_multiplier * inner)
            inner = -(-inner // multiple) * multiple
    return {**_short_convolution(config), **_no_windows(common), "inner": inner, "names": LFM2}


def _lfm2_moe(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    layers = [number >= config.num_dense_layers for number in range(config.num_hidden_layers)]
    mixture = mixture_of_experts(
        config,
        config.num_experts,
        config.moe_intermediate_size,
        layers,
        sigmoid=True,
        corrected=bool(config.use_expert_bias),
        normalised=bool(config.norm_topk_prob),
        sum_eps=1e-6,
        scale=float(config.routed_scaling_factor),
        router_name="feed_forward.gate",
        correction_name="feed_forward.expert_bias",
        experts_name="feed_forward.experts",
        parts=("w1", "w3", "w2"),
    )
    return {**_short_convolution(config), **_no_windows(common), "names": LFM2, **mixture}


def _lfm3(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_short_convolution(config),
        **biases(config),
        "names": LFM3,
        "post_norms": bool(config.use_sandwich_norm),
        "output_gate": "heads" if config.use_attention_gate else None,
        "wide_rotary": True,
    }


# names of tensors in Mamba-2 and Nemotron-H
MAMBA2 = {"table": "embeddings", "input_norm": "norm", "norm": "norm_f"}


def _mamba2_mixer(config: Any, heads: int, dim: int, state: int, limits: tuple[float, float]) -> MixerConfig:
    """Return the mixers of Mamba-2 and Nemotron-H."""
    _silu(config)
    bias, groups, width = bool(config.use_bias), config.n_groups, heads * dim
    return MixerConfig(
        "mamba2", config.conv_kernel, "mixer", (("in_proj", 2 * width + 2 * groups * state + heads),),
        groups=groups, heads=heads, key_dim=state, value_dim=dim, eps=config.layer_norm_epsilon,
        norm_groups=groups, bias=bias, out_bias=bias, conv_bias=bool(config.use_conv_bias), limits=limits,
    )  # fmt: skip


def _mamba2(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    least, most = config.time_step_limit
    mixer = _mamba2_mixer(config, config.num_heads, config.head_dim, config.state_size, (least, most))
    return {"mixer": mixer, "names": MAMBA2, "wide_rotary": bool(config.residual_in_fp32)}


def _nemotron_h(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of Nemotron-H, each of whose layers mixes tokens, or has an MLP or experts."""
    limits = (float(config.time_step_min), float("inf"))
    mixer = _mamba2_mixer(config, config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, limits)
    return {
        **_mixed(config, mixer),
        **_no_windows(common),
        **deepseek_mixture(
            config,
            config.n_routed_experts,
            [kind == "moe" for kind in config.layer_types],
            shared=config.moe_shared_expert_intermediate_size,
            latent=config.moe_latent_size or 0,
            latent_names=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj") if config.moe_latent_size else (),
            router_name="mixer.gate",
            correction_name="mixer.gate.e_score_correction_bias",
            experts_name="mixer.experts",
            shared_name="mixer.shared_experts",
            parts=("up_proj", "down_proj"),
            shared_parts=("up_proj", "down_proj"),
        ),
        "rotaries": (Rotary(None),),
        "eps": config.layer_norm_epsilon,
        "mlp_bias": bool(config.mlp_bias),
        "one_part": True,
        "wide_norms": True,
        "names": {
            **MAMBA2,
            **{name: f"mixer.{name}_proj" for name in ("q", "k", "v", "up", "down")},
            "out": "mixer.o_proj",
        },
    }


def _hybrid_mamba2(config: Any, **more: Any) -> MixerConfig:
    """Return the mixers of hybrids, whose configs begin their settings with `mamba_`."""
    _silu(config)
    bias, heads, groups = bool(config.mamba_proj_bias), config.mamba_n_heads, config.mamba_n_groups
    state, width = config.mamba_d_state, heads * config.mamba_d_head
    settings: dict[str, Any] = {
        "groups": groups, "heads": heads, "key_dim": state, "value_dim": config.mamba_d_head,
        "eps": config.rms_norm_eps, "norm_groups": groups, "bias": bias, "out_bias": bias,
        "conv_bias": bool(config.mamba_conv_bias), "limits": tuple(config.time_step_limit),
    }  # fmt: skip
    inputs = (("in_proj", 2 * width + 2 * groups * state + heads),)
    return MixerConfig("mamba2", config.mamba_d_conv, "mamba", inputs, **{**settings, **more})


# names of tensors in Bamba and Falcon-H1
BAMBA = {
    **{name: f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    "mlp_norm": "pre_ff_layernorm",
    "norm": "final_layernorm",
}


def _bamba(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    mixed = _mixed(config, _hybrid_mamba2(config))
    return {**mixed, **_no_windows(common), **biases(config), "names": BAMBA}


def _granite_hybrid(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    mlp: dict[str, Any] = {
        "inner": config.shared_intermediate_size,
        "fused_gate_up": True,
        "names": {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"},
    }
    return {
        **_mixed(config, _hybrid_mamba2(config)),
        **_no_windows(common),
        **biases(config),
        **({} if config.position_embedding_type == "rope" else {"rotaries": (Rotary(None),)}),
        **(granite_mixture(config) if config.num_local_experts else mlp),
        "scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _falcon_h1(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of Falcon-H1. Factors of an input become factors of the outputs, which a bias forbids."""
    inputs, keys = config.attention_in_multiplier, config.key_multiplier
    if (inputs != 1 and config.attention_bias) or (config.ssm_in_multiplier != 1 and config.mamba_proj_bias):
        raise UnfitError("it multiplies the inputs of products that have a bias")
    gate = "plain" if not config.mamba_rms_norm else "norm first" if config.mamba_norm_before_gate else "norm"
    scales = tuple(config.ssm_in_multiplier * scale for scale in config.ssm_multipliers)
    mixer = _hybrid_mamba2(
        config, gate=gate, out_bias=bool(config.projectors_bias), scales=() if set(scales) == {1.0} else scales
    )
    return {
        **_no_windows(common),
        **biases(config),
        "mixer": mixer,
        "mixers": ("both",) * common["layers"],
        "names": BAMBA,
        "scale": common["scale"] * keys * inputs**2,
        "mixer_scales": (config.ssm_out_multiplier, config.attention_out_multiplier * inputs),
        "mlp_scales": tuple(config.mlp_multipliers),
        "embedding_scale": config.embedding_multiplier,
        "logit_scale": 1 / config.lm_head_multiplier,
    }


RECURRENT: dict[str, Callable[[Any, Mapping[str, Any]], dict[str, Any]]] = {
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "qwen3_next": _qwen3_next,
    "olmo_hybrid": _olmo_hybrid,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "lfm3": _lfm3,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "bamba": _bamba,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
}
WITHOUT_ATTENTION = frozenset(("mamba2",))
