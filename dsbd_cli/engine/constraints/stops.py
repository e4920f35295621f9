"""Stop strings on the device: an Aho-Corasick automaton over the bytes that tokens add, folded into one table by state
and token.

A beam carries one state. `table[state, token]` is its next state, and state 0 means that a stop string is complete. So
a stop string ends a beam exactly where an end-of-sequence token would, inside any layer, and nothing is read back to
the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

STOPPED, NO_STOPS = 0, 1  # states: a stop string is complete; the request has none
MOST_SETS = 64


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
        self._states = 2  # rows in use
        self._starts: dict[tuple[str, ...], int] = {(): NO_STOPS}
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

    def forget(self) -> None:
        """Drop all sets where there are more than MOST_SETS. It is called only while no request holds a state."""
        if len(self._starts) > MOST_SETS:
            self._starts, self._states = {(): NO_STOPS}, 2

    @property
    def used(self) -> bool:
        """True once any request has stop strings."""
        return len(self._starts) > 1

    def start(self, stops: tuple[str, ...]) -> int:
        """Return the first state for these stop strings. Add their states to the table where they are new."""
        if stops not in self._starts:
            goto, complete = _automaton([stop.encode() for stop in stops])
            offset = self._states
            block = self._fold(goto, complete)
            block = np.where(block >= 0, block + offset, STOPPED).astype(np.int32)
            self._states += len(block)
            if self._states > len(self.table):
                self._grow()
            self.table[offset : self._states] = torch.from_numpy(block).to(self.table.device)
            self._starts[stops] = offset
        return self._starts[stops]

    def _grow(self) -> None:
        """Make room for the states in use and as many more, so that the tensor is rarely replaced."""
        wide = self.table.new_zeros(2 * self._states, self.table.shape[1])
        wide[: len(self.table)] = self.table
        self.table = wide
        self.version += 1

    def _fold(self, goto: np.ndarray, complete: np.ndarray) -> np.ndarray:
        """Return the next state of every (state, token), -1 where a stop string completes inside the token."""
        states = np.repeat(np.arange(len(goto))[:, None], len(self._bytes), axis=1)
        for column in self._bytes.T:
            longer = np.flatnonzero(column >= 0)  # most tokens are short
            before = states[:, longer]
            stepped = goto[np.maximum(before, 0), column[longer][None, :]]
            stepped = np.where(complete[stepped], -1, stepped)
            states[:, longer] = np.where(before < 0, before, stepped)
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
