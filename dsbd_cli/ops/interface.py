"""The list of operations that models and the engine call, with their shapes, and the backend that serves each.

Letters: R requests, n nodes, H hidden width, I inner width, Q query heads, K kv heads, E head dim, S slots, V
vocabulary, o outputs, i inputs, C candidates of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_cli.ops import reference
from dsbd_cli.ops.recording import Loop

Backend = Literal["torch", "numba", "triton"]
LEAST_WEIGHTS = 100_000  # smaller products are not quantized: their weights stay in a cache


class OpChoice(NamedTuple):
    """Backend that serves an operation, and the reason."""

    op: str
    backend: Backend
    reason: str


def host_reads(device: torch.device) -> bool:
    """Return whether the host may read a device's numbers in the middle of an iteration: those of the CPU.

    Another device would stop for it. There all iterations of a shape are alike, so that they can be captured.
    """
    return device.type == "cpu"


class Linear(Protocol):
    """A product x W^T + b of one layer, or of several layers with the same input. parts: number of outputs of each.
    weights: as they are stored. compiled: whether one of our kernels computes it."""

    parts: list[int]

    @property
    def weights(self) -> Sequence[Tensor]: ...
    @property
    def compiled(self) -> bool: ...

    def compute(self, x: Tensor) -> Tensor:
        """Compute the product: x [..., i] -> [..., o]."""
        ...


class ExpertsLinear(Linear, Protocol):
    """Products of rows with the weights of their experts, to which the same number of parts each belongs."""

    def compute_routed(self, x: Tensor, routes: reference.Routes) -> Tensor:
        """Compute the products of rows x [r, i], each with the weights of its expert: [r, o / experts]."""
        ...


class BiasableLinear(Linear, Protocol):
    """A product with packed weights."""

    def with_bias(self, bias: Tensor) -> BiasableLinear:
        """Return the product of the same weights with a bias [o]."""
        ...


class RowsLinear(Protocol):
    """Products x W^T where each row of a batch has its own W, which consists of rows picked from a table."""

    def take(self, ids: Tensor) -> None:
        """Use the rows ids [R, o] int64 of the table as weights from now on."""
        ...

    def compute(self, x: Tensor) -> Tensor:
        """Compute the products: x [R, n, i] -> [R, n, o]."""
        ...


class TextIndex(Protocol):
    """An index of texts that grows while it is searched. held: tokens in it. tokens: all of them, [held] int32."""

    held: int

    @property
    def tokens(self) -> NDArray[np.int32]: ...

    def insert(self, documents: NDArray[np.int32]) -> None:
        """Insert a document, or several with -1 between them. Of more tokens than fit the last ones are kept."""
        ...

    def look_up(self, texts: NDArray[np.int32], longest: int, paths: int, depth: int) -> tuple[NDArray[Any], ...]:
        """Return tokens [B, S, D], weights [B, S] and match [B] of S paths that followed the ends of texts [B, X]."""
        ...


class AttentionBatch(Protocol):
    """The nodes of one forward as attention sees them, prepared once for all layers."""

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Return attention [R, n, Q, E] of a layer's query [R, Q, n, E]."""
        ...


def _no_size(*sizes: object, own_limits: bool = False) -> None:
    """Return no kernel, so that tensor code serves."""


