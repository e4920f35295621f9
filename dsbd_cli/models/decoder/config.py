"""A standard decoder in numbers: RMS norms, rotary positions, grouped attention, a gated MLP.

Families differ in the numbers and switches of a `DecoderConfig` (families.py), which also say how their tensors are
named (weights.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

PAIRS = ("mixer_scales", "mlp_scales")
Mixing = Literal["attention", "recurrent", "both"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions of one kind of layer.

    Attributes:
        frequencies: [rotated / 2] float32, angles per position. None: the layer does not rotate.
        scale: factor of sines and cosines.
        rotated: how many leading numbers of a head are rotated.
    """

    frequencies: tuple[float, ...] | None
    scale: float = 1.0
    rotated: int = 0

    def table(self, positions: int, dim: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [positions, dim] float32 of both halves of a head. Numbers that are not rotated have
        the angle 0. The angle is rounded to float32, as in transformers. Its sine and cosine are computed in float64
        and rounded at the end."""
        angles = torch.zeros(positions, dim // 2, dtype=torch.float32)
        if self.frequencies is not None:
            places = torch.arange(positions, dtype=torch.float32)
            angles[:, : self.rotated // 2] = places[:, None] * torch.tensor(self.frequencies, dtype=torch.float32)
        wide = torch.cat((angles, angles), -1).to(torch.float64)
        scales = torch.ones(dim, dtype=torch.float32)
        for start in (0, dim // 2):
            scales[start : start + self.rotated // 2] = self.scale
        return wide.cos().to(torch.float32) * scales, wide.sin().to(torch.float32) * scales


@dataclass(frozen=True, slots=True)
class MixerConfig:
    """The recurrent mixers of a decoder in numbers. They are alike in all layers that have one.

    Attributes:
        kind: `delta`: a short convolution and the gated delta rule. `convolution`: a gated short convolution alone.
            `mamba2`: a short convolution and a Mamba-2 scan.
        prefix, output, convolution, norm: names of its tensors in a layer.
        inputs: names of the products of its input, in the order of their parts (mixers.py), and the outputs of each.
        taps: J of the convolution. channels: C of a `convolution`.
        groups, heads, key_dim, value_dim: G, H, N and P of the state (models/recurrent/states.py).
        eps, norm_groups: of the gated norm.
        bias, out_bias, conv_bias: which products, and whether the convolution, have a bias.
        beta: factor of the delta rule's beta.
        limits: least and largest step size of a Mamba-2 scan.
        gate: what a Mamba-2 scan's output goes through: `norm`: gate, then norm of each group; `norm first`: norm, then
            gate; `plain`: gate alone.
        scales: factors of the products' parts: gate, x, B, C and step sizes of Mamba-2; empty for none.
    """

    kind: Literal["delta", "convolution", "mamba2"]
    taps: int
    prefix: str
    inputs: tuple[tuple[str, int], ...]
    output: str = "out_proj"
    convolution: str = "conv1d"
    norm: str = "norm"
    channels: int = 0
    groups: int = 0
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    eps: float = 1e-6
    norm_groups: int = 1
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = False
    beta: float = 1.0
    limits: tuple[float, float] = (0.0, float("inf"))
    gate: Literal["norm", "norm first", "plain"] = "norm"
    scales: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """Width of the output of a scan, H * P; C of a `convolution`."""
        return self.channels or self.heads * self.value_dim

    @property
    def convolved(self) -> int:
        """C, channels of the convolution."""
        return self.channels or self.width + 2 * self.groups * self.key_dim


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A standard decoder in numbers.

    Attributes:
        hidden, inner, layers, heads, kv_heads, head_dim, vocabulary: sizes.
        eps: of the norms. unit_offset: the norms multiply by 1 + weight.
        gelu: the gate goes through gelu (tanh) in place of silu.
        qkv_bias, out_bias, mlp_bias: which products have a bias.
        head_norms: queries and keys are normalised head by head. norms_over_all_heads: over all heads together.
        pre_norms, post_norms: norms before and after attention and MLP.
        tied: the head is the embedding table. fused: one tensor holds queries, keys and values, another gate and up.
        windows: per layer, the width of its sliding window in positions; None without one.
        rotaries: kinds of rotary positions. rotary: per layer, the index of its kind.
        scale: factor of attention scores. softcap, logit_softcap: caps of attention scores and of logits; None without.
        embedding_scale, residual_scale, logit_scale: factors; 1 without. Logits are divided by the last one.
        positions: number of positions that the model was made for; None where it is unbounded.
        wide_rotary: angles, norms or the residual stream stay float32 where the rest is bfloat16, which our kernels do
            not do.
        names: own names of tensors, by those of Llama, without the number of the layer.
        mixers: per layer, how tokens are mixed: by attention, by a recurrent mixer, or by both side by side; empty: all
            layers by attention.
        mixer: the recurrent mixers; None where no layer has one.
        output_gate: what a sigmoid gate multiplies the output of attention by: `channels`: a factor for each number,
            from the product of the queries; `heads`: one for each head, from a product of its own. None: there is none.
        has_mlp: layers have an MLP. fused_mlp: one tensor holds gate and up, whatever `fused` says.
        mixer_scales: factors of the outputs of the recurrent mixer and of attention, where they are side by side.
        mlp_scales: factors of the gate, before its activation, and of the output.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    windows: tuple[int | None, ...]
    rotaries: tuple[Rotary, ...]
    rotary: tuple[int, ...]
    scale: float
    positions: int | None
    unit_offset: bool = False
    gelu: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    norms_over_all_heads: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    tied: bool = False
    fused: bool = False
    softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    wide_rotary: bool = False
    names: tuple[tuple[str, str], ...] = ()
    mixers: tuple[Mixing, ...] = ()
    mixer: MixerConfig | None = None
    output_gate: Literal["channels", "heads"] | None = None
    has_mlp: bool = True
    fused_mlp: bool = False
    mixer_scales: tuple[float, float] = (1.0, 1.0)
    mlp_scales: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def from_json(cls, fields_of_config: Mapping[str, Any]) -> DecoderConfig:
        """Return the config whose `dataclasses.asdict` went through JSON. Raises TypeError for another version's."""
        rotaries = [
            Rotary(**{**rotary, "frequencies": None if rotary["frequencies"] is None else tuple(rotary["frequencies"])})
            for rotary in fields_of_config["rotaries"]
        ]
        lists: dict[str, Any] = {
            name: tuple(fields_of_config[name]) for name in ("windows", "rotary", "mixers", *PAIRS)
        }
        lists["names"] = _pairs(fields_of_config["names"])
        mixer = fields_of_config["mixer"]
        if mixer is not None:
            more = {name: tuple(mixer[name]) for name in ("limits", "scales")}
            lists["mixer"] = MixerConfig(**{**mixer, **more, "inputs": _pairs(mixer["inputs"])})
        return cls(**{**fields_of_config, **lists, "rotaries": tuple(rotaries)})

    def name_of(self, name: str) -> str:
        """Return a tensor's own name. name: that of Llama."""
        start, rest = ".".join(name.split(".", 2)[:2]) + ".", name.split(".", 2)[-1]
        start, rest = (start, rest) if name.startswith("layers.") else ("", name)
        for common, own in self.names:
            if rest.startswith(f"{common}."):
                return f"{start}{own}{rest[len(common) :]}"
        return name

    def attends(self, layer: int) -> bool:
        """Return whether a layer attends."""
        return not self.mixers or self.mixers[layer] != "recurrent"

    def recurs(self, layer: int) -> bool:
        """Return whether a layer has a recurrent mixer."""
        return bool(self.mixers) and self.mixers[layer] != "attention"

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """The different windows of attention, in the order of the first layers that have them."""
        return tuple(dict.fromkeys(window for layer, window in enumerate(self.windows) if self.attends(layer)))

    @property
    def layer_kinds(self) -> list[Hashable]:
        """The kind of each layer: layers of one kind are the same operations on the same shapes."""
        return [
            (self.mixers[layer] if self.mixers else "attention", *(
                (self.windows[layer], self.rotary[layer]) if self.attends(layer) else ()
            ))
            for layer in range(self.layers)
        ]  # fmt: skip

    def of_layers(self, layers: Sequence[int]) -> DecoderConfig:
        """Return the config of a decoder that has these layers alone."""
        windows = tuple(self.windows[layer] for layer in layers)
        rotary = tuple(self.rotary[layer] for layer in layers)
        mixers = tuple(self.mixers[layer] for layer in layers) if self.mixers else ()
        return replace(self, layers=len(layers), windows=windows, rotary=rotary, mixers=mixers)


def _pairs(items: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, items))
