"""Slot bookkeeping with integers alone: after any sequence of iterations every beam sees exactly its own path, in a
row kept compact.

Guards: a slot moved to the wrong place, an ancestor lost or a stranger kept, a common prefix that grows too far or not
at all.
"""

from __future__ import annotations

import random

import pytest
import torch

from dsbd_cli.engine.core.slots import Layout, SlotTable, backlog_slots, compact, node_slots


class Simulation:
    """One row driven by random forests; `held` is what a cache would hold in each slot."""

    def __init__(self, seed: int, beams: int, drafts: int, depth: int) -> None:
        self.random = random.Random(seed)
        self.beams, self.drafts, self.depth = beams, drafts, depth
        self.table = SlotTable.empty(1, 400, torch.device("cpu"))
        self.held: list[int | None] = [None] * 400
        self.next_id = 0
        prompt = [self._new(slot) for slot in range(5)]
        self.table.used[0] = self.table.common_prefix[0] = 5
        self.table.positions[0, :5] = torch.arange(5)
        self.paths = [prompt] + [[] for _ in range(beams - 1)]
        self.valid = torch.tensor([[True] + [False] * (beams - 1)])
        self.ancestors = torch.zeros(1, beams, 1, dtype=torch.bool)

    def _new(self, slot: int) -> int:
        self.held[slot] = self.next_id
        self.next_id += 1
        return self.next_id - 1

    def iterate(self) -> None:
        nodes = self.beams + self.drafts * self.depth
        suffix = int(self.table.used[0] - self.table.common_prefix[0])
        window = suffix + nodes
        seen = torch.zeros(1, nodes, window, dtype=torch.bool)
        seen[:, : self.beams, : self.ancestors.shape[2]] = self.ancestors[..., :window]
        slots = node_slots(self.table, nodes)[0].tolist()
        paths: list[list[int]] = []
        for node, slot in enumerate(slots):
            layer = 0 if node < self.beams else (node - self.beams) // self.drafts + 1
            if layer == 0:
                above = self.paths[node]
            else:
                start = 0 if layer == 1 else self.beams + (layer - 2) * self.drafts
                parent = self._pick_parent(start, layer)
                seen[0, node] = seen[0, parent]
                above = paths[parent]
            seen[0, node, suffix + node] = True
            paths.append([*above, self._new(slot)])
            self.table.positions[0, slot] = len(paths[-1]) - 1
        self._check_masks(seen, paths)
        layer = self.random.randint(0, self.depth)
        start = 0 if layer == 0 else self.beams + (layer - 1) * self.drafts
        count = self.beams if layer == 0 else self.drafts
        choices = [n for n in range(start, start + count) if layer or bool(self.valid[0, n])]
        parents = [self.random.choice(choices) for _ in range(self.beams)]
        self.valid = torch.tensor([[self.random.random() < 0.8 for _ in range(self.beams)]])
        self.valid[0, 0] = True
        run = start + self.table.used if layer else self.table.drafted
        kept = {self.held[slot] for slot in range(int(run[0]))}
        moved = compact(self.table, seen[:, parents], self.valid, run)
        before = list(self.held)
        for src_slots, dst_slots in zip(moved.src_slots[0].tolist(), moved.dst_slots[0].tolist(), strict=True):
            self.held[dst_slots] = before[src_slots]
        self.ancestors = moved.ancestors
        drafted, used = int(self.table.drafted[0]), int(self.table.used[0])
        assert set(self.held[:drafted]) == kept & set(self.held[:used])
        self.paths = [paths[parent] for parent in parents]

    def _pick_parent(self, start: int, layer: int) -> int:
        count = self.beams if layer == 1 else self.drafts
        choices = [n for n in range(start, start + count) if layer > 1 or bool(self.valid[0, n])]
        return self.random.choice(choices)

    def _check_masks(self, seen: torch.Tensor, paths: list[list[int]]) -> None:
        mask = Layout.of(self.table, 0, seen.shape[-1], 400).mask(seen)[0]
        for node, path in enumerate(paths):
            if node < self.beams and not self.valid[0, node]:
                continue
            slots = mask[node].nonzero().flatten().tolist()
            assert [self.held[slot] for slot in slots] == path
            assert self.table.positions[0, slots].tolist() == list(range(len(path)))

    def check_lagging(self, count: int) -> None:
        """The last slots in use see their own path; slots before the first see slot 0 alone."""
        live = [path for path, valid in zip(self.paths, self.valid[0].tolist(), strict=True) if valid]
        layout = Layout.of(self.table, 0, self.ancestors.shape[-1], 400)
        wanted, mask = backlog_slots(self.table, layout, self.ancestors, count)
        assert wanted[0, -1] == self.table.used[0] - 1
        for slot, row in zip(wanted[0].tolist(), mask[0], strict=True):
            slots = row.nonzero().flatten().tolist()
            if slot < 0:
                assert slots == [0]
                continue
            token = self.held[slot]
            path = next(path for path in live if token in path)
            assert [self.held[seen] for seen in slots] == path[: path.index(token) + 1]

    def check_compact(self) -> None:
        """Slots hold the union of the live paths and nothing else; the common prefix is their common prefix."""
        live = [path for path, valid in zip(self.paths, self.valid[0].tolist(), strict=True) if valid]
        used, common_prefix = int(self.table.used[0]), int(self.table.common_prefix[0])
        assert set(self.held[:used]) == {item for path in live for item in path}
        assert used == len({item for path in live for item in path})
        common = 0
        while all(len(path) > common and path[common] == live[0][common] for path in live):
            common += 1
        assert common_prefix == common


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 3, 2), (4, 8, 4), (3, 2, 0)])
def test_beams_see_their_own_path_and_nothing_else(shape: tuple[int, int, int]) -> None:
    for seed in range(6):
        row = Simulation(seed, *shape)
        for _ in range(12):
            row.iterate()
            row.check_compact()
            for count in (1, 4, 40):
                row.check_lagging(count)


def small_table() -> SlotTable:
    index = torch.arange(20).unsqueeze(0)
    return SlotTable(torch.tensor([7]), torch.tensor([2]), torch.tensor([7]), index, index.clone())


def test_common_prefix_swallows_the_suffix_when_one_beam_is_left() -> None:
    table = small_table()
    ancestors = torch.tensor([[[1, 0, 1, 1, 0], [1, 1, 0, 0, 1]]], dtype=torch.bool)
    moved = compact(table, ancestors, torch.tensor([[True, False]]), table.used)
    assert (int(table.used), int(table.common_prefix)) == (5, 5)
    assert moved.src_slots[0, :3].tolist() == [2, 4, 5]
    assert not moved.ancestors.any()


def test_a_row_without_live_beams_keeps_its_common_prefix_only() -> None:
    table = small_table()
    compact(table, torch.ones(1, 2, 5, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.bool), table.used)
    assert (int(table.used), int(table.common_prefix)) == (2, 2)
