"""Pack a decoder's weights for where it runs: in the order in which kernels read them, or in int8 or int4.

Letters: o outputs, i inputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.models.decoder.forward import Decoder
from dsbd_cli.models.decoder.weights import PlainLinear
from dsbd_cli.ops.interface import LEAST_WEIGHTS, Linear, Ops
from dsbd_cli.ops.quantized_weight import QuantizedWeight
from dsbd_cli.ops.reference import Routes, outlier_channels
from dsbd_cli.ops.select import quantized_linear, stored_linear

Outliers = Mapping[str, Tensor]
"""Input channels [k] of each product that are not quantized, by the product's name: `3.qkv`, `lm_head`."""

INT8_IN_INT4 = ("qkv", "lm_head")  # products that int4 makes int8: four bits cost most there (benchmarks/LOG.md)
PLAIN = ("router", "shared_gate")  # products that choose and weigh experts; they are small


def pack_decoder(decoder: Decoder, device: torch.device) -> None:
    """Pack all products that are still plain, one after another; each plain weight is freed as soon as it is packed."""
    for _, owner, name in decoder.plain_products():
        setattr(owner, name, packed(getattr(owner, name), decoder.weights.dtype, device, decoder.ops))


def quantize_decoder(
    decoder: Decoder, outliers: Outliers, weight_format: str | None, least: int = LEAST_WEIGHTS
) -> int:
    """Quantize the products of `least` weights or more, in place, and pack the others. Return how many have
    the format that is asked for.

    weight_format: `int8` or `int4`, of which INT8_IN_INT4 are in int8; None: as a quantised file has them, and its
    plain weights stay plain.
    """
    made, dtype = 0, decoder.weights.dtype
    for full, owner, name in decoder.plain_products():
        linear: PlainLinear = getattr(owner, name)
        if name in PLAIN or sum(weight.numel() for weight in linear.weights) < least:
            continue
        if weight_format is not None:
            own = "int8" if name in INT8_IN_INT4 else weight_format
            product = quantized_linear(*linear.converted(dtype), outliers[full], own)
            made += own == weight_format
        elif _is_stored(linear, least):
            product = stored_linear(linear.weights, linear.biases, outliers[full], dtype)
            made += 1
        else:
            continue
        setattr(owner, name, product)
    pack_decoder(decoder, torch.device("cpu"))
    return made


def find_outliers(decoder: Decoder, calibrate: Callable[[], object]) -> dict[str, Tensor]:
    """Return the input channels of each product that have the largest values while `calibrate` runs tokens through the
    decoder."""
    products = decoder.plain_products()
    before = [getattr(owner, name) for _, owner, name in products]
    watched = {full: _Watched(linear) for (full, *_), linear in zip(products, before, strict=True)}
    for full, owner, name in products:
        setattr(owner, name, watched[full])
    try:
        calibrate()
    finally:
        for (_, owner, name), linear in zip(products, before, strict=True):
            setattr(owner, name, linear)
    return {name: _outliers(name, watcher.largest) for name, watcher in watched.items() if watcher.largest is not None}


def _outliers(name: str, largest: Tensor) -> Tensor:
    """Return the channels [k] of a product's input that are not quantized, by the largest magnitude [i] in each. In the
    second product experts have inputs of their own, so no channel stands out in all of them."""
    return torch.empty(0, dtype=torch.int64) if name.endswith("mixture.down") else outlier_channels(largest)


def pack_as_stored(decoder: Decoder, calibrate: Callable[[], object], least: int = LEAST_WEIGHTS) -> dict[str, Tensor]:
    """Pack the products of a quantised file, in place, each as soon as `calibrate` has shown its inputs. Return the
    channels [k] of each that are not quantized, by name.

    The tokens run through products that are packed already, so no weight is dequantised for them. Their logits are
    zeros, which nothing reads.
    """
    turns = [(full, owner, name, _PackedInTurn(getattr(owner, name), decoder.weights.dtype, full))
             for full, owner, name in decoder.plain_products()
             if name not in PLAIN and _is_stored(getattr(owner, name), least)]  # fmt: skip
    for _, owner, name, turn in turns:
        setattr(owner, name, turn)
    calibrate()
    for _, owner, name, turn in turns:
        setattr(owner, name, turn.product)
    pack_decoder(decoder, torch.device("cpu"))
    return {full: turn.outliers for full, _, _, turn in turns}


def _is_stored(linear: PlainLinear, least: int) -> bool:
    """Return whether a product has so many weights, all of them quantised in their file."""
    return sum(weight.numel() for weight in linear.weights) >= least and all(
        isinstance(weight, QuantizedWeight) for weight in linear.weights
    )


class _PackedInTurn:
    """A product of a quantised file that is packed when its first inputs come. The results of the LM head are zeros."""

    product: Any = None

    def __init__(self, inner: PlainLinear, dtype: torch.dtype, name: str) -> None:
        self._inner, self._dtype, self._name = inner, dtype, name
        self.outliers = torch.empty(0, dtype=torch.int64)
        self.parts, self.weights, self.compiled = inner.parts, inner.weights, False

    def compute(self, x: Tensor) -> Tensor:
        """Return the product [..., o] of x [..., i]."""
        product = self._packed(x)
        last = self._name == "lm_head"
        result: Tensor = x.new_zeros(1).expand(*x.shape[:-1], sum(self.parts)) if last else product.compute(x)
        return result

    def compute_routed(self, x: Tensor, routes: Routes) -> Tensor:
        """Return the products of rows x [r, i], each with the weights of its expert."""
        result: Tensor = self._packed(x).compute_routed(x, routes)
        return result

    def _packed(self, x: Tensor) -> Any:
        if self.product is None:
            self.outliers = _outliers(self._name, x.reshape(-1, x.shape[-1]).abs().amax(0).float())
            self.product = stored_linear(self._inner.weights, self._inner.biases, self.outliers, self._dtype)
        return self.product


class _Watched:
    """A product that records the largest magnitude in each of its input channels."""

    def __init__(self, inner: PlainLinear) -> None:
        self._inner, self.parts, self.weights, self.compiled = inner, inner.parts, inner.weights, False
        self.largest: Tensor | None = None

    def compute(self, x: Tensor) -> Tensor:
        """Return the product [..., o] of x [..., i] and record the magnitudes of x."""
        self._record(x)
        return self._inner.compute(x)

    def compute_routed(self, x: Tensor, routes: Routes) -> Tensor:
        """Return the products of rows x [r, i], each with the weights of its expert, and record the magnitudes of x."""
        self._record(x)
        return self._inner.compute_routed(x, routes)

    def _record(self, x: Tensor) -> None:
        seen = x.detach().reshape(-1, x.shape[-1]).abs().amax(0).float()
        self.largest = seen if self.largest is None else torch.maximum(self.largest, seen)


def packed(linear: PlainLinear, dtype: torch.dtype, device: torch.device, ops: Ops) -> Linear:
    """Return a product packed for a device, or the plain product where nothing packs it. Weights of a quantised file
    are dequantised."""
    weights, biases = linear.converted(linear.own_dtype or dtype, device)
    if (product := ops.linear(weights, biases, linear.experts)) is not None:
        return product
    stored = any(isinstance(weight, QuantizedWeight) for weight in linear.weights)
    return PlainLinear(weights, biases, linear.experts) if stored else linear
