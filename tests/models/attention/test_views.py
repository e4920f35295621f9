"""Which way of attention serves where, and the bits of torch's kernels in all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.models.attention import forest, metadata, views
from dsbd_cli.models.attention.forest import Scoring
from dsbd_cli.models.attention.metadata import AttentionMetadata, Split
from dsbd_cli.ops.cpu import attention, prompt_attention
from dsbd_cli.ops.interface import Ops
from dsbd_cli.ops.processor import Processor, current, on_amd


def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "fits", lambda *_: False)


def of_split(split: Split, seen: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[R, n, H, E] by the ways of split slots."""
    forward = AttentionMetadata(Ops(path_attention=attention), split)  # type: ignore[arg-type]
    mask = forward.add(seen, query.dtype, whole=True)
    out = views.attend(forward, query, key, value, mask.additive, Scoring(query.shape[-1] ** -0.5))
    assert out is not None
    return out


def attended(suffix: int) -> Tensor:
    """[1, n, H, E] of six nodes over 64 prompt slots and six more, among `suffix` slots whose others are masked."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, heads, 128, 64, generator=generator) for heads in (4, 2, 2))
    seen = torch.zeros(1, 6, 128, dtype=torch.bool)
    seen[..., :64] = True
    seen[..., 64:70] = torch.ones(6, 6).tril().bool()
    return of_split(Split.of((64,), suffix), seen, query[:, :, :6], key, value)


def test_a_short_suffix_has_the_bits_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards products of few columns, which take another kernel: LEAST_SUFFIX keeps them away."""
    kernel = attended(64)
    assert all(torch.equal(attended(suffix), kernel) for suffix in range(6, 40))
    in_torch(monkeypatch)
    wide = attended(64)
    assert all(torch.equal(attended(suffix), wide) for suffix in range(6, 40))


