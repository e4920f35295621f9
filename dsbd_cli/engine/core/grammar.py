"""Grammars on the host: which tokens may follow a text, for live beams and drafted nodes.

llguidance computes the masks. A text under a grammar is a `GrammarState`; what follows from it is computed once and
kept, so what the drafter asked for a node is there when the target asks for it. On the device a state is a negative
number (see core/legal.py), which `GrammarTable` knows.

Letters: R requests, n nodes, V vocabulary, B = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_cli.engine.core.legal import DEAD, FREE, NodePaths
from dsbd_cli.engine.core.probs import NEVER
from dsbd_cli.engine.core.protocols import TextCodec
from dsbd_cli.errors import UsageError
from dsbd_cli.grammars import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["GrammarCompiler", "GrammarState", "GrammarTable", "GrammarWalk"]

MOST_KEPT = 256  # compiled grammars
Mask = NDArray[np.int32]


def _words(vocab_size: int) -> int:
    """B."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class _Origin:
    """What the states of one grammar share: how many tokens llguidance knows, end tokens, and what went wrong."""

    size: int
    eos: frozenset[int]
    faults: list[str]


class GrammarState:
    """Where a text stands: the tokens that may follow, and whether it may end.

    States form a tree. `after` gives the same object for the same token, and a state does not know the one before it,
    so what nobody holds any more is forgotten.
    """

    __slots__ = ("_after", "_few", "_mask", "_matcher", "_origin", "number")

    def __init__(self, matcher: LLMatcher | None, origin: _Origin) -> None:
        """matcher: its own from now on; None where nothing may follow."""
        self._matcher, self._origin = matcher, origin
        self._after: dict[int, GrammarState] = {}
        self._mask: Mask | None = None
        self._few: list[int] | None = None
        self.number = 0  # below 0 once it stands on the device

    @property
    def complete(self) -> bool:
        """The text is whole: the grammar derives it as it stands."""
        return self._matcher is not None and not self._matcher.is_error() and self._matcher.is_accepting()

    def after(self, token: int) -> GrammarState | None:
        """The state one token on; None after a token that may not follow. After an end token nothing may follow."""
        found = self._after.get(token)
        if found is None:
            if not self.allows(token):
                return None
            matcher = None
            if token not in self._origin.eos:
                assert self._matcher is not None, "it allows a token"
                matcher = self._matcher.deep_copy()
                matcher.consume_token(token)  # an error, as of a limit, stays with the matcher
            found = self._after[token] = GrammarState(matcher, self._origin)
        return found

    def allows(self, token: int) -> bool:
        """Whether the token may follow."""
        word = token >> 5
        return word < len(self.mask) and bool((int(self.mask[word]) >> (token & 31)) & 1)

    @property
    def mask(self) -> Mask:
        """[B] int32, bit v % 32 of word v // 32 is set where token v may follow; an end token where the text may end.
        Computed when it is first asked for."""
        if self._mask is None:
            mask, matcher = np.zeros(_words(self._origin.size), dtype=np.int32), self._matcher
            if matcher is not None and not matcher.is_error():
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher is not None and matcher.is_error():
                mask[:] = 0
                self._origin.faults[:] = [_one_line(matcher.get_error())]
            self._mask = mask
        return self._mask

    def following(self, most: int) -> list[int] | None:
        """The tokens that may follow, end tokens left out, ascending; None where they are more than `most`. Kept once
        they are found to be few: drafts come back to a state in each iteration."""
        if self._few is None:
            mask = self.mask.view(np.uint32)
            words = np.flatnonzero(mask)
            # each word that is not 0 has a token or more, and end tokens are few
            if len(words) > most + len(self._origin.eos):
                return None
            bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(len(words), 32)
            place, bit = np.nonzero(bits)
            tokens = [token for token in (words[place] * 32 + bit).tolist() if token not in self._origin.eos]
            if len(tokens) > most:
                return None
            self._few = tokens
        return self._few if len(self._few) <= most else None


class GrammarCompiler:
    """Grammars for one vocabulary. Each is compiled once, however many requests use it."""

    def __init__(self, codec: TextCodec, vocab_size: int) -> None:
        """vocab_size: V of the target."""
        self._codec, self.vocab_size = codec, vocab_size
        self._eos = frozenset(token for token in codec.eos_ids if token < vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._known: dict[Grammar, tuple[LLMatcher, _Origin]] = {}

    def start(self, grammar: Grammar) -> GrammarState:
        """The state of the empty text. Raises UsageError for a grammar that is malformed, or that this vocabulary
        cannot say a single answer of."""
        matcher, origin = self._compiled(grammar)
        return GrammarState(matcher.deep_copy(), origin)

    def matches(self, grammar: Grammar, tokens: Sequence[int]) -> bool:
        """Whether the text of these tokens is whole under the grammar. An end token at its end is left out."""
        matcher = self._compiled(grammar)[0].deep_copy()
        text = list(tokens[:-1] if tokens and tokens[-1] in self._eos else tokens)
        return matcher.consume_tokens(text) and matcher.is_accepting()

    def fault(self, grammar: Grammar) -> str | None:
        """Why llguidance gave up on a text under this grammar, where it did: a limit of its parser was passed."""
        faults = self._compiled(grammar)[1].faults
        return faults[0] if faults else None

    def _compiled(self, grammar: Grammar) -> tuple[LLMatcher, _Origin]:
        found = self._known.get(grammar)
        if found is None:
            source = grammar.source()  # before the import: it tells what is to be installed
            found = self._compile(source)
            while len(self._known) >= MOST_KEPT:
                del self._known[next(iter(self._known))]
            self._known[grammar] = found
        return found

    def _compile(self, source: str) -> tuple[LLMatcher, _Origin]:
        from llguidance import LLMatcher

        if not self._eos:
            raise UsageError("the target has no end token, so a text could never be whole")
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._codec, self.vocab_size, sorted(self._eos))
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise UsageError(_one_line(matcher.get_error()))
        origin = _Origin(self._tokenizer.vocab_size, self._eos, [])
        if not GrammarState(matcher.deep_copy(), origin).mask.any():
            raise UsageError("no token of the target's vocabulary may begin an answer")
        return matcher, origin


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


