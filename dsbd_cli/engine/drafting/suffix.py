"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975) for beams: drafts of what followed the last tokens of a beam
before, in its own text, in the rows of the run that are done, and in a file. There is no model.

Each beam has *streams*: continuations of earlier places whose last tokens are like its own. A stream weighs more the
more tokens are alike, and streams that agree add up. A node's tokens have the shares of the streams that led to it,
times a trust that grows with each token that was alike. From this follow the chances that layers pass, by which the
planner chooses how many layers and nodes are drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_cli.config.variants import INDEX, OWN_TEXT, SUFFIX_CACHE, SUFFIX_CONTEXT, SUFFIX_MEMORY, SUFFIX_SOURCE
from dsbd_cli.engine.constraints.legal import NO_TOKEN
from dsbd_cli.engine.core.beams import Beams
from dsbd_cli.engine.core.candidates import Candidates
from dsbd_cli.engine.core.forest import Forest
from dsbd_cli.engine.core.report import SOURCE_BITS
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.drafting.base import DraftContext, DrafterInputs
from dsbd_cli.engine.drafting.index import Ids, read_index, replace_index
from dsbd_cli.engine.drafting.paths import Paths, beam_share
from dsbd_cli.engine.drafting.recall import RecallDrafter
from dsbd_cli.engine.drafting.text import PromptTable, host_contexts
from dsbd_cli.engine.planning.planner import Prospects
from dsbd_cli.errors import UsageError
from dsbd_cli.ops.interface import TextIndex, host_reads
from dsbd_cli.ops.select import MOST_MATCH, SKIPPED, SUFFIX_BYTES, foresee, look_back, suffix_index, suffix_missing

OWN_STREAMS, INDEX_STREAMS = 4, 12  # streams of a beam, from its own text and from each index
COMPARED = 16  # last tokens that are compared in a beam's own text
PER_BEAM = (1, 2, 3, 4, 6, 8)  # numbers of nodes of a layer for each beam
DOUBT, DOUBT_DECAY = 0.9, 0.8  # share of tokens that are not as expected, and its factor for each token that is alike
MEGABYTE = 2**20
MOST_IDS = 2**31  # of any tokenizer


