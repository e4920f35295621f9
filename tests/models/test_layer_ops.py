"""What stands between products, by kernels for the CPU: equal to the twins, the same bits for any rows and threads, and
put to work in whole models."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dsbd_cli.engine.models import layer_ops
from dsbd_cli.engine.models.causal import CausalForestModel
from dsbd_cli.engine.models.fused import fuse, layer_kernels
from dsbd_cli.engine.models.invariance import check
from dsbd_cli.engine.models.packing import pack, packing_works
from dsbd_cli.engine.models.quantize import Int8Linear, int8_missing, quantize
from dsbd_cli.engine.models.selftest import self_test
from dsbd_cli.kernels.twins import gated_twin, norm_twin, rotate_twin
from tests.models.tiny import build

pytestmark = [
    pytest.mark.skipif(not layer_ops.serves(), reason="kernels of numba do not run here"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="models of these tests are on the CPU"),
]
DTYPES = pytest.mark.parametrize("dtype", layer_ops.DTYPES, ids=["float32", "bfloat16"])
# of float32: sums in another order, and exp2 of our own; of bfloat16: a rounding that falls the other way
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2.0**-7, "atol": 2.0**-7}}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def normal(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize("one_more", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_norm(dtype: torch.dtype, one_more: bool, adds: bool) -> None:
    wide = normal(dtype, 3, 5, 112) * 3
    for x in (wide[..., :96], wide[:1, :1, 16:112], wide.transpose(0, 1)[..., :32]):
        more = normal(dtype, *x.shape, seed=1) if adds else None
        weight = normal(dtype, x.shape[-1], seed=2)
        found, wanted = (how(x, more, weight, 1e-5, one_more) for how in (layer_ops.norm, norm_twin))
        torch.testing.assert_close(found[0], wanted[0], **CLOSE[dtype])
        assert torch.equal(found[1], wanted[1])


@DTYPES
@pytest.mark.parametrize("gelu", [False, True])
def test_gated(dtype: torch.dtype, gelu: bool) -> None:
    both = normal(dtype, 2, 3, 200) * 8
    both[0, 0, :4] = torch.tensor([-400.0, 400.0, 0.0, -90.0])
    found = layer_ops.gated(both[..., 8:168], gelu)
    torch.testing.assert_close(found, gated_twin(both[..., 8:168], gelu), **CLOSE[dtype])


@DTYPES
@pytest.mark.parametrize("norms", [None, False, True])
@pytest.mark.parametrize("angles", [1, 3])
def test_rotate(dtype: torch.dtype, norms: bool | None, angles: int) -> None:
    """norms: of heads, times weight or (1 + weight)."""
    rows, nodes, heads, kv_heads, dim = 3, 4, 6, 2, 96
    both = normal(dtype, rows, nodes, (heads + 2 * kv_heads) * dim + 32)[..., :-32]
    turns = torch.randn(angles, nodes, dim, generator=torch.Generator().manual_seed(1))
    slots = torch.randperm(rows * 9, generator=torch.Generator().manual_seed(2))[: rows * nodes]
    more = () if norms is None else (normal(dtype, dim, seed=3), normal(dtype, dim, seed=4), 1e-5, norms)
    planes = []
    cos, sin = turns.cos().to(dtype), turns.sin().to(dtype)
    for how in (layer_ops.rotate, rotate_twin):
        keys, values = normal(dtype, rows, 9, kv_heads, dim, seed=5), normal(dtype, rows, 9, kv_heads, dim, seed=6)
        planes.append((how(both, cos, sin, slots, keys, values, *more), keys, values))
    for found, wanted in zip(*planes, strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE[dtype])
    assert torch.equal(planes[0][2], planes[1][2])


@DTYPES
@pytest.mark.usefixtures("threads")
def test_bits_of_a_row_do_not_depend_on_rows_and_threads(dtype: torch.dtype) -> None:
    """Guards a row whose last numbers, or whose sum, go by its place. Large enough that threads share the work."""
    x, more, weight = normal(dtype, 140, 512), normal(dtype, 140, 512, seed=1), normal(dtype, 512, seed=2)
    both = normal(dtype, 140, 512, seed=3)
    turns = normal(dtype, 1, 140, 64, seed=4)
    slots = torch.arange(140)

    def all_of(rows: slice) -> list[Tensor]:
        keys, values = torch.zeros(1, 140, 2, 64, dtype=dtype), torch.zeros(1, 140, 2, 64, dtype=dtype)
        normed, summed = layer_ops.norm(x[rows], more[rows], weight, 1e-6, False)
        turned = layer_ops.rotate(both[None, rows], turns[:, rows], turns[:, rows], slots[rows], keys, values)
        gated = [layer_ops.gated(both[rows], gelu) for gelu in (False, True)]
        others = torch.zeros_like(keys), torch.zeros_like(values), turns[0, 0], turns[0, 1], 1e-6, True
        normal_heads = layer_ops.rotate(both[None, rows], turns[:, rows], turns[:, rows], slots[rows], *others)
        heads = [one[0].transpose(0, 1) for one in (turned, normal_heads)]
        return [normed, summed, *gated, *heads, keys[0, rows], values[0, rows], others[0][0, rows]]

    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(all_of(slice(0, 140)))
    for many in results[1:]:
        assert all(map(torch.equal, many, results[0]))
    for row in (0, 7, 139):
        for one, many in zip(all_of(slice(row, row + 1)), results[0], strict=True):
            assert torch.equal(one[0], many[row])


@DTYPES
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    """Guards failed rows, which are found by their logits."""
    x = normal(dtype, 3, 64)
    x[1, 5] = float("nan")
    for found in (layer_ops.norm(x, None, x[0], 1e-6, False)[0], layer_ops.gated(x, False), layer_ops.gated(x, True)):
        assert found[1].isnan().any()
        assert not found[[0, 2]].isnan().any()


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
LAYERS = 2
# what is found in two layers whose widths the kernels take; qwen3 and gemma3 have norms of heads
FOUND = {
    "llama": {"norm": 2 * LAYERS + 1, "gated": LAYERS, "rotate": LAYERS, "layer": LAYERS, "recorded": LAYERS},
    "qwen2": {"norm": 2 * LAYERS + 1, "gated": LAYERS, "rotate": LAYERS, "layer": LAYERS, "recorded": LAYERS},
    "qwen3": {"norm": 4 * LAYERS + 1, "gated": LAYERS, "rotate": LAYERS, "layer": LAYERS, "recorded": LAYERS},
    "gemma3 window": {"norm": 6 * LAYERS + 1, "gated": LAYERS, "rotate": LAYERS, "recorded": LAYERS},
    "gpt2": {},
}


def widened(family: str) -> Any:
    if family == "gpt2":
        return build(family)
    return build(family, **WIDE, **({"head_dim": 32} if family in ("qwen3", "gemma3 window") else {}))


@DTYPES
@pytest.mark.parametrize("family", FOUND)
def test_models_whose_layers_run_as_kernels(family: str, dtype: torch.dtype) -> None:
    """The same logits, the self-test passes, and the bits of a node do not depend on what is beside it."""
    if not packing_works(dtype):
        pytest.skip("this machine packs no products")
    stock, model = widened(family).to(dtype), widened(family).to(dtype)
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    fused = fuse(model, layer_kernels(torch.device("cpu")), lambda joined: pack(model, joined))
    assert fused.counts == FOUND[family]
    assert fused.packed >= 7 * LAYERS or family == "gpt2"
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        ours, theirs = model(input_ids=tokens).logits.float(), stock(input_ids=tokens).logits.float()
    assert (ours - theirs).square().mean().sqrt() <= limit * theirs.std()
    forest = CausalForestModel(model, family)
    self_test(forest)
    assert check(forest).varies is None
    forest.release()
    if FOUND[family]:
        layer = model.model.layers[0]
        assert layer.mlp.gate_proj.product is layer.mlp.up_proj.product
        assert layer.self_attn.q_proj.product is layer.self_attn.v_proj.product
    fused.undo()
    with torch.inference_mode():
        undone = model(input_ids=tokens).logits.float()
    assert (undone - theirs).square().mean().sqrt() <= limit * theirs.std()


def test_weights_are_freed_as_they_are_packed() -> None:
    """Guards a second copy of the weights at load: of what has been asked on the way, nothing is held."""
    model = widened("llama")
    held = [weakref.ref(one.weight) for one in (model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj)]

    def packed(joined: Any) -> int:
        model(input_ids=torch.arange(8)[None])
        count = pack(model, joined)
        assert [one() for one in held] == [None, None]
        return count

    if packing_works(torch.float32):
        assert fuse(model, layer_kernels(torch.device("cpu")), packed).packed


def test_attention_that_rotates_a_part_of_a_head_is_left_alone() -> None:
    """Guards Nemotron and Bamba, which rotate as much of a head as there are angles: kernels rotate all of it."""
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 97}
    config = transformers.NemotronConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(0)
    model = transformers.NemotronForCausalLM(config).eval().requires_grad_(False)
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    assert "rotate" not in fuse(model, layer_kernels(torch.device("cpu"))).counts
    self_test(CausalForestModel(model, "nemotron"))


@DTYPES
def test_attention_with_angles_of_another_dtype_is_left_alone(dtype: torch.dtype) -> None:
    """Guards OLMo, whose angles are float32 in every dtype: one kernel that cannot run would undo all others."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 97}
    torch.manual_seed(0)
    config = transformers.OlmoConfig(**sizes, num_attention_heads=2)
    model = transformers.OlmoForCausalLM(config).eval().requires_grad_(False).to(dtype)
    fused = fuse(model, layer_kernels(torch.device("cpu")), lambda joined: pack(model, joined))
    assert fused.counts.get("rotate", 0) == (dtype == torch.float32)
    assert fused.counts["gated"] == 1
    self_test(CausalForestModel(model, "olmo"))


