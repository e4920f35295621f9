"""The way to the end of a text under a grammar: a short completion, in tokens.

llguidance says which tokens may follow, not how far the end is. So a completion is searched byte by byte, with a
matcher over a vocabulary of bytes, where a state has few successors, and is then spelled in tokens of the target. The
search is bounded and always gives the same for the same text; it may find a longer completion than the shortest, or
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
MOST_STATES = 500  # that one search looks at
KEPT_PER_LENGTH, TRIED_PER_STATE = 8, 8
LONGEST_TOKEN = 32  # bytes of a token that a completion is spelled with

# Bytes in the order in which they are tried: what closes, other punctuation, digits, letters, and all others
CLOSING = b"\"}])>'"
PUNCTUATION = bytes(byte for byte in range(32, 127) if not chr(byte).isalnum() and byte not in CLOSING)
ORDER = CLOSING + PUNCTUATION + b"0123456789" + bytes(range(97, 123)) + bytes(range(65, 91))
RANKED = ORDER + bytes(byte for byte in range(256) if byte not in ORDER)


class EndFinder:
    """Completions under one grammar."""

    def __init__(self, by_bytes: LLMatcher, tokenizer: LLTokenizer, eos: int) -> None:
        """by_bytes: at the beginning of a text, over the vocabulary of bytes; eos: an end token of the target."""
        self.start, self._tokenizer, self.eos = by_bytes, tokenizer, eos

    def bytes_of(self, token: int) -> bytes:
        """The text of a token."""
        return self._tokenizer.decode_bytes([token])

    def after_token(self, by_bytes: LLMatcher, token: int) -> LLMatcher:
        """The matcher over bytes one token on; in error where the token has no bytes that the grammar takes."""
        after = by_bytes.deep_copy()
        after.consume_tokens(list(self.bytes_of(token)))
        return after

    def find(self, matcher: LLMatcher, by_bytes: LLMatcher) -> Tokens | None:
        """Tokens that make a text whole, without an end token; None where none were found. Both matchers stand behind
        the text, matcher over the target's vocabulary, by_bytes over bytes."""
        rest = None if by_bytes.is_error() else _shortest(by_bytes)
        return None if rest is None else self._spelled(matcher, rest)

    def find_after(self, token: int, known: Tokens, matcher: LLMatcher, by_bytes: LLMatcher) -> Tokens | None:
        """The same behind a token that follows the text. known: what makes the text whole without the token. Mostly
        the token ends with what that begins with, so that the rest of it is enough and nothing is searched."""
        after, there = matcher.deep_copy(), self.after_token(by_bytes, token)
        if not after.consume_token(token) or there.is_error():
            return None
        spelled, whole = self.bytes_of(token), b"".join(map(self.bytes_of, known))
        for size in range(min(len(spelled), len(whole)), -1, -1):
            rest = whole[size:]
            if spelled.endswith(whole[:size]) and there.validate_tokens([*rest, BYTES_END]) == len(rest) + 1:
                found = self._spelled(after, rest)
                if found is not None:
                    return found
        return self.find(after, there)

    def _spelled(self, matcher: LLMatcher, rest: bytes) -> Tokens | None:
        """Tokens of the target that write this, each of which the grammar allows where it stands; None where they do
        not."""
        found: list[int] = []
        here = matcher.deep_copy()
        while rest:
            tokens = here.compute_ff_tokens()[:1] or self._beginning(here, rest)
            spelled = self.bytes_of(tokens[0]) if tokens else b""
            if not spelled or not rest.startswith(spelled) or not here.consume_token(tokens[0]):
                return None
            found += tokens
            rest = rest[len(spelled) :]
        return tuple(found) if not here.is_error() and here.is_accepting() else None

    def _beginning(self, here: LLMatcher, rest: bytes) -> list[int]:
        """The longest token that the rest begins with and that may follow; nothing where there is none."""
        mask = np.frombuffer(here.compute_bitmask(), dtype=np.uint8)
        for size in range(min(len(rest), LONGEST_TOKEN), 0, -1):
            tokens = self._tokenizer.tokenize_bytes(rest[:size])
            if len(tokens) == 1 and mask[tokens[0] >> 3] >> (tokens[0] & 7) & 1:
                return tokens
        return []

    def ends(self, matcher: LLMatcher, tokens: Sequence[int]) -> bool:
        """Whether the text is whole behind these tokens."""
        return matcher.validate_tokens([*tokens, self.eos]) == len(tokens) + 1


def _shortest(start: LLMatcher) -> bytes | None:
    """The first completion that is found among the shortest few of each length. A state whose successors are those of
    another text of the same length is looked at once."""
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
            able = (bytes([byte]) for byte in RANKED if mask[byte >> 3] >> (byte & 7) & 1)
            for more in [forced] if forced else islice(able, TRIED_PER_STATE):
                after = matcher.deep_copy()
                if after.consume_tokens(list(more)):
                    by_length.setdefault(length + len(more), []).append((after, text + more))
        if not by_length:
            return None
    return None
