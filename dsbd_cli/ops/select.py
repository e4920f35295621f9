"""Which operations compute what stands between the products of a decoder layer, on a device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.ops.cpu import layer as layer_ops
from dsbd_cli.ops.cpu import program
from dsbd_cli.ops.cpu.runtime import Eager
from dsbd_cli.ops.reference import gated_twin, norm_twin, rotate_twin

__all__ = ["LayerOps", "layer_ops_for"]


@dataclass(frozen=True, slots=True)
class LayerOps:
    """The operations, as ops/reference.py says them, each with one argument more: `run`.

    Attributes:
        linear: x W^T + b by a kernel of a GPU; None: what weights are packed as.
        programs: all run as kernels of the CPU, so that a forward of few nodes is a program.
        names: what serves, for people.
    """

    norm: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., Tensor]
    rotate: Callable[..., Tensor]
    linear: Callable[..., Tensor] | None = None
    programs: bool = False
    names: tuple[str, ...] = ()


def layer_ops_for(
    device: torch.device, dtype: torch.dtype, widths: Collection[int], *, kernels: Collection[str] = ()
) -> LayerOps:
    """Return the operations for a device and dtype.

    widths: of rows, gates and half heads, of which the kernels of a CPU take multiples of 16. kernels: names of those
    that a GPU may run.
    """
    if device.type == "cpu":
        fits = dtype in layer_ops.DTYPES and all(width % layer_ops.STEP == 0 for width in widths)
        if fits and layer_ops.serves():
            names = ("norm", "gated", "rotate")
            return LayerOps(layer_ops.norm, layer_ops.gated, layer_ops.rotate, programs=program.serves(), names=names)
        return REFERENCE
    if not kernels:
        return REFERENCE
    from dsbd_cli.ops.triton import layers, products

    found: dict[str, Any] = {
        "norm": layers.norm,
        "gated": layers.gated,
        "rotate": layers.rotate,
        "linear": products.linear,
    }
    if dtype not in layers.DTYPES or max(widths) > layers.WIDEST:
        return REFERENCE
    chosen: dict[str, Any] = {name: _at_once(found[name]) for name in kernels if name != "linear"}
    if "linear" in kernels:
        chosen["linear"] = found["linear"]
    return LayerOps(**{"norm": norm, "gated": gated, "rotate": rotate, **chosen}, names=tuple(sorted(kernels)))


def _at_once(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of a GPU, which is queued when it is called."""

    def call(*arguments: object) -> Any:
        return kernel(*arguments[:-1])

    return call


def norm(
    x: Tensor, more: Tensor | None, weight: Tensor, eps: float, one_more: bool, run: Eager
) -> tuple[Tensor, Tensor]:
    """Do what `norm_twin` does, in torch."""
    return run.compute(lambda: norm_twin(x, more, weight, eps, one_more))


def gated(both: Tensor, gelu: bool, run: Eager) -> Tensor:
    """Do what `gated_twin` does, in torch."""
    return run.compute(lambda: gated_twin(both, gelu))


def rotate(*arguments: Any) -> Tensor:
    """Do what `rotate_twin` does, in torch."""
    run: Eager = arguments[-1]
    return run.compute(lambda: rotate_twin(*arguments[:-1]))


REFERENCE = LayerOps(norm, gated, rotate, names=())
