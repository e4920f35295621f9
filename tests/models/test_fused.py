"""Fused layers: found by what modules compute, with the logits and the cache of stock ones; unknown modules stay."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from torch.utils._python_dispatch import TorchDispatchMode

from dsbd_cli.engine.core.protocols import ForestInput
from dsbd_cli.engine.models import adapter, pair
from dsbd_cli.engine.models.causal import CausalForestModel
from dsbd_cli.engine.models.fused import LayerKernels, _as_norm, fuse, layer_kernels
from dsbd_cli.engine.models.invariance import Company, _logits
from dsbd_cli.engine.models.selftest import self_test
from dsbd_cli.kernels import attention as kernels_attention
from dsbd_cli.kernels.attention import attention
from dsbd_cli.kernels.twins import gated_twin, norm_twin, rotate_twin
from tests.kernels.interpreter import own_products
from tests.models.tiny import build

__all__ = ["own_products"]

GPU = torch.device("cuda")
TWINS = LayerKernels(norm_twin, gated_twin, rotate_twin)
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="these models are on the CPU, where no kernel runs then")
LAYERS = 2
# what is found in a model of two layers, by family; the last norm is one more
FOUND = {
    "llama": {"norm": 2 * LAYERS + 1, "gated": LAYERS, "rotate": LAYERS, "layer": LAYERS},
    "mistral window": {"norm": 2 * LAYERS + 1, "gated": LAYERS, "rotate": LAYERS, "layer": LAYERS},
    "gemma2 window": {"norm": 4 * LAYERS + 1, "gated": LAYERS, "rotate": LAYERS},  # four norms per layer
    "gpt2": {},
    "opt": {},
}


@pytest.mark.parametrize("family", FOUND)
def test_what_is_found_and_that_the_logits_stay(family: str) -> None:
    stock, model = (CausalForestModel(build(family), family) for _ in range(2))
    fused = fuse(model.module, TWINS)
    found = dict(fused.counts)
    expected = FOUND[family]
    assert {name: count for name, count in found.items() if name in expected} == expected
    assert set(found) <= {"norm", "gated", "rotate", "layer"}
    assert bool(found) == bool(expected)
    self_test(model)
    for company in (Company(), Company(rows=2, row=1, others=3, at_once=2)):
        ours, theirs = _logits(model, company), _logits(stock, company)
        assert (ours - theirs).square().mean().sqrt() <= 1e-5 * theirs.std()
    fused.undo()
    assert changed(model) == changed(stock)


def changed(model: CausalForestModel) -> list[str]:
    """Names of the modules whose forward is not that of their class."""
    return [name for name, module in model.module.named_modules() if "forward" in vars(module)]


def chain() -> ForestInput:
    """Five tokens in a row, in scattered slots of one request."""
    slots = torch.tensor([[3, 60, 7, 0, 31]])
    mask = torch.zeros(1, 5, 64, dtype=torch.bool)
    for node in range(5):
        mask[0, node, slots[0, : node + 1]] = True
    positions = torch.zeros(1, 64, dtype=torch.int64)
    positions[0, slots[0]] = torch.arange(5)
    return ForestInput(torch.arange(5)[None] + 3, torch.arange(5)[None], slots, mask, positions)


@ON_CPU
def test_kernels_themselves_give_a_models_logits() -> None:
    logits = []
    for fused in (False, True):
        model = CausalForestModel(build("llama"), "llama")
        if fused:
            assert fuse(model.module, layer_kernels(GPU, {"linear"})).counts == FOUND["llama"]
        model.reserve(1, 64)
        logits.append(model.forward(chain()))
    theirs, ours = logits
    assert theirs is not None
    assert ours is not None
    assert (ours - theirs).square().mean().sqrt() <= 1e-5 * theirs.std()


@pytest.mark.parametrize("broken", ["norm", "gated", "rotate"])
def test_a_wrong_kernel_changes_nothing_in_the_end(broken: str) -> None:
    """Guards a model that is left with a kernel whose results are not those of its modules."""

    def wrong(*arguments: Any) -> Any:
        result = getattr(TWINS, broken)(*arguments)
        return (result[0] * 1.5, result[1]) if isinstance(result, tuple) else result * 1.5

    model = build("llama")
    tokens = torch.arange(12)[None]
    before = model(input_ids=tokens).logits
    kernels = LayerKernels(**{name: wrong if name == broken else getattr(TWINS, name) for name in TWINS.__slots__})
    forest = CausalForestModel(model, "llama")
    fused = fuse(model, kernels)
    if broken == "rotate":  # runs over a packed forest only: the check at load finds it
        from dsbd_cli.errors import UnsupportedModelError

        with pytest.raises(UnsupportedModelError):
            self_test(forest)
        fused.undo()
        self_test(forest)
    else:
        assert fused.counts == {}
    assert torch.allclose(model(input_ids=tokens).logits, before, rtol=1e-4, atol=1e-5)


def test_a_norm_that_subtracts_the_mean_is_another() -> None:
    """Guards Cohere in bfloat16: its norms subtract a mean that is within rounding of zero on noise."""
    assert _as_norm(torch.nn.LayerNorm(4096, bias=False, dtype=torch.bfloat16)) is None
    assert _as_norm(torch.nn.RMSNorm(4096, eps=1e-5, dtype=torch.bfloat16)) is not None


def test_a_kernel_that_cannot_run_changes_nothing() -> None:
    """Guards a load that ends with an error of triton's, at a width that was not tried."""

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("out of resource: shared memory")

    model = build("llama")
    fused = fuse(model, LayerKernels(fails, gated_twin, rotate_twin))
    assert (fused.counts, fused.undone) == ({}, True)
    model(input_ids=torch.arange(12)[None])


