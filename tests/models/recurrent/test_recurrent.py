"""Recurrent and hybrid models over a packed forest: the self-test accepts them, refuses our own mistakes, and the cache
keeps one state per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import UnsupportedModelError
from dsbd_cli.models.checks.selftest import self_test
from dsbd_cli.models.recurrent import linear_state
from dsbd_cli.models.recurrent.linear_state import GroupedState, LinearState
from dsbd_cli.models.recurrent.memory import LayerMemory, SelectiveState
from dsbd_cli.models.recurrent.states import RecurrentCache
from dsbd_cli.models.recurrent.tail import Shift, TailBuffer
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.ops.cpu.kernels import scan
from tests.helpers.tiny import HEAD, RECURRENT, V, build

BY_KERNEL = [True, False]  # by kernels of a CPU, and by tensor code as on a GPU
MIXED = ("mamba2", "qwen3.5", "kimi-linear", "lfm2", "mamba", "linearised")  # one of each kind of layer


@pytest.fixture
def by_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether recurrent layers run as kernels of a CPU; otherwise as tensor code."""
    monkeypatch.setattr(RecurrentCache, "has_kernel", staticmethod(lambda device: bool(request.param)))
    return bool(request.param)


def summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent layers run as tensor code."""
    monkeypatch.setattr(RecurrentCache, "has_kernel", staticmethod(lambda device: False))


@pytest.mark.parametrize("by_kernel", BY_KERNEL, ids=["walked", "summed"], indirect=True)
@pytest.mark.parametrize("name", RECURRENT)
def test_accepts(name: str, by_kernel: bool) -> None:
    """Guards every family's seam: names of scans, arguments, what the cache is asked. Margin 10."""
    report = self_test(CausalForestModel(build(name), name))
    assert report.largest_error < report.limit / 10


# Of the other tiny random models the half-precision logits are off from the float32 ones by half their spread, in
# transformers alone: nothing can be compared.
HALVES = [
    ("mamba2", torch.bfloat16),
    ("mamba2", torch.float16),
    ("lfm2", torch.bfloat16),
    ("mamba", torch.bfloat16),
    ("olmo-hybrid", torch.bfloat16),
    ("qwen3.5", torch.float16),
]


@pytest.mark.parametrize("by_kernel", BY_KERNEL, ids=["walked", "summed"], indirect=True)
@pytest.mark.parametrize(("name", "dtype"), HALVES, ids=str)
def test_accepts_halves(name: str, dtype: torch.dtype, by_kernel: bool) -> None:
    """Guards states and inputs kept in the model's own dtype, whose rounding would stay in the state for good."""
    forest = CausalForestModel(build(name).to(dtype), name)
    report = self_test(forest)
    assert report.median_error < report.limit / 2
    assert isinstance(forest._cache, RecurrentCache)
    for memory in forest._cache.memories.values():
        assert memory.state is None or memory.state.dtype == torch.float32
        assert all(memory.planes[name].dtype == torch.float32 for name in ("k", "u", "g") if name in memory.planes)


def test_mixers_run_as_before_outside_a_forest() -> None:
    """Guards comparators on the same module, and other models of the same class."""
    for name in ("mamba2", "qwen3.5"):
        plain, model = build(name), build(name)
        tokens = torch.arange(3, 14)[None]
        forest = CausalForestModel(model, name)
        expected = plain(input_ids=tokens, use_cache=False).logits
        assert torch.equal(forest.plain(tokens), expected)
        cached = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(cached, plain.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0))


def fold_forgotten(patch: pytest.MonkeyPatch) -> None:
    for kind in (LinearState, SelectiveState):
        patch.setattr(kind, "fold", LayerMemory.fold)


def fold_twice(patch: pytest.MonkeyPatch) -> None:
    def twice(fold: Callable[..., None]) -> Callable[..., None]:
        def run(self: LayerMemory, shift: Shift) -> None:
            fold(self, shift)
            fold(self, shift)

        return run

    for kind in (LinearState, SelectiveState):
        patch.setattr(kind, "fold", twice(kind.fold))


def decay_of_a_sibling(patch: pytest.MonkeyPatch) -> None:
    def everyone(self: TailBuffer) -> Tensor:
        return (self.depths.unsqueeze(1) <= self.batch.positions.unsqueeze(2)).double()

    patch.setattr(TailBuffer, "seen_sum", property(everyone))


def convolution_by_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TailBuffer, "back", lambda self, taps: self.at + torch.arange(1 - taps, 0).view(-1, 1, 1))


