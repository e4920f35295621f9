"""Batches of rows, and which share of the products that the processor could make they reach.

    python -m benchmarks.full_batches --target models/qwen2.5-coder-1.5b-instruct

The limit is the rate of the same kernels on one product whose weights stay in the cache (PEAK rows of PEAK x PEAK).
`share` is the rate of the whole run by that: the multiplications that its prompts and its beams need, by its seconds
and by the limit. Prompts have 50 tokens and answers 64, all different; beam search without a draft.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import device_name, markdown_table, results_folder, write_results
from benchmarks.evidence import Cell, prompts, take
from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.load_model import load_model
from dsbd_cli.ops import reference
from dsbd_cli.ops.cpu import int8, linear

PEAK, PEAK_ROWS = 1536, 512
LENGTH, TOKENS = 50, 64
FORMATS = ("int8", "bfloat16")


def product(name: str) -> Callable[[Tensor], Tensor]:
    """Return the product of a format, of PEAK x PEAK."""
    weight = torch.randn(PEAK, PEAK).bfloat16()
    if name == "bfloat16":
        made = linear.CompiledLinear([weight])
        return lambda x: made(x, None)
    return int8.CompiledInt8([weight], torch.arange(reference.OUTLIERS), torch.zeros(PEAK), lambda *_: None)


@torch.inference_mode()
def limit(name: str, rounds: int = 40) -> float:
    """Return multiplications a second of the kernels of a format at their best."""
    compute, x, best = product(name), torch.randn(PEAK_ROWS, PEAK).bfloat16(), float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        compute(x)
        best = min(best, time.perf_counter() - start)
    return PEAK_ROWS * PEAK**2 / best


def answer(model: Any, codec: Any, beams: int, ids: list[list[int]]) -> float:
    """Return the seconds of all answers, decoded together."""
    engine = Engine(model, None, codec, MethodConfig(num_beams=beams, rule="search"), batch_size=len(ids))
    sampling = SamplingConfig(max_new_tokens=TOKENS, token_rules=f"none,min_new_tokens={TOKENS}")
    requests = [Request(prompt_ids=tuple(prompt), sampling=sampling) for prompt in ids]
    start = time.perf_counter()
    results = list(engine.run(requests))
    seconds = time.perf_counter() - start
    assert all(result.hypotheses[0].num_tokens == TOKENS for result in results)
    return seconds


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--rows", default="8,16,32,64")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--name", default="full-batches", help="folder of the results")
    options = parser.parse_args()
    runs, table, source = list[dict[str, Any]](), list[dict[str, str]](), prompts(options.target)
    for name in FORMATS:
        quantize = "int8" if name == "int8" else None
        model, codec, _ = load_model(
            Checkpoint.open(ModelSpec(str(options.target), device="cpu", dtype="bfloat16", quantize=quantize))
        )
        each = model.size.flops_per_node / 2
        head = model.vocab_size * model.hidden_size
        for rows in map(int, options.rows.split(",")):
            shares, speeds = [], []
            for _ in range(options.rounds):
                best = limit(name)
                ids = take(source, Cell(options.beams, rows, LENGTH, TOKENS, 1))
                seconds = answer(model, codec, options.beams, ids)
                products = rows * ((LENGTH - 1) * (each - head) + (1 + (TOKENS - 1) * options.beams) * each)
                run = {"format": name, "rows": rows, "seconds": seconds, "limit": best, "products": products}
                runs.append(run)
                shares.append(products / seconds / best)
                speeds.append(rows * TOKENS / seconds)
            table.append({
                "format": name, "rows": str(rows), "tokens/s": f"{statistics.median(speeds):.1f}",
                "limit, 1e9 products/s": f"{best / 1e9:.0f}", "share": f"{statistics.median(shares):.0%}",
            })  # fmt: skip
            report = f"# Full batches\n\n{device_name()}, {options.target.name}, {options.beams} beams\n\n"
            write_results(results_folder(options.name), runs, report + markdown_table(table))
            print(table[-1], flush=True)
        del model


if __name__ == "__main__":
    main()
