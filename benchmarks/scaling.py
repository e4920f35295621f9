"""Time of forwards against nodes, rows and slots, and of a long prompt.

    python -m benchmarks.scaling --shape tinyllama-1.1b --dtype bfloat16

A prompt takes time to be read, and in every iteration behind it.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import torch

from benchmarks.common import markdown_table, numbers, publish
from benchmarks.forwards import forward_times
from benchmarks.inflate import SHAPES
from benchmarks.speed import Bench, prepare
from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig


def forwards(bench: Bench, nodes: list[int], rows: list[int], slots: list[int]) -> list[dict[str, Any]]:
    """Forward times along each axis from one point, both models, in turn."""
    points = [(1, n, 160) for n in nodes] + [(r, 36, 160) for r in rows] + [(1, 36, s) for s in slots]
    points = list(dict.fromkeys(points))
    found: dict[tuple[str, tuple[int, int, int]], list[float]] = {}
    for _ in range(3):
        for point in points:
            for role, model in (("target", bench.target), ("draft", bench.draft)):
                found.setdefault((role, point), []).append(forward_times(model, *point, repeats=3))
    return [
        {"model": role, "rows": r, "nodes": n, "slots": s, "seconds": statistics.median(times)}
        for (role, (r, n, s)), times in found.items()
    ]


def prompts(bench: Bench, lengths: list[int]) -> list[dict[str, Any]]:
    """One request with a prompt of so many tokens, W=4: what reading it takes, what an iteration takes behind it."""
    for model in (bench.target, bench.draft):
        decoder = model.decoder  # cost only: what comes out means nothing
        decoder.spec = replace(decoder.spec, positions=2 * max(lengths))
    found = []
    words = [token for request in bench.requests for token in bench.codec.encode(str(request.prompt))]
    for length in lengths:
        ids = tuple((words * (length // len(words) + 1))[:length])
        for depth, drafts in ((0, 8), (2, 5)):
            method = MethodConfig(num_beams=4, drafts_per_layer=drafts, depth=depth)
            engine = Engine(bench.target, bench.draft if depth else None, bench.codec, method, batch_size=1)
            engine.stepper.endings.eos.zero_()
            [result] = engine.run([Request(id="p", seed=1, prompt_ids=ids, sampling=SamplingConfig(max_new_tokens=24))])
            stats = result.stats
            busy = stats.draft_s + stats.target_s + stats.verify_s
            found.append(
                {
                    "prompt": length,
                    "D": depth,
                    "K": drafts,
                    "read_s": stats.total_s - busy,
                    "iteration_ms": busy / stats.target_calls * 1e3,
                    "steps_per_call": stats.steps / stats.target_calls,
                    "peak_slots": stats.kv_peak_slots,
                    "ratio": stats.kv_peak_slots / (length + 24),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="How an iteration scales.")
    parser.add_argument("--shape", choices=("small", *SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--draft-shape", choices=("small", *SHAPES), default="llama-68m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--nodes", type=numbers, default=[1, 2, 4, 8, 12, 20, 36, 52, 100])
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--slots", type=numbers, default=[160, 1024, 4096])
    parser.add_argument("--prompts", type=numbers, default=[256, 4096])
    parser.add_argument("--parts", default="forwards,prompts")
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    wanted, runs, parts = options.parts.split(","), list[dict[str, Any]](), list[str]()
    bench = prepare(options.shape, options.draft_shape, getattr(torch, options.dtype), 2)
    if "forwards" in wanted:
        found = forwards(bench, options.nodes, options.rows, options.slots)
        read = {role: model.size.read_bytes for role, model in (("target", bench.target), ("draft", bench.draft))}
        runs += [{"part": "forwards", "weight_bytes": read[item["model"]], **item} for item in found]
        table = markdown_table(
            [
                {
                    "model": item["model"],
                    "rows": str(item["rows"]),
                    "nodes": str(item["nodes"]),
                    "slots": str(item["slots"]),
                    "ms": f"{item['seconds'] * 1e3:.1f}",
                    "GB/s": f"{read[item['model']] / item['seconds'] / 1e9:.1f}",
                }
                for item in found
            ]
        )
        parts += ["## Forwards", "GB/s: weight bytes over time.", table]
    if "prompts" in wanted:
        found = prompts(bench, options.prompts)
        runs += [{"part": "prompts", **item} for item in found]
        rows = [{key: f"{v:.2f}" if isinstance(v, float) else str(v) for key, v in item.items()} for item in found]
        parts += ["## One request with a long prompt, W=4", "read_s: the prompt into the caches.", markdown_table(rows)]
    name = options.name or f"scaling-{options.shape}-{options.dtype}"
    publish(name, runs, f"Scaling: {options.shape}, {options.dtype}", "", *parts)


if __name__ == "__main__":
    main()
