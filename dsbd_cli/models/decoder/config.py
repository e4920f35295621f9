"""A standard decoder in numbers: RMS norms, rotary positions, grouped attention, an MLP.

Families differ in the numbers and switches of a `DecoderConfig` (families.py), which also say how their tensors are
named (weights.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dsbd_cli.ops.reference import Router

PAIRS = ("mixer_scales", "mlp_scales")
Mixing = Literal["attention", "recurrent", "both", "none"]
Ungated = Literal["relu2", "xielu"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions of one kind of layer.

    Attributes:
        frequencies: [rotated / 2] float32, angles per position. None: the layer does not rotate.
        scale: factor of sines and cosines.
        rotated: how many leading numbers of a head are rotated.
        long: the frequencies of texts whose prompt is longer than `switch_position`; None: the same.
    """

    frequencies: tuple[float, ...] | None
    scale: float = 1.0
    rotated: int = 0
    long: tuple[float, ...] | None = None

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
class MixtureConfig:
    """A mixture of experts in place of an MLP, or beside a shared expert, in numbers.

    Attributes:
        experts: their number. inner: width of each. router: how they are chosen, without its correction.
        corrected: the router has a correction. wide_router: it computes in float32.
        shared: width of the expert that all tokens have; 0 without one. shared_gate: its output has a weight.
        latent: width of what experts take and return, where products around them change it; 0: that of hidden states.
        limit, alpha: of `ops.reference.ClampedGLU`; 0 where another activation serves.
        biased: router and experts have biases. transposed: tensors of the experts are [E, inputs, outputs], and gates
            and values of the first product alternate.
        router_name, correction_name, experts_name, shared_name, latent_names: of tensors, below a layer. parts: names
            of gate, up and down below each expert, or of up and down without a gate; empty where one tensor holds gate
            and up, and one tensor all experts. shared_parts: the same below the shared expert; two where one tensor
            holds gate and up.
    """

    experts: int
    inner: int
    router: Router
    corrected: bool = False
    wide_router: bool = False
    shared: int = 0
    shared_gate: bool = False
    latent: int = 0
    limit: float = 0.0
    alpha: float = 0.0
    biased: bool = False
    transposed: bool = False
    router_name: str = "mlp.gate"
    correction_name: str = "mlp.gate.e_score_correction_bias"
    experts_name: str = "mlp.experts"
    shared_name: str = "mlp.shared_experts"
    latent_names: tuple[str, ...] = ()
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared_parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")


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
        by_group: rows of the inputs stand group by group, as Qwen3-Next has them.
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
    by_group: bool = False

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
        eps: of the norms. unit_offset: the norms multiply by 1 + weight. wide_norms: those of hidden states multiply in
            float32.
        gelu: the gate goes through gelu (tanh) in place of silu.
        ungated: activation of MLPs and experts without a gate; None: they have one.
        qkv_bias, out_bias, mlp_bias: which products have a bias.
        head_norms: queries and keys are normalised head by head. norms_over_all_heads: over all heads together.
        pre_norms, post_norms: norms before and after attention and MLP.
        query_weights: the weights of head norms act after the rotation.
        tied: the head is the embedding table. fused_qkv: one tensor holds queries, keys and values. fused_gate_up: one
            tensor holds gate and up.
        interleaved: rotation pairs neighbours of a head, not its halves.
        names: names of tensors of a layer that differ from `LAYER_NAMES` (weights.py), by the keys of that table.
        windows: per layer, the width of its sliding window in positions; None without one.
        rotaries: kinds of rotary positions. rotary: per layer, the index of its kind.
        scale: factor of attention scores. softcap, logit_softcap: caps of attention scores and of logits; None without.
        query_growth: (beta, length): queries at position p are multiplied by 1 + beta * log(1 + floor(p / length)).
        embedding_scale, residual_scale, logit_scale: factors; 1 without. Logits are divided by the last one.
        positions: number of positions that the model was made for; None where it is unbounded.
        switch_position: most tokens of a text with `frequencies` of a Rotary that also has `long`; None where none has.
        sinks: each head of attention has a score that takes weight and has no value.
        wide_rotary: angles, norms or the residual stream stay float32 where the rest is bfloat16, which our kernels do
            not do.
        mixture: of experts; None without one. mixtures: per layer, whether it has the mixture; empty without one.
        mixers: per layer, how tokens are mixed: by attention, by a recurrent mixer, by both side by side, or not at
            all; empty: all layers by attention.
        mixer: the recurrent mixers; None where no layer has one.
        output_gate: what a sigmoid gate multiplies the output of attention by: `channels`: a factor for each number,
            from the product of the queries; `heads`: one for each head, from a product of its own. None: there is none.
        one_part: a layer either mixes tokens or has an MLP or a mixture of experts, behind its one norm.
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
    switch_position: int | None = None
    unit_offset: bool = False
    wide_norms: bool = False
    gelu: bool = False
    ungated: Ungated | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    query_weights: bool = False
    norms_over_all_heads: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    tied: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    interleaved: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    query_growth: tuple[float, int] | None = None
    softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    sinks: bool = False
    wide_rotary: bool = False
    mixture: MixtureConfig | None = None
    mixtures: tuple[bool, ...] = ()
    mixers: tuple[Mixing, ...] = ()
    mixer: MixerConfig | None = None
    output_gate: Literal["channels", "heads"] | None = None
    one_part: bool = False
    mixer_scales: tuple[float, float] = (1.0, 1.0)
    mlp_scales: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def from_json(cls, fields_of_config: Mapping[str, Any]) -> DecoderConfig:
        """Return the config whose `dataclasses.asdict` went through JSON. Raises TypeError for another version's."""
        rotaries = []
        for rotary in fields_of_config["rotaries"]:
            own: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in rotary.items()
            }
            rotaries.append(Rotary(**own))
        names = ("windows", "rotary", "mixtures", "mixers", *PAIRS)
        lists: dict[str, Any] = {name: tuple(fields_of_config[name]) for name in names}
        if fields_of_config["query_growth"] is not None:
            lists["query_growth"] = tuple(fields_of_config["query_growth"])
        if (mixture := fields_of_config["mixture"]) is not None:
            parts = {name: tuple(mixture[name]) for name in ("parts", "shared_parts", "latent_names")}
            lists["mixture"] = MixtureConfig(**{**mixture, **parts, "router": Router(**mixture["router"])})
        if (mixer := fields_of_config["mixer"]) is not None:
            more = {name: tuple(mixer[name]) for name in ("limits", "scales")}
            lists["mixer"] = MixerConfig(**{**mixer, **more, "inputs": tuple(map(tuple, mixer["inputs"]))})
        return cls(**{**fields_of_config, **lists, "rotaries": tuple(rotaries)})

    def attends(self, layer: int) -> bool:
        """Return whether a layer attends."""
        return not self.mixers or self.mixers[layer] in ("attention", "both")

    def recurs(self, layer: int) -> bool:
        """Return whether a layer has a recurrent mixer."""
        return bool(self.mixers) and self.mixers[layer] in ("recurrent", "both")

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """The different windows of attention, in the order of the first layers that have them."""
        return tuple(dict.fromkeys(window for layer, window in enumerate(self.windows) if self.attends(layer)))

    @property
    def layer_kinds(self) -> list[Hashable]:
        """The kind of each layer. Layers of one kind are the same operations on the same shapes."""
        return [
            (
                self.mixers[layer] if self.mixers else "attention",
                (self.windows[layer], self.rotary[layer]) if self.attends(layer) else None,
                self.mixture_of(layer) is None,
            )
            for layer in range(self.layers)
        ]

    def with_layers(self, numbers: Sequence[int]) -> DecoderConfig:
        """Return the config of these layers alone."""
        lists: dict[str, Any] = {
            name: tuple(per_layer[number] for number in numbers) if (per_layer := getattr(self, name)) else ()
            for name in ("windows", "rotary", "mixtures", "mixers")
        }
        return replace(self, layers=len(numbers), **lists)

    def mixture_of(self, layer: int) -> MixtureConfig | None:
        """Return the mixture of a layer; None where it has an MLP."""
        return self.mixture if self.mixtures and self.mixtures[layer] else None

    def inner_of(self, layer: int) -> int:
        """Return the width of a layer's MLP, or of the shared expert of its mixture; 0 without any."""
        if (mixture := self.mixture_of(layer)) is not None:
            return mixture.shared
        return 0 if self.one_part and (self.attends(layer) or self.recurs(layer)) else self.inner
