"""T(N): measured forwards at several node counts, as the engine would run them, and their roofline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from dsbd_cli.engine.core.protocols import ForestInput, ForestModel
from dsbd_cli.engine.models.sizes import ModelSize
from dsbd_cli.lab.profiling.machine import MachineRates
from dsbd_cli.lab.profiling.timers import synchronise
from dsbd_cli.lab.reports.profile_data import CurvePoint, Spread, spread_of

__all__ = ["MIN_ROUNDS", "WARM_UP", "forest_input", "measure_forwards", "node_counts", "one_forward", "points_of"]

WARM_UP = 3  # a shape runs plainly twice, and is recorded in its third run on a CPU
MIN_ROUNDS = 3


def node_counts(*wanted: int) -> list[int]:
    """The wanted counts and a ladder below the largest of them."""
    top = max(wanted)
    ladder = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    return sorted({count for count in (*wanted, *ladder) if 0 < count <= top})


def forest_input(model: ForestModel, rows: int, slots: int, nodes: int) -> ForestInput:
    """Nodes at the end of `slots` active ones, all of which they see."""
    device = model.device
    tokens = (torch.arange(rows * nodes, device=device) * 7919 % model.vocab_size).view(rows, nodes)
    at = torch.arange(slots - nodes, slots, device=device).expand(rows, nodes)
    positions = torch.arange(slots, device=device).clamp(max=(model.max_positions or slots) - 1).expand(rows, slots)
    mask = torch.ones(rows, nodes, slots, dtype=torch.bool, device=device)
    return ForestInput(tokens, positions.gather(1, at), at.contiguous(), mask, positions)


@torch.inference_mode()
def one_forward(model: ForestModel, slots: int, nodes: int, clock: Callable[[], float]) -> float:
    """Seconds of one forward of one row with logits, after one to warm up: enough to plan by."""
    model.release()
    model.reserve(1, slots + 1)
    batch = forest_input(model, 1, slots, nodes)
    start = 0.0
    for _ in range(2):
        synchronise(model.device)
        start = clock()
        model.forward(batch)
        synchronise(model.device)
    seconds = clock() - start
    model.release()
    return seconds


@torch.inference_mode()
def measure_forwards(
    model: ForestModel,
    rows: int,
    slots: int,
    counts: Sequence[int],
    *,
    rounds: int,
    budget_s: float,
    warm_up: int = WARM_UP,
    least: int = MIN_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
    check: Callable[[], None] = lambda: None,
) -> list[tuple[int, Spread]]:
    """Seconds of forwards with logits, by node count; rounds go through all counts in turn, so that a drift of the
    machine meets all of them. After `least` rounds the budget ends it. check: is called before each forward and raises
    what shall end it at once."""
    model.release()
    model.reserve(rows, slots + 1)
    batches = [forest_input(model, rows, slots, count) for count in counts]
    seconds: list[list[float]] = [[] for _ in counts]
    began = clock()
    for number in range(warm_up + max(rounds, least)):
        for place, batch in enumerate(batches):
            check()
            synchronise(model.device)
            start = time.perf_counter()
            model.forward(batch)
            synchronise(model.device)
            if number >= warm_up:
                seconds[place].append(time.perf_counter() - start)
        if clock() - began > budget_s and number + 1 >= warm_up + least:
            break
    model.release()
    return [(count, spread_of(values)) for count, values in zip(counts, seconds, strict=True)]


def points_of(
    measured: Sequence[tuple[int, Spread]],
    rows: int,
    slots: int,
    kv_bytes_per_slot: int,
    size: ModelSize | None,
    rates: MachineRates | None,
) -> tuple[CurvePoint, ...]:
    """Each measured forward beside the larger of two floors: bytes that must move (weights and the rows' active keys
    and values) at the copy rate, and operations of the weights at the matmul rate."""
    if size is None or rates is None:
        return tuple(CurvePoint(nodes, seconds, None, None) for nodes, seconds in measured)
    memory = (size.read_bytes + rows * slots * kv_bytes_per_slot) / rates.copy_bytes_per_s
    points = []
    for nodes, seconds in measured:
        arithmetic = size.flops_per_node * nodes * rows / rates.matmul_flops_per_s
        points.append(
            CurvePoint(nodes, seconds, max(memory, arithmetic), "memory" if memory >= arithmetic else "arithmetic")
        )
    return tuple(points)
