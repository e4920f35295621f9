"""Tries on the device: which tokens may follow the beginning of an allowed answer.

A node is a number, and its children are found by search: `keys[child] = parent * (V + 1) + token`. Nodes are numbered
layer by layer, and children by token, so that the keys ascend and this one array is the whole trie. The tries of all
catalogues are stored one after another in it. A state is a node's place in the array.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_cli.engine.constraints.legal import DEAD, FREE, NodePaths
from dsbd_cli.engine.core.topk import NEG_INF

Ids = NDArray[np.int64]
FIRST = 2  # first state of a trie; those before it are FREE and DEAD


@dataclass(frozen=True, slots=True)
class Trie:
    """Allowed answers as a trie, their end tokens included.

    Attributes:
        keys: [S] int64, parent * (V + 1) + token of every node but the root (node 0), whose key is -1.
        fanout: most children of a node by layer, layer 0 is the root; one entry per layer that has children.
        last: [A] int64, the node of each answer's end token.
        vocab_size: V.
    """

    keys: Ids
    fanout: tuple[int, ...]
    last: Ids
    vocab_size: int

    @property
    def longest(self) -> int:
        """Tokens of the longest answer, its end token included."""
        return len(self.fanout)

    def children(self, node: int) -> list[int]:
        """Return the tokens that may follow a node, ascending."""
        first_key = node * (self.vocab_size + 1)
        first, past = np.searchsorted(self.keys, (first_key, first_key + self.vocab_size))
        children: list[int] = (self.keys[first:past] - first_key).tolist()
        return children

    def find(self, tokens: Sequence[int]) -> int | None:
        """Return the node that these tokens lead to; None where there is none."""
        node = 0
        for token in tokens:
            key = node * (self.vocab_size + 1) + token
            node = int(np.searchsorted(self.keys, key))
            if node == len(self.keys) or self.keys[node] != key:
                return None
        return node


def build_trie(tokens: Ids, lengths: Ids, vocab_size: int) -> Trie:
    """Build the trie of A answers. tokens: [sum of lengths], all answers one after another. Equal answers share their
    nodes, and so have the same `last`."""
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])) if len(lengths) else lengths
    node = np.zeros(len(lengths), dtype=np.int64)
    stride, size, layer = vocab_size + 1, 1, 0
    keys, fanout = [np.array([-1], dtype=np.int64)], []
    going = np.flatnonzero(lengths > 0)
    while len(going):
        unique_keys, index = np.unique(node[going] * stride + tokens[starts[going] + layer], return_inverse=True)
        node[going] = size + index
        keys.append(unique_keys)
        fanout.append(int(np.unique(unique_keys // stride, return_counts=True)[1].max()))
        size, layer = size + len(unique_keys), layer + 1
        going = going[lengths[going] > layer]
    return Trie(np.concatenate(keys), tuple(fanout), node, vocab_size)


class TrieTable:
    """Tries of all requests that run, in one tensor [S] int64. `add` returns the state in which a request begins."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._stride, self._device = vocab_size + 1, device
        self.keys = self._empty(0, FIRST).to(device)
        self.version = 0  # changes whenever the tensor is replaced
        self._tries: dict[int, Trie] = {}  # by first state

    def _empty(self, start: int, stop: int) -> Tensor:
        """Return keys that no token has, in the order that the search needs."""
        return (torch.arange(start, stop, dtype=torch.int64) - 1) * self._stride + self._stride - 1

    def add(self, trie: Trie) -> int:
        """Put a trie into the first gap where it fits. Return the state of its root."""
        size, start = len(trie.keys), FIRST
        for taken in sorted(self._tries):
            if taken - start >= size:
                break
            start = taken + len(self._tries[taken].keys)
        if start + size > len(self.keys):
            old = self.keys
            room = start + size + (len(old) if len(old) > FIRST else 0)
            self.keys = torch.cat((old, self._empty(len(old), room).to(self._device)))
            self.version += 1
        body = torch.from_numpy(trie.keys[1:] + start * self._stride).to(self._device)
        self.keys[start + 1 : start + size] = body
        self._tries[start] = trie
        return start

    def remove(self, start: int) -> None:
        """Forget the trie that begins with this state; no running request may hold it."""
        size = len(self._tries.pop(start).keys)
        self.keys[start : start + size] = self._empty(start, start + size).to(self._device)

    def acting(self, starts: Sequence[int | None], generated: int) -> TrieStep | None:
        """Return the tries for one iteration; None where no running row has one. generated: tokens that every running
        row has at least."""
        mine = {start for start in starts if start is not None and start > FREE}
        if not mine:
            return None
        widths = [max(self._tries[start].fanout[generated:], default=1) for start in mine]
        width = 1 << (max(widths) - 1).bit_length()  # so that shapes repeat
        in_all_rows = all(start is None or start > FREE for start in starts)
        return TrieStep(self.keys, self._stride, width, in_all_rows, (self.version, width, in_all_rows))


