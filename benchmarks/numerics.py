"""What it costs that no text depends on the draft or the batch: share of an iteration.

    python -m benchmarks.numerics --shape tinyllama-1.1b --dtype bfloat16

Every second forward of the target runs without `prompt_slots`, as with `--set numerics=fast`, so that both kinds meet
the same forests, lengths and disturbances. Compared are neighbours: a forward and the one after it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import markdown_table, numbers, publish, step_seconds, whole
from benchmarks.inflate import SHAPES
from benchmarks.speed import Bench, prepare
from dsbd_cli import Engine, MethodConfig
from dsbd_cli.engine.protocols import ForestInput


class InTurn:
    """A target whose forest forwards are timed, invariant and fast in turn; everything else is the model's."""

    invariant = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seconds: list[tuple[bool, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        if batch.prompt_slots is None or batch.chain:
            output: Tensor | None = self._model.forward(batch, logits=logits)
            return output
        fast = len(self.seconds) % 2 == 1
        start = time.perf_counter()
        output = self._model.forward(replace(batch, prompt_slots=None) if fast else batch, logits=logits)
        self.seconds.append((fast, time.perf_counter() - start))
        return output


def measure(bench: Bench, method: MethodConfig, batch_size: int) -> dict[str, float]:
    """Medians of one run: seconds of a forward of each kind, of what one costs more, and of an iteration."""
    target = InTurn(bench.target)
    engine = Engine(target, bench.draft if method.depth else None, bench.codec, method, batch_size=batch_size)
    iterations, _ = step_seconds(engine, bench.requests)
    kinds = {kind: [seconds for fast, seconds in target.seconds[4:] if fast is kind] for kind in (False, True)}
    pairs = list(zip(target.seconds[4:], target.seconds[5:], strict=False))
    more = [(b - a) if fast else (a - b) for (fast, a), (_, b) in pairs]
    fast_iterations = [whole for (fast, _), whole in zip(target.seconds, iterations, strict=True) if fast]
    return {
        "invariant_s": statistics.median(kinds[False]),
        "fast_s": statistics.median(kinds[True]),
        "more_s": statistics.median(more),
        "iteration_s": statistics.median(fast_iterations[2:]),
        "forwards": len(target.seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("small", *SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--draft-shape", choices=("small", *SHAPES), default="llama-68m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--requests", type=whole, default=4)
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--batch-size", type=numbers, default=[1, 4])
    parser.add_argument("--shapes", default="0x8,4x8", help="forests, depth x drafts per layer")
    parser.add_argument("--name", default="numerics")
    options = parser.parse_args()
    bench = prepare(options.shape, options.draft_shape, getattr(torch, options.dtype), options.requests)
    runs, rows = [], []
    for batch_size in options.batch_size:
        for depth, drafts in (tuple(map(int, item.split("x"))) for item in options.shapes.split(",")):
            method = MethodConfig(num_beams=options.num_beams, drafts_per_layer=drafts, depth=depth, width="fixed")
            run = measure(bench, method, batch_size)
            runs.append({**vars(options), "batch": batch_size, "D": depth, "K": drafts, **run})
            rows.append(
                {
                    "forest": f"D={depth}, K={drafts}" if depth else "no draft",
                    "batch": str(batch_size),
                    "forward, invariant": f"{run['invariant_s'] * 1e3:.1f} ms",
                    "forward, fast": f"{run['fast_s'] * 1e3:.1f} ms",
                    "more, neighbours": f"{run['more_s'] * 1e3:.2f} ms",
                    "of an iteration": f"{run['more_s'] / run['iteration_s']:.1%}",
                }
            )
            print(rows[-1], flush=True)
    title = f"Cost of invariant numerics: {options.shape}, W={options.num_beams}, {options.dtype}"
    publish(options.name, runs, title, "Medians of forwards in turn.", markdown_table(rows))


if __name__ == "__main__":
    main()
