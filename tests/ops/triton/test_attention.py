"""Attention split over a prompt: equal to its reference, and a node has the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.ops.triton import differences
from dsbd_cli.ops.triton.attention import KERNELS, attention
from tests.ops.triton import DEVICE


@pytest.mark.parametrize("seed", [0, 1])
def test_attention_is_that_of_tensor_code(seed: int) -> None:
    assert list(differences(KERNELS[0], DEVICE, seed)) == []


@pytest.mark.parametrize("prompt", [530, 40])
def test_bits_of_a_node_do_not_depend_on_its_company(prompt: int) -> None:
    """The node's ancestors stand elsewhere, beside other nodes, behind another row. Guards a part of a sum that goes by
    the number of nodes or slots, and float32 in the suffix."""
    generator = torch.Generator().manual_seed(8)
    suffix, dim, heads = 9, 32, 2
    query = torch.randn(1, 2 * heads, 1, dim, generator=generator)
    keys, values = torch.randn(2, 1, heads, prompt + suffix, dim, generator=generator)
    alone = ask(query, keys, values, torch.ones(1, 1, prompt + suffix, dtype=torch.bool), [prompt])
    more, slots = 21, prompt + 70
    positions = torch.randperm(slots - prompt, generator=generator)[:suffix].sort().values + prompt
    many = torch.randn(2, 2 * heads, more, dim, generator=generator)
    many[1, :, 17] = query[0, :, 0]
    wide = torch.randn(2, 2, heads, slots, dim, generator=generator)
    for plane, own in zip(wide, (keys, values), strict=True):
        plane[1, :, :prompt] = own[0, :, :prompt]
        plane[1][:, positions] = own[0, :, prompt:]
    seen = torch.rand(2, more, slots, generator=generator) < 0.3
    seen[1, 17] = False
    seen[1, 17, positions] = True
    seen[..., prompt] |= ~seen.any(-1)
    output = ask(many, *wide, seen, [7, prompt])
    assert torch.equal(output[1, :, 17], alone[0, :, 0])


def ask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, prompt: list[int]
) -> torch.Tensor:
    arguments = (tensor.to(DEVICE) for tensor in (query, key, value, seen, torch.tensor(prompt)))
    return attention(*arguments, query.shape[-1] ** -0.5, True)
