"""Spelling of bytes in tokens of the target, as few as possible."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

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

    def spell(self, position: LLMatcher, text: bytes) -> Tokens | None:
        """Return tokens whose bytes are the text, each of which the grammar allows at its place; None where there are
        none, or where the text is not complete after them. position: a matcher over this vocabulary, used up here.

        Where the grammar forces bytes, llguidance allows only the tokens that the tokenizer makes of them. Elsewhere
        the fewest tokens for the rest of the text are taken, the longest first.
        """
        tokens, start, sizes = list[int](), 0, self._ways(text)[1]
        while start < len(text):
            forced = position.compute_ff_tokens()[:1]
            token = forced[0] if forced else self._token_of.get(text[start : start + sizes[start]])
            spelled = b"" if token is None else self.bytes_of(token)
            if token is None or not text.startswith(spelled, start) or not position.consume_token(token):
                return None
            tokens.append(token)
            start += len(spelled)
        return tuple(tokens) if not position.is_error() and position.is_accepting() else None

    def least(self, text: str) -> int:
        """Return the number of tokens that the tokenizer makes of the text."""
        return len(self._tokenizer.tokenize_str(text))

    def most(self, text: str | bytes) -> int:
        """Return how many tokens spell the text, or its end from any byte on, at most. A byte without a token counts
        as one."""
        content = text.encode() if isinstance(text, str) else text
        counts, _ = self._ways(content)
        longest = max(count if count < UNSPELLED else len(content) for count in counts)
        return max(longest, len(self._tokenizer.tokenize_bytes(content)))

    def _ways(self, text: bytes) -> tuple[list[int], list[int]]:
        """Return for each place in the text, and its end, the fewest tokens from there on, UNSPELLED or more where
        there are none, and the size of the first one in bytes."""
        counts, sizes = [0] * (len(text) + 1), [0] * (len(text) + 1)
        for start in range(len(text) - 1, -1, -1):
            counts[start] = UNSPELLED
            for size in range(min(self._longest, len(text) - start), 0, -1):
                count = counts[start + size] + 1
                if count < counts[start] and text[start : start + size] in self._token_of:
                    counts[start], sizes[start] = count, size
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
