"""Linear layers whose weights lie in the processor's own blocked order, so that no call has to reorder them first.

torch hands a plain weight matrix to oneDNN, which copies it into blocks at every call; for a few tokens that copy costs
as much as the product (docs/experiments.md). Packed once, the same product reads the weights once.

The two operators used are torch's, but not documented: `packing_works` tries them against a plain product, and where
they are missing or differ the layers stay as they are.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

__all__ = ["PackedLinear", "pack", "packing_works", "plain_linears", "weight_of"]

ROWS_HINT = 32  # blocks are chosen for about so many tokens; measured: any hint from 8 to 512 gives the same blocks
LEAST_ROWS = 4  # fewer rows take a slower kernel; measured: 1 row 0.65 ms, 4 rows 0.51 ms for 5632 x 2048 in bfloat16
MIN_FEATURES = 64
MULTIPLIED = ("dt_proj",)  # layers whose weights Mamba and Jamba multiply by themselves


class PackedLinear(nn.Module):
    """x W^T + b with a packed W. Inference only: the weight is no parameter and has no gradient.

    Fewer outputs than MIN_FEATURES are filled up with zeros, which the result leaves out: in a product of few columns
    the bits of a row depend on the other rows.

    `weight` tells shape and dtype to models that look at it (T5, Mamba) and holds no numbers: it lies on `meta`.
    """

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        weight = weight_of(linear)
        self.out_features, self.in_features = weight.shape
        self.packed = _reorder(_filled(weight.detach()))
        self.weight = torch.empty_like(linear.weight, device="meta", requires_grad=False)
        self.bias: Tensor | None = None if linear.bias is None else _filled(linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        rows = x.numel() // self.in_features
        if rows >= LEAST_ROWS:
            return _product(x, self.packed, self.bias)[..., : self.out_features]
        flat = nn.functional.pad(x.reshape(rows, self.in_features), (0, 0, 0, LEAST_ROWS - rows))
        y = _product(flat, self.packed, self.bias)[:rows, : self.out_features]
        return y.reshape(*x.shape[:-1], self.out_features)

    def with_bias(self, bias: Tensor) -> PackedLinear:
        """The same weights with this bias [out_features], which costs nothing on top of the product."""
        other = copy.copy(self)
        other.bias = _filled(bias)
        return other

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack(model: nn.Module) -> int:
    """Replace the plain linear layers of a model on the CPU by packed ones, in place; returns how many.

    Each original weight is freed as soon as it is packed, unless something else shares it (tied embeddings).
    """
    found = [item for item in plain_linears(model, least=1) if packing_works(item[2].weight.dtype)]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)


def plain_linears(model: nn.Module, least: int = MIN_FEATURES) -> Iterator[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """The linear layers on the CPU that do nothing but x W^T + b, with their parents and names. least: outputs."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | Conv1D) and name not in MULTIPLIED and _suits(child, least):
                yield parent, name, child


def weight_of(linear: nn.Linear | Conv1D) -> Tensor:
    """[out, in]; GPT-2's layers hold theirs the other way round."""
    weight: Tensor = linear.weight.t() if isinstance(linear, Conv1D) else linear.weight
    return weight


def _filled(weight: Tensor) -> Tensor:
    """Zeros after the last output, up to MIN_FEATURES."""
    missing = max(0, MIN_FEATURES - weight.shape[0])
    return nn.functional.pad(weight, (*[0] * (2 * weight.dim() - 1), missing)) if missing else weight


def _suits(linear: nn.Linear | Conv1D, least: int) -> bool:
    weight, bias = linear.weight, linear.bias
    hooked = bool(linear._forward_hooks or linear._forward_pre_hooks or hasattr(linear, "_hf_hook"))
    # one with a forward of its own, or with weights that quantised checkpoints keep in a form of theirs
    hooked |= type(linear) not in (nn.Linear, Conv1D) or "forward" in vars(linear)
    hooked |= type(weight.data) is not Tensor
    plain = weight.device.type == "cpu" and not hooked and (bias is None or bias.dtype == weight.dtype)
    outputs, inputs = weight_of(linear).shape
    return plain and weight.is_floating_point() and inputs >= MIN_FEATURES and outputs >= least


def _reorder(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
    return packed


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this build of torch on this processor has the packed product, and it equals the plain one."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and not _fast_bfloat16():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x, bias = torch.randn(2, 5, 64, generator=generator).to(dtype), torch.randn(96, generator=generator).to(dtype)
    try:
        with torch.inference_mode():
            ours = _product(x, _reorder(weight), bias)
            plain = nn.functional.linear(x, weight, bias)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return ours.shape == plain.shape and torch.allclose(ours, plain, rtol=2e-2, atol=2e-2)


def _fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself."""
    check: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(check is not None and check())
