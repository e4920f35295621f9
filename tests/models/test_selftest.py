"""The self-test accepts what can hold a tree and refuses what cannot, loudly or silently."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.engine.models.adapter import MaskPlan
from dsbd_cli.engine.models.causal import CausalForestModel
from dsbd_cli.engine.models.selftest import LIMITS, self_test
from dsbd_cli.errors import UnsupportedModelError
from tests.models.tiny import FIT, UNFIT, build


@pytest.mark.parametrize("name", FIT)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
def test_accepts(name: str, dtype: torch.dtype) -> None:
    """Guards false alarms in every dtype, for random weights much larger than usual. Margin 2, and 20 in float32, where
    real checkpoints round worse."""
    report = self_test(CausalForestModel(build(name).to(dtype), name))
    assert report.median_error < report.limit / (20 if dtype == torch.float32 else 2)


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_refuses(name: str, dtype: torch.dtype) -> None:
    """Guards silent failures (biases and windows by slot) and foreign exceptions: one line that says what is wrong."""
    with pytest.raises(UnsupportedModelError) as caught:
        self_test(CausalForestModel(build(name).to(dtype), name))
    assert "tree" in str(caught.value)
    assert "\n" not in str(caught.value)


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
    monkeypatch.setattr(CausalForestModel, "move", lambda self, source, target, trunk: None)


@pytest.mark.parametrize("break_it", [ignore_windows, windows_by_slot, sees_siblings, moves_nothing])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_mutants_are_refused(break_it, dtype, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Guards the self-test itself: our own mistakes must fail it, in float32 with a limit ten times as high, too."""
    monkeypatch.setitem(LIMITS, torch.float32, 10 * LIMITS[torch.float32])
    forest = CausalForestModel(build("mistral window").to(dtype), "mutant")
    break_it(monkeypatch)
    with pytest.raises(UnsupportedModelError):
        self_test(forest)


def test_leaves_no_memory() -> None:
    """Guards memory: the self-test's slots are given back."""
    forest = CausalForestModel(build("llama"), "llama")
    self_test(forest)
    assert forest._cache.slots == 0
    assert not forest._cache._slabs
