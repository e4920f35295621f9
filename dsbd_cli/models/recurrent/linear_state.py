"""Memories of layers whose state is a sum of products: linear attention, the gated delta rule, and Mamba-2.

Letters as in models/recurrent/states.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.models.recurrent.memory import LayerMemory, TailCache, flat_tokens, masked
from dsbd_cli.models.recurrent.scans import PART, carried, chain, delta_chain, fold, last_sums, solve, weights
from dsbd_cli.models.recurrent.tail import Shift, as_array, scan_kernels


class LinearState(LayerMemory):
    """A layer whose state is a sum of products k u^T with a decay per head or per key channel.

    On a CPU a kernel computes it (kernels/scan.py): the state is [R, H, N, P] in float32, and the planes are k, u and
    the decays e. Elsewhere tensor code does (models/recurrent/scans.py): the state is [R, G, N, E] in the cache's
    precision, and the planes are k, u, g and the sums c of g.
    """

    has_kernel = True

    def __init__(self, cache: TailCache, device: torch.device) -> None:
        super().__init__(cache, device)
        if self.by_kernel:
            self.lead = scan_kernels().LEAD

    def declare(self, groups: int, heads: int, dim: int, width: int, *, corrects: bool) -> None:
        """Make the memory before the first forward, for G, H, N, P and one decay per head. corrects: `correct` will be
        called, not `attend`."""
        planes: list[tuple[str, tuple[int, ...]]] = [("k", (groups, dim)), ("u", (heads, width))]
        if self.by_kernel:
            self.state_of(heads, dim, width)
            planes.append(("e", (heads, 1)))
        else:
            self.state_of(groups, dim, heads // groups * width)
            self.wide = frozenset({"u"} if corrects else ())
            planes += [("g", (heads,)), ("c", (heads,))]
        for name, shape in planes:
            wide = torch.float64 if name == "c" else self.cache.precision if name in self.wide else torch.float32
            self.plane(name, shape, wide)

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
            y, after = chain(q, k, masked(u, places.real), masked(g, places.real), held)
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
            y, after = delta_chain(q, k, v, masked(g, places.real), masked(beta, places.real), held)
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
        kernels, places, (rows, count, heads, width) = scan_kernels(), self.places, v.shape
        groups, dim = k.shape[2:]
        decays = g.shape[3] if g.dim() == 4 else 1
        y = torch.empty(v.shape, dtype=torch.float32)
        none = np.zeros((rows, count, 0), np.float32)
        queries, keys, logs = (as_array(part.float()) for part in (q, k, g.reshape(rows, count, heads, decays)))
        betas, factors = (none if part is None else as_array(part.float()) for part in (beta, scales))
        skips = none.ravel() if skip is None else as_array(skip.float())
        values, step = flat_tokens(v)
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
        kernels.recurrent_scan(
            as_array(self.state_of(heads, dim, width)), numbers, held, queries, values, step, betas, asked, alike,
            *arrays, plan, as_array(y),
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
        state, rows, plan = self.state, len(shift.base), shift.plan(self.lead)
        assert state is not None
        if plan.sizes.max() < 2:  # no state moves on
            return
        keys, inputs, decays = (as_array(self.planes[name]) for name in ("k", "u", "e"))
        index, none = np.arange(rows), np.zeros((1, 0, 0, 0), np.float32)
        scan_kernels().recurrent_scan(
            as_array(state), index, index, none, none.ravel(), 0, none[0], none, none, keys, inputs, decays, plan, none
        )


class GroupedState(LinearState):
    """Linear attention to earlier groups of tokens, and another weight, relu(q . k)^2, within a group.

    The state holds all tokens of the common prefix. The linear part of those in a node's own group is subtracted again,
    so the inputs of the last `lead` tokens of the common prefix, at least group - 1, are kept.
    """

    def __init__(self, cache: TailCache, device: torch.device, group: int) -> None:
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
