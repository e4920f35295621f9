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
from dsbd_cli.models.decoder.config import DecoderConfig, MixtureConfig
from dsbd_cli.ops import recording
from dsbd_cli.ops.interface import ExpertsLinear, Linear
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from dsbd_cli.ops.reference import Norm, Router, Routes

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

    def __init__(
        self,
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None],
        experts: int = 1,
        own_dtype: torch.dtype | None = None,
    ) -> None:
        """weights: [o, i] each. biases: [o] or None each. experts: of a mixture, to which the same number of weights
        each belongs. own_dtype: that it computes in, where it is not the model's."""
        self.weights: list[Any] = [*weights]
        self.biases = [*biases]
        self.parts = [len(weight) for weight in weights]
        self.experts, self.own_dtype = experts, own_dtype

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

    def compute_routed(self, x: Tensor, routes: Routes) -> Tensor:
        """Return the products of rows x [r, i], each with the weights of its expert: [r, o / experts]."""

        def compute() -> Tensor:
            out = x.new_empty(len(x), sum(self.parts) // self.experts)
            number, entries = len(self.parts) // self.experts, routes.table[1:].view(-1, 3)
            for expert, begin, end in entries[: int(routes.table[0])].tolist():
                out[begin:end] = self._computed(x[begin:end], slice(expert * number, (expert + 1) * number))
            return out

        return recording.compute(compute)

    def _computed(self, x: Tensor, some: slice = slice(None)) -> Tensor:
        parts = [
            nn.functional.linear(x, weight.to(dtype=x.dtype), None if bias is None else bias.to(x.dtype))
            for weight, bias in zip(self.weights[some], self.biases[some], strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@dataclass(slots=True)
class MixtureWeights:
    """Weights of a layer's mixture of experts. router: [E, hidden]. gate_up, down: of each expert in turn. shared_gate:
    [1, hidden]; None without one."""

    router: Linear
    settings: Router
    gate_up: ExpertsLinear
    down: ExpertsLinear
    shared_gate: Linear | None = None

    @property
    def linears(self) -> Iterator[tuple[str, PlainLinear]]:
        """Products that still have the checkpoint's plain weights, by field."""
        for name in ("router", "gate_up", "down", "shared_gate"):
            linear = getattr(self, name)
            if isinstance(linear, PlainLinear):
                yield name, linear


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer.

    Norms are [hidden]; head_norms, of queries and of keys, are [head_dim] or as wide as all heads. None: the layer
    lacks the norm. gate_up, down: of the MLP, or of the shared expert of a mixture; None where the mixture has none.
    query_weight: [head_dim], what rotated queries are multiplied by; None without. sinks: [heads].
    """

    qkv: Linear
    out: Linear
    gate_up: Linear | None
    down: Linear | None
    input_norm: Norm | None = None
    attention_norm: Norm | None = None
    mlp_norm: Norm | None = None
    output_norm: Norm | None = None
    head_norms: tuple[Norm, Norm] | None = None
    mixture: MixtureWeights | None = None
    sinks: Tensor | None = None
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
            layer.sinks = None if layer.sinks is None else layer.sinks.to(device)
            if layer.mixture is not None:
                layer.mixture.settings = layer.mixture.settings.to(device)
                for _, linear in layer.mixture.linears:
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
        """Return a tensor of the body, or a quantised weight; checkpoints name it with or without `model.`. shape: of
        the tensor; none: any."""
        for full in (f"model.{name}", name):
            if full in self.tensors:
                tensor = self.tensors[full]()
                if shape:
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
        qkv.weights = [*map(self._rotated_first, qkv.weights[:2]), qkv.weights[2]]
        qkv.biases = [*(None if bias is None else self._rotated_first(bias) for bias in qkv.biases[:2]), qkv.biases[2]]
        out = self._joined([(f"{at}{self._name('out')}", config.hidden)], query, bias=config.out_bias)
        gate_up, down = self._mlp(number)
        mixture = config.mixture_of(number)
        return LayerWeights(
            qkv,
            out,
            gate_up,
            down,
            **norms,
            head_norms=head_norms,
            query_weight=query_weight,
            mixture=None if mixture is None else self._mixture(at, mixture),
            sinks=self.tensor(f"{at}self_attn.sinks", config.heads) if config.sinks else None,
        )

    def _mlp(self, number: int) -> tuple[PlainLinear | None, PlainLinear | None]:
        """Return the products of a layer's MLP, or of the shared expert of its mixture; None without any."""
        config, at, mixture = self.config, f"layers.{number}.", self.config.mixture_of(number)
        inner, fused = config.inner_of(number), config.fused_gate_up
        if not inner:
            return None, None
        gate_up, down = [self._name("gate_up")] if fused else [self._name("gate"), self._name("up")], self._name("down")
        if mixture is not None:
            *gate_up, down = (f"{mixture.shared_name}.{part}" for part in mixture.shared_parts)
        sides = [(f"{at}{name}", 2 * inner // len(gate_up)) for name in gate_up]
        return (
            self._joined(sides, config.hidden, bias=config.mlp_bias),
            self._joined([(f"{at}{down}", config.hidden)], inner, bias=config.mlp_bias),
        )

    def _mixture(self, at: str, mixture: MixtureConfig) -> MixtureWeights:
        """Return the weights of the mixture of the layer whose tensors' names begin with `at`."""
        hidden, inner, count = self.config.hidden, mixture.inner, mixture.experts
        weight = self.tensor(f"{at}{mixture.router_name}.weight", count, hidden)
        bias = self.tensor(f"{at}{mixture.router_name}.bias", count) if mixture.biased else None
        router = PlainLinear([weight], [bias], own_dtype=torch.float32 if mixture.wide_router else None)
        correction = None
        if mixture.corrected:
            correction = self.tensor(f"{at}{mixture.correction_name}").float().flatten().contiguous()
            _check(f"{at}{mixture.correction_name}", correction, (count,))
        names = [f"{at}{mixture.experts_name}.{number}." for number in range(count)]
        if mixture.parts and f"model.{names[0]}{mixture.parts[0]}.weight" in self.tensors:
            gate, up, down = mixture.parts
            pairs = [(f"{name}{side}", inner) for name in names for side in (gate, up)]
            gate_up = self._joined(pairs, hidden, bias=False)
            outputs = self._joined([(f"{name}{down}", hidden) for name in names], inner, bias=False)
        else:
            gate_up = self._stacked(at, mixture, "gate_up_proj", "input_linear.weight", 2 * inner, hidden)
            outputs = self._stacked(at, mixture, "down_proj", "output_linear.weight", hidden, inner)
        gate_up.experts = outputs.experts = count
        shared_gate = None
        if mixture.shared_gate:
            shared_gate = self._joined([(f"{at}{mixture.shared_name}_gate", 1)], hidden, bias=False)
        settings = Router(
            mixture.chosen, mixture.sigmoid, correction, mixture.groups, mixture.chosen_groups, mixture.group_size,
            mixture.normalised, mixture.least_sum, mixture.scale,
        )  # fmt: skip
        return MixtureWeights(router, settings, gate_up, outputs, shared_gate)

    def _stacked(
        self, at: str, mixture: MixtureConfig, part: str, granite_part: str, outputs: int, inputs: int
    ) -> PlainLinear:
        """Return the products of all experts whose weights one tensor holds: [E, o, i], or for gpt-oss [E, i, o]."""
        count, name = mixture.experts, f"{at}{mixture.experts_name}.{part}"
        granite = f"{at}{mixture.experts_name.rpartition('.')[0]}.{granite_part}"
        if f"model.{granite}" in self.tensors:
            name = granite
        whole, weights = self.tensor(name), list[Any]()
        if isinstance(whole, QuantizedWeight):
            _check(name, whole, (count * outputs, inputs))
            weights = whole.split([outputs] * count)
        else:
            _check(name, whole, (count, inputs, outputs) if mixture.transposed else (count, outputs, inputs))
            weights = [weight.t() if mixture.transposed else weight for weight in whole]
        biases: list[Any] = [*self.tensor(f"{name}_bias", count, outputs)] if mixture.biased else [None] * count
        if mixture.transposed and part == "gate_up_proj":
            order = torch.arange(outputs).view(-1, 2).t().flatten()  # gates, then values
            weights = [
                weight.take(order) if isinstance(weight, QuantizedWeight) else weight[order] for weight in weights
            ]
            biases = [bias[order] for bias in biases]
        return PlainLinear(weights, biases)

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
