"""Weights of quantised files with more than four bits: bytes, with a scale for each group of inputs.

A file's levels of five to eight bits have scales for groups of 16 or 32 inputs. With one scale for each output, as in
int8.py, their error would be several times as large. The products are those of int4.py, with bytes for weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.ops.cpu import blocks, int8
from dsbd_cli.ops.cpu.int4 import LAYOUT, CompiledInt4
from dsbd_cli.ops.cpu.linear import COLUMNS
from dsbd_cli.ops.cpu.runtime import CpuKernel, kernels
from dsbd_cli.ops.quantized_weight import AT_ONCE, GROUP, Blocks, QuantizedWeight

GROUP_BYTES = COLUMNS * GROUP + 2 * COLUMNS * 2  # bytes, scales and offsets in float16
ZERO = 128  # the byte that stands for 0

__all__ = ["GROUP_BYTES", "LAYOUT", "ZERO", "CompiledInt8Groups", "compiled"]


class CompiledInt8Groups(CompiledInt4):
    """Weights and products by kernels/int8_groups.py. weights: [blocks, g, GROUP_BYTES] uint8. The offset of a group is
    -ZERO times its scale."""

    group_bytes = GROUP_BYTES

    def _quantize(self, weights: Sequence[Any]) -> Tensor:
        count = -(-self._outputs // COLUMNS) * COLUMNS
        sums = torch.empty(count, dtype=torch.int32)
        if not isinstance(weights[0], Blocks):
            return self._quantize_all(weights, sums)
        self._allocate(count, weights[0].shape[1])
        outlier_weights = torch.empty(self._outputs, len(self._outliers))
        rows, forms = (
            nn.functional.pad(blocks.row_addresses(weights), (0, 0, 0, count - self._outputs)).t().contiguous()
        )
        self._quantize_rows(rows, 4, 0, sums, forms, outlier_weights)
        return outlier_weights

    def _pieces(self, weights: Sequence[Any]) -> Iterable[Sequence[Tensor]]:
        return [weights] if isinstance(weights[0], Tensor) else _dequantized(weights)

    def _quantizer(self) -> CpuKernel:
        return compiled()[1]

    @staticmethod
    def _spare_bytes(inputs: int) -> int:
        return COLUMNS * inputs + inputs // GROUP * 2 * COLUMNS * 4

    def _kernel(self) -> CpuKernel:
        return compiled()[0]


def _dequantized(weights: Sequence[QuantizedWeight]) -> Iterator[list[Tensor]]:
    """Yield the rows of stored weights in float32, a multiple of COLUMNS at a time, in pieces of one weight each."""
    step = max(1, AT_ONCE // weights[0].shape[1] // COLUMNS) * COLUMNS
    for first in range(0, sum(map(len, weights)), step):
        begin, piece = 0, list[Tensor]()
        for weight in weights:
            rows = slice(max(first - begin, 0), max(first + step - begin, 0))
            if range(len(weight))[rows]:
                piece.append(weight.dequantize(rows))
            begin += len(weight)
        yield piece


@functools.cache
def compiled() -> list[CpuKernel]:
    """Return the kernels, made at the first call. Those of int8 quantize rows."""
    int8.compiled()
    return kernels("int8_groups", "multiply", "quantize_weights")
