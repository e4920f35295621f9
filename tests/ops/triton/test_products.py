"""The product whose rows do not depend on each other: equal to torch's, and a row has the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.ops.triton import differences
from dsbd_cli.ops.triton.products import KERNELS, ROWS, linear, parts
from tests.ops.triton import DEVICE


@pytest.mark.parametrize("seed", [0, 1])
def test_a_product_is_that_of_tensor_code(seed: int) -> None:
    assert list(differences(KERNELS[0], DEVICE, seed)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("inner", [96, 1104], ids=["one part", "several parts"])
def test_bits_of_a_row_do_not_depend_on_its_company(dtype: torch.dtype, inner: int) -> None:
    """Guards tiles, or parts of a sum, that follow the number of rows, as those of cuBLAS do."""
    generator = torch.Generator().manual_seed(3)
    rows, outer = ROWS + 3, 40
    assert (parts(outer, inner, dtype) > 1) == (inner > 1000)
    x = torch.randn(rows, inner, generator=generator).to(dtype).to(DEVICE)
    weight = torch.randn(outer, inner, generator=generator).to(dtype).to(DEVICE)
    bias = torch.randn(outer, generator=generator).to(dtype).to(DEVICE)
    all_rows = linear(x, weight, bias)
    for count in (1, 2, 7, ROWS, ROWS + 1):
        first = rows - count
        assert torch.equal(linear(x[first:], weight, bias), all_rows[first:])
    other = torch.randn(rows, inner, generator=generator).to(dtype).to(DEVICE) * 100
    other[5] = x[50]
    assert torch.equal(linear(other, weight, bias)[5], all_rows[50])


def test_parts_are_counted_from_the_weight() -> None:
    assert [parts(*shape, torch.bfloat16) for shape in ((4096, 4096), (32_000, 4096), (4096, 11_008), (64, 64))] == [
        4,
        1,
        4,
        1,
    ]
