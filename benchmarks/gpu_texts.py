"""Whole engines with and without kernels and CUDA graphs, token for token, on the built-in pair.

    python -m benchmarks.gpu_texts --records 24

One line per rule and way: rows whose tokens are those of plain iterations, and the largest difference of a
log-probability. Exits with 1 where a text differs, and with 2 without a GPU, where nothing can be compared.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import torch

from dsbd_cli import MethodConfig, ModelSpec, Request, SamplingConfig, load
from training.tasks import GENERATORS

RULES = ("coupled", "search", "rejection")
# (CUDA graphs, kernels); the first is compared with
WAYS = ((False, False), (False, True), (True, False), (True, True))
Texts = list[list[tuple[tuple[int, ...], float]]]


def texts(rule: str, graphs: bool, kernels: bool, records: int) -> Texts:
    """Tokens and log-probability of every hypothesis of every row."""
    method = MethodConfig.of({"rule": rule, "num_beams": 4, "drafts_per_layer": 8, "depth": 3, "width": "fixed"})
    spec = ModelSpec("builtin:target", device="cuda", dtype="float32")
    engine = load(spec, method=method, batch_size=4, cuda_graphs=graphs, kernels=kernels)
    rows = itertools.islice(GENERATORS["sql"].records("test", 1), records)
    sampling = SamplingConfig(max_new_tokens=48, n_best=4)
    requests = [Request(row.prompt, id=row.id, seed=at, sampling=sampling) for at, row in enumerate(rows)]
    return [[(beam.token_ids, beam.logprob) for beam in result.hypotheses] for result in engine.generate(requests)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=24, help="rows")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: there is one way only, and nothing to compare", file=sys.stderr)
        return 2
    failed = False
    for rule in RULES:
        plain: Texts | None = None
        for graphs, kernels in WAYS:
            answers = texts(rule, graphs, kernels, arguments.records)
            if plain is None:
                plain = answers
            same = [
                [a[0] for a in answer] == [b[0] for b in other] for answer, other in zip(plain, answers, strict=True)
            ]
            apart = max(
                (
                    abs(a[1] - b[1])
                    for answer, other in zip(plain, answers, strict=True)
                    for a, b in zip(answer, other, strict=False)
                ),
                default=0.0,
            )
            print(
                f"{rule:10} graphs {'yes' if graphs else 'no ':3} kernels {'yes' if kernels else 'no ':3} "
                f"{sum(same)} of {len(same)} rows the same, log-probabilities within {apart:.1e}",
                flush=True,
            )
            failed |= not all(same)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
