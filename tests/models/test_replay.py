"""Recorded layers: the bits of a plain run, for every kind of layer and attention; what cannot be recorded runs
plainly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.config import MethodConfig, SamplingConfig
from dsbd_cli.engine.core.protocols import ForestInput
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.models import layer_ops, replay
from dsbd_cli.engine.models.causal import CausalForestModel
from dsbd_cli.engine.models.fused import fuse, layer_kernels
from dsbd_cli.engine.models.packing import pack, packing_works
from dsbd_cli.engine.models.replay import Replays
from dsbd_cli.engine.models.tail import Paths
from dsbd_cli.requests import Request
from tests.engine.toys import NumberCodec
from tests.models.tiny import V, build

pytestmark = [
    pytest.mark.skipif(not layer_ops.serves(), reason="kernels of numba do not run here"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="models of these tests are on the CPU"),
]
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma3 window": {"head_dim": 32, "sliding_window": 40},
}


def forest(family: str = "llama", dtype: torch.dtype = torch.float32) -> CausalForestModel:
    model = build(family, **WIDE, **FAMILIES[family]).to(dtype)
    fused = fuse(model, layer_kernels(torch.device("cpu")), lambda joined: pack(model, joined))
    assert fused.counts["recorded"] == 2
    found = CausalForestModel(model, family)
    found.invariant = True  # whether it is, is asked elsewhere: attention goes by slots then
    return found


@contextmanager
def plainly() -> Iterator[None]:
    """Layers run one by one inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "MOST_NODES", 0)
        yield


