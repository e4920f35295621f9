"""The self-test accepts what can hold a tree and refuses what cannot, loudly or silently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsbd_cli.errors import UnsupportedModelError
from dsbd_cli.models import verdicts
from dsbd_cli.models.checks import selftest
from dsbd_cli.models.checks.selftest import PROMPT, self_test
from dsbd_cli.models.transformers_backend.base import MaskPlan
from dsbd_cli.models.transformers_backend.causal import CausalForestModel
from dsbd_cli.models.verdicts import CEILING, LIMITS
from tests.helpers.tiny import FIT, UNFIT, build


@pytest.mark.parametrize("name", FIT)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
def test_accepts(name: str, dtype: torch.dtype) -> None:
    """Guards false alarms in every dtype, for random weights much larger than usual; margin 2. None needs more than the
    limit of its dtype."""
    report = self_test(CausalForestModel(build(name).to(dtype), name))
    assert report.limit == LIMITS[dtype]
    assert report.median_error < report.limit / 2


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_refuses(name: str, dtype: torch.dtype) -> None:
    """Guards silent failures (biases and windows by slot) and foreign exceptions: one line that says what is wrong."""
    with pytest.raises(UnsupportedModelError) as caught:
        self_test(CausalForestModel(build(name).to(dtype), name))
    assert "tree" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_logits_that_are_no_numbers_are_told_as_such() -> None:
    """Guards "cannot hold a tree of tokens" for weights that are infinite."""
    model = build("llama")
    model.lm_head.weight.data[5, 5] = float("inf")
    with pytest.raises(
        UnsupportedModelError, match="LlamaForCausalLM gives logits that are no finite numbers: its weights"
    ):
        self_test(CausalForestModel(model, "llama"))


@pytest.mark.parametrize("moved", [True, False])
def test_a_node_that_rounding_alone_moves_is_no_fault_in_bfloat16(moved: bool) -> None:
    """Attention between two equals falls either way. Then the ordinary forward moves at this node too, where padded."""
    expected = torch.randn(12, 97, generator=torch.Generator().manual_seed(0))
    packed, padded = expected.clone(), expected.clone()
    packed[3] += 0.3 * torch.randn(97, generator=torch.Generator().manual_seed(1))
    if moved:
        padded[3] = packed[3]
    forest = CausalForestModel(build("llama").to(torch.bfloat16), "llama")
    if moved:
        assert selftest._checked(forest, packed, expected, lambda: padded, "slots").largest_error < 1e-6
    else:
        with pytest.raises(UnsupportedModelError, match="tree of tokens"):
            selftest._checked(forest, packed, expected, lambda: padded, "slots")


def ignore_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaskPlan, "seen", lambda self, kind, batch: batch.mask)


def windows_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(self, kind, batch):  # type: ignore[no-untyped-def]
        slot = torch.arange(batch.mask.shape[-1])
        return batch.mask & (batch.slots[:, :, None] - slot < self.window)

    monkeypatch.setattr(MaskPlan, "seen", seen)


def sees_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(self, kind, batch):  # type: ignore[no-untyped-def]
        return batch.slot_positions[:, None, :] <= batch.positions[:, :, None]

    monkeypatch.setattr(MaskPlan, "seen", seen)


def moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CausalForestModel, "move", lambda self, source, target, common_prefix: None)


@pytest.mark.parametrize("break_it", [ignore_windows, windows_by_slot, sees_siblings, moves_nothing])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_mutants_are_refused(break_it, dtype, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Guards the self-test itself: our own mistakes must fail it, in float32 with ten times the largest limit, too."""
    monkeypatch.setitem(LIMITS, torch.float32, 10 * CEILING)
    monkeypatch.setattr(verdicts, "CEILING", 10 * CEILING)
    forest = CausalForestModel(build("mistral window").to(dtype), "mutant")
    break_it(monkeypatch)
    with pytest.raises(UnsupportedModelError):
        self_test(forest)


def rough(bias: float = 8000.0) -> Any:
    """A model that adds a large number to all scores, which changes no weight but rounds them coarsely, as in Qwen2.5:
    a bias of the keys in what the positions hardly turn."""
    model = build("qwen2", rope_theta=1e9)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.view(-1, 8)[:, 3::4] = bias
    return model


def hides_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of the prompt, from all nodes after it."""
    whole = MaskPlan.seen

    def seen(self, kind, batch):  # type: ignore[no-untyped-def]
        hidden = (batch.slot_positions == 3)[:, None, :] & (batch.positions >= PROMPT)[:, :, None]
        return whole(self, kind, batch) & ~hidden

    monkeypatch.setattr(MaskPlan, "seen", seen)


def moves_one_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of the prompt is taken for the next one's place."""
    run = CausalForestModel._run

    def shifted(self, runner, batch):  # type: ignore[no-untyped-def]
        moved = batch.positions + (batch.positions == 3) * (batch.tokens.shape[1] > PROMPT)
        return run(self, runner, replace(batch, positions=moved))

    monkeypatch.setattr(CausalForestModel, "_run", shifted)


@pytest.mark.parametrize("break_it", [hides_one_token, moves_one_position, sees_siblings, moves_nothing])
@pytest.mark.parametrize("make", [rough, lambda: build("qwen2")], ids=["rough", "usual"])
def test_small_mutants_are_refused(break_it, make, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Guards the limit in float32 against being raised until it hides mistakes at a single token, whatever the model's
    own rounding; margin 10. In bfloat16 such a mistake is as small as rounding."""
    forest = CausalForestModel(make(), "mutant")
    break_it(monkeypatch)
    monkeypatch.setitem(LIMITS, torch.float32, 10 * LIMITS[torch.float32])
    monkeypatch.setattr(verdicts, "CEILING", 10 * CEILING)
    with pytest.raises(UnsupportedModelError):
        self_test(forest)


def test_a_model_may_round_as_coarsely_as_it_does_alone() -> None:
    """Guards checkpoints with large biases (Qwen2.5-Coder-0.5B): above the limit of the dtype, but no more than what
    padding moves in their ordinary forward."""
    report = self_test(CausalForestModel(rough(), "rough"))
    if report.median_error <= LIMITS[torch.float32]:  # Intel's products round less coarsely
        report = self_test(CausalForestModel(rough(80000.0), "rougher"))
    assert report.median_error > LIMITS[torch.float32]
    assert report.median_error < report.limit / 2 <= CEILING / 2


def test_leaves_no_memory() -> None:
    """Guards memory: the self-test's slots are given back."""
    forest = CausalForestModel(build("llama"), "llama")
    self_test(forest)
    assert forest._cache.slots == 0
    assert not forest._cache._slabs