@dataclass(frozen=True, slots=True)
class TrieStep:
    """Tries of all rows in one iteration. width: the most children that a node can have in it. in_all_rows: every row
    has a trie."""

    keys: Tensor
    stride: int
    width: int
    in_all_rows: bool
    key: Hashable
    on_host: bool = False
    changes: bool = False

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the child of each state by its token, [R, n] int64; DEAD where there is none. States that are in no
        trie stay."""
        wanted = state * self.stride + tokens
        at = torch.searchsorted(self.keys, wanted).clamp(max=len(self.keys) - 1)
        child = torch.where(self.keys[at] == wanted, at, DEAD)
        return torch.where(state > FREE, child, state)

    def of(self, nodes: NodePaths) -> _Children:
        """Return the children of these nodes."""
        state = nodes.state.flatten()
        first_key = state * self.stride
        first = torch.searchsorted(self.keys, first_key)
        return _Children(self, state, first_key, first, torch.searchsorted(self.keys, first_key + self.stride - 1))


@dataclass(frozen=True, slots=True)
class _Children:
    """Children of m = R * n nodes.

    Attributes:
        state: [m] int64, state of each node. first_key: [m] int64, first key that a child of it can have.
        first, past: [m] int64, place of its first child, and the place past its last child.
    """

    tries: TrieStep
    state: Tensor
    first_key: Tensor
    first: Tensor
    past: Tensor

    def listed(self, part: slice) -> tuple[Tensor, Tensor] | None:
        """Return the tokens [k, F] int64 that may follow the nodes `part`, ascending, and which of them are real, [k,
        F] bool. Return None where some row has no trie."""
        return self._tokens(part) if self.tries.in_all_rows else None

    def _tokens(self, part: slice) -> tuple[Tensor, Tensor]:
        keys = self.tries.keys
        at = self.first[part].unsqueeze(1) + torch.arange(self.tries.width, device=keys.device)
        real = at < self.past[part].unsqueeze(1)
        tokens = keys[at.clamp(max=len(keys) - 1)] - self.first_key[part].unsqueeze(1)
        return torch.where(real, tokens, 0), real

    def apply(self, logprobs: Tensor, part: slice, total: Tensor) -> None:
        """Set the log-probability of every token that continues no answer to -inf. Nodes without a trie keep theirs.
        logprobs: [k, V] of the nodes `part`, or fewer columns."""
        size = logprobs.shape[1]
        tokens, real = self._tokens(part)
        allowed = torch.zeros(len(tokens), size + 1, dtype=torch.bool, device=tokens.device)
        allowed.scatter_(1, torch.where(real & (tokens < size), tokens, size), True)
        allowed[:, :size] |= (self.state[part] <= FREE).unsqueeze(1)
        logprobs.masked_fill_(~allowed[:, :size], NEG_INF)
