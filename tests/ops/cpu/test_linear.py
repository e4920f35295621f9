"""Packed linear layers: the same product, the same texts, nothing else touched."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dsbd_cli.models.transformers_backend.patching import PackedLinear, pack
from dsbd_cli.ops import memory, reference, select
from dsbd_cli.ops.ahead import HUGE
from dsbd_cli.ops.cpu import linear as packing
from dsbd_cli.ops.processor import bfloat16_tile
from dsbd_cli.ops.select import packed_linear, packing_works
from tests.helpers.kernels import only
from tests.helpers.tiny import build

needs_packing = pytest.mark.skipif(not packing_works(torch.float32), reason="this torch build cannot pack weights")


@pytest.fixture(params=["CompiledLinear", "TorchLinear"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Our kernel alone, or torch's operators alone."""
    with only(monkeypatch, getattr(packing, request.param)):
        yield str(request.param)


def serves(dtype: torch.dtype) -> None:
    if not packing_works(dtype):
        pytest.skip(f"does not serve {dtype} on this processor")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 1), (1, 1), (1, 3), (2, 1), (1, 4), (3, 37)])
def test_equals_the_plain_product(dtype: torch.dtype, bias: bool, shape: tuple[int, int]) -> None:
    serves(dtype)
    torch.manual_seed(3)
    linear = nn.Linear(160, 72, bias=bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(*shape, 160, dtype=dtype)
    plain = linear(x)
    with torch.inference_mode():
        packed = PackedLinear.of(linear)(x)
    assert packed.shape == plain.shape
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(packed, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("bias", [False, True])
def test_a_few_outputs_keep_the_bits_of_a_row(bias: bool) -> None:
    """Guards small layers (gates and steps of recurrent ones), whose plain product changes with the number of rows."""
    serves(torch.float32)
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


def test_groups_of_rows_point_to_the_rows() -> None:
    wide = torch.arange(96 * 40, dtype=torch.int16).view(96, 40)
    weights = [wide[:32, 8:40], wide[32:48, :32], wide[48:80].contiguous()[:, :32]]
    assert packing.readable_in_groups(weights)
    groups, held = packing.row_groups(weights)
    assert len(groups) * packing.SIDES == 2 * packing.COLUMNS
    lines = [
        ctypes.string_at(begin + row * apart, 64) for begin, apart in groups.tolist() for row in range(packing.SIDES)
    ]
    assert b"".join(lines[:80]) == torch.cat(weights).numpy().tobytes()
    assert set(lines[80:]) == {bytes(64)}
    assert all(stored.data_ptr() == weight.data_ptr() for stored, weight in zip(held, weights, strict=False))


def test_rows_that_fill_no_group_are_packed() -> None:
    even, odd = torch.zeros(32, 64, dtype=torch.bfloat16), torch.zeros(30, 64, dtype=torch.bfloat16)
    assert packing.readable_in_groups([even, even])
    assert not packing.readable_in_groups([odd, even])
    assert not packing.readable_in_groups([even[:, :48]])
    assert not packing.readable_in_groups([torch.zeros(64, 32, dtype=torch.bfloat16).t()])


@pytest.mark.skipif(bfloat16_tile() != "amx", reason="this processor has no matrix units")
@pytest.mark.parametrize(("outputs", "inputs"), [((48,), 32), ((64, 16, 16), 96), ((1296,), 4512)])
def test_matrix_units_read_rows_as_lines(
    outputs: tuple[int, ...], inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in rows and the same weights in lines give the same bits, whatever rows of x and threads there are."""
    serves(torch.bfloat16)
    generator = torch.Generator().manual_seed(8)
    stored = torch.randn(sum(outputs) + 1, inputs + 4, generator=generator).bfloat16()[1:, 4:]  # begins on no line
    weights, bias = [*stored.split(outputs)], torch.randn(sum(outputs), generator=generator).bfloat16()
    x = torch.randn(601, inputs, generator=generator).bfloat16()
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            rows = packing.CompiledLinear(weights)
            assert [weight.data_ptr() for weight in rows.weights[: len(weights)]] == [
                weight.data_ptr() for weight in weights
            ]
            monkeypatch.setattr(packing, "readable_in_groups", lambda weights: False)
            lines = packing.CompiledLinear(weights)
            for threads in (1, 3):
                torch.set_num_threads(threads)
                for count in (*range(1, 66), 100, 512, 513, 601):
                    wanted = lines(x[:count], lines.bias(bias))
                    assert torch.equal(rows(x[:count], rows.bias(bias)), wanted), (threads, count)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_may_be_views(dtype: torch.dtype) -> None:
    serves(dtype)
    linear = PackedLinear.of(nn.Linear(160, 72, dtype=dtype).requires_grad_(False))
    wide = torch.randn(7, 400, generator=torch.Generator().manual_seed(6)).to(dtype)
    with torch.inference_mode():
        for x in (wide[:, 200:360], wide[::2, 3:163], wide.t()[:160].t(), wide[:1, :160].expand(5, 160)):
            assert torch.equal(linear(x), linear(x.contiguous()))


@pytest.mark.parametrize("backend", ["CompiledLinear"], indirect=True)
def test_the_default_dtype_of_torch_is_not_the_kernels(backend: str) -> None:
    """Guards the kernel's room for sums, which half as many bytes would not hold."""
    serves(torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert packing.Parts.of(9, 4, 100).scratch().dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@needs_packing
def test_a_width_that_fills_no_words_takes_torchs_way() -> None:
    if packing.fault(packing.TorchLinear, torch.bfloat16) is not None:
        pytest.skip("torch's way does not serve bfloat16 on this processor, so such a layer stays as it is")
    torch.manual_seed(7)
    linear = nn.Linear(161, 72, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(3, 161, dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear.of(linear)(x), linear(x), rtol=3e-2, atol=3e-2)


@pytest.mark.usefixtures("backend")
def test_another_bias_and_a_copy_leave_the_original_alone() -> None:
    serves(torch.float32)
    linear = nn.Linear(160, 72).requires_grad_(False)
    x, bias = torch.randn(3, 160), torch.randn(72)
    with torch.inference_mode():
        packed = PackedLinear.of(linear)
        before = packed(x)
        torch.testing.assert_close(packed.with_bias(bias)(x), before - linear.bias + bias, rtol=1e-5, atol=1e-5)
        copied: Any = copy.deepcopy(packed) if packed.compiled else packed
        assert torch.equal(copied(x), before)
        assert torch.equal(packed(x), before)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_one_input_become_one_product(dtype: torch.dtype) -> None:
    """With the bits that each would have alone. Guards parts of a product that begin at another output, and a bias that
    only some have."""
    serves(dtype)
    torch.manual_seed(3)
    layers = [
        nn.Linear(160, outputs, bias=biased, dtype=dtype).requires_grad_(False)
        for outputs, biased in ((96, True), (72, False), (64, True))
    ]
    x, other = torch.randn(2, 5, 160).to(dtype), torch.randn(1, 160).to(dtype)
    with torch.inference_mode():
        product = packed_linear([layer.weight for layer in layers], [layer.bias for layer in layers])
        assert product.parts == [96, 72, 64]
        alone = [PackedLinear.of(layer) for layer in layers]
        for inputs in (x, other, x):
            assert torch.equal(product.compute(inputs), torch.cat([layer(inputs) for layer in alone], -1))


@needs_packing
def test_packs_plain_linear_layers_only() -> None:
    class Special(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    class Named(nn.Linear):
        pass

    model = nn.Sequential(
        Named(64, 64), Special(64, 64), nn.Linear(8, 8), nn.Embedding(10, 64), nn.Linear(64, 64).half()
    ).requires_grad_(False)
    hooked = nn.Linear(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    patched = nn.Linear(64, 64)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    model.extend((hooked, patched))
    assert pack(model) == 2
    kinds = [PackedLinear, Special, PackedLinear, nn.Embedding, nn.Linear, nn.Linear, nn.Linear]
    assert [type(layer) for layer in model] == kinds
    assert pack(model) == 0


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_a_layer_of_few_inputs_do_not_depend_on_each_other(dtype: torch.dtype, threads: int) -> None:
    """Guards torch's own products, which small layers had before: of inputs that attention leaves transposed in
    bfloat16, and past the last four rows in float32 with two threads, a row had other bits beside others."""
    if not packing_works(dtype):
        pytest.skip("does not serve on this processor")
    layer = nn.Sequential(nn.Linear(32, 32, bias=False).to(dtype)).requires_grad_(False)
    assert pack(layer) == 1
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows, nodes in ((3, 2), (3, 4), (2, 3), (5, 7)):
            x = torch.randn(rows, 4, nodes, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
            together = layer(x.transpose(1, 2).reshape(rows, nodes, 32))
            for row in range(rows):
                alone = x[row : row + 1].transpose(1, 2).reshape(1, nodes, 32)
                assert torch.equal(layer(alone)[0], together[row])
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["qwen3-next", "granite-hybrid", "gpt-oss window"])  # one, with biases and turned
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_and_their_router_keep_the_bits_of_a_token(name: str, dtype: torch.dtype) -> None:
    """Guards mixtures: the library multiplies all tokens of an expert at once, and a log-probability moved with the
    draft. The sums are those of the library."""
    serves(dtype)
    model = build(name, num_experts_per_tok=2, intermediate_size=64).to(dtype)  # by 32: torch's sigmoid goes by place
    (block, *_) = (module for module in model.modules() if hasattr(module, "experts"))
    hidden = model.config.hidden_size
    x = torch.randn(1, 400, hidden, generator=torch.Generator().manual_seed(3)).to(dtype)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        out = block(tokens)
        return out[0] if isinstance(out, tuple) else out

    with torch.inference_mode():
        plain = run(x)
        before = pack(model)
        assert pack(model) == 0 < before
        packed = run(x)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(packed, plain, rtol=tolerance, atol=tolerance)
        for count, tokens in ((1, 100), (2, 100), (3, 100), (7, 400), (50, 400), (133, 400)):
            parts = [run(part) for part in x[:, :tokens].split(count, 1)]
            assert torch.equal(torch.cat(parts, 1), packed[:, :tokens]), count


@pytest.mark.usefixtures("backend")
def test_tied_embeddings_stay() -> None:
    serves(torch.float32)

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


# Rows that are picked


def picked(table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    rows = select.ops_for(torch.device("cpu"), x.dtype, ("pick",)).pick(table, x.dtype)
    rows.take(ids)
    return rows.compute(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_rows_may_be_picked(dtype: torch.dtype) -> None:
    """Guards memory that is used again by rows of another number."""
    rng = torch.Generator().manual_seed(7)
    table = torch.randn(200, 96, generator=rng).to(dtype)
    rows = select.ops_for(torch.device("cpu"), dtype, ("pick",)).pick(table, dtype)
    for batch, count in ((2, 70), (2, 70), (3, 70), (3, 64), (1, 130)):
        ids, x = torch.randint(200, (batch, count), generator=rng), torch.randn(batch, 4, 96, generator=rng).to(dtype)
        rows.take(ids)
        assert torch.equal(rows.compute(x), picked(table, ids, x))


@pytest.mark.parametrize("kind", ["other dtype", "odd width", "turned"])
def test_tables_that_the_kernel_does_not_take_are_copied(kind: str) -> None:
    rng = torch.Generator().manual_seed(2)
    table = torch.randn(50, 33 if kind == "odd width" else 64, generator=rng)
    dtype = torch.bfloat16 if kind != "turned" else torch.float32
    table = table if kind == "other dtype" else table.to(dtype)
    table = table.t().contiguous().t() if kind == "turned" else table
    ids, x = torch.tensor([[3, 49, 3]]), torch.randn(1, 2, table.shape[1], generator=rng).to(dtype)
    assert isinstance(select.pick(table, dtype), reference.PickedRows)
    wanted = x.float() @ table[ids[0]].float().T
    torch.testing.assert_close(picked(table, ids, x).float(), wanted, rtol=3e-2, atol=0.3)


def test_weights_that_share_a_block_of_memory_do_not_overlap() -> None:
    sizes = [1, 64, 65, 3 << 20, memory.MOST_SHARED, memory.MOST_SHARED + 1, *[memory.MOST_SHARED - 1] * 9]
    parts = [memory.allocate_weights(size) for size in sizes]
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    for number, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        assert len(part) == size
        assert part.data_ptr() % memory.CACHE_LINE == 0
        assert part.eq(number + 1).all()


@pytest.mark.parametrize("size", [0, 5, HUGE, 3 * HUGE + 5])
def test_zeros_are_zeros(size: int) -> None:
    for _ in range(2):  # the second time perhaps in memory that the first one wrote to
        zeros = memory.allocate_zeros(size)
        assert zeros.shape == (size,)
        assert not zeros.any()
        zeros.fill_(1)