@dataclass(slots=True)
class Streams:
    """Continuations of the beams, on the host.

    Attributes:
        tokens: [R, W, p, D] int32, NO_TOKEN behind their end. weight: [R, W, p] float32, 0: absent. match: [R, W]
            float32, tokens that the best context is alike in. source: [p] int64, number of each stream's source.
    """

    tokens: NDArray[np.int32]
    weight: NDArray[np.float32]
    match: NDArray[np.float32]
    source: NDArray[np.int64]

    def of_first(self, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens (int64), logs of the weights, match and source of the first beams on a device. A row begins
        with one beam."""
        tokens = torch.from_numpy(self.tokens[:, :count]).to(device, torch.int64)
        weight, match = (torch.from_numpy(value[:, :count]).to(device) for value in (self.weight, self.match))
        return tokens, weight.log(), match, torch.from_numpy(self.source).to(device)


class SuffixDrafter(RecallDrafter):
    """A drafter of what followed in `sources`: the beam's own text (None), and indexes."""

    on_host = True

    def __init__(
        self,
        sources: dict[str, TextIndex | None],
        longest: int,
        *,
        history: TextIndex | None = None,
        keep: Callable[[Ids], None] | None = None,
        vocabulary: int = MOST_IDS,
        recalls: bool = True,
    ) -> None:
        """sources: by name. longest: most tokens that are compared. history: the index that gets the rows that are
        done; None: they are not kept. keep: writes it for the next run. vocabulary: rows with other ids are left out.
        recalls: of RecallDrafter."""
        super().__init__(recalls=recalls)
        first, *others = (f"suffix:{name}" for name in sources)
        self.sources = (first, "", *others) if others else ()
        self._indexes, self._longest, self._history = list(sources.values()), longest, history
        self._keep, self._last_prompt = keep, tuple[int, ...]()
        self._ahead: Streams | None = None
        self._vocabulary, self._is_new = vocabulary, False
        self.learns_rows = history is not None

    def streams(self, beams: Beams, prompts: PromptTable | None, depth: int) -> Streams:
        """Look the beams up in all sources, on the host. depth: tokens of a stream."""
        assert prompts is not None
        texts, lengths = host_contexts(prompts, beams)
        (rows, width), valid = beams.valid.shape, beams.valid.cpu().numpy()
        compared, last = min(self._longest, COMPARED), texts[:, -min(self._longest, MOST_MATCH) - SKIPPED :]
        parts = [
            look_back(texts, lengths, compared, OWN_STREAMS, depth)
            if index is None
            else index.look_up(last, self._longest, INDEX_STREAMS, depth)
            for index in self._indexes
        ]
        source = np.repeat(np.arange(len(parts)), [part[1].shape[1] for part in parts])
        tokens, weight = (np.concatenate([part[i] for part in parts], 1) for i in (0, 1))
        match = np.stack([part[2] for part in parts]).max(0).reshape(rows, width)
        tokens, weight = tokens.reshape(rows, width, len(source), depth), weight.reshape(rows, width, len(source))
        return Streams(tokens, weight * valid[..., None], match, source)

    def prospects(self, beams: Beams, prompts: PromptTable | None, depth: int, count: int) -> Prospects:
        """Return the chances that all beams of a row go on as their streams do. A layer has as many nodes for each of
        them. The streams are kept for the forest that follows."""
        self._ahead = streams = self.streams(beams, prompts, depth)
        (rows, width), most = streams.match.shape, max(1, count // beams.valid.shape[1])
        per_beam = [*(number for number in PER_BEAM if number < most), most]
        chances = foresee(
            streams.tokens.reshape(rows * width, -1, depth),
            streams.weight.reshape(rows * width, -1),
            (DOUBT * DOUBT_DECAY**streams.match).ravel().astype(np.float32),
            DOUBT_DECAY,
            np.array(per_beam, np.int32),
        ).reshape(rows, width, len(per_beam), -1)
        valid = beams.valid.cpu().numpy()
        begun = beams.length.cpu().numpy() > 0  # at first one beam has to become several
        chances = np.where(valid[..., None, None], chances, 1.0).prod(1) * (begun | (width == 1))[:, None, None]
        return Prospects([number * width for number in per_beam], chances[valid.any(1)].astype(np.float64))

    def _streams(self, context: DraftContext) -> Streams:
        """Return the streams that `prospects` found for these beams, or look them up."""
        streams, self._ahead = self._ahead, None
        if streams is None or streams.tokens.shape[3] < context.depth:
            streams = self.streams(context.beams, context.prompts, context.depth)
        return streams

    def paths(self, context: DraftContext) -> Paths:
        """Return the streams as paths. A beam's share of the mass is divided by the streams' weights."""
        beams, device = context.beams.token.shape[1], context.beams.token.device
        stream_tokens, weight, _, _ = self._streams(context).of_first(beams, device)
        rows, beams, count = weight.shape
        share = torch.softmax(weight, 2).nan_to_num(nan=0.0)
        length = (stream_tokens >= 0).to(torch.int64).cumprod(-1).sum(-1)
        return Paths(
            root=torch.arange(beams, device=device).view(1, -1, 1).expand(rows, beams, count).flatten(1),
            tokens=stream_tokens.clamp(min=0).flatten(1, 2),
            length=torch.where(share > 0, length, 0).flatten(1),
            weight=((beam_share(context.beams) + 1e-3).unsqueeze(2) * share).flatten(1),
        )

    def propose(self, context: DraftContext) -> Forest:
        """Draft the K best pairs of every layer."""
        forest = Forest(context.buffer)
        if context.depth == 0:
            return forest
        streams = self._streams(context)
        # weight: [R, n, p], of the streams that led to each node
        stream_tokens, weight, match, source = streams.of_first(forest.num_beams, context.beams.token.device)
        count, doubt = weight.shape[2], DOUBT * DOUBT_DECAY**match  # doubt: [R, n]
        for layer in range(context.depth):
            nodes = forest.layers[layer]
            at = nodes.root.unsqueeze(-1).expand(-1, -1, count)
            guess = stream_tokens[..., layer].gather(1, at)
            guess = torch.where(weight > NEG_INF, guess, NO_TOKEN)
            equal = (guess.unsqueeze(-1) == guess.unsqueeze(-2)) & (guess >= 0).unsqueeze(-1)
            shares = torch.where(equal, weight.unsqueeze(-2), NEG_INF).logsumexp(-1)
            total = torch.where(guess >= 0, weight, NEG_INF).logsumexp(-1, keepdim=True)
            logprob = shares - total + torch.log1p(-doubt).unsqueeze(-1)
            made = self.add_layer(context, forest, layer, guess, logprob)
            if made is None:
                break
            # a child goes on in the streams that guessed its token, else in all of its parent
            parent = made.parent - forest.offset(layer)
            above = parent.unsqueeze(-1).expand(-1, -1, count)
            parents, guessed = weight.gather(1, above), guess.gather(1, above) == made.token.unsqueeze(-1)
            known = guessed.any(-1)
            weight = torch.where(guessed | ~known.unsqueeze(-1), parents, NEG_INF)
            doubt = doubt.gather(1, parent) * torch.where(known, DOUBT_DECAY, 1.0)
            if self.sources:
                best = source[weight.argmax(-1)]
                made.drafter_id.copy_(torch.where(known & (best > 0), 1 << (SOURCE_BITS * best), 0))
        return forest

    def learn(self, forest: Forest, candidates: Candidates) -> None:
        """Keep the target's candidates for the next iteration, and forget the streams of this one."""
        self._ahead = None
        super().learn(forest, candidates)

    def release(self) -> None:
        """Forget what is remembered."""
        self._ahead = None
        super().release()

    def row_ended(self, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Insert a row that is done into the history: its prompt from where it differs from the one before, with the
        best text, and each other text from where it differs from better ones. Behind COMPARED tokens of what is left
        out, because a context has to be found."""
        texts = [text for text in texts if text]
        if self._history is None or not texts:
            return
        known = _common(prompt, [self._last_prompt])
        documents = [[*prompt[max(0, known - COMPARED) :], *texts[0]]]
        head = prompt[-COMPARED:]
        for rank, text in enumerate(texts[1:], 1):
            known = len(head) + _common(text, texts[:rank])
            documents.append([*head, *text][max(0, known - COMPARED) :])
        self._last_prompt = tuple(prompt)
        for document in documents:
            if max(document) < self._vocabulary:
                self._history.insert(np.array(document, np.int32))
                self._is_new = True

    def run_ended(self) -> None:
        """Write the history for the next run. Raises UsageError where it cannot be written."""
        if self._keep is not None and self._history is not None and self._is_new:
            self._keep(self._history.tokens)
            self._is_new = False


def _common(tokens: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens a sequence shares with another one, at most."""
    longest = 0
    for other in others:
        common = 0
        while common < min(len(tokens), len(other)) and tokens[common] == other[common]:
            common += 1
        longest = max(longest, common)
    return longest


def make(inputs: DrafterInputs) -> SuffixDrafter:
    """Make drafter `suffix`. Raises UsageError where a file cannot be used.

    Rows that are done are looked up only under rules whose text does not depend on drafts.
    """
    method = inputs.method
    source, cache = method.value(SUFFIX_SOURCE), method.value(SUFFIX_CACHE)
    check_suffix_index()
    sources: dict[str, TextIndex | None] = {"own": None}
    history, keep = None, None
    if source != OWN_TEXT and method.exactness == "same-text":
        sources["rows"] = history = suffix_index(method.value(SUFFIX_MEMORY) * MEGABYTE // SUFFIX_BYTES)
    if cache is not None:
        assert history is not None, "checked by MethodConfig"
        path, token_bytes = Path(cache), inputs.codec.token_bytes()
        if path.exists():
            history.insert(read_index(path, token_bytes)[:-1])
        keep = partial(replace_index, path, token_bytes)
    if source not in (None, OWN_TEXT):
        sources["file"] = loaded(Path(str(source)), inputs)
    return SuffixDrafter(
        sources,
        method.value(SUFFIX_CONTEXT),
        history=history,
        keep=keep,
        vocabulary=len(inputs.codec.token_bytes()),
        recalls=host_reads(inputs.device),
    )


def make_retrieval(inputs: DrafterInputs) -> SuffixDrafter:
    """Make drafter `retrieval`, which looks up in a file alone. Raises UsageError where it cannot be used."""
    index = inputs.method.value(INDEX)
    assert index is not None, "checked by MethodConfig"
    check_suffix_index()
    return SuffixDrafter({"file": loaded(Path(index), inputs)}, MOST_MATCH, recalls=host_reads(inputs.device))


def loaded(path: Path, inputs: DrafterInputs) -> TextIndex:
    """Return the index of a file. Raises UsageError where it cannot be used."""
    tokens = read_index(path, inputs.codec.token_bytes())
    index = suffix_index(2 * len(tokens))
    index.insert(tokens[:-1])
    return index


def check_suffix_index() -> None:
    """Check that this machine can have a suffix index. Raises UsageError."""
    missing = suffix_missing()
    if missing is not None:
        raise UsageError(f"drafter suffix cannot be used: {missing}")
