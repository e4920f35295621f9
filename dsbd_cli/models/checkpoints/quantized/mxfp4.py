"""Experts of gpt-oss in MXFP4, as its safetensors hold them.

`X_blocks` [E, o, g, 16] uint8 holds 32 inputs of a group in 16 bytes: input 2 j in the lower half of byte j, input
2 j + 1 in the upper half. A half is a number of E2M1. `X_scales` [E, o, g] uint8 holds powers of two, plus 127.

Letters: E experts, o outputs, i inputs, g groups of inputs, r rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from dsbd_cli.errors import ModelError
from dsbd_cli.models.checkpoints.quantized.groupwise import WeightTensors, words_of
from dsbd_cli.ops.quantized_weight import E2M1, GROUP, LARGEST_E8M0, FourBit, QuantizedWeight

BLOCKS, SCALES = "_blocks", "_scales"
ZERO = 12  # of E2M1


def mxfp4_tensors(tensors: Mapping[str, Callable[[], Tensor]], name: str) -> WeightTensors:
    """Return the tensors of a checkpoint with X, an Mxfp4Weight, in the place of X_blocks and X_scales.

    name: of the checkpoint, for messages. Raises ModelError where one of both is missing, and where nothing is in
    MXFP4. The functions of the weights raise it where the parts do not fit each other.
    """
    made: dict[str, Callable[[], Tensor | QuantizedWeight]] = {}
    weights = [tensor.removesuffix(BLOCKS) for tensor in tensors if tensor.endswith(BLOCKS)]
    if not weights:
        raise ModelError(f"{name}: config.json says that its weights are mxfp4, but no tensor ends in {BLOCKS}")
    for tensor, read in tensors.items():
        if not tensor.endswith((BLOCKS, SCALES)):
            made[tensor] = read
    for weight in weights:
        if f"{weight}{SCALES}" not in tensors:
            raise ModelError(f"{name}: {weight}{SCALES} is missing beside {weight}{BLOCKS}: get the files again")
        made[weight] = partial(_weight, f"{name}: {weight}", tensors[f"{weight}{BLOCKS}"], tensors[f"{weight}{SCALES}"])
    return made


def _weight(name: str, read_blocks: Callable[[], Tensor], read_scales: Callable[[], Tensor]) -> Mxfp4Weight:
    blocks, scales = read_blocks(), read_scales()
    for part, tensor in ((BLOCKS, blocks), (SCALES, scales)):
        if tensor.dtype != torch.uint8:
            said = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{name}{part} is {said}, but must be uint8: get the files again")
    if blocks.ndim != 4 or blocks.shape[3] != GROUP // 2 or scales.shape != blocks.shape[:3]:
        shapes = (" x ".join(map(str, tensor.shape)) for tensor in (blocks, scales))
        raise ModelError(
            f"{name}{BLOCKS} and {SCALES} are {' and '.join(shapes)}, which do not fit: get the files again"
        )
    return Mxfp4Weight(name, blocks.flatten(0, 1), scales.flatten(0, 1), len(blocks))


class Mxfp4Weight(QuantizedWeight):
    """Weights of all experts, one below the other: [E o, i], or some of their rows. They stay in the mapped file."""

    def __init__(self, name: str, blocks: Tensor, scales: Tensor, experts: int, rows: Tensor | None = None) -> None:
        """blocks: [E o, g, 16] uint8. scales: [E o, g] uint8. rows: indices [r] int64 of those that the weight has;
        None: all."""
        super().__init__(name, (len(blocks) if rows is None else len(rows), blocks.shape[1] * GROUP))
        self._blocks, self._scales, self._rows, self.experts = blocks, scales, rows, experts

    def check(self) -> None:
        if (largest := int(self._scales.max())) > LARGEST_E8M0:
            said = "NaN" if largest == 255 else f"2 to the {largest - 127}, which is too large"
            raise ModelError(f"{self.name}{SCALES} holds {said}: get the files again")

    def dequantize(self, rows: Tensor | slice = slice(None)) -> Tensor:
        levels, halves = self._parts(rows)
        numbers = torch.tensor(E2M1, dtype=torch.float32).sub_(ZERO)[levels.long()]
        return (numbers.view(*halves.shape, GROUP) * halves.unsqueeze(-1)).flatten(1)

    def fourbit(self) -> FourBit:
        levels, halves = self._parts(slice(None))
        return FourBit(words_of(levels), halves, halves * -ZERO, torch.tensor(E2M1, dtype=torch.uint8))

    def take(self, rows: Tensor) -> Mxfp4Weight:
        own = rows if self._rows is None else self._rows[rows]
        return Mxfp4Weight(self.name, self._blocks, self._scales, self.experts, own)

    def stacked(self) -> Tensor:
        """Return the weights as transformers has them, [E, i, o] float32."""
        return self.dequantize().unflatten(0, (self.experts, -1)).transpose(1, 2).contiguous()

    def _parts(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return levels [r, i] uint8, and half of the scales [r, g] float32: numbers of E2M1 are stored twice as
        large."""
        own = rows if self._rows is None else self._rows[rows]
        blocks, powers = self._blocks[own], self._scales[own].int() - 127
        return torch.stack((blocks & 15, blocks >> 4), -1).flatten(1), torch.ldexp(
            torch.full(powers.shape, 0.5), powers
        )
