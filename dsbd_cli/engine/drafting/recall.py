"""Drafts of pairs that are guessed without a model. Where the target judged a node in the iteration before, its own
candidates replace the guess."""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.engine.constraints.legal import DEAD
from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.distribution import pool_distribution
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.forest_buffer import KernelBuffer
from dsbd_cli.engine.core.nodes import LayerNodes
from dsbd_cli.engine.core.pool import DraftRequest
from dsbd_cli.engine.core.sampler import largest
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.base import (
    DraftContext,
    LayerDrafts,
    children,
    extend,
    following,
    goes_on,
    pair_confidence,
)
from dsbd_cli.engine.drafting.paths import PathDrafter
from dsbd_cli.ops.layout import DRAFT

KEPT = 64  # best tokens of each node that are remembered; as many in every batch, so that proposals are the same
ABSENT = torch.iinfo(torch.int64).max


class Recall:
    """Memory of the target's candidates of the last iteration's nodes, for the drafts of the next one: the best tokens
    of the nodes of each row, in order of the nodes' keys.

    Where a layer did not pass, the target has already judged nodes below it. A beam that reaches such a node again has
    a known distribution there, alternatives included. So it is no longer a guess which tokens besides the copies enter
    the best W. A node is found by the key of its path, among the nodes of its own row alone.
    """

    def __init__(self, forest: Forest, candidates: Candidates) -> None:
        """Remember the candidates of an iteration with R rows of N nodes."""
        nodes = forest.flat
        # an absent node may have the path of a real one, but its candidates mean nothing
        self._keys, order = torch.where(nodes.valid, nodes.path, ABSENT).sort(1)
        tokens, logprobs = candidates.best(KEPT)
        more = KEPT - tokens.shape[-1]
        tokens = torch.nn.functional.pad(tokens, (0, more))
        logprobs = torch.nn.functional.pad(logprobs, (0, more), value=NEG_INF)
        self._tokens = _in_order(tokens, order)
        self._logprobs = _in_order(logprobs, order).nan_to_num(nan=NEG_INF, neginf=NEG_INF)

    @property
    def rows(self) -> int:
        """R, the number of rows."""
        return len(self._keys)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows [n] int64, in this order."""
        self._keys, self._tokens, self._logprobs = self._keys[rows], self._tokens[rows], self._logprobs[rows]

    def at(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Look up nodes by keys [R, n]. Return which are known [R, n] bool, and tokens and log-probabilities [R, n,
        KEPT]."""
        index = torch.searchsorted(self._keys, keys.contiguous()).clamp(max=self._keys.shape[1] - 1)
        hit = self._keys.gather(1, index) == keys
        return hit, _in_order(self._tokens, index), _in_order(self._logprobs, index)


def _in_order(values: Tensor, index: Tensor) -> Tensor:
    """Return the values [R, N, C] of the nodes index [R, n]: [R, n, C]."""
    return values.gather(1, index.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


class RecallDrafter(PathDrafter):
    """A drafter of the best K pairs of each layer under a guessed distribution, which subclasses make. For a node that
    the target judged in the iteration before, it is the target's distribution."""

    def __init__(self, *, recalls: bool) -> None:
        """recalls: the target's candidates are kept from one iteration to the next."""
        self._recalls = self.by_kernel = recalls  # both are of a CPU
        self._recall: Recall | None = None

    def add_layer(
        self, context: DraftContext, forest: Forest, layer: int, guess: Tensor, logprob: Tensor
    ) -> LayerNodes | None:
        """Draft the best pairs below one layer, and return their nodes; None where the gate has ended the forest.

        guess: [R, n, p] tokens, best first, NO_TOKEN where there is none. Of equal ones the first counts. logprob: of
        the guesses, [R, n, p] or [p].
        """
        nodes, buffer = forest.layers[layer], context.buffer
        candidates = self._candidates(context, nodes, guess, logprob)
        if isinstance(buffer, KernelBuffer):
            return forest.layers[-1] if extend(context, buffer, forest, layer, candidates) else None
        drafts = best_pairs(context, nodes, layer, candidates)
        return children(context, forest, layer, drafts) if goes_on(context, forest, drafts.confidence) else None

    def _candidates(self, context: DraftContext, nodes: LayerNodes, guess: Tensor, logprob: Tensor) -> Candidates:
        """Return what may follow the nodes of one layer: the guesses, or what is remembered."""
        places, recall = guess.shape[2], self._recall
        if recall is not None and recall.rows != len(guess):
            recall = self._recall = None  # it belongs to a batch that has ended
        real = guess >= 0
        if places > 1:
            earlier = torch.ones(places, places, dtype=torch.bool, device=guess.device).tril(-1)
            real &= ~((guess.unsqueeze(-1) == guess.unsqueeze(-2)) & earlier).any(-1)
        tokens = guess.clamp(min=0)
        if context.legal is not None:
            above = torch.arange(guess.shape[1], device=guess.device).view(1, -1, 1).expand_as(guess).flatten(1)
            real &= (following(context, nodes, above, tokens.flatten(1)) != DEAD).view_as(real)
        logprobs = torch.where(real, logprob, NEG_INF)
        if recall is not None:
            hit, seen, distribution = recall.at(nodes.path)
            hit = (hit & (context.iteration > 0).unsqueeze(1)).unsqueeze(-1)  # at 0 it is the row's last request
            tokens = torch.cat((tokens, seen), 2)
            logprobs = torch.cat((logprobs.masked_fill(hit, NEG_INF), distribution.masked_fill(~hit, NEG_INF)), 2)
        elif self._recalls:  # sums have as many terms whether or not the batch remembers anything
            tokens = torch.nn.functional.pad(tokens, (0, KEPT))
            logprobs = torch.nn.functional.pad(logprobs, (0, KEPT), value=NEG_INF)
        return Candidates(tokens, logprobs, full=False)

    def learn(self, forest: Forest, candidates: Candidates) -> None:
        """Keep the target's candidates of drafted nodes for the next iteration. Roots do not come again."""
        if self._recalls:
            self._recall = Recall(forest, candidates) if forest.depth else None

    def select(self, rows: Tensor) -> None:
        """Keep what is remembered of these rows."""
        if self._recall is not None:
            self._recall.select(rows)

    def release(self) -> None:
        """Forget what is remembered."""
        self._recall = None


def best_pairs(context: DraftContext, nodes: LayerNodes, layer: int, candidates: Candidates) -> LayerDrafts:
    """Return the best pairs below one layer."""
    count, sampler = context.drafts_per_layer, context.sampler
    tokens, logprobs = candidates.tokens, candidates.logprobs
    live = nodes.valid & ~nodes.ends
    if sampler.random:
        pool = pool_distribution(candidates, nodes.weight, live, context.warp)
        keys, weight = pool.log_p, pool.weight
    else:
        keys = weight = torch.where(live, nodes.weight, NEG_INF).unsqueeze(-1) + logprobs
    if not context.drafts_end:
        keys = keys.masked_fill(context.endings.ends(nodes.stop_state, tokens), NEG_INF)
    if sampler.path_noise:
        stream = context.keys[:, layer, DRAFT]
        keys = keys + sampler.noise(DraftRequest(keys, tokens, nodes.path, stream, count, context.warp.greedy_rows))
    index, valid = largest(keys, count)
    return LayerDrafts(
        above=index // tokens.shape[2],
        token=tokens.flatten(1).gather(1, index),
        valid=valid,
        sampled=torch.zeros_like(valid),
        weight=weight.flatten(1).gather(1, index),
        confidence=pair_confidence(context, nodes, weight),
    )