def by_kernel_convolution_by_slot(patch: pytest.MonkeyPatch) -> None:
    taps = scan.taps

    def neighbours(*arguments: Any) -> Any:
        own, back = taps(*arguments)
        return own, own + np.arange(-len(back), 0)[:, None]

    patch.setattr(scan, "taps", neighbours)


def uncorrected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear_state, "solve", lambda a, r: r)


def base_not_cleared(patch: pytest.MonkeyPatch) -> None:
    clear = RecurrentCache.clear

    def keep_base(self: RecurrentCache, row: int) -> None:
        base = self.base[row].clone()
        clear(self, row)
        self.base[row] = base

    patch.setattr(RecurrentCache, "clear", keep_base)


def common_prefix_inputs_lost(patch: pytest.MonkeyPatch) -> None:
    """The convolution forgets what stood before the suffix."""
    advance = LayerMemory.advance

    def forget(self: LayerMemory, shift: Shift) -> None:
        advance(self, shift)
        for plane in self.planes.values():
            plane[:, : self.lead] = 0

    patch.setattr(LayerMemory, "advance", forget)


def line_by_slot(patch: pytest.MonkeyPatch) -> None:
    """A node reads the tokens in the places before it."""
    forest = scan.forest

    def neighbours(seen: Any, at: Any, depths: Any, base: Any, lead: int) -> Any:
        plan = forest(seen, at, depths, base, lead)
        for line, count in zip(plan.lines[0], plan.counts[0], strict=True):
            line[:count] = range(max(0, line[count - 1] - count + 1), max(count, line[count - 1] + 1))
        return plan

    patch.setattr(scan, "forest", neighbours)


def nothing_recalled(patch: pytest.MonkeyPatch) -> None:
    """u without what the parent's state says of its key."""
    walk = LinearState._by_kernel

    def scaled(self: LinearState, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, beta: Tensor, **rest: Any) -> Tensor:
        return walk(self, q, k, v * beta.unsqueeze(3), g)

    patch.setattr(LinearState, "_by_kernel", scaled)


def own_group_read_as_an_earlier_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupedState, "_own", lambda self, q, *_: torch.zeros_like(q))


MUTANTS = [
    (own_group_read_as_an_earlier_one, ("linearised",)),
    (fold_forgotten, ("mamba2", "qwen3.5", "kimi-linear", "mamba", "linearised")),
    (fold_twice, ("mamba2", "qwen3.5", "kimi-linear", "mamba", "linearised")),
    (decay_of_a_sibling, ("mamba2", "qwen3.5", "kimi-linear")),
    (convolution_by_slot, MIXED),
    (uncorrected, ("qwen3.5", "kimi-linear")),
    (base_not_cleared, MIXED),
    (common_prefix_inputs_lost, MIXED),
]
KERNEL_MUTANTS = [
    (fold_forgotten, ("mamba2", "qwen3.5", "kimi-linear", "linearised")),
    (fold_twice, ("mamba2", "qwen3.5", "kimi-linear", "linearised")),
    (line_by_slot, ("mamba2", "qwen3.5", "kimi-linear", "linearised")),
    (by_kernel_convolution_by_slot, ("mamba2", "lfm2")),
    (nothing_recalled, ("qwen3.5", "kimi-linear")),
    (base_not_cleared, ("mamba2", "qwen3.5", "linearised")),
    (common_prefix_inputs_lost, ("mamba2", "qwen3.5", "lfm2")),
]


