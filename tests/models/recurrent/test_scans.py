"""Recurrent layers over random trees against a plain recurrence along each node's own path, in float64.

Guards: a sibling's input or decay that is counted, an ancestor left out, a correction that misses earlier nodes, a fold
that takes too much or too little, sums that go by the order of the slots.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsbd_cli.models.recurrent.scans import (
    PART,
    carried,
    chain,
    convolve,
    delta_chain,
    fold,
    last_sums,
    selective_chain,
    selective_fold,
    selective_read,
    solve,
    weights,
)

N, P, G, H = 5, 3, 2, 4  # key dim, value dim, key heads, value heads


@dataclass
class Tree:
    """A random tree of tokens. parent: of each token, an earlier one; -1 hangs on the common prefix's state."""

    parent: list[int]
    place: list[int]  # where each token stands

    @classmethod
    def random(cls, seed: int, size: int, *, places: int = 0, path: bool = False) -> Tree:
        rng = random.Random(seed)
        parents = [i - 1 if path else rng.randrange(max(-1, i - 6), i) for i in range(size)]
        return cls(parents, rng.sample(range(places or size), size))

    def path(self, token: int) -> list[int]:
        tokens: list[int] = []
        while token >= 0:
            tokens.append(token)
            token = self.parent[token]
        return tokens[::-1]

    def seen(self, places: int) -> Tensor:
        """[1, size, places]."""
        seen = torch.zeros(1, len(self.parent), places, dtype=torch.bool)
        for token in range(len(self.parent)):
            seen[0, token, [self.place[other] for other in self.path(token)]] = True
        return seen


def inputs(seed: int, size: int, channels: bool) -> dict[str, Tensor]:
    """Of `size` tokens and one row, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator, dtype=torch.float64)

    heads = H if channels else G
    decay = -normal(size, H, N).abs() if channels else -3 * normal(size, H).abs()
    return {
        "q": normal(size, heads, N),
        "k": normal(size, heads, N) * 0.5,
        "v": normal(size, H, P),
        "g": decay,
        "beta": normal(size, H).sigmoid(),
        "state": normal(H, N, P),
    }


def stored(state: Tensor, groups: int) -> Tensor:
    """[R, H, N, P] as a state is kept: [R, G, N, H / G * P]."""
    return state.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)


def recurrence(data: dict[str, Tensor], path: list[int], *, delta: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y [H, P] of the last token of a path, its u, and the state after it, token by token."""
    state = data["state"][0].clone()
    groups = H // data["k"].shape[2]
    y = u = torch.zeros(H, P, dtype=torch.float64)
    for token in path:
        k, q = (data[name][0, token].repeat_interleave(groups, 0) for name in ("k", "q"))
        g = data["g"][0, token]
        state = state * (g if g.dim() == 2 else g.unsqueeze(1)).exp().unsqueeze(-1)
        u = data["v"][0, token]
        if delta:
            u = data["beta"][0, token].unsqueeze(1) * (u - torch.einsum("hn,hnp->hp", k, state))
        state = state + torch.einsum("hn,hp->hnp", k, u)
        y = torch.einsum("hn,hnp->hp", q, state)
    return y, u, state


def placed(values: Tensor, tree: Tree, places: int) -> Tensor:
    """[1, size, ...] -> [1, places, ...]; what stands elsewhere is other numbers that nobody may see."""
    out = torch.full((1, places, *values.shape[2:]), 7.0, dtype=values.dtype)
    out[0, tree.place] = values[0]
    return out


CASES = [(seed, channels, delta) for seed in range(6) for channels in (False, True) for delta in (False, True)]