class GrammarTable:
    """The texts of all rows that have a grammar, by number.

    A text that no beam goes on from is forgotten: an iteration keeps what it and the one before it have met.
    """

    def __init__(self, compiler: GrammarCompiler, device: torch.device) -> None:
        self.compiler = compiler
        self._words, self._device, self._last = _words(compiler.vocab_size), device, FREE
        self._now: dict[int, GrammarState] = {}
        self._before: dict[int, GrammarState] = {}
        self._filler: ThreadPoolExecutor | None = None

    def begin(self, grammar: Grammar) -> int:
        """The number of the state in which a row with this grammar begins."""
        return self.add(self.compiler.start(grammar))

    def add(self, state: GrammarState) -> int:
        """The number of a state that beams or nodes stand in."""
        if not state.number:
            self._last -= 1
            state.number = self._last
        self._now[state.number] = state
        return state.number

    def at(self, number: int) -> GrammarState | None:
        """The state of a number; None for one that belongs to no grammar, or to a row that is done."""
        return self._now.get(number) or self._before.get(number)

    def acting(self, starts: Sequence[int | None], generated: int) -> GrammarWalk | None:
        """The grammars in an iteration. Called once in each."""
        if not any(start is not None and start < FREE for start in starts):
            return None
        self._before, self._now = self._now, {}
        if self._filler is None:
            self._filler = ThreadPoolExecutor(1, "grammar masks")
        return GrammarWalk(self, self._words, self._device, self._filler)


@dataclass(frozen=True, slots=True)
class GrammarWalk:
    """The grammars in one iteration. words: B."""

    table: GrammarTable
    words: int
    device: torch.device
    filler: ThreadPoolExecutor
    key: Hashable = "grammar"
    on_host: bool = True

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        """States after the tokens; DEAD where a grammar does not let one follow."""
        numbers, following = torch.stack((state, tokens)).tolist()
        found = [[self._step(*pair) for pair in zip(*row, strict=True)] for row in zip(numbers, following, strict=True)]
        return torch.tensor(found, dtype=torch.int64, device=state.device).view_as(state)

    def _step(self, number: int, token: int) -> int:
        if number >= FREE:
            return number
        here = self.table.at(number)
        found = None if here is None else here.after(token)
        return DEAD if found is None else self.table.add(found)

    def of(self, nodes: NodePaths) -> GrammarMasks:
        """The masks of these nodes, which are computed while the caller goes on."""
        numbers = nodes.state.flatten().tolist()
        states = [self.table.at(number) if number < FREE else None for number in numbers]
        plain = [number >= FREE and number != DEAD for number in numbers]
        return GrammarMasks(self.filler.submit(_filled, states, plain, self.words), self.device)


class GrammarMasks:
    """What may follow m nodes; core.probs.LegalTokens."""

    def __init__(self, masks: Future[Mask], device: torch.device) -> None:
        """masks: [m, B] int32."""
        self._coming, self._device = masks, device
        self._masks: Tensor | None = None

    def listed(self, part: slice) -> tuple[Tensor, Tensor] | None:
        """There are too many of them to be listed."""
        return None

    def apply(self, logprobs: Tensor, part: slice, total: Tensor) -> None:
        """-inf for every token that may not follow. logprobs: [k, V] of nodes `part`, or fewer columns."""
        if self._masks is None:
            self._masks = torch.from_numpy(self._coming.result()).to(self._device)
        bits = torch.arange(32, dtype=torch.int32, device=logprobs.device)
        allowed = (self._masks[part].unsqueeze(-1) >> bits) & 1
        logprobs.masked_fill_(allowed.flatten(1)[:, : logprobs.shape[1]] == 0, NEVER)


def _filled(states: Sequence[GrammarState | None], plain: Sequence[bool], words: int) -> Mask:
    """Masks of nodes, [m, B]. plain: the node has no grammar; nothing follows one that has neither this nor a state."""
    masks = np.zeros((len(states), words), dtype=np.int32)
    for mask, state, free in zip(masks, states, plain, strict=True):
        if free:
            mask[:] = -1
        elif state is not None:
            known = state.mask[:words]
            mask[: len(known)] = known
    return masks


def _tokenizer(codec: TextCodec, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary as llguidance takes it. A fast tokenizer's own file says how texts are spelled, so that what the
    grammar forces is in the tokens that the model knows; of others, and of those whose file llguidance does not
    understand, the longest tokens are taken."""
    from llguidance import LLTokenizer

    tokenizer_json = getattr(codec, "tokenizer_json", None)
    text = None if tokenizer_json is None else tokenizer_json()
    if text is not None:
        with contextlib.suppress(ValueError):  # as of a decoder that is neither ByteLevel nor ByteFallback
            return LLTokenizer(text, eos_token=list(eos_ids))
    return LLTokenizer(_longest_tokens(codec, vocab_size, eos_ids[0]), eos_token=list(eos_ids))


def _longest_tokens(codec: TextCodec, vocab_size: int, eos_id: int):  # type: ignore[no-untyped-def]
    """A vocabulary whose texts are spelled with the longest token that fits, again and again."""
    from llguidance import TokenizerWrapper

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
