"""Conversion between two vocabularies by bytes: which tokens spell a piece of text, and where a text may be cut. No
tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

LONGEST_WORD = 24
SUFFIX_BYTES = 32


class Spelling:
    """The bytes that each token of a vocabulary adds to a text. Tokens without bytes (special ones) spell nothing."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self.table = table
        # of two tokens with the same bytes the later one: a byte token comes before a token of text with its bytes
        self._ids = {piece: token for token, piece in enumerate(table) if piece}
        ordered = sorted((piece, token) for token, piece in enumerate(table) if piece)
        self._pieces = [piece for piece, _ in ordered]
        self._tokens = np.array([token for _, token in ordered], dtype=np.int64)
        self._longest = max(map(len, self._ids), default=0)
        pairs = zip(self._pieces, self._pieces[1:], strict=False)
        self._growing = {piece for piece, after in pairs if after != piece and after.startswith(piece)}

    def may_grow(self, token: int) -> bool:
        """Return whether some longer token begins with the bytes of this one."""
        return self.table[token] in self._growing

    def spell(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens. Ids past the table (padding) have none."""
        table = self.table
        return b"".join([table[token] for token in tokens if token < len(table)])

    def continuing(self, pending: bytes) -> np.ndarray:
        """Return the tokens that agree with the bytes that must come next: they begin with them, or are a beginning of
        them."""
        ranges = [self._between(pending, _after(pending))]
        ranges += [self._between(pending[:length], pending[:length] + b"\0") for length in range(1, len(pending))]
        return np.concatenate(ranges)

    def _between(self, first: bytes, end: bytes | None) -> np.ndarray:
        """Return the tokens whose bytes sort from `first` on and before `end` (None: up to the last)."""
        last = len(self._pieces) if end is None else bisect_left(self._pieces, end)
        return self._tokens[bisect_left(self._pieces, first) : last]

    def segment(self, data: bytes) -> list[int]:
        """Return the fewest tokens that spell the data. Where no tokens do, return those of its longest beginning that
        can be spelled."""
        best: list[tuple[int, int] | None] = [(0, -1)] + [None] * len(data)  # how many tokens up to here, and the last
        for end in range(1, len(data) + 1):
            for begin in range(max(0, end - self._longest), end):
                before = best[begin]
                token = self._ids.get(data[begin:end])
                if before is None or token is None:
                    continue
                here = best[end]
                if here is None or before[0] + 1 < here[0]:
                    best[end] = (before[0] + 1, token)
        end = max(end_at for end_at, cost in enumerate(best) if cost is not None)
        tokens = []
        while end:
            cost = best[end]
            assert cost is not None
            tokens.append(cost[1])
            end -= len(self.table[cost[1]])
        return tokens[::-1]

    def align(self, suffix: bytes, new: bytes, encoded: Sequence[int]) -> list[int]:
        """Return tokens that spell `new` after a text that ends in `suffix`. encoded: the tokens that the tokenizer
        makes of suffix and new together.

        From the first token of `encoded` on that begins at or after the end of the suffix, its tokens are taken. The
        bytes before that token become the fewest tokens that spell them. So do all bytes of `new` where `encoded`
        spells something else.
        """
        tokens = [token for token in encoded if token < len(self.table) and self.table[token]]
        spelled = self.spell(tokens)
        whole = suffix + new
        # some tokenizers begin every text with a space
        shift = 1 if spelled[:1] == b" " and not whole.startswith(spelled) else 0
        if not whole.startswith(spelled[shift:]):
            return self.segment(new)
        ends = list(accumulate(len(self.table[token]) for token in tokens))
        border = len(suffix) + shift
        for number, end in enumerate(ends):
            if end >= border:
                return [*self.segment(whole[len(suffix) : end - shift]), *tokens[number + 1 :]]
        return self.segment(new)


def _after(prefix: bytes) -> bytes | None:
    """Return the first bytes that sort after everything that begins with the prefix; None where nothing does."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def valid_prefix(data: bytes) -> int:
    """Return the length of the longest beginning that is whole UTF-8 characters. Only an unfinished character at the
    very end is cut off; invalid bytes before it are passed over."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if 0xC2 <= byte <= 0xF4:  # first byte of a character of several
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if back < need else len(data)
        if byte < 0x80:
            break
    return len(data)


def standing_suffix(data: bytes) -> bytes:
    """Return the last bytes of a text. They begin at the beginning of a character, and hold nothing invalid but an
    unfinished end."""
    suffix = data[-SUFFIX_BYTES:]
    while suffix and 0x80 <= suffix[0] < 0xC0:
        suffix = suffix[1:]
    whole = valid_prefix(suffix)
    try:
        suffix[:whole].decode()
    except UnicodeDecodeError as error:
        return standing_suffix(suffix[error.end :])
    return suffix


def split_word(text: bytes) -> tuple[bytes, bytes]:
    """Split a text into what comes before its last word, and this word with the white space before it. The word may be
    unfinished.

    A tokenizer cuts at white space, so the first part has the same tokens whatever follows. A word of more than 24
    bytes is cut, at the beginning of a character.
    """
    end = len(text)
    while end and not text[end - 1 : end].isspace():
        end -= 1
    while end and text[end - 1 : end].isspace():
        end -= 1
    if len(text) - end > LONGEST_WORD:
        end = len(text) - LONGEST_WORD
        while end < len(text) and 0x80 <= text[end] < 0xC0:
            end += 1
    return text[:end], text[end:]
