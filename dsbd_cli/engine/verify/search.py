"""Deterministic beam search with a draft: the same text as transformers' `generate(num_beams=W, do_sample=False)`, in
fewer target calls."""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.engine.core.pool import DraftRequest
from dsbd_cli.engine.core.probs import Room, Warp
from dsbd_cli.engine.verify.base import LayerDraws, LayerView, Rule, largest, membership

__all__ = ["Search"]


class Search(Rule):
    """Rule `search`: the W best live pairs by raw score; an end finishes when it is among the W best of all pairs."""

    needs_law = False
    path_noise = False
    drafts_end = False
    warps = False
    samples = False
    replacement = False

    def candidates(self, num_beams: int, num_eos: int, warp: Warp, vocab_size: int) -> Room:
        """As many as transformers looks at: W live ones remain when every end token ranks before them."""
        return Room(min(vocab_size, max(2, 1 + num_eos) * num_beams))

    def draft(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """The K best pairs by the draft's own scores."""
        return largest(request.log_q, request.count)

    def noise(self, request: DraftRequest) -> Tensor:
        """None: the best are taken."""
        return torch.zeros_like(request.log_q)

    def verify(self, view: LayerView) -> LayerDraws:
        """Rank the pool; pass if the W best live pairs were drafted."""
        return membership(view, view.log_p, rank_limit=True)[0]
