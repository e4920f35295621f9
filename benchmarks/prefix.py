"""Rows per second where prompts begin alike: their beginning read once, and every prompt read whole.

    python -m benchmarks.prefix --target DIR --draft none --dtype bfloat16 --shots 3 --records 16 --batch-size 1,8

Few-shot SQL prompts, beam search. The two ways take turns after a warm-up of each; their answers are to be the same
bits.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import dsbd_cli
from benchmarks.common import markdown_table, numbers, publish
from benchmarks.invariance import signature
from dsbd_cli import MethodConfig, ModelSpec, Request, SamplingConfig
from dsbd_cli.lab.tasks.choose import TASKS
from dsbd_cli.lab.tasks.dataset import with_shots

WAYS = {"read whole": False, "shared": True}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the model")
    parser.add_argument("--draft", default="none", help="folder of the draft, or none")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shots", type=int, default=3, help="solved examples before every question")
    parser.add_argument("--records", type=int, default=16)
    parser.add_argument("--batch-size", type=numbers, default=[1, 8], help="several, by commas")
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="prefix", help="folder of the results")
    options = parser.parse_args()
    draft = None if options.draft == "none" else options.draft
    method = MethodConfig.of({"rule": "search", "num_beams": options.num_beams, **({} if draft else {"depth": 0})})
    first = dsbd_cli.load(ModelSpec(options.target, dtype=options.dtype), draft, method=method)
    data = with_shots(TASKS["sql"], options.shots)
    records = itertools.islice(data.records(), options.records)
    sampling = SamplingConfig(max_new_tokens=options.max_new_tokens, n_best=options.num_beams)
    requests = [Request(record.prompt, id=str(index), sampling=sampling) for index, record in enumerate(records)]
    runs, lines = list[dict[str, object]](), list[dict[str, str]]()
    for batch_size in options.batch_size:
        engine = first.replace(method=method, batch_size=batch_size)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        signatures: dict[str, list[object]] = {}
        share = 0.0
        for number in range(-1, options.rounds):  # the first is a warm-up
            for way, engine.share_prefixes in WAYS.items():
                start = time.perf_counter()
                results = list(engine.run(requests))
                if number >= 0:
                    seconds[way].append(time.perf_counter() - start)
                signatures[way] = [signature(result) for result in results]
                reused = sum(result.stats.prompt_tokens_reused for result in results)
                share = reused / sum(result.prompt_tokens for result in results)
        equal = sum(signature == other for signature, other in zip(*signatures.values(), strict=True))
        rates = {way: len(requests) / statistics.median(times) for way, times in seconds.items()}
        runs.append(
            {"batch_size": batch_size, "seconds": seconds, "equal": equal, "rows": len(requests), "share": share}
        )
        lines.append(
            {
                "rows together": str(batch_size),
                **{f"{way}, rows/s": f"{rate:.3f}" for way, rate in rates.items()},
                "times": f"{rates['shared'] / rates['read whole']:.2f}",
                "of the prompts' tokens": f"{share:.0%}",
                "equal answers": f"{equal} of {len(requests)}",
            }
        )
        print(lines[-1], flush=True)
    publish(options.name, runs, "Prompts that begin alike", "", markdown_table(lines))


if __name__ == "__main__":
    main()
