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
from dsbd_cli.models.decoder.config import DecoderConfig, MixerConfig, MixtureConfig
from dsbd_cli.models.decoder.mixers import Mixer
from dsbd_cli.ops import recording
from dsbd_cli.ops.interface import ExpertsLinear, Linear
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from dsbd_cli.ops.reference import XIELU, Norm, Router, Routes

NORMS = ("input_norm", "attention_norm", "mlp_norm", "output_norm")
# Tensors of a layer, the embedding table and the last norm, as most families name them. A family's other names are in
# its config (`names`).
LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "output_norm": "post_feedforward_layernorm",
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "qkv")},
    "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate_of_heads": "self_attn.g_proj",
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "gate_up", "down")},
    "table": "embed_tokens",
    "norm": "norm",
}

PREFIXES = ("model.", "", "backbone.")  # of a body's tensors in checkpoints

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
        shape = len(x), sum(self.parts) // self.experts

        def compute() -> Tensor:
            out = x.new_empty(shape)
            number, entries = len(self.parts) // self.experts, routes.table[1:].view(-1, 3)
            for expert, begin, end in entries[: int(routes.table[0])].tolist():
                out[begin:end] = self._computed(x[begin:end], slice(expert * number, (expert + 1) * number))
            return out

        return recording.postpone(shape, x.dtype, compute)  # while a program is built, the table has no entries yet

    def _computed(self, x: Tensor, some: slice = slice(None)) -> Tensor:
        parts = [
            nn.functional.linear(x, weight.to(dtype=x.dtype), None if bias is None else bias.to(x.dtype))
            for weight, bias in zip(self.weights[some], self.biases[some], strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@dataclass(slots=True)
class MixtureWeights:
    """Weights of a layer's mixture of experts. router: [E, hidden]. gate_up, down: of each expert in turn. shared_gate:
    [1, hidden]. latent_in, latent_out: [latent, hidden] and [hidden, latent]. None: the mixture lacks it."""

    router: Linear
    settings: Router
    gate_up: ExpertsLinear
    down: ExpertsLinear
    shared_gate: Linear | None = None
    latent_in: Linear | None = None
    latent_out: Linear | None = None


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer.

    Norms are [hidden]; head_norms, of queries and of keys, are [head_dim] or as wide as all heads. qkv: queries, keys
    and values, and an output gate where there is one. gate_up, down: of the MLP, or of the shared expert of a mixture;
    without a gate the first is up alone.
    query_weight: [head_dim], what rotated queries are multiplied by. sinks: [heads]. xielu: activation of the MLP.
    None: the layer lacks it.
    """

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
    mixture: MixtureWeights | None = None
    sinks: Tensor | None = None
    query_weight: Tensor | None = None
    xielu: XIELU | None = None

    @property
    def mixes(self) -> bool:
        """Whether the layer mixes tokens, by attention or a recurrent mixer."""
        return self.qkv is not None or self.mixer is not None

    @property
    def has_mlp(self) -> bool:
        """Whether the layer has an MLP or a mixture of experts."""
        return self.gate_up is not None or self.mixture is not None

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
        for name in ("router", "latent_in", "gate_up", "down", "latent_out", "shared_gate"):
            if self.mixture is not None and getattr(self.mixture, name) is not None:
                yield f"mixture.{name}", self.mixture, name

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
            if layer.query_weight is not None:
                layer.query_weight = layer.query_weight.to(device)
            if layer.mixer is not None:
                layer.mixer.to(device)
            for _, linear in layer.linears:
                linear.to(device)
            layer.sinks = None if layer.sinks is None else layer.sinks.to(device)
            if layer.mixture is not None:
                layer.mixture.settings = layer.mixture.settings.to(device)
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
    table = reader.tensor(f"{reader.name('table')}.weight", config.vocabulary, config.hidden)
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
    return DecoderWeights(table, layers, reader.norm(f"{reader.name('norm')}.weight", config.hidden), last, dtype)


@dataclass(slots=True)
class WeightReader:
    """Reader of a decoder's tensors. It raises what `read_weights` raises."""

    config: DecoderConfig
    tensors: Tensors
    dtype: torch.dtype

    def tensor(self, name: str, *shape: int) -> Any:
        """Return a tensor of the body, or a quantised weight. Checkpoints put one of PREFIXES before its name.

        shape: of the tensor; none: any."""
        if (full := self._full_name(name)) is None:
            raise KeyError(f"model.{name}")
        tensor = self.tensors[full]()
        if shape:
            _check(full, tensor, shape)
        return tensor

    def _full_name(self, name: str) -> str | None:
        """Return a tensor's name in the checkpoint; None where it has none."""
        return next((full for prefix in PREFIXES if (full := f"{prefix}{name}") in self.tensors), None)

    def norm(self, name: str, width: int, *, of_heads: bool = False) -> Norm:
        """Return a norm, with weights in the dtype that is computed in. of_heads: of what will be rotated."""
        weight = self.tensor(name, width).to(self.dtype)
        if of_heads:
            return Norm(self._rotated_first(weight), self.config.eps, self.config.unit_offset)
        return Norm(weight, self.config.eps, self.config.unit_offset, self.config.wide_norms)

    def layer(self, number: int, inputs: int | None = None) -> LayerWeights:
        """Return the weights of a layer. inputs: width of the input of queries, keys and values; None: hidden."""
        config, at = self.config, f"layers.{number}."
        norms: dict[str, Any] = {
            norm: self.norm(f"{at}{self._norm_name(at, norm)}.weight", config.hidden) for norm in self._norms(number)
        }
        attention: dict[str, Any] = {"qkv": None, "out": None}
        if config.attends(number):
            attention = self._attention(at, inputs or config.hidden)
        (gate_up, down), mixture = self._mlp(number), config.mixture_of(number)
        return LayerWeights(
            **attention,
            **norms,
            gate_up=gate_up,
            down=down,
            mixer=self._mixer(at) if config.recurs(number) else None,
            mixture=None if mixture is None else self._mixture(at, mixture),
            xielu=self._xielu(f"{at}mlp.act_fn.") if config.ungated == "xielu" else None,
        )

    def _attention(self, at: str, inputs: int) -> dict[str, Any]:
        """Return the products and head norms of a layer's attention."""
        config = self.config
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        head_norms = query_weight = None
        if config.head_norms or config.norms_over_all_heads:
            wide = (query, key) if config.norms_over_all_heads else (config.head_dim, config.head_dim)
            head_norms = (
                self.norm(f"{at}{self.name('q_norm')}.weight", wide[0], of_heads=True),
                self.norm(f"{at}{self.name('k_norm')}.weight", wide[1], of_heads=True),
            )
        if config.query_weights and head_norms is not None:
            # A rotation does not change the norm, and a product of both weights in the queries gives the same scores.
            query_weight = head_norms[0].weight * head_norms[1].weight
            head_norms = (replace(head_norms[0], weight=torch.ones_like(query_weight)),) * 2
        gated = 2 if config.output_gate == "channels" else 1
        if config.fused_qkv:
            qkv = self._parts(f"{at}{self.name('qkv')}", (query, key, key), inputs)
        else:
            heads = [(f"{at}{self.name(name)}", size) for name, size in (("q", gated * query), ("k", key), ("v", key))]
            qkv = self._joined(heads, inputs, bias=config.qkv_bias)
        if config.output_gate == "channels":
            self._split_gate(qkv)
        elif config.output_gate == "heads":
            gate = self.tensor(f"{at}{self.name('gate_of_heads')}.weight", config.heads, inputs)
            bias = torch.zeros(config.heads, dtype=self.dtype) if config.qkv_bias else None
            qkv = PlainLinear([*qkv.weights, gate], [*qkv.biases, bias])
        qkv.weights = [*map(self._rotated_first, qkv.weights[:2]), *qkv.weights[2:]]
        rotated = [None if bias is None else self._rotated_first(bias) for bias in qkv.biases[:2]]
        qkv.biases = [*rotated, *qkv.biases[2:]]
        out = self._joined([(f"{at}{self.name('out')}", config.hidden)], query, bias=config.out_bias)
        sinks = self.tensor(f"{at}self_attn.sinks", config.heads) if config.sinks else None
        return {"qkv": qkv, "out": out, "head_norms": head_norms, "query_weight": query_weight, "sinks": sinks}

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

    def _mlp(self, number: int) -> tuple[PlainLinear | None, PlainLinear | None]:
        """Return the products of a layer's MLP, or of the shared expert of its mixture; None without any."""
        config, at, mixture = self.config, f"layers.{number}.", self.config.mixture_of(number)
        inner, fused = config.inner_of(number), config.fused_gate_up
        if not inner:
            return None, None
        names = ["up"] if config.ungated else ["gate_up"] if fused else ["gate", "up"]
        gate_up, down = [self.name(name) for name in names], self.name("down")
        if mixture is not None:
            *gate_up, down = (f"{mixture.shared_name}.{part}" for part in mixture.shared_parts)
        width = inner if config.ungated else 2 * inner
        sides = [(f"{at}{name}", width // len(gate_up)) for name in gate_up]
        return (
            self._joined(sides, config.hidden, bias=config.mlp_bias),
            self._joined([(f"{at}{down}", config.hidden)], inner, bias=config.mlp_bias),
        )

    def _xielu(self, at: str) -> XIELU:
        """Return the activation whose tensors' names begin with `at`, with numbers that the model's dtype has."""
        positive, negative, beta, most = (self._number(f"{at}{name}") for name in ("alpha_p", "alpha_n", "beta", "eps"))
        grown = nn.functional.softplus(positive), beta + nn.functional.softplus(negative)
        return XIELU(*(number.item() for number in (*grown, beta, most)))

    def _number(self, name: str) -> Tensor:
        """Return a number [1] of the body, in the dtype that is computed in."""
        number: Tensor = self.tensor(name).to(self.dtype).flatten()
        _check(name, number, (1,))
        return number

    def _mixture(self, at: str, mixture: MixtureConfig) -> MixtureWeights:
        """Return the weights of the mixture of the layer whose tensors' names begin with `at`."""
        hidden, inner, count = self.config.hidden, mixture.inner, mixture.experts
        width = mixture.latent or hidden  # of what experts take and return
        weight = self.tensor(f"{at}{mixture.router_name}.weight", count, hidden)
        bias = self.tensor(f"{at}{mixture.router_name}.bias", count) if mixture.biased else None
        router = PlainLinear([weight], [bias], own_dtype=torch.float32 if mixture.wide_router else None)
        correction = None
        if mixture.corrected:
            correction = self.tensor(f"{at}{mixture.correction_name}").float().flatten().contiguous()
            _check(f"{at}{mixture.correction_name}", correction, (count,))
        names = [f"{at}{mixture.experts_name}.{number}." for number in range(count)]
        if mixture.parts and self._full_name(f"{names[0]}{mixture.parts[0]}.weight") is not None:
            *sides, down = mixture.parts
            pairs = [(f"{name}{side}", inner) for name in names for side in sides]
            gate_up = self._joined(pairs, width, bias=False)
            outputs = self._joined([(f"{name}{down}", width) for name in names], inner, bias=False)
        elif self._full_name(f"{at}{mixture.experts_name}.gate_proj.weight") is not None:  # GGUF
            gate, up = (self._of_all(at, mixture, f"{part}_proj", inner, width) for part in ("gate", "up"))
            gate_up = PlainLinear(_in_turn(gate.weights, up.weights), _in_turn(gate.biases, up.biases))
            outputs = self._of_all(at, mixture, "down_proj", width, inner)
        else:
            first, rows = ("up_proj", inner) if self.config.ungated else ("gate_up_proj", 2 * inner)
            gate_up = self._stacked(at, mixture, first, "input_linear.weight", rows, width)
            outputs = self._stacked(at, mixture, "down_proj", "output_linear.weight", width, inner)
        gate_up.experts = outputs.experts = count
        shared_gate = None
        if mixture.shared_gate:
            shared_gate = self._joined([(f"{at}{mixture.shared_name}_gate", 1)], hidden, bias=False)
        latent: dict[str, Linear] = {}
        if mixture.latent:
            (into, back), bias = mixture.latent_names, self.config.mlp_bias
            latent["latent_in"] = self._joined([(f"{at}{into}", width)], hidden, bias=bias)
            latent["latent_out"] = self._joined([(f"{at}{back}", hidden)], width, bias=bias)
        settings = replace(mixture.router, correction=correction)
        return MixtureWeights(router, settings, gate_up, outputs, shared_gate, **latent)

    def _stacked(
        self, at: str, mixture: MixtureConfig, part: str, granite_part: str, outputs: int, inputs: int
    ) -> PlainLinear:
        """Return the products of all experts whose weights one tensor holds: [E, o, i], or for gpt-oss [E, i, o]."""
        count, name = mixture.experts, f"{at}{mixture.experts_name}.{part}"
        granite = f"{at}{mixture.experts_name.rpartition('.')[0]}.{granite_part}"
        if self._full_name(granite) is not None:
            name = granite
        whole = self.tensor(name)
        if mixture.transposed and isinstance(whole, Tensor):
            _check(name, whole, (count, inputs, outputs))
            whole = whole.transpose(1, 2)
        weights: list[Any] = [*_split(name, whole, count, outputs, inputs)]
        biases: list[Any] = [*self.tensor(f"{name}_bias", count, outputs)] if mixture.biased else [None] * count
        if mixture.transposed and part == "gate_up_proj":
            order = torch.arange(outputs).view(-1, 2).t().flatten()  # gates, then values
            weights = [
                weight.take(order) if isinstance(weight, QuantizedWeight) else weight[order] for weight in weights
            ]
            biases = [bias[order] for bias in biases]
        return PlainLinear(weights, biases)

    def _of_all(self, at: str, mixture: MixtureConfig, part: str, outputs: int, inputs: int) -> PlainLinear:
        """Return one of the products of all experts, whose weights one tensor holds, [E, o, i], and another the biases,
        [E, o]."""
        count, name = mixture.experts, f"{at}{mixture.experts_name}.{part}"
        weights = _split(f"{name}.weight", self.tensor(f"{name}.weight"), count, outputs, inputs)
        biases: list[Any] = [*self.tensor(f"{name}.bias", count, outputs)] if mixture.biased else [None] * count
        return PlainLinear(weights, biases)

    def _mixer(self, at: str) -> Mixer:
        """Return the recurrent mixer of a layer."""
        mixer, hidden = self.config.mixer, self.config.hidden
        assert mixer is not None
        at, heads = f"{at}{mixer.prefix}.", (mixer.heads,)
        into = self._joined([(f"{at}{name}", outputs) for name, outputs in mixer.inputs], hidden, bias=mixer.bias)
        if mixer.by_group:
            keys, values, each = (
                mixer.key_dim,
                mixer.heads // mixer.groups * mixer.value_dim,
                mixer.heads // mixer.groups,
            )
            orders = [_by_part(mixer.groups, sizes) for sizes in ((keys, keys, values, values), (each, each))]
            weights = [_rows(weight, order) for weight, order in zip(into.weights, orders, strict=True)]
            into = PlainLinear(weights, into.biases)
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

    def _norms(self, number: int) -> list[str]:
        """Return the fields in LayerWeights of the norms of hidden states."""
        config = self.config
        if config.one_part:
            return ["input_norm"]
        if not config.pre_norms and not config.attends(number):  # OLMo hybrid's recurrent layers
            return ["input_norm", "mlp_norm"]
        before = ["input_norm", "mlp_norm"] if config.pre_norms else []
        return [*before, *(["attention_norm", "output_norm"] if config.post_norms else [])]

    def _norm_name(self, at: str, norm: str) -> str:
        """Return a checkpoint's name of a norm of a layer: the family's own where it is there, else the common one."""
        own = self.name(norm)
        return own if self._full_name(f"{at}{own}.weight") is not None else LAYER_NAMES[norm]

    def name(self, part: str) -> str:
        """Return a checkpoint's name of a part, a key of LAYER_NAMES."""
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
        return _rows(rows, numbers)


def _rows(weight: Any, numbers: Tensor) -> Any:
    """Return rows of a weight, which may be quantised."""
    return weight.take(numbers) if isinstance(weight, QuantizedWeight) else weight[numbers]


def _split(name: str, whole: Weight, experts: int, outputs: int, inputs: int) -> Sequence[Weight]:
    """Return the weights [o, i] of each expert. whole: [E, o, i], or quantised [E o, i]. name: of it, for messages."""
    if isinstance(whole, QuantizedWeight):
        _check(name, whole, (experts * outputs, inputs))
        return whole.split([outputs] * experts)
    _check(name, whole, (experts, outputs, inputs))
    return [*whole]


def _in_turn(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return items of two lists of one length in turn."""
    return [item for pair in zip(first, second, strict=True) for item in pair]


def _by_part(groups: int, sizes: tuple[int, ...]) -> Tensor:
    """Return rows [o] int64 in the order of their parts, which stand group by group. sizes: of the parts of a group."""
    rows = torch.arange(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, 1)])


def _check(name: str, tensor: Weight, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        is_shape, wanted = (" x ".join(map(str, size)) for size in (tensor.shape, shape))
        raise ValueError(f"{name} is {is_shape}, but its config says {wanted}")
