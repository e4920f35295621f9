"""Tokens per second of delivered best-beam text, method by method, interleaved.

    python -m benchmarks.speed --shape tinyllama-1.1b --draft-shape llama-68m --dtype bfloat16 --requests 8 --rounds 3

The models are the built-in pair inflated to the given shapes (benchmarks/inflate.py): shapes, cost and acceptance are
real, weights are
not. Every round runs every method once on the same requests, in turn, so that a drift of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import environment, markdown_table, results_folder, write_results
from benchmarks.inflate import SHAPES, inflate
from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.config import ModelSpec
from dsbd_cli.models.adapter import CausalForestModel
from dsbd_cli.models.loader import eos_ids, load_tokenizer
from dsbd_cli.models.registry import resolve
from dsbd_cli.models.tokenize import HFCodec
from dsbd_cli.requests import derive_seed
from dsbd_cli.tasks import TASKS

NEW_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Outcome:
    """One method on all requests: seconds, tokens of the best texts, steps per target call (None for others' code)."""

    seconds: float
    tokens: int
    steps_per_call: float | None


@dataclass(frozen=True, slots=True)
class Bench:
    """Models and requests that all methods share."""

    target: CausalForestModel
    draft: CausalForestModel
    codec: HFCodec
    requests: tuple[Request, ...]

    def ours(self, method: MethodConfig, batch_size: int) -> Callable[[], Outcome]:
        """Our engine."""
        engine = Engine(self.target, self.draft if method.depth else None, self.codec, method, batch_size=batch_size)

        def run() -> Outcome:
            start = time.perf_counter()
            results = list(engine.run(self.requests))
            seconds = time.perf_counter() - start
            tokens = sum(result.hypotheses[0].num_tokens for result in results)
            calls = sum(result.stats.target_calls for result in results)
            return Outcome(seconds, tokens, sum(result.stats.steps for result in results) / calls)

        return run

    def theirs(self, beams: int, sample: bool) -> Callable[[], Outcome]:
        """transformers' generate, one request at a time."""
        model: Any = self.target.module
        settings = {"do_sample": True, "top_k": 50, "temperature": 1.0} if sample else {"do_sample": False}
        prompts = [torch.tensor([self.codec.encode(request.prompt or "")]) for request in self.requests]

        def run() -> Outcome:
            tokens = 0
            start = time.perf_counter()
            for prompt in prompts:
                out = model.generate(
                    prompt.to(model.device),
                    attention_mask=torch.ones_like(prompt).to(model.device),
                    num_beams=beams,
                    max_new_tokens=NEW_TOKENS,
                    **settings,
                )
                tokens += _length(out[0, prompt.shape[1] :].tolist(), self.codec.eos_ids)
            return Outcome(time.perf_counter() - start, tokens, None)

        return run


def _length(row: list[int], eos: tuple[int, ...]) -> int:
    """Tokens up to and with the first end token."""
    return next((i + 1 for i, token in enumerate(row) if token in eos), len(row))


def prepare(shape: str, draft_shape: str, dtype: torch.dtype, count: int) -> Bench:
    """Inflate the pair and take `count` test records, half of each task."""
    models = []
    for role, name in (("target", shape), ("draft", draft_shape)):
        folder = resolve(f"builtin:{role}").path
        small = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        large = small if name == "small" else inflate(small, SHAPES[name], dtype)
        models.append(large.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False))
    tokenizer = load_tokenizer(resolve("builtin:target").path, ModelSpec("builtin:target"))
    codec = HFCodec(tokenizer, eos_ids(models[0], tokenizer))
    forests = [CausalForestModel(model, name) for model, name in zip(models, (shape, draft_shape), strict=True)]
    records = [r for task in TASKS.values() for r in itertools.islice(task.records("test", 1), count // 2)]
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS)
    requests = tuple(Request(r.id, derive_seed(0, r.id), prompt=r.prompt, sampling=sampling) for r in records)
    return Bench(forests[0], forests[1], codec, requests)


def methods(bench: Bench, beams: int, batch_size: int, drafts: int, depth: int) -> dict[str, Callable[[], Outcome]]:
    """What is compared, by name; the first two are what ratios are taken to."""

    def ours(**settings: Any) -> Callable[[], Outcome]:
        return bench.ours(MethodConfig(num_beams=beams, **settings), batch_size)

    drafted = {"drafts_per_layer": drafts, "depth": depth}
    return {
        "transformers beam sampling": bench.theirs(beams, sample=True),
        "transformers beam search": bench.theirs(beams, sample=False),
        "dsbd, no draft: coupled": ours(depth=0),
        "dsbd, no draft: search": ours(rule="search", depth=0),
        "dsbd coupled": ours(**drafted),
        "dsbd search": ours(rule="search", **drafted),
        "dsbd rejection": ours(rule="rejection", **drafted),
        "dsbd coupled, threshold": ours(width="threshold", **drafted),
        "dsbd rejection, threshold": ours(rule="rejection", width="threshold", **drafted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of methods on the built-in pair in a larger shape.")
    parser.add_argument("--shape", choices=("small", *SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--draft-shape", choices=("small", *SHAPES), default="llama-68m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--drafts-per-layer", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1)
    options = parser.parse_args()
    bench = prepare(options.shape, options.draft_shape, getattr(torch, options.dtype), options.requests)
    runners = methods(bench, options.num_beams, options.batch_size, options.drafts_per_layer, options.depth)
    rounds: dict[str, list[Outcome]] = {name: [] for name in runners}
    for number in range(options.rounds):
        for name, runner in runners.items():
            rounds[name].append(runner())
            last = rounds[name][-1]
            print(f"round {number + 1}: {name}: {last.tokens / last.seconds:.2f} tokens/s", flush=True)
    report(rounds, vars(options))


def report(rounds: dict[str, list[Outcome]], options: dict[str, Any]) -> None:
    """Medians over rounds; ratios are taken within a round."""
    speed = {name: [o.tokens / o.seconds for o in outcomes] for name, outcomes in rounds.items()}
    rows, runs = [], []
    for name, outcomes in rounds.items():
        mine = speed[name]
        partner = "search" if "search" in name else "sampling" if "transformers" in name else "coupled"
        other = "transformers beam search" if partner == "search" else "transformers beam sampling"
        plain = "dsbd, no draft: search" if partner == "search" else "dsbd, no draft: coupled"
        ratios = {
            against: statistics.median(a / b for a, b in zip(mine, speed[against], strict=True))
            for against in (other, plain)
        }
        steps = outcomes[0].steps_per_call
        runs.append({"name": name, "tokens_per_s": mine, "steps_per_call": steps, "ratios": ratios, **options})
        rows.append(
            {
                "method": name,
                "tokens/s": f"{statistics.median(mine):.2f}",
                "spread": f"{min(mine):.2f}-{max(mine):.2f}",
                "steps/call": "" if steps is None else f"{steps:.2f}",
                "vs transformers": f"{ratios[other]:.2f}x",
                "vs no draft": f"{ratios[plain]:.2f}x",
            }
        )
    env = environment()
    text = (
        f"# Speed: {options['shape']} with {options['draft_shape']}, {options['dtype']}\n\n"
        f"`{env['command']}` on {env['device']}, commit {env['commit']}. Shapes, cost and acceptance "
        "are real, weights are not: the built-in pair, inflated. Search is compared with search, sampling with "
        "sampling.\n\n"
    )
    write_results(results_folder(f"speed-{options['shape']}-{options['dtype']}"), runs, text + markdown_table(rows))
    print(text + markdown_table(rows))


if __name__ == "__main__":
    main()
