"""GGUF files of mixtures of experts, as llama.cpp's converter makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor
from transformers import GptOssConfig, Qwen2MoeConfig, Qwen3MoeConfig

from tests.helpers.gguf_models import begin, finish, random_model
from tests.helpers.quantized_files import GGUF, OTHER_GGUF, SETTINGS
from tests.helpers.raw_gguf import random_blocks

SCALES = GGUF | OTHER_GGUF
EXPERTS, INNER = 4, 256
_SIZES: dict[str, Any] = {
    **{name: value for name, value in SETTINGS.items() if name != "architectures"},
    "head_dim": 64,
    "num_experts_per_tok": 2,
}
_QWEN: dict[str, Any] = {**_SIZES, "num_experts": EXPERTS, "moe_intermediate_size": INNER}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {  # by llama.cpp's architecture
    "qwen2moe": (Qwen2MoeConfig, {**_QWEN, "shared_expert_intermediate_size": 512}),
    "qwen3moe": (Qwen3MoeConfig, {**_QWEN, "norm_topk_prob": True}),
    "gpt-oss": (
        GptOssConfig,
        {
            **_SIZES,
            "head_dim": 32,
            "num_local_experts": EXPERTS,
            "intermediate_size": INNER,
            "sliding_window": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}
_PARTS = {
    "input_layernorm.": "attn_norm.", "self_attn.q_proj.": "attn_q.", "self_attn.k_proj.": "attn_k.",
    "self_attn.v_proj.": "attn_v.", "self_attn.o_proj.": "attn_output.", "self_attn.q_norm.": "attn_q_norm.",
    "self_attn.k_norm.": "attn_k_norm.", "self_attn.sinks": "attn_sinks.weight", "mlp.gate.": "ffn_gate_inp.",
    "mlp.router.": "ffn_gate_inp.", "mlp.shared_expert_gate.": "ffn_gate_inp_shexp.",
    "mlp.shared_expert.gate_proj.": "ffn_gate_shexp.", "mlp.shared_expert.up_proj.": "ffn_up_shexp.",
    "mlp.shared_expert.down_proj.": "ffn_down_shexp.",
}  # fmt: skip


def write_mixture(
    path: Path,
    architecture: str,
    kind: str,
    down: str | None = None,
    *,
    others: str = "Q4_0",
    more: Callable[[GGUFWriter], object] = lambda writer: None,
    **settings: Any,
) -> Any:
    """Write a random mixture of experts. Returns transformers' model of the same weights, dequantised by llama.cpp's
    package.

    kind: of the experts' random blocks, or F16. down: of those of the last products; None: `kind`. others: of other
    matrices but the routers. more: writes more metadata and tensors. settings: of the config.
    """
    made, common = MODELS[architecture]
    model = random_model(made, **{**common, **settings})
    config = model.config
    writer = begin(path, config, architecture)
    writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_key_length(config.head_dim if architecture != "qwen2moe" else 64)
    writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "gpt-oss":
        rope = config.rope_parameters
        writer.add_sliding_window(config.sliding_window)
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    more(writer)
    for seed, (name, values, target) in enumerate(_tensors(model.state_dict(), architecture)):
        own = (down or kind) if "down_exps" in name else kind if "_exps" in name else others
        if values.dim() < 2 or "_inp" in name or name.endswith("bias"):
            writer.add_tensor(name, values.squeeze().contiguous().numpy() if "shexp" in name else values.numpy())
            continue
        if own == "F16":
            target.copy_(values.half())
            writer.add_tensor(name, values.half().numpy())
            continue
        blocks = random_blocks(own, values[..., 0].numel(), values.shape[-1], seed, SCALES[own])
        plain = gguf.dequantize(blocks, GGMLQuantizationType[own]).reshape(values.shape)
        target.copy_(torch.from_numpy(plain))
        packed = blocks.reshape(*values.shape[:-1], -1)
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType[own])
    finish(writer)
    return model


def _tensors(state: dict[str, Tensor], architecture: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield names in GGUF, values for the file, and the part of transformers' tensor that holds the same."""
    whole = {"model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output."}
    for name, values in state.items():
        for theirs, ours in whole.items():
            if name.startswith(theirs):
                yield name.replace(theirs, ours), values.contiguous(), values
        if not name.startswith("model.layers."):
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        at = f"blk.{layer}."
        if rest.startswith("post_attention_layernorm."):
            norm = "post_attention_norm" if architecture == "gpt-oss" else "ffn_norm"
            yield f"{at}{norm}.weight", values, values
        for theirs, ours in _PARTS.items():
            if rest.startswith(theirs):
                yield at + rest.replace(theirs, ours), values.contiguous(), values
        part = rest.removeprefix("mlp.experts.")
        if part != rest:
            kind = "bias" if part.endswith("_bias") else "weight"
            for side, view in _sides(part.removesuffix("_bias"), values, architecture, kind):
                yield f"{at}ffn_{side}_exps.{kind}", view.contiguous(), view


def _sides(part: str, values: Tensor, architecture: str, kind: str) -> list[tuple[str, Tensor]]:
    """Return gates, values and outputs of experts, views [E, o, i] or [E, o] of transformers' tensor."""
    rows = values.transpose(1, 2) if architecture == "gpt-oss" and kind == "weight" else values
    if part == "down_proj":
        return [("down", rows)]
    if architecture == "gpt-oss":
        return [("gate", rows[:, ::2]), ("up", rows[:, 1::2])]
    return [("gate", rows[:, : rows.shape[1] // 2]), ("up", rows[:, rows.shape[1] // 2 :])]
