"""Memory of a recurrent layer: planes of the suffix, and a state of the common prefix. Short convolutions and Mamba-1
layers have theirs here, the others in linear_state.py.

Letters as in models/recurrent/states.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dsbd_cli.models.kv_cache import KVCache
from dsbd_cli.models.recurrent.scans import convolve, selective_chain, selective_fold, selective_read
from dsbd_cli.models.recurrent.tail import Shift, TailBuffer, as_array, scan_kernels
from dsbd_cli.ops.select import ops_for

SILU = ("silu", "swish")


class TailCache(KVCache):
    """A KVCache whose recurrent layers have memories. These read the following.

    Attributes:
        window: T.
        precision: dtype of the states and of all sums over them.
        places: places of the current forward's nodes, None outside a forward.
        kernels: layers may run as kernels of kernels/scan.py; otherwise tensor code runs.
    """

    def __init__(self, *, kernels: bool = True) -> None:
        super().__init__()
        self.window, self.kernels = 0, kernels
        self.precision = torch.float32
        self.places: TailBuffer | None = None

    @staticmethod
    def has_kernel(device: torch.device) -> bool:
        """Return whether layers on this device run as kernels of kernels/scan.py."""
        return ops_for(device, torch.float32, ("scan",)).scan is not None


class LayerMemory:
    """Memory of one recurrent layer: planes [R, lead + T + 1, ...] of the suffix, and the state [R, ...], if it has
    one.

    The first `lead` places of a plane hold the last tokens of the common prefix. Nodes without a place are written to
    the last one, which nobody reads. Shapes are learnt from the first forward.
    """

    lead = 0
    wide: frozenset[str] = frozenset()  # planes in the precision of the states
    has_kernel = False  # whether a CPU has kernels for it

    def __init__(self, cache: TailCache, device: torch.device) -> None:
        self.cache, self.device = cache, device
        self.by_kernel = self.has_kernel and cache.kernels and cache.has_kernel(device)
        self.planes: dict[str, Tensor] = {}
        self.state: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield the planes and the state, whose first dimension is the row."""
        yield from self.planes.values()
        if self.state is not None:
            yield self.state

    def bytes_of_row(self, window: int) -> int:
        """Return the bytes of a row with `window` places."""
        bytes_of_slot = sum(math.prod(plane.shape[2:]) * plane.element_size() for plane in self.planes.values())
        state = 0 if self.state is None else math.prod(self.state.shape[1:]) * self.state.element_size()
        return (self.lead + window + 1) * bytes_of_slot + state

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
                scan_kernels().join(as_array(plane.flatten(2)), self.lead, as_array(shift.base), as_array(shift.count))
            else:
                shift.join(plane, self.lead)

    def fold(self, shift: Shift) -> None:
        """Take the tokens that joined the common prefix into the state."""


class Convolution(LayerMemory):
    """Inputs of a short convolution: those of the suffix, and before them the last J - 1 of the common prefix."""

    has_kernel = True

    def __init__(self, cache: TailCache, device: torch.device, taps: int) -> None:
        super().__init__(cache, device)
        self.taps, self.lead = taps, taps - 1

    def declare(self, channels: int, dtype: torch.dtype) -> None:
        """Make the memory for inputs of this width and dtype before the first forward."""
        self.plane("inputs", (channels,), torch.float32 if self.by_kernel else dtype)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
        """Return the convolution [R, n, C], in float32 at least, of x [R, n, C] with weight [C, J] and bias [C] or
        None, followed by the activation."""
        if self.by_kernel and activation in SILU:
            return self._by_kernel(x, weight, bias, smooth=True)
        out = self._by_kernel(x, weight, bias, smooth=False) if self.by_kernel else self._sum(x, weight, bias)
        # in the states' precision: in float32 torch computes the last few numbers of a tensor with another exp
        return out if activation is None else _activated(out.to(self.cache.precision), activation)

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
        scan_kernels().convolve(
            *flat_tokens(x), as_array(read.flatten(0, 1)), at, back, *parts, smooth, as_array(out.flatten(0, 1))
        )  # fmt: skip
        if places.chain:
            self._keep_last({"inputs": read})
        return out


class SelectiveState(LayerMemory):
    """A Mamba-1 layer, whose decays differ by channel and state."""

    a: Tensor

    def run(self, dt: Tensor, u: Tensor, b: Tensor, a: Tensor, out: Tensor) -> Tensor:
        """Return y [R, n, I] of nodes with dt, u [R, n, I], b, out [R, n, N] and a [I, N]."""
        places, self.a = self.places, a
        state = self.state_of(*a.shape)
        held = self.rows_of(state)
        if places.chain:
            y, after = selective_chain(masked(dt, places.real), masked(u, places.real), b, a, held, out)
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


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation in SILU:
        return nn.functional.silu(x)
    from transformers.activations import ACT2FN

    activated: Tensor = ACT2FN[activation](x)
    return activated


def masked(values: Tensor, real: Tensor) -> Tensor:
    """Return values [R, n, ...], 0 where a token [R, n] is not real."""
    return values * real.view(*real.shape, *[1] * (values.dim() - 2)).to(values.dtype)


def flat_tokens(x: Tensor) -> tuple[NDArray[Any], int]:
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
