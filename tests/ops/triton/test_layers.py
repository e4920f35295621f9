"""Kernels between a layer's products: equal to their references, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.ops.reference import Norm
from dsbd_cli.ops.triton import KernelCheck, differences
from dsbd_cli.ops.triton.layers import KERNELS, gated, norm, rotate
from tests.ops.triton import DEVICE


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_kernel_gives_what_its_reference_gives(kernel: KernelCheck, seed: int) -> None:
    assert list(differences(kernel, DEVICE, seed)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    """Guards a reduction whose splits follow the number of rows."""
    x = torch.randn(9, 96, dtype=dtype, device=DEVICE)
    weight = torch.randn(96, dtype=dtype, device=DEVICE)
    many, sums = norm(Norm(weight, 1e-6), x, x.flip(0))
    for row in (0, 4, 8):
        single, alone = norm(Norm(weight, 1e-6), x[row : row + 1], x.flip(0)[row : row + 1])
        assert torch.equal(single, many[row : row + 1])
        assert torch.equal(alone, sums[row : row + 1])
        assert torch.equal(gated(x[row : row + 1], False), gated(x, False)[row : row + 1])


def test_a_rotation_writes_its_own_slots_and_no_other() -> None:
    keys, values = (torch.full((2, 6, 1, 16), 7.0, device=DEVICE) for _ in range(2))
    slots = torch.tensor([1, 4, 9], device=DEVICE)
    both = torch.randn(1, 3, 4 * 16, device=DEVICE)
    angles = torch.randn(1, 3, 16, device=DEVICE)
    rotate(both, angles.cos(), angles.sin(), slots, keys, values)
    for plane in (keys, values):
        written = (plane != 7).flatten(0, 1).any(-1).any(-1)
        assert written.nonzero().flatten().tolist() == slots.tolist()
    assert torch.equal(values.flatten(0, 1)[slots, 0], both[0, :, 48:])
