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
from dsbd_cli.engine.models import fused, layer_ops, replay
from dsbd_cli.engine.models.causal import CausalForestModel
from dsbd_cli.engine.models.fused import fuse, layer_kernels
from dsbd_cli.engine.models.packing import pack, packing_works
from dsbd_cli.engine.models.recorder import Arena
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
    changed = fuse(model, layer_kernels(torch.device("cpu")), lambda joined: pack(model, joined))
    assert changed.counts["recorded"] == 2
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
    monkeypatch.setattr(replay, "LEAST_ROOM", 4)
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
        seen = [one for *_, one in program.from_sight]
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
        if kind == "parts":
            for part in found.split(24, -1):
                part.mul_(2)
            return found
        return found.mul_(2)

    return forward


@pytest.mark.parametrize("kind", ["reads", "draws", "copies", "parts", "writes"])
def test_what_a_layer_does_in_torch(kind: str) -> None:
    model = build("llama", **WIDE)
    changed = fuse(model, layer_kernels(torch.device("cpu")), lambda joined: pack(model, joined))
    for layer in model.model.layers:
        layer.mlp.forward = odd(layer.mlp.forward, kind)
    target = CausalForestModel(model, "llama")
    target.invariant = True
    assert changed.counts["recorded"] == 2
    with plainly():
        wanted = answers(target, SEARCH, [prompt(9)])
    assert answers(target, SEARCH, [prompt(9)]) == wanted
    assert bool(target._cache.replays.replayed) == (kind in ("copies", "parts", "writes"))


def given(target: CausalForestModel) -> dict[str, Any]:
    """What a layer is given in a forward of five nodes."""
    target.reserve(1, 64)
    mask = torch.zeros(1, 5, 64, dtype=torch.bool)
    mask[0, :, :5] = torch.ones(5, 5, dtype=torch.bool).tril()
    places = torch.arange(5)[None]
    target.forward(ForestInput(places + 3, places, places, mask, torch.arange(64)[None]))
    angles = (torch.zeros(1, 5, 32), torch.zeros(1, 5, 32))
    return {"past_key_values": target._cache, "position_embeddings": angles, "attention_mask": mask}


def plus_one(hidden: Tensor, **more: object) -> Tensor:
    return hidden + 1


def test_layers_that_are_left_out_are_noticed() -> None:
    """Guards layers that were called and never ran, and a loop that changes what lies between them."""
    more, hidden = given(forest()), torch.zeros(1, 5, 64)
    replays = Replays(3)
    assert replays.call(0, plus_one, hidden, more) is hidden
    with pytest.raises(RuntimeError, match="1 of 3 layers were called"):
        replays.finish()
    replays.call(0, plus_one, hidden, more)
    with pytest.raises(RuntimeError, match="layer 2 was not called after layer 1"):
        replays.call(2, plus_one, hidden, more)
    replays.call(0, plus_one, hidden, more)
    with pytest.raises(RuntimeError, match="with its result"):
        replays.call(1, plus_one, hidden * 2, more)
    replays.call(0, plus_one, hidden, more)
    for number in range(2):  # one that an error ended is forgotten
        assert replays.call(number, plus_one, hidden, more) is hidden
    assert torch.equal(replays.call(2, plus_one, hidden, more), hidden + 3)
    replays.finish()


def test_memory_goes_back_with_the_caches() -> None:
    """Guards recordings that hold a cache which was released."""
    target = forest()
    answers(target, SEARCH, [prompt(150)])
    replays = target._cache.replays
    assert replays.nbytes
    target.release()
    assert not replays.nbytes
    answers(target, SEARCH, [prompt(150)])
    target.layers_replaced()
    assert not replays.nbytes


def test_longer_paths_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards blocks that became too small: recordings that nobody uses any more must not hold them."""
    monkeypatch.setattr(replay, "LEAST_ROOM", 1)
    target = forest()
    answers(target, SEARCH, [prompt(9)])
    target.release()
    answers(target, SEARCH, [prompt(60)])
    assert target._cache.replays.nbytes < 300_000


def test_what_fails_while_it_is_recorded_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: object) -> Tensor:
        raise MemoryError("none left")

    target = forest()
    with plainly():
        wanted = answers(target, SEARCH, [prompt(9)])
    monkeypatch.setattr(Arena, "block", fails)
    assert answers(target, SEARCH, [prompt(9)]) == wanted
    assert not target._cache.replays.replayed
    assert "MemoryError: none left" in caplog.text


def test_equal_forwards_prove_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a check that a recording passes which copies nothing, because nothing has changed."""
    monkeypatch.setattr(replay._Program, "load", lambda *arguments: True)
    target = forest()
    target.reserve(1, 64)
    batch = chain(5)
    for _ in range(8):
        target.forward(batch)
    assert not target._cache.replays.replayed
    with plainly():
        wanted = [target.forward(chain(5, shift)) for shift in range(3)]
    found = [target.forward(chain(5, shift)) for shift in range(3)]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert "gave other bits" in caplog.text


def chain(count: int, shift: int = 0) -> ForestInput:
    """Tokens in a row."""
    places = torch.arange(count)[None] + shift
    mask = torch.zeros(1, count, 64, dtype=torch.bool)
    mask[0, :, shift : shift + count] = torch.ones(count, count, dtype=torch.bool).tril()
    return ForestInput(places + 3, places, places, mask, torch.arange(64)[None], settled=(0,), tail=64)


def test_forwards_in_and_outside_of_inference_mode() -> None:
    """Guards homes that belong to the mode in which they were made."""
    target = forest()
    target.reserve(1, 64)
    with torch.inference_mode():
        for shift in range(8):
            target.forward(chain(5, shift))
    replayed = target._cache.replays.replayed
    assert replayed
    target.forward(chain(5, 9))
    assert target._cache.replays.replayed == replayed + 1


def test_a_recording_that_is_made_or_checked_is_not_steady() -> None:
    """Guards plans that take the time of a recording for that of its shape."""
    target = forest()
    engine = Engine(target, None, NumberCodec(V, (2,)), SEARCH)
    seen = []
    step = engine._stepper.step

    def noting(*arguments: Any) -> Any:
        before = target.slower_forwards
        found = step(*arguments)
        seen.append((engine._stepper.steady, target.slower_forwards > before))
        return found

    engine._stepper.step = noting  # type: ignore[method-assign]
    list(engine.run([Request(prompt_ids=prompt(9), sampling=SamplingConfig(max_new_tokens=24))]))
    assert any(slower for _, slower in seen)
    assert not any(steady for steady, slower in seen if slower)
    assert seen[-1] == (True, False)


def test_without_the_kernel_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "serves", lambda: False)
    model = build("llama", **WIDE)
    assert "recorded" not in fuse(model, layer_kernels(torch.device("cpu"))).counts
