"""Grammars on the host: which tokens may follow a text, for live beams and drafted nodes.

llguidance computes the masks. A text under a grammar is represented by a `GrammarState`. The tokens that may follow it
are computed once and kept, so what was computed for the drafter at a node is there when the target needs it. On the
device a state is a negative number (see engine/constraints/legal.py), and `GrammarTable` finds the state of a number.

Near the limit of a row a text is led to its end. With n tokens left, the last one included, a token may follow only if
a completion of n - 1 tokens at most is known after it. The limit is near where one more token could put the end out of
reach: the shortest completion of the text and what a token can add to it (config/end_bounds.py) exceed n. As both
bound how soon that can come, most states are not even looked at. So what may follow depends on the text and on n alone
and, where more tokens are legal than can be looked at, on the model's log-probabilities at this node. It never depends
on a draft or a batch.

Letters: R requests, n nodes, V vocabulary, B = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_cli.config.child import byte_tokenizer, parser_limits
from dsbd_cli.config.end_bounds import EndBounds, pattern_bounds
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.engine.constraints.legal import DEAD, FREE, NodePaths
from dsbd_cli.engine.core.grammar_ends import EndFinder, TextEnd, shortest_scalar
from dsbd_cli.engine.core.grammar_spelling import Speller, Tokens
from dsbd_cli.engine.core.topk import NEG_INF
from dsbd_cli.engine.protocols import TextCodec
from dsbd_cli.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_KEPT = 256  # compiled grammars
LED_EXTRA = 32  # with a Lark grammar a token is taken to add this and the shortest whole text to a completion, at most
MOST_SKIPPED = 6  # a token may stand for fewer than this many tokens of a known completion
MOST_CHECKED = 64  # tokens of a node after which an end is looked for, at most
UNKNOWN = EndBounds(0)
Mask = NDArray[np.int32]


def _words(vocab_size: int) -> int:
    """Return B."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class _SharedGrammar:
    """Parts that all states of one grammar share.

    Attributes:
        size: how many tokens llguidance knows. eos: end tokens. faults: why llguidance gave up a text, if it did.
        ends: finds the end of a text. bounds: of how a completion grows with one more token.
    """

    size: int
    eos: frozenset[int]
    faults: list[str]
    ends: EndFinder
    bounds: EndBounds = UNKNOWN


