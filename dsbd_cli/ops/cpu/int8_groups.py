"""Weights of quantised files with more than four bits: bytes, with a scale for each group of inputs.

A file's levels of five to eight bits have scales for groups of 16 or 32 inputs. With one scale for each output, as in
int8.py, their error would be several times as large. The products are those of int4.py, with bytes for weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.ops.cpu import int8
from dsbd_cli.ops.cpu.int4 import LAYOUT, CompiledInt4
from dsbd_cli.ops.cpu.linear import COLUMNS
from dsbd_cli.ops.cpu.runtime import CpuKernel, kernels
from dsbd_cli.ops.quantized_weight import GROUP

GROUP_BYTES = COLUMNS * GROUP + 2 * COLUMNS * 2  # bytes, scales and offsets in float16
ZERO = 128  # the byte that stands for 0

__all__ = ["GROUP_BYTES", "LAYOUT", "ZERO", "CompiledInt8Groups", "compiled"]


class CompiledInt8Groups(CompiledInt4):
    """Weights and products by kernels/int8_groups.py. weights: [blocks, g, GROUP_BYTES] uint8. The offset of a group is
    -ZERO times its scale."""

    group_bytes = GROUP_BYTES

    def _quantize(self, weights: Sequence[Any]) -> Tensor:
        return self._quantize_all(weights, torch.empty(-(-self._outputs // COLUMNS) * COLUMNS, dtype=torch.int32))

    def _quantizer(self) -> CpuKernel:
        return compiled()[1]

    @staticmethod
    def _spare_bytes(inputs: int) -> int:
        return COLUMNS * inputs + inputs // GROUP * 2 * COLUMNS * 4

    def _kernel(self) -> CpuKernel:
        return compiled()[0]


@functools.cache
def compiled() -> list[CpuKernel]:
    """Return the kernels, made at the first call. Those of int8 quantize rows."""
    int8.compiled()
    return kernels("int8_groups", "multiply", "quantize_weights")
