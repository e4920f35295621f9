"""Weights of quantised files: products that read their levels as they are, and rows that are dequantised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.ops import quantized_weight
from dsbd_cli.ops.cpu.int4 import CompiledInt4
from dsbd_cli.ops.cpu.int8_groups import CompiledInt8Groups
from dsbd_cli.ops.quantized_weight import GROUP, FourBit, QuantizedWeight
from dsbd_cli.ops.select import quantize_missing, stored_linear
from tests.helpers.kernels import int4_parts, packed_words

needs_int4 = pytest.mark.skipif(quantize_missing("int4") is not None, reason=f"{quantize_missing('int4')}")
TABLE = torch.tensor([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], dtype=torch.uint8)


class Stored(QuantizedWeight):
    """Random levels with scales and offsets, and what they stand for."""

    def __init__(self, outputs: int, inputs: int, *, seed: int, table: Tensor | None = None, order: bool = False,
                 four: bool = True) -> None:  # fmt: skip
        super().__init__(f"random {seed}", (outputs, inputs))
        rng = torch.Generator().manual_seed(seed)
        self.levels = torch.randint(0, 16, (outputs, inputs), generator=rng)
        self.scales, self.offsets = (torch.randn(outputs, inputs // GROUP, generator=rng) / 50 for _ in range(2))
        self.table, self.four = table, four
        self.order = torch.randperm(inputs, generator=torch.Generator().manual_seed(7)) if order else None

    def dequantize(self, rows: Tensor | slice = slice(None)) -> Tensor:
        numbers = self.levels.float() if self.table is None else self.table.float()[self.levels]
        scales, offsets = (factor.repeat_interleave(GROUP, 1) for factor in (self.scales, self.offsets))
        columns = (scales * numbers + offsets)[rows]
        if self.order is None:
            return columns
        result = torch.empty_like(columns)
        result[:, self.order] = columns
        return result

    def fourbit(self) -> FourBit | None:
        form = FourBit(packed_words(self.levels), self.scales, self.offsets, self.table, self.order)
        return form if self.four else None


def product(weights: Sequence[QuantizedWeight], outliers: Tensor, dtype: torch.dtype) -> Any:
    biases = [None, *(torch.randn(len(weight), generator=torch.Generator().manual_seed(3)) for weight in weights[1:])]
    return stored_linear(weights, biases, outliers, dtype), torch.cat(
        [torch.zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    )


def test_columns_are_those_of_the_dequantised_weight() -> None:
    for table in (None, TABLE):
        weight = Stored(70, 96, seed=1, table=table)
        form = weight.fourbit()
        assert form is not None
        channels = torch.tensor([0, 3, 4, 31, 32, 71, 95])
        torch.testing.assert_close(form.columns(channels), weight.dequantize()[:, channels])


def test_rows_taken_from_a_weight_are_its_rows() -> None:
    weight = Stored(70, 96, seed=1)
    rows = torch.tensor([69, 3, 3, 0])
    few = weight.take(rows)
    assert (few.shape, len(few), few.numel()) == (torch.Size((4, 96)), 4, 384)
    assert torch.equal(few.dequantize(), weight.dequantize()[rows])
    assert torch.equal(few.rows(torch.tensor([[1], [2]])), weight.dequantize()[torch.tensor([[3], [3]])])
    form = few.fourbit()
    assert form is not None
    torch.testing.assert_close(form.columns(torch.arange(96)), few.dequantize())
    first, second = weight.split([30, 40])
    assert torch.equal(torch.cat((first.dequantize(), second.dequantize())), weight.dequantize())


def test_a_weight_is_dequantised_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = Stored(70, 96, seed=1)
    monkeypatch.setattr(quantized_weight, "AT_ONCE", 96 * 16)
    assert torch.equal(weight.plain(torch.float32), weight.dequantize())
    assert torch.equal(weight.to(dtype=torch.bfloat16), weight.dequantize().bfloat16())
    assert weight.to() is weight


@needs_int4
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [False, True])
def test_levels_are_multiplied_as_they_are(dtype: torch.dtype, order: bool) -> None:
    """The levels of the file, scales rounded to 11 bits, inputs in the order of the groups; outliers apart."""
    weights = [Stored(72, 320, seed=1, order=order), Stored(40, 320, seed=2, order=order)]
    outliers = torch.tensor([5, 33, 64, 319])
    linear, bias = product(weights, outliers, dtype)
    assert type(linear.backend) is CompiledInt4
    levels, scales, offsets = int4_parts(linear.backend)
    assert torch.equal(levels[:112].long(), torch.cat([weight.levels for weight in weights]))
    for ours, name in ((scales, "scales"), (offsets, "offsets")):
        theirs = torch.cat([getattr(weight, name) for weight in weights])
        rounded = ours[:112].float() * linear.backend.scales[:112, None]
        torch.testing.assert_close(rounded, theirs, rtol=2**-11, atol=1e-6)
    x = torch.randn(6, 320, generator=torch.Generator().manual_seed(4)).to(dtype)
    x[:, outliers] *= 50
    plain = torch.cat([weight.dequantize() for weight in weights]).double()
    ordinary = x.double().clone()
    ordinary[:, outliers] = 0
    if order:
        ordinary, plain = ordinary[:, weights[0].order], plain[:, weights[0].order]
    groups = ordinary.unflatten(1, (-1, GROUP))
    steps = groups.abs().amax(2, keepdim=True) / 127
    integers = torch.floor(groups / steps + 128.5) - 128
    plain_outliers = torch.cat([weight.dequantize() for weight in weights]).double()[:, outliers]
    wanted = (integers * steps).flatten(1) @ plain.t() + x.double()[:, outliers] @ plain_outliers.t() + bias
    ours, spread = linear.compute(x.unsqueeze(0)).squeeze(0).double(), wanted.std()
    assert (ours - wanted).abs().max() / spread < (2e-3 if dtype == torch.float32 else 3e-2)
    alone = torch.cat([linear.compute(row) for row in x.split(1)])
    assert torch.equal(alone, linear.compute(x))


@needs_int4
def test_layers_that_are_not_alike_become_bytes() -> None:
    """One of more bits, or two orders of inputs, in one product."""
    for weights in (
        [Stored(72, 320, seed=1), Stored(40, 320, seed=2, four=False)],
        [Stored(72, 320, seed=1), Stored(40, 320, seed=2, order=True)],
    ):
        linear, bias = product(weights, torch.tensor([5]), torch.float32)
        assert isinstance(linear.backend, CompiledInt8Groups)
        x = torch.randn(5, 320, generator=torch.Generator().manual_seed(4))
        wanted = x @ torch.cat([weight.dequantize() for weight in weights]).t() + bias
        assert (linear.compute(x) - wanted).norm() / wanted.norm() < 0.01


@needs_int4
def test_scales_of_a_row_may_differ_by_a_thousand() -> None:
    """A factor of each output keeps small scales within float16."""
    weight = Stored(64, 320, seed=1)
    weight.scales[:, 0] *= 1000
    weight.offsets *= 1e-6
    linear, _ = product([weight], torch.tensor([319]), torch.float32)
    _, scales, _ = int4_parts(linear.backend)
    least = float(weight.scales.abs().max()) / 2**24  # float16 knows no less
    torch.testing.assert_close(scales.float() * linear.backend.scales[:, None], weight.scales, rtol=1e-3, atol=least)
    assert not math.isnan(float(linear.compute(torch.ones(1, 320)).sum()))
