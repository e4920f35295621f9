"""CPU kernels for mixtures of experts: the choice of a token's experts, its rows for them, the sum of their outputs.

The products of the experts are those of linear.py, int8.py and int4.py, which read the weights of an expert once for
all its rows. ops/reference.py specifies what the kernels compute. A token is computed by itself, so its bits do not
depend on the tokens beside it.

Letters: m tokens, k experts of a token, E experts, H hidden width.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dsbd_cli.ops import recording
from dsbd_cli.ops.cpu.layer import COSTS
from dsbd_cli.ops.cpu.runtime import CpuKernel, fields, flattened, kernels, layout, offsets, shares
from dsbd_cli.ops.reference import Router, Routes


class RouteArguments(ctypes.Structure):
    """Arguments of the choice of experts: sizes, addresses, and strides in bytes. The other fields are those of
    `reference.Router` and `reference.Routes`. spare: [4, lanes] float32, where lanes is E, filled up to whole
    vectors."""

    _fields_ = (
        *fields("taken", "threads", "items", "tokens", "experts", "logits", "logits_row", "narrow", "chosen", "sigmoid",
                "correction", "groups", "chosen_groups", "group_size", "normalised", "table", "rows", "weights",
                "spare", "lanes"),
        ("least_sum", ctypes.c_float),
        ("sum_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )  # fmt: skip


class SpreadArguments(ctypes.Structure):
    """Arguments of the copy of rows: sizes, addresses, and strides in bytes. width: bytes of a row."""

    _fields_ = fields("taken", "threads", "items", "tokens", "share", "x", "x_row", "width", "chosen", "rows", "out")


class CombineArguments(ctypes.Structure):
    """Arguments of the sum of outputs: sizes, addresses, and strides in bytes. shared, gate: addresses; 0 without."""

    _fields_ = fields(
        "taken", "threads", "items", "tokens", "share", "outputs", "outputs_row", "width", "chosen", "rows", "weights",
        "shared", "shared_row", "gate", "gate_row", "out", "narrow",
    )  # fmt: skip


ROUTE, SPREAD, COMBINE = offsets(RouteArguments), offsets(SpreadArguments), offsets(CombineArguments)
LAYOUT = layout(RouteArguments, SpreadArguments, CombineArguments)
SPARE_LINES, LANES = 4, 16


def route(router: Router, logits: Tensor) -> Routes:
    """Do what `reference.route` does."""
    flat, tokens, row = flattened(logits)
    experts, chosen, correction = logits.shape[-1], router.chosen, router.correction
    assert experts % router.groups == 0
    assert chosen <= experts // router.groups * router.chosen_groups
    assert correction is None or (correction.dtype == torch.float32 and correction.is_contiguous())
    lanes = -(-experts // LANES) * LANES
    table = recording.empty(1 + 3 * experts, dtype=torch.int64)
    rows = recording.empty(tokens, chosen, dtype=torch.int64)
    weights = recording.empty(tokens, chosen, dtype=torch.float32)
    spare = recording.empty(SPARE_LINES, lanes, dtype=torch.float32)
    arguments = RouteArguments(
        0, 0, 1, tokens, experts, flat.data_ptr(), row * logits.element_size(), logits.element_size() == 2, chosen,
        router.sigmoid, 0 if correction is None else correction.data_ptr(), router.groups, router.chosen_groups,
        router.group_size, router.normalised, table.data_ptr(), rows.data_ptr(), weights.data_ptr(), spare.data_ptr(),
        lanes, router.least_sum, router.sum_eps, router.scale,
    )  # fmt: skip
    recording.launch(compiled()[0], arguments, tokens * experts, 1, *(() if correction is None else (correction,)))
    return Routes(table, rows, weights)


def spread(x: Tensor, routes: Routes) -> Tensor:
    """Do what `reference.spread` does."""
    flat, tokens, row = flattened(x)
    chosen, unit, width = routes.rows.shape[1], x.element_size(), x.shape[-1]
    out = recording.empty(tokens * chosen, width, dtype=x.dtype)
    items, share = shares(tokens, torch.get_num_threads())
    arguments = SpreadArguments(
        0, 0, items, tokens, share, flat.data_ptr(), row * unit, width * unit, chosen, routes.rows.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    recording.launch(compiled()[1], arguments, tokens * chosen * width, items)
    return out


def combine(outputs: Tensor, routes: Routes, shared: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """Do what `reference.combine` does."""
    flat, _, row = flattened(outputs)
    (tokens, chosen), unit, width = routes.rows.shape, outputs.element_size(), outputs.shape[-1]
    out = recording.empty(tokens, width, dtype=outputs.dtype)
    more, more_row, logits, logits_row = None, 0, None, 0
    if shared is not None:
        assert shared.dtype == outputs.dtype
        more, _, more_row = flattened(shared)
        if gate is not None:
            assert gate.dtype == outputs.dtype
            logits, _, logits_row = flattened(gate)
    items, share = shares(tokens, torch.get_num_threads())
    arguments = CombineArguments(
        0, 0, items, tokens, share, flat.data_ptr(), row * unit, width, chosen, routes.rows.data_ptr(),
        routes.weights.data_ptr(), 0 if more is None else more.data_ptr(), more_row * unit,
        0 if logits is None else logits.data_ptr(), logits_row * unit, out.data_ptr(), unit == 2,
    )  # fmt: skip
    recording.launch(compiled()[2], arguments, tokens * chosen * width * COSTS // 4, items)
    return out


@functools.cache
def compiled() -> list[CpuKernel]:
    """Return the kernels, made at the first call."""
    return kernels("experts", "route", "spread", "combine")