@pytest.mark.parametrize(("seed", "channels", "delta"), CASES)
def test_a_forest_is_its_paths(seed: int, channels: bool, delta: bool) -> None:
    size, places = 23, 31
    tree, data = Tree.random(seed, size, places=places), inputs(seed, size, channels)
    seen = tree.seen(places)
    g = placed(data["g"], tree, places)
    c = (seen.double() @ g.flatten(2)).view(1, size, *g.shape[2:])
    keys, ends = placed(data["k"], tree, places), placed(c, tree, places)
    u, state = data["v"], stored(data["state"], data["k"].shape[2])
    if delta:
        (among,) = weights((data["k"],), data["k"], c, c, seen[:, :, tree.place], torch.float64)
        scale = data["beta"].unsqueeze(3)
        rest = scale * (data["v"] - carried(data["k"], c, state))
        u = solve(among.tril(-1) * scale.transpose(1, 2), rest.transpose(1, 2)).transpose(1, 2)
    _, weight = weights((data["k"], data["q"]), keys, c, ends, seen, torch.float64)
    y = (weight @ placed(u, tree, places).transpose(1, 2)).transpose(1, 2) + carried(data["q"], c, state)
    for token in range(size):
        expected, own, _ = recurrence(data, tree.path(token), delta=delta)
        torch.testing.assert_close(y[0, token], expected, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(u[0, token], own, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("seed", "channels", "delta"), CASES[:8])
def test_a_fold_is_the_state_after_its_last_token(seed: int, channels: bool, delta: bool) -> None:
    """Other places follow those that join the common prefix; none at all leaves the state as it is."""
    size, places = 9, 14
    tree, data = Tree(list(range(-1, size - 1)), list(range(size))), inputs(seed, size, channels)
    u = torch.stack([recurrence(data, tree.path(token), delta=delta)[1] for token in range(size)]).unsqueeze(0)
    c, groups = data["g"].cumsum(1), data["k"].shape[2]
    arguments = [placed(part, tree, places) for part in (data["k"], u, c)]
    for count in (0, 1, 4, size):
        joined = torch.tensor([count])
        folded = fold(stored(data["state"], groups).clone(), *arguments, joined)
        expected = recurrence(data, tree.path(count - 1), delta=delta)[2] if count else data["state"][0]
        torch.testing.assert_close(folded, stored(expected[None], groups), atol=1e-10, rtol=1e-10)
        assert torch.equal(last_sums(arguments[2], joined), c[:, count - 1] if count else torch.zeros_like(c[:, 0]))


@pytest.mark.parametrize("size", [1, PART, PART + 3])
@pytest.mark.parametrize(("channels", "delta"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_chain_is_read_in_parts(size: int, channels: bool, delta: bool) -> None:
    """Parts hand their state on, and padding at the end changes nothing."""
    data = inputs(3, size + 2, channels)
    data["g"][:, size:] = 0
    path, groups = list(range(size)), data["k"].shape[2]
    before = stored(data["state"], groups)
    if delta:
        data["beta"][:, size:] = 0
        y, state = delta_chain(data["q"], data["k"], data["v"], data["g"], data["beta"], before)
    else:
        data["v"][:, size:] = 0
        y, state = chain(data["q"], data["k"], data["v"], data["g"], before)
    assert torch.equal(before, stored(data["state"], groups))
    for token in (0, size // 2, size - 1):
        expected, _, _ = recurrence(data, path[: token + 1], delta=delta)
        torch.testing.assert_close(y[0, token], expected, atol=1e-9, rtol=1e-9)
    after = recurrence(data, path, delta=delta)[2]
    torch.testing.assert_close(state, stored(after[None], groups), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("alike", [0.25, 1.0, 2.0])
def test_the_correction_of_like_keys_is_exact(alike: float) -> None:
    """Guards sums that cancel each other: one token, repeated, has equal keys. The bits of a row are its own."""
    generator = torch.Generator().manual_seed(0)
    a = torch.full((PART, PART), alike, dtype=torch.float64).tril(-1) * torch.tensor([1.0, 0.9]).view(-1, 1, 1, 1)
    r = torch.randn(2, 1, PART, P, generator=generator, dtype=torch.float64)
    exact = r.clone()
    for node in range(PART):
        exact[:, :, node] -= (a[:, :, node, None, :node] @ exact[:, :, :node]).squeeze(2)
    solution = solve(a.float(), r.float())
    assert (solution - exact).abs().max() < 1e-5 * exact.abs().max()
    assert (solve(a, r) - exact).abs().max() < 1e-13 * exact.abs().max()
    assert torch.equal(solution[1:], solve(a[1:].float(), r[1:].float()))


@pytest.mark.parametrize("seed", range(4))
def test_a_selective_layer_is_its_paths(seed: int) -> None:
    """Mamba-1: decays by channel and state; slots in any order, a fold of the first ones, a chain."""
    size, places, width = 19, 24, 6
    tree = Tree.random(seed, size, places=places)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    dt, u, b, out = normal(1, size, width).abs(), normal(1, size, width), normal(1, size, N), normal(1, size, N)
    a, state = -normal(width, N).abs(), normal(1, width, N)

    def along(path: list[int]) -> Tensor:
        held = state[0]
        for token in path:
            held = torch.exp(dt[0, token].unsqueeze(1) * a) * held + torch.outer(u[0, token], b[0, token])
        return held

    parent = torch.full((1, places), places)
    depth = torch.zeros(1, places, dtype=torch.int64)
    for token in range(size):
        above = tree.parent[token]
        parent[0, tree.place[token]] = places if above < 0 else tree.place[above]
        depth[0, tree.place[token]] = len(tree.path(token))
    order = depth.argsort(1)
    planes = [placed(part, tree, places) for part in (dt, u, b)]
    y = selective_read(*planes, a, parent, order, state, torch.tensor([tree.place]), out)
    for token in range(size):
        torch.testing.assert_close(y[0, token], along(tree.path(token)) @ out[0, token])
    for count in (0, 5, size):
        folded = selective_fold(state, dt, u, b, a, torch.tensor([count]))
        torch.testing.assert_close(folded[0], along(list(range(count))))
    y, last_sums = selective_chain(dt, u, b, a, state, out)
    torch.testing.assert_close(y[0, 7], along(list(range(8))) @ out[0, 7])
    torch.testing.assert_close(last_sums[0], along(list(range(size))))


def test_a_convolution_reads_the_oldest_first() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((1, 9, 6), (6, 4), (6,)))
    padded = torch.nn.functional.pad(x, (0, 0, 3, 0))
    convolved = convolve([padded[:, tap : tap + 9] for tap in range(4)], weight, bias)
    expected = torch.nn.functional.conv1d(padded.transpose(1, 2), weight.unsqueeze(1), bias, groups=6).transpose(1, 2)
    torch.testing.assert_close(convolved, expected)


def no_decay(q: Tensor, k: Tensor, c: Tensor, ends: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    return weights((q,), k, c * 0, ends * 0, seen, dtype)[0]


def siblings(q: Tensor, k: Tensor, c: Tensor, ends: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    return weights((q,), k, c, ends, torch.ones_like(seen), dtype)[0]


@pytest.mark.parametrize("wrong", [no_decay, siblings])
def test_the_comparison_can_fail(wrong) -> None:  # type: ignore[no-untyped-def]
    """Wrong weights give other numbers in the tree of the first test."""
    size = places = 23
    tree, data = Tree.random(0, size), inputs(0, size, False)
    seen = tree.seen(places)
    c = (seen.double() @ placed(data["g"], tree, places).flatten(2)).view(1, size, H)
    arguments = data["q"], placed(data["k"], tree, places), c, placed(c, tree, places), seen, torch.float64
    assert (wrong(*arguments) - weights((arguments[0],), *arguments[1:])[0]).abs().max() > 0.1
