"""Recurrent layers over a forest: bytes of a request, share of the scans, tokens per second.

    python -m benchmarks.states --threads 1
    python -m benchmarks.states --shapes mamba2-tiny --nodes 4,12 --repeats 2 --tokens 4    # a trial

Random weights; time depends on shapes alone. `share` is the time of convolution, read, solve and fold (a forward and a
move) over that of the model's products: every linear layer by itself. Forests of ours, with and without drafted nodes,
and transformers' beams take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.common import environment, markdown_table, results_folder, write_results
from dsbd_cli.engine.core.protocols import ForestInput
from dsbd_cli.engine.models.causal import CausalForestModel

COMMON = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# two layers of each kind: times are per layer, and the whole model would not fit beside its comparators
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2-1.3b": (
        "Mamba2Config",
        {**COMMON, "hidden_size": 2048, "num_hidden_layers": 4, "state_size": 128, "num_heads": 64, "head_dim": 64,
         "expand": 2, "n_groups": 1, "conv_kernel": 4, "vocab_size": 4096},
    ),
    "qwen3.5-like": (
        "Qwen3_5TextConfig",
        {**COMMON, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "vocab_size": 4096,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
         "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
         "linear_conv_kernel_dim": 4,
         "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    ),
    "mamba2-tiny": (
        "Mamba2Config",
        {**COMMON, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "num_heads": 8, "head_dim": 16,
         "expand": 2, "n_groups": 1, "conv_kernel": 4, "vocab_size": 128},
    ),
}  # fmt: skip
TAIL = 24  # slots past the trunk before a forward
PROMPT = 32
WIDTH = 4  # beams


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forest(model: CausalForestModel, nodes: int) -> ForestInput:
    """Nodes in random trees below a tail of TAIL tokens in WIDTH branches."""
    generator = torch.Generator().manual_seed(0)
    slots = PROMPT + TAIL + nodes
    mask = torch.zeros(1, nodes, slots, dtype=torch.bool)
    mask[:, :, :PROMPT] = True
    for node in range(nodes):
        branch = node % WIDTH
        mask[0, node, PROMPT + branch : PROMPT + TAIL : WIDTH] = True
        own = [PROMPT + TAIL + other for other in range(node + 1) if other % WIDTH == branch]
        mask[0, node, own] = True
    positions = torch.arange(slots)
    positions[PROMPT:] = PROMPT + torch.arange(slots - PROMPT) // WIDTH
    at = torch.arange(PROMPT + TAIL, slots)[None]
    tokens = torch.randint(3, model.vocab_size, (1, nodes), generator=generator)
    return ForestInput(tokens, positions[at], at, mask, positions[None])


def products(model: CausalForestModel, nodes: int) -> float:
    """Seconds of all linear layers over so many nodes, one after another."""
    total = 0.0
    for name, module in model.module.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            x = torch.randn(nodes, module.in_features, dtype=module.weight.dtype)
            module(x)
            total += seconds(lambda layer=module, x=x: layer(x))  # type: ignore[misc]
    return total


def scans(model: CausalForestModel, batch: ForestInput) -> float:
    """Seconds of the recurrent layers' own work in a forward and a move."""
    from dsbd_cli.engine.models import states

    spent = 0.0
    kinds = ((states.Convolution, "run"), (states.LinearState, "attend"), (states.LinearState, "correct"))
    stock = [(kind, name, getattr(kind, name)) for kind, name in kinds]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            result = function(*arguments)
            spent += time.perf_counter() - start
            return result

        return call

    try:
        for kind, name, function in stock:
            setattr(kind, name, timed(function))
        model.forward(batch, logits=False)
    finally:
        for kind, name, function in stock:
            setattr(kind, name, function)
    same = torch.arange(PROMPT, PROMPT + TAIL)[None]
    spent += seconds(lambda: model.move(same, same, torch.tensor([PROMPT])))
    return spent


def measure(name: str, nodes: list[int], repeats: int, tokens: int) -> list[dict[str, Any]]:
    """One line per number of nodes."""
    kind, settings = SHAPES[name]
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings)).eval()
    model = CausalForestModel(made.requires_grad_(False), name)
    made.generation_config.eos_token_id = None
    prompt = torch.randint(3, model.vocab_size, (1, PROMPT))
    lines = []
    with torch.inference_mode():
        for count in nodes:
            model.reserve(1, PROMPT + TAIL + count + 1, TAIL + count)
            model.clear(0)
            positions = torch.arange(PROMPT)[None]
            model.forward(
                ForestInput(
                    prompt, positions, positions, torch.ones(1, PROMPT, PROMPT, dtype=torch.bool).tril(), positions,
                    torch.tensor([0]), chain=True,
                ),
                logits=False,
            )  # fmt: skip
            batch = forest(model, count)
            model.forward(batch)
            linear, scan, whole, theirs = [], [], [], []
            for _ in range(repeats):  # in turns
                linear.append(products(model, count))
                scan.append(scans(model, batch))
                whole.append(seconds(lambda batch=batch: model.forward(batch)))  # type: ignore[misc]
                theirs.append(
                    seconds(
                        lambda: made.generate(
                            prompt, num_beams=WIDTH, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens
                        )
                    )
                    / tokens
                )
            middle = {
                key: statistics.median(values)
                for key, values in (("products", linear), ("scans", scan), ("forward", whole), ("theirs", theirs))
            }
            lines.append(
                {
                    "shape": name,
                    "nodes": count,
                    "products_ms": 1e3 * middle["products"],
                    "scans_ms": 1e3 * middle["scans"],
                    "share": middle["scans"] / middle["products"],
                    "forward_ms": 1e3 * middle["forward"],
                    "transformers_step_ms": 1e3 * middle["theirs"],
                    # one state whatever W; transformers holds W
                    "state_bytes": model.state_bytes(0),
                    "tail_bytes": model.state_bytes(TAIL + count) - model.state_bytes(0),
                }
            )
            model.release()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost and memory of recurrent layers over a forest.")
    parser.add_argument("--shapes", default="mamba2-1.3b,qwen3.5-like")
    parser.add_argument("--nodes", default="4,36", help="nodes of a forward: W, and W + D*K")
    parser.add_argument("--tokens", type=int, default=16, help="that transformers generates with W = 4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--name", default="states")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    nodes = [int(item) for item in options.nodes.split(",")]
    runs = [
        line for name in options.shapes.split(",") for line in measure(name, nodes, options.repeats, options.tokens)
    ]
    rows = [
        {
            "shape": run["shape"],
            "nodes": str(run["nodes"]),
            "linear layers": f"{run['products_ms']:.1f} ms",
            "conv, read, solve, fold": f"{run['scans_ms']:.1f} ms ({run['share']:.0%})",
            "forward": f"{run['forward_ms']:.1f} ms",
            "transformers, a step of 4 beams": f"{run['transformers_step_ms']:.1f} ms",
            "state, any W": f"{run['state_bytes'] / 2**20:.2f} MiB",
            "tail": f"{run['tail_bytes'] / 2**20:.2f} MiB",
        }
        for run in runs
    ]
    report = (
        f"# Recurrent layers over a forest\n\n`{environment()['command']}` on {environment()['device']}, commit "
        f"{environment()['commit']}. Four layers of each full shape, medians of {options.repeats}.\n\n"
        f"{markdown_table(rows)}"
    )
    write_results(results_folder(options.name), runs, report)
    print(report)


if __name__ == "__main__":
    main()
