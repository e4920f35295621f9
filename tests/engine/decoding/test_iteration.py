"""An iteration taken phase by phase: what each leaves for the next one, and what comes back to the host."""

from __future__ import annotations

import copy

import pytest
import torch

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.checks.kernels import HISTORY, VOCABULARY, IterationCase
from dsbd_cli.engine.core.report import LayerCounters, RowCounters
from dsbd_cli.engine.iteration.cuda_graphs import shapes
from dsbd_cli.engine.iteration.stepper import read_report


def case(rule: str, *, roots: int = 3) -> IterationCase:
    method = MethodConfig.of({"rule": rule, "num_beams": 3, "drafts_per_layer": 4, "depth": 2, "width": "fixed"})
    sampling = SamplingConfig(max_new_tokens=HISTORY, top_k=0 if rule == "search" else 5)
    generator = torch.Generator().manual_seed(3)
    return IterationCase.random(method, sampling, generator, torch.device("cpu"), roots=roots, draft_backlog=0)


@pytest.mark.parametrize("rule", ["coupled", "search", "rejection"])
def test_the_phases_in_turn_are_a_step(rule: str) -> None:
    """Guards a beam that changes before the commit, and a phase that reads what a later one makes."""
    made = case(rule)
    state = copy.deepcopy(made.state)
    iteration = made.stepper().begin(state, made.shape)
    before = [getattr(state.beams, name) for name in ("token", "valid", "length", "history", "ancestors")]
    iteration.draft()
    assert iteration.forest.depth == made.shape.depth
    assert iteration.forest.flat.token.shape == (state.rows, made.shape.nodes)
    iteration.target()
    assert iteration.logits.shape == (state.rows, made.shape.nodes, VOCABULARY)
    iteration.verify()
    now = [getattr(state.beams, name) for name in ("token", "valid", "length", "history", "ancestors")]
    assert all(tensor is other for tensor, other in zip(before, now, strict=True))
    iteration.commit()
    report = read_report(iteration.report.counters, iteration.report.draft_calls)
    other = copy.deepcopy(made.state)
    assert made.stepper().step(other, made.shape) == report
    assert shapes(other) == shapes(state)
    assert torch.equal(other.beams.token, state.beams.token)
    assert torch.equal(other.table.used, state.table.used)


def test_the_report_has_a_line_per_row_and_layer() -> None:
    made = case("coupled", roots=1)
    report = made.stepper().step(copy.deepcopy(made.state), made.shape)
    assert len(report.rows) == made.state.rows
    assert {len(layers) for layers in report.layers} == {made.shape.depth}
    assert report.draft_calls == made.shape.depth
    for row, layers in zip(report.rows, report.layers, strict=True):
        passed = [layer.passed for layer in layers]
        assert row.steps <= 1 + sum(passed)
        assert all(layer.accepted <= layer.drafted for layer in layers)
        assert row.common_prefix <= row.used
    assert any(row.steps for row in report.rows)


def test_counters_are_read_in_the_order_in_which_they_are_packed() -> None:
    """Fields of a row, then of its layers from the first one down."""
    size = len(RowCounters._fields) + 2 * len(LayerCounters._fields)
    report = read_report(torch.arange(2 * size).view(2, size), 5)
    assert report.rows[1] == RowCounters(*range(size, size + 7))
    assert report.layers[1] == [LayerCounters(*range(size + 7, size + 16)), LayerCounters(*range(size + 16, size + 25))]
    assert report.draft_calls == 5
