"""One place says what serves an operation, and why. Guards a report that names something else than what runs."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from dsbd_cli.engine.iteration.devices import iteration_ops
from dsbd_cli.ops import reference
from dsbd_cli.ops.interface import OpChoice, Ops
from dsbd_cli.ops.select import DECODER, ITERATION, TABLE, TRITON, ops_for, packed_linear
from tests.helpers.kernels import CPU, refuse, replaced, serves

EVERY = (*dict.fromkeys((*DECODER, *ITERATION, *TRITON, *(kernel.name for kernel in TABLE))),)


def test_every_operation_has_a_name_and_plain_torch_serves_what_is_not_asked_for() -> None:
    assert {*EVERY} == {item.name for item in fields(Ops)} - {"report"}
    assert ops_for(CPU, torch.float32, ()) == Ops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_report_says_what_serves(dtype: torch.dtype) -> None:
    """Each operation once; by torch exactly where the reference stands, but for products, which torch packs, too."""
    ops, plain = ops_for(CPU, dtype, EVERY, widths=frozenset({64})), Ops()
    assert [choice.op for choice in ops.report] == [*EVERY]
    for choice in ops.report:
        same = getattr(ops, choice.op) is getattr(plain, choice.op)
        assert choice.reason
        assert choice.op == "linear" or same == (choice.backend == "torch"), choice
    assert ops.linear is packed_linear
    assert set(ops.by("torch")) >= {"move", "attention"}
    for name in ("candidates", "draft", "verify", "commit"):
        assert (name in ops.by("numba")) == serves(name)


def test_a_kernel_that_cannot_be_loaded_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with replaced(monkeypatch, "log_total", load=refuse):
        selected = ops_for(CPU, torch.float32, ("log_total",))
    (choice,) = selected.report
    assert (choice.op, choice.backend) == ("log_total", "torch")
    assert "numba" in choice.reason.lower()
    assert selected.log_total is reference.log_total


@pytest.mark.skipif(not serves("norm"), reason="kernels of numba do not run here")
def test_an_operation_that_is_left_out_is_plain_torch_from_then_on() -> None:
    selected = ops_for(CPU, torch.float32, ("norm", "gated"), widths=frozenset({64}))
    left = selected.without("norm", "verify", reason="it fails")
    assert left.norm is reference.norm
    assert left.gated is selected.gated
    assert left.report[0] == OpChoice("norm", "torch", "it fails")
    assert left.without("norm") is left


def test_kernels_of_a_gpu_are_told_to_be_missing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ops_for.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    report = {choice.op: choice for choice in iteration_ops(CPU, None).report}
    assert [*report] == [*ITERATION]
    assert {choice.backend for choice in report.values()} <= {"torch", "numba"}
    assert report["move"].backend == "torch"
    assert report["move"].reason in ("triton does not run on cpu", "the package triton is missing")
    (move,) = (choice for choice in iteration_ops(CPU, False).report if choice.op == "move")
    assert move.reason == "not wanted"
