"""CPU kernels for what comes between the products of a decoder layer: norms, gated activation and rotation.

Each kernel does in one pass what takes five to twenty operations of torch. ops/reference.py specifies what they
compute. A row is computed by itself, in an order that its width fixes, so its bits do not depend on how many rows or
threads there are. The kernels are in kernels/layer.py; numba, which compiles them, is imported at their first call.

Letters: m rows (nodes of all requests), H hidden width, I inner width, Q query heads, K kv heads, E head dim.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dsbd_cli.ops import recording, reference
from dsbd_cli.ops.cpu.runtime import FLOATS, CpuKernel, fields, flattened, kernels, layout, offsets, shares
from dsbd_cli.ops.reference import ClampedGLU, Norm

STEP = 16  # widths of rows, of gates and of half heads must be multiples of it
NOTHING = {dtype: torch.empty(0, dtype=dtype, device="cpu") for dtype in FLOATS}
COSTS = 8  # multiplications per number, about


class NormArguments(ctypes.Structure):
    """Arguments of a norm: sizes, addresses, and strides in bytes."""

    _fields_ = (
        *fields("taken", "threads", "items", "rows", "share", "width", "x", "x_row", "more", "more_row", "weight",
                "out", "summed", "unit_offset", "wide", "narrow"),
        ("eps", ctypes.c_float),
    )  # fmt: skip


class GatedArguments(ctypes.Structure):
    """Arguments of a gated activation: sizes, addresses, and strides in bytes."""

    _fields_ = (
        *fields("taken", "threads", "items", "rows", "share", "width", "gate_up", "gate_up_row", "out", "gelu",
                "narrow", "clamped"),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
    )  # fmt: skip


class RotateArguments(ctypes.Structure):
    """Arguments of a rotation: sizes, addresses, and strides in bytes."""

    _fields_ = (
        *fields("taken", "threads", "items", "rows", "share", "nodes", "heads", "kv_heads", "dim", "qkv", "qkv_row",
                "cos", "sin", "angle_row", "slots", "out", "keys", "values", "query_norm", "key_norm", "unit_offset",
                "narrow"),
        ("eps", ctypes.c_float),
    )  # fmt: skip


class OutputGateArguments(ctypes.Structure):
    """Arguments of a gate of attention: sizes, addresses, and strides in bytes. each: every number has a factor."""

    _fields_ = fields(
        "taken", "threads", "items", "rows", "share", "heads", "dim", "x", "gate", "gate_row", "each", "out", "narrow"
    )


class GatedNormArguments(ctypes.Structure):
    """Arguments of a norm of groups with a gate: sizes, addresses, and strides in bytes. width: of a group. weight: 0
    for no norm."""

    _fields_ = (
        *fields("taken", "threads", "items", "rows", "share", "groups", "width", "x", "x_row", "gate", "gate_row",
                "weight", "out", "gate_first", "narrow"),
        ("eps", ctypes.c_float),
    )  # fmt: skip


class DeltaArguments(ctypes.Structure):
    """Arguments of the inputs of a gated delta rule: sizes, addresses, and strides in bytes. factor: of the betas."""

    _fields_ = (
        *fields("taken", "threads", "items", "rows", "share", "groups", "dim", "heads", "x", "x_row", "betas",
                "betas_row", "steps", "steps_row", "decay", "bias", "query", "key", "decays", "out"),
        ("factor", ctypes.c_float),
    )  # fmt: skip


class StepsArguments(ctypes.Structure):
    """Arguments of the step sizes of a Mamba-2 scan: sizes, addresses, and strides in bytes. least, most: limits."""

    _fields_ = (
        *fields("taken", "threads", "items", "rows", "share", "heads", "steps", "steps_row", "decay", "bias", "sizes",
                "decays"),
        ("least", ctypes.c_float),
        ("most", ctypes.c_float),
    )  # fmt: skip


_KINDS = (NormArguments, GatedArguments, RotateArguments, OutputGateArguments, GatedNormArguments, DeltaArguments,
          StepsArguments)  # fmt: skip
NORM, GATED, ROTATE, OUTPUT_GATE, GATED_NORM, DELTA, STEPS = (offsets(kind) for kind in _KINDS)
LAYOUT = layout(*_KINDS)


def norm(rms: Norm, x: Tensor, more: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Do what `reference.norm` does."""
    flat, rows, row = flattened(x)
    width, unit = x.shape[-1], x.element_size()
    out = recording.empty(*x.shape, dtype=x.dtype)
    assert x.dtype == rms.weight.dtype
    added, given_row, summed = None, 0, NOTHING[x.dtype]
    if more is not None:
        assert more.shape == x.shape
        assert more.dtype == x.dtype
        added, _, given_row = flattened(more)
        summed = recording.empty(*x.shape, dtype=x.dtype)
    items, share = shares(rows, torch.get_num_threads())
    arguments = NormArguments(
        0, 0, items, rows, share, width, flat.data_ptr(), row * unit, 0 if added is None else added.data_ptr(),
        given_row * unit, rms.weight.data_ptr(), out.data_ptr(), summed.data_ptr(), rms.unit_offset, rms.wide,
        unit == 2, rms.eps,
    )  # fmt: skip
    recording.launch(compiled()[0], arguments, rows * width * COSTS, items)
    return out, summed


