"""Many beams on a long prompt: seconds of ours and of transformers, and whether the beams are the same.

    python -m benchmarks.wide --target PATH --num-beams 50 --prompt-tokens 1500 --new-tokens 4

All W hypotheses are asked for and compared in order. transformers computes and stores the prompt W times, ours once.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import torch

import dsbd_cli
from benchmarks.common import environment, markdown_table, results_folder, write_results
from benchmarks.invariance import PROMPTS
from benchmarks.speed import numbers
from dsbd_cli import Engine, MethodConfig, ModelSpec, Request, SamplingConfig
from dsbd_cli.lab.peers.transformers_generate import stock_attention


def prompt_of(codec: Any, length: int) -> tuple[int, ...]:
    """A text of exactly so many tokens."""
    text = "\n".join(itertools.islice(itertools.cycle(PROMPTS), length))
    return tuple(codec.encode(text)[:length])


def ours(loaded: Engine, prompt: tuple[int, ...], beams: int, tokens: int) -> tuple[list[tuple[int, ...]], float, int]:
    """Token ids of all beams, seconds, and the cache's slots at the peak."""
    engine = Engine(loaded.target, None, loaded.codec, MethodConfig(rule="search", num_beams=beams, depth=0))
    sampling = SamplingConfig(max_new_tokens=tokens, n_best=beams)
    start = time.perf_counter()
    [result] = engine.run([Request(prompt_ids=prompt, sampling=sampling)])
    seconds = time.perf_counter() - start
    result.check()
    return [one.token_ids for one in result.hypotheses], seconds, result.stats.kv_peak_slots


def theirs(loaded: Any, prompt: tuple[int, ...], beams: int, tokens: int) -> tuple[list[tuple[int, ...]], float]:
    """The same of transformers' generate, on the model as transformers loads it."""
    model = loaded.target.stock()
    inputs = torch.tensor([prompt])
    with torch.inference_mode(), stock_attention(model):
        start = time.perf_counter()
        found = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            num_beams=beams,
            num_return_sequences=beams,
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=list(loaded.codec.eos_ids),
            pad_token_id=0,
        )
        seconds = time.perf_counter() - start
    return [tuple(row[len(prompt) :].tolist()) for row in found], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--num-beams", type=numbers, default=[4, 50])
    parser.add_argument("--prompt-tokens", type=numbers, default=[300, 1500])
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="of ours; transformers runs once")
    parser.add_argument("--alone", action="store_true", help="without transformers")
    parser.add_argument("--name", default="wide")
    options = parser.parse_args()
    loaded = dsbd_cli.load(ModelSpec(options.target, dtype=options.dtype), None)
    runs, rows = [], []
    for beams, length in itertools.product(options.num_beams, options.prompt_tokens):
        prompt = prompt_of(loaded.codec, length)
        rounds = [ours(loaded, prompt, beams, options.new_tokens) for _ in range(options.rounds)]
        found, seconds, slots = min(rounds, key=lambda one: one[1])
        run: dict[str, Any] = {"beams": beams, "prompt": length, "seconds": seconds, "slots": slots}
        if not options.alone:
            other, run["transformers_s"] = theirs(loaded, prompt, beams, options.new_tokens)
            # transformers pads what ended early
            run["equal"] = sum(a == b[: len(a)] for a, b in zip(found, other, strict=True))
        runs.append({**vars(options), **run})
        rows.append(
            {
                "beams": str(beams),
                "prompt tokens": str(length),
                "dsbd": f"{seconds:.2f} s",
                "transformers": "" if options.alone else f"{run['transformers_s']:.2f} s",
                "ratio": "" if options.alone else f"{run['transformers_s'] / seconds:.1f}x",
                "same beams in order": "" if options.alone else f"{run['equal']} of {beams}",
                "cache slots": str(slots),
            }
        )
        print(rows[-1], flush=True)
        env = environment()
        text = (
            f"# Many beams, long prompts: {options.dtype}, {options.new_tokens} new tokens\n\n"
            f"`{env['command']}` on {env['device']}, commit {env['commit']}. Ours: best of {options.rounds}.\n\n"
        )
        write_results(results_folder(options.name), runs, text + markdown_table(rows))
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
