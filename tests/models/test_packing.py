"""Packed linear layers: the same product, the same texts, nothing else touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsbd_cli.engine.models.packing import PackedLinear, pack, packing_works

needs_packing = pytest.mark.skipif(not packing_works(torch.float32), reason="this torch build cannot pack weights")


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (1, 4), (3, 37)])
def test_equals_the_plain_product(dtype: torch.dtype, bias: bool, shape: tuple[int, int]) -> None:
    if not packing_works(dtype):
        pytest.skip("no fast bfloat16 on this processor")
    torch.manual_seed(3)
    linear = nn.Linear(160, 72, bias=bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(*shape, 160, dtype=dtype)
    plain = linear(x)
    with torch.inference_mode():
        packed = PackedLinear(linear)(x)
    assert packed.shape == plain.shape
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(packed, plain, rtol=tolerance, atol=tolerance)


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
def test_a_few_outputs_keep_the_bits_of_a_row(bias: bool) -> None:
    """Guards small layers (gates and steps of recurrent ones), whose plain product changes with the number of rows."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(256, 8, bias=bias)).requires_grad_(False)
    x = torch.randn(1, 40, 256)
    plain = model(x)
    assert pack(model) == 1
    with torch.inference_mode():
        packed = model(x)
        torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-5)
        for count in (1, 3, 4, 5, 17, 33):
            assert torch.equal(model(x[:, :count]), packed[:, :count])


@needs_packing
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(4)
    linear = PackedLinear(nn.Linear(128, 96, bias=False).requires_grad_(False))
    x = torch.randn(1, 9, 128)
    with torch.inference_mode():
        alone = torch.cat([linear(x[:, i : i + 1]) for i in range(9)], 1)
        torch.testing.assert_close(linear(x), alone, rtol=1e-5, atol=1e-5)


@needs_packing
def test_packs_plain_linear_layers_only() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(64, 64), Special(64, 64), nn.Linear(8, 8), nn.Embedding(10, 64), nn.Linear(64, 64).half()
    ).requires_grad_(False)
    hooked = nn.Linear(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    model.append(hooked)
    assert pack(model) == 1
    assert [type(layer) for layer in model] == [PackedLinear, Special, nn.Linear, nn.Embedding, nn.Linear, nn.Linear]
    assert pack(model) == 0


@needs_packing
def test_tied_embeddings_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(96, 64)
            self.head = nn.Linear(64, 96, bias=False)
            self.head.weight = self.embed.weight

    model = Tied().requires_grad_(False)
    before = model.embed.weight.clone()
    assert pack(model) == 1
    x = torch.randn(1, 4, 64)
    with torch.inference_mode():
        torch.testing.assert_close(model.head(x), x @ before.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.embed.weight, before)


def test_no_packing_for_dtypes_that_gain_nothing() -> None:
    assert not packing_works(torch.float16)
    assert not packing_works(torch.float64)


@needs_packing
def test_layers_of_quantised_checkpoints_stay() -> None:
    """Guards torchao's weights, which are tensors of another kind, and layers whose forward a library replaced."""

    class Quantised(torch.Tensor):
        pass

    kind, patched = nn.Linear(64, 64), nn.Linear(64, 64)
    kind.weight = nn.Parameter(kind.weight.detach().as_subclass(Quantised), requires_grad=False)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert pack(nn.Sequential(kind, patched).requires_grad_(False)) == 0
