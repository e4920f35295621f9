"""Weights of a decoder: from memory-mapped safetensors, or from the state of a transformers model.

Letters: o outputs, i inputs of a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.models.checkpoints.checkpoint import Tensors
from dsbd_cli.models.checkpoints.lm_head import TrimmedLMHead
from dsbd_cli.models.decoder.config import DecoderConfig, MixerConfig
from dsbd_cli.models.decoder.mixers import Mixer
from dsbd_cli.ops import recording
from dsbd_cli.ops.interface import Linear
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from dsbd_cli.ops.reference import Norm

NORMS = ("input_norm", "attention_norm", "mlp_norm", "output_norm")


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
    heads. None: the layer lacks them. qkv: queries, keys and values, and an output gate where there is one."""

    qkv: Linear | None
    out: Linear | None
    gate_up: Linear | None
    down: Linear | None
    mixer: Mixer | None = None
    input_norm: Norm | None = None
    attention_norm: Norm | None = None
    mlp_norm: Norm | None = None
    output_norm: Norm | None = None
    head_norms: tuple[Norm, Norm] | None = None

    @property
    def products(self) -> Iterator[tuple[str, Any, str]]:
        """All products: name, object that holds the product, and its field."""
        for name in ("qkv", "out"):
            if getattr(self, name) is not None:
                yield name, self, name
        for name in ("into", "out"):
            if self.mixer is not None:
                yield f"mixer_{name}", self.mixer, name
        for name in ("gate_up", "down"):
            if getattr(self, name) is not None:
                yield name, self, name

    @property
    def linears(self) -> Iterator[tuple[str, PlainLinear]]:
        """Products that still have the checkpoint's plain weights, by name."""
        for name, owner, field in self.products:
            if isinstance(linear := getattr(owner, field), PlainLinear):
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
            if layer.mixer is not None:
                layer.mixer.to(device)
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
        """Return a tensor of the body, or a quantised weight. name: that of Llama. Checkpoints may have a name of their
        own, and put `model.` or `backbone.` before it, or nothing."""
        if (full := self._full_name(name)) is None:
            raise KeyError(f"model.{self.config.name_of(name)}")
        tensor = self.tensors[full]()
        _check(full, tensor, shape)
        return tensor

    def _full_name(self, name: str) -> str | None:
        """Return a tensor's name in the checkpoint; None where it has none."""
        names = (f"{start}{own}" for own in (self.config.name_of(name), name) for start in ("model.", "", "backbone."))
        return next((full for full in names if full in self.tensors), None)

    def norm(self, name: str, width: int, *, of_heads: bool = False) -> Norm:
        """Return a norm, with weights in the dtype that is computed in. of_heads: of what will be rotated."""
        weight = self.tensor(name, width).to(self.dtype)
        return Norm(self._rotated_first(weight) if of_heads else weight, self.config.eps, self.config.unit_offset)

    def layer(self, number: int, inputs: int | None = None) -> LayerWeights:
        """Return the weights of a layer. inputs: width of the input of queries, keys and values; None: hidden."""
        config, at = self.config, f"layers.{number}."
        norms: dict[str, Any] = {
            field: self.norm(f"{at}{name}.weight", config.hidden) for field, name in self._norm_names(number)
        }
        attention: dict[str, Any] = {"qkv": None, "out": None}
        if config.attends(number):
            attention = self._attention(f"{at}self_attn.", inputs or config.hidden)
        mlp: dict[str, Any] = self._mlp(f"{at}mlp.") if config.has_mlp else {"gate_up": None, "down": None}
        return LayerWeights(**attention, **mlp, mixer=self._mixer(at) if config.recurs(number) else None, **norms)

    def _attention(self, at: str, inputs: int) -> dict[str, Any]:
        """Return the products and head norms of a layer's attention."""
        config = self.config
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        head_norms = None
        if config.head_norms or config.norms_over_all_heads:
            wide = (query, key) if config.norms_over_all_heads else (config.head_dim, config.head_dim)
            head_norms = (
                self.norm(f"{at}q_norm.weight", wide[0], of_heads=True),
                self.norm(f"{at}k_norm.weight", wide[1], of_heads=True),
            )
        if config.fused:
            qkv = self._parts(f"{at}qkv_proj", (query, key, key), inputs)
        elif config.output_gate == "channels":
            qkv = self._joined([(f"{at}q_proj", 2 * query), (f"{at}k_proj", key), (f"{at}v_proj", key)], inputs,
                               bias=config.qkv_bias)  # fmt: skip
            self._split_gate(qkv)
        else:
            qkv = self._joined([(f"{at}{name}_proj", size) for name, size in (("q", query), ("k", key), ("v", key))],
                               inputs, bias=config.qkv_bias)  # fmt: skip
            if config.output_gate == "heads":
                gate = self.tensor(f"{at}g_proj.weight", config.heads, inputs)
                bias = torch.zeros(config.heads, dtype=self.dtype) if config.qkv_bias else None
                qkv = PlainLinear([*qkv.weights, gate], [*qkv.biases, bias])
        qkv.weights = [*map(self._rotated_first, qkv.weights[:2]), *qkv.weights[2:]]
        rotated = [None if bias is None else self._rotated_first(bias) for bias in qkv.biases[:2]]
        qkv.biases = [*rotated, *qkv.biases[2:]]
        out = self._joined([(f"{at}o_proj", config.hidden)], query, bias=config.out_bias)
        return {"qkv": qkv, "out": out, "head_norms": head_norms}

    def _split_gate(self, qkv: PlainLinear) -> None:
        """Split the product of the queries, which holds query and gate of one head after the other. The gates become
        the last part."""
        rows = torch.arange(2 * self.config.heads * self.config.head_dim).view(-1, 2, self.config.head_dim)
        queries, gates = (rows[:, side].flatten() for side in (0, 1))
        qkv.weights = [_rows(qkv.weights[0], queries), *qkv.weights[1:], _rows(qkv.weights[0], gates)]
        first = qkv.biases[0]
        parts = (None, None) if first is None else (first[queries], first[gates])
        qkv.biases = [parts[0], *qkv.biases[1:], parts[1]]
        qkv.parts = [len(weight) for weight in qkv.weights]

    def _mlp(self, at: str) -> dict[str, Any]:
        """Return the products of a layer's MLP."""
        config = self.config
        if config.fused or config.fused_mlp:
            gate_up = self._parts(f"{at}gate_up_proj", (2 * config.inner,), config.hidden)
        else:
            sides = [(f"{at}{name}_proj", config.inner) for name in ("gate", "up")]
            gate_up = self._joined(sides, config.hidden, bias=config.mlp_bias)
        down = self._joined([(f"{at}down_proj", config.hidden)], config.inner, bias=config.mlp_bias)
        return {"gate_up": gate_up, "down": down}

    def _mixer(self, at: str) -> Mixer:
        """Return the recurrent mixer of a layer."""
        mixer, hidden = self.config.mixer, self.config.hidden
        assert mixer is not None
        at, heads = f"{at}{mixer.prefix}.", (mixer.heads,)
        into = self._joined([(f"{at}{name}", outputs) for name, outputs in mixer.inputs], hidden, bias=mixer.bias)
        out = self._joined([(f"{at}{mixer.output}", hidden)], mixer.width, bias=mixer.out_bias)
        taps = self._taps(f"{at}{mixer.convolution}", mixer)
        numbers: dict[str, Any] = {}
        if mixer.conv_bias:
            numbers["taps_bias"] = self.tensor(f"{at}{mixer.convolution}.bias", mixer.convolved).float()
        if mixer.heads:
            numbers["decay"] = -self.tensor(f"{at}A_log", *heads).float().exp()
            numbers["step_bias"] = self.tensor(f"{at}dt_bias", *heads).float()
            if mixer.kind == "mamba2":
                numbers["skip"] = self.tensor(f"{at}D", *heads).float()
            if mixer.gate != "plain":
                width = mixer.value_dim if mixer.kind == "delta" else mixer.width
                weight = self.tensor(f"{at}{mixer.norm}.weight", width).to(self.dtype)
                numbers["norm"] = Norm(weight.repeat(mixer.width // width), mixer.eps)
        if mixer.scales:
            keys = mixer.groups * mixer.key_dim
            sizes = torch.tensor((mixer.width, mixer.width, keys, keys, mixer.heads))
            numbers["scales"] = torch.tensor(mixer.scales).repeat_interleave(sizes).to(self.dtype)
        return Mixer(mixer, into, out, taps.squeeze(1).float().contiguous(), **numbers)

    def _taps(self, name: str, mixer: MixerConfig) -> Tensor:
        """Return the taps [C, 1, J] of a convolution. OLMo hybrid has them in three parts."""
        shape = (mixer.convolved, 1, mixer.taps)
        start, last = name.rsplit(".", 1)
        parts = [self._full_name(f"{start}.{part}_{last}.weight") for part in "qkv"]
        if None in parts:
            whole: Tensor = self.tensor(f"{name}.weight", *shape)
            return whole
        taps = torch.cat([self.tensors[str(part)]() for part in parts])
        _check(f"{name}.weight", taps, shape)
        return taps

    def _norm_names(self, number: int) -> list[tuple[str, str]]:
        """Return the norms of hidden states: their fields in LayerWeights and their names in checkpoints."""
        if not self.config.has_mlp:
            return [("input_norm", "input_layernorm")]
        if not self.config.post_norms or (not self.config.pre_norms and not self.config.attends(number)):
            return [("input_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")]
        after = [("attention_norm", "post_attention_layernorm"), ("output_norm", "post_feedforward_layernorm")]
        if not self.config.pre_norms:
            return after
        return [("input_norm", "input_layernorm"), ("mlp_norm", "pre_feedforward_layernorm"), *after]

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
        """Reorder the numbers of each head, where not all are rotated, so that rotated ones come first in both halves
        of the head.

        Our rotation pairs number k with k + head_dim / 2. Scores do not change when queries and keys are put into
        another order alike. rows: [heads * head_dim, ...] or [head_dim], or a quantised weight.
        """
        dim, rotated = self.config.head_dim, self.config.rotaries[0].rotated
        if rotated == dim:
            return rows
        half, turned = dim // 2, rotated // 2
        rest = torch.arange(rotated, dim)
        order = torch.cat((
            torch.arange(turned), rest[: half - turned], torch.arange(turned, rotated), rest[half - turned :]
        ))  # fmt: skip
        numbers = torch.arange(len(rows)).view(-1, dim)[:, order].flatten()
        return _rows(rows, numbers)


def _rows(weight: Any, numbers: Tensor) -> Any:
    """Return rows of a weight, which may be quantised."""
    return weight.take(numbers) if isinstance(weight, QuantizedWeight) else weight[numbers]


def _check(name: str, tensor: Weight, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        is_shape, wanted = (" x ".join(map(str, size)) for size in (tensor.shape, shape))
        raise ValueError(f"{name} is {is_shape}, but its config says {wanted}")
