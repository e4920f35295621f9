"""Token sequences in a model's packed cache, with shared beginnings stored once. The bookkeeping is on the host.

It serves a draft that reads its own tokenization of the beams, whose sequences have nothing to do with the target's
slots. The nodes of a row form a tree. A node keeps its slot as long as it lives, and sees its ancestors by mask, so
nothing is ever moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput, ForestModel

STEP = 32
CHUNK = 512


@dataclass(slots=True, eq=False)
class _TokenNode:
    """A token in a slot. slot: -1 for the root, -2 for a removed node. depth: its position. seen: bit mask of the slots
    that it sees, its own included."""

    token: int
    slot: int
    depth: int
    seen: int
    children: dict[int, _TokenNode] = field(default_factory=dict)


class _RowTree:
    """Tree of the tokens of one row, and its free slots."""

    def __init__(self, slots: int) -> None:
        self.root = _TokenNode(-1, -1, -1, 0)
        self.free = list(range(slots - 2, -1, -1))  # the last slot is the trash slot
        self.positions = np.zeros(slots, dtype=np.int64)

    def grow(self, slots: int) -> None:
        """Add slots. The old trash slot becomes an ordinary one."""
        before = len(self.positions)
        self.free[:0] = range(slots - 2, before - 2, -1)
        self.positions = np.pad(self.positions, (0, slots - before))

    def missing(self, path: Sequence[int]) -> int:
        """Return how many tokens of a path are not stored."""
        node = self.root
        for depth, token in enumerate(path):
            child = node.children.get(token)
            if child is None:
                return len(path) - depth
            node = child
        return 0

    def leading(self, path: Sequence[int]) -> int:
        """Return how many tokens of a path are in the first slots, in order. An empty row gives out its slots in this
        order."""
        node = self.root
        for depth, token in enumerate(path):
            child = node.children.get(token)
            if child is None or child.slot != depth:
                return depth
            node = child
        return len(path)

    def insert(self, path: Sequence[int]) -> tuple[_TokenNode, list[_TokenNode]]:
        """Store a path. Return its last node, and the nodes that had to be made for it."""
        node, made = self.root, []
        for token in path:
            child = node.children.get(token)
            if child is None:
                slot = self.free.pop()
                child = _TokenNode(token, slot, node.depth + 1, node.seen | 1 << slot)
                self.positions[slot] = child.depth
                node.children[token] = child
                made.append(child)
            node = child
        return node, made

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Remove every node that is on none of these paths."""
        kept: dict[_TokenNode, set[int]] = {}
        for path in paths:
            node = self.root
            for token in path:
                next_node = node.children.get(token)
                if next_node is None:
                    break
                kept.setdefault(node, set()).add(token)
                node = next_node
        stack = [self.root]
        while stack:
            node = stack.pop()
            mine = kept.get(node, set())
            for token, child in list(node.children.items()):
                if node.slot == -2 or token not in mine:
                    del node.children[token]
                    self.free.append(child.slot)
                    child.slot = -2  # its children go as well
                stack.append(child)


class PrefixCache:
    """A cache that runs sequences of tokens through a ForestModel, each token once as long as it is kept."""

    def __init__(self, model: ForestModel) -> None:
        self.model = model
        self.forwards = 0
        self._rows: list[_RowTree] = []
        self._slots = 0
        self._copies_prefixes = model.copies_prefixes  # leading slots hold all that the model keeps of a text

    def reset(self, row: int, path: Sequence[int] = ()) -> None:
        """Forget a row, except for the beginning of `path` that its leading slots hold. The row may be a new one."""
        while len(self._rows) <= row:
            self._rows.append(_RowTree(max(self._slots, STEP)))
        self._slots = max(self._slots, STEP)
        kept = self._rows[row].leading(path) if self._copies_prefixes else 0
        self._rows[row] = _RowTree(self._slots)
        self._rows[row].insert(path[:kept])
        self.model.reserve(len(self._rows), self._slots)
        self.model.clear(row, kept)

    def release(self) -> None:
        """Forget everything and free the memory."""
        self._rows, self._slots = [], 0
        self.model.release()

    def run(self, paths: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        """Return the logits [R, m, V] after each path. paths[row] holds up to m non-empty token sequences. Tokens that
        are stored are not run again, except for the last of each path. Logits of absent paths are meaningless."""
        self._make_room(paths)
        lasts: list[list[_TokenNode]] = []
        fresh: list[list[_TokenNode]] = []
        for row, wanted in zip(self._rows, paths, strict=True):
            slots = [row.insert(path) for path in wanted]
            lasts.append([last for last, _ in slots])
            made = [node for _, nodes in slots for node in nodes]
            fresh.append(sorted(made, key=lambda node: node.depth))
        width = max((len(nodes) for nodes in lasts), default=0)
        longest = max((len(nodes) for nodes in fresh), default=0)
        for start in range(0, longest, CHUNK):
            if longest <= STEP:
                break  # few enough to run together with the last ones
            self._forward([nodes[start : start + CHUNK] for nodes in fresh], logits=False)
        if longest > STEP:
            fresh = [[] for _ in fresh]
        # a new node that is the last of a path runs among the last ones alone
        not_last = [[node for node in new if node not in last] for new, last in zip(fresh, lasts, strict=True)]
        pad = max((len(nodes) for nodes in not_last), default=0)
        nodes = [[*[None] * (pad - len(new)), *new, *last] for new, last in zip(not_last, lasts, strict=True)]
        logits = self._forward(nodes, logits=True)
        assert logits is not None
        return logits[:, pad : pad + width]

    def _make_room(self, paths: Sequence[Sequence[Sequence[int]]]) -> None:
        """Make room for everything that is new. First remove what is on no path, then grow the cache."""
        most = 0
        for row, wanted in zip(self._rows, paths, strict=True):
            need = sum(row.missing(path) for path in wanted)
            if need > len(row.free):
                row.keep(wanted)
            most = max(most, need - len(row.free))
        if most > 0:
            more = max(most, self._slots // 4)
            self._slots = -(-(self._slots + more) // STEP) * STEP
            self.model.reserve(len(self._rows), self._slots)
            for row in self._rows:
                row.grow(self._slots)

    def _forward(self, nodes: Sequence[Sequence[_TokenNode | None]], *, logits: bool) -> Tensor | None:
        """Run nodes of each row. None, and what pads shorter rows, is written to the trash slot and sees slot 0."""
        count, width = len(nodes), max(map(len, nodes))
        active = self._slots
        tokens = np.zeros((count, width), dtype=np.int64)
        positions, slots = np.zeros_like(tokens), np.full_like(tokens, self._slots - 1)
        mask = np.zeros((count, width, active), dtype=bool)
        mask[:, :, 0] = True
        for r, row in enumerate(nodes):
            for i, node in enumerate(row):
                if node is not None:
                    tokens[r, i], positions[r, i], slots[r, i] = node.token, node.depth, node.slot
                    bits = np.frombuffer(node.seen.to_bytes(active // 8, "little"), dtype=np.uint8)
                    mask[r, i] = np.unpackbits(bits, bitorder="little")
        batch = ForestInput(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            mask=torch.from_numpy(mask),
            slot_positions=torch.from_numpy(np.stack([row.positions for row in self._rows])),
        )
        self.forwards += 1
        return self.model.forward(batch.to(self.model.device), logits=logits)
