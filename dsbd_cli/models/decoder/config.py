"""A standard decoder in numbers: RMS norms, rotary positions, grouped attention, a gated MLP.

Families differ in the numbers and switches of a `DecoderConfig` (families.py), which also say how their tensors are
named (weights.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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
class DecoderConfig:
    """A standard decoder in numbers.

    Attributes:
        hidden, inner, layers, heads, kv_heads, head_dim, vocabulary: sizes.
        eps: of the norms. unit_offset: the norms multiply by 1 + weight.
        gelu: the gate goes through gelu (tanh) in place of silu.
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
        wide_rotary: angles and norms stay float32 where the rest is bfloat16, which our kernels do not do.
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
    gelu: bool = False
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
    wide_rotary: bool = False

    @classmethod
    def from_json(cls, fields_of_config: Mapping[str, Any]) -> DecoderConfig:
        """Return the config whose `dataclasses.asdict` went through JSON. Raises TypeError for another version's."""
        rotaries = []
        for rotary in fields_of_config["rotaries"]:
            own: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in rotary.items()
            }
            rotaries.append(Rotary(**own))
        lists: dict[str, Any] = {name: tuple(fields_of_config[name]) for name in ("windows", "rotary")}
        if fields_of_config["query_growth"] is not None:
            lists["query_growth"] = tuple(fields_of_config["query_growth"])
        return cls(**{**fields_of_config, **lists, "rotaries": tuple(rotaries)})

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """The different windows, in the order of the first layers that have them."""
        return tuple(dict.fromkeys(self.windows))
