"""Answers of the built-in pair on test records of both built-in tasks, method by method.

    python -m benchmarks.scores --records 200

Quality is execution accuracy (sql) and exact match (qa) of the best beam. Speed is not measured here.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict
from typing import Any

from benchmarks.common import environment, markdown_table, results_folder, write_results
from dsbd_cli import Engine, MethodConfig, Request, RequestResult, SamplingConfig, load
from dsbd_cli.lab.tasks.choose import TASKS
from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.requests import derive_seed
from training.tasks import GENERATORS

METHODS: dict[str, MethodConfig] = {
    "greedy": MethodConfig(rule="search", num_beams=1, depth=0),
    "multinomial": MethodConfig(rule="coupled", num_beams=1, depth=0),
    "speculative sampling": MethodConfig(rule="rejection", num_beams=1, drafts_per_layer=1, depth=4, width="fixed"),
    "beam search": MethodConfig(rule="search", depth=0),
    "beam sampling": MethodConfig(rule="coupled", depth=0),
    "dsbd search": MethodConfig(rule="search", depth=4),
    "dsbd coupled": MethodConfig(rule="coupled", depth=4),
    "dsbd rejection": MethodConfig(rule="rejection", width="fixed"),
    "dsbd coupled, threshold": MethodConfig(rule="coupled", width="threshold"),
    "dsbd rejection, threshold": MethodConfig(rule="rejection", width="threshold"),
    "dsbd with-replacement, threshold": MethodConfig(rule="with-replacement", width="threshold"),
    "dsbd rejection, memory-saving": MethodConfig(rule="rejection", width="threshold", memory_saving=True),
}


def requests_of(records: list[TaskRecord], seed: int) -> list[Request]:
    """The tool's default sampling settings."""
    sampling = SamplingConfig(max_new_tokens=96)
    return [Request(id=r.id, seed=derive_seed(seed, r.id), prompt=r.prompt, sampling=sampling) for r in records]


def measure(engine: Engine, task: str, records: list[TaskRecord], seed: int) -> dict[str, Any]:
    """Quality and counters of one method on one task."""
    results = list(engine.run(requests_of(records, seed)))
    scorer = TASKS[task]
    right = [scorer.score(r, _text(result))[scorer.metrics[0]] for r, result in zip(records, results, strict=True)]
    stats = [result.stats for result in results]
    best = [result.hypotheses[0] for result in results]
    tokens = sum(hypothesis.num_tokens for hypothesis in best)
    longest = [result.prompt_tokens + result.hypotheses[0].num_tokens for result in results]
    drafted = sum(s.drafted for s in stats)
    return {
        "task": task,
        "records": len(records),
        "seed": seed,
        "right": sum(right) / len(right),
        "logprob_per_token": sum(hypothesis.logprob for hypothesis in best) / tokens,
        "steps_per_call": sum(s.steps for s in stats) / sum(s.target_calls for s in stats),
        "acceptance_rate": sum(s.accepted for s in stats) / drafted if drafted else None,
        "mean_width": sum(s.width_sum for s in stats) / sum(s.steps for s in stats),
        "peak_slots": max(s.kv_peak_slots for s in stats),
        "peak_slots_over_one_sequence": sum(s.kv_peak_slots for s in stats) / sum(longest),
        "exactness": engine.method.exactness,
        "method": {name: value for name, value in asdict(engine.method).items() if not name.startswith("_")},
    }


def _text(result: RequestResult) -> str:
    return result.hypotheses[0].text if result.hypotheses else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200, help="test records per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    arguments = parser.parse_args()
    runs = []
    for name in arguments.methods:
        method = METHODS[name]
        engine = load(draft="builtin:draft" if method.depth else None, method=method, batch_size=16)
        for task in TASKS:
            records = list(itertools.islice(GENERATORS[task].records("test", arguments.seed), arguments.records))
            runs.append({"name": name, **measure(engine, task, records, arguments.seed)})
            print(name, task, f"{runs[-1]['right']:.3f}", f"{runs[-1]['steps_per_call']:.2f}", flush=True)
    table = markdown_table([row for name in arguments.methods for row in [_row(name, runs)]])
    env = environment()
    report = (
        f"# Scores of the built-in pair\n\n`{env['command']}` on {env['device']}, commit {env['commit']}.\n\n{table}"
    )
    write_results(results_folder("scores"), runs, report)
    print(report)


def _row(name: str, runs: list[dict[str, Any]]) -> dict[str, str]:
    row = {"method": name}
    for run in (run for run in runs if run["name"] == name):
        task = run["task"]
        row[f"{task} right"] = f"{100 * run['right']:.1f} %"
        row[f"{task} log-prob/token"] = f"{run['logprob_per_token']:.3f}"
        row[f"{task} steps/call"] = f"{run['steps_per_call']:.2f}"
        row[f"{task} width"] = f"{run['mean_width']:.2f}"
        row[f"{task} slots"] = f"{run['peak_slots_over_one_sequence']:.2f}x"
    return row


if __name__ == "__main__":
    main()
