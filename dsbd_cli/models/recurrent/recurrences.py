"""Recurrences of transformers' mixers (mixers.py), over the memory of a layer, and what they take besides.

Letters as in models/recurrent/states.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsbd_cli.models.recurrent.linear_state import LinearState


def mamba2(state: LinearState, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None) -> Tensor:
    """Return the output [R, n, H, P] of a Mamba-2 scan in float32. x: [R, n, H, P]. dt: [R, n, H], step sizes. a: [H],
    negative. b, c: [R, n, G, N]. skip: [H], factors of x in the output."""
    dt, skip = dt.float(), None if skip is None else skip.float()
    return state.attend(c.float(), b.float(), x.float(), a.float() * dt, dt, skip).float().contiguous()


def delta(
    state: LinearState, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, unit: bool
) -> Tensor:
    """Return the output [R, n, H, P] of the gated delta rule in the dtype of the query. query, key: [R, n, G, N].
    value: [R, n, H, P]. g: [R, n, H] or [R, n, H, N], log-decays. beta: [R, n, H]. unit: queries and keys are divided
    by their norms."""
    dtype, precision = query.dtype, state.cache.precision
    query, key = query.float(), key.float()
    if unit:
        query, key = _unit(query, precision), _unit(key, precision)
    query = query * query.shape[-1] ** -0.5
    return state.correct(query, key, value.float(), g.float(), beta.float()).to(dtype).contiguous()


def softplus(x: Tensor, precision: torch.dtype) -> Tensor:
    """Return softplus, computed in the states' precision, because in float32 torch computes the last few numbers of a
    tensor with another exp."""
    return nn.functional.softplus(x.to(precision)).to(x.dtype)


def _unit(x: Tensor, precision: torch.dtype) -> Tensor:
    wide = x.to(precision)
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
