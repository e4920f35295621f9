"""States of recurrent layers over a packed forest: one state per row, of the common prefix, and inputs of the suffix by
slot.

A layer that carries a state would need one state per beam and per drafted node. Instead each row keeps one state, after
the last token that all its live beams share, and the inputs of the tokens after it. They have one *place* per slot of
the tail: place = slot % T, so that a token stays where it is when the common prefix grows. `advance` takes the tokens
that joined the common prefix into the state. So memory does not grow with W or with the text. models/recurrent/scans.py
has the sums.

CPU kernels (kernels/scan.py) read states at multiples of 8 tokens. With them the kept state lies 16 to 23 tokens before
the token that follows the common prefix, and the inputs of the last 23 tokens of the common prefix are kept, too.

Letters: R rows, n nodes of a forward, S active slots, T places, G key heads, H value heads, N key dim, P value dim, C
channels, J taps of a convolution, I channels of a Mamba-1 layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.activations import ACT2FN

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.cache import ForestCache
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
from dsbd_cli.models.recurrent.tail import Shift, TailBuffer, as_array
from dsbd_cli.ops.cpu.scan import compiled as _kernels
from dsbd_cli.ops.select import ops_for

SILU = ("silu", "swish")


class LayerMemory:
    """Memory of one recurrent layer: planes [R, lead + T + 1, ...] of the suffix, and the state [R, ...], if it has
    one.

    The first `lead` places of a plane hold the last tokens of the common prefix. Nodes without a place are written to
    the last one, which nobody reads. Shapes are learnt from the first forward.
    """

    lead = 0
    wide: frozenset[str] = frozenset()  # planes in the precision of the states
    has_kernel = False  # whether a CPU has kernels for it

    def __init__(self, cache: StateCache, device: torch.device) -> None:
        self.cache, self.device = cache, device
        self.by_kernel = self.has_kernel and cache.has_kernel(device)
        self.planes: dict[str, Tensor] = {}
        self.state: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield the planes and the state, whose first dimension is the row."""
        yield from self.planes.values()
        if self.state is not None:
            yield self.state

    def bytes_of_row(self, window: int) -> int:
        """Return the bytes of a row with `window` places."""
        place = sum(math.prod(one.shape[2:]) * one.element_size() for one in self.planes.values())
        state = 0 if self.state is None else math.prod(self.state.shape[1:]) * self.state.element_size()
        return (self.lead + window + 1) * place + state

    def plane(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a plane, which is made where there is none."""
        if name not in self.planes:
            cache = self.cache
            places = self.lead + cache.window + 1
            self.planes[name] = torch.zeros((cache.rows, places, *shape), dtype=dtype, device=self.device)
            cache.generation += 1
        return self.planes[name]

    def state_of(self, *shape: int) -> Tensor:
        """Return the state [R, *shape], which is made where there is none."""
        if self.state is None:
            precision = torch.float32 if self.by_kernel else self.cache.precision
            self.state = torch.zeros((self.cache.rows, *shape), dtype=precision, device=self.device)
            self.cache.generation += 1
        return self.state

    def keep_in(self, precision: torch.dtype) -> None:
        """Hold the state, and planes that are computed from states, in this dtype. Where kernels run, all stay in
        float32."""
        if self.by_kernel:
            return
        if self.state is not None:
            self.state = self.state.to(precision)
        self.planes |= {name: self.planes[name].to(precision) for name in self.wide}

    def resize(self, rows: int, window: int, base: Tensor) -> None:
        """Cover `rows` rows and `window` places, and keep the contents, except for the old last place. base: [rows],
        slots of the common prefix. With 0 rows all memory is freed."""
        base, lead = base.to(self.device).unsqueeze(1), self.lead
        for name, old in self.planes.items():
            new = old.new_zeros((rows, lead + window + 1, *old.shape[2:]))
            count, before = min(len(old), rows), old.shape[1] - lead - 1
            new[:count, :lead] = old[:count, :lead]
            if kept := min(window, before):
                slots = base[:count] + torch.arange(kept, device=self.device)
                row = torch.arange(count, device=self.device).unsqueeze(1)
                new[row, lead + slots % window] = old[row, lead + slots % before]
            self.planes[name] = new
        if self.state is not None:
            new = self.state.new_zeros((rows, *self.state.shape[1:]))
            new[: len(self.state)] = self.state[:rows]
            self.state = new

    def write(self, name: str, values: Tensor, dtype: torch.dtype) -> None:
        """Write values [R, n, ...] to the nodes' places of a plane."""
        plane = self.plane(name, tuple(values.shape[2:]), dtype)
        plane.flatten(0, 1).index_copy_(0, self.places.flat_in(self.lead), values.flatten(0, 1).to(dtype))

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Return the forward's rows of a plane or state, a view where they are the first ones."""
        places = self.places
        return tensor[: places.count] if places.rows is None else tensor.index_select(0, places.rows)

    def suffix(self, name: str) -> Tensor:
        """Return the suffix [R, T, ...] of a plane."""
        return self.rows_of(self.planes[name])[:, self.lead : self.lead + self.cache.window]

    def store(self, tensor: Tensor, values: Tensor) -> None:
        """Replace the forward's rows of a state."""
        places = self.places
        if places.rows is None:
            tensor[: places.count] = values
        else:
            tensor.index_copy_(0, places.rows, values)

    def _keep_last(self, read: dict[str, Tensor]) -> None:
        """Keep the last tokens of a chain [R, lead + n, ...], which are now the last of the common prefix."""
        kept = self.places.lengths.unsqueeze(1) + torch.arange(self.lead, device=self.device)
        for name, new in read.items():
            index = kept.view(*kept.shape, *[1] * (new.dim() - 2)).expand(-1, -1, *new.shape[2:])
            self.planes[name][self.places.numbers, : self.lead] = new.gather(1, index)

    @property
    def places(self) -> TailBuffer:
        """The places of the current forward's nodes, on this layer's device."""
        assert self.cache.places is not None
        return self.cache.places.on(self.device)

    def advance(self, shift: Shift) -> None:
        """Move the suffix, and take the tokens that joined the common prefix into the state."""
        for plane in self.planes.values():
            shift.move(plane, self.lead)
        if shift.most:
            self.fold(shift)
        for plane in self.planes.values():
            if self.by_kernel:
                _kernels().join(as_array(plane.flatten(2)), self.lead, as_array(shift.base), as_array(shift.count))
            else:
                shift.join(plane, self.lead)

    def fold(self, shift: Shift) -> None:
        """Take the tokens that joined the common prefix into the state."""


class Convolution(LayerMemory):
    """Inputs of a short convolution: those of the suffix, and before them the last J - 1 of the common prefix."""

    has_kernel = True

    def __init__(self, cache: StateCache, device: torch.device, taps: int) -> None:
        super().__init__(cache, device)
        self.taps, self.lead = taps, taps - 1

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
        """Return the convolution [R, n, C], in float32 at least, of x [R, n, C] with weight [C, J] and bias [C] or
        None, followed by the activation."""
        if self.by_kernel and activation in SILU:
            return self._by_kernel(x, weight, bias, smooth=True)
        out = self._by_kernel(x, weight, bias, smooth=False) if self.by_kernel else self._sum(x, weight, bias)
        # in the states' precision: in float32 torch computes the last few numbers of a tensor with another exp
        return out if activation is None else ACT2FN[activation](out.to(self.cache.precision))

    def _sum(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        places, count = self.places, x.shape[1]
        plane = self.plane("inputs", (x.shape[2],), x.dtype)
        if places.chain:
            full = torch.cat((self.rows_of(plane)[:, : self.lead], x), 1)
            self._keep_last({"inputs": full})
            return convolve([full[:, tap : tap + count] for tap in range(self.taps)], weight, bias)
        self.write("inputs", x, x.dtype)
        flat = plane.flatten(0, 1)
        taps = [flat.index_select(0, index).view(x.shape) for index in places.flat_back(self.taps)]
        return convolve([*taps, x], weight, bias)

    def _by_kernel(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, smooth: bool) -> Tensor:
        """Compute the convolution by a kernel. smooth: followed by silu."""
        places, (rows, count, channels) = self.places, x.shape
        plane = self.plane("inputs", (channels,), torch.float32)
        out, added = torch.empty(x.shape, dtype=torch.float32), weight.new_zeros(0) if bias is None else bias
        read = plane
        if places.chain:  # behind the last tokens of the common prefix
            read = plane.new_empty(rows, self.lead + count, channels)
            read[:, : self.lead] = self.rows_of(plane)[:, : self.lead]
            before = (np.arange(rows)[:, None] * (self.lead + count) + np.arange(count)).ravel()
            at, back = before + self.lead, before + np.arange(self.lead)[:, None]
        else:
            at, back = places.taps(self.lead)
        parts = (as_array(part.float()) for part in (weight, added))
        _kernels().convolve(
            *_flat_tokens(x), as_array(read.flatten(0, 1)), at, back, *parts, smooth, as_array(out.flatten(0, 1))
        )  # fmt: skip
        if places.chain:
            self._keep_last({"inputs": read})
        return out


class LinearState(LayerMemory):
    """A layer whose state is a sum of products k u^T with a decay per head or per key channel.

    On a CPU a kernel computes it (kernels/scan.py): the state is [R, H, N, P] in float32, and the planes are k, u and
    the decays e. Elsewhere tensor code does (models/recurrent/scans.py): the state is [R, G, N, E] in the cache's
    precision, and the planes are k, u, g and the sums c of g.
    """

    has_kernel = True

    def __init__(self, cache: StateCache, device: torch.device) -> None:
        super().__init__(cache, device)
        if self.by_kernel:
            self.lead = _kernels().LEAD

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scales: Tensor | None = None, skip: Tensor | None = None
    ) -> Tensor:
        """Return y [R, n, H, P] of nodes with q, k [R, n, G, N], v [R, n, H, P] and log-decays g [R, n, H] or [R, n, H,
        N].

        G = H where decays are per channel. u is v times scales [R, n, H], and skip [H] times v is added to y.
        """
        if self.by_kernel:
            return self._by_kernel(q, k, v, g, scales=scales, skip=skip)
        y = self._attend(q, k, v if scales is None else v * scales.unsqueeze(3), g)
        return y if skip is None else y.to(v.dtype).add_(skip.unsqueeze(1) * v)

    def _attend(self, q: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
        """Compute `attend` by tensor code."""
        places, state = self.places, self._grouped_state(k, u)
        held = self.rows_of(state)
        if places.chain:
            y, after = chain(q, k, _masked(u, places.real), _masked(g, places.real), held)
            self.store(state, after)
            return y
        keys, c, ends = self._write_keys(k, g)
        self.write("u", u, torch.float32)
        (weight,) = weights((q,), keys, c, ends, places.seen, held.dtype)
        return self._read(weight, q, c, held)

    def correct(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Return y as `attend` does, but by the gated delta rule: v [R, n, H, P], beta [R, n, H]."""
        if self.by_kernel:
            return self._by_kernel(q, k, v, g, beta=beta)
        places, state = self.places, self._grouped_state(k, v)
        held = self.rows_of(state)
        if places.chain:
            y, after = delta_chain(q, k, v, _masked(g, places.real), _masked(beta, places.real), held)
            self.store(state, after)
            return y
        keys, c, ends = self._write_keys(k, g)
        # in the states' precision: nodes of this forward use u before it is stored, and it must be the same afterwards
        self.wide = frozenset({"u"})
        self.write("u", torch.zeros_like(v), held.dtype)  # not known yet
        alike, weight = weights((k, q), keys, c, ends, places.seen, held.dtype)  # [R, H, n, T]
        scale = beta.to(held.dtype).unsqueeze(3)
        rest = scale * (v.to(held.dtype) - self._read(alike, k, c, held))
        at = places.at.clamp(max=places.width - 1)[:, None, None].expand(-1, *alike.shape[1:3], -1)
        among = (alike.gather(3, at) * scale.transpose(1, 2)).masked_fill_(~places.kin.unsqueeze(1), 0)  # [R, H, n, n]
        self.write("u", solve(among.tril(-1), rest.transpose(1, 2)).transpose(1, 2), held.dtype)
        return self._read(weight, q, c, held)

    def _by_kernel(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, beta: Tensor | None = None, scales: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute `attend`, or with beta `correct`, by a kernel. It sums in float32 and in the order of the path."""
        kernels, places, (rows, count, heads, width) = _kernels(), self.places, v.shape
        groups, dim = k.shape[2:]
        decays = g.shape[3] if g.dim() == 4 else 1
        y = torch.empty(v.shape, dtype=torch.float32)
        none = np.zeros((rows, count, 0), np.float32)
        queries, keys, logs = (as_array(part.float()) for part in (q, k, g.reshape(rows, count, heads, decays)))
        betas, factors = (none if part is None else as_array(part.float()) for part in (beta, scales))
        skips = none.ravel() if skip is None else as_array(skip.float())
        values, step = _flat_tokens(v)
        shapes = {"k": (groups, dim), "u": (heads, width), "e": (heads, decays)}
        planes = {name: self.plane(name, shape, torch.float32) for name, shape in shapes.items()}
        numbers, plan, read = places.rows_of_planes, places.plan(self.lead), planes
        if places.chain:  # behind the last tokens of the common prefix
            read = {
                name: torch.cat(
                    (self.rows_of(plane)[:, : self.lead], plane.new_empty(rows, count + 1, *plane.shape[2:])), 1
                )
                for name, plane in planes.items()
            }
            at, held = np.tile(np.arange(count), (rows, 1)), np.arange(rows)
        else:
            at, held = places.scan_mask.at, numbers
        arrays = [as_array(plane) for plane in read.values()]
        kernels.put(held, at, self.lead, keys, values, step, factors, logs, skips, *arrays, as_array(y))
        asked = alike = np.zeros((rows, 0, 0, 0), np.float32)
        if decays == 1:
            asked = kernels.pairs(queries, arrays[0], held, plan.lines, plan.counts)
        if decays == 1 and beta is not None:
            alike = kernels.pairs(keys, arrays[0], held, plan.lines, plan.counts)
        kernels.shared(
            kernels.recurrent_scan, rows * heads, as_array(self.state_of(heads, dim, width)), numbers, held, queries,
            values, step, betas, asked, alike, *arrays, *plan, as_array(y),
        )  # fmt: skip
        if places.chain:
            self._keep_last(read)
        elif not places.scan_mask.alone:
            y = y[np.arange(rows)[:, None], places.scan_mask.first]
        return y

    def _grouped_state(self, k: Tensor, u: Tensor) -> Tensor:
        """Return the state [R, G, N, E] for keys k [R, n, G, N] and inputs u [R, n, H, P]."""
        groups, heads = k.shape[2], u.shape[2]
        return self.state_of(groups, k.shape[3], heads // groups * u.shape[3])

    def _write_keys(self, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write keys and decays of the nodes. Return the keys of the suffix [R, T, G, N] and the sums of log-decays of
        the nodes and of the places."""
        self.write("k", k, torch.float32)
        self.write("g", g, torch.float32)
        suffix = self.suffix("g").to(torch.float64)
        c = (self.places.seen_sum @ suffix.flatten(2)).view(g.shape)
        self.write("c", c, torch.float64)
        return self.suffix("k"), c, self.suffix("c")

    def _read(self, weight: Tensor, q: Tensor, c: Tensor, held: Tensor) -> Tensor:
        u = self.suffix("u").transpose(1, 2)  # [R, H, T, P]
        if held.dtype == torch.float64:  # a batch of products in float64 is twice as fast over places side by side
            u = torch.empty(u.shape, dtype=held.dtype, device=u.device).copy_(u)
        return carried(q, c, held).add_((weight @ u).transpose(1, 2))

    def fold(self, shift: Shift) -> None:
        """Take the tokens that joined the common prefix into the state. Sums of decays begin anew after them."""
        if self.by_kernel:
            self._fold_by_kernel(shift)
            return
        rows = len(shift.base)
        assert self.state is not None
        k, u, c = (shift.first(self.planes[name], self.lead) for name in ("k", "u", "c"))
        fold(self.state[:rows], k, u, c, shift.count)
        self.planes["c"][:rows] -= last_sums(c, shift.count).unsqueeze(1)

    def _fold_by_kernel(self, shift: Shift) -> None:
        state, rows, kernels, plan = self.state, len(shift.base), _kernels(), shift.plan(self.lead)
        assert state is not None
        if plan.sizes.max() < 2:  # no state moves on
            return
        keys, inputs, decays = (as_array(self.planes[name]) for name in ("k", "u", "e"))
        index, none = np.arange(rows), np.zeros((1, 0, 0, 0), np.float32)
        kernels.shared(
            kernels.recurrent_scan, rows * state.shape[1], as_array(state), index, index, none, none.ravel(), 0,
            none[0], none, none, keys, inputs, decays, *plan, none,
        )  # fmt: skip


class GroupedState(LinearState):
    """Linear attention to earlier groups of tokens, and another weight, relu(q . k)^2, within a group.

    The state holds all tokens of the common prefix. The linear part of those in a node's own group is subtracted again,
    so the inputs of the last `lead` tokens of the common prefix, at least group - 1, are kept.
    """

    def __init__(self, cache: StateCache, device: torch.device, group: int) -> None:
        super().__init__(cache, device)
        self.group, self.lead = group, max(group - 1, self.lead)

    def grouped(self, q: Tensor, k: Tensor, v: Tensor, near: float | Tensor, far: float | Tensor) -> Tensor:
        """Return y [R, n, H, P] of nodes with q, k [R, n, H, N], v [R, n, H, P].

        near, far: factors of the part within a node's own group and of the linear part.
        """
        places = self.places
        for name, values in (("k", k), ("u", v)):
            self.plane(name, tuple(values.shape[2:]), torch.float32)
        lead = {name: self.rows_of(self.planes[name])[:, : self.lead].clone() for name in ("k", "u")}
        everything = self.attend(q, k, v, torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device))
        positions = places.batch.positions
        if not places.chain:
            keys, values = (torch.cat((lead[name], self.suffix(name)), 1) for name in ("k", "u"))
            before = places.base.unsqueeze(1) - self.lead + torch.arange(self.lead, device=q.device)
            seen = torch.cat(((before >= 0).unsqueeze(1).expand(-1, q.shape[1], -1), places.seen), 2)
            return far * everything + self._own(
                q, keys, values, seen, positions, torch.cat((before, places.depths), 1), near, far
            )
        keys, values = torch.cat((lead["k"], k), 1), torch.cat((lead["u"], v), 1)
        if not self.by_kernel:
            self._keep_last({"k": keys, "u": values})
        before = positions[:, :1] - self.lead + torch.arange(keys.shape[1], device=q.device)  # [R, lead + n]
        parts = []
        for first in range(0, q.shape[1], PART):
            part, wide = slice(first, first + PART), slice(first, first + PART + self.lead)
            at = before[:, wide]
            own = at[:, self.lead :].unsqueeze(2)
            seen = (at.unsqueeze(1) <= own) & (at >= 0).unsqueeze(1)
            parts.append(self._own(q[:, part], keys[:, wide], values[:, wide], seen, own.squeeze(2), at, near, far))
        return far * everything + torch.cat(parts, 1)

    def _own(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, here: Tensor, there: Tensor, near: float | Tensor,
        far: float | Tensor,
    ) -> Tensor:  # fmt: skip
        """Return what the tokens of a node's own group add to the linear part, [R, n, H, .].

        q: [R, n, H, .]. k, v: [R, S, H, .]. seen: [R, n, S]. here [R, n] and there [R, S]: positions.
        """
        dtype = self.cache.precision
        q, k, v = (part.to(dtype).transpose(1, 2) for part in (q, k, v))
        within = seen & (here.unsqueeze(2) // self.group == there.unsqueeze(1) // self.group)
        scores = q @ k.transpose(2, 3)  # [R, H, n, S]
        weight = (near * scores.relu().square() - far * scores).masked_fill_(~within.unsqueeze(1), 0)
        return (weight @ v).transpose(1, 2)


class SelectiveState(LayerMemory):
    """A Mamba-1 layer, whose decays differ by channel and state."""

    a: Tensor

    def run(self, dt: Tensor, u: Tensor, b: Tensor, a: Tensor, out: Tensor) -> Tensor:
        """Return y [R, n, I] of nodes with dt, u [R, n, I], b, out [R, n, N] and a [I, N]."""
        places, self.a = self.places, a
        state = self.state_of(*a.shape)
        held = self.rows_of(state)
        if places.chain:
            y, after = selective_chain(_masked(dt, places.real), _masked(u, places.real), b, a, held, out)
            self.store(state, after)
            return y
        for name, values in (("dt", dt), ("u", u), ("b", b)):
            self.write(name, values, torch.float32)
        steps, inputs, keys = (self.suffix(name) for name in ("dt", "u", "b"))
        return selective_read(steps, inputs, keys, a, places.parent, places.order, held, places.at, out)

    def fold(self, shift: Shift) -> None:
        """Take the tokens that joined the common prefix into the state."""
        assert self.state is not None
        state = self.state[: len(shift.base)]
        dt, u, b = (shift.first(self.planes[name]) for name in ("dt", "u", "b"))
        state[:] = selective_fold(state, dt, u, b, self.a, shift.count)


def _masked(values: Tensor, real: Tensor) -> Tensor:
    return values * real.view(*real.shape, *[1] * (values.dim() - 2)).to(values.dtype)


def _flat_tokens(x: Tensor) -> tuple[NDArray[Any], int]:
    """Return x [R, n, ...] in float32 as one flat array for a kernel, and the distance between its tokens there."""
    x = x.detach().float()
    size, apart = 1, True
    for dim in range(x.dim() - 1, 1, -1):
        apart &= x.stride(dim) == size
        size *= x.shape[dim]
    rows, count = x.shape[:2]
    step = x.stride(1) if count > 1 else x.stride(0)  # torch gives a dimension of one any stride
    if not apart or (rows > 1 and count > 1 and x.stride(0) != count * step):
        x, step = x.contiguous(), size
    return x.as_strided(((rows * count - 1) * step + size,), (1,)).numpy(), step


Memory = TypeVar("Memory", bound=LayerMemory)

_current: ContextVar[StateCache | None] = ContextVar("current", default=None)


class StateCache(ForestCache):
    """A ForestCache with the memory of recurrent layers, behind the interface that transformers' mixers expect.

    Attributes:
        window: T.
        base: [R] int64, leading slots whose tokens the states hold.
        precision: dtype of the states and of all sums over them.
        places: places of the current forward's nodes, None outside a forward.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.window = 0
        self.precision = torch.float32
        self.base = torch.zeros(0, dtype=torch.int64, device=device)
        self.places: TailBuffer | None = None
        self.memories: dict[tuple[Any, ...], LayerMemory] = {}
        self._layer: tuple[int, int] = (0, 0)
        self._calls = 0

    @staticmethod
    def has_kernel(device: torch.device) -> bool:
        """Return whether layers on this device run as kernels of kernels/scan.py."""
        return ops_for(device, torch.float32, ("scan",)).scan is not None

    @staticmethod
    def current() -> StateCache | None:
        """Return the cache whose forward is under way; None outside one, where mixers run as transformers wrote
        them."""
        return _current.get()

    # answers to transformers' mixers: there is no earlier state, so that they run their code for many tokens

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Note which layer runs next. The convolution stores its inputs itself."""
        self._layer, self._calls = (layer_idx, state_idx), 0
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return recurrent_states

    # memory of layers, for the scans

    def convolution(self, device: torch.device, taps: int) -> Convolution:
        """Return the memory of the convolution in the layer under way."""
        return self._memory(Convolution, lambda: Convolution(self, device, taps))

    def linear(self, device: torch.device) -> LinearState:
        """Return the memory of the linear state in the layer under way."""
        return self._memory(LinearState, lambda: LinearState(self, device))

    def grouped(self, device: torch.device, group: int) -> GroupedState:
        """Return the memory of the grouped state in the layer under way."""
        return self._memory(GroupedState, lambda: GroupedState(self, device, group))

    def selective(self, device: torch.device) -> SelectiveState:
        """Return the memory of a scan in the layer under way; a layer may scan several times, head by head."""
        self._calls += 1
        return self._memory(SelectiveState, lambda: SelectiveState(self, device), self._calls)

    def _memory(self, kind: type[Memory], make: Callable[[], Memory], call: int = 0) -> Memory:
        """Return the memory of this kind in the layer under way, which is made where there is none."""
        key = (*self._layer, kind, call)
        if key not in self.memories:
            self.memories[key] = make()
        found = self.memories[key]
        assert isinstance(found, kind)
        return found

    # the cache as a whole

    def keep_in(self, precision: torch.dtype) -> None:
        """Hold states, and sum over them, in this dtype. It is called before `reserve`."""
        self.precision = precision
        for memory in self.memories.values():
            memory.keep_in(precision)

    def bytes_of_states(self, window: int) -> int:
        """Return the bytes of a row, without keys and values, with `window` places. They do not grow with the text."""
        return sum(memory.bytes_of_row(window) for memory in self.memories.values())

    @contextlib.contextmanager
    def running(self, batch: ForestInput) -> Iterator[None]:
        """Enclose a forward over a batch. After it the tokens of a chain are part of the states."""
        count = batch.tokens.shape[0]
        base = self.base[:count] if batch.rows is None else self.base[batch.rows]
        if not batch.chain:
            # while other rows catch up, a row may be asked for tokens that its states hold: these are not stored
            held = batch.slots < base.unsqueeze(1)
            batch = dataclasses.replace(batch, slots=torch.where(held, self.slots - 1, batch.slots))
        self.begin(batch.slots, batch.rows, batch.mask.shape[-1])
        places = self.places = TailBuffer(batch, base, self.window, self.slots - 1)
        token = _current.set(self)
        try:
            yield
        finally:
            self.places = None
            _current.reset(token)
        if not places.chain:
            return
        end = torch.where(places.real, places.batch.slots + 1, 0).amax(1)
        base = torch.where(places.lengths > 0, end, places.base)
        if places.rows is None:
            self.base[: places.count] = base
        else:
            self.base.index_copy_(0, places.rows, base)

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        """Reserve as ForestCache does. window: most slots that a row may hold past its common prefix; None: all."""
        super().reserve(rows, slots)
        wanted = max(self.window, self.slots if window is None else window)
        if (self.rows, wanted) == (len(self.base), self.window):
            return
        self.window = wanted
        self.generation += 1
        more = self.rows - len(self.base)
        self.base = torch.nn.functional.pad(self.base, (0, more))
        for memory in self.memories.values():
            memory.resize(self.rows, wanted, self.base)

    def release(self) -> None:
        super().release()
        self.window = 0
        self.base = self.base[:0]
        for memory in self.memories.values():
            memory.resize(0, 0, self.base)

    def advance(self, src_slots: Tensor, dst_slots: Tensor, common_prefix: Tensor) -> None:
        """Move keys, values and the suffix's inputs, [R, m] slots each. Take the tokens that joined the common prefix
        into the states."""
        self.move(src_slots, dst_slots)
        rows = len(src_slots)
        base = self.base[:rows]
        common_prefix = torch.maximum(common_prefix, base)
        shift = Shift.of(src_slots, dst_slots, base, common_prefix, self.window)
        for memory in self.memories.values():
            memory.advance(shift.on(memory.device))
        self.base[:rows] = common_prefix

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        for memory in self.memories.values():
            index = rows.to(memory.device)
            for tensor in memory.tensors():
                tensor[: len(index)] = tensor.index_select(0, index)
        self.base[: len(rows)] = self.base[rows]

    def clear(self, row: int, start: int = 0) -> None:
        super().clear(row, start)
        for memory in self.memories.values():
            for tensor in memory.tensors():
                tensor[row].zero_()
        self.base[row] = 0
