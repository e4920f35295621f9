"""Linear layers in int8 on the CPU: half the bytes of bfloat16, and sums of integers, which have no rounding.

Weights have one scale per output channel; inputs get one scale per row (token), so that a row does not depend on the
rows beside it. The few input channels whose values are far larger than the others would make that scale coarse: they
are multiplied as they are, in the checkpoint's dtype (LLM.int8(), Dettmers et al. 2022). Which channels these are is
found once, at load, on random tokens; choosing them anew for every batch would make rows depend on each other.

Two ways give the same integers. On x86 with AVX2 our own kernels quantize a row in one pass and read the weights once
for the integers and the outliers (kernels/int8.py). Elsewhere operators of torch serve, which are not documented.
ops/select.py compares the way that serves with products of integers.

Letters: r rows (tokens), i input channels, o output channels, k outlier channels.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.ops import recording
from dsbd_cli.ops.cpu import blocks
from dsbd_cli.ops.cpu.linear import COLUMNS, PackedProduct, Parts, joined_bias, lines, row_addresses
from dsbd_cli.ops.cpu.runtime import (
    PRODUCT,
    CpuKernel,
    fields,
    kernels,
    layout,
    offsets,
    shares,
)
from dsbd_cli.ops.memory import allocate_weights
from dsbd_cli.ops.processor import int8_tile
from dsbd_cli.ops.quantized_weight import GROUP
from dsbd_cli.ops.reference import Routes

LEVELS = 127
ZERO = 128  # offset of inputs, which are unsigned: for signed ones torch takes a kernel a thousand times slower
# Rows that are quantized, and multiplied, at a time, so that intermediate results stay in the caches. Measured on one
# core: 512 rows of 8960 are quantized after 5 ms, all at once after 27 ms (with vector_norm for the largest 45 ms).
LEVEL_ROWS, PRODUCT_ROWS = 32, 128
INPUTS = 16  # our kernels need a multiple of it, in int4 of GROUP
SMALLEST = torch.finfo(torch.float32).tiny


class QuantizeRowArguments(ctypes.Structure):
    """Arguments of the kernel that quantizes rows: sizes, addresses, and strides in bytes. sums: for each group of
    GROUP inputs, which then has a step of its own, the sum of its integers times the step, and the step, [rows, inputs
    / GROUP, 2] float32; steps are 1 then. 0: a row has one step."""

    _fields_ = fields(
        "taken", "threads", "items", "rows", "share", "x", "x_row", "narrow", "inputs", "kept", "levels", "levels_row",
        "steps", "outliers", "few", "few_row", "few_inputs", "zero_point", "sums",
    )  # fmt: skip


class Int8Arguments(ctypes.Structure):
    """Arguments of the kernel that multiplies: sizes, addresses, and strides in bytes. few_words: of a row of outliers,
    which are float32, or pairs of bfloat16. In int4 quads is the number of groups, offsets has the sums of x, and table
    the bytes that take the place of the levels, [16]; 0: nothing does."""

    _fields_ = fields(
        *PRODUCT, "levels", "levels_row", "weights", "quads", "piece", "offsets", "scales", "steps", "few",
        "few_weights", "few_words", "bias", "out", "out_row", "narrow", "table",
    )  # fmt: skip


class QuantizeWeightArguments(ctypes.Structure):
    """Arguments of the kernel that quantizes weights: sizes and addresses. rows: the address of an array of row
    addresses, in int8 0 for rows of zeros. spare: memory of the threads, `spare_bytes` of each. forms: of bytes in
    groups the address of an array of the rows' formats (see blocks.row_addresses); 0: rows are floats. outlier_weights:
    of rows in such formats, to be written."""

    _fields_ = fields(
        "taken", "threads", "items", "rows", "inputs", "narrow", "kept", "scales", "sums", "out", "spare",
        "spare_bytes", "forms", "outliers", "outlier_count", "outlier_weights",
    )  # fmt: skip


_ARGUMENTS = QuantizeRowArguments, Int8Arguments, QuantizeWeightArguments
QUANTIZE_ROWS, MULTIPLY, QUANTIZE_WEIGHTS = map(offsets, _ARGUMENTS)
LAYOUT = layout(*_ARGUMENTS, constants=(LEVELS, ZERO, GROUP, blocks.LAYOUT))
Linear = Callable[[Sequence[Tensor], Sequence[Tensor | None]], PackedProduct | None]


class TorchInt8:
    """Weights and products by torch's operators. weights: as they are stored. scales: [o] float32, the weight that the
    integer 1 stands for. zero_point: the level of inputs that stands for 0."""

    zero_point = ZERO

    def __init__(self, weights: Sequence[Tensor], outliers: Tensor, bias: Tensor, linear: Linear) -> None:
        """weights: [o, i] each, one below the other; outliers [k]; bias [o]. linear: packs the columns of outliers."""
        weight = torch.cat([*weights])
        outlier_weights, kept = weight[:, outliers], _ordinary_mask(weight.shape[1], outliers)
        ordinary = weight.float().mul_(kept)
        del weight
        scales = (ordinary.abs().amax(1) / LEVELS).clamp_min(SMALLEST)
        integers = ordinary.div_(scales.unsqueeze(1)).round_().to(torch.int8)
        del ordinary
        packed = linear([outlier_weights], [bias])
        self._outlier_product = (
            partial(nn.functional.linear, weight=outlier_weights, bias=bias) if packed is None else packed.compute
        )
        self.scales, self._outliers, self._ordinary_mask = scales, outliers, kept.to(outlier_weights.dtype)
        self.weights: Tensor = torch.ops.onednn.qlinear_prepack(integers, None)
        self._zeros = torch.zeros(len(integers), dtype=torch.int32)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product: x [r, i] -> [r, o]."""

        def compute() -> Tensor:
            parts = [self.multiply(*self.levels(rows)) for rows in x.split(PRODUCT_ROWS)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return recording.compute(compute)

    def levels(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize x [r, i]. Return integers [r, i] plus `zero_point`, the scale of each row [r, 1], and outliers
        [r, k]."""
        levels = torch.empty_like(x, dtype=torch.uint8)
        steps = self.scales.new_empty(len(x), 1)
        for rows, row_levels, step in zip(
            x.split(LEVEL_ROWS), levels.split(LEVEL_ROWS), steps.split(LEVEL_ROWS), strict=True
        ):
            # each product, quotient and sum is rounded by itself: where torch fuses some, bits depend on the place
            ordinary = rows * self._ordinary_mask
            step.copy_(ordinary.abs().amax(1, keepdim=True)).div_(LEVELS).clamp_min_(SMALLEST)
            row_levels.copy_(ordinary.float().div_(step).add_(ZERO + 0.5).to(torch.int32))
        return levels, steps, x.index_select(1, self._outliers)

    def multiply(self, levels: Tensor, steps: Tensor, outlier_x: Tensor) -> Tensor:
        """Multiply the results of `levels` by the weights: levels [r, i], steps [r, 1], outlier_x [r, k] -> [r, o]."""
        sums: Tensor = torch.ops.onednn.qlinear_pointwise(
            levels, 1.0, ZERO, self.weights, self.scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return sums.mul_(steps).add_(self._outlier_product(outlier_x)).to(outlier_x.dtype)


class CompiledInt8:
    """Weights and products by kernels/int8.py, with the methods of TorchInt8. Outputs, and their scales, fill up a
    multiple of COLUMNS, inputs a multiple of `inputs_step`."""

    inputs_step = INPUTS

    def __init__(
        self,
        weights: Sequence[Any],
        outliers: Tensor,
        bias: Tensor,
        linear: Linear,
        dtype: torch.dtype | None = None,
    ) -> None:
        """weights: tensors, or stored ones in subclasses. dtype: of inputs and results; None: of the weights. The other
        arguments are those of TorchInt8."""
        self._outputs, self._given = sum(map(len, weights)), weights[0].shape[1]
        self._dtype, pad = dtype or weights[0].dtype, nn.functional.pad
        wider = -self._given % self.inputs_step
        self._inputs, more = self._given + wider, -self._outputs % COLUMNS
        self._outliers, self._outlier_dtype = outliers.contiguous(), torch.float32
        if self._dtype == torch.bfloat16:
            self._outlier_dtype = torch.bfloat16  # half as many bytes to read
        if wider:
            weights = [pad(weight, (0, wider)) for weight in weights if isinstance(weight, Tensor)]
        self._ordinary_mask = pad(_ordinary_mask(self._given, outliers), (0, wider))
        outlier_weights = self._quantize(weights).to(self._outlier_dtype)
        if self._outlier_dtype == torch.bfloat16 and len(outliers) % 2:  # one channel twice, with zeros for weights
            self._outliers, outlier_weights = torch.cat((outliers, outliers[:1])), pad(outlier_weights, (0, 1))
        self._blocks = len(self.weights)
        self._bias, self._outlier_lines = pad(bias.float(), (0, more)), lines([outlier_weights])

    def _quantize(self, weights: Sequence[Any]) -> Tensor:
        """Set the weights as lines, the scales of outputs, and what the sums of integers begin with. Return the weights
        of outliers, [o, k]."""
        sums = torch.empty(-(-self._outputs // COLUMNS) * COLUMNS, dtype=torch.int32)
        outlier_weights = self._quantize_all(weights, sums)
        self.zero_point = 0 if int8_tile() == "signs" else ZERO
        self._offsets = sums.mul_(-self.zero_point)
        return outlier_weights

    def _allocate(self, outputs: int, inputs: int) -> Tensor:
        """Set and return memory for the weights, and set that for the scales of a multiple of COLUMNS outputs."""
        self.weights = allocate_weights(outputs * inputs).view(torch.int32).view(-1, inputs // 4, COLUMNS)
        self.scales = torch.empty(outputs)
        return self.weights

    def _quantize_all(self, weights: Sequence[Any], sums: Tensor) -> Tensor:
        """Quantize weights, and write the sums [o] of their integers. Return the weights of outliers, [o, k]."""
        self._allocate(len(sums), weights[0].shape[1])
        outlier_weights, done = [], 0
        for piece in self._pieces(weights):
            rows, owners = row_addresses(piece)
            self._quantize_rows(rows, piece[0].element_size(), done, sums)
            outlier_weights += [weight[:, self._outliers] for weight in piece]
            done += len(rows)
            del owners
        return torch.cat(outlier_weights)

    def _pieces(self, weights: Sequence[Any]) -> Iterable[Sequence[Tensor]]:
        """Return weights some rows at a time, which are a multiple of COLUMNS but for the last ones."""
        return [weights]

    def __call__(self, x: Tensor, routes: Routes | None = None) -> Tensor:
        """Compute the product: x [r, i] -> [r, o]. routes: the expert of each row, whose outputs alone are computed."""
        return self.multiply(*self.levels(x), routes=routes)

    def _quantize_rows(
        self, rows: Tensor, unit: int, first: int, sums: Tensor, forms: Tensor | None = None, of: Tensor | None = None
    ) -> None:
        """Quantize the rows at the addresses `rows` [o] int64, whose first one is output `first`, and write their sums.
        Each is read twice.

        unit: bytes of a number. forms: [o] int64, formats of rows in blocks; None: rows are floats. of: [o, k], the
        weights of outliers of rows in blocks, to be written.
        """
        inputs, items = self._inputs, len(rows) // COLUMNS
        size = self._spare_bytes(inputs) + (0 if forms is None else blocks.SPARE + inputs * 4)
        spare = torch.empty(torch.get_num_threads(), size, dtype=torch.uint8)
        arguments = QuantizeWeightArguments(
            0, 0, items, rows.data_ptr(), inputs, unit == 2, self._ordinary_mask.data_ptr(),
            self.scales[first:].data_ptr(), sums[first:].data_ptr(), self.weights[first // COLUMNS :].data_ptr(),
            spare.data_ptr(), size, 0 if forms is None else forms.data_ptr(), self._outliers.data_ptr(),
            len(self._outliers), 0 if of is None else of.data_ptr(),
        )  # fmt: skip
        self._quantizer()(arguments, len(rows) * inputs * 2, items)

    def _quantizer(self) -> CpuKernel:
        """Return the kernel that quantizes weights."""
        return compiled()[2]

    @staticmethod
    def _spare_bytes(inputs: int) -> int:
        """Return how much memory a thread needs to quantize COLUMNS rows."""
        return COLUMNS * inputs

    def levels(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._levels(x, None)

    def _levels(self, x: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `levels` does. sums: memory for those of groups."""
        assert x.dtype == self._dtype
        assert x.is_cpu
        assert x.shape[1] == self._given
        unpadded = x
        if self._given < self._inputs or x.stride(1) != 1:
            x = recording.compute(lambda: nn.functional.pad(unpadded, (0, self._inputs - self._given)).contiguous())
        rows = x.shape[0]
        levels = recording.empty(rows, self._inputs, dtype=torch.uint8 if self.zero_point else torch.int8)
        steps = recording.empty(rows, 1, dtype=torch.float32)
        outlier_x = recording.empty(rows, len(self._outliers), dtype=self._outlier_dtype)
        items, share = shares(rows, torch.get_num_threads())
        arguments = QuantizeRowArguments(
            0, 0, items, rows, share, x.data_ptr(), x.stride(0) * x.element_size(), x.element_size() == 2,
            self._inputs, self._ordinary_mask.data_ptr(), levels.data_ptr(), self._inputs, steps.data_ptr(),
            self._outliers.data_ptr(), outlier_x.data_ptr(), outlier_x.shape[1] * outlier_x.element_size(),
            outlier_x.shape[1], self.zero_point, 0 if sums is None else sums.data_ptr(),
        )  # fmt: skip
        recording.launch(compiled()[0], arguments, rows * self._inputs, items)
        return levels, steps, outlier_x

    def multiply(self, levels: Tensor, steps: Tensor, outlier_x: Tensor, routes: Routes | None = None) -> Tensor:
        quads = self._inputs // 4
        piece = Parts.of(len(levels), self._blocks, quads, kinds=2, routes=routes).piece
        return self._multiply(compiled()[1], quads, piece, self._offsets, levels, steps, outlier_x, routes=routes)

    def _multiply(
        self,
        kernel: CpuKernel,
        lines: int,
        piece: int,
        offsets: Tensor,
        levels: Tensor,
        steps: Tensor,
        outlier_x: Tensor,
        table: Tensor | None = None,
        routes: Routes | None = None,
    ) -> Tensor:
        """Run a kernel that multiplies. lines: of a block of weights, or its groups, of which a thread works on `piece`
        at a time."""
        rows, columns = levels.shape[0], self.scales.shape[0] // (1 if routes is None else routes.experts)
        out = recording.empty(rows, columns, dtype=self._dtype)
        parts = Parts.of(rows, self._blocks, lines, kinds=2, routes=routes)
        sums = parts.scratch()
        arguments = Int8Arguments(
            *parts.arguments(sums), levels.data_ptr(), levels.stride(0), self.weights.data_ptr(), lines, piece,
            offsets.data_ptr(), self.scales.data_ptr(), steps.data_ptr(), outlier_x.data_ptr(),
            self._outlier_lines.data_ptr(), self._outlier_lines.shape[1], self._bias.data_ptr(), out.data_ptr(),
            columns * out.element_size(), out.element_size() == 2,
            0 if table is None else table.data_ptr(),
        )  # fmt: skip
        recording.launch(kernel, arguments, rows * columns * self._inputs, parts.items)
        return out if routes is not None or columns == self._outputs else out[:, : self._outputs]


def _ordinary_mask(inputs: int, outliers: Tensor) -> Tensor:
    """Return [i] float32, 0 for outliers and 1 for other channels."""
    kept = torch.ones(inputs)
    kept[outliers] = 0
    return kept


class Int8Product:
    """A product in int8, of layers with the same input, which is quantized once.

    Attributes:
        parts: number of outputs of each layer.
        backend: computes the product.
        compiled: whether our kernels do.
    """

    def __init__(
        self,
        weights: Sequence[Any],
        biases: Sequence[Tensor | None],
        outliers: Tensor,
        backend: type[CompiledInt8] | type[TorchInt8],
        linear: Linear,
        dtype: torch.dtype | None = None,
    ) -> None:
        """weights: [o, i] of each layer, tensors of one dtype, or stored ones. biases: [o] or None of each. outliers:
        [k], ascending. backend: computes the product. linear: packs weights that are not quantized, or returns None.
        dtype: of inputs and results, where it is not that of the weights; CompiledInt8 alone takes it."""
        self.parts = [len(weight) for weight in weights]
        bias = joined_bias(weights, biases, dtype or weights[0].dtype)
        more = {} if dtype is None else {"dtype": dtype}
        self.backend = backend(weights, outliers, bias, linear, **more)
        self.compiled = isinstance(self.backend, CompiledInt8)

    @property
    def weights(self) -> list[Tensor]:
        """The weights as they are stored."""
        return [self.backend.weights]

    def compute(self, x: Tensor) -> Tensor:
        """Compute the product: x [..., i] -> [..., o], with the outputs of all layers side by side."""
        return self.backend(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], sum(self.parts))

    def compute_routed(self, x: Tensor, routes: Routes) -> Tensor:
        """Compute the products of rows x [r, i], each with the weights of its expert, [r, o / experts]."""
        assert isinstance(self.backend, CompiledInt8)
        return self.backend(x, routes)


@functools.cache
def compiled() -> list[CpuKernel]:
    """Return the kernels, made at the first call."""
    return kernels("int8", "quantize_rows", "multiply", "quantize_weights")


def fault(backend: type[TorchInt8] | type[CompiledInt8], linear: Linear) -> str | None:
    """Return what is wrong with the sums of integers of a backend; None where they are exact."""
    operators: Any = torch.ops.onednn
    if backend is TorchInt8 and not (hasattr(operators, "qlinear_prepack") and hasattr(operators, "qlinear_pointwise")):
        return "this build of torch has no int8 linear layers (oneDNN)"
    generator = torch.Generator().manual_seed(0)
    # the largest values next to each other: processors without exact 8-bit products saturate there
    weight = LEVELS * (2 * torch.randint(0, 2, (96, 128), generator=generator) - 1)
    levels = 1 + 254 * torch.randint(0, 2, (5, 128), generator=generator)
    weight[:, :32], levels[:, :32] = LEVELS, 255
    weight[:, -1] = 0
    last = torch.tensor([127])  # an outlier of weight 0
    try:
        with torch.inference_mode():
            made = backend([weight.float()], last, torch.zeros(96), linear)
            stored = (levels - ZERO + made.zero_point).to(torch.uint8 if made.zero_point else torch.int8)
            ours = made.multiply(stored, torch.ones(5, 1), torch.zeros(5, 1))
    except (RuntimeError, NotImplementedError) as error:
        return f"int8 linear layers fail on this processor: {' '.join(str(error).split())[:100]}"
    exact = (levels - ZERO) @ weight.t()
    return None if torch.equal(ours.long(), exact) else "this processor's int8 products are not exact"
