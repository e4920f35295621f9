"""Tensor operations of one iteration, counted at dispatch: what is launched on a GPU, and what a CPU pays for calls.

    python -m benchmarks.operations --rules coupled,search,rejection

Views launch nothing and are counted apart. Counts, not times: they do not depend on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import markdown_table, publish
from dsbd_cli import MethodConfig, ModelSpec, Request, SamplingConfig, load
from dsbd_cli.config.model import BUILTIN_TARGET
from dsbd_cli.ops.select import ITERATION_KERNELS
from training.tasks import GENERATORS

SKIPPED = 2  # first iterations, which set things up
FORWARD = "models/forest_model.py"  # whose `forward` is every model's
VIEWS = frozenset(
    "alias as_strided detach empty empty_like empty_strided expand flatten permute reshape select slice split "
    "split_with_sizes squeeze t transpose unbind unflatten unsqueeze view _unsafe_view _reshape_alias".split()
)


class Counting(TorchDispatchMode):
    """Counts operations by who launches them: a model's forward, or a function of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards, self.views, self.outside = 0, 0, Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        frames = list(_frames(sys._getframe(1)))
        if any(file.endswith(FORWARD) and name == "forward" for file, name in frames):
            self.forwards += operation.overloadpacket.__name__ not in VIEWS
        elif operation.overloadpacket.__name__ in VIEWS:
            self.views += 1
        else:
            file, name = frames[0] if frames else ("", "elsewhere")
            self.outside[f"{file} {name}"] += 1
        return operation(*arguments, **(named or {}))


def _frames(frame: FrameType | None) -> Any:
    """File (below dsbd_cli) and function of every caller in the package, the innermost first."""
    while frame is not None:
        _, separator, file = frame.f_code.co_filename.rpartition("dsbd_cli/")
        if separator:
            yield file, frame.f_code.co_name
        frame = frame.f_back


def count(method: MethodConfig, iterations: int, *, kernels: bool = False) -> list[Counting]:
    """One count per iteration, of a request of the SQL task answered by the built-in pair. On the CPU: a replayed graph
    dispatches nothing. kernels: those of an iteration serve where they can; without them it is tensor code."""
    engine, seen, counts = (
        load(ModelSpec(BUILTIN_TARGET, device="cpu"), method=method, batch_size=1),
        0,
        list[Counting](),
    )
    if not kernels:
        engine.stepper.ops = engine.stepper.ops.without(*ITERATION_KERNELS)
    step = engine.stepper.step

    def counted(*arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        if not SKIPPED < seen <= SKIPPED + iterations:
            return step(*arguments)
        counts.append(Counting())
        with counts[-1]:
            return step(*arguments)

    engine.stepper.step = counted  # type: ignore[method-assign]
    record = next(iter(itertools.islice(GENERATORS["sql"].records("test", 1), 1)))
    list(engine.run([Request(id="0", seed=0, prompt=record.prompt, sampling=SamplingConfig(max_new_tokens=48))]))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Tensor operations of one iteration.")
    parser.add_argument("--rules", default="coupled,search,rejection")
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--drafts-per-layer", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--functions", type=int, default=0, help="also list so many functions with the most")
    parser.add_argument("--name", default="operations")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs, rows = [], []
    for rule in options.rules.split(","):
        method = MethodConfig(rule, options.num_beams, options.drafts_per_layer, options.depth, width="fixed")
        counts = count(method, options.iterations)
        outside, views, forwards = (
            statistics.median(value)
            for value in zip(*((c.outside.total(), c.views, c.forwards) for c in counts), strict=True)
        )
        most = dict(counts[-1].outside.most_common())
        runs.append({**vars(options), "rule": rule, "outside": outside, "views": views, "functions": most})
        rows.append(
            {
                "rule": rule,
                "operations outside the forwards": f"{outside:.0f}",
                "views": f"{views:.0f}",
                "in the forwards of the built-in pair": f"{forwards:.0f}",
            }
        )
        for name, launched in itertools.islice(most.items(), options.functions):
            print(f"{launched:6d} {name}")
    title = f"Operations of one iteration: W={options.num_beams}, K={options.drafts_per_layer}, D={options.depth}"
    publish(options.name, runs, title, f"Medians of {options.iterations} iterations.", markdown_table(rows))


if __name__ == "__main__":
    main()
