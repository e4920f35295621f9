"""Tiny random targets that transformers runs, with an MTP layer in their checkpoint, and a plain formula of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.checkpoints import numbers
from tests.helpers.tiny import DELTA, EXPERTS
from tests.models.draft_heads.checkpoints import ScalarHead, Tokens, random

WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "rope_parameters": {
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
}}  # fmt: skip
HYBRID = {**DELTA, **WIDE, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
# wide enough that its bits do not depend on the drafts, which the check at load would find
NEXT = {"linear_num_value_heads": 32, "linear_value_head_dim": 8}
SHARED = {**EXPERTS, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16}
ROUTED = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
PLAIN = {**HYBRID, "layer_types": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
LATENT = {
    **PLAIN, **ROUTED, "head_dim": None, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
# name -> (config class, settings, names of the MTP layer, whether its norms add 1 to their weights)
FAMILIES: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "qwen3.5": ("Qwen3_5TextConfig", HYBRID, "qwen", True),
    "qwen3-next": ("Qwen3NextConfig", {**HYBRID, **SHARED, **NEXT}, "qwen", True),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**HYBRID, **SHARED}, "qwen", True),
    "deepseek-v3": ("DeepseekV3Config", LATENT, "deepseek", False),
    "glm4-moe": ("Glm4MoeConfig", {**PLAIN, **ROUTED}, "deepseek", False),
}
LAYERS = 3  # of a target


def save_target(folder: Path, family: str, **changes: Any) -> tuple[Path, Any]:
    """Write a target and its MTP layer, which is the last layer of a model that has one more; return the folder and
    that model."""
    kind, settings, form, _ = FAMILIES[family]
    settings = {**settings, **changes, "num_hidden_layers": LAYERS + 1}
    if settings["layer_types"] is not None:
        settings["layer_types"] = [*settings["layer_types"], "full_attention"]
    config = getattr(transformers, kind)(**{name: value for name, value in settings.items() if value is not None})
    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, parameter in whole.named_parameters():
        if parameter.ndim > 1 and "A_log" not in name:
            parameter.normal_(0, 0.5 if "conv" in name else 0.15)
        elif "norm" in name:
            parameter.add_(0.2 * torch.randn_like(parameter))
    whole.save_pretrained(folder)
    numbers().save_pretrained(folder)
    stated = json.loads((folder / "config.json").read_text())
    stated |= {"num_hidden_layers": LAYERS}
    for name in ("layer_types", "mlp_layer_types"):
        if stated.get(name) is not None:
            stated[name] = stated[name][:LAYERS]
    (folder / "config.json").write_text(json.dumps(stated))
    deep = f"model.layers.{LAYERS}."
    names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    at, layer = "mtp.", "mtp.layers.0."
    if form == "deepseek":
        names, at, layer = ("eh_proj", "enorm", "hnorm", "shared_head.norm"), deep, deep
    hidden = config.hidden_size
    more = random(7, {f"{at}{name}.weight": (hidden,) for name in names[1:]})
    if FAMILIES[family][3]:
        more = {name: number - 1 for name, number in more.items()}
    more |= random(8, {f"{at}{names[0]}.weight": (hidden, 2 * hidden)})
    held = load_file(folder / "model.safetensors")
    held = {name.replace(deep, layer) if name.startswith(deep) else name: tensor for name, tensor in held.items()}
    save_file({**held, **more}, folder / "model.safetensors")
    return folder, whole


class StockHead(ScalarHead):
    """An MTP layer as a formula over one path, in float64, whose decoder layer is transformers' own."""

    def __init__(self, folder: Path, whole: Any, family: str) -> None:
        """whole: the model whose last layer it is."""
        target = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.offset, self.whole = int(FAMILIES[family][3]), copy.deepcopy(whole).double()
        for model in (target, self.whole):
            model.set_experts_implementation("eager")  # others take no float64
        held = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        at = "mtp." if FAMILIES[family][2] == "qwen" else f"model.layers.{LAYERS}."
        own = {name.removeprefix(at): tensor for name, tensor in held.items() if name.startswith(at)}
        super().__init__(own, target.config.to_dict(), target, ())

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.offset + self.tensors[name]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    @torch.no_grad()
    def _last(self, path: Tokens, states: Tensor) -> tuple[Tensor, Tensor]:
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        if "fc" in self.tensors:
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        before = torch.cat((torch.zeros(1, states.shape[1], dtype=states.dtype), states[: len(path) - 1]))
        token, state = self.norm(self.embedding[torch.tensor(path)], names[0]), self.norm(before, names[1])
        joined = (torch.cat((token, state), -1) @ self.tensors[names[2]].T)[None]
        places = torch.arange(len(path))[None]
        body = self.whole.model
        angles = body.rotary_emb(joined, places)
        if len(path) > 1:  # the first token is not seen
            joined, places, angles = joined[:, 1:], places[:, 1:], tuple(tensor[:, 1:] for tensor in angles)
        output = body.layers[-1](joined, position_embeddings=angles, attention_mask=None, position_ids=places)
        last = self.norm((output if isinstance(output, Tensor) else output[0])[0, -1], names[3])
        return last, last @ self.target.get_output_embeddings().weight.T
