"""Deterministic beam search with a draft: the same text as transformers' `generate(num_beams=W, do_sample=False)`, in
fewer target calls."""

from __future__ import annotations

from dsbd_cli.engine.core.sampler import Best
from dsbd_cli.engine.verify.base import LayerDraws, LayerView, Rule, verify_by_keys


class Search(Rule):
    """Rule `search`: the W best live pairs (beam, token) of the target's pool go on, by raw score.

    A drafted token is accepted if it is one of them. If all of them were drafted, the layer passes, and the layer below
    is verified. If not, the missing ones are taken from the pool, and the iteration ends with them. An ending pair
    finishes where it is among the W best of all pairs.
    """

    sampler = Best()

    def verify(self, view: LayerView) -> LayerDraws:
        """Rank the pool. The layer passes if the W best live pairs were drafted."""
        return verify_by_keys(view, view.log_p, rank_limit=True)[0]
