"""Tiny random draft heads in every form, written as their makers write them, and plain formulas of what they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.decoders import V

Tokens = tuple[int, ...]

LAYERS = 4  # of the target
KEPT = torch.tensor([*range(2, 40), *range(50, 90)])  # tokens of a trimmed vocabulary
LAYER_IDS = (0, 1, 2)  # layers whose inputs are taken
LAYER = {"self_attn.o_proj": (64, 128), "mlp.gate_proj": (80, 64), "mlp.up_proj": (80, 64), "mlp.down_proj": (64, 80)}
QKV = {"self_attn.q_proj": 128, "self_attn.k_proj": 64, "self_attn.v_proj": 64}


def random(seed: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors large enough that a wrong formula shows; norms are near 1."""
    made = torch.Generator().manual_seed(seed)
    return {
        name: 1 + 0.3 * torch.randn(shape, generator=made)
        if len(shape) == 1
        else torch.randn(shape, generator=made) * (1.5 / shape[1] ** 0.5)
        for name, shape in shapes.items()
    }


def eagle3(folder: Path, form: str, *, kept: Tensor | None = KEPT, own: bool = False, **settings: Any) -> Path:
    """Write an EAGLE-3 head of a target of 64 x 4 layers. form: `speculators` or `raw`. own: with embeddings.

    settings: of its config, None to leave one out.
    """
    at = "layers.0." if form == "speculators" else "midlayer."
    inner = {f"{name}.weight": shape for name, shape in LAYER.items()}
    inner |= {f"{name}.weight": (size, 128) for name, size in QKV.items()}
    inner |= {f"{name}.weight": (64,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    count = V if kept is None else len(kept)
    shapes = {at + name: shape for name, shape in inner.items()}
    shapes |= {"fc.weight": (64, 192), "norm.weight": (64,), "lm_head.weight": (count, 64)}
    if own:
        shapes["embed_tokens.weight"] = (V, 64)
    if settings.get("norm_before_fc"):
        shapes["input_norm.weight"] = (192,)
    if settings.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (64,) for index in range(3)}
    tensors = random(3, shapes)
    tensors["lm_head.weight"] *= 3
    if kept is not None:
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, kept, True)
    layer = {
        "model_type": "llama", "vocab_size": V, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "hidden_act": "silu",
    }  # fmt: skip
    if form == "speculators":
        config = {
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.3",
            "speculators_config": {"algorithm": "eagle3"}, "draft_vocab_size": count, "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": list(LAYER_IDS), "transformer_layer_config": layer,
        }  # fmt: skip
    else:
        ids = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYER_IDS], "use_aux_hidden_state": True}
        config = {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": count, "eagle_config": ids}
    config |= settings
    return _write(folder, {name: value for name, value in config.items() if value is not None}, tensors)


def add_mtp(folder: Path, form: str) -> Path:
    """Put an MTP layer into a checkpoint of a llama of 64 x 4 layers. form: `qwen` or `deepseek`."""
    at = "mtp.layers.0." if form == "qwen" else "model.layers.4."
    config = json.loads((folder / "config.json").read_text())
    inner = config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {f"{at}{name}.weight": (size, 64) for name, size in QKV.items()}
    shapes |= {
        f"{at}self_attn.o_proj.weight": (64, 128),
        f"{at}mlp.gate_proj.weight": (inner, 64),
        f"{at}mlp.up_proj.weight": (inner, 64),
        f"{at}mlp.down_proj.weight": (64, inner),
    }
    shapes |= {f"{at}{name}.weight": (64,) for name in ("input_layernorm", "post_attention_layernorm")}
    names = ["mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"]
    if form == "deepseek":
        names = [at + name for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")]
    shapes |= {f"{names[0]}.weight": (64, 128), **{f"{name}.weight": (64,) for name in names[1:]}}
    save_file({**load_file(folder / "model.safetensors"), **random(5, shapes)}, folder / "model.safetensors")
    return folder


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class ScalarHead:
    """A head as a formula over one path; no keys and values are kept and no mask is built.

    A path is computed whole. What it gave is remembered, because many nodes stand below the same ones.
    """

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], target: Any, layers: Sequence[int]) -> None:
        """target: transformers' model. layers: after so many of its layers states are taken; none: MTP."""
        self.mtp, self.target, self.config, self.layers = not layers, target, config, layers
        self.tensors = {self._plain(name): value for name, value in tensors.items()}
        layer = config.get("transformer_layer_config", config)
        self.theta, self.eps = layer.get("rope_theta", 10000.0), layer["rms_norm_eps"]
        self.embedding = self.tensors.get("embed_tokens", target.get_input_embeddings().weight)
        self._known, self._behind = cache(self._stated), cache(self._computed)

    @staticmethod
    def _plain(name: str) -> str:
        for before in ("mtp.layers.0.", "model.layers.4.", "midlayer.", "layers.0.", "mtp."):
            name = name.removeprefix(before)
        return name.removesuffix(".weight")

    def truth(self, path: Sequence[int]) -> Tensor:
        """[n, 64], states of a path's tokens."""
        return self._known(tuple(path))

    def _stated(self, path: Tokens) -> Tensor:
        with torch.no_grad():
            said = self.target(input_ids=torch.tensor([path]), output_hidden_states=True, use_cache=False)
        if self.mtp:
            last: Tensor = said.hidden_states[-1][0]  # after the final norm
            return last
        taken = [said.hidden_states[layer][0] for layer in self.layers]
        if self.config.get("fc_norm"):
            taken = [self.norm(state, f"fc_norm.{index}") for index, state in enumerate(taken)]
        joined = torch.cat(taken, -1)
        if self.config.get("norm_before_fc"):
            joined = self.norm(joined, "input_norm")
        return joined @ self.tensors["fc"].T

    def logits(self, path: Sequence[int], verified: int) -> Tensor:
        """[m] logits behind a path. known: leading tokens whose states the target has said; others are guesses."""
        return self._behind(tuple(path), verified)[1]

    def _computed(self, path: Tokens, verified: int) -> tuple[Tensor, Tensor]:
        """State and logits of the last token of a path."""
        states = self.truth(path[:verified]) if verified else torch.zeros(0, 64, dtype=self.embedding.dtype)
        guesses = [self._behind(path[:count], verified)[0][None] for count in range(verified + 1, len(path))]
        return self._last(path, torch.cat((states, *guesses)))

    def _last(self, path: Tokens, states: Tensor) -> tuple[Tensor, Tensor]:
        """State and logits of the last token, whose input is the state before it; the first token is not seen."""
        t, embedded = self.tensors, self.embedding[torch.tensor(path)]
        before = torch.cat((torch.zeros(1, 64), states[: len(path) - 1]))
        if self.mtp:
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")
            if "enorm" in t:
                names = ("enorm", "hnorm", "eh_proj")
            both = torch.cat((self.norm(embedded, names[0]), self.norm(before, names[1])), -1)
            residual = both @ t[names[2]].T
            x = self.norm(residual, "input_layernorm")
        else:
            normed = self.norm(before, "hidden_norm")
            residual = normed if self.config.get("norm_before_residual") else before
            x = torch.cat((self.norm(embedded, "input_layernorm"), normed), -1)
        query, key, value = (x @ t[f"self_attn.{name}_proj"].T for name in "qkv")
        query, key = self.rotated(query.unflatten(-1, (4, 32))), self.rotated(key.unflatten(-1, (2, 32)))
        seen = slice(1 if len(path) > 1 else 0, None)
        key, value = (tensor.repeat_interleave(2, 1)[seen] for tensor in (key, value.unflatten(-1, (2, 32))))
        weight = torch.einsum("he,she->hs", query[-1], key).mul(32**-0.5).softmax(-1)
        y = residual[-1] + torch.einsum("hs,she->he", weight, value).flatten() @ t["self_attn.o_proj"].T
        x = self.norm(y, "post_attention_layernorm")
        gate = torch.nn.functional.silu(x @ t["mlp.gate_proj"].T) * (x @ t["mlp.up_proj"].T)
        y = y + gate @ t["mlp.down_proj"].T
        last = self.norm(y, "shared_head.norm" if "shared_head.norm" in t else "norm")
        head = t["lm_head"] if "lm_head" in t else self.target.get_output_embeddings().weight
        return last if self.mtp or self.config.get("norm_output") else y, last @ head.T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.tensors[name]

    def rotated(self, x: Tensor) -> Tensor:
        """[n, h, 32], token i at position i."""
        angle = torch.arange(len(x))[:, None] * self.theta ** (-torch.arange(0, 32, 2) / 32)
        cos, sin, (a, b) = angle.cos()[:, None], angle.sin()[:, None], x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
