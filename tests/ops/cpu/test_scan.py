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

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.recurrent import scans
from dsbd_cli.models.recurrent.memory import flat_tokens
from dsbd_cli.models.recurrent.tail import Shift, TailBuffer
from dsbd_cli.ops.cpu import runtime
from dsbd_cli.ops.cpu.kernels import scan
from dsbd_cli.ops.cpu.scan import recurrent_scan
from tests.models.recurrent.test_scans import Tree

N, G, H = 6, 2, 4  # key dim, key heads, value heads
LEAD = scan.LEAD + 2  # a layer may keep more


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
    arrays = {name: data[name][:, tokens].contiguous().numpy() for name in ("q", "k", "v", "g", "beta")}
    return arrays if delta else arrays | {"beta": arrays["beta"][:, :, :0].copy()}


class Layer:
    """Planes and the state of row 1 of 2; the other row's must stay as they are."""

    def __init__(self, data: dict[str, Tensor], places: int, delta: bool) -> None:
        self.data, self.delta, self.places, self.base = data, delta, places, 0
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
        depths = np.full((1, self.places), 999)
        depths[0, tree.place] = [len(tree.path(token)) for token in range(len(tree.parent))]
        before = stored(self.rows, at, own, self.planes)
        plan = scan.forest(seen, at, depths, np.array([self.base]), LEAD)
        y = answers(self.state, self.rows, self.rows, own, self.planes, plan, before)
        assert not y[0, -1].any()
        return y[0, :-1]

    def fold(self, places: list[int]) -> None:
        """These join the common prefix of row 1, and nothing that of row 0."""
        joined, counts = np.array([[0] * len(places), places], np.int64), np.array([0, len(places)])
        plan = scan.fold(np.array([0, self.base]), counts, joined, LEAD)
        none = {name: np.zeros((2, 0, 0, 0), np.float32) for name in ("q", "k", "v")}
        none["beta"] = np.zeros((2, 0, 0), np.float32)
        rows = np.arange(2)
        answers(self.state, rows, rows, none, self.planes, plan)
        assert (self.state[0] == 7).all()
        for plane in self.planes:
            common_prefix = np.concatenate((plane[1, :LEAD], plane[1, [LEAD + position for position in places]]))
            plane[1, :LEAD] = common_prefix[len(places) :]
        self.base += len(places)


def spread(own: dict[str, NDArray[Any]]) -> tuple[NDArray[Any], int]:
    """v as one part of longer lines, and how long they are."""
    rows, count, heads, width = own["v"].shape
    wide = np.full((rows, count, heads * width + 3), 7, np.float32)
    wide[:, :, :-3] = own["v"].reshape(rows, count, heads * width)
    return wide.ravel(), wide.shape[2]


def stored(
    rows: NDArray[Any], at: NDArray[Any], own: dict[str, NDArray[Any]], planes: list[NDArray[Any]]
) -> NDArray[Any]:
    """What y starts from."""
    y = np.full(own["v"].shape, 7, np.float32)
    none = np.empty((*own["beta"].shape[:2], 0), np.float32)
    scan.put(rows, at, LEAD, own["k"], *spread(own), none, own["g"], none.ravel(), *planes, y)
    return y


def answers(
    state: NDArray[Any], rows: NDArray[Any], held: NDArray[Any], own: dict[str, NDArray[Any]],
    planes: list[NDArray[Any]], plan: scan.ScanSchedule, y: NDArray[Any] | None = None,
) -> NDArray[Any]:  # fmt: skip
    """y of a plan's nodes, beside what it is before."""
    y = np.zeros(own["v"].shape, np.float32) if y is None else y
    asked, alike = (scan.pairs(own[name], planes[0], held, plan.lines, plan.counts) for name in ("q", "k"))
    recurrent_scan(state, rows, held, own["q"], *spread(own), own["beta"], asked, alike, *planes, plan, y)
    return y


# the value dim: less than a tile, one and a rest, two
WIDTHS = enumerate((5, scan.TILE + 9, 2 * scan.TILE))
CASES = [(*width, channels, delta) for width in WIDTHS for channels in (False, True) for delta in (False, True)]