def gated(gate_up: Tensor, gelu: bool, clamped: ClampedGLU | None = None) -> Tensor:
    """Do what `reference.gated` does."""
    flat, rows, row = flattened(gate_up)
    width, unit = gate_up.shape[-1] // 2, gate_up.element_size()
    out = recording.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype)
    items, share = shares(rows, torch.get_num_threads())
    arguments = GatedArguments(
        0, 0, items, rows, share, width, flat.data_ptr(), row * unit, out.data_ptr(), gelu, unit == 2,
        clamped is not None, *((0.0, 0.0) if clamped is None else (clamped.limit, clamped.alpha)),
    )  # fmt: skip
    recording.launch(compiled()[1], arguments, rows * width * COSTS, items)
    return out


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """Do what `reference.rotate` does."""
    flat, count, row = flattened(qkv)
    rows, nodes, width = qkv.shape
    kv_heads, dim = keys.shape[-2:]
    heads, unit = width // dim - 2 * kv_heads, qkv.element_size()
    cos, sin = cos.contiguous(), sin.contiguous()
    angles = cos.shape[0]
    assert slots.dtype == torch.int64
    assert slots.shape == (count,)
    assert slots.is_contiguous()
    assert cos.shape == sin.shape == (angles, nodes, dim)
    assert angles in (1, rows)
    out = recording.empty(rows, heads, nodes, dim, dtype=qkv.dtype)
    items, share = shares(count, torch.get_num_threads())
    arguments = RotateArguments(
        0, 0, items, count, share, nodes, heads, kv_heads, dim, flat.data_ptr(), row * unit, cos.data_ptr(),
        sin.data_ptr(), 0 if angles == 1 else nodes * dim * unit, slots.data_ptr(), out.data_ptr(), keys.data_ptr(),
        values.data_ptr(), *((0, 0) if norms is None else (norm.weight.data_ptr() for norm in norms)),
        norms is not None and norms[0].unit_offset, unit == 2, 0.0 if norms is None else norms[0].eps,
    )  # fmt: skip
    recording.launch(compiled()[2], arguments, count * width * COSTS, items)
    return out


def output_gate(attended: Tensor, gate: Tensor) -> Tensor:
    """Do what `reference.output_gate` does."""
    flat, rows, row = flattened(gate)
    heads, dim = attended.shape[2:]
    assert attended.is_contiguous()
    unit, each = attended.element_size(), gate.shape[-1] != heads
    out = recording.empty(*attended.shape, dtype=attended.dtype)
    items, share = shares(rows, torch.get_num_threads())
    arguments = OutputGateArguments(
        0, 0, items, rows, share, heads, dim, attended.data_ptr(), flat.data_ptr(), row * unit, each, out.data_ptr(),
        unit == 2,
    )  # fmt: skip
    recording.launch(compiled()[3], arguments, rows * heads * dim * COSTS, items)
    return out


def gated_norm(rms: Norm | None, x: Tensor, gate: Tensor, groups: int, gate_first: bool) -> Tensor:
    """Do what `reference.gated_norm` does."""
    width = x.shape[-1] // groups
    if width % STEP:
        return reference.gated_norm(rms, x, gate, groups, gate_first)
    flat, rows, row = flattened(x)
    gates, _, gate_row = flattened(gate)
    unit, out = x.element_size(), recording.empty(*x.shape, dtype=x.dtype)
    items, share = shares(rows, torch.get_num_threads())
    arguments = GatedNormArguments(
        0, 0, items, rows, share, groups, width, flat.data_ptr(), row * unit, gates.data_ptr(), gate_row * unit,
        0 if rms is None else rms.weight.data_ptr(), out.data_ptr(), gate_first, unit == 2,
        0.0 if rms is None else rms.eps,
    )  # fmt: skip
    recording.launch(compiled()[4], arguments, rows * x.shape[-1] * COSTS, items)
    return out


def delta_inputs(
    x: Tensor, betas: Tensor, steps: Tensor, decay: Tensor, bias: Tensor, groups: int, dim: int, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what `reference.delta_inputs` does."""
    if dim % STEP:
        return reference.delta_inputs(x, betas, steps, decay, bias, groups, dim, factor)
    (flat, rows, row), (own, _, own_row), (sizes, _, sizes_row) = (flattened(part) for part in (x, betas, steps))
    shape, heads = x.shape[:-1], len(decay)
    query, key = (recording.empty(*shape, groups, dim, dtype=torch.float32) for _ in range(2))
    decays, out = (recording.empty(*shape, heads, dtype=torch.float32) for _ in range(2))
    items, share = shares(rows, torch.get_num_threads())
    arguments = DeltaArguments(
        0, 0, items, rows, share, groups, dim, heads, flat.data_ptr(), row * 4, own.data_ptr(), own_row * 4,
        sizes.data_ptr(), sizes_row * 4, decay.data_ptr(), bias.data_ptr(), query.data_ptr(), key.data_ptr(),
        decays.data_ptr(), out.data_ptr(), factor,
    )  # fmt: skip
    recording.launch(compiled()[5], arguments, rows * (groups * dim + heads * 8) * COSTS, items)
    return query, key, decays, out


def step_sizes(steps: Tensor, decay: Tensor, bias: Tensor, limits: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Do what `reference.step_sizes` does."""
    flat, rows, row = flattened(steps)
    sizes, decays = (recording.empty(*steps.shape, dtype=torch.float32) for _ in range(2))
    items, share = shares(rows, torch.get_num_threads())
    arguments = StepsArguments(
        0, 0, items, rows, share, len(decay), flat.data_ptr(), row * 4, decay.data_ptr(), bias.data_ptr(),
        sizes.data_ptr(), decays.data_ptr(), *limits,
    )  # fmt: skip
    recording.launch(compiled()[6], arguments, rows * len(decay) * 8 * COSTS, items)
    return sizes, decays


@functools.cache
def compiled() -> list[CpuKernel]:
    """Return the kernels, made at the first call."""
    return kernels("layer", "norm", "gated", "rotate", "output_gate", "gated_norm", "delta_inputs", "steps")
