"""Names of tensors in GGUF and in transformers, and what llama.cpp changes in some of them.

llama.cpp's converter reorders queries and keys of Llama, because its rotation pairs neighbours, and adds 1 to the norms
of Gemma. transformers' own reader undoes the same (TENSOR_PROCESSORS). Weights of all experts are three tensors
[E, o, i], of gates, values and outputs. So are those of gpt-oss, whose gates and values alternate in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.errors import ModelError
from dsbd_cli.ops.quantized_weight import QuantizedWeight

# factors of rotary frequencies, which are parts of the config (rotary.py)
ROTARY = FACTORS, SHORT, LONG = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION = {f"attn_{side}": f"self_attn.{side}_proj" for side in "qkv"} | {"attn_output": "self_attn.o_proj"}
_MLP = {f"ffn_{side}": f"mlp.{side}_proj" for side in ("gate", "up", "down")}
_COMMON = _NORMS | _ATTENTION | _MLP
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_EXPERTS = {f"ffn_{side}_exps": f"mlp.experts.{side}_proj" for side in ("gate", "up", "down")}  # of all: [E, o, i]
_QWEN_EXPERTS = {"ffn_gate_inp": "mlp.gate", **_EXPERTS}
_SHARED_GATE = "ffn_gate_inp_shexp"
_SHARED = {f"ffn_{side}_shexp": f"mlp.shared_expert.{side}_proj" for side in ("gate", "up", "down")} | {
    _SHARED_GATE: "mlp.shared_expert_gate"
}
_SINKS = "self_attn.sinks"  # a parameter, no module
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": _SINKS,
    "ffn_gate_inp": "mlp.router",
    **_EXPERTS,
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures.

    Attributes:
        families: transformers' names of it.
        layer: names of a layer's modules in transformers, by those in GGUF.
        permuted: queries and keys are reordered. one_more: norms have 1 added.
    """

    families: tuple[str, ...]
    layer: Mapping[str, str]
    permuted: bool = False
    one_more: bool = False

    def renamed(self, name: str) -> str | None:
        """Return transformers' name of a tensor; None for a tensor that is not known."""
        stem, _, end = name.rpartition(".")
        if stem in _WHOLE and end == "weight":
            return f"{_WHOLE[stem]}.weight"
        match = _LAYER.fullmatch(name)
        if match is None or match[2] not in self.layer:
            return None
        module = self.layer[match[2]]
        return (
            f"model.layers.{match[1]}.{module}" if module == _SINKS else f"model.layers.{match[1]}.{module}.{match[3]}"
        )

    def restored(
        self, name: str, values: Tensor | QuantizedWeight, heads: tuple[int, int], origin: str
    ) -> Tensor | QuantizedWeight:
        """Return a tensor as transformers has it. name: in GGUF. heads: of queries and of keys. origin: model and
        file, for messages. Raises ModelError."""
        if self.one_more and name.endswith("norm.weight") and isinstance(values, Tensor):
            return values - 1
        if _SHARED_GATE in name and isinstance(values, Tensor):
            return values.view(1, -1)
        if self.permuted and (".attn_q." in name or ".attn_k." in name):
            count = heads[".attn_k." in name]
            if len(values) % (2 * count):
                raise ModelError(
                    f"{origin} has {len(values)} rows in {name}, which do not fit the {count} heads of its config"
                )
            order = torch.arange(len(values)).view(count, -1, 2).transpose(1, 2).reshape(-1)
            return values[order] if isinstance(values, Tensor) else values.take(order)
        return values


ARCHITECTURES = {
    "llama": Architecture(("llama", "mistral"), _COMMON, permuted=True),
    "qwen2": Architecture(("qwen2",), _COMMON),
    "qwen3": Architecture(("qwen3",), _COMMON | _HEAD_NORMS),
    "qwen2moe": Architecture(("qwen2_moe",), _NORMS | _ATTENTION | _QWEN_EXPERTS | _SHARED),
    "qwen3moe": Architecture(("qwen3_moe",), _NORMS | _ATTENTION | _HEAD_NORMS | _QWEN_EXPERTS),
    "gpt-oss": Architecture(("gpt_oss",), _NORMS | _ATTENTION | _GPT_OSS),
    "phi3": Architecture(("phi3",), {**_NORMS, **_MLP, **_FUSED, "attn_output": "self_attn.o_proj"}),
    "gemma2": Architecture(("gemma2",), _COMMON | _GEMMA, one_more=True),
    "gemma3": Architecture(("gemma3_text",), _COMMON | _GEMMA | _HEAD_NORMS, one_more=True),
}
