"""Index of the prompts in the rows of a model's cache, to find the row that holds the longest beginning of a new
prompt.

Prompts are compared in whole blocks of PREFIX_STEP tokens, so that a copied beginning ends where a block of the prefill
ends (docs/hardware.md). No tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsbd_cli.engine.core.slots import PREFIX_STEP

Block = tuple[int, ...]

LONG = -1  # no token


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """Source of the beginning of a row's prompt: `count` leading slots of row `src_row`, which may be the row itself.
    With count 0 the prompt is read from its first token."""

    src_row: int
    count: int = 0


@dataclass(slots=True, eq=False)
class _BlockNode:
    """A block of tokens behind the blocks of its ancestors in the tree. rows: rows that hold all these blocks, each
    with the wave in which it is read."""

    children: dict[Block, _BlockNode] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)


class PrefixIndex:
    """A tree of blocks over the prompts in the rows of a cache."""

    def __init__(self, switch_position: int | None = None) -> None:
        """switch_position: see SwitchingModel. Longer prompts share nothing with others; None: all share."""
        self._switch_position = switch_position
        self._root = _BlockNode()
        self._held: dict[int, list[Block]] = {}

    def clear(self) -> None:
        """Forget the prompts of all rows."""
        self._root, self._held = _BlockNode(), {}

    def _blocks(self, prompt: Sequence[int]) -> list[Block]:
        """Return the whole blocks of a prompt without its last token. Those of long prompts begin with a mark."""
        ends = range(PREFIX_STEP, len(prompt), PREFIX_STEP)
        blocks = [tuple(prompt[end - PREFIX_STEP : end]) for end in ends]
        if blocks and self._switch_position is not None and len(prompt) > self._switch_position:
            blocks[0] = (LONG, *blocks[0])
        return blocks

    def put(self, row: int, prompt: Sequence[int], wave: int = 0) -> None:
        """Store that the row holds this prompt without its last token, and nothing else."""
        self._put(row, self._blocks(prompt), wave)

    def _put(self, row: int, blocks: list[Block], wave: int) -> None:
        self.drop(row)
        self._held[row] = blocks
        node = self._root
        for block in blocks:
            node = node.children.setdefault(block, _BlockNode())
            node.rows[row] = wave

    def drop(self, row: int) -> None:
        """Store that the row holds nothing."""
        node = self._root
        for block in self._held.pop(row, ()):
            child = node.children[block]
            del child.rows[row]
            if not child.rows:
                del node.children[block]
                return
            node = child

    def keep(self, row: int, slots: int) -> None:
        """Reduce what the row holds to at most its leading `slots` slots."""
        held = self._held.get(row)
        if held is not None and len(held) * PREFIX_STEP > slots:
            self._put(row, held[: slots // PREFIX_STEP], 0)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        held = self._held
        self.clear()
        for number, row in enumerate(rows):
            self._put(number, held.get(row, []), 0)

    def _longest(self, blocks: Sequence[Block]) -> tuple[int, _BlockNode]:
        """Return how many of the leading blocks some row holds, and the tree node of the last of them."""
        node = self._root
        for count, block in enumerate(blocks):
            child = node.children.get(block)
            if child is None:
                return count, node
            node = child
        return len(blocks), node

    def plan(self, prompts: Mapping[int, Sequence[int]]) -> list[dict[int, PrefixCopy]]:
        """Return how the prompts of new rows are read, in waves: for each row what it copies. A row of the first wave
        copies from a row that holds an earlier prompt. A row of a later wave copies from a row that was read in an
        earlier wave. All copies of a wave are made before any of its rows is written."""
        new = PrefixIndex(self._switch_position)
        waves: list[dict[int, PrefixCopy]] = []
        for row, prompt in prompts.items():
            blocks = self._blocks(prompt)
            held_blocks, held_node = self._longest(blocks)
            new_blocks, new_node = new._longest(blocks)
            wave, copy = 0, PrefixCopy(row)
            if new_blocks > held_blocks:
                src_row = min(new_node.rows, key=new_node.rows.__getitem__)
                wave, copy = new_node.rows[src_row] + 1, PrefixCopy(src_row, new_blocks * PREFIX_STEP)
            elif held_blocks:
                src_row = row if row in held_node.rows else next(iter(held_node.rows))
                copy = PrefixCopy(src_row, held_blocks * PREFIX_STEP)
            new._put(row, blocks, wave)
            waves.extend({} for _ in range(wave + 1 - len(waves)))
            waves[wave][row] = copy
        return waves
