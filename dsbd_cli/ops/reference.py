"""Norms, gated activation and rotation, which stand between the products of a decoder layer, as tensor functions.

They are the specification of the kernels that stand in for them, in triton (layers.py) and in numba. Both round where
these round: to the dtype of the model after each step, as transformers' modules do. This module needs no triton.

Letters: m rows (nodes of all requests), H hidden width, I inner width, Q query heads, K kv heads, E head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gated_twin", "norm_twin", "rotate_fits", "rotate_twin"]


def norm_twin(x: Tensor, more: Tensor | None, weight: Tensor, eps: float, one_more: bool) -> tuple[Tensor, Tensor]:
    """x (+ more) [..., H] over its root mean square, times weight [H], and the sum that was normalised (empty without
    `more`). one_more: times (1 + weight) in float32, as Gemma does."""
    summed = x.new_empty(0)
    if more is not None:
        x = summed = x + more
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if one_more:
        return (wide * (1.0 + weight.to(torch.float32))).to(x.dtype), summed
    return weight * wide.to(x.dtype), summed


def gated_twin(both: Tensor, gelu: bool) -> Tensor:
    """silu(gate) * up [..., I] of both side by side [..., 2 I]. gelu: its form with tanh in place of silu."""
    gate, up = both.chunk(2, -1)
    active = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    return active * up


def rotate_twin(
    both: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    one_more: bool = False,
) -> Tensor:
    """Queries [R, Q, n, E], rotated; keys and values go to their slots.

    both [R, n, (Q + 2 K) E]: queries, keys and values side by side. cos, sin [R or 1, n, E]. slots [R n] int64 into
    keys and values [rows, slots, K, E], whose rows and slots are counted together. query_norm, key_norm [E]: weights of
    norms that the heads go through before (`norm_twin`), both or none.
    """
    kv_heads, dim = keys.shape[-2:]
    states = both.unflatten(-1, (-1, dim))  # [R, n, Q + 2 K, E]
    heads = states.shape[2] - 2 * kv_heads
    turning, resting = states[:, :, : heads + kv_heads], states[:, :, heads + kv_heads :]
    if query_norm is not None and key_norm is not None:
        parts = (turning[:, :, :heads], query_norm), (turning[:, :, heads:], key_norm)
        turning = torch.cat([norm_twin(part, None, weight, eps, one_more)[0] for part, weight in parts], 2)
    first, second = turning.chunk(2, -1)
    turned = turning * cos.unsqueeze(2) + torch.cat((-second, first), -1) * sin.unsqueeze(2)
    keys.flatten(0, 1).index_copy_(0, slots, turned[:, :, heads:].flatten(0, 1))
    values.flatten(0, 1).index_copy_(0, slots, resting.flatten(0, 1))
    return turned[:, :, :heads].transpose(1, 2).contiguous()


def rotate_fits(both: Tensor, cos: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether a kernel takes these tensors: one dtype, whole heads rotated, planes without gaps."""
    same = all(one.dtype == both.dtype for one in (cos, keys, values))
    whole = cos.shape[-1] == keys.shape[-1] and keys.shape == values.shape and keys.shape[-1] % 2 == 0
    return same and whole and keys.is_contiguous() and values.is_contiguous()