@pytest.mark.parametrize(("seed", "width", "channels", "delta"), CASES)
def test_a_forest_is_its_paths(seed: int, width: int, channels: bool, delta: bool) -> None:
    """In two forwards, the second of which needs what the first has left in the planes.

    Branches part at once and are longer than what is read token by token, so that they need states of their own.
    """
    size, places = 130, 150
    tree, data = Tree.random(seed, size, places=places), inputs(seed, size, channels, width)
    assert max(len(tree.path(token)) for token in range(size)) > scan.LEAST_ONE_BY_ONE + 2 * scan.BLOCK
    layer = Layer(data, places, delta)
    before = [plane[0].copy() for plane in layer.planes]
    y = np.concatenate((layer.forest(tree, list(range(70))), layer.forest(tree, list(range(70, size)))))
    for token in range(0, size, 3):
        expected = recurrence(data, tree.path(token), delta=delta)[0]
        torch.testing.assert_close(torch.from_numpy(y[token]).double(), expected, atol=2e-5, rtol=2e-5)
    assert all((plane[0] == old).all() for plane, old in zip(layer.planes, before, strict=True))


@pytest.mark.parametrize(("seed", "width", "channels", "delta"), CASES)
def test_the_bits_are_those_of_the_path(seed: int, width: int, channels: bool, delta: bool) -> None:
    """One path as a chain, as nodes beside others in forwards of any size, and with any part of it in the common
    prefix."""
    size, branch = 45, 6
    path = list(range(-1, size - 1))
    data = inputs(seed, size + branch, channels, width)
    own = arrays(data, list(range(size)), delta)
    state, row, at = data["state"].numpy().copy(), np.array([0]), np.arange(size)[None]
    planes = [np.zeros((1, LEAD + size + 1, *plane.shape[2:]), np.float32) for plane in Layer(data, 0, delta).planes]
    stored(row, at, own, planes)
    y = answers(state, row, row, own, planes, scan.chain(row, np.array([size]), size, LEAD))
    for token in (0, size // 2, size - 1):
        expected, _ = recurrence(data, list(range(token + 1)), delta=delta)
        torch.testing.assert_close(torch.from_numpy(y[0, token]).double(), expected, atol=2e-5, rtol=2e-5)
    _, after = recurrence(data, list(range((size - scan.LEAST_ONE_BY_ONE) // scan.BLOCK * scan.BLOCK)), delta=delta)
    torch.testing.assert_close(torch.from_numpy(state[0]).double(), after, atol=2e-5, rtol=2e-5)
    for joined, step in ((0, size), (5, 1), (24, 4), (33, 5)):
        places = size + branch
        tree = Tree(path + [3] * branch, [places - 1 - token for token in range(places)])
        layer = Layer(data, places, delta)
        layer.forest(tree, list(range(joined)) if joined else [0])
        layer.fold(tree.place[: joined // 2])
        layer.fold(tree.place[joined // 2 : joined])
        left = Tree([max(-1, parent - joined) for parent in tree.parent[joined:]], tree.place[joined:])
        draft_backlog = {name: part if name == "state" else part[:, joined:] for name, part in data.items()}
        layer.data = draft_backlog
        for first in range(0, size - joined, step):
            tokens = list(range(first, min(first + step, size - joined)))
            beside = [size - joined + first % branch]
            outputs = layer.forest(left, tokens + beside)
            assert (outputs[: len(tokens)] == y[0, joined + first : joined + first + len(tokens)]).all()
        layer.fold([left.place[token] for token in range(size - joined)])
        assert (layer.state[1] == state[0]).all()
        assert all(
            (plane[1, :LEAD] == other[0, size : size + LEAD]).all()
            for plane, other in zip(layer.planes, planes, strict=True)
        )


@pytest.mark.parametrize("seed", range(4))
def test_scan_mask_and_taps_are_those_of_tensor_code(seed: int) -> None:
    """Rows with common prefixes of their own, nodes in the suffix, absent ones, and two in one place."""
    rng = np.random.default_rng(seed)
    rows, nodes, active, width, taps = 3, 9, 30, 11, 4
    base = torch.tensor([3, 8, 20])
    trash = active - 1 if seed % 2 else active
    slots = base[:, None] + torch.from_numpy(rng.integers(0, width, (rows, nodes)))
    slots[:, 0] = trash
    slots = slots.clamp(max=trash)
    if seed == 3:
        slots = base[:, None] + torch.arange(nodes)
    # in order of depth, so that a path has one token of each
    positions = torch.arange(active).expand(rows, -1).contiguous()
    seen = torch.from_numpy(rng.random((rows, nodes, active)) < 0.5)
    seen.scatter_(2, slots.clamp(max=active - 1)[:, :, None], value=True)
    own = positions.gather(1, slots.clamp(max=active - 1))
    batch = ForestInput(torch.zeros_like(slots), own, slots, seen & (positions[:, None] <= own[:, :, None]), positions)
    places = TailBuffer(batch, base, width, trash)
    scan_mask = places.scan_mask
    assert (scan_mask.seen == places.seen.numpy()).all()
    assert (scan_mask.depths == places.depths.numpy()).all()
    assert (scan_mask.at == places.at.numpy()).all()
    alike = (scan_mask.at[:, :, None] == scan_mask.at[:, None]).argmax(2)
    assert (scan_mask.first == np.where(scan_mask.at < width, alike, np.arange(nodes))).all()
    assert scan_mask.alone == (scan_mask.first == np.arange(nodes)).all() == (seed == 3)
    flat, back = places.taps(taps - 1)
    assert (flat == places.flat_in(taps - 1).numpy()).all()
    there = np.broadcast_to((slots != trash).flatten().numpy(), back.shape)
    assert (back == places.flat_back(taps).numpy())[there].all()
    assert ((back >= 0) & (back < rows * (taps + width))).all()


def test_what_is_stored_is_scaled_and_y_begins_with_the_skipped_part() -> None:
    """The steps and the D of Mamba-2. Guards a factor of another head, and an absent node that is stored."""
    data, places = inputs(3, 5, False, 9), 5
    layer, own = Layer(data, places, False), arrays(data, list(range(5)), False)
    at, skip = np.array([[3, places, 0, places, 4]]), np.arange(1, H + 1, dtype=np.float32)
    y, scales = np.empty(own["v"].shape, np.float32), data["beta"].numpy()
    before = layer.planes[1].copy()
    scan.put(layer.rows, at, LEAD, own["k"], *spread(own), scales, own["g"], skip, *layer.planes, y)
    assert (y == own["v"] * skip[:, None]).all()
    for node, slot in ((0, 3), (2, 0), (4, 4)):
        before[1, LEAD + slot] = own["v"][0, node] * scales[0, node][:, None]
    assert (layer.planes[1] == before).all()


@pytest.mark.parametrize("count", [0, 2, LEAD, LEAD + 3])
def test_the_last_tokens_of_the_common_prefix_come_up_front(count: int) -> None:
    """As in tensor code, in rows whose common prefix grows and rows whose common prefix does not."""
    width, base = LEAD + 5, torch.tensor([4, 40, 7])
    plane = torch.randn(3, LEAD + width + 1, scan.LANES + 3, generator=torch.Generator().manual_seed(count))
    nobody = torch.empty(0, dtype=torch.int64)
    counts = torch.tensor([count, 0, 1])
    shift = Shift(nobody, nobody, base, base + counts, width, int(counts.max()))
    expected = plane.clone()
    shift.join(expected, LEAD)
    scan.join(plane.numpy(), LEAD, base.numpy(), counts.numpy())
    assert torch.equal(plane, expected)


def test_tokens_of_any_layout_become_lines() -> None:
    """Guards strides of dimensions of one, and tokens that lie apart, between others or in another order."""
    for rows, count, heads in ((1, 1, 1), (1, 4, 3), (3, 1, 2), (3, 4, 1), (3, 4, 2)):
        whole = torch.randn(rows, count, heads, 5)
        wide = torch.randn(rows, count, 40)[:, :, 3 : 3 + heads * 5].unflatten(2, (heads, 5))
        turned = torch.randn(rows, heads, count, 5).transpose(1, 2)
        apart = torch.randn(rows, count + 2, heads, 5)[:, :count]
        for x in (whole, wide, turned, apart, whole.transpose(2, 3), whole.bfloat16()):
            flat, step = flat_tokens(x)
            size = x[0, 0].numel()
            for token, values in enumerate(x.float().flatten(0, 1)):
                assert (flat[token * step : token * step + size] == values.flatten().numpy()).all()


def test_threads_share_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards pairs of row and head that no thread takes, or two, and memory that two threads work in."""
    data, tree = inputs(0, 9, False, scan.TILE + 1), Tree.random(0, 9)
    alone = Layer(data, 9, True).forest(tree, list(range(9)))
    monkeypatch.setattr(runtime, "SMALL", 0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for _ in range(20):
            assert (Layer(data, 9, True).forest(tree, list(range(9))) == alone).all()
    finally:
        torch.set_num_threads(before)


def test_states_are_overwritten_when_nobody_needs_them() -> None:
    """One per distance from the common prefix's end, whatever the number of branches."""
    depth, branches = scan.LEAST_ONE_BY_ONE + 2 * scan.BLOCK, 3
    parents = [-1 if token < branches else token - branches for token in range(depth * branches)]
    tree = Tree(parents, list(range(len(parents))))
    depths = np.array([[len(tree.path(token)) for token in range(len(parents))]])
    plan = scan.forest(tree.seen(len(parents)).numpy(), np.array([tree.place]), depths, np.array([0]), LEAD)
    assert sorted(plan.order[0]) == tree.place
    assert (plan.sizes[0], plan.buffers) == (
        1 + branches,
        1,
    )  # the last token of a branch is the one before a block's end


CHANNELS = 2 * 1024 + 64 + 37  # blocks of them, vectors, and a rest that fills none


def convolved(x: Tensor, step: int, weight: Tensor, bias: Tensor | None, *, smooth: bool) -> NDArray[Any]:
    """Of a path [n, C], by the kernel. Its inputs are `step` numbers apart, its places are not in order."""
    count, channels = x.shape
    wide = np.full((count, step), 7, np.float32)
    wide[:, :channels] = x.numpy()
    lead, at = weight.shape[1] - 1, np.random.default_rng(0).permutation(count)
    plane, out = np.full((lead + count, channels), 7, np.float32), np.empty((count, channels), np.float32)
    plane[:lead] = 0
    ends = np.concatenate((np.arange(lead), lead + at))
    back = np.stack([ends[tap : tap + count] for tap in range(lead)])
    added = np.empty(0, np.float32) if bias is None else bias.numpy()
    scan.convolve(wide.ravel(), step, plane, lead + at, back, weight.numpy(), added, smooth, out)
    return out


@pytest.mark.parametrize("taps", [2, 4])
def test_a_convolution_has_the_bits_of_the_tensor_function(taps: int) -> None:
    """Guards a tap, a bias or a rest of the channels that is left out."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((9, CHANNELS), (CHANNELS, taps), (CHANNELS,))
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in shapes)
    padded = torch.nn.functional.pad(x, (0, 0, taps - 1, 0))
    for added in (bias, None):
        expected = scans.convolve([padded[None, tap : tap + 9] for tap in range(taps)], weight, added)
        assert (convolved(x, CHANNELS + 5, weight, added, smooth=False) == expected[0].numpy()).all()


def test_silu() -> None:
    """Against float64, to the ends of what float32 holds."""
    ends = torch.tensor([-3e38, -1e4, -200.0, -88.0, 0.0, 88.0, 1e4, 3e38])
    x = torch.cat((torch.linspace(-87, 87, 9 * CHANNELS - len(ends)), ends)).view(9, CHANNELS)
    weight = torch.zeros(CHANNELS, 2)
    weight[:, 1] = 1
    smoothed = convolved(x, CHANNELS, weight, None, smooth=True)
    expected = torch.nn.functional.silu(x.double()).numpy()
    assert (np.abs(smoothed - expected) <= 1e-6 * np.abs(expected) + 1e-36 * x.abs().numpy()).all()
    assert np.isnan(convolved(torch.full((1, CHANNELS), torch.nan), CHANNELS, weight, None, smooth=True)).all()
    for moved in (x[:1], x[:, 1:]):  # in other company, and in another place
        count, channels = moved.shape
        alone = convolved(moved, channels, weight[:channels], None, smooth=True)
        assert (alone == smoothed[:count, CHANNELS - channels :]).all()