@pytest.mark.skipif(not on_amd(), reason="products of few columns are known to take another kernel on AMD alone")
def test_a_suffix_that_is_not_filled_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above."""
    in_torch(monkeypatch)
    wide = attended(64)
    monkeypatch.setattr(metadata, "LEAST_SUFFIX", 1)
    assert not all(torch.equal(attended(suffix), wide) for suffix in range(6, 12))


def of_queries(count: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[1, H, E] of the first of so many nodes that see 96 prompt slots and one more."""
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(1, heads, 128, dim, generator=generator).to(dtype) for heads in (4, 4, 4))
    seen = torch.zeros(1, count, 128, dtype=torch.bool)
    seen[..., :97] = True
    return of_split(Split.of((96,), 32), seen, query[:, :, :count], key, value)[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_query_has_the_same_bits_beside_any_number_of_others(
    dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards products of few rows, which take another kernel: what is filled up keeps them away."""
    for change in (lambda: None, lambda: in_torch(monkeypatch)):
        change()
        many = of_queries(96, dim, dtype)
        assert all(torch.equal(of_queries(count, dim, dtype), many) for count in range(1, 70))


@pytest.mark.skipif(on_amd(), reason="products of few rows take no other kernel on AMD")
@pytest.mark.parametrize("dim", [128, 256])
def test_queries_that_are_not_filled_up_are_found(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above."""
    monkeypatch.setattr(metadata, "LEAST_REST", 1)
    few = [torch.equal(of_queries(count, dim), of_queries(96, dim)) for count in range(1, 40)]
    if all(few) and current() < Processor.AVX512:
        pytest.skip("only processors with AVX-512 are known for it")
    assert not all(few)


def always(*_: Any) -> bool:
    return True


def way(
    split: Split | None,
    *,
    whole: bool = True,
    scoring: Scoring | None = None,
    kernels: bool = True,
    dim: int = 64,
    source: bool = False,
    **prompt: Any,
) -> str:
    """Name of the view that is chosen, and of the function that it calls. source: the mask is that of a source."""
    module: Any = SimpleNamespace(fits=always, list_slots=lambda *_: None)
    ops = Ops(path_attention=module, prompt_attention=module) if kernels else Ops()
    forward = AttentionMetadata(ops, split, **prompt)
    query, key = torch.zeros(1, 4, 3, dim), torch.zeros(1, 2, 128, dim)
    mask = forward.add(torch.ones(1, 3, 128, dtype=torch.bool), torch.float32, whole=whole)
    if source:
        forward.source = forward.masks.pop()
    view = views.view_of(forward, mask, query, key, key, scoring or Scoring(1.0))
    if isinstance(view, views.PathView):
        return "paths beside " + ("prompts" if view.prompt else "torch" if view.prompt_slots else "nothing")
    function = getattr(view, "compute", None)
    return type(view).__name__ if function is None else function.__name__


def test_the_first_way_that_fits_is_taken() -> None:
    """Guards the order of the choice, each line of it."""
    gpu = Split.of((96,), 32, kernel=always)
    fast = Split((0,), 128, exact=False, kernel=always)
    assert way(gpu, kernels=False) == "by_kernel"
    assert way(gpu, kernels=False, whole=False) == "by_parts"
    assert way(fast) == "by_kernel"
    assert way(fast, whole=False) == "over_all_slots"
    assert way(fast, scoring=Scoring(1.0, softcap=5.0)) == "over_all_slots"
    assert way(None, by_prefix=True) == "PrefixView"
    assert way(None, by_prefix=True, whole=False) == "over_all_slots"
    assert way(None, by_prefix=True, kernels=False) == "over_all_slots"
    assert way(None) == "over_all_slots"
    assert way(Split.of((96,), 32)) == "paths beside prompts"
    assert way(Split.of((96,), 32), whole=False) == "paths beside torch"
    assert way(Split.of((96,), 32), scoring=Scoring(1.0, softcap=5.0)) == "paths beside nothing"
    assert way(Split.of((96,), 32), dim=16) == "paths beside nothing"
    assert way(Split.of((40,), 32)) == "paths beside nothing"
    assert way(Split.of((96,), 32), kernels=False) == "by_parts"
    assert way(Split.without_suffix((96,)), whole=False) == "by_parts"
    assert way(Split.without_suffix((96,)), whole=False, source=True) == "by_parts"
    assert way(Split.of((100,), 1), source=True) == "paths beside torch"


def test_a_source_without_a_mask_has_torchs_bits() -> None:
    """Guards speech, whose decoder sees all places: the kernel of prompts sums them in another order than torch."""

    def heard(**kernels: Any) -> Tensor:
        forward = AttentionMetadata(Ops(path_attention=attention, **kernels), Split.of((0,), 8))  # type: ignore[arg-type]
        places = torch.ones(1, 3, 100, dtype=torch.bool)
        forward.source = metadata.LayerMask(places, torch.float32, Split.of((100,), 1), whole=True)
        generator = torch.Generator().manual_seed(5)
        query, key, value = (torch.randn(1, 4, count, 64, generator=generator) for count in (3, 100, 100))
        out = views.attend(forward, query, key, value, None, Scoring(0.125))
        assert out is not None
        assert forward.used == 1
        return out

    assert torch.equal(heard(prompt_attention=prompt_attention), heard())


def test_a_source_is_computed_in_parts_where_a_forward_promises_no_bits() -> None:
    """Guards caps over a source on a GPU, whose forward is split for its kernel alone."""
    forward = AttentionMetadata(Ops(), Split((0,), 8, exact=False, kernel=always))
    places = torch.ones(1, 3, 100, dtype=torch.bool)
    forward.source = metadata.LayerMask(places, torch.float32, Split.of((0,), 100), whole=True)
    states = torch.rand(1, 2, 3, 32), torch.rand(1, 2, 100, 32), torch.rand(1, 2, 100, 32)
    scoring = Scoring(0.2, softcap=5.0)
    out = views.attend(forward, *states, None, scoring)
    assert out is not None
    assert forward.used == 1
    assert torch.equal(out, forest.by_parts(forward.source, *states, scoring))


def test_a_mask_is_found_by_its_memory_and_a_models_own_is_not() -> None:
    """Guards models that add to our mask or slice it: what they have changed must not be taken for ours."""
    forward = AttentionMetadata(Ops(), Split.of((0,), 8))
    near, far = (torch.rand(1, 3, 8) > level for level in (0.5, 0.2))
    masks = [forward.add(seen, torch.float32, whole=True) for seen in (near, far)]
    assert [forward.find(mask.additive) for mask in masks] == masks
    assert forward.find(masks[1].additive[:, :, :, :8]) is masks[1]
    assert forward.find(None) is None
    for changed in (masks[0].additive + 0, masks[0].additive[..., :7], masks[0].additive.bool(), near):
        assert forward.find(changed) is None
    forward.source = metadata.LayerMask(near, torch.float32, None, whole=True)
    assert forward.find(None) is forward.find(forward.source.additive) is forward.source


def test_what_a_model_masks_itself_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `by_parts` of a forward, which counts the layers that our ways serve."""
    forward = AttentionMetadata(Ops(), Split.of((0,), 8))
    seen = torch.ones(1, 3, 8, dtype=torch.bool)
    ours = forward.add(seen, torch.float32, whole=True).additive
    states = torch.rand(1, 2, 3, 32), torch.rand(1, 2, 8, 32), torch.rand(1, 2, 8, 32)
    asked: list[Tensor | None] = []
    by_mask = forest.by_mask
    monkeypatch.setattr(views, "by_mask", lambda *arguments: asked.append(arguments[3]) or by_mask(*arguments))
    other = ours.clone()
    out = [views.attend(forward, *states, mask, Scoring(0.2)) for mask in (ours, other)]
    assert forward.used == 1
    assert [mask is other for mask in asked] == [True]
    torch.testing.assert_close(*out)
