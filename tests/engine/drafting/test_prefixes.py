"""Sequences in a packed cache: the logits of plain sequences, each token run once."""

from __future__ import annotations

import random

import torch

from dsbd_cli.engine.drafting.bridge.prefix_tree import PrefixCache
from dsbd_cli.engine.protocols import ForestInput
from tests.helpers.toy import HashModel

V = 50


def alone(path: list[int]) -> torch.Tensor:
    """[V] logits of a sequence in a model of its own."""
    model = HashModel(V, seed=3)
    model.reserve(1, len(path) + 1)
    index = torch.arange(len(path))
    mask = (index[None, :] <= index[:, None])[None]
    logits = model.forward(ForestInput(torch.tensor([path]), index[None], index[None], mask, index[None]))
    assert logits is not None
    return logits[0, -1]


def test_logits_are_those_of_the_sequences_alone() -> None:
    """Guards slots that are freed too early or seen by strangers, the growth of the cache, rows that are replaced,
    dropped and reordered: HashModel's logits depend on every visible token and its position."""
    rng = random.Random(1)
    model = HashModel(V, seed=3)
    cache = PrefixCache(model)
    rows = 3
    for row in range(rows):
        cache.reset(row)
    paths = [[[rng.randrange(V) for _ in range(rng.choice((1, 20, 70)))]] for _ in range(rows)]
    for round_ in range(60):
        for row in range(rows):
            old = rng.choice(paths[row])
            paths[row] = [
                rng.choice(paths[row])[: rng.randrange(1, len(old) + 1)] + rng.choices(range(V), k=rng.randrange(4))
                for _ in range(rng.randrange(1, 4))
            ] + [old + rng.choices(range(4), k=2)]
        if round_ % 9 == 8:
            row = rng.randrange(rows)
            fresh = [rng.randrange(V) for _ in range(rng.randrange(1, 90))]
            if round_ % 2:  # as a prompt does that begins like the one before it
                old = rng.choice(paths[row])
                fresh = old[: rng.randrange(len(old) + 1)] + fresh
            cache.reset(row, fresh)
            paths[row] = [fresh]
        logits = cache.run(paths)
        for row in range(rows):
            for node, path in enumerate(paths[row]):
                assert torch.equal(logits[row, node], alone(path))


def test_known_beginnings_are_not_run_again() -> None:
    """Guards the cost: one forward, as wide as the new tokens and the last ones; and a bounded cache."""
    model = HashModel(V, seed=3)
    widths: list[int] = []
    forward = model.forward

    def counting(batch: ForestInput, *, logits: bool = True) -> torch.Tensor | None:
        widths.append(batch.tokens.shape[1])
        return forward(batch, logits=logits)

    model.forward = counting  # type: ignore[method-assign]
    cache = PrefixCache(model)
    cache.reset(0)
    prompt = list(range(40))
    cache.run([[prompt]])
    assert widths == [40, 1]
    cache.run([[[*prompt, 1], [*prompt, 2], prompt]])
    assert widths[2:] == [3]
    cache.run([[[*prompt, 1, 5, 6]]])
    assert widths[3:] == [2]
    for token in range(50):
        cache.run([[[*prompt, 1, 5, 6, token, token]]])
    assert model._tokens.shape[1] <= 96


def test_a_new_prompt_is_read_from_where_it_parts() -> None:
    """Guards what stands in the first slots of a row; and what stands elsewhere, which may hold NaN and goes."""
    model = HashModel(V, seed=3)
    cache = PrefixCache(model)
    cache.reset(0)
    prompt = list(range(40))
    cache.run([[[*prompt, 1], [*prompt, 2]]])
    cache.reset(0, [*prompt, 2, 3])
    assert (model._tokens[0] >= 0).sum() == 40, "the second path's last token stood behind the first one's"
    forwards = cache.forwards
    assert torch.equal(cache.run([[[*prompt, 2, 3]]])[0, 0], alone([*prompt, 2, 3]))
    assert cache.forwards == forwards + 1


def test_release_and_absent_rows() -> None:
    cache = PrefixCache(HashModel(V, seed=3))
    for row in range(2):
        cache.reset(row)
    logits = cache.run([[], [[4, 5]]])
    assert torch.equal(logits[1, 0], alone([4, 5]))
    cache.release()
    cache.reset(0)
    assert torch.equal(cache.run([[[4, 5]]])[0, 0], alone([4, 5]))
