"""Linear layers of transformers' models replaced on a CPU, in place: by packed ones, or by int8 ones.

Letters: o output channels, i input channels of a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dsbd_cli.ops.cpu.int8 import LEAST_WEIGHTS, Int8Product, outlier_channels
from dsbd_cli.ops.cpu.linear import MIN_FEATURES, PackedProduct
from dsbd_cli.ops.select import int8_linear, packed_linear

MULTIPLIED = ("dt_proj",)  # layers whose weights Mamba and Jamba multiply by themselves


class PackedLinear(nn.Module):
    """x W^T + b with a packed W. Inference only: the weight is no parameter and has no gradient.

    `weight` tells shape and dtype to models that look at it (T5, Mamba) and holds no numbers: it lies on `meta`.
    """

    def __init__(self, linear: nn.Linear | Conv1D, product: PackedProduct) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_of(linear).shape
        self.bias: Tensor | None = None if linear.bias is None else linear.bias.detach()
        self.product = product
        self.weight = torch.empty_like(linear.weight, device="meta", requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear | Conv1D) -> PackedLinear | None:
        """Pack a layer; None where nothing packs such weights."""
        product = packed_linear([weight_of(linear).detach()], [None if linear.bias is None else linear.bias.detach()])
        return None if product is None else cls(linear, product)

    @property
    def packed(self) -> Tensor:
        """The weights as they are stored."""
        return self.product.weights

    @property
    def compiled(self) -> bool:
        """Whether a kernel of our own computes it."""
        return self.product.compiled

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return self.product.compute(x)

    def with_bias(self, bias: Tensor) -> PackedLinear:
        """Return the same weights with this bias [out_features], which costs nothing on top of the product."""
        other = copy.copy(self)
        other.bias, other.product = bias, copy.copy(self.product)
        other.product.set_bias(bias)
        return other


def pack(model: nn.Module) -> int:
    """Replace the plain linear layers of a model on the CPU by packed ones, in place; return how many.

    Each original weight is freed as soon as it is packed, unless something else shares it (tied embeddings).
    """
    # small ones too: rows of torch's own products depend on each other
    made, found = 0, [(parent, name) for parent, name, _ in plain_linears(model, 1, 1)]
    for parent, name in found:
        if (packed := PackedLinear.of(getattr(parent, name))) is not None:
            setattr(parent, name, packed)
            made += 1
    return made


def plain_linears(
    model: nn.Module, least: int = MIN_FEATURES, inputs: int = MIN_FEATURES
) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """The linear layers on the CPU that do nothing but x W^T + b, with their parents and names. least, inputs: fewest
    outputs and inputs."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | Conv1D) and name not in MULTIPLIED and _suits(child, least, inputs):
                yield parent, name, child


def weight_of(linear: nn.Linear | Conv1D) -> Tensor:
    """[out, in]; GPT-2's layers hold theirs the other way round."""
    weight: Tensor = linear.weight.t() if isinstance(linear, Conv1D) else linear.weight
    return weight


def _suits(linear: nn.Linear | Conv1D, least: int, fewest: int) -> bool:
    weight, bias = linear.weight, linear.bias
    hooked = bool(linear._forward_hooks or linear._forward_pre_hooks or hasattr(linear, "_hf_hook"))
    # one with a forward of its own, or with weights that quantised checkpoints keep in a form of theirs
    hooked |= type(linear) not in (nn.Linear, Conv1D) or "forward" in vars(linear)
    hooked |= type(weight.data) is not Tensor
    plain = weight.device.type == "cpu" and not hooked and (bias is None or bias.dtype == weight.dtype)
    outputs, inputs = weight_of(linear).shape
    return plain and weight.is_floating_point() and inputs >= fewest and outputs >= least


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
        return self.product.backend.weights

    @property
    def compiled(self) -> bool:
        """Whether kernels of our own compute it."""
        return self.product.compiled


@dataclass(slots=True)
class _Seen:
    """Observations of one layer during calibration.

    Attributes:
        largest: [i] float32, the largest magnitude in each input channel.
        first: the layer that was handed the same tensor before it, or itself.
    """

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
        weights = [weight_of(child).detach() for _, _, child in layers]
        biases = [None if child.bias is None else child.bias.detach() for _, _, child in layers]
        product = int8_linear(weights, biases, outlier_channels(largest))
        del weights
        for *_, child in layers:
            watch.seen.pop(child)
        for part, (parent, name, child) in enumerate(layers):
            setattr(parent, name, Int8Linear(child, product, part))
        made += len(layers)
    return made
