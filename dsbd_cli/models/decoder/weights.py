"""Weights of a decoder: from memory-mapped safetensors, or from the state of a transformers model.

Letters: o outputs, i inputs of a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.models.checkpoints.checkpoint import Tensors
from dsbd_cli.models.checkpoints.lm_head import TrimmedLMHead
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.ops import recording
from dsbd_cli.ops.interface import Linear
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from dsbd_cli.ops.reference import Norm

NORMS = ("input_norm", "attention_norm", "mlp_norm", "output_norm")
# Tensors of a layer, as most families name them. A family's other names are in its config (`names`).
LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "output_norm": "post_feedforward_layernorm",
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "qkv")},
    "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "gate_up", "down")},
}

Weight = Tensor | QuantizedWeight


class PlainLinear:
    """A product that torch computes with weights as the checkpoint stores them. It joins the products of several layers
    that have one input.

    A weight of another dtype than the inputs, or a quantised one, is converted at each call, so that none is held
    twice.
    """

    compiled = False

    def __init__(self, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> None:
        """weights: [o, i] each. biases: [o] or None each."""
        self.weights: list[Any] = [*weights]
        self.biases = [*biases]
        self.parts = [len(weight) for weight in weights]

    def to(self, device: torch.device) -> None:
        """Move the weights to a device, in place. Quantised ones stay in their file."""
        self.weights, self.biases = self.converted(device=device)

    def converted(
        self, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return weights and biases in another dtype, on another device."""
        weights = [weight.to(device, dtype) for weight in self.weights]
        return weights, [None if bias is None else bias.to(device, dtype) for bias in self.biases]

    def compute(self, x: Tensor) -> Tensor:
        """Return the products [..., o] of x [..., i], side by side."""
        return recording.compute(lambda: self._computed(x))

    def _computed(self, x: Tensor) -> Tensor:
        parts = [
            nn.functional.linear(x, weight.to(dtype=x.dtype), None if bias is None else bias.to(x.dtype))
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer. Norms are [hidden]; head_norms, of queries and of keys, are [head_dim] or as wide as all
    heads. None: the layer lacks the norm.

    query_weight: [head_dim], what rotated queries are multiplied by; None without.
    """

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    input_norm: Norm | None = None
    attention_norm: Norm | None = None
    mlp_norm: Norm | None = None
    output_norm: Norm | None = None
    head_norms: tuple[Norm, Norm] | None = None
    query_weight: Tensor | None = None

    @property
    def linears(self) -> Iterator[tuple[str, PlainLinear]]:
        """Products that still have the checkpoint's plain weights, by name."""
        for name in ("qkv", "out", "gate_up", "down"):
            linear = getattr(self, name)
            if isinstance(linear, PlainLinear):
                yield name, linear


@dataclass(slots=True)
class DecoderWeights:
    """All weights of a decoder.

    table: [V, hidden], in the checkpoint's dtype or quantised. norm: [hidden], the last one. dtype: the dtype that is
    computed in.
    """

    table: Any
    layers: list[LayerWeights]
    norm: Norm
    lm_head: Linear
    dtype: torch.dtype

    def dequantize(self) -> None:
        """Replace the embedding table of a quantised file, and an LM head that is the same, by plain weights."""
        if isinstance(self.table, QuantizedWeight):
            quantised, self.table = self.table, self.table.plain(self.dtype)
            if isinstance(self.lm_head, PlainLinear) and self.lm_head.weights[0] is quantised:
                self.lm_head.weights = [self.table]

    def to(self, device: torch.device) -> None:
        """Move the weights that are still plain to a device, in place."""
        self.table, self.norm = self.table.to(device), self.norm.to(device)
        for layer in self.layers:
            for name in NORMS:
                norm = getattr(layer, name)
                setattr(layer, name, None if norm is None else norm.to(device))
            if layer.head_norms is not None:
                layer.head_norms = layer.head_norms[0].to(device), layer.head_norms[1].to(device)
            if layer.query_weight is not None:
                layer.query_weight = layer.query_weight.to(device)
            for _, linear in layer.linears:
                linear.to(device)
        if isinstance(self.lm_head, PlainLinear):
            self.lm_head.to(device)


def read_weights(
    config: DecoderConfig, tensors: Tensors, dtype: torch.dtype, lm_head: TrimmedLMHead | None = None
) -> DecoderWeights:
    """Read a checkpoint's tensors into the weights of a decoder.

    lm_head: rows that take the place of the checkpoint's LM head. Raises KeyError for a tensor that is missing,
    ValueError for one of another shape.
    """
    reader = WeightReader(config, tensors, dtype)
    layers = [reader.layer(number) for number in range(config.layers)]
    table = reader.tensor("embed_tokens.weight", config.vocabulary, config.hidden)
    if isinstance(table, QuantizedWeight):
        table.check()  # its rows are read one by one, when they are asked for
    if lm_head is not None:
        last: Linear = PlainLinear([lm_head.weight], [lm_head.bias])
    elif config.tied:
        last = PlainLinear([table], [None])
    else:
        weight = tensors["lm_head.weight"]()
        _check("lm_head.weight", weight, (config.vocabulary, config.hidden))
        last = PlainLinear([weight], [None])
    return DecoderWeights(table, layers, reader.norm("norm.weight", config.hidden), last, dtype)


@dataclass(slots=True)
class WeightReader:
    """Reader of a decoder's tensors. It raises what `read_weights` raises."""

    config: DecoderConfig
    tensors: Tensors
    dtype: torch.dtype

    def tensor(self, name: str, *shape: int) -> Any:
        """Return a tensor of the body, or a quantised weight; checkpoints name it with or without `model.`."""
        for full in (f"model.{name}", name):
            if full in self.tensors:
                tensor = self.tensors[full]()
                _check(full, tensor, shape)
                return tensor
        raise KeyError(f"model.{name}")

    def norm(self, name: str, width: int, *, of_heads: bool = False) -> Norm:
        """Return a norm, with weights in the dtype that is computed in. of_heads: of what will be rotated."""
        weight = self.tensor(name, width).to(self.dtype)
        return Norm(self._rotated_first(weight) if of_heads else weight, self.config.eps, self.config.unit_offset)

    def layer(self, number: int, inputs: int | None = None) -> LayerWeights:
        """Return the weights of a layer. inputs: width of the input of queries, keys and values; None: hidden."""
        config, at = self.config, f"layers.{number}."
        inputs = inputs or config.hidden
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        norms = {norm: self.norm(f"{at}{self._name(norm)}.weight", config.hidden) for norm in self._norms()}
        head_norms = query_weight = None
        if config.head_norms or config.norms_over_all_heads:
            wide = (query, key) if config.norms_over_all_heads else (config.head_dim, config.head_dim)
            head_norms = (
                self.norm(f"{at}{self._name('q_norm')}.weight", wide[0], of_heads=True),
                self.norm(f"{at}{self._name('k_norm')}.weight", wide[1], of_heads=True),
            )
        if config.query_weights and head_norms is not None:
            # A rotation does not change the norm, and a product of both weights in the queries gives the same scores.
            query_weight = head_norms[0].weight * head_norms[1].weight
            head_norms = (replace(head_norms[0], weight=torch.ones_like(query_weight)),) * 2
        if config.fused_qkv:
            qkv = self._parts(f"{at}{self._name('qkv')}", (query, key, key), inputs)
        else:
            heads = [(f"{at}{self._name(name)}", size) for name, size in (("q", query), ("k", key), ("v", key))]
            qkv = self._joined(heads, inputs, bias=config.qkv_bias)
        if config.fused_gate_up:
            gate_up = self._parts(f"{at}{self._name('gate_up')}", (2 * config.inner,), config.hidden)
        else:
            sides = [(f"{at}{self._name(name)}", config.inner) for name in ("gate", "up")]
            gate_up = self._joined(sides, config.hidden, bias=config.mlp_bias)
        qkv.weights = [*map(self._rotated_first, qkv.weights[:2]), qkv.weights[2]]
        qkv.biases = [*(None if bias is None else self._rotated_first(bias) for bias in qkv.biases[:2]), qkv.biases[2]]
        out = self._joined([(f"{at}{self._name('out')}", config.hidden)], query, bias=config.out_bias)
        down = self._joined([(f"{at}{self._name('down')}", config.hidden)], config.inner, bias=config.mlp_bias)
        return LayerWeights(qkv, out, gate_up, down, **norms, head_norms=head_norms, query_weight=query_weight)

    def _norms(self) -> list[str]:
        """Return the fields in LayerWeights of the norms of hidden states."""
        before = ["input_norm", "mlp_norm"] if self.config.pre_norms else []
        return [*before, *(["attention_norm", "output_norm"] if self.config.post_norms else [])]

    def _name(self, part: str) -> str:
        """Return a checkpoint's name of a part of a layer, a key of LAYER_NAMES."""
        names = self.config.names
        if part == "mlp_norm" and part not in names and not self.config.post_norms:
            return LAYER_NAMES["attention_norm"]  # Llama's norm before the MLP
        return names.get(part, LAYER_NAMES[part])

    def _joined(self, named: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> PlainLinear:
        """Return the products with these weights, which have one input."""
        weights = [self.tensor(f"{name}.weight", outputs, inputs) for name, outputs in named]
        biases = [self.tensor(f"{name}.bias", outputs) if bias else None for name, outputs in named]
        return PlainLinear(weights, biases)

    def _parts(self, name: str, sizes: tuple[int, ...], inputs: int) -> PlainLinear:
        """Return the products whose weights lie in one tensor, one below the other."""
        whole = self.tensor(f"{name}.weight", sum(sizes), inputs)
        return PlainLinear([*whole.split(sizes)], [None] * len(sizes))

    def _rotated_first(self, rows: Any) -> Any:
        """Reorder the numbers of each head, where not all are rotated or rotation pairs neighbours, so that rotated
        ones come first in both halves of the head, in pairs.

        Our rotation pairs number k with k + head_dim / 2. Scores do not change when queries and keys are put into
        another order alike. rows: [heads * head_dim, ...] or [head_dim], or a quantised weight.
        """
        dim, rotated = self.config.head_dim, self.config.rotaries[0].rotated
        if rotated == dim and not self.config.interleaved:
            return rows
        half, turned = dim // 2, rotated // 2
        pairs = torch.arange(rotated)
        pairs = pairs.view(-1, 2).T if self.config.interleaved else pairs.view(2, -1)
        rest = torch.arange(rotated, dim)
        order = torch.cat((pairs[0], rest[: half - turned], pairs[1], rest[half - turned :]))
        numbers = torch.arange(len(rows)).view(-1, dim)[:, order].flatten()
        return rows.take(numbers) if isinstance(rows, QuantizedWeight) else rows[numbers]


def _check(name: str, tensor: Weight, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        is_shape, wanted = (" x ".join(map(str, size)) for size in (tensor.shape, shape))
        raise ValueError(f"{name} is {is_shape}, but its config says {wanted}")
