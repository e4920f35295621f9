"""Stop strings on the device: an Aho-Corasick automaton over the bytes that tokens add, folded into one table by state
and token.

A beam carries one state. `table[state, token]` is its next state, and state 0 means that a stop string is complete. So
a stop string ends a beam exactly where an end-of-sequence token would, inside any layer, and nothing is read back to
the host.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

STOPPED, NO_STOPS = 0, 1  # states: a stop string is complete; the request has none
MOST_KEPT = 1 << 28  # bytes of sets, beyond which those that no request holds are dropped


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

    `start(stops)` returns the state in which a request with these stop strings begins; sets are remembered. `version`
    changes whenever `table` becomes another tensor.
    """

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, device: torch.device) -> None:
        self._token_bytes, self._vocab_size = token_bytes, vocab_size
        self.table = torch.stack((torch.zeros(vocab_size), torch.ones(vocab_size))).to(device=device, dtype=torch.int32)
        self._states = 2  # rows in use, free ones among them
        self._most_states = MOST_KEPT // self.table[0].nbytes
        self._sets: dict[tuple[str, ...], tuple[int, int]] = {(): (NO_STOPS, 1)}  # first state and number of states
        self._free: list[tuple[int, int]] = []  # first row and number of rows
        self.version = 0

    @functools.cached_property
    def _bytes(self) -> np.ndarray:
        """Bytes of every token: [V, longest] int16, padded with -1. They are made for the first stop string."""
        some = self._token_bytes[: self._vocab_size]
        longest = max(map(len, some), default=0)
        made = np.full((self._vocab_size, max(longest, 1)), -1, dtype=np.int16)
        for token, item in enumerate(some):
            made[token, : len(item)] = list(item)
        return made

    def forget(self, held: Collection[tuple[str, ...]]) -> None:
        """Drop the sets that no request holds, where all sets take more than MOST_KEPT. Their rows are used again."""
        if sum(count for _, count in self._sets.values()) <= self._most_states:
            return
        dropped = [self._sets.pop(stops) for stops in [*self._sets] if stops and stops not in held]
        free: list[tuple[int, int]] = []
        for first, count in sorted(self._free + dropped):  # neighbours become one
            if free and sum(free[-1]) == first:
                free[-1] = free[-1][0], free[-1][1] + count
            else:
                free.append((first, count))
        self._free = free

    @property
    def used(self) -> bool:
        """True once any request has stop strings."""
        return len(self._sets) > 1

    def start(self, stops: tuple[str, ...]) -> int:
        """Return the first state for these stop strings. Add their states to the table where they are new."""
        if stops not in self._sets:
            goto, complete = _automaton([stop.encode() for stop in stops])
            block = self._fold(goto, complete)
            offset = self._room(len(block))
            block = np.where(block >= 0, block + np.int32(offset), STOPPED).astype(np.int32, copy=False)
            self.table[offset : offset + len(block)] = torch.from_numpy(block).to(self.table.device)
            self._sets[stops] = offset, len(block)
        return self._sets[stops][0]

    def _room(self, size: int) -> int:
        """Take `size` rows that are free, and return the first."""
        for place, (first, count) in enumerate(self._free):
            if count >= size:
                self._free[place] = first + size, count - size
                return first
        self._states += size
        if self._states > len(self.table):
            self._grow()
        return self._states - size

    def _grow(self) -> None:
        """Make room for the states in use and up to as many more, so that the tensor is rarely replaced."""
        more = min(self._states, self._most_states)
        wide = self.table.new_zeros(self._states + more, self._vocab_size)
        wide[: len(self.table)] = self.table
        self.table = wide
        self.version += 1

    def _fold(self, goto: np.ndarray, complete: np.ndarray) -> np.ndarray:
        """Return the next state of every (state, token), -1 where a stop string completes inside the token."""
        done = len(goto)  # one more state, which no byte leaves: a stop string is complete
        after = np.pad(np.where(complete[goto], done, goto), ((0, 1), (0, 0)), constant_values=done).astype(np.int32)
        states = np.repeat(np.arange(done, dtype=np.int32)[:, None], len(self._bytes), axis=1)
        for column in self._bytes.T:
            longer = np.flatnonzero(column >= 0)  # most tokens are short
            states[:, longer] = after[states[:, longer], column[longer]]
        states[states == done] = -1
        return states

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the next states, int64 in the shape of tokens. state [R, n] with tokens [R, n, C] or [R, n]."""
        wide = state.unsqueeze(-1).expand_as(tokens) if tokens.dim() > state.dim() else state
        return self.table[wide, tokens].to(torch.int64)


def find_stop(written: bytes, stops: Sequence[str]) -> int | None:
    """Return where the stop string that is complete first begins, of several the longest; None where there is none."""
    places = [(written.find(stop.encode()), len(stop.encode())) for stop in stops]
    found = [(start + size, start) for start, size in places if start >= 0]
    return min(found)[1] if found else None
