"""Families with mixtures of experts: the settings in which each differs from the common ones (dense.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from dsbd_cli.models.decoder.config import MixtureConfig
from dsbd_cli.models.decoder.dense import (
    UNGATED,
    UnfitError,
    attention_bias,
    ernie4_5,
    granite,
    granite_swa,
    hunyuan,
    no_windows,
    olmo2,
    qwen3,
    rotating,
)
from dsbd_cli.ops.reference import OUTPUTS_STEP, Router

BLOCK_SPARSE_MOE: dict[str, Any] = {  # names of Mixtral's tensors
    "router_name": "block_sparse_moe.gate",
    "correction_name": "block_sparse_moe.e_score_correction_bias",
    "experts_name": "block_sparse_moe.experts",
    "parts": ("w1", "w3", "w2"),
}


def mixture_of_experts(
    config: Any, experts: int, inner: int, layers: Sequence[object] | None = None, **more: Any
) -> dict[str, Any]:
    """Return the mixture of a family. layers: per layer, whether it has the mixture; None: all have. more: settings of
    the Router, which chooses `num_experts_per_tok` experts if none says otherwise, and of the MixtureConfig."""
    per_layer = tuple(map(bool, layers)) if layers is not None else (True,) * int(config.num_hidden_layers)
    if not any(per_layer):
        return {}
    if experts < 2:
        raise UnfitError(f"it has {experts} experts, and 2 are the least")
    inner_step = OUTPUTS_STEP if config.model_type in UNGATED else OUTPUTS_STEP // 2  # gate and up are one product
    for name, width, step in (
        ("experts", inner, inner_step),
        ("hidden states", more.get("latent") or config.hidden_size, OUTPUTS_STEP),
    ):
        if width % step:
            raise UnfitError(f"its {name} have the width {width}, which is no multiple of {step}")
    if not all(per_layer) and getattr(config, "intermediate_size", 0) <= 0:
        raise UnfitError("its MLPs have no width")
    of_router = {field.name: more.pop(field.name) for field in fields(Router) if field.name in more}
    router = Router(**{"chosen": config.num_experts_per_tok, **of_router})
    mixture = MixtureConfig(experts, inner, router, **more)
    return {"mixture": mixture, "mixtures": per_layer}


def qwen_mixture(config: Any, **more: Any) -> dict[str, Any]:
    """Return the mixture of Qwen 2 and 3: every so many layers, but for those that are listed."""
    layers = [
        number not in config.mlp_only_layers and (number + 1) % config.decoder_sparse_step == 0
        for number in range(config.num_hidden_layers)
    ]
    inner, normalised = config.moe_intermediate_size, bool(config.norm_topk_prob)
    return mixture_of_experts(config, config.num_experts, inner, layers, normalised=normalised, **more)


def _qwen2_moe(config: Any) -> dict[str, Any]:
    return {
        "qkv_bias": bool(config.qkv_bias),
        **qwen_mixture(
            config, shared=config.shared_expert_intermediate_size, shared_name="mlp.shared_expert", shared_gate=True
        ),
    }


def _qwen3_moe(config: Any) -> dict[str, Any]:
    return {**qwen3(config), **qwen_mixture(config)}


def _mixtral(config: Any) -> dict[str, Any]:
    return mixture_of_experts(config, config.num_local_experts, config.intermediate_size, **BLOCK_SPARSE_MOE)


def _minimax_m2(config: Any) -> dict[str, Any]:
    experts, inner = config.num_local_experts, config.intermediate_size
    return {
        "norms_over_all_heads": True,
        "windows": no_windows(config),
        **mixture_of_experts(config, experts, inner, sigmoid=True, corrected=True, **BLOCK_SPARSE_MOE),
    }


def _olmoe(config: Any) -> dict[str, Any]:
    if config.clip_qkv is not None:
        raise UnfitError(f"its config says clip_qkv = {config.clip_qkv!r}, which is not known here")
    return {
        **attention_bias(config),
        "norms_over_all_heads": True,
        "windows": no_windows(config),
        **mixture_of_experts(
            config, config.num_experts, config.intermediate_size, normalised=bool(config.norm_topk_prob)
        ),
    }


def _flex_olmo(config: Any) -> dict[str, Any]:
    experts, inner = config.num_experts, config.intermediate_size
    return {**olmo2(config), **mixture_of_experts(config, experts, inner, normalised=bool(config.norm_topk_prob))}


def granite_mixture(config: Any, router_name: str = "block_sparse_moe.router.layer") -> dict[str, Any]:
    return mixture_of_experts(
        config,
        config.num_local_experts,
        config.intermediate_size,
        router_name=router_name,
        experts_name="block_sparse_moe.experts",
        shared=int(getattr(config, "shared_intermediate_size", 0)),
        shared_name="shared_mlp",
        shared_parts=("input_linear", "output_linear"),
        parts=(),
    )


def _granitemoe(config: Any) -> dict[str, Any]:
    return {**granite(config), **granite_mixture(config)}


def _ernie4_5_moe(config: Any) -> dict[str, Any]:
    if config.use_bias:
        raise UnfitError("its LM head has a bias (use_bias)")
    first, last, interval = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
    layers = [(number + 1) % interval == 0 and first <= number <= last for number in range(config.num_hidden_layers)]
    inner = config.moe_intermediate_size
    return {
        **ernie4_5(config),
        **mixture_of_experts(
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
        raise UnfitError("its layers have different numbers of experts")
    return {
        **hunyuan(config),
        **mixture_of_experts(
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


def deepseek_mixture(config: Any, experts: int, layers: Sequence[object] | None = None, **more: Any) -> dict[str, Any]:
    """Return a mixture with DeepSeek V3's router. layers: as in `mixture_of_experts`; None: all but the first."""
    inner, groups = config.moe_intermediate_size, config.n_group
    if layers is None:
        layers = [number >= config.first_k_dense_replace for number in range(config.num_hidden_layers)]
    if groups < 1 or experts % groups:
        raise UnfitError(f"its config says n_group = {groups}, with {experts} experts")
    if config.num_experts_per_tok > experts // groups * config.topk_group:
        raise UnfitError(f"its config says topk_group = {config.topk_group}, which has fewer experts than a token")
    return mixture_of_experts(
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
        **{"shared": inner * (getattr(config, "n_shared_experts", 0) or 0), **more},
    )


