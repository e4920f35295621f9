"""Ends of texts on the device: stop strings as an Aho-Corasick automaton over the bytes that tokens add, folded into
one table by state and token, and end tokens in the same table.

A beam carries one state. `table[state, token]` is its next state, and state 0 means that the text has ended. So a stop
string ends a beam exactly where an end token does, inside any layer, each row may have end tokens of its own, and
nothing is read back to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.answer_forms import Reasoning
from dsbd_cli.engine.constraints.reasoning import wait

STOPPED, NO_STOPS = 0, 1  # states: the text has ended; nothing but the checkpoint's end tokens ends it
MOST_KEPT = 1 << 28  # bytes of sets, beyond which those that no request holds are dropped


@dataclass(frozen=True, slots=True)
class StopSet:
    """Ends of a request's text.

    Attributes:
        strings: stop strings. tokens: end tokens in place of the checkpoint's; None: the checkpoint's.
        special: stop strings are looked for in the text of special tokens, too.
        reasoning: stop strings are looked for in the answer behind this reasoning alone; None: in the whole text.
    """

    strings: tuple[str, ...] = ()
    tokens: frozenset[int] | None = None
    special: bool = False
    reasoning: Reasoning | None = None


class _Rows(NamedTuple):
    """Rows of the table that hold a set: the first of them, their number, and a bound on the tokens that end a text in
    one of them."""

    first: int
    states: int
    ending: int


def _automaton(stops: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Build the automaton of these stop strings. Return the goto table [states, 256] of the trie with failure links
    followed, and which states complete a stop string. State 0 is the root."""
    children: list[dict[int, int]] = [{}]
    complete = [False]
    for stop in stops:
        state = 0
        for byte in stop:
            if byte not in children[state]:
                children.append({})
                complete.append(False)
                children[state][byte] = len(children) - 1
            state = children[state][byte]
        complete[state] = True
    goto = np.zeros((len(children), 256), dtype=np.int64)
    failure = [0] * len(children)
    queue = list(children[0].values())
    for byte, child in children[0].items():
        goto[0, byte] = child
    for state in queue:  # breadth first: a failure link leads to a shorter state
        goto[state] = goto[failure[state]]
        complete[state] |= complete[failure[state]]
        for byte, child in children[state].items():
            failure[child] = int(goto[failure[state], byte])
            goto[state, byte] = child
            queue.append(child)
    return goto, np.array(complete)


