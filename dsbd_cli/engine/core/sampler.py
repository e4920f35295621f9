"""Samplers: ways to draw pairs from a pool. Target and draft draw with the same sampler.

Letters: R requests, n nodes, C candidates per node, K draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dsbd_cli.engine.core.candidates import CandidateCount
from dsbd_cli.engine.core.distribution import Warp
from dsbd_cli.engine.core.noise import gumbel, path_gumbel
from dsbd_cli.engine.core.pool import DraftRequest, live_draws


class Sampler(ABC):
    """A way to draw pairs: the base class of all samplers.

    Attributes:
        random: pairs are drawn from the warped distribution; otherwise the best by raw score are taken, and drafts are
            deterministic nodes.
        path_noise: the noise is G(x, v), which depends on the pair alone, so that target and draft share it.
    """

    random: bool = True
    path_noise: bool = False

    def candidates(self, num_beams: int, num_eos: int, warp: Warp, vocab_size: int) -> CandidateCount:
        """Return how many candidates per node are enough to find every draw: the support of the warped distribution,
        and room for ties."""
        return warp.candidate_count(vocab_size)

    @abstractmethod
    def noise(self, request: DraftRequest) -> Tensor:
        """Return the noise [R, n, C] that is added to log_q before the largest are taken. A drafter that draws per
        parent, or by stochastic beam search, adds it to its own log-probabilities."""

    def draw(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Draw K pairs. Return their flat index [R, K] in draw order, and which are real [R, K]."""
        return largest(request.log_q + self.noise(request), request.count)


class Best(Sampler):
    """The best pairs by raw score, as in beam search."""

    random = False

    def candidates(self, num_beams: int, num_eos: int, warp: Warp, vocab_size: int) -> CandidateCount:
        """Return as many as transformers reads: W live pairs are left when every end token ranks before them."""
        return CandidateCount(min(vocab_size, max(2, 1 + num_eos) * num_beams))

    def noise(self, request: DraftRequest) -> Tensor:
        """Return zeros, because nothing is random."""
        return torch.zeros_like(request.log_q)


class PathNoise(Sampler):
    """Draws without replacement with G(x, v) (Gumbel top-K, Kool et al. 2019)."""

    path_noise = True

    def noise(self, request: DraftRequest) -> Tensor:
        """Return G(x, v)."""
        return path_gumbel(request.path, request.tokens, request.greedy_rows)


class WithoutReplacement(Sampler):
    """Draws without replacement, with noise of the draft's own that is independent of the target's."""

    def noise(self, request: DraftRequest) -> Tensor:
        """Return Gumbel noise of the request's stream."""
        return gumbel(request.stream.view(-1, 1, 1), entry_index(request.tokens))


class Independent(WithoutReplacement):
    """Independent draws, which may be equal."""

    def draw(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Make K draws, each with its own noise."""
        flat, entries = request.log_q.flatten(1), entry_index(request.tokens).flatten(1)
        keys = request.stream.unsqueeze(1)
        draws = [largest((flat + gumbel(keys + (j << 48), entries)).unsqueeze(1), 1) for j in range(request.count)]
        return torch.cat([index for index, _ in draws], 1), torch.cat([real for _, real in draws], 1)


def largest(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Select the `count` largest keys of the pool. Return their flat index [R, K] in descending order, and which are
    real [R, K]. keys [R, n, C]."""
    draws = live_draws(keys.flatten(1), None, count)
    return draws.index, draws.valid


def entry_index(tokens: Tensor) -> Tensor:
    """Return a number of every pair, unique within its pool and independent of the other candidates: [R, n, C] int64.
    tokens: [R, n, C]."""
    nodes = torch.arange(tokens.shape[1], device=tokens.device).view(1, -1, 1)
    return (nodes << 32) + tokens + 1
