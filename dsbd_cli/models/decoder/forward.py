"""The forward of the standard decoder, as its formula reads.

Operations run at once, or are recorded as a program (ops/recording.py). `LayerInputs` holds the inputs that all layers
of one forward share.

Letters: R rows, n nodes, m = R * n, H hidden width, Q query heads, K kv heads, E head dim, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.models.attention.views import LayerViews
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.own_rows import OwnRows
from dsbd_cli.models.decoder.weights import DecoderWeights, LayerWeights, MixtureWeights, PlainLinear
from dsbd_cli.models.recurrent.states import RecurrentCache
from dsbd_cli.ops import recording
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from dsbd_cli.ops.reference import XIELU, ClampedGLU, Norm, relu2, xielu


@dataclass(slots=True)
class LayerInputs:
    """Inputs that the layers of one forward share.

    slots: [m] int64 flat indices, row * S + slot, of the planes: where keys and values are written. angles: cosines and
    sines [R, n, E], for each kind of rotary positions. attention: what the nodes see, and the planes of the layers.
    query_growth: factors [R, n] of rotated queries; None where all are 1.
    states: the cache that holds the memory of recurrent mixers; None without them.
    """

    slots: Tensor
    angles: Sequence[tuple[Tensor, Tensor]]
    attention: LayerViews
    query_growth: Tensor | None = None
    states: RecurrentCache | None = None


class Decoder:
    """A decoder with its weights. `embed`, `layers`, `finish`, `lm_head` and `logits`, in this order, are its
    forward."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, ops: Ops) -> None:
        self.config, self.weights, self.ops = config, weights, ops
        self.own_rows: OwnRows | None = None  # where the LM head lacks tokens, but the whole table is at hand
        # rounded to the dtype, as the families that scale their embeddings do
        limits = config.mixture is not None and config.mixture.limit
        self._clamped = (ClampedGLU(config.mixture.limit, config.mixture.alpha),) if config.mixture and limits else ()
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=weights.dtype, device=weights.table.device)

    def plain_products(self) -> list[tuple[str, Any, str]]:
        """Return the products that still have the checkpoint's weights: name, object that holds the product, and its
        field."""
        weights = self.weights
        products: list[tuple[str, Any, str]] = [
            (f"{number}.{name}", owner, field)
            for number, layer in enumerate(weights.layers)
            for name, owner, field in layer.products
            if isinstance(getattr(owner, field), PlainLinear)
        ]
        # first the largest, so that packing it, which takes memory for a while, finds the most memory free
        return [("lm_head", weights, "lm_head"), *products] if isinstance(weights.lm_head, PlainLinear) else products

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [R, n, H] of tokens [R, n]."""
        table = self.weights.table
        rows = (
            table.rows(tokens) if isinstance(table, QuantizedWeight) else torch.nn.functional.embedding(tokens, table)
        )
        embedded = rows.to(self.weights.dtype)
        return embedded if self.config.embedding_scale == 1 else embedded * self._embedding_scale

    def layers(
        self, hidden: Tensor, inputs: LayerInputs, watched: Collection[int] = ()
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Run all layers over embeddings [R, n, H]. Return the residual stream as two summands [R, n, H], and copies of
        it [R, n, H] after as many layers as `watched` names (0: the embeddings)."""
        copies: dict[int, Tensor] = {}
        residual, branch = hidden, None
        for number, layer in enumerate(self.weights.layers):
            recording.begin(number)
            x, residual = self._enter(layer.input_norm, residual, branch)
            if number in watched:
                copies[number] = recording.copy(residual)
            if layer.mixes:
                branch = self._leave(layer.attention_norm, self._mixed(number, layer, x, inputs))
            if layer.mixes and layer.has_mlp:
                x, residual = self._enter(layer.mlp_norm, residual, branch)
            if layer.has_mlp:
                branch = self._leave(layer.output_norm, self._mlp(layer, x))
        assert branch is not None
        if (count := self.config.layers) in watched:
            last = residual, branch
            copies[count] = recording.compute(lambda: last[0] + last[1])
        return residual, branch, copies

    def finish(self, residual: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the final norm [R, n, H] of the sum of both, and the sum."""
        return self.ops.norm(self.weights.norm, branch, residual)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the product [R, n, V] of the LM head with hidden states after `finish`."""
        return self.weights.lm_head.compute(hidden)

    def logits(self, logits: Tensor, hidden: Tensor, own_ids: Tensor | None = None) -> Tensor:
        """Return the logits [R, n, V], or of as many tokens as the LM head has, from the product `logits` of `lm_head`
        with hidden states [R, n, H]. Logits of own_ids [R, o] follow them."""
        cap = self.config.logit_softcap
        if own_ids is not None:
            assert self.own_rows is not None
            logits = torch.cat((logits, self.own_rows.compute(hidden, own_ids)), -1)
        if self.config.logit_scale != 1:
            logits = logits / self.config.logit_scale
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if own_ids is not None and self.own_rows is not None:
            absent = own_ids >= len(self.own_rows.table)
            logits[..., -own_ids.shape[1] :].masked_fill_(absent.unsqueeze(1), float("-inf"))
        return logits

    def _mixed(self, number: int, layer: LayerWeights, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Run a layer's attention, its recurrent mixer, or both side by side. Return the output [R, n, H]."""
        if layer.mixer is None:
            return self._attention(number, layer, x, inputs)
        assert inputs.states is not None
        mixed = layer.mixer.compute(x, inputs.states, number, self.ops)
        if layer.qkv is None:
            return mixed
        attended, (left, right) = self._attention(number, layer, x, inputs), self.config.mixer_scales
        return recording.compute(lambda: mixed * left + attended * right)

    def _attention(self, number: int, layer: LayerWeights, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Run a layer's attention: write keys and values to the planes and return the output [R, n, H]."""
        config, norms = self.config, layer.head_norms
        assert layer.qkv is not None
        assert layer.out is not None
        keys, values = inputs.attention.planes(number)
        qkv, parts = layer.qkv.compute(x), layer.qkv.parts
        gate = None
        if config.output_gate is not None:
            width = sum(parts[:3])
            qkv, gate, parts = qkv[..., :width], qkv[..., width:], parts[:3]
        if norms is not None and config.norms_over_all_heads:
            qkv, norms = self._wide_norms(norms, parts, qkv), None
        cos, sin = inputs.angles[config.rotary[number]]
        query = self.ops.rotate(qkv, cos, sin, inputs.slots, keys, values, norms=norms)
        if layer.query_weight is not None:
            query = _scaled(query, layer.query_weight)
        if inputs.query_growth is not None:
            query = _scaled(query, inputs.query_growth[:, None, :, None])
        attended = self.ops.attend(number, query, inputs.attention)
        if gate is not None:
            attended = self.ops.output_gate(attended, gate)
        return layer.out.compute(attended.flatten(2))

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """Run a layer's MLP, or its mixture of experts. Return the output [R, n, H]."""
        mlp, (inner, outer) = None, self.config.mlp_scales
        if layer.gate_up is not None and layer.down is not None:
            product = layer.gate_up.compute(x)
            gate_up = product if inner == 1 else recording.compute(lambda: _first_half_scaled(product, inner))
            mlp = down = layer.down.compute(self._activated(gate_up, form=layer.xielu))
            if outer != 1:
                mlp = recording.compute(lambda: down * outer)
        if layer.mixture is not None:
            return self._mixture(layer.mixture, x, mlp)
        assert mlp is not None
        return mlp

    def _mixture(self, mixture: MixtureWeights, x: Tensor, shared: Tensor | None) -> Tensor:
        """Run a mixture of experts. shared: the output of the shared expert, [R, n, H]. Return the output [R, n, H]."""
        experts, tokens = self.ops.experts, x.flatten(0, 1)
        wide = self.config.mixture is not None and self.config.mixture.wide_router and x.dtype != torch.float32
        logits = mixture.router.compute(recording.compute(tokens.float) if wide else tokens)
        routes = experts.route(mixture.settings, logits)
        inputs = tokens if mixture.latent_in is None else mixture.latent_in.compute(tokens)
        rows = experts.spread(inputs, routes)
        activated = self._activated(mixture.gate_up.compute_routed(rows, routes), *self._clamped)
        outputs = mixture.down.compute_routed(activated, routes)
        gate = None if mixture.shared_gate is None else mixture.shared_gate.compute(tokens)
        if mixture.latent_out is not None:
            routed = mixture.latent_out.compute(experts.combine(outputs, routes)).view(x.shape)
            return routed if shared is None else recording.compute(lambda: routed + shared)
        summed: Tensor = experts.combine(outputs, routes, None if shared is None else shared.flatten(0, 1), gate)
        return summed.view(x.shape)

    def _activated(self, product: Tensor, *clamped: ClampedGLU, form: XIELU | None = None) -> Tensor:
        """Return the input [..., I] of the second product of an MLP from the result of the first one, [..., 2 I], or
        [..., I] without a gate."""
        if self.config.ungated is None:
            return self.ops.gated(product, self.config.gelu, *clamped)
        return relu2(product) if form is None else xielu(form, product)

    def _enter(self, norm: Norm | None, residual: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the previous branch, where there is one, to the residual stream. Return the input of the next branch,
        normalised where the layer has a norm, and the residual stream, [R, n, H] each."""
        if norm is None:
            if branch is not None:
                before, more = residual, branch
                residual = recording.compute(lambda: before + more)
            return residual, residual
        if branch is None:
            return self.ops.norm(norm, residual)[0], residual
        return self.ops.norm(norm, branch, residual)

    def _leave(self, norm: Norm | None, branch: Tensor) -> Tensor:
        """Return a branch's output as it is added to the residual stream."""
        if norm is not None:
            branch = self.ops.norm(norm, branch)[0]
        if self.config.residual_scale == 1:
            return branch
        return recording.compute(lambda: branch * self.config.residual_scale)

    def _wide_norms(self, norms: tuple[Norm, Norm], parts: Sequence[int], qkv: Tensor) -> Tensor:
        """Normalise all queries of a node together, and all keys (OLMo 2). parts: widths of queries, keys, values."""

        def normed() -> Tensor:
            *states, value = qkv.split(parts, -1)
            normed_parts = [self.ops.norm(norm, part.contiguous())[0] for norm, part in zip(norms, states, strict=True)]
            return torch.cat((*normed_parts, value), -1)

        return recording.compute(normed)


def _scaled(query: Tensor, factors: Tensor) -> Tensor:
    """Return queries [R, Q, n, E] times factors."""
    return recording.compute(lambda: query * factors)


def _first_half_scaled(x: Tensor, scale: float) -> Tensor:
    """Return x [..., 2 I] with its first half multiplied by a factor."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * scale, second), -1)
