"""The toys find paths as attention does, so that they can be trusted to catch mistakes above the models."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsbd_cli.engine.protocols import ForestModel
from tests.helpers.tiny import Row, V, forest_input
from tests.helpers.toy import HashModel, TableModel

SLOTS = 48
TABLE = torch.randn(V, V, V, generator=torch.Generator().manual_seed(0))
TOYS: dict[str, Callable[[], ForestModel]] = {
    "table 1": lambda: TableModel(TABLE[0]),
    "table 2": lambda: TableModel(TABLE),
    "hash": lambda: HashModel(V, seed=3),
    "hash with noise": lambda: HashModel(V, seed=3, noise=0.4),
}


def alone(make: Callable[[], ForestModel], tokens: list[int]) -> Tensor:
    """[V] logits after a sequence, one token per slot in order."""
    model = make()
    model.reserve(1, len(tokens) + 1)
    row = Row(list(tokens), list(range(-1, len(tokens) - 1)), list(range(len(tokens))))
    logits = model.forward(forest_input([row], [list(range(len(tokens)))], len(tokens) + 1, len(tokens)))
    assert logits is not None
    return logits[0, -1]


@pytest.mark.parametrize("name", TOYS)
def test_forest_equals_separate_paths(name: str) -> None:
    """Guards the toys themselves: trees in two rows, moved, grown and selected, against each path alone."""
    rng, make = random.Random(1), TOYS[name]
    model = make()
    model.reserve(2, SLOTS)
    free = [list(range(SLOTS - 1)) for _ in range(2)]
    rows = [Row(), Row()]
    nodes = [[row.add(rng, i - 1, spare) for i in range(n)] for row, spare, n in zip(rows, free, (5, 3), strict=True)]
    model.forward(forest_input(rows, nodes, SLOTS, SLOTS - 1), logits=False)
    for row, spare in zip(rows, free, strict=True):
        row.slots, old = rng.sample([*row.slots, *spare], len(row.slots)), row.slots
        spare[:] = [slot for slot in range(SLOTS - 1) if slot not in row.slots]
        pairs = torch.tensor([old, row.slots])
        index = rows.index(row)
        whole = torch.full((2, 2, pairs.shape[1]), SLOTS - 1)
        whole[:, index] = pairs
        model.move(whole[0], whole[1], torch.zeros(2, dtype=torch.int64))
    model.reserve(2, SLOTS + 8)
    model.select_rows(torch.tensor([1, 0]))
    rows, free = rows[::-1], free[::-1]
    nodes = [
        [row.add(rng, rng.randrange(len(row.tokens)), spare) for _ in range(9)]
        for row, spare in zip(rows, free, strict=True)
    ]
    logits = model.forward(forest_input(rows, nodes, SLOTS, SLOTS - 1))
    assert logits is not None
    for r, row in enumerate(rows):
        for i, node in enumerate(nodes[r]):
            path = [row.tokens[other] for other in row.path(node)]
            torch.testing.assert_close(logits[r, i], alone(make, path), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["table 2", "hash"])
@pytest.mark.parametrize("wrong", ["mask", "slot position", "token"])
def test_mistakes_show(name: str, wrong: str) -> None:
    """Guards the point of the toys: an ancestor hidden, misplaced or overwritten changes the logits."""
    rng, model = random.Random(2), TOYS[name]()
    model.reserve(1, SLOTS)
    row, free = Row(), list(range(SLOTS - 1))
    nodes = [[row.add(rng, i - 1, free) for i in range(6)]]
    batch = forest_input([row], nodes, SLOTS, SLOTS - 1)
    right = model.forward(batch)
    slot = row.slots[4]  # the token before the last
    if wrong == "mask":
        batch.mask[0, 5, slot] = False
    elif wrong == "slot position":
        batch.slot_positions[0, slot] += 1
    else:
        batch.tokens[0, 4] += 1
    other = model.forward(batch)
    assert right is not None
    assert other is not None
    assert (right[0, 5] - other[0, 5]).abs().max() > 0.1


def test_hash_is_like_a_language_model() -> None:
    """Guards realistic acceptance: peaked distributions, unit spread, a draft that agrees more the less noise it
    has."""
    tokens = [random.Random(4).randrange(V) for _ in range(5)]
    target = alone(lambda: HashModel(V, 7), tokens)
    assert abs(target.mean().item()) < 1.0  # 97 draws of spread 3: mean within 3.3 standard errors
    assert 2.2 < target.std().item() < 3.8
    overlap = []
    for noise in (0.0, 0.2, 0.5, 1.0):
        total = 0.0
        for first in range(20):
            p = alone(lambda: HashModel(V, 7), [first, 3]).softmax(-1)
            q = alone(lambda noise=noise: HashModel(V, 7, noise=noise), [first, 3]).softmax(-1)  # type: ignore[misc]
            total += torch.minimum(p, q).sum().item() / 20
        overlap.append(total)
    assert overlap[0] > 0.999
    assert overlap[0] > overlap[1] > overlap[2] > overlap[3]
    assert 0.5 < overlap[1] < 0.95


def test_hash_depends_on_order_and_seed() -> None:
    """Guards a hash that is a bag of words, and models of two seeds that are one."""
    base = alone(lambda: HashModel(V, 7), [1, 2, 3, 4])
    for other in (alone(lambda: HashModel(V, 7), [2, 1, 3, 4]), alone(lambda: HashModel(V, 8), [1, 2, 3, 4])):
        assert torch.corrcoef(torch.stack((base, other)))[0, 1].abs() < 0.5  # 97 values: 5 standard errors
