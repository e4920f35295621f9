"""Tokens per second of delivered best-beam text, method by method, interleaved.

    python -m benchmarks.speed --shape tinyllama-1.1b --draft-shape llama-68m --dtype bfloat16 --num-beams 1,2,4,8

The models are the built-in pair inflated to the given shapes (benchmarks/inflate.py): shapes, cost and acceptance are
real, weights are not. Every round runs every method once on the same requests, in turn, so that a drift of the machine
meets all of them. transformers runs on a model of its own, as it was loaded: our engine packs the weights of its model.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.common import markdown_table, numbers, publish, whole
from benchmarks.inflate import SHAPES, inflate
from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.lab.peers.base import delivered
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.generation import CheckpointSettings, eos_ids
from dsbd_cli.models.checkpoints.registry import resolve
from dsbd_cli.models.checks.invariance import check
from dsbd_cli.models.decoder.config import DecoderConfig
from dsbd_cli.models.decoder.decoder_model import DecoderForestModel
from dsbd_cli.models.decoder.families import decoder_config_of
from dsbd_cli.models.decoder.load import DecoderParts, build_decoder, pack
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.ops.select import ops_for
from dsbd_cli.requests import derive_seed
from training.tasks import GENERATORS

NEW_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Outcome:
    """One method on all requests: seconds, tokens of the best texts, steps per target call and drafted nodes per target
    call (None for others' code)."""

    seconds: float
    tokens: int
    steps_per_call: float | None = None
    nodes_per_call: float | None = None


Runner = Callable[[], Outcome]


@dataclass(frozen=True, slots=True)
class Bench:
    """Models and requests that all methods share. plain: (target, draft) as transformers loads them."""

    target: DecoderForestModel
    draft: DecoderForestModel
    plain: tuple[Any, Any]
    codec: HFCodec
    requests: tuple[Request, ...]

    def ours(self, method: MethodConfig, batch_size: int) -> Runner:
        """Our engine."""
        engine = Engine(self.target, self.draft if method.depth else None, self.codec, method, batch_size=batch_size)

        def run() -> Outcome:
            start = time.perf_counter()
            results = list(engine.run(self.requests))
            seconds = time.perf_counter() - start
            tokens = sum(result.hypotheses[0].num_tokens for result in results)
            calls = sum(result.stats.target_calls for result in results)
            steps, drafted = (sum(getattr(result.stats, name) for result in results) for name in ("steps", "drafted"))
            return Outcome(seconds, tokens, steps / calls, drafted / calls)

        return run

    def theirs(self, beams: int, batch_size: int, *, sample: bool, assisted: bool = False) -> Runner:
        """transformers' generate, on batches padded to the left."""
        model, draft = self.plain
        chosen: dict[str, Any] = {"do_sample": True, "top_k": 50} if sample else {"do_sample": False}
        settings = GenerationConfig(
            num_beams=beams, max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=list(self.codec.eos_ids), **chosen
        )
        prompts = [self.codec.encode(request.prompt or "") for request in self.requests]
        extra = {"assistant_model": draft} if assisted else {}

        def run() -> Outcome:
            tokens = 0
            start = time.perf_counter()
            for first in range(0, len(prompts), batch_size):
                ids, mask = _padded(prompts[first : first + batch_size], model.device)
                out = model.generate(ids, attention_mask=mask, generation_config=settings, **extra)
                tokens += sum(len(delivered(row, self.codec.eos_ids)) for row in out[:, ids.shape[1] :].tolist())
            return Outcome(time.perf_counter() - start, tokens)

        return run


def _padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def prepare(shape: str, draft_shape: str, dtype: torch.dtype, count: int) -> Bench:
    """Inflate the pair and take `count` test records, as many of each task."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    copies: list[list[Any]] = [[], []]  # ours gives its weights to our own decoder; the comparators' stays
    for role, name in (("target", shape), ("draft", draft_shape)):
        for models in copies:
            small = AutoModelForCausalLM.from_pretrained(resolve(f"builtin:{role}").path, dtype=torch.float32)
            large = small if name == "small" else inflate(small, SHAPES[name], dtype, device=device)
            models.append(large.to(device).requires_grad_(False))
    ours, plain = copies[0], copies[-1]
    tokenizer = Checkpoint.open(ModelSpec("builtin:target")).tokenizer
    codec = HFCodec(tokenizer, eos_ids(ours[0], tokenizer))
    target, draft = map(own, ours, (shape, draft_shape))
    target.invariant = check(target).varies is None
    shares = [(count + index) // len(GENERATORS) for index in range(len(GENERATORS))]
    tasks = zip(GENERATORS.values(), shares, strict=True)
    records = [r for task, share in tasks for r in itertools.islice(task.records("test", 1), share)]
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS)
    requests = tuple(Request(id=r.id, seed=derive_seed(0, r.id), prompt=r.prompt, sampling=sampling) for r in records)
    return Bench(target, draft, (plain[0], plain[1]), codec, requests)


def own(model: Any, name: str) -> DecoderForestModel:
    """Return our own decoder with the weights of a transformers model, as it is loaded."""
    spec, state, device = decoder_config_of(model.config), model.state_dict(), model.device
    assert isinstance(spec, DecoderConfig), spec
    tensors = {key: partial(state.__getitem__, key) for key in state}
    kernels = ops_for(device, model.dtype, ("norm", "gated", "rotate")).by("triton")
    role, settings = ModelSpec(name, device=device.type), CheckpointSettings.of(model.config, {})
    parts = DecoderParts(name, spec, tensors, model.dtype, device, settings)
    forest = build_decoder(parts, lambda: model, frozenset(kernels))
    pack(forest, role, None)
    return forest


def methods(bench: Bench, beams: int, batch_size: int, drafts: int, depth: int) -> dict[str, Runner]:
    """What is compared, by name."""

    def ours(**settings: Any) -> Runner:
        return bench.ours(MethodConfig.of({"num_beams": beams, **settings}), batch_size)

    drafted: dict[str, Any] = {"drafts_per_layer": max(drafts, beams), "depth": depth}
    auto: dict[str, Any] = {"drafts_per_layer": max(drafts, 2 * beams), "depth": 8, "adaptive_depth": True}
    runners = {
        "transformers beam sampling": bench.theirs(beams, batch_size, sample=True),
        "transformers beam search": bench.theirs(beams, batch_size, sample=False),
        "dsbd coupled, no draft": ours(depth=0),
        "dsbd search, no draft": ours(rule="search", depth=0),
        "dsbd coupled": ours(**drafted),
        "dsbd search": ours(rule="search", **drafted),
        "dsbd rejection": ours(rule="rejection", width="fixed", **drafted),
        "dsbd coupled, threshold": ours(width="threshold", **drafted),
        "dsbd rejection, threshold": ours(rule="rejection", width="threshold", **drafted),
        "dsbd coupled, auto": ours(**auto),
        "dsbd search, auto": ours(rule="search", **auto),
        "dsbd coupled, threshold, auto": ours(width="threshold", **auto),
        "dsbd rejection, threshold, auto": ours(rule="rejection", width="threshold", **auto),
    }
    if beams == 1 and batch_size == 1:
        runners["transformers assisted, greedy"] = bench.theirs(1, 1, sample=False, assisted=True)
        runners["transformers assisted, sampling"] = bench.theirs(1, 1, sample=True, assisted=True)
    return runners


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of methods on the built-in pair in a larger shape.")
    parser.add_argument("--shape", choices=("small", *SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--draft-shape", choices=("small", *SHAPES), default="llama-68m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--requests", type=whole, default=8)
    parser.add_argument("--rounds", type=whole, default=3)
    parser.add_argument("--num-beams", type=numbers, default=[4])
    parser.add_argument("--batch-size", type=numbers, default=[1])
    parser.add_argument("--drafts-per-layer", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--only", default="", help="methods whose name holds one of these words, comma separated")
    parser.add_argument("--name", default="", help="name of the results folder")
    options = parser.parse_args()
    bench = prepare(options.shape, options.draft_shape, getattr(torch, options.dtype), options.requests)
    about = (
        "Shapes, cost and acceptance are real, weights are not: the built-in pair, inflated. Search is compared with "
        "search, sampling with sampling."
    )
    runs, tables = list[dict[str, Any]](), list[str]()
    for beams, batch_size in itertools.product(options.num_beams, options.batch_size):
        runners = methods(bench, beams, batch_size, options.drafts_per_layer, options.depth)
        wanted = [word for word in options.only.split(",") if word]
        runners = {name: run for name, run in runners.items() if not wanted or any(word in name for word in wanted)}
        rounds = measure(runners, options.rounds, f"W={beams} batch {batch_size}")
        summaries, rows = summarise(rounds)
        runs += [{**vars(options), **run, "num_beams": beams, "batch_size": batch_size} for run in summaries]
        tables.append(f"## {beams} beams, batch {batch_size}\n\n{markdown_table(rows)}")
        title = f"Speed: {options.shape} with {options.draft_shape}, {options.dtype}"
        publish(options.name or f"speed-{options.shape}-{options.dtype}", runs, title, about, *tables)


def measure(runners: dict[str, Runner], count: int, label: str) -> dict[str, list[Outcome]]:
    """Rounds of every method in turn."""
    rounds: dict[str, list[Outcome]] = {name: [] for name in runners}
    for number in range(count):
        for name, runner in runners.items():
            rounds[name].append(runner())
            last = rounds[name][-1]
            print(f"{label} round {number + 1}: {name}: {last.tokens / last.seconds:.2f} tokens/s", flush=True)
    return rounds


def summarise(rounds: dict[str, list[Outcome]]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Medians over rounds; ratios are taken within a round. Search is compared with search, sampling with sampling."""
    speed = {name: [o.tokens / o.seconds for o in outcomes] for name, outcomes in rounds.items()}
    runs, rows = [], []
    for name, outcomes in rounds.items():
        kind = "search" if "search" in name or "greedy" in name else "sampling"
        partners = {
            "vs transformers": f"transformers beam {kind}",
            "vs no draft": f"dsbd {'search' if kind == 'search' else 'coupled'}, no draft",
        }
        ratios = {
            label: statistics.median(a / b for a, b in zip(speed[name], speed[other], strict=True))
            for label, other in partners.items()
            if other in speed
        }
        steps, nodes = outcomes[0].steps_per_call, outcomes[0].nodes_per_call
        runs.append({"name": name, "tokens_per_s": speed[name], "steps_per_call": steps, "drafted": nodes, **ratios})
        row = {
            "method": name,
            "tokens/s": f"{statistics.median(speed[name]):.2f}",
            "spread": f"{min(speed[name]):.2f}-{max(speed[name]):.2f}",
            "steps/call": "" if steps is None else f"{steps:.2f}",
            "drafts/call": "" if nodes is None else f"{nodes:.1f}",
        }
        rows.append(row | {label: f"{ratios[label]:.2f}x" if label in ratios else "" for label in partners})
    return runs, rows


if __name__ == "__main__":
    main()
