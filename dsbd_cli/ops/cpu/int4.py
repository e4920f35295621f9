"""Linear layers in four bits on the CPU: half the bytes of int8, and a little more.

GROUP inputs of an output share a scale and an offset: a weight is scale * level + offset, with a level of 0 .. 15.
Inputs are quantized with a step for each of these groups, and the same few channels as in int8.py are multiplied as
they are.

Letters: r rows (tokens), i input channels, o output channels, g groups of inputs, k outlier channels.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.ops import recording
from dsbd_cli.ops.cpu import blocks, int8
from dsbd_cli.ops.cpu.int8 import QuantizeWeightArguments
from dsbd_cli.ops.cpu.linear import COLUMNS, row_addresses
from dsbd_cli.ops.cpu.runtime import CpuKernel, fields, kernels, layout, offsets
from dsbd_cli.ops.memory import allocate_weights
from dsbd_cli.ops.processor import Processor, current
from dsbd_cli.ops.quantized_weight import GROUP, Blocks, FourBit
from dsbd_cli.ops.reference import Routes

MOST_LEVEL = 15
GROUP_BYTES = COLUMNS * GROUP // 2 + 2 * COLUMNS * 2  # levels, scales and offsets in float16
SHRINKS = (1.0, 0.97, 0.94, 0.9, 0.86, 0.82)  # parts of a group's range that are tried
FEW_ROWS, PIECE = 4, 64  # for more rows than these a thread works on PIECE groups at a time, which its cache holds


class PackBlocksArguments(ctypes.Structure):
    """Arguments of the kernel that packs blocks of GGUF files: sizes and addresses. rows: the address of what
    `blocks.row_addresses` returns, with zeros for rows of zeros. spare: memory of the threads, `spare_bytes` of each.
    outlier_weights: [outputs, outliers] float32, to be written."""

    _fields_ = fields(
        "taken", "threads", "items", "rows", "inputs", "scales", "out", "spare", "spare_bytes", "outliers",
        "outlier_count", "outlier_weights",
    )  # fmt: skip


PACK_BLOCKS = offsets(PackBlocksArguments)
LAYOUT = layout(*int8._ARGUMENTS, PackBlocksArguments, constants=(MOST_LEVEL, GROUP_BYTES, SHRINKS, blocks.LAYOUT))


class CompiledInt4(int8.CompiledInt8):
    """Weights and products by kernels/int4.py. weights: [blocks, g, GROUP_BYTES] uint8. scales: [o] float32, the factor
    of an output's scales and offsets. table: [16] uint8, the numbers in place of the levels; None: themselves."""

    inputs_step, group_bytes = GROUP, GROUP_BYTES
    zero_point = 0
    table: Tensor | None = None

    def __init__(
        self,
        weights: Sequence[Any],
        outliers: Tensor,
        bias: Tensor,
        linear: int8.Linear,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._order = weights[0].order if isinstance(weights[0], FourBit) else None
        if self._order is not None:
            outliers = self._order.argsort()[outliers].sort().values
        super().__init__(weights, outliers, bias, linear, dtype)

    def _quantize(self, weights: Sequence[Any]) -> Tensor:
        if isinstance(weights[0], Blocks):
            return self._pack_blocks(weights)
        if isinstance(weights[0], FourBit):
            self._pack(weights)
            return torch.cat([weight.columns(self._outliers) for weight in weights])
        rows, owners = row_addresses(weights)
        owners.append(torch.zeros_like(weights[0][0]).contiguous())
        rows[sum(map(len, weights)) :] = owners[-1].data_ptr()
        inputs, threads = weights[0].shape[1], torch.get_num_threads()
        made = self._allocate(len(rows), inputs)
        line = COLUMNS * 4  # bytes; a tile and its ranges take some, scales and offsets two a group, weights the others
        lines = GROUP + 2 * self._groups + inputs * weights[0].element_size() // 4
        spare = torch.empty(threads, lines * line, dtype=torch.uint8)
        arguments = QuantizeWeightArguments(
            0, 0, len(made), rows.data_ptr(), inputs, weights[0].element_size() == 2, self._ordinary_mask.data_ptr(),
            self.scales.data_ptr(), 0, made.data_ptr(), spare.data_ptr(), spare.stride(0),
        )  # fmt: skip
        compiled()[1](arguments, len(rows) * inputs * 8, len(made))
        del owners
        return torch.cat([weight[:, self._outliers] for weight in weights])

    def _allocate(self, outputs: int, inputs: int) -> Tensor:
        """Set and return memory for the weights, and set that for the factors of a multiple of COLUMNS outputs."""
        self._groups, self.scales = inputs // GROUP, torch.empty(outputs)
        size = outputs // COLUMNS * self._groups * self.group_bytes
        self.weights = allocate_weights(size).view(-1, self._groups, self.group_bytes)
        return self.weights

    def _pack_blocks(self, weights: Sequence[Blocks]) -> Tensor:
        """Do what `_pack` does, from the blocks of a file. Return the weights of outliers, as `_quantize` does."""
        inputs, threads, outliers = weights[0].shape[1], torch.get_num_threads(), self._outliers
        rows = blocks.row_addresses(weights)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % COLUMNS))
        made, self.table = self._allocate(len(rows), inputs), blocks.table(weights[0].kind)
        spare = torch.empty(threads, blocks.SPARE + self._groups * 2 * COLUMNS * 4, dtype=torch.uint8)
        outlier_weights = torch.empty(sum(map(len, weights)), len(outliers))
        arguments = PackBlocksArguments(
            0, 0, len(made), rows.data_ptr(), inputs, self.scales.data_ptr(), made.data_ptr(), spare.data_ptr(),
            spare.stride(0), outliers.data_ptr(), len(outliers), outlier_weights.data_ptr(),
        )  # fmt: skip
        compiled()[2](arguments, len(rows) * inputs, len(made))
        return outlier_weights

    def _pack(self, weights: Sequence[FourBit]) -> None:
        """Set weights that are in four bits already. They are not rounded again, and their scales to 11 bits."""
        count = sum(map(len, weights))
        number = -(-count // COLUMNS)
        made, self.table = self._allocate(number * COLUMNS, weights[0].shape[1]), weights[0].table

        def filled(parts: Sequence[Tensor]) -> Tensor:
            """Return [number, COLUMNS, ...], with rows of zeros at the end."""
            rows = torch.cat([*parts])
            if more := number * COLUMNS - count:
                rows = torch.nn.functional.pad(rows, (0, 0, 0, more))
            return rows.view(number, COLUMNS, -1)

        words = filled([weight.words for weight in weights]).unflatten(2, (self._groups, GROUP // 8))
        scales, offset = (filled([getattr(weight, name) for weight in weights]) for name in ("scales", "offsets"))
        size = words[0, 0, 0].numel() * COLUMNS
        made.view(torch.int32)[..., :size].unflatten(2, (-1, COLUMNS)).copy_(words.permute(0, 2, 3, 1))
        most = torch.maximum(scales.abs().amax(2), offset.abs().amax(2) * (1 / MOST_LEVEL)).clamp_min_(int8.SMALLEST)
        halves = made.view(torch.float16)[..., 2 * size :].unflatten(2, (2, COLUMNS))
        for side, factor in enumerate((scales, offset)):
            halves[:, :, side] = (factor / most.unsqueeze(2)).half().transpose(1, 2)
        self.scales = most.flatten()

    def levels(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]  # sums, too
        """Quantize x [r, i], each group of inputs with a step of its own. Return integers, ones, outliers, and of each
        group the sum of its integers times its step, and the step, [r, g, 2] float32."""
        if self._order is not None:
            unordered, order = x, self._order
            x = recording.compute(lambda: unordered.index_select(1, order))
        sums = recording.empty(len(x), self._groups, 2, dtype=torch.float32)
        return *self._levels(x, sums), sums

    def multiply(  # type: ignore[override]  # the results of `levels`
        self, levels: Tensor, steps: Tensor, outlier_x: Tensor, sums: Tensor, routes: Routes | None = None
    ) -> Tensor:
        rows = len(levels)
        narrow = current() < Processor.AVX512 and rows > 1  # it reads groups strip by strip
        piece = PIECE if narrow or rows > FEW_ROWS else self._groups
        return self._multiply(self._kernel(), self._groups, piece, sums, levels, steps, outlier_x, self.table, routes)

    def _kernel(self) -> CpuKernel:
        """Return the kernel that multiplies."""
        return compiled()[0]


def fault(backend: type[CompiledInt4], linear: int8.Linear, limit: float = 0.15) -> str | None:
    """Return what is wrong with the products of a backend, of 1 to 9 rows; None where they are near those of the
    weights, and each row has its bits alone. limit: of the relative error."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 128, generator=generator) for rows in (96, 9))
    x[:, 0] = 0  # the outlier
    with torch.inference_mode():
        product = backend([weight], torch.tensor([0]), torch.zeros(96), linear)
        alone, exact = torch.cat([product(row) for row in x.split(1)]), x @ weight.t()
        same = all(torch.equal(product(x[:rows]), alone[:rows]) for rows in range(2, 10))
    error = float((alone - exact).norm() / exact.norm())
    if error < limit:
        return None if same else "rows of quantized products depend on the rows beside them"
    return f"this processor's products by groups are off by {error:.2g}"


@functools.cache
def compiled() -> list[CpuKernel]:
    """Return the kernels, made at the first call."""
    return kernels("int4", "multiply", "quantize_weights", "pack_blocks")
