"""Width policies: how many live beams a layer must yield to pass (Qin et al. 2025, section 3.2; docs/algorithm.md).

A policy looks at P, Q and earlier layers only, never at the layer's own draws or uniforms: otherwise the distribution
would change.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-300


def expected_width(p: Tensor, q: Tensor, drafts: int, threshold: float, min_width: int, num_beams: int) -> Tensor:
    """Return the largest w with Pr[at least w of K drafts accepted] >= t, clamped to W_min .. W. p, q [R, M] float64 ->
    [R] int64.

    drafts: K. threshold: t. alpha_1 = sum min(P, Q); after a rejection P becomes the normalised residual max(0, P - Q).
    An acceptance starts again from P.
    """
    alphas = []
    probs = p
    for _ in range(drafts):
        alphas.append(torch.minimum(probs, q).sum(1))
        rest = (probs - q).clamp(min=0)
        total = rest.sum(1, keepdim=True)
        probs = torch.where(total > TINY, rest / total.clamp(min=TINY), probs)
    accepted = _accepted_probs(torch.stack(alphas, 1).clamp(0, 1), min(num_beams, drafts))
    at_least = accepted.flip(1).cumsum(1).flip(1)  # [R, w]: Pr[at least w accepted]
    width = (at_least >= threshold).to(torch.int64).cumprod(1).sum(1) - 1
    return width.clamp(min_width, num_beams)


def _accepted_probs(alpha: Tensor, most: int) -> Tensor:
    """Return Pr[k of m accepted] for k = 0 .. most (the last entry: `most` or more). alpha [R, m] -> [R, most + 1].

    The state is (accepted so far, rejections since the last acceptance). It takes one draft at a time, and the result
    equals the sum over first acceptances.
    """
    rows, drafts = alpha.shape
    state = torch.zeros(rows, most + 1, drafts + 1, dtype=alpha.dtype, device=alpha.device)
    state[:, 0, 0] = 1.0
    chance = alpha.unsqueeze(1)
    for _ in range(drafts):
        hit = state[:, :, :drafts] * chance
        miss = state[:, :, :drafts] - hit
        after = torch.zeros_like(state)
        after[:, :, 1:] = miss
        gained = hit.sum(2)
        after[:, 1:, 0] = gained[:, :-1]
        after[:, most, 0] += gained[:, -1]
        state = after
    return state.sum(2)
