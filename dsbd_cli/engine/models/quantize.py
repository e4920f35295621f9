"""Linear layers in int8 on the CPU: half the bytes of bfloat16, and sums of integers, which have no rounding.

Weights have one scale per output channel; inputs get one scale per row (token), so that a row does not depend on the
rows beside it. The few input channels whose values are far larger than the others would make that scale coarse: they
are multiplied as they are, in the checkpoint's dtype (LLM.int8(), Dettmers et al. 2022). Which channels these are is
found once, at load, on random tokens; choosing them anew for every batch would make rows depend on each other.

Two ways give the same integers. Where the processor has AVX-512 VNNI, a kernel of our own makes a row integers in one
pass and streams the weights once for the integers and the outliers (quantize_kernel.py). Elsewhere operators of torch
serve, which are not documented. `int8_missing` tries the one that serves against integers.

Letters: r rows (tokens), i input channels, o output channels, k outlier channels.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dsbd_cli.engine.models.native import PRODUCT, Kernel, features, fields, kernels, loadable, offsets, team
from dsbd_cli.engine.models.packing import (
    PackedLinear,
    Parts,
    Product,
    lines,
    packing_works,
    plain_linears,
    weight_of,
)

__all__ = ["Int8Linear", "int8_missing", "quantize"]

OUTLIERS = 32  # channels kept as they are; measured: docs/hardware.md
# Of a product. Measured: 896 x 896 takes 1.5 times as long as in bfloat16, 1536 x 1536 as long.
LEAST_WEIGHTS = 2_000_000
LEVELS = 127
ZERO = 128  # unsigned inputs, whose kernel is fast; with signed ones torch takes a kernel a thousand times slower
# Rows at a time, so that what is between stays in the caches: made integers, and multiplied. Measured on one core: 512
# rows of 8960 are integers after 5 ms, all at a time after 27 ms (and with vector_norm for the largest after 45 ms).
LEVEL_ROWS, PRODUCT_ROWS = 32, 128
INPUTS = 16  # our kernels work on multiples of so many
SMALLEST = torch.finfo(torch.float32).tiny


class Levelize(ctypes.Structure):
    """Arguments of the kernel that makes rows integers: sizes, addresses, and strides in bytes."""

    _fields_ = fields(
        "taken", "threads", "items", "rows", "share", "x", "x_row", "narrow", "inputs", "kept", "levels", "levels_row",
        "steps", "outliers", "few", "few_inputs",
    )  # fmt: skip


class Multiply(ctypes.Structure):
    """Arguments of the kernel that multiplies: sizes, addresses, and strides in bytes."""

    _fields_ = fields(
        *PRODUCT, "levels", "levels_row", "weights", "quads", "piece", "offsets", "scales", "steps", "few",
        "few_weights", "few_inputs", "bias", "out", "out_row", "narrow",
    )  # fmt: skip


LEVELIZE, MULTIPLY = offsets(Levelize), offsets(Multiply)
LAYOUT = zlib.crc32(
    repr([LEVELS, ZERO, LEVELIZE, MULTIPLY, *(f[0] for kind in (Levelize, Multiply) for f in kind._fields_)]).encode()
)


class _Way(Protocol):
    """How a product of int8 layers is computed. weights: as they are stored."""

    weights: Tensor

    def __init__(
        self, integers: Tensor, scales: Tensor, outliers: Tensor, few: Tensor, bias: Tensor, kept: Tensor
    ) -> None:
        """integers [o, i] int8, 0 for outliers; scales [o] float32; outliers [k]; few [o, k], their weights in the
        checkpoint's dtype; bias [o]; kept [i], 0 for outliers and 1 for others."""

    def levels(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [r, i] -> integers [r, i] in 1 .. 255, what one of them is worth [r, 1], outliers [r, k]."""

    def multiply(self, levels: Tensor, steps: Tensor, few: Tensor) -> Tensor:
        """What `levels` gave -> [r, o]."""


class _Torch:
    """By torch's operators."""

    def __init__(
        self, integers: Tensor, scales: Tensor, outliers: Tensor, few: Tensor, bias: Tensor, kept: Tensor
    ) -> None:
        layer = nn.Linear(few.shape[1], len(few), dtype=few.dtype).requires_grad_(False)
        layer.weight.copy_(few)
        layer.bias.copy_(bias)
        self._few: nn.Module = PackedLinear(layer) if packing_works(few.dtype) else layer
        self._scales, self._outliers, self._kept = scales, outliers, kept.to(few.dtype)
        self.weights: Tensor = torch.ops.onednn.qlinear_prepack(integers, None)
        self._zeros = torch.zeros(len(integers), dtype=torch.int32)

    def __call__(self, x: Tensor) -> Tensor:
        """x [r, i] -> [r, o]."""
        parts = [self.multiply(*self.levels(rows)) for rows in x.split(PRODUCT_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def levels(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        levels = torch.empty_like(x, dtype=torch.uint8)
        steps = self._scales.new_empty(len(x), 1)
        for rows, found, step in zip(
            x.split(LEVEL_ROWS), levels.split(LEVEL_ROWS), steps.split(LEVEL_ROWS), strict=True
        ):
            # products, quotients and sums that IEEE rounds exactly, one by one: fused ones would go by place
            ordinary = rows * self._kept
            step.copy_(ordinary.abs().amax(1, keepdim=True)).div_(LEVELS).clamp_min_(SMALLEST)
            found.copy_(ordinary.float().div_(step).add_(ZERO + 0.5).to(torch.int32))
        return levels, steps, x.index_select(1, self._outliers)

    def multiply(self, levels: Tensor, steps: Tensor, few: Tensor) -> Tensor:
        sums: Tensor = torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, ZERO, self.weights, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return sums.mul_(steps).add_(self._few(few)).to(few.dtype)


class _Compiled:
    """By the kernels of quantize_kernel.py. Outputs are filled up to a multiple of COLUMNS, inputs to one of INPUTS."""

    def __init__(
        self, integers: Tensor, scales: Tensor, outliers: Tensor, few: Tensor, bias: Tensor, kept: Tensor
    ) -> None:
        self._outputs, self._given = integers.shape
        self._dtype = few.dtype
        wider = -self._given % INPUTS
        pad = nn.functional.pad
        self.weights = lines(pad(integers, (0, wider)) if wider else integers)
        self._blocks, quads, columns = self.weights.shape
        self._inputs, more = 4 * quads, self._blocks * columns - self._outputs
        self._offsets = pad(integers.sum(1, dtype=torch.int32).mul_(-ZERO), (0, more))
        self._scales, self._bias = pad(scales, (0, more)), pad(bias.float(), (0, more))
        self._few = lines(few.float())
        self._kept, self._outliers = pad(kept.float(), (0, wider)), outliers.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x [r, i] -> [r, o]."""
        return self.multiply(*self.levels(x))

    def levels(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert x.dtype == self._dtype
        assert x.is_cpu
        assert x.shape[1] == self._given
        if self._given < self._inputs or x.stride(1) != 1:
            x = nn.functional.pad(x, (0, self._inputs - self._given)).contiguous()
        rows = x.shape[0]
        levels = torch.empty(rows, self._inputs, dtype=torch.uint8, device="cpu")
        steps = self._scales.new_empty(rows, 1)
        few = self._scales.new_empty(rows, len(self._outliers))
        share = max(1, -(-rows // (4 * torch.get_num_threads())))
        items = -(-rows // share)
        arguments = Levelize(
            0, 0, items, rows, share, x.data_ptr(), x.stride(0) * x.element_size(), x.element_size() == 2,
            self._inputs, self._kept.data_ptr(), levels.data_ptr(), self._inputs, steps.data_ptr(),
            self._outliers.data_ptr(), few.data_ptr(), few.shape[1],
        )  # fmt: skip
        _kernels()[0](arguments, rows * self._inputs, items)
        return levels, steps, few

    def multiply(self, levels: Tensor, steps: Tensor, few: Tensor) -> Tensor:
        rows, columns = levels.shape[0], self._scales.shape[0]
        out = torch.empty(rows, columns, dtype=self._dtype, device="cpu")
        quads = self._inputs // 4
        parts = Parts.of(rows, self._blocks, quads, kinds=2)
        sums = parts.room()
        arguments = Multiply(
            *parts.arguments(sums), levels.data_ptr(), levels.stride(0), self.weights.data_ptr(), quads, parts.piece,
            self._offsets.data_ptr(), self._scales.data_ptr(), steps.data_ptr(), few.data_ptr(), self._few.data_ptr(),
            few.shape[1], self._bias.data_ptr(), out.data_ptr(), columns * out.element_size(), out.element_size() == 2,
        )  # fmt: skip
        _kernels()[1](arguments, rows * columns * self._inputs, parts.items)
        return out if columns == self._outputs else out[:, : self._outputs]


class Int8Product(Product):
    """Of integers; the tensor is made integers once.

    Attributes:
        outliers: [k] input channels that are multiplied as they are.
        scales: [o] float32, what an integer of a weight is worth.
        parts: outputs of each layer.
        way: computes the product.
    """

    def __init__(self, linears: Sequence[nn.Linear | Conv1D], largest: Tensor) -> None:
        """largest: [i] magnitudes of the inputs seen."""
        weight = torch.cat([weight_of(linear).detach() for linear in linears])
        biases = [
            weight.new_zeros(weight_of(linear).shape[0]) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
        self.parts = [len(bias) for bias in biases]
        self.outliers = largest.topk(min(OUTLIERS, len(largest) // 2)).indices.sort().values
        kept = torch.ones(len(largest))
        kept[self.outliers] = 0
        few = weight[:, self.outliers]
        ordinary = weight.float().mul_(kept)
        del weight
        self.scales = (ordinary.abs().amax(1) / LEVELS).clamp_min(SMALLEST)
        integers = ordinary.div_(self.scales.unsqueeze(1)).round_().to(torch.int8)
        del ordinary
        self.way = _way()(integers, self.scales, self.outliers, few, torch.cat(biases), kept)

    def compute(self, x: Tensor) -> Tensor:
        return self.way(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], sum(self.parts))


class Int8Linear(nn.Module):
    """x W^T + b with W in int8, but for its columns of outliers: a part of a product. Inference only.

    `weight` tells shape and dtype to models that look at it and holds no numbers: it lies on `meta`.
    """

    def __init__(self, linear: nn.Linear | Conv1D, product: Int8Product, part: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_of(linear).shape
        self.product = product
        self._first = sum(product.parts[:part])
        self.weight = torch.empty_like(linear.weight, device="meta", requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], of the same dtype."""
        return self.product.of(x).narrow(-1, self._first, self.out_features).contiguous()

    @property
    def packed(self) -> Tensor:
        """The weights of the whole product as they are stored."""
        return self.product.way.weights

    @property
    def compiled(self) -> bool:
        """Whether kernels of our own compute it."""
        return isinstance(self.product.way, _Compiled)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


@dataclass(slots=True)
class _Seen:
    """What calibration saw of one layer. first: the layer that was handed the same tensor before it, or itself."""

    largest: Tensor
    first: nn.Module


@dataclass(slots=True)
class _Watch:
    """Hooks on layers while `calibrate` runs the model."""

    seen: dict[nn.Module, _Seen] = field(default_factory=dict)
    last: dict[nn.Module, tuple[Tensor, Tensor, nn.Module]] = field(default_factory=dict)  # of each parent

    def __call__(self, parent: nn.Module, layer: nn.Module, x: Tensor) -> None:
        largest = x.detach().reshape(-1, x.shape[-1]).abs().amax(0).float()
        same, copy, first = self.last.get(parent, (None, None, layer))
        if same is not x or copy is None or not torch.equal(copy, x):
            first = layer
        self.last[parent] = x, x.clone(), first
        before = self.seen.get(layer)
        if before is None:
            self.seen[layer] = _Seen(largest, first)
        else:
            before.largest = torch.maximum(before.largest, largest)
            before.first = layer if before.first is not first else first


def quantize(model: nn.Module, calibrate: Callable[[], object], least: int = LEAST_WEIGHTS) -> int:
    """Replace the plain linear layers of a model on the CPU by int8 ones, in place; returns how many.

    calibrate: runs tokens through the model. Layers that it does not reach stay as they are. So do products of fewer
    than `least` weights, for which int8 is no gain: the work beside the product takes longer than the product.
    """
    found = list(plain_linears(model))
    watch = _Watch()
    hooks = [
        child.register_forward_pre_hook(lambda layer, inputs, parent=parent: watch(parent, layer, inputs[0]))
        for parent, _, child in found
    ]
    try:
        with torch.inference_mode():
            calibrate()
    finally:
        for hook in hooks:
            hook.remove()
    watch.last.clear()
    together: dict[nn.Module, list[tuple[nn.Module, str, nn.Linear | Conv1D]]] = {}
    for item in found:
        if item[2] in watch.seen:
            together.setdefault(watch.seen[item[2]].first, []).append(item)
    del found
    made = 0
    while together:  # each original weight is freed as soon as it is converted
        first, layers = together.popitem()
        largest = watch.seen[first].largest
        if sum(child.weight.numel() for _, _, child in layers) < least:
            continue
        product = Int8Product([child for _, _, child in layers], largest)
        for *_, child in layers:
            watch.seen.pop(child)
        for part, (parent, name, child) in enumerate(layers):
            setattr(parent, name, Int8Linear(child, product, part))
        made += len(layers)
    return made


@functools.cache
def _kernels() -> list[Kernel]:
    return kernels("quantize_kernel", "levelize", "multiply")


@functools.cache
def _way() -> type[_Torch] | type[_Compiled]:
    """What serves on this processor. Matrix units are faster for long prompts: they are left to torch."""
    able = {"avx512f", "avx512vnni"} <= features() and "amx-int8" not in features() and team() is not None
    if able and loadable(_kernels, "torch computes products in int8") and _fault(_Compiled) is None:
        return _Compiled
    return _Torch


@functools.cache
def int8_missing() -> str | None:
    """Why this build of torch on this processor has no exact int8 product, or None."""
    operators: Any = torch.ops.onednn
    way = _way()
    if way is _Torch and not (hasattr(operators, "qlinear_prepack") and hasattr(operators, "qlinear_pointwise")):
        return "this build of torch has no int8 linear layers (oneDNN)"
    return _fault(way)


def _fault(way: type[_Torch] | type[_Compiled]) -> str | None:
    """What is wrong with its sums of integers, or None."""
    generator = torch.Generator().manual_seed(0)
    # largest values beside each other: processors without exact 8-bit products saturate there
    weight = LEVELS * (2 * torch.randint(0, 2, (96, 128), generator=generator) - 1)
    levels = 1 + 254 * torch.randint(0, 2, (5, 128), generator=generator)
    weight[:, :32], levels[:, :32] = LEVELS, 255
    none = torch.zeros(1, dtype=torch.int64)  # an outlier of weight 0
    try:
        with torch.inference_mode():
            made = way(
                weight.to(torch.int8), torch.ones(96), none, torch.zeros(96, 1), torch.zeros(96), torch.ones(128)
            )
            ours = made.multiply(levels.to(torch.uint8), torch.ones(5, 1), torch.zeros(5, 1))
    except (RuntimeError, NotImplementedError) as error:
        return f"torch's int8 linear layers fail on this processor: {' '.join(str(error).split())[:100]}"
    exact = (levels - ZERO) @ weight.t()
    return None if torch.equal(ours.long(), exact) else "this processor's int8 products are not exact"
