"""A draft with a tokenizer of its own. It continues the text in its own tokens, and the new text is then spelled in the
target's.

Timor et al. 2025 (arXiv 2502.05202) verify re-encoded text as plain tokens; MambaByte (arXiv 2401.13660) drafts bytes
with subwords. Here the draft runs a beam search below every live beam, on the beam's text up to its last word. The
first tokens of the draft must agree with this word. So a beam that ends inside a word, or inside a character, is
continued properly. The nodes are deterministic.

Text is handled on the host: an iteration reads the beams once, and the draft's best tokens once per draft forward.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.base import DraftContext, Drafter, DrafterInputs, LayerDrafts, children
from dsbd_cli.engine.drafting.bridge.bridged import BridgedDraft
from dsbd_cli.engine.drafting.bridge.prefix_tree import PrefixCache
from dsbd_cli.engine.drafting.bridge.token_bytes import Spelling, split_word, standing_suffix, valid_prefix
from dsbd_cli.engine.drafting.logits import DraftLogits, lm_head_ids
from dsbd_cli.errors import UsageError

MOST_PER_LAYER, SPARE = 2, 4  # an iteration takes MOST_PER_LAYER * D + SPARE draft forwards at most
UNSURE = 1e3  # taken off the score of a token that further text may make longer, so that it ranks behind all others


@dataclass(slots=True)
class _Prompt:
    """Text of one row's prompt.

    Attributes:
        base: draft tokens up to its last special token. text: the bytes after that.
        known: draft tokens of the texts that were encoded in the last iteration, by text.
    """

    base: list[int] = field(default_factory=list)
    text: bytes = b""
    known: dict[bytes, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Draft:
    """A text that the draft continues below a beam.

    Attributes:
        ids: draft tokens from the start of the text. pending: bytes that its next tokens must spell first.
        suffix: end of the beam's text. new_bytes: bytes that follow it.
        tokens: target tokens that spell `new_bytes`.
        score: running weight of the beam plus the log-probability of the draft's tokens.
    """

    beam: int
    ids: list[int]
    pending: bytes
    suffix: bytes
    score: float
    new_bytes: bytes = b""
    tokens: list[int] = field(default_factory=list)


# Target tokens below a beam, keyed by (beam, token, ...), with the score of the likeliest draft text that has them.
_Found = dict[tuple[int, ...], float]


class BridgeDrafter(Drafter):
    """A drafter that drafts through text. It tells rows apart by their place; iteration 0 means that a place has a new
    request."""

    on_host = True
    needs_text = True

    def __init__(self, draft: BridgedDraft, vocab_size: int) -> None:
        """vocab_size: V of the target."""
        self._model = draft.model
        self._target, self._draft = draft.target, draft.codec
        self._target_spelling = Spelling(draft.target.token_bytes()[:vocab_size])
        self._draft_spelling = Spelling(draft.codec.token_bytes())
        self._markers = draft.markers
        self._ends = frozenset(draft.codec.eos_ids)
        self._first_tokens = [token for token in draft.codec.encode("") if token not in self._ends]
        self._cache = PrefixCache(draft.model)
        self._prompts: list[_Prompt] = []

    def release(self) -> None:
        """Forget all rows and free their memory."""
        self._prompts = []
        self._cache.release()

    def propose(self, context: DraftContext) -> Forest:
        """Draft D layers of the K nodes that the draft finds likeliest. The search in a row ends when K / 2 of its
        texts have more than D target tokens."""
        before = self._cache.forwards
        live = self._texts(context)
        proposals: list[_Found] = [{} for _ in live]
        width, depth = context.drafts_per_layer, context.depth
        finished = [0] * len(live)
        for _ in range(MOST_PER_LAYER * depth + SPARE):
            live = [drafts if 2 * count < width else [] for drafts, count in zip(live, finished, strict=True)]
            if not any(live):
                break
            live = self._grow(live, proposals, finished, width, depth)
        self.calls = self._cache.forwards - before
        return _forest(context, proposals)

    def _admit(self, context: DraftContext, iterations: Sequence[int]) -> set[int]:
        """Take the prompts of new rows, and return which rows are new. Where rows were dropped from the batch the
        others have moved, so all of them begin again."""
        if len(iterations) != len(self._prompts):
            self.release()
            self._prompts = [_Prompt() for _ in iterations]
            new = list(range(len(iterations)))
        else:
            new = [row for row, iteration in enumerate(iterations) if iteration == 0]
        if not new:
            return set()
        assert context.prompts is not None
        tokens, lengths = context.prompts.tokens[new].tolist(), context.prompts.length[new].tolist()
        for row, prompt, length in zip(new, tokens, lengths, strict=True):
            self._prompts[row] = self._prompt(prompt[:length])
        return set(new)

    def _prompt(self, prompt: Sequence[int]) -> _Prompt:
        base, piece = list(self._first_tokens), b""
        for token in prompt:
            data = self._target_spelling.spell((token,))
            if data:
                piece += data
            elif (marker := self._markers.get(token)) is not None and (piece or marker not in self._first_tokens):
                base += [*self._encode(piece), marker]
                piece = b""
        return _Prompt(base, piece)

    def _texts(self, context: DraftContext) -> list[list[_Draft]]:
        """Return the texts that the draft continues below each live beam, by rows. This is the iteration's first host
        read."""
        beams = context.beams
        wide = [number.unsqueeze(1).expand_as(beams.token) for number in (context.iteration, beams.length)]
        parts = (wide[0], beams.valid, beams.weight, wide[1])
        packed = torch.cat((torch.stack([part.double() for part in parts], 2), beams.history.double()), 2).tolist()
        new = self._admit(context, [int(row[0][0]) for row in packed])
        room = (self._model.max_positions or 1 << 62) - MOST_PER_LAYER * context.depth - SPARE
        texts = []
        for number, (row, prompt) in enumerate(zip(packed, self._prompts, strict=True)):
            drafts, used = list[_Draft](), dict[bytes, list[int]]()
            for beam, (_, valid, weight, length, *history) in enumerate(row):
                if not valid or weight == NEG_INF:
                    continue
                text = prompt.text + self._target_spelling.spell([int(token) for token in history[: int(length)]])
                before, pending = split_word(text)
                if not before and not prompt.base:  # a draft needs one token to begin with
                    cut = valid_prefix(text)
                    before, pending = text[:cut], text[cut:]
                used[before] = self._ids(prompt, before)
                ids = _fitted(prompt.base + used[before], room)
                if ids:
                    drafts.append(_Draft(beam, ids, pending, standing_suffix(text), weight))
            prompt.known = used
            texts.append(drafts)
            if number in new:  # what a prompt has in common with the row's last one is not read again
                self._cache.reset(number, drafts[0].ids if drafts else ())
        return texts

    def _ids(self, prompt: _Prompt, text: bytes) -> list[int]:
        """Return the draft tokens of a text that ends with a word. Those of its longest known beginning are reused."""
        start = max((prefix for prefix in prompt.known if text.startswith(prefix)), key=len, default=b"")
        return prompt.known.get(start, []) + self._encode(text[len(start) :])

    def _encode(self, data: bytes) -> list[int]:
        if not data:
            return []
        text = data.decode(errors="ignore")
        [ids] = self._draft.encode_pieces([text])
        if text.startswith(" ") and self._draft_spelling.spell(ids) != data:
            [other] = self._draft.encode_pieces([text[1:]])  # tokenizers that begin every text with a space
            ids = other if self._draft_spelling.spell(other) == data else ids
        return ids

    def _grow(
        self, live: list[list[_Draft]], proposals: list[_Found], finished: list[int], width: int, depth: int
    ) -> list[list[_Draft]]:
        """Extend every text by one draft token, and return the best `width` of each row. Texts of more than D target
        tokens are left out, and are counted in `finished`."""
        choices = self._choices(live, width)
        grown = [self._best(*row, width, depth) for row in zip(live, choices, proposals, strict=True)]
        self._spell([draft for row in grown for draft, _ in row])
        for row, proposed in zip(grown, proposals, strict=True):
            for draft, parent in row:
                sure = len(draft.tokens) - bool(draft.tokens and self._target_spelling.may_grow(draft.tokens[-1]))
                _keep_best(proposed, draft, _common(parent.tokens, draft.tokens), parent.score, depth)
                _keep_best(proposed, draft, draft.tokens[:sure], draft.score, depth)
                _keep_best(proposed, draft, draft.tokens, draft.score - UNSURE, depth)
        going = [[draft for draft, _ in row if len(draft.tokens) <= depth] for row in grown]
        for number, (row, left) in enumerate(zip(grown, going, strict=True)):
            finished[number] += len(row) - len(left)
        return going

    def _best(
        self, drafts: list[_Draft], choices: list[list[tuple[int, float]]], proposed: _Found, width: int, depth: int
    ) -> list[tuple[_Draft, _Draft]]:
        """Return the likeliest `width` texts of one draft token more, each with the text that it grew from. Of those
        with the same bytes the likeliest is kept. Where the draft ends a text, its target tokens are taken as they
        are."""
        pool: dict[tuple[int, bytes, bytes], tuple[float, _Draft, int]] = {}
        for draft, options in zip(drafts, choices, strict=True):
            for token, logprob in options:
                score, data = draft.score + logprob, self._draft_spelling.spell((token,))
                if token in self._ends and not draft.pending:
                    _keep_best(proposed, draft, draft.tokens, score, depth)
                if token in self._ends or not data:
                    continue
                key = (draft.beam, draft.pending[len(data) :], draft.new_bytes + data[len(draft.pending) :])
                if key not in pool or pool[key][0] < score:
                    pool[key] = (score, draft, token)
        best = heapq.nlargest(width, pool.items(), key=lambda item: item[1][0])
        return [
            (_Draft(beam, [*parent.ids, token], pending, parent.suffix, score, new_bytes), parent)
            for (beam, pending, new_bytes), (score, parent, token) in best
        ]

    def _choices(self, live: list[list[_Draft]], width: int) -> list[list[list[tuple[int, float]]]]:
        """Return the draft's likeliest tokens after each text that agree with its pending bytes, and their
        log-probabilities given that they agree. It takes one host read."""
        for draft in (draft for drafts in live for draft in drafts):
            self._extend_while_certain(draft)
        logits = self._cache.run([[draft.ids for draft in drafts] for drafts in live])
        size = self._model.vocab_size
        logits = DraftLogits.of(logits, lm_head_ids(self._model, size), size).wide().to(torch.float32)
        logits = self._agreeing(logits, live)
        scores = torch.log_softmax(logits, -1).nan_to_num(nan=NEG_INF, neginf=NEG_INF)
        best, tokens = torch.topk(scores, min(width, scores.shape[-1]), dim=-1)
        table = torch.stack((tokens.double(), best.double()), -1).tolist()
        return [
            [[(int(token), score) for token, score in line if score > NEG_INF] for line in row[: len(drafts)]]
            for row, drafts in zip(table, live, strict=True)
        ]

    def _extend_while_certain(self, draft: _Draft) -> None:
        """Extend a text while only one token agrees with its pending bytes. A draft of bytes would spend a forward on
        each of them."""
        while draft.pending and len(continuing := self._draft_spelling.continuing(draft.pending)) == 1:
            token = int(continuing[0])
            data = self._draft_spelling.table[token]
            draft.ids.append(token)
            draft.pending, draft.new_bytes = draft.pending[len(data) :], draft.new_bytes + data[len(draft.pending) :]

    def _agreeing(self, logits: Tensor, live: list[list[_Draft]]) -> Tensor:
        """Return the draft's logits [R, m, V] with -inf where a token contradicts the pending bytes."""
        if not any(draft.pending for drafts in live for draft in drafts):
            return logits
        allowed = np.ones(logits.shape, dtype=bool)
        for r, drafts in enumerate(live):
            for i, draft in enumerate(drafts):
                if draft.pending:
                    tokens = self._draft_spelling.continuing(draft.pending)
                    allowed[r, i] = False
                    allowed[r, i, tokens[tokens < logits.shape[-1]]] = True
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), NEG_INF)

    def _spell(self, drafts: list[_Draft]) -> None:
        """Set the target tokens of every text."""
        drafts = [draft for draft in drafts if draft.new_bytes]
        if not drafts:
            return
        cuts = [max(0, valid_prefix(draft.suffix + draft.new_bytes) - len(draft.suffix)) for draft in drafts]
        new = [draft.new_bytes[:cut] for draft, cut in zip(drafts, cuts, strict=True)]
        texts = [
            (draft.suffix + new_bytes).decode(errors="replace") for draft, new_bytes in zip(drafts, new, strict=True)
        ]
        encoded = self._target.encode_pieces(texts)
        for draft, new_bytes, ids in zip(drafts, new, encoded, strict=True):
            # the beginning of a character is no text, but a target with byte tokens takes it
            rest = self._target_spelling.segment(draft.new_bytes[len(new_bytes) :])
            draft.tokens = self._target_spelling.align(draft.suffix, new_bytes, ids) + rest


