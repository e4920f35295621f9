"""Bytes between two vocabularies: which tokens spell a piece of text, and where a text may be cut. No tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

LONGEST_WORD = 24
SUFFIX_BYTES = 32


class Spelling:
    """The bytes that each token of a vocabulary adds to a text; tokens without bytes (special ones) spell nothing."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self.table = table
        # of two tokens with the same bytes the later one: byte tokens stand first where there is a token for the text
        self._ids = {piece: token for token, piece in enumerate(table) if piece}
        ordered = sorted((piece, token) for token, piece in enumerate(table) if piece)
        self._pieces = [piece for piece, _ in ordered]
        self._tokens = np.array([token for _, token in ordered], dtype=np.int64)
        self._longest = max(map(len, self._ids), default=0)
        pairs = zip(self._pieces, self._pieces[1:], strict=False)
        self._growing = {piece for piece, after in pairs if after != piece and after.startswith(piece)}

    def may_grow(self, token: int) -> bool:
        """Some longer token begins with the bytes of this one."""
        return self.table[token] in self._growing

    def spell(self, tokens: Sequence[int]) -> bytes:
        """Bytes of tokens; ids past the table (padding) have none."""
        table = self.table
        return b"".join([table[token] for token in tokens if token < len(table)])

    def continuing(self, pending: bytes) -> np.ndarray:
        """Tokens that agree with the bytes that must come next: they begin with them, or are a beginning of them."""
        found = [self._between(pending, _after(pending))]
        found += [self._between(pending[:length], pending[:length] + b"\0") for length in range(1, len(pending))]
        return np.concatenate(found)

    def _between(self, first: bytes, end: bytes | None) -> np.ndarray:
        """Tokens whose bytes sort from `first` on and before `end` (None: up to the last)."""
        last = len(self._pieces) if end is None else bisect_left(self._pieces, end)
        return self._tokens[bisect_left(self._pieces, first) : last]

    def segment(self, data: bytes) -> list[int]:
        """The fewest tokens that spell the data; where nothing does, those of its longest part that can be spelled."""
        best: list[tuple[int, int] | None] = [(0, -1)] + [None] * len(data)  # tokens up to here, the last one
        for end in range(1, len(data) + 1):
            for begin in range(max(0, end - self._longest), end):
                before = best[begin]
                token = self._ids.get(data[begin:end])
                if before is None or token is None:
                    continue
                here = best[end]
                if here is None or before[0] + 1 < here[0]:
                    best[end] = (before[0] + 1, token)
        end = max(place for place, found in enumerate(best) if found is not None)
        tokens = []
        while end:
            found = best[end]
            assert found is not None
            tokens.append(found[1])
            end -= len(self.table[found[1]])
        return tokens[::-1]

    def align(self, suffix: bytes, new: bytes, encoded: Sequence[int]) -> list[int]:
        """Tokens that spell `new` after a text that ends in `suffix`, from `encoded`: what the tokenizer makes of
        suffix and new together.

        From the first place on where a token of `encoded` begins at or after the end of the suffix, its tokens are
        taken; up to there, and where it spells something else, the fewest tokens that spell the bytes.
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
    """The first bytes that sort behind everything that begins with the prefix."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def valid_prefix(data: bytes) -> int:
    """Length of the longest beginning that is whole UTF-8 characters, invalid bytes before it passed over: only an
    unfinished character at the very end is cut."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if 0xC2 <= byte <= 0xF4:  # first byte of a character of several
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if back < need else len(data)
        if byte < 0x80:
            break
    return len(data)


def standing_suffix(data: bytes) -> bytes:
    """The last bytes of a text, from the beginning of a character on, with nothing invalid but an unfinished end."""
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
    """A text before its last word, and this word with the white space before it, which may not be finished.

    A tokenizer cuts at white space, so what stands before stays the same tokens whatever follows. A word of more than
    24 bytes is cut, at the beginning of a character.
    """
    place = len(text)
    while place and not text[place - 1 : place].isspace():
        place -= 1
    while place and text[place - 1 : place].isspace():
        place -= 1
    if len(text) - place > LONGEST_WORD:
        place = len(text) - LONGEST_WORD
        while place < len(text) and 0x80 <= text[place] < 0xC0:
            place += 1
    return text[:place], text[place:]
