"""Fuzzy speculative decoding (Holsman et al. 2025, arXiv 2502.20704): a layer is taken as drafted wherever the
distributions of target and draft are close enough, whatever the drafted tokens. Lossy on purpose.

Letters: R requests, W beams, V vocabulary, M = W*V pairs of the pool.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.variants import (
    DIVERGENCE,
    FALLBACK,
    FUZZY_LAW,
    FUZZY_THRESHOLD,
    DivergenceName,
    FallbackName,
    FuzzyLawName,
)
from dsbd_cli.engine.core.candidates import CandidateCount
from dsbd_cli.engine.core.distribution import Warp, log_normalise
from dsbd_cli.engine.core.sampler import WithoutReplacement
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.verify.base import DraftedLayer, LayerView
from dsbd_cli.engine.verify.rejection import Rejection, at_pool, draft_log_probs_at


class WholeVocabulary(WithoutReplacement):
    """A sampler that draws without replacement and has every token as a candidate."""

    def candidates(self, num_beams: int, num_eos: int, warp: Warp, vocab_size: int) -> CandidateCount:
        """Ask for every token of the vocabulary, because divergences are computed over all of them."""
        return CandidateCount(vocab_size)


class Fuzzy(Rejection):
    """Rule `fuzzy`: where Div(P, Q) <= T the first w drafts with live parents are taken. Elsewhere fallback `target`
    draws from P itself and the layer stops, as published; fallback `strict` tests the drafts as rule `rejection` does.

    With one beam and one draft per layer it keeps the leading run of accepted positions, then takes one token from p.
    The divergence is over the whole vocabulary, so both distributions are kept whole: W*V float64 numbers per layer and
    row.
    """

    sampler = WholeVocabulary()

    def __init__(
        self,
        threshold: float,
        divergence: DivergenceName = DIVERGENCE.default,
        fallback: FallbackName = FALLBACK.default,
        distribution: FuzzyLawName = FUZZY_LAW.default,
    ) -> None:
        """threshold: T. divergence: of target p and draft q: kl (KL(q || p)), kl_reversed, js, js_authors or tv.
        distribution: which distributions are compared, raw (without temperature and cuts) or warped."""
        self.threshold, self.divergence, self.distribution = threshold, divergence, distribution
        self.joins = fallback == "strict"

    @classmethod
    def of(cls, method: MethodConfig) -> Self:
        """Make the rule with the settings of a method."""
        threshold = method.value(FUZZY_THRESHOLD)
        assert threshold is not None, "checked by MethodConfig"
        return cls(threshold, method.value(DIVERGENCE), method.value(FALLBACK), method.value(FUZZY_LAW))

    def decide(self, view: LayerView, drafts: DraftedLayer) -> tuple[Tensor, Tensor]:
        """Return the rows [R] bool whose drafts are tested, and the rows whose drafts are taken untested."""
        close = layer_divergence(view, drafts, self.divergence, self.distribution) <= self.threshold
        return ~close & self.joins, close


def layer_divergence(view: LayerView, drafts: DraftedLayer, name: DivergenceName, distribution: FuzzyLawName) -> Tensor:
    """Return Div of the two pool distributions over the live parents: [R] float64.

    Raw distributions have no temperature and no cuts: they are exp(running weight) times the model's own probabilities,
    the target's weights with p and the draft's with q. With one beam the weights do not matter.
    """
    assert drafts.distribution is not None
    if distribution == "warped":
        p, q = view.log_p, draft_log_probs_at(view, drafts)
    else:
        p, q = (
            view.logprob,
            at_pool(view, drafts, drafts.above_weight.unsqueeze(-1) + drafts.distribution.candidates.logprobs),
        )
    p = torch.where(view.valid.unsqueeze(-1), p, NEG_INF).flatten(1).to(torch.float64)
    return divergence(log_normalise(p).exp(), log_normalise(q).exp(), name)


def divergence(p: Tensor, q: Tensor, name: str) -> Tensor:
    """Return Div(p, q) >= 0 of target p and draft q over the last dimension: float64 [..., M] -> [...]. Natural logs;
    inf where a support is missing.

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
