"""Pack a decoder's weights for where it runs: in the order in which kernels read them, or in int8.

Letters: o outputs, i inputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dsbd_cli.models.decoder.forward import Decoder
from dsbd_cli.models.decoder.weights import PlainLinear
from dsbd_cli.ops.cpu.int8 import LEAST_WEIGHTS, outlier_channels
from dsbd_cli.ops.cpu.runtime import EAGER, Eager
from dsbd_cli.ops.interface import Linear, Ops
from dsbd_cli.ops.select import int8_linear

Outliers = Mapping[str, Tensor]
"""Input channels [k] of each product that int8 leaves as they are, by the product's name: `3.qkv`, `head`."""


def pack_decoder(decoder: Decoder, device: torch.device) -> None:
    """Pack all products that are still plain, one after another; each plain weight is freed as soon as it is packed."""
    weights = decoder.weights
    for layer in weights.layers:
        for name, linear in [*layer.linears]:
            setattr(layer, name, packed(linear, weights.dtype, device, decoder.ops))
    if isinstance(weights.head, PlainLinear):
        weights.head = packed(weights.head, weights.dtype, device, decoder.ops)


def quantize_decoder(decoder: Decoder, outliers: Outliers, least: int = LEAST_WEIGHTS) -> int:
    """Make the products of `least` weights or more int8, in place; return how many. Others are packed."""
    weights, made = decoder.weights, 0
    for number, layer in enumerate(weights.layers):
        for name, linear in [*layer.linears]:
            if _count(linear) >= least:
                setattr(layer, name, _quantized(linear, weights.dtype, outliers[f"{number}.{name}"]))
                made += 1
    if isinstance(weights.head, PlainLinear) and _count(weights.head) >= least:
        weights.head = _quantized(weights.head, weights.dtype, outliers["head"])
        made += 1
    pack_decoder(decoder, torch.device("cpu"))
    return made


def find_outliers(decoder: Decoder, calibrate: Callable[[], object]) -> dict[str, Tensor]:
    """Return the input channels with the largest values that `calibrate`, which runs tokens through the decoder, shows
    to each product."""
    weights = decoder.weights
    watched: dict[str, _Watched] = {}
    before = [dict(layer.linears) for layer in weights.layers], weights.head
    for number, linears in enumerate(before[0]):
        for name, linear in linears.items():
            watched[f"{number}.{name}"] = one = _Watched(linear)
            setattr(weights.layers[number], name, one)
    watched["head"] = weights.head = _Watched(before[1])
    try:
        calibrate()
    finally:
        for layer, linears in zip(weights.layers, before[0], strict=True):
            for name, linear in linears.items():
                setattr(layer, name, linear)
        weights.head = before[1]
    return {name: outlier_channels(one.largest) for name, one in watched.items() if one.largest is not None}


class _Watched:
    """A product that notes the largest magnitude of each of its inputs."""

    def __init__(self, inner: Linear) -> None:
        self._inner, self.parts = inner, inner.parts
        self.largest: Tensor | None = None

    def compute(self, x: Tensor, run: Eager = EAGER) -> Tensor:
        """x [..., i] -> [..., o]."""
        seen = x.detach().reshape(-1, x.shape[-1]).abs().amax(0).float()
        self.largest = seen if self.largest is None else torch.maximum(self.largest, seen)
        return self._inner.compute(x, run)


def _count(linear: PlainLinear) -> int:
    return sum(weight.numel() for weight in linear.weights)


def packed(linear: PlainLinear, dtype: torch.dtype, device: torch.device, ops: Ops) -> Linear:
    """Return a product packed for a device; plain where nothing else serves."""
    weights = [weight.to(device, dtype) for weight in linear.weights]
    biases = [None if bias is None else bias.to(device, dtype) for bias in linear.biases]
    return ops.linear(weights, biases) or linear


def _quantized(linear: PlainLinear, dtype: torch.dtype, outliers: Tensor) -> Linear:
    weights = [weight.to(dtype) for weight in linear.weights]
    return int8_linear(weights, [None if bias is None else bias.to(dtype) for bias in linear.biases], outliers)
