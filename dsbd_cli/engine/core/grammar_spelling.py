"""Spelling of bytes in tokens of the target, as few as possible."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Tokens = tuple[int, ...]

LONGEST_TOKEN = 32  # bytes of a token that a text is spelled with
UNSPELLED = 1 << 30
STRING = re.compile(rb'"[^"]*(?:"|$)')
NO_JSON = re.compile(rb"[^]\[{},:\s\w.+-]|[\[{,]\s*[,:]|\{\s*[^}\s]|,\s*[]}]")  # outside of strings
NESTED = re.compile(rb"\[\s*\[")
PUNCTUATION = re.compile(rb"\W*[]}\"]\W*")


class Speller:
    """A vocabulary by the bytes of its tokens."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        """vocab_size: V of the target, which may be less than that of the tokenizer."""
        self._tokenizer = tokenizer
        self._token_of: dict[bytes, int] = {}
        for token in range(min(vocab_size, tokenizer.vocab_size)):
            if not tokenizer.is_special_token(token):
                self._token_of.setdefault(tokenizer.decode_bytes([token]), token)
        self._token_of.pop(b"", None)
        self._longest = min(LONGEST_TOKEN, max(map(len, self._token_of), default=0))

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._tokenizer.decode_bytes([token])

    def spell(self, text: bytes) -> Tokens | None:
        """Return the fewest tokens whose bytes are the text; None where there are none. Of several ways take the one
        with the longest tokens first."""
        counts, sizes = self._ways(text)
        if counts[0] >= UNSPELLED:
            return None
        tokens, place = list[int](), 0
        while place < len(text):
            tokens.append(self._token_of[text[place : place + sizes[place]]])
            place += sizes[place]
        return tuple(tokens)

    def least(self, text: str) -> int:
        """Return the fewest tokens that spell the text. A text that has no spelling counts one for each byte."""
        count = self._ways(text.encode())[0][0]
        return count if count < UNSPELLED else len(text.encode())

    def most(self, text: str | bytes) -> int:
        """Return how many tokens spell the text, or its end from any byte on, at most."""
        counts, _ = self._ways(text.encode() if isinstance(text, str) else text)
        return max(count if count < UNSPELLED else len(text) for count in counts)

    def _ways(self, text: bytes) -> tuple[list[int], list[int]]:
        """Return for each place in the text, and its end, the fewest tokens from there on, UNSPELLED or more where
        there are none, and the size of the first one in bytes."""
        counts, sizes = [0] * (len(text) + 1), [0] * (len(text) + 1)
        for place in range(len(text) - 1, -1, -1):
            counts[place] = UNSPELLED
            for size in range(min(self._longest, len(text) - place), 0, -1):
                count = counts[place + size] + 1
                if count < counts[place] and text[place : place + size] in self._token_of:
                    counts[place], sizes[place] = count, size
        return counts, sizes

    def opened(self, *, nested: bool) -> int:
        """Return the number of containers that one token opens in a JSON text, at most. nested: whether arrays may
        stand directly in arrays."""
        return self._opened[nested]

    @cached_property
    def _opened(self) -> tuple[int, int]:
        """Numbers of containers without and with arrays in arrays."""
        opening = [text for text in self._token_of if b"[" in text or b"{" in text]
        flat = [text for text in opening if not NESTED.search(text)]
        return max(map(_opened, flat), default=0), max(map(_opened, opening), default=0)

    @cached_property
    def realigned(self) -> int:
        """Number of tokens that spell what is left of a token of closing brackets and quotes, at most."""
        closing = [text for text in self._token_of if len(text) > 1 and PUNCTUATION.fullmatch(text)]
        return max((self.most(text[1:]) for text in closing), default=0)


def _opened(text: bytes) -> int:
    """Return the number of containers that a token leaves open, if JSON may hold it. It begins outside of a string, or
    in one."""
    most = 0
    for part in (text, text.partition(b'"')[2]):
        outside = STRING.sub(b"", part)
        if not NO_JSON.search(outside):
            levels, least = 0, 0
            for byte in outside:
                levels += (byte in b"[{") - (byte in b"]}")
                least = min(least, levels)
            most = max(most, levels - least)
    return most
