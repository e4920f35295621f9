"""Operations in plain torch: what they mean, what kernels are compared with, and what serves everywhere else.

Those of a decoder layer round where the kernels round: to the dtype of the model after each step, as transformers'
modules do. Each ends with `run`, which computes at once or writes a program. This module needs no triton.

Letters: m rows (nodes of all requests), H hidden width, I inner width, Q query heads, K kv heads, E head dim, R
requests, n nodes, V vocabulary, o outputs, i inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dsbd_cli.ops.cpu.runtime import EAGER, Eager

# exp of less is subnormal: ten times slower on processors, and no part of a float32 sum with a 1
LOWEST = -80.0


def norm(
    x: Tensor, more: Tensor | None, weight: Tensor, eps: float, unit_offset: bool, run: Eager = EAGER
) -> tuple[Tensor, Tensor]:
    """x (+ more) [..., H] over its root mean square, times weight [H], and the sum that was normalised (empty without
    `more`). unit_offset: times (1 + weight) in float32, as Gemma does."""
    return run.compute(lambda: _norm(x, more, weight, eps, unit_offset))


def _norm(x: Tensor, more: Tensor | None, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor]:
    summed = x.new_empty(0)
    if more is not None:
        x = summed = x + more
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (wide * (1.0 + weight.to(torch.float32))).to(x.dtype), summed
    return weight * wide.to(x.dtype), summed


def gated(both: Tensor, gelu: bool, run: Eager = EAGER) -> Tensor:
    """silu(gate) * up [..., I] of both side by side [..., 2 I]. gelu: its form with tanh in place of silu."""

    def compute() -> Tensor:
        gate, up = both.chunk(2, -1)
        active = nn.functional.gelu(gate, approximate="tanh") if gelu else nn.functional.silu(gate)
        return active * up

    return run.compute(compute)


def rotate(
    both: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
    run: Eager = EAGER,
) -> Tensor:
    """Queries [R, Q, n, E], rotated; keys and values go to their slots.

    both [R, n, (Q + 2 K) E]: queries, keys and values side by side. cos, sin [R or 1, n, E]. slots [R n] int64 into
    keys and values [rows, slots, K, E], whose rows and slots are counted together. query_norm, key_norm [E]: weights of
    norms that the heads go through before (`norm`), both or none.
    """

    def compute() -> Tensor:
        kv_heads, dim = keys.shape[-2:]
        states = both.unflatten(-1, (-1, dim))  # [R, n, Q + 2 K, E]
        heads = states.shape[2] - 2 * kv_heads
        turning, resting = states[:, :, : heads + kv_heads], states[:, :, heads + kv_heads :]
        if query_norm is not None and key_norm is not None:
            parts = (turning[:, :, :heads], query_norm), (turning[:, :, heads:], key_norm)
            turning = torch.cat([_norm(part, None, weight, eps, unit_offset)[0] for part, weight in parts], 2)
        first, second = turning.chunk(2, -1)
        turned = turning * cos.unsqueeze(2) + torch.cat((-second, first), -1) * sin.unsqueeze(2)
        keys.flatten(0, 1).index_copy_(0, slots, turned[:, :, heads:].flatten(0, 1))
        values.flatten(0, 1).index_copy_(0, slots, resting.flatten(0, 1))
        return turned[:, :, :heads].transpose(1, 2).contiguous()

    return run.compute(compute)


@dataclass(slots=True)
class DeviceLinear:
    """A product of plain weights [o, i] and biases [o] on a GPU. parts: outputs of each layer in it."""

    weight: Tensor
    bias: Tensor | None
    parts: list[int]
    product: Callable[..., Tensor] = nn.functional.linear

    @staticmethod
    def of(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> DeviceLinear:
        """Join weights [o, i] of each layer, one below the other, and biases [o] of all, or none."""
        some = [bias for bias in biases if bias is not None]
        return DeviceLinear(torch.cat([*weights]), torch.cat(some) if some else None, [len(one) for one in weights])

    def compute(self, x: Tensor, run: Eager = EAGER) -> Tensor:
        """x [..., i] -> [..., o]."""
        return self.product(x, self.weight, self.bias)


def linear(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> DeviceLinear | None:
    """Layers that are handed the same tensor as one product: weights [o, i] of each, one below the other; biases [o]
    of all, or none. None on a CPU, where they stay as they are, in a mapped file."""
    return None if weights[0].is_cpu else DeviceLinear.of(weights, biases)


class PickedRows:
    """Products, in a dtype, of each row of a batch with rows of its own of a table [V, i]."""

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        self._table, self._dtype = table, dtype

    def take(self, ids: Tensor) -> None:
        """Multiply with the rows ids [R, o] int64 from now on."""
        self._weights = self._table[ids].to(self._dtype)

    def compute(self, x: Tensor) -> Tensor:
        """x [R, n, i] -> [R, n, o]."""
        return x @ self._weights.transpose(1, 2)


def log_total(values: Tensor, highest: Tensor) -> Tensor:
    """log of the sum over v of exp(values[:, v] - highest) of a few rows: [n, 1] float32.

    values [n, V]; highest [n, 1] float32.
    """
    shares = (values - highest).clamp_(min=LOWEST).exp_()
    # a row that stands alone would be summed by all threads in parts, in another order than one of several
    return (shares if len(shares) > 1 else shares.repeat(2, 1)).sum(-1, keepdim=True).log_()[: len(values)]


def move(slab: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots within each row of each plane of a slab [P, R', S, width]: source, target [R, T], all read first.

    On the CPU only those that move, one in fourteen or so: to look at them takes no transfer there.
    """
    base = torch.arange(source.shape[0], device=source.device)[:, None] * slab.shape[2]
    source, target = (base + source).flatten(), (base + target).flatten()
    if slab.device.type == "cpu":
        moving = torch.from_numpy((source != target).numpy().nonzero()[0])
        if not len(moving):
            return
        source, target = source[moving], target[moving]
    flat = slab.flatten(1, 2)  # [P, R' * S, width], a view
    flat.index_copy_(1, target, flat.index_select(1, source))