@pytest.mark.parametrize(
    ("break_it", "name"),
    [pytest.param(mutant, name, id=f"{mutant.__name__}-{name}") for mutant, names in MUTANTS for name in names],
)
def test_mutants_are_refused(break_it: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the self-test itself: our own mistakes must fail it."""
    summed(monkeypatch)
    forest = CausalForestModel(build(name), "mutant")
    break_it(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="tree"):
        self_test(forest)


@pytest.mark.parametrize(
    ("break_it", "name"),
    [pytest.param(mutant, name, id=f"{mutant.__name__}-{name}") for mutant, names in KERNEL_MUTANTS for name in names],
)
def test_by_kernel_mutants_are_refused(break_it: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of layers that run as kernels."""
    forest = CausalForestModel(build(name), "mutant")
    break_it(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="tree"):
        self_test(forest)


REFUSED = {
    "rwkv": ("RwkvConfig", {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2}, "running maximum"),
    "xlstm": ("xLSTMConfig", {"vocab_size": V, "hidden_size": 32, "num_blocks": 2, "num_heads": 2}, "running maximum"),
    "zaya": ("ZayaConfig", HEAD, "code of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name: str) -> None:
    kind, settings, reason = REFUSED[name]
    config = getattr(transformers, kind)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        CausalForestModel(model, name)
    assert name in str(caught.value)


@pytest.mark.parametrize("by_kernel", BY_KERNEL, ids=["walked", "summed"], indirect=True)
def test_a_row_holds_one_state_whatever_its_length(by_kernel: bool) -> None:
    """Guards memory that grows with the text or with the beams."""
    forest = CausalForestModel(build("mamba2"), "mamba2")
    assert forest.kv_bytes_per_slot() == 0
    decays = 8 if by_kernel else 8 + 2 * 8
    state, position = 3 * 8 * 16 * 8 * 4, 3 * ((64 + 2 * 2 * 16) + (2 * 16 + 8 * 8 + decays)) * 4
    kernel = 3 * 3 * (64 + 2 * 2 * 16) * 4  # three inputs of a convolution stay from the common prefix
    inputs = scan.LEAD * 3 * (2 * 16 + 8 * 8 + decays) * 4 if by_kernel else 0  # of tokens that a kernel's state lacks
    for window in (0, 24, 96):
        assert forest.recurrent_bytes(window) == state + kernel + inputs + (window + 1) * position
    forest.reserve(2, 1000, 24)
    cache = forest._cache
    assert isinstance(cache, RecurrentCache)
    held = sum(t.numel() * t.element_size() for memory in cache.memories.values() for t in memory.tensors())
    assert held == 2 * forest.recurrent_bytes(24)
    forest.release()
    assert not any(t.numel() for memory in cache.memories.values() for t in memory.tensors())


def test_nan_of_a_failed_row_is_cleared() -> None:
    forest = CausalForestModel(build("qwen3.5"), "x")
    forest.reserve(2, 8)
    cache = forest._cache
    assert isinstance(cache, RecurrentCache)
    for memory in cache.memories.values():
        for tensor in memory.tensors():
            tensor[1].fill_(float("nan"))
    forest.clear(1)
    assert all(t.isfinite().all() for memory in cache.memories.values() for t in memory.tensors())


@pytest.mark.parametrize("by_kernel", BY_KERNEL, ids=["walked", "summed"], indirect=True)
@pytest.mark.parametrize("name", ["qwen3.5", "bamba", "jamba"])
def test_tokens_of_the_common_prefix_are_not_run_again(name: str, by_kernel: bool) -> None:
    """While other rows catch up, a draft is asked for tokens that its state holds. Guards inputs added twice, and keys
    of attention layers that are made anew of a state that lies behind them. The base is where an anchor begins."""
    base, count, behind = 24, 30, 5  # the second row stands so many tokens further back, and is asked for new ones
    tokens = torch.randint(3, V, (2, count), generator=torch.Generator().manual_seed(5))
    everything = torch.arange(count).expand(2, -1)
    seen = torch.ones(count, count, dtype=torch.bool).tril()

    def part(places: list[int], other: list[int] | None = None) -> ForestInput:
        at = torch.tensor([places, [position - behind for position in places] if other is None else other])
        return ForestInput(tokens.gather(1, at), at, at, seen[at], everything)

    outputs = []
    for again in ([], [base - 3, base - 2, base - 1]):
        forest = CausalForestModel(build(name), name)
        forest.reserve(2, count + 1, 16)
        for row, length in enumerate((base - 2, base - 2 - behind)):
            prompt = part(list(range(length)), list(range(length)))
            inputs = [getattr(prompt, name)[row : row + 1] for name in ("tokens", "positions", "slots", "mask")]
            chain = ForestInput(*inputs, everything[:1], rows=torch.tensor([row]), chain=True)
            forest.forward(chain, logits=False)
        forest.forward(part([base - 2, base - 1]), logits=False)
        same = part([base - 2, base - 1]).slots
        forest.move(same, same, torch.tensor([base, base - behind]))
        fresh = list(range(base - behind, base - behind + len(again)))
        beside = forest.forward(part([*again, base], [*fresh, base - behind + len(again)]))
        after = forest.forward(part([base + 1, base + 2], [base + 1, base + 2]))
        assert beside is not None
        assert after is not None
        outputs.append(torch.cat((beside[0, len(again) :], after[0])))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)
