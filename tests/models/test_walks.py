"""Kernels of recurrent layers over random trees against a plain recurrence along each node's own path, in float64.

Guards: a parent that is not the node's own, a state overwritten while a later node needs it, columns that no tile
covers, a correction or decay left out, a fold or chain that rounds otherwise than the nodes do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_cli.engine.core import scans
from dsbd_cli.engine.models import walks
from tests.core.test_scans import Tree

N, G, H = 6, 2, 4  # key dim, key heads, value heads
LEAD = 3


def inputs(seed: int, size: int, channels: bool, width: int) -> dict[str, Tensor]:
    """Of `size` tokens and one row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator)

    groups = H if channels else G
    return {
        "q": normal(size, groups, N),
        "k": normal(size, groups, N) * 0.4,
        "v": normal(size, H, width),
        "g": -normal(size, H, N if channels else 1).abs(),
        "beta": normal(size, H).sigmoid(),
        "state": normal(H, N, width),
    }


def recurrence(data: dict[str, Tensor], path: list[int], *, delta: bool) -> tuple[Tensor, Tensor]:
    """y [H, P] of the last token of a path and the state after it, in float64."""
    wide = {name: part[0].double() for name, part in data.items()}
    state, groups = wide["state"], H // data["k"].shape[2]
    y = state.new_zeros(state.shape[::2])
    for token in path:
        k, q = (wide[name][token].repeat_interleave(groups, 0) for name in ("k", "q"))
        state = state * wide["g"][token].exp().unsqueeze(-1)
        u = wide["v"][token]
        if delta:
            u = wide["beta"][token].unsqueeze(1) * (u - torch.einsum("hn,hnp->hp", k, state))
        state = state + torch.einsum("hn,hp->hnp", k, u)
        y = torch.einsum("hn,hnp->hp", q, state)
    return y, state


def arrays(data: dict[str, Tensor], tokens: list[int], delta: bool) -> dict[str, NDArray[Any]]:
    """Of these tokens; without betas where u is given."""
    found = {name: data[name][:, tokens].contiguous().numpy() for name in ("q", "k", "v", "g", "beta")}
    return found if delta else found | {"beta": found["beta"][:, :, :0].copy()}


class Layer:
    """Planes and the state of row 1 of 2; the other row's must stay as they are."""

    def __init__(self, data: dict[str, Tensor], places: int, delta: bool) -> None:
        self.data, self.delta, self.places = data, delta, places
        groups, width, decays = data["k"].shape[2], data["v"].shape[3], data["g"].shape[3]
        self.state = np.full((2, H, N, width), 7, np.float32)
        self.state[1] = data["state"][0].numpy()
        shapes = ((groups, N), (H, width), (H, decays))
        self.planes = [np.full((2, LEAD + places + 1, *shape), 7, np.float32) for shape in shapes]
        self.rows = np.array([1])

    def forest(self, tree: Tree, tokens: list[int]) -> NDArray[Any]:
        """y [n, H, P] of these tokens of a tree; their ancestors have been run before."""
        own = arrays(self.data, tokens, self.delta)
        at = np.array([[tree.place[token] for token in tokens] + [self.places]])  # and an absent node
        own = {name: np.concatenate((part, part[:, :1]), 1) for name, part in own.items()}
        seen = tree.seen(self.places)[:, tokens].numpy()
        seen = np.concatenate((seen, seen[:, :1]), 1)
        depths = np.full((1, self.places), 99)
        depths[0, tree.place] = [len(tree.path(token)) for token in range(len(tree.parent))]
        walks.put(self.rows, at, LEAD, own["k"], own["v"], own["g"], *self.planes)
        y = np.zeros((1, len(tokens) + 1, H, own["v"].shape[3]), np.float32)
        walks.shared(
            walks.forest, H, self.state, self.rows, own["q"], own["v"], own["beta"],
            walks.alike(own["q"], own["k"]), *self.planes, LEAD,
            *walks.schedule(seen, at, depths), y,
        )  # fmt: skip
        assert not y[0, -1].any()
        return y[0, :-1]

    def fold(self, places: list[int]) -> None:
        """Into the state of row 1; nothing into row 0's."""
        order = np.array([[0] * len(places), places], np.int64)
        walks.shared(walks.fold, 2 * H, self.state, *self.planes, LEAD, order, np.array([0, len(places)]))
        assert (self.state[0] == 7).all()


# the value dim: less than a tile, one and a rest, two
WIDTHS = enumerate((5, walks.TILE + 9, 2 * walks.TILE))
CASES = [(*width, channels, delta) for width in WIDTHS for channels in (False, True) for delta in (False, True)]


@pytest.mark.parametrize(("seed", "width", "channels", "delta"), CASES)
def test_a_forest_is_its_paths(seed: int, width: int, channels: bool, delta: bool) -> None:
    """In two forwards, the second of which needs what the first has left in the planes."""
    size, places = 23, 31
    tree, data = Tree.random(seed, size, places=places), inputs(seed, size, channels, width)
    layer = Layer(data, places, delta)
    before = [plane[0].copy() for plane in layer.planes]
    y = np.concatenate((layer.forest(tree, list(range(9))), layer.forest(tree, list(range(9, size)))))
    for token in range(size):
        expected = recurrence(data, tree.path(token), delta=delta)[0]
        torch.testing.assert_close(torch.from_numpy(y[token]).double(), expected, atol=2e-5, rtol=2e-5)
    assert all((plane[0] == old).all() for plane, old in zip(layer.planes, before, strict=True))