def _glm4_moe(config: Any) -> dict[str, Any]:
    return {
        "qkv_bias": bool(config.attention_bias),
        "head_norms": bool(getattr(config, "use_qk_norm", False)),
        "windows": no_windows(config),
        **deepseek_mixture(config, config.num_local_experts),
    }


def _solar_open(config: Any) -> dict[str, Any]:
    layers = [True] * config.num_hidden_layers
    return {
        "qkv_bias": bool(config.attention_bias),
        "windows": no_windows(config),
        **deepseek_mixture(config, config.num_local_experts, layers),
    }


def _dots1(config: Any) -> dict[str, Any]:
    return {**attention_bias(config), "head_norms": True, **deepseek_mixture(config, config.num_local_experts)}


def _exaone_moe(config: Any) -> dict[str, Any]:
    """Return the settings of EXAONE MoE. Where it has windows, layers without one do not rotate."""
    windows = config.sliding_window is not None
    layers = [kind == "sparse" for kind in config.mlp_layer_types]
    return {
        **rotating(config, [not windows or kind == "sliding_attention" for kind in config.layer_types]),
        "head_norms": True,
        **deepseek_mixture(
            config,
            config.num_experts,
            layers,
            shared=config.moe_intermediate_size * config.num_shared_experts,
            correction_name="mlp.e_score_correction_bias",
        ),
    }


def _gpt_oss(config: Any) -> dict[str, Any]:
    return {
        **attention_bias(config),
        "sinks": True,
        **mixture_of_experts(
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


def _granitemoe_swa(config: Any) -> dict[str, Any]:
    return {**granite_swa(config), **granite_mixture(config, "block_sparse_moe.router")}


def _mellum(config: Any) -> dict[str, Any]:
    layers = [kind == "sparse" for kind in config.mlp_layer_types]
    experts, inner = config.num_local_experts, config.moe_intermediate_size
    mixture = mixture_of_experts(config, experts, inner, layers, normalised=bool(config.norm_topk_prob))
    return {**qwen3(config), **mixture}


def _hy_v3(config: Any) -> dict[str, Any]:
    layers = [kind == "sparse" for kind in config.mlp_layer_types]
    inner = config.moe_intermediate_size
    mixture = mixture_of_experts(
        config,
        config.num_experts,
        inner,
        layers,
        sigmoid=True,
        corrected=True,
        wide_router=True,
        scale=float(config.router_scaling_factor),
        shared=inner * config.num_shared_experts or config.intermediate_size,
        router_name="mlp.router.gate",
        correction_name="mlp.expert_bias",
        shared_name="mlp.shared_mlp",
    )
    return {**qwen3(config), "windows": no_windows(config), "mlp_bias": bool(config.mlp_bias), **mixture}


MIXTURES: dict[str, Callable[[Any], dict[str, Any]]] = {
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
    "granitemoe_swa": _granitemoe_swa,
    "mellum": _mellum,
    "hy_v3": _hy_v3,
    "ernie4_5_moe": _ernie4_5_moe,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
}
