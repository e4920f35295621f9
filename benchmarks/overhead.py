"""Share of an iteration spent outside model forwards, and how often the host is read.

    python -m benchmarks.overhead --shape tinyllama-1.1b --dtype bfloat16

An iteration's floor is T_target(N) + D * T_draft(K), each forward timed alone at the same shapes in the same run
(captured where the engine captures); overhead is what the engine's iterations take above it. On the CPU, where a
forward is over when its call returns, the share outside is also measured directly: what the calls of the iteration
leave of it. Reads of the host: the one of the counters, with which an iteration ends, and those that the profiler sees
within it. On a CPU that is one more: the kernel of attention lists the slots of the suffix and asks how many they are.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import markdown_table, numbers, publish, step_seconds, whole
from benchmarks.inflate import SHAPES
from benchmarks.speed import Bench, prepare
from dsbd_cli import Engine, MethodConfig
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.forest_model import BaseForestModel

REPEATS = 7  # of a forward
READS = ("aten::_local_scalar_dense", "aten::nonzero", "Memcpy DtoH (Device -> Pageable)")


class Stopwatch:
    """A model whose forward calls are timed; everything else is the model's."""

    def __init__(self, model: BaseForestModel) -> None:
        self._model, self.seconds = model, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._model.forward(*arguments, **named)
        finally:
            self.seconds += time.perf_counter() - start


def shares_outside(bench: Bench, method: MethodConfig, batch_size: int) -> list[float]:
    """Share of each iteration outside the models' forward calls. Only where a call ends when the work does: the CPU."""
    watched = [Stopwatch(bench.target)] + ([Stopwatch(bench.draft)] if method.depth else [])
    models: list[Any] = [*watched, None][:2]
    engine = Engine(models[0], models[1], bench.codec, method, batch_size=batch_size)
    shares: list[float] = []
    step = engine.stepper.step

    def timed(*arguments: Any) -> Any:
        inside, start = sum(model.seconds for model in watched), time.perf_counter()
        result = step(*arguments)
        whole = time.perf_counter() - start
        shares.append(1 - (sum(model.seconds for model in watched) - inside) / whole)
        return result

    engine.stepper.step = timed  # type: ignore[method-assign]
    list(engine.run(bench.requests))
    return shares[len(shares) // 4 :]


def iteration_times(bench: Bench, method: MethodConfig, batch_size: int) -> tuple[list[float], int]:
    """Seconds of iterations whose shape has been seen (no prefill), and the slots in use at their end."""
    draft = bench.draft if method.depth else None
    engine = Engine(bench.target, draft, bench.codec, method, batch_size=batch_size)
    seconds, results = step_seconds(engine, bench.requests)
    return seconds, max(result.stats.kv_peak_slots for result in results)


@torch.inference_mode()
def forward_times(model: BaseForestModel, rows: int, nodes: int, slots: int) -> float:
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
        for _ in range(REPEATS):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    seconds = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def reads_per_iteration(bench: Bench, method: MethodConfig, batch_size: int) -> dict[str, float]:
    """Reads of the host inside iterations, counted by the profiler."""
    draft = bench.draft if method.depth else None
    engine = Engine(bench.target, draft, bench.codec, method, batch_size=batch_size)
    step, counts, iterations = engine.stepper.step, dict.fromkeys(READS, 0), 0
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])

    def profiled(*arguments: Any) -> Any:
        nonlocal iterations
        if iterations >= 8:
            return step(*arguments)
        with profile(activities=activities) as seen:
            result = step(*arguments)
        iterations += 1
        for event in seen.key_averages():
            if event.key in counts:
                counts[event.key] += event.count
        return result

    engine.stepper.step = profiled  # type: ignore[method-assign]
    list(engine.run(bench.requests[:batch_size]))
    return {name: count / iterations for name, count in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Share of an iteration spent outside model forwards.")
    parser.add_argument("--shape", choices=("small", *SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--draft-shape", choices=("small", *SHAPES), default="llama-68m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--requests", type=whole, default=4)
    parser.add_argument("--rounds", type=whole, default=3)
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--batch-size", type=numbers, default=[1])
    parser.add_argument("--shapes", default="0x8,2x5,4x8", help="forests, depth x drafts per layer")
    parser.add_argument("--name", default="overhead")
    options = parser.parse_args()
    bench = prepare(options.shape, options.draft_shape, getattr(torch, options.dtype), options.requests)
    runs, rows = [], []
    shapes = [tuple(map(int, item.split("x"))) for item in options.shapes.split(",")]
    for batch_size, (depth, drafts), rule in itertools.product(options.batch_size, shapes, ("coupled", "rejection")):
        run = measure(
            bench,
            MethodConfig(rule, options.num_beams, drafts, depth, width="fixed"),
            batch_size,
            options.rounds,
        )  # type: ignore[arg-type]
        runs.append({**vars(options), **run})
        rows.append(
            {
                "method": f"{rule}, D={depth}, K={drafts}, batch {batch_size}",
                "iteration ms": f"{run['iteration_s'] * 1e3:.1f}",
                "forwards ms": f"{run['forwards_s'] * 1e3:.1f}",
                "above floor": f"{run['overhead']:.1%}",
                "outside forwards": "" if run["outside"] is None else f"{run['outside']:.1%}",
                "reads": f"{1 + sum(run['reads'].values()):.0f}",
            }
        )
        print(rows[-1], flush=True)
    about = (
        "Medians. reads: per iteration, one of the counters and those that the profiler sees (on a CPU one, of the "
        "kernel of attention)."
    )
    title = f"Overhead: {options.shape} with {options.draft_shape}, {options.dtype}"
    publish(options.name, runs, title, about, markdown_table(rows))


def measure(bench: Bench, method: MethodConfig, batch_size: int, rounds: int) -> dict[str, Any]:
    """Iterations and forwards in turn; medians."""
    iterations, targets, drafts, outside = [], [], [], list[float]()
    for _ in range(rounds):
        if bench.target.device.type == "cpu":
            outside += shares_outside(bench, method, batch_size)
        seconds, slots = iteration_times(bench, method, batch_size)
        iterations.append(statistics.median(seconds[len(seconds) // 4 :]))
        nodes = method.num_beams + method.depth * method.drafts_per_layer
        targets.append(forward_times(bench.target, batch_size, nodes, slots))
        if method.depth:
            first = forward_times(bench.draft, batch_size, 2 * method.num_beams, slots)
            layer = forward_times(bench.draft, batch_size, method.drafts_per_layer, slots)
            drafts.append(first + (method.depth - 1) * layer)
    iteration = statistics.median(iterations)
    forwards = statistics.median(targets) + (statistics.median(drafts) if drafts else 0.0)
    return {
        "rule": method.rule,
        "depth": method.depth,
        "drafts_per_layer": method.drafts_per_layer,
        "batch": batch_size,
        "iteration_s": iteration,
        "forwards_s": forwards,
        "overhead": 1 - forwards / iteration,
        "outside": statistics.median(outside) if outside else None,
        "reads": reads_per_iteration(bench, method, batch_size),
    }


if __name__ == "__main__":
    main()
