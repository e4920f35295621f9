"""What a trimmed LM head saves in a layer of drafts: the matrix, and the best tokens after it.

    python -m benchmarks.heads --threads 1

Random weights in bfloat16; time depends on shapes alone. `into V columns` is how a head could be trimmed without
touching what follows: its logits written into a row of -inf of the full width.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.common import environment, markdown_table, results_folder, write_results
from dsbd_cli.engine.core.candidates import CandidateCount, top_candidates
from dsbd_cli.engine.drafting.logits import DraftLogits

CANDIDATES = 58  # of a row with top-k 50


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Milliseconds, after one run that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]) * 1e3


def measure(vocabulary: int, kept: int, hidden: int, nodes: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one layer of drafts, by kind of head."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(vocabulary, hidden, generator=generator).to(torch.bfloat16) / hidden**0.5
    ids = torch.sort(torch.randperm(vocabulary, generator=generator)[:kept]).values
    small, states = head[ids].clone(), torch.randn(1, nodes, hidden, generator=generator).to(torch.bfloat16)

    def trimmed() -> DraftLogits:
        return DraftLogits(states @ small.T, ids, vocabulary)

    with torch.inference_mode():
        return {
            "full head": median_ms(lambda: top_candidates(states @ head.T, CandidateCount(CANDIDATES)), repeats),
            "of it the matrix": median_ms(lambda: states @ head.T, repeats),
            "trimmed, into V columns": median_ms(
                lambda: top_candidates(trimmed().wide(), CandidateCount(CANDIDATES)), repeats
            ),
            "trimmed": median_ms(lambda: trimmed().candidates(CandidateCount(CANDIDATES)), repeats),
            "of that the matrix": median_ms(lambda: states @ small.T, repeats),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a trimmed LM head saves in a layer of drafts.")
    parser.add_argument("--shapes", default="32000:4000:768,128256:4000:2048,128256:16000:2048", help="V:kept:hidden")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--name", default="heads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runs, rows = [], []
    for shape in options.shapes.split(","):
        vocabulary, kept, hidden = map(int, shape.split(":"))
        found = measure(vocabulary, kept, hidden, options.nodes, options.repeats)
        runs.append({**vars(options), "vocabulary": vocabulary, "kept": kept, "hidden": hidden, "ms": found})
        rows.append(
            {"V, kept, hidden size": f"{vocabulary:,}, {kept:,}, {hidden}"}
            | {name: f"{value:.1f}" for name, value in found.items()}
        )
    report = (
        f"# A layer of {options.nodes} nodes by head, ms\n\n`{environment()['command']}` on {environment()['device']}, "
        f"commit {environment()['commit']}. Medians of {options.repeats}.\n\n{markdown_table(rows)}"
    )
    write_results(results_folder(options.name), runs, report)
    print(report)


if __name__ == "__main__":
    main()
