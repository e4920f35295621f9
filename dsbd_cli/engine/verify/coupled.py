"""Common random numbers: target and draft draw with the same noise, a pure function of (seed, token path, token).

The target's draws are the largest of log P + G, whatever was drafted; drafts only decide how many of them one forward
yields. So with a
fixed width the text does not depend on the draft at all. Law: drawing w times without replacement (Gumbel top-w, Kool
et al. 2019).
"""

from __future__ import annotations

from torch import Tensor

from dsbd_cli.engine.core.noise import COMPLETION, gumbel, path_gumbel
from dsbd_cli.engine.core.pool import DraftRequest
from dsbd_cli.engine.verify.base import LayerDraws, LayerView, complete_afresh, entry_index, largest, membership

__all__ = ["Coupled"]


class Coupled:
    """Rule `coupled`."""

    needs_law = False
    path_noise = True
    drafts_end = False
    warps = True
    samples = True
    replacement = False

    def candidates(self, num_beams: int, num_eos: int, max_top_k: int, vocab_size: int) -> int:
        """The warped support: top_k pairs of one beam at most, with room for ties."""
        return min(vocab_size, max_top_k + 8) if max_top_k else vocab_size

    def draft(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """The largest of log Q + G, with the target's own noise."""
        return largest(request.log_q + self.noise(request), request.count)

    def noise(self, request: DraftRequest) -> Tensor:
        """G(x, v)."""
        return path_gumbel(request.path, request.tokens)

    def verify(self, view: LayerView) -> LayerDraws:
        """Draw by log P + G, then ask which draws were drafted."""
        noise = path_gumbel(view.path, view.tokens) if view.noise is None else view.noise
        draws, early = membership(view, view.log_p + noise, rank_limit=False)
        if not view.dynamic:
            return draws
        key = view.key(COMPLETION).view(-1, 1, 1)
        return complete_afresh(view, draws, early, view.log_p + gumbel(key, entry_index(view.tokens)))
