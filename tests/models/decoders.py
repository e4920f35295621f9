"""Tiny random checkpoints of every family that our own decoder knows, with what its config can say."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.helpers.checkpoints import numbers

V = 97
# wide enough for the kernels of a CPU: multiples of 16, and of 32 in a head
BASE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WITHOUT_DIM = {name: value for name, value in BASE.items() if name != "head_dim"} | {"hidden_size": 128}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [2.0 + 0.1 * i for i in range(16)], "original_max_position_embeddings": 256, "factor": 2.0,
}  # fmt: skip
GRANITE4: dict[str, Any] = {
    **WITHOUT_DIM, "num_local_experts": 0, "layer_types": ["full_attention"] * 3, "shared_intermediate_size": 96,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 2.0,
}  # fmt: skip

# mixtures of experts: widths of whole blocks of outputs
EXPERTS: dict[str, Any] = {
    **BASE, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
}  # fmt: skip
WIDE_EXPERTS = {**EXPERTS, **WITHOUT_DIM, "head_dim": 32}
GROUPS = {
    "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "num_shared_experts": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "n_routed_experts": 8,
}  # fmt: skip

RECURRENT = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "layer_types": RECURRENT, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
NEMOTRON = {
    "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "expand": 2,
    "chunk_size": 8, "time_step_min": 0.05, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96,
}  # fmt: skip
CONVOLUTION = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32}

# name -> (config class, settings)
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", BASE),
    "llama tied": ("LlamaConfig", {**BASE, "tie_word_embeddings": True}),
    "llama biases": ("LlamaConfig", {**BASE, "attention_bias": True, "mlp_bias": True}),
    "llama 3 rope": ("LlamaConfig", {**BASE, "rope_parameters": LLAMA3}),
    "llama linear rope": (
        "LlamaConfig",
        {**BASE, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama yarn": ("LlamaConfig", {**BASE, "rope_parameters": YARN}),
    "llama one kv head": ("LlamaConfig", {**BASE, "num_key_value_heads": 1}),
    "llama small head": ("LlamaConfig", {**BASE, "head_dim": 8}),
    "arcee": ("ArceeConfig", {**BASE, "attention_bias": True, "mlp_bias": True}),
    "apertus": ("ApertusConfig", {**BASE, "attention_bias": True}),
    "mistral": ("MistralConfig", {**BASE, "sliding_window": None}),
    "mistral window": ("MistralConfig", {**BASE, "sliding_window": 4}),
    "ministral": ("MinistralConfig", {**BASE, "sliding_window": 4, "layer_types": KINDS}),
    "smollm3": ("SmolLM3Config", {**WITHOUT_DIM, "no_rope_layers": [1, 0, 1]}),
    "qwen2": ("Qwen2Config", WITHOUT_DIM),
    "qwen2 window": (
        "Qwen2Config",
        {**WITHOUT_DIM, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen2 window unused": ("Qwen2Config", {**WITHOUT_DIM, "use_sliding_window": False, "sliding_window": 4}),
    "qwen3": ("Qwen3Config", BASE),
    "qwen3 window": ("Qwen3Config", {**BASE, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "gemma": ("GemmaConfig", BASE),
    "gemma2": (
        "Gemma2Config",
        {
            **BASE,
            "sliding_window": 4,
            "layer_types": KINDS,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {**BASE, "sliding_window": 4, "layer_types": KINDS, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3Config", {**WITHOUT_DIM, "sliding_window": None}),
    "phi3 window": ("Phi3Config", {**WITHOUT_DIM, "sliding_window": 4}),
    "phi3 longrope": (
        "Phi3Config",
        {**WITHOUT_DIM, "original_max_position_embeddings": 256, "rope_parameters": LONGROPE},
    ),
    "phi4 partial rotary": (
        "Phi3Config",
        {**WITHOUT_DIM, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "granite": (
        "GraniteConfig",
        {
            **WITHOUT_DIM,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("Olmo2Config", WITHOUT_DIM),
    "olmo3": ("Olmo3Config", {**WITHOUT_DIM, "sliding_window": 4, "layer_types": KINDS}),
    "exaone4": ("Exaone4Config", {**BASE, "sliding_window": 4, "layer_types": KINDS}),
    "exaone4 without windows": (
        "Exaone4Config",
        {**BASE, "sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    ),
    "seed-oss": ("SeedOssConfig", BASE),
    "qwen2 moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]}),
    "qwen3 moe": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "mixtral": ("MixtralConfig", {**EXPERTS, "sliding_window": 4}),
    "minimax m2": (
        "MiniMaxM2Config",
        {**EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "olmoe": ("OlmoeConfig", {**WIDE_EXPERTS}),
    "flex olmo": ("FlexOlmoConfig", {**WIDE_EXPERTS, "norm_topk_prob": True}),
    "granite moe": ("GraniteMoeConfig", {**WIDE_EXPERTS, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "granite moe shared": ("GraniteMoeSharedConfig", {**WIDE_EXPERTS, "shared_intermediate_size": 96}),
    "glm4 moe": ("Glm4MoeConfig", {**EXPERTS, **GROUPS, "use_qk_norm": True, "attention_bias": True}),
    "solar open": ("SolarOpenConfig", {**EXPERTS, **GROUPS, "attention_bias": True}),
    "dots1": ("Dots1Config", {**EXPERTS, **GROUPS}),
    "exaone moe": (
        "ExaoneMoeConfig",
        {**EXPERTS, **GROUPS, "sliding_window": 4, "layer_types": KINDS, "mlp_layer_types": ["dense"] + ["sparse"] * 2},
    ),
    "gpt oss": ("GptOssConfig", {**EXPERTS, "sliding_window": 4, "layer_types": KINDS, "swiglu_limit": 2.0}),
    "gpt oss without windows": ("GptOssConfig", {**EXPERTS, "layer_types": ["full_attention"] * 3}),
    "ernie4.5 moe": (
        "Ernie4_5_MoeConfig",
        {**EXPERTS, "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2},
    ),
    "granite swa": (
        "GraniteSWAConfig",
        {**WITHOUT_DIM, "sliding_window": 4, "layer_types": KINDS, "layer_rope_theta": [1e4, 0, 1e5]},
    ),
    "granite moe swa": (
        "GraniteMoeSWAConfig",
        {
            **WIDE_EXPERTS,
            "sliding_window": 4,
            "layer_types": KINDS,
            "layer_rope_theta": [1e4, 0, 1e5],
            "rope_parameters": LLAMA3,
            "shared_intermediate_size": 96,
        },
    ),
    "mellum": (
        "MellumConfig",
        {
            **EXPERTS,
            "sliding_window": 4,
            "layer_types": KINDS,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "hy v3": ("HYV3Config", {**EXPERTS, "router_scaling_factor": 1.5, "num_shared_experts": 2}),
    "hunyuan moe": ("HunYuanMoEV1Config", {**EXPERTS, "intermediate_size": 32, "moe_topk": 3}),
    "granite 4 moe": (
        "GraniteMoeHybridConfig",
        {**GRANITE4, "num_local_experts": 8, "num_experts_per_tok": 3, "position_embedding_type": "rope"},
    ),
    "ministral3": ("Ministral3Config", {**BASE, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}}),
    "ministral3 growing": (
        "Ministral3Config",
        {
            **BASE,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
        },
    ),
    "internlm3": ("InternLM3Config", {**BASE, "hidden_size": 128, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("IQuestCoderConfig", {**BASE, "hidden_size": 128}),
    "cwm": ("CwmConfig", {**BASE, "sliding_window": 4, "layer_types": KINDS, "rope_parameters": LLAMA3}),
    "vaultgemma": (
        "VaultGemmaConfig",
        {
            **BASE,
            "sliding_window": 4,
            "layer_types": KINDS,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "granite 4": ("GraniteMoeHybridConfig", {**GRANITE4, "position_embedding_type": "rope"}),
    "granite 4 without rotation": ("GraniteMoeHybridConfig", GRANITE4),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        {**BASE, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 0.5},
    ),
    "hyperclovax without post-norms": ("HyperCLOVAXConfig", {**WITHOUT_DIM, "use_post_norm": False}),
    "helium": ("HeliumConfig", {**BASE, "hidden_size": 128}),
    "ernie4.5": ("Ernie4_5Config", {**BASE, "use_bias": True}),
    "glm": ("GlmConfig", {**BASE, "attention_bias": True}),
    "glm4": ("Glm4Config", {**BASE, "attention_bias": True}),
    "hunyuan": ("HunYuanDenseV1Config", BASE),
    "hunyuan alpha": (
        "HunYuanDenseV1Config",
        {**BASE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 100.0, "factor": 1.0}},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", {**BASE, **DELTA, "attention_bias": True}),
    "qwen3.5 moe": ("Qwen3_5MoeTextConfig", {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 32}),
    "qwen3 next": (
        "Qwen3NextConfig",
        {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [2]},
    ),
    "olmo hybrid": ("OlmoHybridConfig", {**WITHOUT_DIM, **DELTA, "rope_parameters": None}),
    "olmo hybrid rotary": ("OlmoHybridConfig", {**WITHOUT_DIM, **DELTA, "linear_allow_neg_eigval": False}),
    "mamba2": (
        "Mamba2Config",
        {
            **{name: BASE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_heads": 4,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 2,
            "expand": 2,
            "chunk_size": 8,
        },
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {
            **BASE,
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    "nemotron-h moe": (
        "NemotronHConfig",
        {
            **EXPERTS,
            **GROUPS,
            **NEMOTRON,
            "layers_block_type": ["moe", "full_attention", "linear_attention"],
            # released files have these, too, which transformers does not read
            "norm_eps": 0.1,
            "hidden_act": "silu",
            "rope_theta": 1e4,
        },
    ),
    "nemotron-h latent": (
        "NemotronHConfig",
        {
            **EXPERTS,
            **GROUPS,
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "full_attention", "moe"],
            "hidden_size": 96,
            "moe_latent_size": 64,
            "mlp_bias": True,
        },
    ),
    "bamba": ("BambaConfig", {**WITHOUT_DIM, **MAMBA, "attn_layer_indices": [1], "mamba_proj_bias": True}),
    "falcon-h1": (
        "FalconH1Config",
        {
            **BASE,
            **MAMBA,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "key_multiplier": 0.5,
            "ssm_in_multiplier": 1.5,
            "ssm_multipliers": [0.5, 1.25, 0.75, 1.5, 0.8],
            "ssm_out_multiplier": 0.7,
            "lm_head_multiplier": 0.5,
            "attention_in_multiplier": 1.25,
            "attention_out_multiplier": 0.6,
            "mlp_multipliers": [0.8, 1.2],
            "embedding_multiplier": 2.0,
        },
    ),
    "falcon-h1 norm": (
        "FalconH1Config",
        {**BASE, **MAMBA, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_rms_norm": True},
    ),
    "falcon-h1 norm behind": (
        "FalconH1Config",
        {
            **BASE,
            **MAMBA,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "granite hybrid": (
        "GraniteMoeHybridConfig",
        {
            **WITHOUT_DIM,
            **MAMBA,
            "layer_types": RECURRENT,
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "logits_scaling": 2.0,
        },
    ),
    "granite hybrid attention": (
        "GraniteMoeHybridConfig",
        {
            **WITHOUT_DIM,
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 64,
            "attention_multiplier": 0.25,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
        },
    ),
    "lfm3": (
        "Lfm3Config",
        {**BASE, "layer_types": ["conv", *KINDS[:2]], "sliding_window": 4},
    ),
    "lfm3 plain": (
        "Lfm3Config",
        {
            **BASE,
            "layer_types": ["conv", *KINDS[:2]],
            "sliding_window": 4,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "conv_L_cache": 3,
        },
    ),
    "lfm2": ("Lfm2Config", {**WITHOUT_DIM, **CONVOLUTION}),
    "lfm2 moe": (
        "Lfm2MoeConfig",
        {**WIDE_EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "granite hybrid moe": (
        "GraniteMoeHybridConfig",
        {**GRANITE4, **MAMBA, "layer_types": RECURRENT, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "lfm2 biases": ("Lfm2Config", {**WITHOUT_DIM, **CONVOLUTION, "conv_bias": True, "conv_L_cache": 4}),
}


def build_decoder(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random model in evaluation mode. Norms and biases are random too, or a missing one would not show.

    changes: settings of the config in place of the family's own.
    """
    kind, settings = DECODERS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**{**settings, **changes})
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 or parameter_name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(0.2 * torch.randn_like(buffer))
    return model.eval().requires_grad_(False)


def first_layers(model: Any, count: int) -> Any:
    """Return a draft: the same model with its first layers alone."""
    config = deepcopy(model.config)
    config.num_hidden_layers = count
    for name in ("layer_types", "layers_block_type", "no_rope_layers", "mlp_layer_types", "layer_rope_theta"):
        if vars(config).get(name) is not None:
            setattr(config, name, getattr(config, name)[:count])
    small: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = model.state_dict()
    small.load_state_dict({name: state[name] for name in small.state_dict()})
    return small.eval().requires_grad_(False)


def save_decoder(folder: Path, model: Any, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint with a tokenizer whose words are numbers."""
    deepcopy(model).to(dtype).save_pretrained(folder)
    numbers().save_pretrained(folder)
    return folder
