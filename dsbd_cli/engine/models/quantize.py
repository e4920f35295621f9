"""Linear layers in int8 on the CPU: half the bytes of bfloat16, and sums of integers, which have no rounding.

Weights have one scale per output channel; inputs get one scale per row (token), so that a row does not depend on the
rows beside it. The few input channels whose values are far larger than the others would make that scale coarse: they
are multiplied as they are, in the checkpoint's dtype (LLM.int8(), Dettmers et al. 2022). Which channels these are is
found once, at load, on random tokens; choosing them anew for every batch would make rows depend on each other.

The two operators used are torch's, but not documented: `int8_missing` tries them against integers.

Letters: r rows (tokens), i input channels, o output channels, k outlier channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dsbd_cli.engine.models.packing import PackedLinear, packing_works, plain_linears, weight_of

__all__ = ["Int8Linear", "int8_missing", "quantize"]

OUTLIERS = 32  # channels kept as they are; measured: docs/quantization.md
# Of a product. Measured: 896 x 896 takes 1.5 times as long as in bfloat16, 1536 x 1536 as long.
LEAST_WEIGHTS = 2_000_000
LEVELS = 127
ZERO = 128  # unsigned inputs, whose kernel is fast; with signed ones torch takes a kernel a thousand times slower
# Rows at a time, so that what is between stays in the caches: made integers, and multiplied. Measured on one core: 512
# rows of 8960 are integers after 5 ms, all at a time after 27 ms (and with vector_norm for the largest after 45 ms).
LEVEL_ROWS, PRODUCT_ROWS = 32, 128
SMALLEST = torch.finfo(torch.float32).tiny


class Int8Product:
    """Layers that are handed the same tensor (query, key and value), as one product: the tensor is made integers once.

    Attributes:
        outliers: [k] input channels that are multiplied as they are.
        parts: outputs of each layer.
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
        few = nn.Linear(len(self.outliers), len(weight), dtype=weight.dtype).requires_grad_(False)
        few.weight.copy_(weight[:, self.outliers])
        few.bias.copy_(torch.cat(biases))
        self._few: nn.Module = PackedLinear(few) if packing_works(weight.dtype) else few
        self._kept = torch.ones(len(largest), dtype=weight.dtype)
        self._kept[self.outliers] = 0
        ordinary = weight.float().mul_(self._kept.float())
        self.scales = (ordinary.abs().amax(1) / LEVELS).clamp_min(SMALLEST)
        self._packed = _prepack(ordinary.div_(self.scales.unsqueeze(1)).round_().to(torch.int8))
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)
        self._x: Tensor | None = None
        self._result: Tensor | None = None
        self._left = 0

    def of(self, x: Tensor) -> Tensor:
        """x [..., i] -> [r, o], the outputs of all layers beside each other. Kept until each has asked."""
        if self._x is not x or self._result is None:
            self._x, self._left = x, len(self.parts)
            self._result = self._compute(x.reshape(-1, x.shape[-1]))
        result, self._left = self._result, self._left - 1
        if not self._left:
            self._x = self._result = None
        return result

    def _compute(self, x: Tensor) -> Tensor:
        parts = [self._multiply(rows).to(x.dtype) for rows in x.split(PRODUCT_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _multiply(self, x: Tensor) -> Tensor:
        """x [r, i] -> [r, o] float32."""
        levels, steps = self.levels(x)
        sums = _product(levels, self._packed, self.scales, self._zeros)
        return sums.mul_(steps).add_(self._few(x.index_select(1, self.outliers)))

    def levels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [r, i] -> integers [r, i] in 1 .. 255, and what one of them is worth [r, 1]."""
        levels = torch.empty_like(x, dtype=torch.uint8)
        steps = torch.empty(len(x), 1)
        for rows, found, step in zip(
            x.split(LEVEL_ROWS), levels.split(LEVEL_ROWS), steps.split(LEVEL_ROWS), strict=True
        ):
            # products, quotients and sums that IEEE rounds exactly, one by one: fused ones would go by place
            ordinary = rows * self._kept
            step.copy_(ordinary.abs().amax(1, keepdim=True)).div_(LEVELS).clamp_min_(SMALLEST)
            found.copy_(ordinary.float().div_(step).add_(ZERO + 0.5).to(torch.int32))
        return levels, steps


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
        result = self.product.of(x).narrow(1, self._first, self.out_features).contiguous()
        return result.view(*x.shape[:-1], self.out_features)

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
    made = 0
    for first, layers in together.items():
        if sum(child.weight.numel() for _, _, child in layers) < least:
            continue
        product = Int8Product([child for _, _, child in layers], watch.seen[first].largest)
        for part, (parent, name, child) in enumerate(layers):
            setattr(parent, name, Int8Linear(child, product, part))
        made += len(layers)
    return made


def _prepack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
    return packed


def _product(levels: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """[r, o] float32: sums of integers times the scale of each output channel."""
    result: Tensor = torch.ops.onednn.qlinear_pointwise(
        levels, 1.0, ZERO, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return result


@functools.cache
def int8_missing() -> str | None:
    """Why this build of torch on this processor has no exact int8 product, or None."""
    operators: Any = torch.ops.onednn
    if not (hasattr(operators, "qlinear_prepack") and hasattr(operators, "qlinear_pointwise")):
        return "this build of torch has no int8 linear layers (oneDNN)"
    generator = torch.Generator().manual_seed(0)
    # largest values beside each other: processors without exact 8-bit products saturate there
    weight = LEVELS * (2 * torch.randint(0, 2, (96, 128), generator=generator) - 1)
    levels = 1 + 254 * torch.randint(0, 2, (5, 128), generator=generator)
    weight[:, :32], levels[:, :32] = LEVELS, 255
    try:
        with torch.inference_mode():
            ones, zeros = torch.ones(96), torch.zeros(96, dtype=torch.int32)
            ours = _product(levels.to(torch.uint8), _prepack(weight.to(torch.int8)), ones, zeros)
    except (RuntimeError, NotImplementedError) as error:
        return f"torch's int8 linear layers fail on this processor: {' '.join(str(error).split())[:100]}"
    exact = (levels - ZERO) @ weight.t()
    return None if torch.equal(ours.long(), exact) else "this processor's int8 products are not exact"
