"""Common random numbers: target and draft draw with the same noise, a pure function of (seed, token path, token).

The target's draws are the largest of log P + G, whatever was drafted. Drafts only decide how many of these draws one
forward yields. So with a fixed width the text does not depend on the draft at all. The draws have the distribution of
drawing w times without replacement (Gumbel top-w, Kool et al. 2019).
"""

from __future__ import annotations

import torch

from dsbd_cli.engine.core.noise import gumbel, path_gumbel
from dsbd_cli.engine.core.sampler import PathNoise, entry_index
from dsbd_cli.engine.verify.base import LayerDraws, LayerView, Rule, complete_afresh, verify_by_keys
from dsbd_cli.ops.layout import COMPLETION


class Coupled(Rule):
    """Rule `coupled`: draws with noise that target and draft share."""

    sampler = PathNoise()

    def verify(self, view: LayerView) -> LayerDraws:
        """Draw the largest of log P + G, then look which draws were drafted."""
        noise = path_gumbel(view.path, view.tokens, view.greedy_rows) if view.noise is None else view.noise
        draws, ends_within_width = verify_by_keys(view, view.log_p + noise, rank_limit=False)
        if not view.dynamic:
            return draws
        key = view.key(COMPLETION).view(-1, 1, 1)
        fresh = view.log_p + gumbel(key, entry_index(view.tokens))
        # rows without noise have ties, which best_first breaks in float32 only
        if view.greedy_rows is not None:
            fresh = torch.where(view.greedy_rows[:, None, None], view.log_p, fresh).to(torch.float32)
        return complete_afresh(view, draws, ends_within_width, fresh)
