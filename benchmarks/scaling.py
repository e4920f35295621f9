"""How an iteration scales: forwards against nodes, rows and slots; the work beside them against the vocabulary; memory
against width and length.

    python -m benchmarks.scaling --shape tinyllama-1.1b --dtype bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, markdown_table, results_folder, write_results
from benchmarks.forwards import forward_times
from benchmarks.inflate import SHAPES
from benchmarks.speed import Bench, numbers, prepare
from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.engine.protocols import ForestInput


class Constant:
    """A model that costs nothing, so that only the engine's own work is left: logits by token from a small bank."""

    max_positions, head_ids, own_ids_below = None, None, 0
    capturable, copies_prefixes, generation = False, True, 0

    def __init__(self, vocab_size: int, seed: int, like: Constant | None = None) -> None:
        self.vocab_size, self.device = vocab_size, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        bank = 3 * torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(seed))
        if like is not None:
            bank = like.bank.float().cpu() + 0.1 * bank
        self.bank = bank.to(self.device, torch.bfloat16)

    def forward(self, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
        return self.bank[batch.tokens % 64] if logits else None

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None: ...
    def release(self) -> None: ...
    def clear(self, row: int, start: int = 0) -> None: ...
    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None: ...
    def select_rows(self, rows: Tensor) -> None: ...
    def move(self, source: Tensor, target: Tensor, common_prefix: Tensor) -> None: ...
    def kv_bytes_per_slot(self) -> int:
        return 0

    def state_bytes(self, window: int) -> int:
        return 0


class Codec:
    """Prompts are given as ids; texts are not looked at."""

    eos_ids = (2,)

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, prompt: str) -> list[int]:
        return [1]

    def encode_pieces(self, texts: list[str]) -> list[list[int]]:
        return [[1] for _ in texts]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [1]

    def decode(self, ids: list[int]) -> str:
        return ""

    def token_bytes(self) -> list[bytes]:
        return [b"x"] * self.vocab_size


def by_vocabulary(rule: str, vocab_size: int, rows: int, method: dict[str, Any]) -> float:
    """Seconds of an iteration without any model."""
    target = Constant(vocab_size, 1)
    config = MethodConfig.of({"rule": rule, "width": "fixed", **method})
    draft = Constant(vocab_size, 2, target) if config.depth else None
    engine = Engine(target, draft, Codec(vocab_size), config, batch_size=rows)
    sampling = SamplingConfig(max_new_tokens=48)
    seconds: list[float] = []
    step = engine._stepper.step

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = step(*arguments)
        seconds.append(time.perf_counter() - start)
        return result

    engine._stepper.step = timed  # type: ignore[method-assign]
    list(engine.run(Request(id=str(i), seed=i, prompt_ids=(1, 3, 5), sampling=sampling) for i in range(rows)))
    return statistics.median(seconds[3:])


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


def memory(bench: Bench, widths: list[int], lengths: list[int]) -> list[dict[str, Any]]:
    """Peak cache slots of one request against one sequence of the same length, by width and new tokens."""
    found = []
    for rule in ("coupled", "search"):
        for beams in widths:
            for length in lengths:
                method = MethodConfig(rule=rule, num_beams=beams, depth=4, width="fixed")
                engine = Engine(bench.target, bench.draft, bench.codec, method, batch_size=1)
                engine._stepper.endings.eos.zero_()  # nothing ends before its length
                request = bench.requests[0]
                sampling = SamplingConfig(max_new_tokens=length)
                [result] = engine.run([Request(id="m", seed=1, prompt=request.prompt, sampling=sampling)])
                one = result.prompt_tokens + length
                nodes = beams + 4 * 2 * beams
                peak = result.stats.kv_peak_slots
                found.append(
                    {
                        "rule": rule,
                        "beams": beams,
                        "new_tokens": length,
                        "peak_slots": peak,
                        "kept_slots": peak - nodes,
                        "ratio": peak / one,
                        "kept_ratio": (peak - nodes) / one,
                        "bytes": peak * (bench.target.kv_bytes_per_slot() + bench.draft.kv_bytes_per_slot()),
                    }
                )
    return found


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
            engine._stepper.endings.eos.zero_()
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
    parser.add_argument("--widths", type=numbers, default=[1, 4, 8])
    parser.add_argument("--lengths", type=numbers, default=[64, 256])
    parser.add_argument("--vocabularies", type=numbers, default=[32000, 128000])
    parser.add_argument("--prompts", type=numbers, default=[256, 4096])
    parser.add_argument("--parts", default="forwards,vocabulary,memory,prompts")
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    parts, runs, text = options.parts.split(","), [], ""
    bench = prepare(options.shape, options.draft_shape, getattr(torch, options.dtype), 2)
    if "forwards" in parts:
        found = forwards(bench, options.nodes, options.rows, options.slots)
        read = {role: model.size.read_bytes for role, model in (("target", bench.target), ("draft", bench.draft))}
        runs += [{"part": "forwards", "weight_bytes": read[item["model"]], **item} for item in found]
        text += "## Forwards\n\nGB/s: weight bytes over time.\n\n" + markdown_table(
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
    if "vocabulary" in parts:
        rows = []
        for rule in ("coupled", "search", "rejection"):
            for depth, drafts, batch in ((0, 8, 1), (4, 8, 1), (4, 8, 8)):
                row = {"rule": rule, "D": str(depth), "K": str(drafts), "rows": str(batch)}
                for vocab_size in options.vocabularies:
                    seconds = by_vocabulary(rule, vocab_size, batch, {"depth": depth, "drafts_per_layer": drafts})
                    runs.append({"part": "vocabulary", "vocab_size": vocab_size, "seconds": seconds, **row})
                    row[f"ms at V={vocab_size}"] = f"{seconds * 1e3:.2f}"
                rows.append(row)
        text += "\n## An iteration without models, W=4\n\n" + markdown_table(rows)
    if "memory" in parts:
        found = memory(bench, options.widths, options.lengths)
        runs += [{"part": "memory", **item} for item in found]
        rows = [{key: f"{v:.2f}" if isinstance(v, float) else str(v) for key, v in item.items()} for item in found]
        text += "\n## Peak cache slots, K=2W, D=4; ratios to one sequence, with and without the nodes in flight\n\n"
        text += markdown_table(rows)
    if "prompts" in parts:
        found = prompts(bench, options.prompts)
        runs += [{"part": "prompts", **item} for item in found]
        rows = [{key: f"{v:.2f}" if isinstance(v, float) else str(v) for key, v in item.items()} for item in found]
        text += "\n## One request with a long prompt, W=4\n\nread_s: the prompt into the caches.\n\n" + markdown_table(
            rows
        )
    env = environment()
    head = f"# Scaling: {options.shape}, {options.dtype}\n\n"
    head += f"`{env['command']}` on {env['device']}, commit {env['commit']}.\n\n"
    write_results(results_folder(options.name or f"scaling-{options.shape}-{options.dtype}"), runs, head + text)
    print(head + text)


if __name__ == "__main__":
    main()