@pytest.mark.parametrize("fault", ["fails", "wrong"])
def test_products_at_fault_leave_the_other_kernels(fault: str) -> None:
    """Guards norms and rotations that are given up for a product that cannot run."""

    def linear(x: Any, weight: Any, bias: Any) -> Any:
        if fault == "fails":
            raise RuntimeError("out of resource: shared memory")
        return torch.nn.functional.linear(x, weight, bias) * 1.5

    model, stock = build("llama"), build("llama")
    fused = fuse(model, replace(TWINS, linear=linear))
    assert (fused.counts, fused.undone) == (FOUND["llama"], False)
    tokens = torch.arange(12)[None]
    assert torch.allclose(model(input_ids=tokens).logits, stock(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)


@ON_CPU
def test_logits_of_a_node_have_the_same_bits_in_any_company() -> None:
    """Products and attention by kernels. Guards one of them that goes by the number of rows, slots or nodes; the other
    kernels of a layer have one program per row (tests/kernels/test_layers.py)."""
    model = CausalForestModel(build("llama", num_hidden_layers=1), "llama")
    counts = fuse(model.module, layer_kernels(GPU, {"norm", "gated", "rotate"})).counts
    assert counts["linear"] == 8  # seven of the layer and the head
    model.attention = partial(attention, exact=True)
    alone = _logits(model, Company(others=0))
    assert model.by_parts
    beside = Company(rows=2, row=1, others=5, ahead=2, spread=2, at_once=2)
    assert torch.equal(_logits(model, beside), alone)
    model.release()


@ON_CPU
@pytest.mark.parametrize("family", ["llama", "mistral window"])
def test_a_long_prompt_goes_through_the_kernel_without_bits_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trunk of 40 slots, a tail of 24. Guards a kernel that serves a window, whose slots not all nodes see."""
    monkeypatch.setattr(adapter, "LONG", 64)
    calls: list[Any] = []

    def noted(*arguments: Any, exact: bool) -> torch.Tensor:
        calls.append(arguments[4])
        return attention(*arguments, exact)

    model = CausalForestModel(build(family, num_hidden_layers=1), family)
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(3, 60, (1, 46), generator=generator)
    slots = torch.cat((torch.arange(40), 40 + torch.randperm(24, generator=generator)[:6].sort().values))[None]
    slot_positions = torch.zeros(1, 64, dtype=torch.int64).scatter_(1, slots, torch.arange(46)[None])
    logits = []
    for kernel in (None, partial(noted, exact=False)):
        model.attention = kernel
        model.reserve(1, 64)
        for first, last, prompt in ((0, 40, None), (40, 46, torch.tensor([40]))):
            seen = torch.zeros(1, last - first, 64, dtype=torch.bool)
            for node in range(first, last):
                seen[0, node - first, slots[0, : node + 1]] = True
            part = (item[:, first:last] for item in (text, torch.arange(46)[None], slots))
            found = model.forward(ForestInput(*part, seen, slot_positions, prompt=prompt))
        logits.append(found)
        model.release()
    theirs, ours = logits
    assert theirs is not None
    assert ours is not None
    assert (ours - theirs).square().mean().sqrt() <= 1e-5 * theirs.std()
    assert [prompt.tolist() for prompt in calls] == ([[40]] if family == "llama" else [])


@ON_CPU
@pytest.mark.parametrize("fault", ["none", "wrong", "raises"])
def test_a_kernel_of_attention_that_fails_at_the_sizes_of_a_model_serves_nothing(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, exact: bool) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        return attention(*arguments, exact) * (1.5 if fault == "wrong" else 1)

    monkeypatch.setattr(pair, "faults", lambda device: {})
    monkeypatch.setattr(kernels_attention, "attention", broken)
    model = CausalForestModel(build("llama", num_hidden_layers=1), "llama")
    pair._attend_fast(model)
    if fault == "none":
        assert model.attention is not None
        assert model.told == ()
        return
    assert model.attention is None
    (line,) = model.told
    assert ("off by" if fault == "wrong" else "out of resource") in line
    if fault == "raises":  # nor does it end the load of a target whose bits are asked for
        model.attention = partial(broken, exact=True)
        assert "out of resource" in (pair._check(model).varies or "")


class Launches(TorchDispatchMode):
    """Operations that a GPU would launch a small kernel for: no views, no products, no attention."""

    FREE = ("view", "unsafe_view",
            "reshape", "transpose", "t", "slice", "select", "unsqueeze", "split", "expand", "alias", "detach",
            "squeeze", "empty", "permute", "as_strided", "chunk", "new_empty", "unflatten", "lift_fresh")  # fmt: skip
    LARGE = ("mm", "addmm", "bmm", "linear", "attention")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name.strip("_") not in self.FREE and not any(large in name for large in self.LARGE):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@ON_CPU
@pytest.mark.parametrize("same_text", [False, True])
def test_a_layer_launches_eight_small_kernels_at_most(same_text: bool) -> None:
    def launches(layers: int) -> list[str]:
        model = CausalForestModel(build("llama", num_hidden_layers=layers), "llama")
        assert fuse(model.module, layer_kernels(GPU, () if same_text else {"linear"})).counts["layer"] == layers
        model.reserve(1, 64)
        batch = chain()
        if same_text:  # as a step gives it on a GPU
            model.attention = partial(attention, exact=True)
            batch = replace(batch, settled=(0,), tail=64, prompt=torch.tensor([0]))
        model.forward(batch)
        with Launches() as counting:
            model.forward(batch)
        return counting.seen

    one, two = launches(1), launches(2)

    assert len(two) - len(one) <= 8, two
    assert two.count("norm") == 5
