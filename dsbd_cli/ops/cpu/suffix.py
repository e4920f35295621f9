"""An index of texts that grows while it is searched: which tokens followed contexts like the end of a text. It needs no
sort: an insertion takes a constant time per token, a look-up at most HITS steps per length of context.

The kernels are in kernels/suffix.py; numba, which compiles them, is imported when they are needed.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1  # between documents, and where a text or a path has no token
LENGTHS = (12, 5, 2)  # of contexts that are looked up, the longest first
HITS = 32  # last positions of a context that count
SKIPPED = 2  # last tokens of a text that may differ
LAST_SCORE, DECAY = 1000, 0.85  # likeness of an equal last token, and the factor for each token before it
MOST_MATCH = 20  # tokens; a context that is alike in more is no better
POSITIONS = 2**31  # positions are counted modulo this number
BYTES = 4 * (1 + 2 * len(LENGTHS))  # of memory per token
FIRST_ROOM, MOST_ROOM = 2**14, 2**30  # tokens

Ids = NDArray[np.int32]
Reals = NDArray[np.float32]


class Continuations(NamedTuple):
    """Paths that followed contexts like the ends of B texts.

    Attributes:
        tokens: [B, S, D] int32, distinct paths, NO_TOKEN behind their end. weight: [B, S] float32, above 0, which
            doubles with each token of the context that is alike and adds up over equal paths; 0: there is no path.
        match: [B] float32, tokens that the best context is alike in; 0: none.
    """

    tokens: Ids
    weight: Reals
    match: Reals


class SuffixIndex:
    """Texts as a ring of tokens, in which the last ones replace the first. Its memory doubles until it has the most
    tokens, a power of two. held: tokens in it, with those between documents."""

    def __init__(self, room: int) -> None:
        """room: tokens that it may hold; it holds the largest power of two of them, and FIRST_ROOM at least."""
        self._most = 1 << max(FIRST_ROOM.bit_length(), min(room, MOST_ROOM).bit_length()) - 1
        self._allocate(min(FIRST_ROOM, self._most))

    def _allocate(self, room: int) -> None:
        self._tokens = np.full(room, NO_TOKEN, np.int32)
        self._before, self._heads = (np.zeros((len(LENGTHS), room), np.int32) for _ in range(2))
        self._end = self.held = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are taken."""
        return self._tokens.nbytes + self._before.nbytes + self._heads.nbytes

    @property
    def tokens(self) -> Ids:
        """All tokens that are held, the oldest first, with NO_TOKEN behind each document: a copy."""
        at = np.arange(self._end - self.held, self._end) & (len(self._tokens) - 1)
        return self._tokens[at]

    def insert(self, documents: Ids) -> None:
        """Insert a document, or several with NO_TOKEN between them. Of more tokens than fit the last ones are kept."""
        documents = np.array(documents[max(0, len(documents) + 1 - self._most) :], np.int32)
        if self.held + len(documents) + 1 > len(self._tokens) and len(self._tokens) < self._most:
            held, room = self.tokens[:-1], len(self._tokens)
            while room < min(self._most, len(held) + len(documents) + 2):
                room *= 2
            self._allocate(room)
            if len(held):
                self.insert(held)
        self._end = compiled().insert(self._tokens, self._before, self._heads, self._end, documents)
        self.held = min(len(self._tokens), self.held + len(documents) + 1)

    def look_up(self, texts: Ids, longest: int, paths: int, depth: int) -> Continuations:
        """Return what followed. texts: [B, X], last tokens of each text, NO_TOKEN before the first. longest: tokens
        that are compared at most. paths, depth: S and D."""
        rows = len(texts)
        # one path more than is returned, to compare with
        tokens, weight = np.empty((rows, paths + 1, depth), np.int32), np.empty((rows, paths + 1), np.float32)
        match = np.empty(rows, np.float32)
        arrays = self._tokens, self._before, self._heads, self._end, np.ascontiguousarray(texts, np.int32)
        compiled().look_up(*arrays, longest, tokens, weight, match)
        return Continuations(tokens[:, :-1], weight[:, :-1], match)


def look_back(texts: Ids, lengths: Ids, longest: int, paths: int, depth: int) -> Continuations:
    """Return what followed in each text itself, behind places whose last tokens are most like its end, the likest
    first. Some of these tokens may differ. texts: [B, X], the last lengths [B] tokens of each line. longest: tokens
    that are compared."""
    rows = len(texts)
    scores = np.array([max(1, round(LAST_SCORE * DECAY**back)) for back in range(longest)], np.int32)
    tokens, weight = np.empty((rows, paths, depth), np.int32), np.empty((rows, paths), np.float32)
    match = np.empty(rows, np.float32)
    compiled().look_back(texts, lengths, scores, tokens, weight, match)
    return Continuations(tokens, weight, match)


def foresee(tokens: Ids, weight: Reals, doubt: Reals, decay: float, counts: Ids) -> Reals:
    """Return the chance that the next tokens of each text are drafted down to each depth: [B, C, D] float32.

    tokens: [B, p, D], streams of each text, NO_TOKEN behind their end. weight: [B, p], 0 where there is none. doubt:
    [B], share of tokens that are no stream's; it is multiplied by decay with each token that a path agrees in. counts:
    [C], of the best nodes that a layer has.
    """
    chances = np.zeros((len(tokens), len(counts), tokens.shape[2]), np.float32)
    for b, chance in enumerate(chances):
        compiled().foresee(tokens[b], weight[b], doubt[b], decay, counts, chance)
    return chances


@functools.cache
def compiled() -> ModuleType:
    """Return the kernels, made at the first call."""
    return importlib.import_module(f"{__package__}.kernels.suffix")