class StopTable:
    """Transition tables of all stop sets in use, one after another in one tensor.

    `start(ends)` returns the state in which a request with this set begins; sets are remembered. `version` changes
    whenever `table` becomes another tensor. `eos`: [V] bool, the checkpoint's end tokens; `num_eos`: their number.
    `most_ending`: [states] int64, no fewer than the tokens that end a text in any state of the same set.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        vocab_size: int,
        device: torch.device,
        eos: Collection[int] = (),
        with_special: Callable[[], Sequence[bytes]] = list,
    ) -> None:
        """eos: the checkpoint's end tokens. with_special: returns the bytes of tokens with those of special ones."""
        self._token_bytes, self._with_special, self._vocab_size = token_bytes, with_special, vocab_size
        self._eos, self.num_eos = sorted(eos), len(eos)
        self.eos = torch.isin(torch.arange(vocab_size), torch.tensor(self._eos, dtype=torch.int64)).to(device)
        self.table = torch.stack((torch.zeros(vocab_size), torch.ones(vocab_size))).to(device=device, dtype=torch.int32)
        self.table[NO_STOPS, self.eos] = STOPPED
        self.most_ending = torch.full((2,), self.num_eos, device=device)
        self._states = 2  # rows in use, free ones among them
        self._most_states = MOST_KEPT // self.table[0].nbytes
        self._sets = {StopSet(): _Rows(NO_STOPS, 1, self.num_eos)}
        self._free: list[tuple[int, int]] = []  # first row and number of rows
        self.version = 0

    @functools.cached_property
    def _bytes(self) -> np.ndarray:
        """Bytes of every token: [V, longest] int16, padded with -1. They are made for the first stop string."""
        return _padded(self._token_bytes, self._vocab_size)

    @functools.cached_property
    def _special_bytes(self) -> np.ndarray:
        """The same with the text of special tokens."""
        return _padded(self._with_special(), self._vocab_size)

    def forget(self, held: Collection[StopSet]) -> None:
        """Drop the sets that no request holds, where all sets take more than MOST_KEPT. Their rows are used again."""
        if sum(rows.states for rows in self._sets.values()) <= self._most_states:
            return
        dropped = [self._sets.pop(ends)[:2] for ends in [*self._sets] if ends != StopSet() and ends not in held]
        free: list[tuple[int, int]] = []
        for first, count in sorted(self._free + dropped):  # neighbours become one
            if free and sum(free[-1]) == first:
                free[-1] = free[-1][0], free[-1][1] + count
            else:
                free.append((first, count))
        self._free = free

    @property
    def used(self) -> bool:
        """True once any request has stop strings or end tokens of its own. Until then the table is not read."""
        return len(self._sets) > 1

    @property
    def ending(self) -> tuple[int, ...]:
        """The numbers that stand in `most_ending` for sets in use, ascending."""
        return tuple(sorted({rows.ending for rows in self._sets.values()}))

    def start(self, ends: StopSet) -> int:
        """Return the first state for this set. Add its states to the table where they are new."""
        if ends not in self._sets:
            block = self._block(ends)
            offset = self._room(len(block))
            ending = 1 << int((block < 0).sum(1).max()).bit_length()  # a power of two, so that numbers repeat
            block = np.where(block >= 0, block + np.int32(offset), STOPPED).astype(np.int32, copy=False)
            self.table[offset : offset + len(block)] = torch.from_numpy(block).to(self.table.device)
            self.most_ending[offset : offset + len(block)] = ending
            self._sets[ends] = _Rows(offset, len(block), ending)
        return self._sets[ends].first

    def _block(self, ends: StopSet) -> np.ndarray:
        """Return the next state of every (state, token) of a set, -1 where the token ends the text."""
        if ends.strings:
            goto, complete = _automaton([stop.encode() for stop in ends.strings])
            if ends.reasoning is not None:
                marks = ends.reasoning.marks
                leading = [marks.closing, (marks.message.encode(),)] if marks.message else [marks.closing]
                goto, complete = wait(goto, complete, [_automaton(texts) for texts in leading], ends.reasoning)
            block = _fold(goto, complete, self._special_bytes if ends.special else self._bytes)
        else:
            block = np.zeros((1, self._vocab_size), dtype=np.int32)
        block[:, self._eos if ends.tokens is None else sorted(ends.tokens)] = -1
        return block

    def _room(self, size: int) -> int:
        """Take `size` rows that are free, and return the first."""
        for index, (first, count) in enumerate(self._free):
            if count >= size:
                self._free[index] = first + size, count - size
                return first
        self._states += size
        if self._states > len(self.table):
            self._grow()
        return self._states - size

    def _grow(self) -> None:
        """Make room for the states in use and up to as many more, so that the tensor is rarely replaced."""
        more = min(self._states, self._most_states)
        added = self._states + more - len(self.table)
        self.table = torch.nn.functional.pad(self.table, (0, 0, 0, added))
        self.most_ending = torch.nn.functional.pad(self.most_ending, (0, added))
        self.version += 1

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the next states, int64 in the shape of tokens. state [R, n] with tokens [R, n, C] or [R, n]."""
        wide = state.unsqueeze(-1).expand_as(tokens) if tokens.dim() > state.dim() else state
        return self.table[wide, tokens].to(torch.int64)


def _padded(pieces: Sequence[bytes], vocab_size: int) -> np.ndarray:
    """Return the bytes of the first V tokens as [V, longest] int16, padded with -1."""
    pieces = pieces[:vocab_size]
    longest = max(map(len, pieces), default=0)
    made = np.full((vocab_size, max(longest, 1)), -1, dtype=np.int16)
    for token, item in enumerate(pieces):
        made[token, : len(item)] = list(item)
    return made


def _fold(goto: np.ndarray, complete: np.ndarray, token_bytes: np.ndarray) -> np.ndarray:
    """Return the next state of every (state, token), -1 where a stop string completes inside the token. token_bytes:
    of `_padded`."""
    done = len(goto)  # one more state, which no byte leaves: a stop string is complete
    after = np.pad(np.where(complete[goto], done, goto), ((0, 1), (0, 0)), constant_values=done).astype(np.int32)
    states = np.repeat(np.arange(done, dtype=np.int32)[:, None], len(token_bytes), axis=1)
    for column in token_bytes.T:
        longer = np.flatnonzero(column >= 0)  # most tokens are short
        states[:, longer] = after[states[:, longer], column[longer]]
    states[states == done] = -1
    return states


def find_stop(written: bytes, stops: Sequence[str]) -> tuple[int, int] | None:
    """Return where the stop string that is complete first begins and ends, of several the longest; None where there is
    none."""
    places = [(written.find(stop.encode()), len(stop.encode())) for stop in stops]
    ends = [(start + size, start) for start, size in places if start >= 0]
    return min(ends)[::-1] if ends else None