@pytest.mark.parametrize(("seed", "width", "channels", "delta"), CASES)
def test_the_bits_are_those_of_the_path(seed: int, width: int, channels: bool, delta: bool) -> None:
    """One path as a chain, as nodes beside others in forwards of any size, and with any part of it in the trunk."""
    size, branch = 14, 6
    path = list(range(-1, size - 1))
    data = inputs(seed, size + branch, channels, width)
    own = arrays(data, list(range(size)), delta)
    state = data["state"].numpy().copy()
    y = np.zeros((1, size, H, width), np.float32)
    walks.shared(
        walks.chain,
        H,
        state,
        np.array([0]),
        np.array([size]),
        own["q"],
        own["k"],
        own["v"],
        own["g"],
        own["beta"],
        walks.alike(own["q"], own["k"]),
        y,
    )
    for token in (0, size - 1):
        expected, after = recurrence(data, list(range(token + 1)), delta=delta)
        torch.testing.assert_close(torch.from_numpy(y[0, token]).double(), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(torch.from_numpy(state[0]).double(), after, atol=2e-5, rtol=2e-5)
    for joined, step in ((0, size), (5, 1), (9, 4)):
        places = size + branch
        tree = Tree(path + [3] * branch, [places - 1 - token for token in range(places)])
        layer = Layer(data, places, delta)
        layer.forest(tree, list(range(joined)) if joined else [0])
        layer.fold(tree.place[:joined])
        left = Tree([max(-1, parent - joined) for parent in tree.parent[joined:]], tree.place[joined:])
        late = {name: part if name == "state" else part[:, joined:] for name, part in data.items()}
        layer.data = late
        for first in range(0, size - joined, step):
            tokens = list(range(first, min(first + step, size - joined)))
            beside = [size - joined + first % branch]
            found = layer.forest(left, tokens + beside)
            assert (found[: len(tokens)] == y[0, joined + first : joined + first + len(tokens)]).all()
        layer.fold([left.place[token] for token in range(size - joined)])
        assert (layer.state[1] == state[0]).all()


@pytest.mark.parametrize("width", [5, walks.TILE + 9])
def test_the_last_token_of_the_trunk_is_read_again(width: int) -> None:
    """A draft that catches up asks for the trunk's last token, which its state holds: nothing is added twice."""
    data = inputs(2, 1, False, width)
    layer, own = Layer(data, 4, False), arrays(data, [0], False)
    state, y = layer.state.copy(), np.zeros((1, 1, H, width), np.float32)
    at = np.array([[-1]])
    steps = walks.schedule(np.zeros((1, 1, 4), np.bool_), at, np.zeros((1, 4), np.int64))
    planes = [plane.copy() for plane in layer.planes]
    walks.put(layer.rows, at, LEAD, own["k"], own["v"], own["g"], *layer.planes)
    same = walks.alike(own["q"], own["k"])
    given = (layer.state, layer.rows, own["q"], own["v"], own["beta"], same, *layer.planes, LEAD)
    walks.shared(walks.forest, H, *given, *steps, y)
    q = data["q"][0, 0].repeat_interleave(H // G, 0)
    expected = torch.einsum("hn,hnp->hp", q, data["state"][0])
    torch.testing.assert_close(torch.from_numpy(y[0, 0]), expected, atol=1e-5, rtol=1e-5)
    assert (layer.state == state).all()
    assert all((new == old).all() for new, old in zip(layer.planes, planes, strict=True))


def test_threads_share_the_heads() -> None:
    """Guards pairs of row and head that no thread takes, or two."""
    data, tree = inputs(0, 9, False, walks.TILE + 1), Tree.random(0, 9)
    alone = Layer(data, 9, True).forest(tree, list(range(9)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert (Layer(data, 9, True).forest(tree, list(range(9))) == alone).all()
    finally:
        torch.set_num_threads(before)


def test_states_are_overwritten_when_nobody_needs_them() -> None:
    """A path needs one state at a time, and a fork of paths one per path that waits."""
    for parents, most in (([-1, 0, 1, 2, 3], 1), ([-1, 0, 0, 1, 2, 3, 4], 2), ([-1] * 6, 1)):
        tree = Tree(parents, list(range(len(parents))))
        depths = np.array([[len(tree.path(token)) for token in range(len(parents))]])
        steps, counts, held = walks.schedule(tree.seen(len(parents)).numpy(), np.array([tree.place]), depths)
        assert counts[0] == len(parents)
        assert held == most
        walked = [step[0] for step in steps[0, : counts[0]]]
        assert sorted(walked) == tree.place
        assert all(parent < 0 or walked.index(parent) < walked.index(token) for token, parent in enumerate(parents))


def test_a_convolution_has_the_bits_of_the_tensor_function() -> None:
    """A prompt is read by the one, nodes by the other."""
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((1, 9, 37), (37, 4), (37,)))
    padded = torch.nn.functional.pad(x, (0, 0, 3, 0))
    back = np.stack([np.arange(9) + tap for tap in range(3)])
    for added in (bias, None):
        expected = scans.convolve([padded[:, tap : tap + 9] for tap in range(4)], weight, added)
        out = np.empty((9, 37), np.float32)
        own = np.empty(0, np.float32) if added is None else added.numpy()
        walks.convolve(padded[0].numpy(), back, x[0].numpy(), weight.t().contiguous().numpy(), own, out)
        assert (out == expected[0].numpy()).all()


def test_silu() -> None:
    """Against float64, and with the same bits wherever a number stands."""
    x = np.linspace(-87, 87, 20011, dtype=np.float32)
    found = x.copy()
    walks.silu(found)
    expected = torch.nn.functional.silu(torch.from_numpy(x).double()).numpy()
    assert np.abs(found - expected).max() < 1e-5
    assert (np.abs(found - expected) <= 1e-6 * np.abs(expected)).all()
    for first in (1, 3, 20000):
        part = x[first:].copy()
        walks.silu(part)
        assert (part == found[first:]).all()
