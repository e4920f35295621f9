"""Random layers for the reference tests: the same target rows, draft rows and drafts for the tensors and for the scalar
oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.engine.core.candidates import Candidates, top_candidates
from dsbd_cli.engine.core.distribution import PoolDistribution, Warp, pool_distribution
from dsbd_cli.engine.core.nodes import DraftDistribution
from dsbd_cli.engine.core.noise import seed_key, stream_key, stream_keys
from dsbd_cli.engine.core.pool import DraftRequest
from dsbd_cli.engine.drafting.base import record_distribution
from dsbd_cli.engine.verify.base import DraftedLayer, LayerView, Rule
from dsbd_cli.ops.layout import DRAFT
from tests.oracles.rules import Pair

WARPED = ((1.0, 0, 1.0, 0.0), (0.6, 4, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (0.8, 6, 0.9, 0.05))


def warp_of(rows: int, settings: tuple[float, int, float, float], scope: str) -> Warp:
    """The same settings in every row."""
    temperature, top_k, top_p, min_p = settings
    return Warp(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        scope=scope,
        max_top_k=top_k,
        all_top_k=top_k > 0,
        even_top_k=True,
        any_top_p=top_p < 1,
        any_min_p=min_p > 0,
        greedy=torch.zeros(rows, dtype=torch.bool),
    )


@dataclass(slots=True)
class Layer:
    """R random layers with W live beams among K nodes, K drafts below them, vocabulary V."""

    view: LayerView
    target: PoolDistribution
    draft: PoolDistribution
    draft_candidates: Candidates
    parents: Tensor

    def distribution(self, row: int) -> dict[Pair, float]:
        """P as the oracle takes it: (live beam, token) -> mass."""
        return _as_dict(self.view.log_p[row], self.view.tokens[row])

    def draft_distribution(self, row: int) -> dict[Pair, float]:
        """Q with its parents named as beams: live ones by their beam index, dead ones by 100 + node."""
        beam_of = {int(node): beam for beam, node in enumerate(self.view.node[row]) if self.view.valid[row, beam]}
        distribution = _as_dict(self.draft.log_p[row], self.draft_candidates.tokens[row])
        offset = int(self.parents[0])
        return {(beam_of.get(node + offset, 100 + node), token): mass for (node, token), mass in distribution.items()}

    def drafts(self, row: int) -> list[Pair]:
        """Drafted pairs in order, named as in draft_distribution."""
        beam_of = {int(node): beam for beam, node in enumerate(self.view.node[row]) if self.view.valid[row, beam]}
        drafted, offset = self.view.drafts, int(self.parents[0])
        assert drafted is not None
        return [
            (beam_of.get(int(parent), 100 + int(parent) - offset), int(token))
            for parent, token, valid in zip(drafted.parent[row], drafted.token[row], drafted.valid[row], strict=True)
            if valid
        ]

    def ends(self) -> set[int]:
        """Tokens that end a sequence."""
        return set(self.view.tokens[self.view.ends].tolist())


def _as_dict(log_distribution: Tensor, tokens: Tensor) -> dict[Pair, float]:
    pairs = log_distribution.to(torch.float64).exp()
    return {
        (node, int(tokens[node, column])): float(pairs[node, column])
        for node in range(pairs.shape[0])
        for column in range(pairs.shape[1])
        if pairs[node, column] > 0
    }


def random_layer(
    rule: Rule,
    rows: int,
    seed: int,
    settings: tuple[float, int, float, float],
    closeness: float = 0.7,
    scope: str = "pool",
) -> Layer:
    """Layer 1 of a forest with W=3, K=5, V=7: parents are nodes 3..7, the live beams are some of them."""
    beams, drafts, vocabulary, ends = 3, 5, 7, (6,)
    generator = torch.Generator().manual_seed(seed)
    target_logits = torch.randn(rows, drafts, vocabulary, generator=generator) * 1.5
    noise = torch.randn(rows, drafts, vocabulary, generator=generator) * 1.5
    draft_logits = closeness * target_logits + (1 - closeness) * noise
    target_logits[torch.rand(rows, drafts, vocabulary, generator=generator) < 0.15] = -torch.inf
    target_logits[..., 0] = target_logits[..., 0].clamp(min=-1)
    warp = warp_of(rows, settings, scope)
    local = torch.rand(rows, drafts, generator=generator).argsort(1)[:, :beams]
    valid = torch.rand(rows, beams, generator=generator) < 0.85
    valid[:, 0] = True
    weight = torch.randn(rows, drafts, generator=generator)
    size = rule.sampler.candidates(beams, 1, warp, vocabulary)
    own = top_candidates(target_logits, size).at(local)
    draft_candidates = top_candidates(draft_logits, size)
    live_weight = torch.randn(rows, beams, generator=generator)
    target = pool_distribution(own, live_weight, valid, warp)
    draft = pool_distribution(draft_candidates, weight, torch.ones(rows, drafts, dtype=torch.bool), warp)
    key = seed_key(torch.arange(rows) + seed * 100_003)
    iteration = torch.full((rows,), 3)
    index, real = rule.sampler.draw(
        DraftRequest(
            log_q=draft.log_p,
            tokens=draft_candidates.tokens,
            path=key.unsqueeze(1).expand(-1, drafts),
            stream=stream_key(key, iteration, 1, DRAFT),
            count=drafts,
        )
    )
    distribution: DraftDistribution = record_distribution(draft_candidates, draft.log_p, index, real)
    drafted = DraftedLayer(
        parent=index // draft_candidates.tokens.shape[2] + beams,
        token=draft_candidates.tokens.flatten(1).gather(1, index),
        valid=real,
        sampled=real,
        offset=beams + drafts,
        distribution=distribution,
        above_weight=weight,
    )
    view = LayerView(
        log_p=target.log_p,
        tokens=own.tokens,
        ends=torch.isin(own.tokens, torch.tensor(ends)),
        logprob=live_weight.unsqueeze(-1) + own.logprobs,
        node=local + beams,
        valid=valid,
        path=seed_key(torch.randint(0, 1 << 40, (rows, beams), generator=generator)),
        full=own.full,
        drafts=drafted,
        width=torch.randint(1, beams + 1, (rows,), generator=generator),
        dynamic=True,
        keys=stream_keys(key, iteration, 2)[:, 1],
        num_beams=beams,
    )
    return Layer(view, target, draft, draft_candidates, torch.arange(beams, beams + drafts))