def test_a_forward_that_a_layer_was_given_stays() -> None:
    """Guards a patched layer that loses its patch while modules are asked, or is packed without it."""
    model = widened("llama")
    linear = model.model.layers[0].mlp.gate_proj
    own, tokens = linear.forward, torch.arange(12)[None]
    linear.forward = lambda x: own(x) * 2
    with torch.inference_mode():
        wanted = model(input_ids=tokens).logits
        fuse(model, layer_kernels(torch.device("cpu")), lambda joined: pack(model, joined))
        torch.testing.assert_close(model(input_ids=tokens).logits, wanted, rtol=1e-4, atol=1e-5)
    assert model.model.layers[0].mlp.gate_proj is linear


def test_kernels_of_the_cpu_need_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards machines without a GPU, where torch brings none: an import that fails would undo everything."""
    for name in [name for name in sys.modules if name.startswith("triton") or name.startswith("dsbd_cli.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    model = widened("llama")
    fused = fuse(model, layer_kernels(torch.device("cpu")), lambda joined: pack(model, joined))
    assert fused.counts == FOUND["llama"]


def test_widths_that_the_kernels_do_not_take_stay() -> None:
    """Heads of 8 numbers, and gates of 50."""
    model = build("llama", intermediate_size=50)
    fused = fuse(model, layer_kernels(torch.device("cpu")))
    assert fused.counts == {"norm": 2 * LAYERS + 1, "layer": LAYERS}


@pytest.mark.parametrize("broken", ["norm", "gated", "rotate"])
def test_a_wrong_kernel_is_undone(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check with stand-ins for products: what a kernel gives must still be seen in the logits."""
    right = getattr(layer_ops, broken)

    def wrong(*arguments: Any) -> Any:
        result = right(*arguments)
        return (result[0] * 1.5, result[1]) if isinstance(result, tuple) else result * 1.5

    monkeypatch.setattr(layer_ops, broken, wrong)
    model = widened("llama")
    fused = fuse(model, layer_kernels(torch.device("cpu")), lambda joined: pack(model, joined))
    if broken == "rotate":  # runs over a packed forest only: the check at load finds it
        from dsbd_cli.errors import UnsupportedModelError

        with pytest.raises(UnsupportedModelError):
            self_test(CausalForestModel(model, "llama"))
    else:
        assert (fused.counts, fused.undone) == ({}, True)


@pytest.mark.skipif(int8_missing() is not None, reason="int8 products do not run here")
def test_int8_products_of_one_input_keep_their_order() -> None:
    """Fused layers ask for whole products, and plain ones for each layer. Guards parts in another order, which no check
    at load would see: they are made after it."""
    model = widened("qwen2")
    fused = fuse(model, layer_kernels(torch.device("cpu")), lambda joined: 0)
    tokens = torch.arange(24)[None]
    quantize(model, lambda: model(input_ids=tokens), least=1)
    pack(model, fused.joined)
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, Int8Linear)
    assert layer.self_attn.q_proj.product is layer.self_attn.v_proj.product
    with torch.inference_mode():
        ours = model(input_ids=tokens).logits
        with fused.away():
            plain = model(input_ids=tokens).logits
    assert (ours - plain).square().mean().sqrt() <= 1e-3 * plain.std()
    self_test(CausalForestModel(model, "int8"))
