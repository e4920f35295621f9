"""The list of operations that models and the engine call, each with its shapes, and what serves each of them.

Letters: R requests, n nodes, H hidden width, I inner width, Q query heads, K kv heads, E head dim, S slots, V
vocabulary, o outputs, i inputs, C candidates of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dsbd_cli.ops import reference

if TYPE_CHECKING:
    from dsbd_cli.ops.cpu.program import Program
    from dsbd_cli.ops.cpu.runtime import Eager

Backend = Literal["torch", "numba", "triton"]


class OpChoice(NamedTuple):
    """Backend that serves an operation, and the reason."""

    op: str
    backend: Backend
    reason: str


class Linear(Protocol):
    """x W^T + b, of one layer or of several that are handed the same tensor; parts: outputs of each."""

    parts: list[int]

    def compute(self, x: Tensor, run: Eager = ...) -> Tensor:
        """x [..., i] -> [..., o]."""
        ...


class RowsLinear(Protocol):
    """x W^T, where each row of a batch has its own W: rows that it has picked of a table."""

    def take(self, ids: Tensor) -> None:
        """Multiply with the rows ids [R, o] int64 of the table from now on."""
        ...

    def compute(self, x: Tensor) -> Tensor:
        """x [R, n, i] -> [R, n, o]."""
        ...


def _no_size(*sizes: object) -> None:
    """Return no kernel: tensor code serves."""


def _no_candidates(logits: Tensor, count: int) -> None:
    """Return nothing: tensor code serves."""


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations on one device, each by what serves there. `Ops()` is plain torch; select.py makes all others.

    Of a decoder layer, as reference.py says them; the last argument is a `run`, which computes or writes a program:
        norm: x [..., H], what is added to it before -> normalised, summed [..., H].
        gated: gates and values side by side [..., 2 I] -> [..., I].
        rotate: queries, keys and values side by side [R, n, (Q + 2 K) E] -> queries [R, Q, n, E]; the others are in
            their slots then.
        program: keeps the kernels of a forward to be run again; None: each runs when it is called.
    Of all models:
        linear: weights [o, i] and biases [o] of layers as one product; None: they stay as they are.
        pick: a table [V, i] and a dtype -> products of each row of a batch with rows of its own.
        path_attention: query [R, Q, n, E] over the slots that each node sees, listed by depth -> [R, n, Q, E]; None:
            the model sums by parts.
        attention: query [R, Q, n, E] over slots by a mask -> [R, Q, n, E], or None for such heads; None: torch's own.
        scan: returns the kernels of recurrent layers and their convolutions; None: sums in torch.
        move: copies slots [R, T] of a slab [P, R', S, width].
    Of an iteration. Tensor code of the engine is their reference, and None leaves a call to it:
        log_total: values [m, V] -> log of the sum of exp of each row [m, 1].
        candidates: logits [R, n, V] -> tokens and log-probabilities [R, n, C] of the best, or None.
        draft, verify, commit: the kernels for such sizes, or None: begin and extend a forest (without sizes: begin it
            alone); verify it; keep what survives.

    report: what was decided of each operation that was asked for.
    """

    norm: Callable[..., tuple[Tensor, Tensor]] = reference.norm
    gated: Callable[..., Tensor] = reference.gated
    rotate: Callable[..., Tensor] = reference.rotate
    program: type[Program] | None = None
    linear: Callable[[Sequence[Tensor], Sequence[Tensor | None]], Linear | None] = reference.linear
    pick: Callable[[Tensor, torch.dtype], RowsLinear] = reference.PickedRows
    path_attention: Callable[..., Tensor] | None = None
    attention: Callable[..., Tensor | None] | None = None
    scan: Callable[[], ModuleType] | None = None
    move: Callable[[Tensor, Tensor, Tensor], None] = reference.move
    log_total: Callable[[Tensor, Tensor], Tensor] = reference.log_total
    candidates: Callable[[Tensor, int], tuple[Tensor, Tensor] | None] = _no_candidates
    draft: Callable[..., ModuleType | None] = _no_size
    verify: Callable[..., ModuleType | None] = _no_size
    commit: Callable[..., ModuleType | None] = _no_size
    report: tuple[OpChoice, ...] = ()

    @property
    def facts(self) -> tuple[tuple[str, str, str], ...]:
        """Return the report as plain tuples, for processes without torch."""
        return tuple((one.op, one.backend, one.reason) for one in self.report)

    def by(self, backend: Backend) -> tuple[str, ...]:
        """Return the names of the operations that this backend serves, in order of the alphabet."""
        return tuple(sorted(choice.op for choice in self.report if choice.backend == backend))

    def without(self, *names: str, reason: str = "left out") -> Ops:
        """Return the same with plain torch for these operations; itself where that serves them already."""
        taken = {choice.op for choice in self.report if choice.backend != "torch" and choice.op in names}
        if not taken:
            return self
        report = tuple(OpChoice(one.op, "torch", reason) if one.op in taken else one for one in self.report)
        plain = Ops()
        return replace(self, **{name: getattr(plain, name) for name in taken}, report=report)
