"""Search for the end of a text under a grammar: a short completion, in tokens.

llguidance says which tokens may follow, not how far the end is. So a completion is searched byte by byte, with a
matcher over a vocabulary of bytes, where a state has few successors. Then it is spelled in tokens of the target. The
search is bounded, and gives the same result for the same text. It may find a longer completion than the shortest, or
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from dsbd_cli.config.grammar_trial import BYTES_END

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Tokens = tuple[int, ...]

MOST_BYTES = 1024  # of a completion
MOST_STATES = 500  # that one search expands
KEPT_PER_LENGTH, TRIED_PER_STATE = 8, 8  # states expanded per length in bytes, and next bytes tried after each
LONGEST_TOKEN = 32  # bytes of a token that a completion is spelled with

# Bytes in the order in which they are tried: closing characters, other punctuation, digits, letters, all others
CLOSING = b"\"}])>'"
PUNCTUATION = bytes(byte for byte in range(32, 127) if not chr(byte).isalnum() and byte not in CLOSING)
ORDER = CLOSING + PUNCTUATION + b"0123456789" + bytes(range(97, 123)) + bytes(range(65, 91))
RANKED = ORDER + bytes(byte for byte in range(256) if byte not in ORDER)


class EndFinder:
    """A search for completions under one grammar."""

    def __init__(self, by_bytes: LLMatcher, tokenizer: LLTokenizer, eos: int) -> None:
        """by_bytes: a matcher over the vocabulary of bytes, at the beginning of a text. eos: an end token of the
        target."""
        self.start, self._tokenizer, self.eos = by_bytes, tokenizer, eos

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._tokenizer.decode_bytes([token])

    def after_token(self, by_bytes: LLMatcher, token: int) -> LLMatcher:
        """Return a copy of the matcher over bytes, advanced by the bytes of a token. It is in error where the grammar
        does not accept them."""
        after = by_bytes.deep_copy()
        after.consume_tokens(list(self.bytes_of(token)))
        return after

    def find(self, matcher: LLMatcher, by_bytes: LLMatcher) -> Tokens | None:
        """Return tokens that complete a text, without an end token; None where none are found. Both matchers have
        consumed the text: `matcher` over the target's vocabulary, `by_bytes` over bytes."""
        rest = None if by_bytes.is_error() else _shortest(by_bytes)
        return None if rest is None else self._spelled(matcher, rest)

    def find_after(self, token: int, known: Tokens, matcher: LLMatcher, by_bytes: LLMatcher) -> Tokens | None:
        """Do the same for the text with one more token. known: tokens that complete the text without that token. In
        most cases the token ends with the beginning of this completion. Then the rest of it is a completion, and
        nothing is searched. Return None where the token may not follow."""
        after, bytes_after = matcher.deep_copy(), self.after_token(by_bytes, token)
        if not after.consume_token(token) or bytes_after.is_error():
            return None
        spelled, completion = self.bytes_of(token), b"".join(map(self.bytes_of, known))
        for size in range(min(len(spelled), len(completion)), -1, -1):
            rest = completion[size:]
            if spelled.endswith(completion[:size]) and bytes_after.validate_tokens([*rest, BYTES_END]) == len(rest) + 1:
                found = self._spelled(after, rest)
                if found is not None:
                    return found
        return self.find(after, bytes_after)

    def _spelled(self, matcher: LLMatcher, rest: bytes) -> Tokens | None:
        """Return tokens of the target that spell these bytes, each allowed by the grammar at its place; None where
        there are none, or where the text is not complete after them."""
        found: list[int] = []
        position = matcher.deep_copy()
        while rest:
            tokens = position.compute_ff_tokens()[:1] or self._beginning(position, rest)
            spelled = self.bytes_of(tokens[0]) if tokens else b""
            if not spelled or not rest.startswith(spelled) or not position.consume_token(tokens[0]):
                return None
            found += tokens
            rest = rest[len(spelled) :]
        return tuple(found) if not position.is_error() and position.is_accepting() else None

    def _beginning(self, position: LLMatcher, rest: bytes) -> list[int]:
        """Return, in a list of one, the longest token that `rest` begins with and that may follow; an empty list where
        there is none."""
        mask = np.frombuffer(position.compute_bitmask(), dtype=np.uint8)
        for size in range(min(len(rest), LONGEST_TOKEN), 0, -1):
            tokens = self._tokenizer.tokenize_bytes(rest[:size])
            if len(tokens) == 1 and mask[tokens[0] >> 3] >> (tokens[0] & 7) & 1:
                return tokens
        return []

    def ends(self, matcher: LLMatcher, tokens: Sequence[int]) -> bool:
        """Return whether the text is complete after these tokens."""
        return matcher.validate_tokens([*tokens, self.eos]) == len(tokens) + 1


def _shortest(start: LLMatcher) -> bytes | None:
    """Return the first completion found, in order of length in bytes; None where the bounds end the search. At most
    KEPT_PER_LENGTH states of each length are expanded. States of one length that allow the same next bytes are expanded
    once."""
    by_length: dict[int, list[tuple[LLMatcher, bytes]]] = {0: [(start, b"")]}
    looked = 0
    for length in range(MOST_BYTES):
        seen: set[bytes] = set()
        for matcher, text in by_length.pop(length, []):
            if matcher.is_accepting():
                return text
            mask = matcher.compute_bitmask()
            if matcher.is_error() or mask in seen or len(seen) == KEPT_PER_LENGTH:
                continue
            seen.add(mask)
            looked += 1
            if looked > MOST_STATES:
                return None
            forced = matcher.compute_ff_bytes()
            next_bytes = (bytes([byte]) for byte in RANKED if mask[byte >> 3] >> (byte & 7) & 1)
            for more in [forced] if forced else islice(next_bytes, TRIED_PER_STATE):
                after = matcher.deep_copy()
                if after.consume_tokens(list(more)):
                    by_length.setdefault(length + len(more), []).append((after, text + more))
        if not by_length:
            return None
    return None
