"""Search for the end of a text under a grammar: a short completion, in tokens.

llguidance says which tokens may follow, not how far the end is. So a completion is searched byte by byte, with a
matcher over a vocabulary of bytes, where a state has few successors. Then it is spelled in as few tokens of the target
as possible. The search is bounded, and gives the same result for the same text.

A JSON text may be nested deep. So a completion is first put together from pieces that the schema gives: what ends a
container, required properties included, and shortest values. Where that is too long, completions are searched; each
open container needs one more byte at least, by which the search is led (A*).
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from dsbd_cli.config.child import BYTES_END, byte_tokenizer, parser_limits
from dsbd_cli.config.schema_ends import SchemaEnds
from dsbd_cli.engine.core.grammar_spelling import Speller, Tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_BYTES = 4096  # of a completion
MOST_STATES = 500  # that one search expands
BEGINNING = 12  # bytes by which pieces are looked up
MOST_AFTER = 128  # that the search expands after one of many tokens
MOST_BACK = 16  # that are expanded to come back to a known completion
MOST_LONGER = 8  # bytes that a completion may have more than the shortest, where that one has too many tokens
# Of states after equally many bytes that allow the same ones: how many are expanded, and from how many next bytes on
# only one is, with the first few of these
KEPT, WIDE, TRIED = 4, 64, 8

# Bytes in the order in which they are tried: closing characters, other punctuation, digits, letters, all others
CLOSING = b"\"}])>'"
PUNCTUATION = bytes(byte for byte in range(32, 127) if not chr(byte).isalnum() and byte not in CLOSING)
ORDER = CLOSING + PUNCTUATION + b"0123456789" + bytes(range(97, 123)) + bytes(range(65, 91))
RANKED = ORDER + bytes(byte for byte in range(256) if byte not in ORDER)
QUOTE, ESCAPE, OPEN, CLOSE = b'"'[0], b"\\"[0], b"{[(", b"}])"


@dataclass(frozen=True, slots=True)
class JsonPlace:
    """Place in a JSON text: number of open containers, and whether it is in a string, after a backslash.

    The place is unknown in a text of another kind, which has no levels."""

    levels: int = 0
    quoted: bool = False
    escaped: bool = False
    known: bool = True

    def after(self, text: bytes) -> JsonPlace:
        """Return the place after some bytes."""
        if not self.known:
            return self
        levels, quoted, escaped = self.levels, self.quoted, self.escaped
        for byte in text:
            if quoted:
                quoted = escaped or byte != QUOTE
                escaped = not escaped and byte == ESCAPE
            else:
                quoted = byte == QUOTE
                levels += (byte in OPEN) - (byte in CLOSE)
        return JsonPlace(levels, quoted, escaped)


@dataclass(frozen=True, slots=True)
class TextEnd:
    """A text, of which completions are searched: `prefix`, tokens after what `matcher` has consumed, in addition to
    which `by_bytes` has consumed the bytes of the prefix.

    Attributes:
        matcher: over the target's vocabulary. by_bytes: over bytes. place: in JSON.
    """

    matcher: LLMatcher
    prefix: Tokens
    by_bytes: LLMatcher
    place: JsonPlace


class EndFinder:
    """A search for completions under one grammar."""

    def __init__(self, by_bytes: LLMatcher, speller: Speller, eos: int, ends: SchemaEnds | None) -> None:
        """by_bytes: a matcher over the vocabulary of bytes, at the beginning of a text. eos: an end token of the
        target. ends: of JSON texts; None for texts of another kind."""
        self.start, self.speller, self.eos = by_bytes, speller, eos
        self.start_place = JsonPlace(known=ends is not None)
        self._pieces = None if ends is None else [_by_beginning(texts) for texts in ends.pieces()]

    def find(self, text: TextEnd, room: int | None = None, states: int = MOST_STATES) -> Tokens | None:
        """Return tokens that complete a text, without an end token; None where none are found. room: how many they may
        be; None for any number. states: how many the search expands."""
        if text.by_bytes.is_error():
            return None
        for rest in self._completions(text, states):
            tokens = self._spelled(text, rest)
            if tokens is not None and (room is None or len(tokens) <= room):
                return tokens
        return None

    def find_after(self, text: TextEnd, token: int, begun: Tokens, room: int) -> Tokens | None:
        """Do the same for the text with one more token. begun: tokens that complete the text without that token. In
        most cases the token ends with the beginning of this completion. Then the rest of it is a completion, and
        nothing is searched. Return None where the token may not follow."""
        spelled, completion = self.speller.bytes_of(token), b"".join(map(self.speller.bytes_of, begun))
        by_bytes = text.by_bytes.deep_copy()
        if not by_bytes.consume_tokens(list(spelled)):
            return None
        after = TextEnd(text.matcher, (*text.prefix, token), by_bytes, text.place.after(spelled))
        rests = [completion[size:] for size in range(len(completion), -1, -1) if spelled.endswith(completion[:size])]
        rests = [rest for rest in rests if by_bytes.validate_tokens([*rest, BYTES_END]) == len(rest) + 1]
        if not rests and after.place.quoted:  # some bytes may lead back to the completion, as after half a letter
            rests = list(islice(_led_back(after, completion), 1))
        for rest in rests:
            tokens = self._spelled(after, rest)
            if tokens is not None and len(tokens) <= room:
                return tokens
        return self.find(after, room, MOST_AFTER)

    def ends(self, matcher: LLMatcher, token: int, rest: Tokens) -> bool:
        """Return whether the text is complete after a token, which may follow, and the tokens of `rest`, and each of
        these may follow there."""
        if matcher.validate_tokens([token, *rest, self.eos]) != len(rest) + 2:
            return False
        position = matcher.deep_copy()
        position.consume_token(token)
        for following in rest:
            if position.compute_ff_tokens()[:1] not in ([], [following]):  # see Speller.spell
                return False
            position.consume_token(following)
        return True

    def _spelled(self, text: TextEnd, rest: bytes) -> Tokens | None:
        position = text.matcher.deep_copy()
        return self.speller.spell(position, rest) if position.consume_tokens(list(text.prefix)) else None

    def _completions(self, text: TextEnd, states: int) -> Iterator[bytes]:
        """Yield completions. For JSON the first is put together from pieces; mostly it is the shortest, and nothing is
        searched. In other texts brackets may be nested, too, which is tried where nothing else is found."""
        is_found = False
        if (pieced := self._pieced(text)) is not None:
            is_found = True
            yield pieced
        places = [text.place] if text.place.known else [text.place, JsonPlace()]
        for position in places:
            for ending in (
                () if is_found and not text.place.known else shortest(text.by_bytes, position, _is_whole, states)
            ):
                is_found = True
                yield ending
        if not is_found and (first := _first_bytes(text.by_bytes)) is not None:
            yield first

    def _pieced(self, text: TextEnd) -> bytes | None:
        """Return a completion of a JSON text from pieces, the shortest that fits each time: first the open scalar is
        ended, then what it stands in, container by container. None where the pieces do not fit."""
        if self._pieces is None:
            return None
        matcher, position, completion = text.by_bytes.deep_copy(), text.place, b""
        while not matcher.is_accepting():
            more = (
                b""
                if position.quoted
                else next(filter(None, (_fitting(matcher, piece) for piece in self._pieces)), b"")
            )
            if not more:
                more = matcher.compute_ff_bytes() or next(shortest(matcher, position, _is_unquoted), b"")
            if not more or len(completion) > MOST_BYTES or not matcher.consume_tokens(list(more)):
                return None
            completion, position = completion + more, position.after(more)
        return completion


Pieces = dict[tuple[int, ...], list[list[int]]]  # bytes of texts by their beginnings, of which few fit anywhere


def _by_beginning(texts: Sequence[str]) -> Pieces:
    by_beginning: Pieces = {}
    for text in texts:
        content = list(text.encode())
        by_beginning.setdefault(tuple(content[:BEGINNING]), []).append(content)
    return by_beginning


def _fitting(matcher: LLMatcher, pieces: Pieces) -> bytes | None:
    """Return the shortest of the pieces that may follow; None where none may."""
    begun = [
        piece for start, of in pieces.items() if matcher.validate_tokens(list(start)) == len(start) for piece in of
    ]
    fitting = (piece for piece in begun if matcher.validate_tokens(piece) == len(piece))
    return bytes(min(fitting, key=len, default=[])) or None


def _led_back(text: TextEnd, completion: bytes) -> Iterator[bytes]:
    """Yield completions of a text in a string that end with one of the text before its last token, from its first or
    second byte on."""

    def ends_with(matcher: LLMatcher) -> bytes | None:
        rests = (completion, completion[1:])
        return next((rest for rest in rests if matcher.validate_tokens([*rest, BYTES_END]) == len(rest) + 1), None)

    def done(matcher: LLMatcher, position: JsonPlace) -> bool:
        return ends_with(matcher) is not None

    for more in shortest(text.by_bytes, text.place, done, MOST_BACK):
        matcher = text.by_bytes.deep_copy()
        matcher.consume_tokens(list(more))
        yield more + (ends_with(matcher) or b"")


def _is_whole(matcher: LLMatcher, position: JsonPlace) -> bool:
    return matcher.is_accepting()


def _is_unquoted(matcher: LLMatcher, position: JsonPlace) -> bool:
    return not position.quoted


def shortest(
    start: LLMatcher, position: JsonPlace, done: Callable[[LLMatcher, JsonPlace], bool], states: int = MOST_STATES
) -> Iterator[bytes]:
    """Yield bytes after which a text is done, the fewest first, and then others that are little longer.

    Of states after equally many bytes and levels that allow the same bytes few are expanded, and `states` in all.
    """
    order, looked, most = 0, 0, MOST_BYTES
    kept: dict[object, int] = {}
    waiting = [(position.levels, 0, order, start, b"", b"", position)]
    while waiting and looked < states:
        bound, _, _, before, more, text, here = heapq.heappop(waiting)
        if bound > most:
            return
        matcher = before.deep_copy()  # only now, because most of those that wait are never looked at
        if not matcher.consume_tokens(list(more)):
            continue
        if done(matcher, here):
            most = min(most, bound + MOST_LONGER)
            yield text
        mask, forced = matcher.compute_bitmask(), matcher.compute_ff_bytes()
        if matcher.is_error():
            continue
        following, is_wide = _ranked(mask)
        alike = (len(text), here.levels, mask, forced)
        kept[alike] = kept.get(alike, 0) + 1
        if kept[alike] > (1 if is_wide else KEPT):
            continue
        looked += 1
        for next_bytes in [forced] if forced else following:
            order, there, longer = order + 1, here.after(next_bytes), text + next_bytes
            heapq.heappush(
                waiting, (len(longer) + there.levels, -len(longer), order, matcher, next_bytes, longer, there)
            )


@lru_cache(1024)
def _ranked(mask: bytes) -> tuple[list[bytes], bool]:
    """Return the bytes of a mask that are tried, in the order of `RANKED`, and whether there are more."""
    legal = [bytes([byte]) for byte in RANKED if mask[byte >> 3] >> (byte & 7) & 1]
    return (legal, False) if len(legal) < WIDE else (legal[:TRIED], True)


def _first_bytes(start: LLMatcher) -> bytes | None:
    """Return the completion of the first legal byte in `RANKED` again and again; None where it has too many bytes."""
    matcher, text = start.deep_copy(), b""
    while len(text) <= MOST_BYTES and not matcher.is_error():
        if matcher.is_accepting():
            return text
        more = matcher.compute_ff_bytes() or b"".join(_ranked(matcher.compute_bitmask())[0][:1])
        if not more or not matcher.consume_tokens(list(more)):
            return None
        text += more
    return None


def shortest_scalar(schema: dict[str, object]) -> str | None:
    """Return the shortest text of a schema of one scalar type; None where none is found."""
    from llguidance import LLMatcher

    source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = LLMatcher(byte_tokenizer(), source, log_level=0, limits=parser_limits())
    if matcher.is_error():
        return None
    scalar = next(shortest(matcher, JsonPlace(), _is_whole), None) or _first_bytes(matcher)
    return None if scalar is None else scalar.decode(errors="replace")
