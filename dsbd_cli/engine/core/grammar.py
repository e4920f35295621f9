"""Grammars on the host: which tokens may follow a text, for live beams and drafted nodes.

llguidance computes the masks. A text under a grammar is a `GrammarState`; what follows from it is computed once and
kept, so nodes that share a path share their masks. Letters: R requests, W beams, n nodes of a layer, V vocabulary, B =
ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsbd_cli.engine.core.protocols import TextCodec
from dsbd_cli.errors import UsageError
from dsbd_cli.grammars import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["FREE", "GrammarCompiler", "GrammarState", "mask_words"]

MOST_KEPT = 256  # compiled grammars
Mask = NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """B."""
    return -(-vocab_size // 32)


class GrammarState:
    """Where a text stands: the tokens that may follow, and whether it may end.

    States form a tree. `after` gives the same object for the same token, and a state does not know the one before it,
    so what nobody holds any more is forgotten.
    """

    __slots__ = ("_after", "_eos", "_mask", "_matcher", "_size")

    def __init__(self, matcher: LLMatcher | None, size: int, eos: frozenset[int]) -> None:
        """matcher: its own from now on; None where the text is no beginning of what the grammar derives. size: V that
        llguidance knows, a multiple of 32 or less. eos: end tokens."""
        self._matcher, self._size, self._eos = matcher, size, eos
        self._after: dict[int, GrammarState] = {}
        self._mask: Mask | None = None

    @property
    def free(self) -> bool:
        """There is no grammar: anything may follow."""
        return False

    @property
    def fault(self) -> str | None:
        """Why llguidance gave up on this text, where it did: a limit of its parser was passed."""
        matcher = self._matcher
        return " ".join(matcher.get_error().split())[:200] if matcher is not None and matcher.is_error() else None

    @property
    def complete(self) -> bool:
        """The text is whole: the grammar derives it as it stands."""
        return self._matcher is not None and not self._matcher.is_error() and self._matcher.is_accepting()

    def after(self, token: int) -> GrammarState:
        """The state one token on. After a token that may not follow, and after an end token, nothing may follow."""
        found = self._after.get(token)
        if found is None:
            found = self._after[token] = GrammarState(self._step(token), self._size, self._eos)
        return found

    def _step(self, token: int) -> LLMatcher | None:
        if self._matcher is None or token in self._eos or not self.allows(token):
            return None
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token)  # an error, as of a limit, stays with the matcher: see `fault`
        return matcher

    def allows(self, token: int) -> bool:
        """Whether the token may follow."""
        word = token >> 5
        return word < len(self.mask) and bool((int(self.mask[word]) >> (token & 31)) & 1)

    @property
    def mask(self) -> Mask:
        """[B] int32, bit v % 32 of word v // 32 is set where token v may follow; an end token where the text may end.
        Computed when it is first asked for."""
        if self._mask is None:
            mask = np.zeros(mask_words(self._size), dtype=np.int32)
            if self._matcher is not None and not self._matcher.is_error():
                self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                if self._matcher.is_error():
                    mask[:] = 0
            self._mask = mask
        return self._mask

    def following(self, most: int) -> list[int] | None:
        """The tokens that may follow, end tokens left out, ascending; None where they are more than `most`."""
        mask = self.mask.view(np.uint32)
        words = np.flatnonzero(mask)
        # each word that is not 0 has a token or more, and end tokens are few
        if len(words) > most + len(self._eos):
            return None
        bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(len(words), 32)
        place, bit = np.nonzero(bits)
        tokens = [token for token in (words[place] * 32 + bit).tolist() if token not in self._eos]
        return tokens if len(tokens) <= most else None


class _Free(GrammarState):
    """No grammar."""

    __slots__ = ()

    @property
    def free(self) -> bool:
        return True

    def after(self, token: int) -> GrammarState:
        return self

    def allows(self, token: int) -> bool:
        return True

    def following(self, most: int) -> list[int] | None:
        return None


FREE: GrammarState = _Free(None, 0, frozenset())


class GrammarCompiler:
    """Grammars for one vocabulary. Each is compiled once, however many requests use it."""

    def __init__(self, codec: TextCodec, vocab_size: int) -> None:
        """vocab_size: V of the target."""
        self._codec, self._vocab_size = codec, vocab_size
        self._eos = frozenset(token for token in codec.eos_ids if token < vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._known: dict[Grammar, LLMatcher] = {}

    def start(self, grammar: Grammar | None) -> GrammarState:
        """The state of the empty text. Raises UsageError for a grammar that is malformed, or that this vocabulary
        cannot say a single answer of."""
        if grammar is None:
            return FREE
        matcher = self._known.get(grammar)
        if matcher is None:
            matcher = self._compiled(grammar)
            while len(self._known) >= MOST_KEPT:
                del self._known[next(iter(self._known))]
            self._known[grammar] = matcher
        assert self._tokenizer is not None
        return GrammarState(matcher.deep_copy(), self._tokenizer.vocab_size, self._eos)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        source = grammar.source()  # before the import: it tells what is to be installed
        from llguidance import LLMatcher

        if not self._eos:
            raise UsageError("the target has no end token, so a text could never be whole")
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._codec, self._vocab_size, sorted(self._eos))
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise UsageError(" ".join(matcher.get_error().split())[:200])
        if not GrammarState(matcher.deep_copy(), self._tokenizer.vocab_size, self._eos).mask.any():
            raise UsageError("no token of the target's vocabulary may begin an answer")
        return matcher


def _tokenizer(codec: TextCodec, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary as llguidance takes it. A fast tokenizer's own file says how texts are spelled, so that what the
    grammar forces is in the tokens that the model knows; of others the longest tokens are taken."""
    from llguidance import LLTokenizer

    tokenizer_json = getattr(codec, "tokenizer_json", None)
    text = None if tokenizer_json is None else tokenizer_json()
    if text is not None:
        return LLTokenizer(text, eos_token=list(eos_ids))
    return LLTokenizer(_longest_tokens(codec, vocab_size, eos_ids[0]), eos_token=list(eos_ids))


def _longest_tokens(codec: TextCodec, vocab_size: int, eos_id: int):  # type: ignore[no-untyped-def]
    """A vocabulary whose texts are spelled with the longest token that fits, again and again."""
    from llguidance._tokenizer import TokenizerWrapper

    table = codec.token_bytes()[:vocab_size]
    tokens = [*table, *[b""] * (vocab_size - len(table))]
    ids = {text: token for token, text in reversed(list(enumerate(tokens))) if text}
    longest = max(map(len, ids), default=0)

    class Spelling:
        eos_token_id, bos_token_id = eos_id, None
        special_token_ids = [token for token, text in enumerate(tokens) if not text]  # noqa: RUF012

        def __init__(self) -> None:
            self.tokens = [text or b"\xff[%d]" % token for token, text in enumerate(tokens)]

        def __call__(self, text: bytes | str) -> list[int]:
            rest, found = text.encode() if isinstance(text, str) else text, []
            while rest:
                size = next((size for size in range(min(longest, len(rest)), 0, -1) if rest[:size] in ids), 0)
                if not size:
                    break
                found.append(ids[rest[:size]])
                rest = rest[size:]
            return found

    return TokenizerWrapper(Spelling())
