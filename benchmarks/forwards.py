"""Time of one forward over a packed forest, alone: by nodes, rows and slots."""

from __future__ import annotations

import statistics
import time

import torch

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.forest_model import BaseForestModel

__all__ = ["forward_times"]


@torch.inference_mode()
def forward_times(model: BaseForestModel, rows: int, nodes: int, slots: int, repeats: int = 7) -> float:
    """Median seconds of a forward over `nodes` nodes in each of `rows` rows that see `slots` slots; captured as a CUDA
    graph on a GPU."""
    device = model.device
    slots = max(slots, nodes + 1)
    model.reserve(rows, slots + 1)
    at = torch.arange(slots - nodes, slots, device=device).expand(rows, nodes)
    batch = ForestInput(
        tokens=torch.randint(5, 1000, (rows, nodes), device=device),
        positions=at,
        slots=at,
        mask=torch.ones(rows, nodes, slots, dtype=torch.bool, device=device),
        slot_positions=torch.arange(slots, device=device).expand(rows, slots),
    )

    def run() -> None:
        model.forward(batch)

    for _ in range(2):
        run()
    if device.type != "cuda":
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    seconds = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)