def _common(first: list[int], second: list[int]) -> list[int]:
    same = 0
    for left, other in zip(first, second, strict=False):
        if left != other:
            break
        same += 1
    return second[:same]


def _keep_best(proposed: _Found, draft: _Draft, tokens: list[int], score: float, depth: int) -> None:
    """Add tokens below a beam, `depth` at most, each with the best score it has had."""
    for length in range(1, min(len(tokens), depth) + 1):
        key = (draft.beam, *tokens[:length])
        proposed[key] = max(score, proposed.get(key, NEG_INF))


def _fitted(ids: list[int], room: int) -> list[int]:
    """Return the last ids that fit. They are cut in large steps, so that what the cache holds stays of use."""
    if len(ids) <= room:
        return ids
    step = max(1, room // 4)
    return ids[-(-(len(ids) - room) // step) * step :]


def _forest(context: DraftContext, proposals: list[_Found]) -> Forest:
    """Return a forest of the K best nodes of every layer whose parents are nodes."""
    beams, count, depth = context.beams, context.drafts_per_layer, context.depth
    shape = (depth, len(proposals), count)
    above, token = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    valid, weight = np.zeros(shape, dtype=bool), np.full(shape, NEG_INF, dtype=np.float32)
    for row, proposed in enumerate(proposals):
        parents: dict[tuple[int, ...], int] = {(beam,): beam for beam in range(beams.token.shape[1])}
        for layer in range(depth):
            fitting = [key for key in proposed if len(key) == layer + 2 and key[:-1] in parents]
            best = heapq.nlargest(count, fitting, key=proposed.__getitem__)
            for index, key in enumerate(best):
                above[layer, row, index], token[layer, row, index] = parents[key[:-1]], key[-1]
                valid[layer, row, index], weight[layer, row, index] = True, proposed[key]
            parents = {key: index for index, key in enumerate(best)}
    device = beams.token.device
    tensors = [torch.from_numpy(item).to(device) for item in (above, token, valid, weight)]
    forest = Forest(context.buffer)
    for layer in range(depth):
        over, tokens, real, score = (item[layer] for item in tensors)
        nodes = forest.layers[-1]
        real = real & (nodes.valid & ~nodes.ends).gather(1, over)
        drafts = LayerDrafts(over, tokens, real, torch.zeros_like(real), score)
        made = children(context, forest, layer, drafts)
        if not context.drafts_end:
            made.valid = made.valid & ~made.ends
    return forest


def make(inputs: DrafterInputs) -> BridgeDrafter:
    """Make drafter `bridge`. Raises UsageError where the draft is not one with tokens of its own."""
    if not isinstance(inputs.model, BridgedDraft):
        raise UsageError(f"drafter {inputs.method.drafter} takes a BridgedDraft")
    return BridgeDrafter(inputs.model, inputs.vocab_size)
