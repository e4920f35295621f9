"""What a grammar costs an iteration, and what its forced tokens save.

    python -m benchmarks.grammar --shape tinyllama-1.1b --dtype bfloat16 --num-beams 1,4

Three runs of the same prompts, interleaved: without a grammar; with one and no draft; with one and drafter grammar. All
plain beam search, so the first two run W nodes in every iteration and differ in the grammar alone. `in its calls` is
the part of the second run's iterations that the calls of the grammar take, waiting for masks included; it is measured
where a call ends when the work does, on the CPU. Steps per call and target calls depend on nothing but the seed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import markdown_table, numbers, publish, step_seconds, whole
from benchmarks.inflate import SHAPES
from benchmarks.speed import Bench, prepare
from dsbd_cli import Engine, MethodConfig, Request
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.engine.constraints.grammar import GrammarMasks, GrammarStep

SCHEMA = Path(__file__).parents[1] / "sample_inputs" / "query.schema.json"
PLAIN, HELD, FORCED = "no grammar", "grammar", "grammar, forced tokens drafted"


@dataclass(slots=True)
class Sums:
    """What the rounds of a run gave; counters are of the last round, because they are the same in all."""

    iteration_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    inside_ms: list[float] = field(default_factory=list)
    steps_per_call: float = 0.0
    target_calls: int = 0
    valid: float | None = None


class Inside:
    """Seconds in the grammar's own calls, of all engines."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for owner, name in ((GrammarStep, "step"), (GrammarStep, "of"), (GrammarMasks, "apply")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def once(engine: Engine, requests: list[Request], inside: Inside, sums: Sums) -> None:
    """One round of a run."""
    before, start = inside.seconds, time.perf_counter()
    steps, results = step_seconds(engine, requests)
    seconds, iterations = time.perf_counter() - start, len(steps)
    sums.iteration_ms.append(
        1e3 * sum(r.stats.target_s + r.stats.verify_s + r.stats.draft_s for r in results) / iterations
    )
    sums.inside_ms.append(1e3 * (inside.seconds - before) / iterations)
    sums.tokens_per_s.append(sum(r.hypotheses[0].num_tokens for r in results) / seconds)
    sums.target_calls = sum(r.stats.target_calls for r in results)
    sums.steps_per_call = sum(r.stats.steps for r in results) / sums.target_calls
    told = [r.hypotheses[0].valid for r in results]
    sums.valid = None if told[0] is None else sum(map(bool, told)) / len(told)


def measure(bench: Bench, beams: int, options: argparse.Namespace, inside: Inside) -> dict[str, Sums]:
    """All rounds at one W."""
    grammar = Grammar.json_schema(options.schema.read_text(encoding="utf-8"))
    plain = [
        replace(request, sampling=replace(request.sampling, max_new_tokens=options.new_tokens))
        for request in bench.requests
    ]
    held = [replace(request, grammar=grammar) for request in plain]
    drafting = MethodConfig(rule="search", num_beams=beams, drafter="grammar")
    search = MethodConfig(rule="search", num_beams=beams, depth=0)
    runs = {PLAIN: (search, plain), HELD: (search, held), FORCED: (drafting, held)}
    engines = {
        name: Engine(bench.target, None, bench.codec, method, batch_size=options.batch_size)
        for name, (method, _) in runs.items()
    }
    sums_by_run = {name: Sums() for name in runs}
    for round_ in range(options.rounds + 1):
        for name, (_, requests) in runs.items():
            sums = sums_by_run[name] if round_ else Sums()  # the first round warms up
            once(engines[name], requests, inside, sums)
    return sums_by_run


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a grammar, and what forced tokens save.")
    parser.add_argument("--shape", default="small", choices=["small", *SHAPES])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-beams", type=numbers, default=[1, 4])
    parser.add_argument("--requests", type=whole, default=6)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=whole, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: its own choice")
    parser.add_argument("--schema", type=Path, default=SCHEMA)
    parser.add_argument("--name", default="grammar")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    # no draft takes part, so its shape does not matter
    bench = prepare(options.shape, "small", getattr(torch, options.dtype), options.requests)
    inside, runs, rows = Inside(), [], []
    for beams in options.num_beams:
        sums_by_run = measure(bench, beams, options, inside)
        base = statistics.median(sums_by_run[PLAIN].iteration_ms)
        for name, sums in sums_by_run.items():
            taken, within = statistics.median(sums.iteration_ms), statistics.median(sums.inside_ms)
            runs.append({"num_beams": beams, "run": name, **{key: getattr(sums, key) for key in sums.__slots__}})
            rows.append(
                {
                    "run": f"W={beams}, {name}",
                    "ms per iteration": f"{taken:.2f}",
                    "against no grammar": "-" if name != HELD else f"{100 * (taken / base - 1):+.1f} %",
                    "in its calls": "-" if name == PLAIN else f"{100 * within / taken:.1f} %",
                    "steps per call": f"{sums.steps_per_call:.2f}",
                    "target calls": f"{sums.target_calls}",
                    "tokens/s": f"{statistics.median(sums.tokens_per_s):.1f}",
                    "valid": "-" if sums.valid is None else f"{100 * sums.valid:.0f} %",
                }
            )
    title = f"Grammars: {options.shape}, {options.dtype}, {options.requests} requests of {options.new_tokens} tokens"
    about = f"Medians of {options.rounds} interleaved rounds; schema {options.schema.name}."
    publish(options.name, runs, title, about, markdown_table(rows))


if __name__ == "__main__":
    main()
