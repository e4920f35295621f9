"""Tiny random models of many architectures, built in code; forests and their slow references."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput, ForestModel
from dsbd_cli.models.recurrent.linearised_model import LinearisedLlama

V = 97

SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": V,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {**GROUPED, "head_dim": 8}
ALONE = {
    **{name: value for name, value in SIZES.items() if name != "hidden_size"},
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_ffn_dim": 48,
    "is_decoder": True,
    "is_encoder_decoder": False,
}  # the decoder of a model with an encoder
SLIDING = ["sliding_attention", "full_attention"]

# name -> (config class, settings). Windows of 4 are shorter than every test sequence.
FIT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "llama one kv head": ("LlamaConfig", {**SIZES, "num_key_value_heads": 1}),
    "opt": ("OPTConfig", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": ("GPT2Config", GPT2),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen2 window": (
        "Qwen2Config",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen2 window unused": ("Qwen2Config", {**GROUPED, "use_sliding_window": False, "sliding_window": 4}),
    "qwen3": ("Qwen3Config", HEAD),
    "qwen3 moe window unused": (
        "Qwen3MoeConfig",
        {**HEAD, "sliding_window": 4, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": None}),
    "mistral window": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
    "gemma2 window": (
        "Gemma2Config",
        {**HEAD, "sliding_window": 4, "layer_types": SLIDING, "query_pre_attn_scalar": 8},
    ),
    "gemma3 window": ("Gemma3TextConfig", {**HEAD, "sliding_window": 4, "layer_types": SLIDING}),
    "gpt-neox": ("GPTNeoXConfig", SIZES),
    "phi": ("PhiConfig", SIZES),
    "phi3": ("Phi3Config", {**GROUPED, "sliding_window": None}),
    "phi3 window": ("Phi3Config", {**GROUPED, "sliding_window": 4}),
    "falcon rotary": ("FalconConfig", {**SIZES, "alibi": False, "new_decoder_architecture": False}),
    "gptj": ("GPTJConfig", {**GPT2, "rotary_dim": 4}),
    "gpt-oss window": (
        "GptOssConfig",
        {**HEAD, "sliding_window": 4, "layer_types": SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4 chunks": (
        "Llama4TextConfig",
        {
            **HEAD,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 4,
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
            "num_local_experts": 2,
        },
    ),
    "moshi window unused": ("MoshiConfig", {**GROUPED, "ffn_dim": 48, "sliding_window": 4}),
    "gpt-neox-japanese": ("GPTNeoXJapaneseConfig", {**SIZES, "intermediate_multiple_size": 2}),
    "doge": ("DogeConfig", HEAD),
    "longcat": (
        "LongcatFlashConfig",
        {
            **SIZES,
            "ffn_hidden_size": 48,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 16,
        },
    ),
    "gpt-neo window": (
        "GPTNeoConfig",
        {
            "vocab_size": V,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 512,
        },
    ),
    "bloom": ("BloomConfig", {"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "roberta": ("RobertaConfig", {**SIZES, "is_decoder": True}),
    "bart decoder": ("BartConfig", {**ALONE, "decoder_attention_heads": 4}),
    "pegasus decoder": ("PegasusConfig", {**ALONE, "decoder_attention_heads": 4}),
    "smollm3": ("SmolLM3Config", GROUPED),
    "cohere": ("CohereConfig", GROUPED),
}

# What our own decoder does in ways of its own; tests/models/decoders.py has all of its families.
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusConfig", GROUPED),
    "arcee": ("ArceeConfig", {**GROUPED, "mlp_bias": True}),
    "glm4": ("Glm4Config", {**HEAD, "attention_bias": True}),
    "hunyuan": ("HunYuanDenseV1Config", HEAD),
    "ministral3 growing": (
        "Ministral3Config",
        {
            **HEAD,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "granite dense": (
        "GraniteMoeHybridConfig",
        {
            **GROUPED, "num_local_experts": 0, "layer_types": ["full_attention"] * 2, "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
        },
    ),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        {**HEAD, "hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt-oss sinks": (
        "GptOssConfig",
        {
            **HEAD, "hidden_size": 64, "intermediate_size": 32, "sliding_window": 4, "layer_types": SLIDING,
            "num_local_experts": 8, "num_experts_per_tok": 3,
        },
    ),
    "nemotron-h moe": (
        "NemotronHConfig",
        {
            **HEAD, "hidden_size": 64, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8,
            "n_routed_experts": 8, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 48,
        },
    ),
    "phi3 longrope": (
        "Phi3Config",
        {
            **GROUPED, "hidden_size": 64, "sliding_window": None, "original_max_position_embeddings": 100,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "factor": 5.0, "original_max_position_embeddings": 100,
                "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.1 * i for i in range(8)],
            },
        },
    ),
}  # fmt: skip

UNFIT: dict[str, tuple[str, dict[str, Any]]] = {
    "mpt": ("MptConfig", {"vocab_size": V, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    "falcon alibi": ("FalconConfig", {**SIZES, "alibi": True, "new_decoder_architecture": False}),
    "recurrent-gemma": ("RecurrentGemmaConfig", {**GROUPED, "num_hidden_layers": 3, "lru_width": 32}),
    "rwkv": ("RwkvConfig", {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}),
    "minimax": ("MiniMaxConfig", {**HEAD, "layer_types": ["linear_attention", "full_attention"]}),
}

THREE = {**GROUPED, "num_hidden_layers": 3}
ALTERNATING = ["linear_attention", "full_attention", "linear_attention"]
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
DELTA = {
    **THREE,
    "head_dim": 8,
    "layer_types": ALTERNATING,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
CONV = {**THREE, "layer_types": ["conv", "full_attention", "conv"]}
MAMBA = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}

# Layers that carry a state, alone or beside attention.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2Config",
        {
            **MAMBA,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 8,
            "expand": 2,
            "n_groups": 2,
            "chunk_size": 8,
            "conv_kernel": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "bamba": ("BambaConfig", {**THREE, **MAMBA2, "attn_layer_indices": [1]}),
    "falcon-h1": ("FalconH1Config", {**THREE, **MAMBA2, "mamba_d_ssm": 64, "head_dim": 8}),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {
            **THREE,
            **MAMBA2,
            "layer_types": ALTERNATING,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 32,
        },
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {
            **THREE,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 8,
            "head_dim": 8,
            "layers_block_type": ["mamba", "attention", "mamba"],
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            **THREE,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_conv": 4,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "attention_hidden_size": 64,
            "hybrid_layer_ids": [1, 3],
        },
    ),
    "qwen3-next": ("Qwen3NextConfig", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3.5": ("Qwen3_5TextConfig", DELTA),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "olmo-hybrid": ("OlmoHybridConfig", DELTA),
    "kimi-linear": (
        "KimiLinearConfig",
        {
            **THREE,
            "num_key_value_heads": 4,
            "layer_types": ALTERNATING,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "linear_conv_kernel_dim": 4,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "bailing-hybrid": (
        "BailingHybridConfig",
        {
            **THREE,
            "num_key_value_heads": 4,
            "layer_types": ALTERNATING,
            "head_dim": 8,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "linearised": (
        "LlamaConfig",
        {**GROUPED, "linear_group_size": 4, "linear_kernel_size": 9, "linear_parts": ["dwconv", "global_factor"]},
    ),
    "lfm2": ("Lfm2Config", {**CONV, "block_auto_adjust_ff_dim": False}),
    "lfm2-moe": ("Lfm2MoeConfig", {**CONV, **EXPERTS, "num_dense_layers": 1}),
    "lfm3": ("Lfm3Config", CONV),
    "mamba": ("MambaConfig", MAMBA),
    "falcon-mamba": ("FalconMambaConfig", MAMBA),
    "jamba": (
        "JambaConfig",
        {
            **THREE,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "zamba": (
        "ZambaConfig",
        {
            **THREE,
            "num_key_value_heads": 4,
            "num_hidden_layers": 6,
            "attn_layer_period": 2,
            "attn_layer_offset": 2,
            "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
            "attention_hidden_size": 64,
        },
    ),
}


SINCE = {"lfm3": Version("5.23")}  # versions of transformers, of families that the oldest one of pyproject.toml lacks


def build(name: str, *, attention: str | None = None, seed: int = 0, **changes: Any) -> Any:
    """A random model of a family in evaluation mode, with weights large enough that a wrong mask shows, and states
    that last long enough for a wrong one to show."""
    kind, settings = {**FIT, **OWN, **UNFIT, **RECURRENT}[name]
    if name in SINCE and Version(transformers.__version__) < SINCE[name]:
        pytest.skip(f"transformers {transformers.__version__} does not know {name} yet")
    config = getattr(transformers, kind)(**{**settings, **changes})
    torch.manual_seed(seed)
    wants = {} if attention is None else {"attn_implementation": attention}
    if hasattr(config, "linear_group_size"):
        model: Any = LinearisedLlama(config).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, **wants).eval()
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1 and "A_log" not in key:
            parameter.data.normal_(0, 0.5 if "conv" in key else 0.15)
        elif key.endswith("dt_bias") and bool((parameter == 1).all()):
            parameter.data.fill_(-4)  # these would forget within three tokens
    return model.requires_grad_(False)


@dataclass
class Row:
    """One row of a packed forest as plain Python: what each slot holds, by hand."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # of each node, an index into this row's nodes; -1 for the first
    slots: list[int] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        """Nodes from the start of the prompt to `node`."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def add(self, rng: random.Random, parent: int, free: list[int]) -> int:
        """A new node with a random token in a free slot."""
        self.tokens.append(rng.randrange(3, V))
        self.parents.append(parent)
        self.slots.append(free.pop(rng.randrange(len(free))))
        return len(self.tokens) - 1


def forest_input(
    rows: list[Row], nodes: list[list[int]], active: int, trash: int, chosen: list[int] | None = None
) -> ForestInput:
    """Nodes of each row as one forward; rows with fewer nodes are filled with absent ones in the trash slot."""
    width = max(map(len, nodes))
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    positions, slots = torch.zeros_like(tokens), torch.full_like(tokens, trash)
    mask = torch.zeros(len(rows), width, active, dtype=torch.bool)
    slot_positions = torch.zeros(len(rows), active, dtype=torch.int64)
    for r, (row, present) in enumerate(zip(rows, nodes, strict=True)):
        for node, slot in enumerate(row.slots):
            slot_positions[r, slot] = len(row.path(node)) - 1
        mask[r, len(present) :, trash] = True
        for i, node in enumerate(present):
            path = row.path(node)
            tokens[r, i], positions[r, i], slots[r, i] = row.tokens[node], len(path) - 1, row.slots[node]
            mask[r, i, [row.slots[other] for other in path]] = True
    return ForestInput(tokens, positions, slots, mask, slot_positions, None if chosen is None else torch.tensor(chosen))


def plain_logits(model: Any, row: Row, node: int) -> Tensor:
    """[V] logits of a node by running its path alone, without cache or mask."""
    tokens = torch.tensor([[row.tokens[other] for other in row.path(node)]])
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0, -1]
    return logits


def worst(forest: ForestModel, model: Any, rows: list[Row], nodes: list[list[int]], batch: ForestInput) -> float:
    """Largest absolute logit error of a forward against the separate paths."""
    logits = forest.forward(batch)
    assert logits is not None
    errors = [
        (logits[r, i].cpu() - plain_logits(model, row, node)).abs().max().item()
        for r, (row, present) in enumerate(zip(rows, nodes, strict=True))
        for i, node in enumerate(present)
    ]
    return max(errors)