def _no_candidates(logits: Tensor, count: int) -> None:
    """Return no candidates, so that tensor code serves."""


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations on one device, each by the backend that serves there. `Ops()` is plain torch; select.py makes all
    others.

    Operations of a decoder layer. reference.py specifies them:
        norm: takes a norm, x [..., H] and a tensor that is added to it first; returns the normalised sum and the sum
            [..., H].
        gated: takes gates and values side by side [..., 2 I]; returns [..., I].
        output_gate: takes attention [R, n, Q, E] and a gate [R, n, Q E or Q]; returns attention [R, n, Q, E] times
            the gate's sigmoid.
        gated_norm: takes a norm or None, x and a gate [..., H], and the number of groups; returns [..., H].
        delta_inputs: takes what the products of a delta mixer give; returns queries, keys, log-decays and betas.
        step_sizes: takes steps [R, n, H] of a Mamba-2 mixer; returns step sizes and log-decays [R, n, H].
        rotate: takes queries, keys and values side by side [R, n, (Q + 2 K) E]; returns the queries [R, Q, n, E] and
            writes keys and values to their slots.
        experts: a module. `route` chooses the experts of tokens, `spread` returns the rows of the experts, `combine`
            adds up their outputs.
        program: runs a table of kernels, which run.py has recorded. None: each kernel runs when it is called.
    Operations of all models:
        linear: takes weights [o, i] and biases [o] of layers, and how many experts they belong to; returns one product,
            or None if the layers stay as they are.
        pick: takes a table [V, i] and a dtype; returns products of each row of a batch with its own rows of the table.
        path_attention: a module. `list_slots` lists the slots that each node sees by depth, `attend` attends to them
            with query [R, Q, n, E] and returns [R, n, Q, E], `fits` returns whether it serves these tensors. None: the
            model computes attention over the suffix in torch.
        prompt_attention: a module. `attend` attends with query [R, Q, n, E] to the first slots of each row, as many as
            each node sees, and returns [R, K, m, E] with m = n Q / K and natural log-sums [R, K, m]; `fits` as above.
            None: torch's own attention serves.
        attention: attends with query [R, Q, n, E] to slots by a mask; returns [R, Q, n, E], or None for heads that it
            does not support. None: torch's own attention serves.
        scan: returns the module of kernels for recurrent layers and their convolutions. None: torch computes the sums.
        move: copies slots [R, T] of a slab [P, R', S, width].
    Operations of an iteration. Tensor code of the engine is the reference of the last four, and runs where they return
    None:
        log_total: takes values [m, V] and the highest [m, 1]; returns log(sum(exp(values - highest))) of each row
            [m, 1].
        candidates: takes logits [R, n, V]; returns tokens and log-probabilities [R, n, C] of the best, or None.
        draft, verify, commit: take sizes, and the first two a rule; return the module of kernels that supports them, or
            None. `draft` begins and extends a forest (asked without a rule, it only has to begin one), and is told
            whether it must record the distribution of the drafts. `verify` verifies a forest, and is told whether a row
            has limits that not every kernel has (`own_limits`). `commit` keeps what survives.

    report: the choice for each operation that was asked for.
    """

    norm: Callable[..., tuple[Tensor, Tensor]] = reference.norm
    gated: Callable[..., Tensor] = reference.gated
    output_gate: Callable[[Tensor, Tensor], Tensor] = reference.output_gate
    gated_norm: Callable[..., Tensor] = reference.gated_norm
    delta_inputs: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = reference.delta_inputs
    step_sizes: Callable[..., tuple[Tensor, Tensor]] = reference.step_sizes
    rotate: Callable[..., Tensor] = reference.rotate
    experts: ModuleType = reference
    program: Loop | None = None
    linear: Callable[..., Linear | None] = reference.linear
    pick: Callable[[Tensor, torch.dtype], RowsLinear] = reference.PickedRows
    path_attention: ModuleType | None = None
    prompt_attention: ModuleType | None = None
    attention: Callable[..., Tensor | None] | None = None
    scan: Callable[[], ModuleType] | None = None
    move: Callable[[Tensor, Tensor, Tensor], None] = reference.move
    log_total: Callable[[Tensor, Tensor], Tensor] = reference.log_total
    candidates: Callable[[Tensor, int], tuple[Tensor, Tensor] | None] = _no_candidates
    draft: Callable[..., ModuleType | None] = _no_size
    verify: Callable[..., ModuleType | None] = _no_size
    commit: Callable[..., ModuleType | None] = _no_size
    report: tuple[OpChoice, ...] = ()

    def attend(self, layer: int, query: Tensor, batch: AttentionBatch) -> Tensor:
        """Attend with the query [R, Q, n, E] of a layer to what the nodes of a batch see. Return [R, n, Q, E]."""
        return batch.attend(layer, query)

    @property
    def facts(self) -> tuple[tuple[str, str, str], ...]:
        """The report as plain tuples, for processes without torch."""
        return tuple((choice.op, choice.backend, choice.reason) for choice in self.report)

    def by(self, backend: Backend) -> tuple[str, ...]:
        """Return the names of the operations that this backend serves, in alphabetical order."""
        return tuple(sorted(choice.op for choice in self.report if choice.backend == backend))

    def without(self, *names: str, reason: str = "left out") -> Ops:
        """Return a copy in which torch serves these operations; `self` where no kernel serves any of them."""
        taken = {choice.op for choice in self.report if choice.backend != "torch" and choice.op in names}
        if not taken:
            return self
        report = tuple(OpChoice(choice.op, "torch", reason) if choice.op in taken else choice for choice in self.report)
        plain = Ops()
        return replace(self, **{name: getattr(plain, name) for name in taken}, report=report)