def answers(target: CausalForestModel, method: MethodConfig, prompts: list[tuple[int, ...]], draft: Any = None) -> Any:
    engine = Engine(target, draft, NumberCodec(V, (2,)), method, batch_size=len(prompts))
    sampling = SamplingConfig(max_new_tokens=24, n_best=method.num_beams)
    found = engine.run([Request(prompt_ids=prompt, sampling=sampling) for prompt in prompts])
    return [[(one.token_ids, one.logprob) for one in result.hypotheses] for result in found]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(3, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


SEARCH = MethodConfig(rule="search", num_beams=3, depth=0)


@pytest.mark.parametrize("dtype", layer_ops.DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_of_a_plain_run(family: str, dtype: torch.dtype) -> None:
    """Short prompts, whose slots are all tail, and long ones, part of which goes through torch's attention; layers with
    a window see a part of these."""
    if not packing_works(dtype):
        pytest.skip("this machine packs no products")
    target = forest(family, dtype)
    for prompts in ([prompt(9)], [prompt(150)], [prompt(80, 1), prompt(81, 2)]):
        with plainly():
            wanted = answers(target, SEARCH, prompts)
        before = 0 if target._cache.replays is None else target._cache.replays.replayed
        assert answers(target, SEARCH, prompts) == wanted
        assert target._cache.replays.replayed > before


@pytest.mark.parametrize("invariant", [True, False])
def test_drafts_and_trees(invariant: bool) -> None:
    """Nodes in several numbers, of a draft that goes by masks, too."""
    target, draft = forest("llama"), forest("qwen2")
    target.invariant = draft.invariant = invariant
    method = MethodConfig(rule="coupled", num_beams=3, depth=2, drafts_per_layer=4)
    prompts = [prompt(12), prompt(30, 1)]
    with plainly():
        wanted = answers(target, method, prompts, draft)
    assert answers(target, method, prompts, draft) == wanted
    assert target._cache.replays.replayed
    assert draft._cache.replays.replayed


def test_paths_that_become_longer_are_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "ROOM_STEP", 4)
    target = forest()
    with plainly():
        wanted = answers(target, SEARCH, [prompt(9)])
    assert answers(target, SEARCH, [prompt(9)]) == wanted
    assert target._cache.replays.replayed


def test_other_memory_is_recorded_anew() -> None:
    """Guards addresses of a cache that has moved."""
    target = forest()
    for length in (9, 40, 9):
        with plainly():
            wanted = answers(target, SEARCH, [prompt(length)])
        assert answers(target, SEARCH, [prompt(length)]) == wanted
        target.release()


@pytest.mark.parametrize("forgotten", ["hidden", "cos", "paths", "window"])
def test_a_recording_that_gives_other_bits_is_dropped(
    forgotten: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards what a replay has to be given anew: without any of it the answer would be another."""
    load = replay._Program.load

    def forgetting(program: Any, forward: Any) -> bool:
        places = {"hidden": program.inputs[:1], "cos": program.inputs[2:3]}
        seen = [one for *_, one in program.seen]
        places["window"] = [one for one in seen if isinstance(one, Tensor)]
        lists = [one for one in seen if isinstance(one, Paths)]
        places["paths"] = [part for one in lists for part in (one.slots, one.counts, one.bounds)]
        kept = [(place, place.clone()) for place in places[forgotten]]
        found = load(program, forward)
        for place, before in kept:
            place.copy_(before)
        return found

    monkeypatch.setattr(replay._Program, "load", forgetting)
    family, length = ("gemma3 window", 70) if forgotten == "window" else ("llama", 9)
    target, given = forest(family), [prompt(length)]
    with plainly():
        wanted = answers(target, SEARCH, given)
    assert answers(target, SEARCH, given) == wanted
    assert not target._cache.replays.replayed
    assert "gave other bits" in caplog.text


def odd(mlp: Any, kind: str) -> Any:
    """A gated product that goes by data, or draws, or gives what is no view though its operation says so."""

    def forward(x: Tensor) -> Tensor:
        found: Tensor = mlp(x)
        if kind == "reads":
            return found * (2 if float(found.sum()) > 0 else 3)
        if kind == "draws":
            return found + 0 * torch.rand_like(found)
        if kind == "copies":
            return found.transpose(1, 2).contiguous().transpose(1, 2) * 2
        return found.mul_(2)

    return forward


@pytest.mark.parametrize("kind", ["reads", "draws", "copies", "writes"])
def test_what_a_layer_does_in_torch(kind: str) -> None:
    model = build("llama", **WIDE)
    fused = fuse(model, layer_kernels(torch.device("cpu")), lambda joined: pack(model, joined))
    for layer in model.model.layers:
        layer.mlp.forward = odd(layer.mlp.forward, kind)
    target = CausalForestModel(model, "llama")
    target.invariant = True
    assert fused.counts["recorded"] == 2
    with plainly():
        wanted = answers(target, SEARCH, [prompt(9)])
    assert answers(target, SEARCH, [prompt(9)]) == wanted
    assert bool(target._cache.replays.replayed) == (kind in ("copies", "writes"))


def test_a_forward_that_ends_early_leaves_nothing_behind() -> None:
    """Guards layers that were asked and never run: the next forward begins anew."""
    asked: list[Tensor] = []

    def layer(hidden: Tensor, **more: object) -> Tensor:
        asked.append(hidden)
        return hidden + 1

    target = forest()
    target.reserve(1, 64)
    mask = torch.zeros(1, 5, 64, dtype=torch.bool)
    places = torch.arange(5)[None]
    mask[0, :, :5] = torch.ones(5, 5, dtype=torch.bool).tril()
    target.forward(ForestInput(places + 3, places, places, mask, torch.arange(64)[None]))
    angles = (torch.zeros(1, 5, 32), torch.zeros(1, 5, 32))
    more = {"past_key_values": target._cache, "position_embeddings": angles, "attention_mask": mask}
    replays = Replays(2)
    hidden = torch.zeros(1, 5, 64)
    assert replays.ask(0, layer, hidden, more) is hidden
    assert replays.ask(0, layer, hidden, more) is hidden
    assert not asked
    assert torch.equal(replays.ask(1, layer, hidden, more), hidden + 2)
    assert len(asked) == 2
