"""`--quantize int8` beside the checkpoint's own weights: error of the log-probabilities, and time of forwards.

    python -m benchmarks.int8 error --target models/qwen2.5-coder-0.5b-instruct
    python -m benchmarks.int8 forwards --target models/qwen2.5-coder-1.5b-instruct --nodes 4,20,36 --rounds 20

error: KL divergence from float32 and agreement of the most probable token, of bfloat16 and of int8 beside bfloat16.
forwards: medians of forwards of so many tokens, bfloat16 and int8 in alternation in one process. One that runs SQL
tasks: `dsbd bench --task sql` with and without `--quantize int8`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.config import ModelSpec
from dsbd_cli.engine.models.loader import load
from dsbd_cli.engine.models.pair import load_model

TEXTS = ("README.md", "docs/algorithm.md", "dsbd_cli/engine/models/quantize.py", "sample_inputs/prompts.jsonl")


def loaded(target: str, dtype: str, quantize: Any) -> Any:
    return load_model(ModelSpec(target, device="cpu", dtype=dtype, quantize=quantize, numerics="fast"))


def logprobs(target: str, dtype: str, quantize: Any, tokens: int) -> Tensor:
    """[places, V] log-probabilities after every token of the texts, in float32."""
    if quantize is None:
        network, tokenizer = load(ModelSpec(target, device="cpu", dtype=dtype))
    else:
        model, codec = loaded(target, dtype, quantize)
        network, tokenizer = model.module, codec.tokenizer
    root = Path(__file__).parents[1]
    found = []
    with torch.inference_mode():
        for name in TEXTS:
            ids = tokenizer((root / name).read_text(encoding="utf-8")[: 8 * tokens]).input_ids[:tokens]
            found.append(network(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1))
    return torch.cat(found)


def error(target: str, tokens: int) -> None:
    """KL in nats per place: mean, 99th percentile; share of places with the same most probable token."""
    exact = logprobs(target, "float32", None, tokens)
    for name, quantize in (("bfloat16", None), ("int8+bfloat16", "int8")):
        found = logprobs(target, "bfloat16", quantize, tokens)
        divergence = (exact.exp() * (exact - found)).sum(-1)
        top = exact.argmax(-1, keepdim=True)
        off = (found.gather(1, top) - exact.gather(1, top)).abs().mean()
        agree = (found.argmax(-1, keepdim=True) == top).float().mean()
        print(
            f"{name}: KL {divergence.mean():.5f}, 99 % below {divergence.quantile(0.99):.4f}; log-probability of the "
            f"most probable token off by {off:.4f}; the same one at {agree:.1%} of {len(exact)} places",
            flush=True,
        )


def forwards(target: str, sizes: list[int], rounds: int) -> None:
    """Median milliseconds of a forward of so many tokens, and the ratio."""
    models = {name: loaded(target, "bfloat16", name)[0] for name in (None, "int8")}
    with torch.inference_mode():
        for nodes in sizes:
            tokens = torch.arange(nodes).unsqueeze(0) + 100
            taken: dict[Any, list[float]] = {name: [] for name in models}
            for _ in range(rounds + 2):
                for name, model in models.items():
                    start = time.perf_counter()
                    model.plain(tokens)
                    taken[name].append(1000 * (time.perf_counter() - start))
            plain, int8 = (statistics.median(times[2:]) for times in taken.values())
            print(f"{nodes} tokens: bfloat16 {plain:.1f} ms, int8 {int8:.1f} ms, ratio {int8 / plain:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("error", "forwards"))
    parser.add_argument("--target", required=True)
    parser.add_argument("--tokens", type=int, default=250, help="of each text")
    parser.add_argument("--nodes", default="4,20,36", help="tokens of a forward")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.what == "error":
        error(options.target, options.tokens)
    else:
        forwards(options.target, [int(nodes) for nodes in options.nodes.split(",")], options.rounds)


if __name__ == "__main__":
    main()
