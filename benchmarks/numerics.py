"""What it costs that no text depends on the draft or the batch: share of an iteration.

    python -m benchmarks.numerics --shape tinyllama-1.1b --dtype bfloat16
    python -m benchmarks.numerics --attention --dtype bfloat16 --name attention

Every second forward of the target runs without `prompt_slots`, as with `--set numerics=fast`, so that both kinds meet
the same forests, lengths and disturbances. Compared are neighbours: a forward and the one after it.

With --attention: processor time of one layer of attention on one thread, the best of the rounds, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import environment, markdown_table, results_folder, write_results
from benchmarks.inflate import SHAPES
from benchmarks.speed import Bench, numbers, prepare, whole
from dsbd_cli import Engine, MethodConfig
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.forest_attention import AttentionMetadata
from dsbd_cli.models.forest_attention import attention as attended
from dsbd_cli.ops.cpu.attention import attend


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
            found: Tensor | None = self._model.forward(batch, logits=logits)
            return found
        fast = len(self.seconds) % 2 == 1
        start = time.perf_counter()
        found = self._model.forward(replace(batch, prompt_slots=None) if fast else batch, logits=logits)
        self.seconds.append((fast, time.perf_counter() - start))
        return found


def measure(bench: Bench, method: MethodConfig, batch_size: int) -> dict[str, float]:
    """Medians of one run: seconds of a forward of each kind, of what one costs more, and of an iteration."""
    target = InTurn(bench.target)
    engine = Engine(target, bench.draft if method.depth else None, bench.codec, method, batch_size=batch_size)
    step, iterations = engine.stepper.step, list[float]()

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        report = step(*arguments)
        iterations.append(time.perf_counter() - start)
        return report

    engine.stepper.step = timed  # type: ignore[method-assign]
    list(engine.run(bench.requests))
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


# heads, heads of keys, nodes, slots of the suffix, rows; a head is 64 wide, prompts end near slot 192
LAYERS = (
    (32, 4, 4, 68, 1),
    (32, 4, 4, 196, 1),
    (32, 4, 36, 164, 1),
    (9, 3, 4, 68, 1),
    (32, 32, 4, 68, 1),
    (32, 4, 4, 68, 4),
    (32, 4, 36, 164, 4),
)
PROMPT_SLOTS = (192, 128, 160, 224)  # leading slots of a row that hold its prompt
DIM = 64
CALLS = 20  # of a round


class Layer:
    """Attention of one layer over random keys, in which each node sees its prompt and a chain of the suffix's slots."""

    def __init__(self, heads: int, kv_heads: int, nodes: int, suffix: int, rows: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self._prompt_slots, self._width = PROMPT_SLOTS[:rows], suffix
        slots = max(self._prompt_slots) + suffix
        self._states = (
            torch.randn(rows, heads, nodes, DIM).to(dtype),
            *torch.randn(2, rows, kv_heads, slots, DIM).to(dtype),
        )
        index, starts = torch.arange(slots), torch.tensor(self._prompt_slots)
        chain = torch.rand(rows, nodes, slots) < 1 / 4  # of four beams, and as much of each chain is shared
        own = starts[:, None] + suffix - nodes + torch.arange(nodes)
        past = (index < own.unsqueeze(2)) & chain | (index == own.unsqueeze(2))
        self._seen = past | (index < starts[:, None, None])
        additive = torch.zeros(self._seen.shape, dtype=dtype)
        self._mask = additive.masked_fill_(~self._seen, torch.finfo(dtype).min)[:, None]
        self._known = self._metadata()
        self.invariant(), self.listed()  # what is made once

    def _metadata(self) -> AttentionMetadata:
        metadata = AttentionMetadata(self._prompt_slots, self._width, path_attention=attend)
        metadata.add(self._mask, self._seen, whole=True)
        return metadata

    def invariant(self) -> object:
        """As the invariant target attends."""
        return attended(self._known, *self._states, self._mask, DIM**-0.5)

    def listed(self) -> object:
        """What each node sees, worked out once a forward."""
        return self._metadata().paths(self._mask)

    def fast(self) -> object:
        """As with `--set numerics=fast`."""
        return attended(None, *self._states, self._mask, DIM**-0.5)


@torch.inference_mode()
def attention(dtype: torch.dtype, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Runs and rows of a table: microseconds of LAYERS."""
    torch.set_num_threads(1)
    runs, table = [], []
    for heads, kv_heads, nodes, suffix, rows in LAYERS:
        layer = Layer(heads, kv_heads, nodes, suffix, rows, dtype)
        best = dict.fromkeys(("invariant", "fast", "listed"), float("inf"))
        for _ in range(rounds):
            for name in best:
                call, start = getattr(layer, name), time.thread_time()
                for _ in range(CALLS):
                    call()
                best[name] = min(best[name], (time.thread_time() - start) / CALLS * 1e6)
        runs.append({"heads": heads, "kv_heads": kv_heads, "nodes": nodes, "tail": suffix, "rows": rows, **best})
        table.append(
            {
                "heads, of keys": f"{heads}, {kv_heads}",
                "nodes": str(nodes),
                "tail slots": str(suffix),
                "rows": str(rows),
                "kernel of the suffix": f"{best['invariant']:,.0f} us",
                "torch's fused kernel over all slots": f"{best['fast']:,.0f} us",
                "listing, once per forward": f"{best['listed']:,.0f} us",
            }
        )
        print(table[-1], flush=True)
    return runs, table


def write(name: str, runs: list[dict[str, Any]], rows: list[dict[str, str]], title: str, how: str) -> None:
    """The report, to its folder and to stdout."""
    env = environment()
    origin = f"`{env['command']}` on {env['device']}, commit {env['commit']}."
    text = f"# {title}\n\n{origin} {how}\n\n{markdown_table(rows)}"
    write_results(results_folder(name), runs, text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("small", *SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--draft-shape", choices=("small", *SHAPES), default="llama-68m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--requests", type=whole, default=4)
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--batch-size", type=numbers, default=[1, 4])
    parser.add_argument("--shapes", default="0x8,4x8", help="forests, depth x drafts per layer")
    parser.add_argument("--attention", action="store_true", help="one layer of attention, without a model")
    parser.add_argument("--rounds", type=whole, default=20, help="of --attention")
    parser.add_argument("--name", default="numerics")
    options = parser.parse_args()
    if options.attention:
        runs, rows = attention(getattr(torch, options.dtype), options.rounds)
        how = f"Processor time of one thread, the best of {options.rounds} rounds in turn."
        write(options.name, runs, rows, f"One layer of attention, {options.dtype}", how)
        return
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
    write(options.name, runs, rows, title, "Medians of forwards in turn.")


if __name__ == "__main__":
    main()
