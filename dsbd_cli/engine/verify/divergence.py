"""Divergences of two distributions, for the fuzzy rule. p is the target, q the draft."""

from __future__ import annotations

import torch
from torch import Tensor


def divergence(p: Tensor, q: Tensor, name: str) -> Tensor:
    """Return Div(p, q) >= 0 over the last dimension: float64 [..., M] -> [...]. Natural logs; inf where a support is
    missing.

    `kl` is KL(q || p), `kl_reversed` KL(p || q), `js` the textbook Jensen-Shannon divergence (at most ln 2), `tv` total
    variation (at most 1). `js_authors` is what the authors' code computes under the name js, 0.5 KL(m || q) + 0.5 KL(m
    || p) with m = (p + q) / 2, which has no bound. Source: Holsman et al. 2025, arXiv 2502.20704.
    """
    if name == "kl":
        distance = _kl(q, p)
    elif name == "kl_reversed":
        distance = _kl(p, q)
    elif name == "tv":
        distance = 0.5 * (p - q).abs().sum(-1)
    else:
        mean = 0.5 * (p + q)
        distance = 0.5 * (_kl(p, mean) + _kl(q, mean)) if name == "js" else 0.5 * (_kl(mean, p) + _kl(mean, q))
    return distance.clamp(min=0)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """Return KL(a || b)."""
    return torch.where(a > 0, a * (torch.log(a) - torch.log(b)), 0.0).sum(-1)