class GrammarState:
    """State of a text under a grammar: which tokens may follow it, and whether it may end.

    States form a tree. `after` returns the same object for the same token. A state has no reference to the one before
    it, so a state that nobody holds any more is freed.
    """

    __slots__ = (
        *("_after", "_by_bytes", "_check", "_completion", "_completions_after", "_few_tokens", "_led", "_mask"),
        *("_mask_within_limit", "_matcher", "_origin", "_place", "_read", "_searched", "_tokens_left", "number"),
    )

    def __init__(
        self,
        matcher: LLMatcher | None,
        origin: _SharedGrammar,
        left: int | None = None,
        before: GrammarState | None = None,
        token: int | None = None,
    ) -> None:
        """matcher: belongs to this state from now on; None where nothing may follow. left: tokens that may still be
        generated, None for any number. before: the state that this one follows with a token; None at the beginning."""
        self._matcher, self._origin, self._tokens_left = matcher, origin, left
        # A matcher over bytes, the place of its text in JSON, and what it has not read of this state's text
        self._by_bytes, self._place, self._read = origin.ends.start, origin.ends.start_place, b""
        self._check = left  # tokens left at which it is to be seen next whether the limit is near
        self._completion: Tokens | None = None  # tokens that make the text whole, where they are known
        if before is not None and token is not None and left is not None and matcher is not None:
            self._by_bytes, self._place, self._check = before._by_bytes, before._place, before._check
            self._read = before._read + origin.ends.speller.bytes_of(token)
            if before._completion is not None and left <= (before._check or 0):
                self._completion = before.completion_after(token)
        self._searched = False
        self._led: bool | None = None
        self._mask_within_limit: Mask | None = None
        self._completions_after: dict[int, Tokens | None] = {}
        self._after: dict[int, GrammarState] = {}
        self._mask: Mask | None = None
        self._few_tokens: list[int] | None = None
        self.number = 0  # below 0 once GrammarTable has numbered it

    @property
    def complete(self) -> bool:
        """True where the text is whole: the grammar derives it as it is."""
        return self._matcher is not None and not self._matcher.is_error() and self._matcher.is_accepting()

    def after(self, token: int) -> GrammarState | None:
        """Return the state one token on; None after a token that may not follow. After an end token nothing may
        follow."""
        state = self._after.get(token)
        if state is None:
            if not self.allows(token):
                return None
            matcher = None
            if token not in self._origin.eos:
                assert self._matcher is not None, "it allows a token"
                matcher = self._matcher.deep_copy()
                matcher.consume_token(token)  # an error, such as a limit that is passed, stays with the matcher
            left = None if self._tokens_left is None else self._tokens_left - 1
            _ = self.led  # which says when it is to be looked at next
            state = self._after[token] = GrammarState(matcher, self._origin, left, self, token)
        return state

    def allows(self, token: int) -> bool:
        """Return whether the token may follow."""
        word = token >> 5
        return word < len(self.mask) and bool((int(self.mask[word]) >> (token & 31)) & 1)

    @property
    def mask(self) -> Mask:
        """Mask of the tokens that may follow: [B] int32, bit v % 32 of word v // 32 is set where token v may follow. An
        end token may follow where the text may end. The mask is computed when it is first asked for."""
        if self._mask is None:
            mask, matcher = np.zeros(_words(self._origin.size), dtype=np.int32), self._matcher
            if matcher is not None and not matcher.is_error():
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher is not None and matcher.is_error():
                mask[:] = 0
                self._origin.faults[:] = [_one_line(matcher.get_error())]
            self._mask = mask
        return self._mask

    @property
    def led(self) -> bool:
        """True where the limit is near and a completion within it is known. Then a token may follow only if it leaves
        one."""
        if self._led is None:
            self._led = self._is_led()
        return self._led

    def _is_led(self) -> bool:
        """Return the same, and note when it is to be seen next."""
        left = self._tokens_left
        if not left or self._check is None or left > self._check:
            return False
        completion = self.completion
        if completion is None:
            self._check = left // 2  # a search takes long where it finds nothing
            return False
        if len(completion) > left:  # nor will it be shorter after fewer tokens
            self._check = None
            return False
        free = self._origin.bounds.unchecked(left, len(completion), self._place.levels)
        self._check = left - free
        return not free

    @property
    def completion(self) -> Tokens | None:
        """Tokens that make the text whole, the first of which may follow; None where none are known."""
        completion = self._completion
        if self._searched or (completion is not None and (not completion or self.allows(completion[0]))):
            return completion
        self._searched = True
        text = self._text_end()
        completion = None if text is None else self._origin.ends.find(text, self._tokens_left)
        if completion is None and text is not None:
            completion = self._origin.ends.find(text)
        self._completion = completion if completion is None or not completion or self.allows(completion[0]) else None
        return self._completion

    def _text_end(self) -> TextEnd | None:
        """Return this state's text as completions of it are searched; None where it is at its end."""
        if self._matcher is None or self._matcher.is_error():
            return None
        if self._read:
            self._by_bytes, self._place = self._by_bytes.deep_copy(), self._place.after(self._read)
            self._by_bytes.consume_tokens(list(self._read))  # it is in error where the grammar does not accept them
            self._read = b""
        return TextEnd(self._matcher, (), self._by_bytes, self._place)

    def completion_after(self, token: int) -> Tokens | None:
        """Return tokens that make the text whole after a token, within what is left; None where none are known. Only
        for a state whose own completion is known, and a token that may follow."""
        if token not in self._completions_after:
            self._completions_after[token] = self._find_completion_after(token)
        return self._completions_after[token]

    def _find_completion_after(self, token: int) -> Tokens | None:
        ends, completion, text, left = self._origin.ends, self._completion, self._text_end(), self._tokens_left
        assert text is not None
        assert completion is not None
        assert left is not None
        if token in self._origin.eos:
            return ()
        if completion and token == completion[0]:
            return completion[1:]
        # mostly the token takes the place of the completion's first token, comes before it, or skips some of it
        for first in (1, 0, *range(2, MOST_SKIPPED), len(completion)):
            rest = completion[first:]
            if first <= len(completion) and len(rest) < left and ends.ends(text.matcher, token, rest):
                return rest
        return ends.find_after(text, token, completion, left - 1) if left > 1 else None

    @property
    def mask_within_limit(self) -> Mask | None:
        """Mask of the tokens that may follow. In a state that is led it lacks the tokens that leave no end within the
        limit. None where more than MOST_CHECKED tokens may follow such a state; then `fitting` tells which."""
        if not self.led:
            return self.mask
        if self._mask_within_limit is None:
            tokens = _tokens(self.mask, MOST_CHECKED)
            if tokens is None:
                return None
            self._mask_within_limit = np.zeros_like(self.mask)
            for token in tokens:
                if self.completion_after(token) is not None:
                    self._mask_within_limit[token >> 5] |= np.array(1 << (token & 31), dtype=np.uint32).view(np.int32)
        return self._mask_within_limit

    def fitting(self, logprobs: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return the tokens that leave an end within the limit: [V] bool. Looked at are the MOST_CHECKED likeliest
        legal tokens, all with the same log-probability as the last of them, and the first token of the known
        completion. logprobs: [V], -inf where a token is illegal."""
        last = np.partition(logprobs, -min(MOST_CHECKED, len(logprobs)))[-min(MOST_CHECKED, len(logprobs))]
        looked = np.flatnonzero((logprobs >= last) & (logprobs > -np.inf)).tolist()
        assert self._completion is not None, "it is led"
        fits = np.zeros(len(logprobs), dtype=np.bool_)
        looked += [token for token in self._completion[:1] if token < len(fits)]  # a draft may lack it
        fits[[token for token in looked if self.completion_after(token) is not None]] = True
        return fits

    def following(self, most: int) -> list[int] | None:
        """Return the tokens that may follow, without end tokens, ascending; None where there are more than `most`. They
        are kept once they are found to be few, because drafts come back to a state in each iteration."""
        if self._few_tokens is None:
            narrow = self.mask_within_limit
            tokens = _tokens(self.mask if narrow is None else narrow, most + len(self._origin.eos))
            tokens = None if tokens is None else [token for token in tokens if token not in self._origin.eos]
            if tokens is None or len(tokens) > most:
                return None
            self._few_tokens = tokens
        return self._few_tokens if len(self._few_tokens) <= most else None


def _tokens(mask: Mask, most: int) -> list[int] | None:
    """Return the tokens of a mask, ascending; None where there are more than `most`."""
    bits = mask.view(np.uint32)
    words = np.flatnonzero(bits)
    if len(words) > most:  # each word that is not 0 has a token or more
        return None
    word, bit = np.nonzero(np.unpackbits(bits[words].view(np.uint8), bitorder="little").reshape(len(words), 32))
    return (words[word] * 32 + bit).tolist() if len(word) <= most else None


class GrammarCompiler:
    """A compiler of grammars for one vocabulary. Each grammar is compiled once, however many requests use it."""

    def __init__(self, codec: TextCodec, vocab_size: int) -> None:
        """vocab_size: V of the target."""
        self._codec, self.vocab_size = codec, vocab_size
        self._eos = frozenset(token for token in codec.eos_ids if token < vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._bytes: LLTokenizer | None = None
        self._speller: Speller | None = None
        self._known: dict[Grammar, tuple[LLMatcher, _SharedGrammar]] = {}

    def start(self, grammar: Grammar, max_new: int | None = None) -> GrammarState:
        """Return the state of the empty text. max_new: tokens that may be generated, None for any number. Raises
        UsageError for a grammar that is malformed, or of which this vocabulary cannot spell a single answer."""
        matcher, origin = self._compiled(grammar)
        return GrammarState(matcher.deep_copy(), origin, left=max_new)

    def matches(self, grammar: Grammar, texts: Sequence[Sequence[int]]) -> list[bool]:
        """Return for each text, given as tokens, whether it is whole under the grammar, and valid under what of a
        schema the grammar does not enforce. An end token at its end is left out."""
        start, origin = self._compiled(grammar)
        bodies = [list(tokens[:-1] if tokens and tokens[-1] in self._eos else tokens) for tokens in texts]
        whole = []
        for tokens in bodies:
            matcher = start.deep_copy()
            whole.append(matcher.consume_tokens(tokens) and matcher.is_accepting())
        spelled = [b"".join(map(origin.ends.speller.bytes_of, tokens)) for tokens in bodies]
        holding = iter(grammar.hold([text for text, is_whole in zip(spelled, whole, strict=True) if is_whole]))
        return [is_whole and next(holding) for is_whole in whole]

    def fault(self, grammar: Grammar) -> str | None:
        """Return why llguidance gave up a text under this grammar, which it does where a limit of its parser is passed;
        None where it did not."""
        faults = self._compiled(grammar)[1].faults
        return faults[0] if faults else None

    def _compiled(self, grammar: Grammar) -> tuple[LLMatcher, _SharedGrammar]:
        compiled = self._known.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            while len(self._known) >= MOST_KEPT:
                del self._known[next(iter(self._known))]
            self._known[grammar] = compiled
        return compiled

    def _compile(self, grammar: Grammar) -> tuple[LLMatcher, _SharedGrammar]:
        from llguidance import LLMatcher

        source = grammar.source()
        if not self._eos:
            raise UsageError("the target has no end token, so a text could never be whole")
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._codec, self.vocab_size, sorted(self._eos))
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise UsageError(_one_line(matcher.get_error()))
        if self._bytes is None:
            self._bytes = byte_tokenizer()
        spelled = _spelled(source, self._tokenizer) if grammar.kind == "lark" else source
        by_bytes = LLMatcher(self._bytes, spelled, log_level=0, limits=parser_limits())
        if self._speller is None:
            self._speller = Speller(self._tokenizer, self.vocab_size)
        schema_ends = grammar.schema_ends(shortest_scalar) if grammar.kind == "json_schema" else None
        ends = EndFinder(by_bytes, self._speller, min(self._eos), schema_ends)
        origin = _SharedGrammar(self._tokenizer.vocab_size, self._eos, [], ends)
        start = GrammarState(matcher.deep_copy(), origin)
        if not start.mask.any():
            raise UsageError("no token of the target's vocabulary may begin an answer")
        if schema_ends is not None:
            bounds = schema_ends.bounds(self._speller)
        elif grammar.kind == "regex":
            bounds = pattern_bounds(grammar.text)
        else:
            bounds = EndBounds(LED_EXTRA + len(start.completion or ()))
        return matcher, replace(origin, bounds=replace(bounds, step=bounds.step + self._speller.realigned))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _spelled(source: str, tokenizer: LLTokenizer) -> str:
    """Return a Lark grammar with the texts of tokens in the place of their ids, which the vocabulary of bytes lacks."""
    return re.sub(
        r"<\[([0-9]+)\]>",
        lambda match: json.dumps(tokenizer.decode_bytes([int(match[1])]).decode(errors="replace")),
        source,
    )


class GrammarTable:
    """States of the texts of all rows that have a grammar, by number.

    A text that no beam continues is forgotten: the table keeps the states that an iteration and the one before it have
    met.
    """

    def __init__(self, compiler: GrammarCompiler, device: torch.device) -> None:
        self.compiler = compiler
        self._words, self._device, self._last = _words(compiler.vocab_size), device, FREE
        self._now: dict[int, GrammarState] = {}
        self._before: dict[int, GrammarState] = {}
        self._filler: ThreadPoolExecutor | None = None

    def begin(self, grammar: Grammar, max_new: int) -> int:
        """Return the number of the state in which a row with this grammar begins. max_new: tokens that it generates at
        most."""
        return self.add(self.compiler.start(grammar, max_new))

    def add(self, state: GrammarState) -> int:
        """Return the number of a state that beams or nodes have. A new state gets a new number."""
        if not state.number:
            self._last -= 1
            state.number = self._last
        self._now[state.number] = state
        return state.number

    def at(self, number: int) -> GrammarState | None:
        """Return the state of a number; None for a number that belongs to no grammar, or to a row that is done."""
        return self._now.get(number) or self._before.get(number)

    def acting(self, starts: Sequence[int | None], generated: int) -> GrammarStep | None:
        """Return the grammars for one iteration; None where no row has one. It is called once in each iteration, and
        forgets states that the last two have not met."""
        if not any(start is not None and start < FREE for start in starts):
            return None
        self._before, self._now = self._now, {}
        if self._filler is None:
            self._filler = ThreadPoolExecutor(1, "grammar masks")
        return GrammarStep(self, self._words, self._device, self._filler)


@dataclass(frozen=True, slots=True)
class GrammarStep:
    """Grammars of all rows in one iteration. words: B. filler: the thread that computes masks."""

    table: GrammarTable
    words: int
    device: torch.device
    filler: ThreadPoolExecutor
    key: Hashable = "grammar"
    on_host: bool = True
    changes: bool = False

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the states after the tokens; DEAD where a grammar does not allow one."""
        numbers, following = torch.stack((state, tokens)).tolist()
        states = [
            [self._step(*pair) for pair in zip(*row, strict=True)] for row in zip(numbers, following, strict=True)
        ]
        return torch.tensor(states, dtype=torch.int64, device=state.device).view_as(state)

    def _step(self, number: int, token: int) -> int:
        if number >= FREE:
            return number
        here = self.table.at(number)
        following = None if here is None else here.after(token)
        return DEAD if following is None else self.table.add(following)

    def of(self, nodes: NodePaths) -> GrammarMasks:
        """Return the masks of these nodes. They are computed while the caller goes on."""
        numbers = nodes.state.flatten().tolist()
        states = [self.table.at(number) if number < FREE else None for number in numbers]
        free = [number >= FREE and number != DEAD for number in numbers]
        return GrammarMasks(self.filler.submit(_filled, states, free, self.words), states, self.device)


class GrammarMasks:
    """Masks of the tokens that may follow m nodes; a core.candidates.LegalTokens."""

    def __init__(self, masks: Future[Mask], states: Sequence[GrammarState | None], device: torch.device) -> None:
        """masks: [m, B] int32. states: of the m nodes, None for one without a grammar."""
        self._coming, self._states, self._device = masks, states, device
        self._masks: Tensor | None = None

    def listed(self, part: slice) -> tuple[Tensor, Tensor] | None:
        """Return None: the tokens are too many to be listed."""
        return None

    def apply(self, logprobs: Tensor, part: slice, total: Tensor) -> None:
        """Set the log-probability of every token that may not follow to -inf. logprobs: [k, V] of the nodes `part`, or
        fewer columns."""
        if self._masks is None:
            self._masks = torch.from_numpy(self._coming.result()).to(self._device)
        bits = torch.arange(32, dtype=torch.int32, device=logprobs.device)
        allowed = (self._masks[part].unsqueeze(-1) >> bits) & 1
        logprobs.masked_fill_(allowed.flatten(1)[:, : logprobs.shape[1]] == 0, NEG_INF)
        for row, state in zip(logprobs, self._states[part], strict=True):
            if state is not None and state.mask_within_limit is None:
                fitting = state.fitting(row.cpu().numpy())
                row.masked_fill_(~torch.from_numpy(fitting).to(row.device), NEG_INF)


def _filled(states: Sequence[GrammarState | None], free: Sequence[bool], words: int) -> Mask:
    """Return the masks of nodes, [m, B]. free: the node has no grammar, so everything may follow it. Nothing may
    follow a node that is not free and has no state."""
    masks = np.zeros((len(states), words), dtype=np.int32)
    for mask, state, is_free in zip(masks, states, free, strict=True):
        if is_free:
            mask[:] = -1
        elif state is not None:
            narrow = state.mask_within_limit
            row_mask = (state.mask if narrow is None else narrow)[:words]
            mask[: len(row_mask)] = row_mask
    return masks


def _tokenizer(codec: TextCodec, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Return the vocabulary as llguidance takes it. A fast tokenizer's own file says how texts are spelled, so that
    what the grammar forces is in the tokens that the model knows. Where there is no such file, or llguidance does not
    understand it, texts are spelled with the longest tokens."""
    from llguidance import LLTokenizer

    tokenizer_json = getattr(codec, "tokenizer_json", None)
    text = None if tokenizer_json is None else tokenizer_json()
    if text is not None:
        with contextlib.suppress(ValueError):  # such as for a decoder that is neither ByteLevel nor ByteFallback
            return LLTokenizer(text, eos_token=list(eos_ids))
    return LLTokenizer(_longest_tokens(codec, vocab_size, eos_ids[0]), eos_token=list(eos_ids))


def _longest_tokens(codec: TextCodec, vocab_size: int, eos_id: int):  # type: ignore[no-untyped-def]
    """Return a vocabulary whose texts are spelled with the longest token that fits, again and again."""
    from llguidance import TokenizerWrapper

    table = codec.token_bytes()[:vocab_size]
    tokens = [*table, *[b""] * (vocab_size - len(table))]
    ids = {text: token for token, text in reversed(list(enumerate(tokens))) if text}
    longest = max(map(len, ids), default=0)

    class BytesTokenizer:
        eos_token_id, bos_token_id = eos_id, None
        special_token_ids = [token for token, text in enumerate(tokens) if not text]  # noqa: RUF012

        def __init__(self) -> None:
            self.tokens = [text or b"\xff[%d]" % token for token, text in enumerate(tokens)]

        def __call__(self, text: bytes | str) -> list[int]:
            rest, pieces = text.encode() if isinstance(text, str) else text, []
            while rest:
                size = next((size for size in range(min(longest, len(rest)), 0, -1) if rest[:size] in ids), 0)
                if not size:
                    break
                pieces.append(ids[rest[:size]])
                rest = rest[size:]
            return pieces

    return TokenizerWrapper(BytesTokenizer())
