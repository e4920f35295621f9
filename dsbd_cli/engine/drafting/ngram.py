"""Prompt lookup (the retrieval store of the prompt in RASD, arXiv 2503.03434; prompt lookup decoding). It drafts what
follows an earlier place of the prompt or the output where the last tokens, or tokens much like them, have occurred
before. There is no model: everything is a comparison of tensors. The only state is `Recall`, the target's candidates of
the last iteration's nodes.

The last tokens are compared one by one with those before an earlier place, and some may differ. So a beam that has
changed a token of what it copies still continues after the place it came from. Most beams of a search are like this:
they differ from the best one in a token or two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsbd_cli.config.variants import NGRAM
from dsbd_cli.engine.constraints.legal import DEAD, NO_TOKEN
from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.distribution import pool_distribution
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.nodes import LayerNodes
from dsbd_cli.engine.core.noise import DRAFT
from dsbd_cli.engine.core.pool import DraftRequest
from dsbd_cli.engine.core.sampler import largest
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.base import (
    DraftContext,
    DrafterInputs,
    LayerDrafts,
    children,
    following,
    goes_on,
    pair_confidence,
)
from dsbd_cli.engine.drafting.paths import PathDrafter, Paths, beam_share
from dsbd_cli.engine.drafting.text import contexts, suffix
from dsbd_cli.ops.interface import host_reads

PLACES = 4  # places of the text that each beam follows
# Guessed log-probability of the token at the best place, and how much less it is at each further place
BEST_LOGPROB, LOGPROB_STEP = -0.02, 3.0
KEPT = 64  # best tokens of each node that are remembered; as many in every batch, so that proposals are the same
ABSENT = torch.iinfo(torch.int64).max
LAST_SCORE, DECAY = 1000, 0.85  # score of an equal last token, and the factor for each token before it


def _match_scores(tokens: Tensor, length: Tensor, longest: int) -> Tensor:
    """Score how good it is to continue at every place of the text: [R, W, X] int64, -1 where nothing matches. A place
    scores higher the more the tokens before it are like the last ones. Of equal places the later one scores higher.

    tokens: [R, W, X]; length: [R]. longest: how many of the last tokens are compared.
    """
    width = tokens.shape[2]
    position = torch.arange(width, device=tokens.device)
    last = suffix(tokens, length, longest)
    last = torch.where(last == NO_TOKEN, NO_TOKEN - 1, last)  # equal to no token
    before = torch.nn.functional.pad(tokens, (longest, 0), value=NO_TOKEN)
    worth = torch.zeros_like(tokens)
    for back in range(1, longest + 1):
        at = longest - back
        equal = before[:, :, at : at + width] == last[:, :, at : at + 1]
        worth.add_(equal, alpha=max(1, round(LAST_SCORE * DECAY ** (back - 1))))
    real = (worth > 0) & (position < length.unsqueeze(1)).unsqueeze(1)
    return torch.where(real, worth * width + position, -1)


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


class NgramDrafter(PathDrafter):
    """A drafter of the best K pairs of each layer under a guessed distribution. For a node that the target judged in
    the iteration before, this is the target's distribution. For other nodes nearly all of the mass is on the tokens at
    the places that are most alike.

    Every node follows some places of the text, so that a beam which leaves the copy by a token continues after it.
    """

    def __init__(self, longest: int, *, recalls: bool) -> None:
        """longest: n, last tokens that are compared. recalls: the target's candidates are kept from one iteration to
        the next."""
        self._longest, self._recalls = longest, recalls
        self._recall: Recall | None = None

    def paths(self, context: DraftContext) -> Paths:
        """Return K places of every beam as paths. The best place of each beam weighs more than any beam's second
        place, because a layer passes where every beam continues as drafted. Among places of the same rank those of
        likelier beams weigh more.

        A path that reaches the end of the text continues from its own beginning, because the text has repeated itself
        so far.
        """
        assert context.prompts is not None
        tokens, length = contexts(context.prompts, context.beams)
        rank, start = _match_scores(tokens, length, self._longest).topk(
            min(context.drafts_per_layer, tokens.shape[2]), 2
        )
        rows, beams, places = start.shape
        steps = torch.arange(context.depth, device=tokens.device)
        period = (length.view(-1, 1, 1) - start).clamp(min=1).unsqueeze(-1)
        at = start.unsqueeze(-1) + steps % period  # [R, W, c, D]
        paths = tokens.gather(2, at.flatten(2)).view(rows, beams, places, context.depth)
        weight = (1 + beam_share(context.beams)).unsqueeze(-1) * 0.25 ** torch.arange(places, device=tokens.device)
        real = (rank >= 0) & context.beams.valid.unsqueeze(-1)
        return Paths(
            root=torch.arange(beams, device=tokens.device).view(1, -1, 1).expand_as(start).flatten(1),
            tokens=paths.flatten(1, 2).clamp(min=0),
            length=torch.where(real, context.depth, 0).flatten(1),
            weight=weight.flatten(1),
        )

    def propose(self, context: DraftContext) -> Forest:
        """Draft the K best pairs of every layer."""
        assert context.prompts is not None
        beams = context.beams
        forest = Forest(context.buffer)
        if context.depth == 0:
            return forest
        text, length = contexts(context.prompts, beams)
        rank, start = _match_scores(text, length, self._longest).topk(min(PLACES, text.shape[2]), 2)
        start = torch.where(rank >= 0, start, -1)  # [R, n, p], where the places that each node follows begin
        width, flat = text.shape[2], text.flatten(1)
        for layer in range(context.depth):
            nodes = forest.layers[layer]
            # a place that reaches the end of the text goes on from where it began
            position = start + layer % (length.view(-1, 1, 1) - start).clamp(min=1)
            at = (nodes.root.unsqueeze(-1) * width + position).clamp(min=0).flatten(1)
            guess = torch.where(start >= 0, flat.gather(1, at).view_as(start), NO_TOKEN)
            drafts = self._draws(context, nodes, layer, guess)
            if not goes_on(context, forest, drafts.confidence):
                break
            children(context, forest, layer, drafts)
            # a child follows the place that guessed its token, else the best place
            above = drafts.above.unsqueeze(-1).expand(-1, -1, start.shape[2])
            followed = start.gather(1, above)
            if start.shape[2] > 1:
                guessed = guess.gather(1, above) == drafts.token.unsqueeze(-1)
                followed = followed.gather(2, guessed.to(torch.int8).argmax(-1, keepdim=True))
            start = followed
        return forest

    def _draws(self, context: DraftContext, nodes: LayerNodes, layer: int, guess: Tensor) -> LayerDrafts:
        """Return the best pairs below one layer. guess: [R, n, p] tokens, best first, NO_TOKEN where there is none."""
        count, sampler = context.drafts_per_layer, context.sampler
        places, recall = guess.shape[2], self._recall
        if recall is not None and recall.rows != len(guess):
            recall = self._recall = None  # it belongs to a batch that has ended
        real = guess >= 0
        order = torch.arange(places, device=guess.device)
        if places > 1:
            real &= ~((guess.unsqueeze(-1) == guess.unsqueeze(-2)) & (order.unsqueeze(-1) > order)).any(-1)
        tokens = guess.clamp(min=0)
        if context.legal is not None:
            above = torch.arange(guess.shape[1], device=guess.device).view(1, -1, 1).expand_as(guess).flatten(1)
            real &= (following(context, nodes, above, tokens.flatten(1)) != DEAD).view_as(real)
        logprobs = torch.where(real, BEST_LOGPROB - LOGPROB_STEP * order, NEG_INF)
        if recall is not None:
            hit, seen, distribution = recall.at(nodes.path)
            hit = (hit & (context.iteration > 0).unsqueeze(1)).unsqueeze(-1)  # at 0 it is the row's last request
            tokens = torch.cat((tokens, seen), 2)
            logprobs = torch.cat((logprobs.masked_fill(hit, NEG_INF), distribution.masked_fill(~hit, NEG_INF)), 2)
        elif self._recalls:  # sums have as many terms whether or not the batch remembers anything
            tokens = torch.nn.functional.pad(tokens, (0, KEPT))
            logprobs = torch.nn.functional.pad(logprobs, (0, KEPT), value=NEG_INF)
        room = tokens.shape[2]
        live = nodes.valid & ~nodes.ends
        if sampler.random:
            pool = pool_distribution(Candidates(tokens, logprobs, full=False), nodes.weight, live, context.warp)
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
            above=index // room,
            token=tokens.flatten(1).gather(1, index),
            valid=valid,
            sampled=torch.zeros_like(valid),
            weight=weight.flatten(1).gather(1, index),
            confidence=pair_confidence(context, nodes, weight),
        )

    def learn(self, forest: Forest, candidates: Candidates) -> None:
        """Keep the target's candidates for the next iteration."""
        if self._recalls:
            self._recall = Recall(forest, candidates)

    def select(self, rows: Tensor) -> None:
        """Keep what is remembered of these rows."""
        if self._recall is not None:
            self._recall.select(rows)

    def release(self) -> None:
        """Forget what is remembered."""
        self._recall = None


def make(inputs: DrafterInputs) -> PathDrafter:
    """Make drafter `ngram`. On a GPU it remembers nothing, because a captured iteration reads its inputs at fixed
    addresses."""
    return NgramDrafter(inputs.method.value(NGRAM), recalls=host_reads(inputs.device))
