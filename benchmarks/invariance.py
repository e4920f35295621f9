"""How many rows' texts depend on who decodes beside them: on the drafts, on the batch, on the number of threads.

    python -m benchmarks.invariance --target PATH --draft none,ngram,PATH --dtype bfloat16 --seeds 25

Rules `coupled` and `search` promise the text of plain decoding, to the last bit. Every row (a prompt with a
seed; under `search` there are no seeds) is decoded without a draft and alone, and then with every draft in batches of
every size. Counted are rows that differ in the best text, in the token ids of any of the W hypotheses, and in the bits
of any log-probability. Every number of threads is compared within itself.

The rows are taken in rounds of one seed. After every comparison the report is written anew, so an interrupted run
leaves a report of the rows until then; the same command on the same day, or on any day where --name is an absolute
path, goes on after what it finds in runs.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import dsbd_cli
from benchmarks.common import environment, markdown_table, numbers, results_folder, write_results
from dsbd_cli import Engine, MethodConfig, ModelSpec, Request, RequestResult, SamplingConfig
from dsbd_cli.config.model import NUMERICS
from dsbd_cli.config.variants import DRAFTERS
from dsbd_cli.engine.protocols import ForestModel
from dsbd_cli.requests import derive_seed
from dsbd_cli.train.compare import with_draft

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a clockmaker who",
    "def fibonacci(n):",
    "SELECT name FROM singers WHERE",
    "The three primary colours are",
    "To make a good cup of tea,",
    "Dear Sir or Madam,",
    "The train to the mountains leaves at",
    "In 1969 the first people",
    "Question: What is the largest planet?\nAnswer:",
    "Translate to German: Good morning.\n",
    "A list of five fruits: apple,",
    "The difference between a virus and a bacterium is",
    "import numpy as np\n\n",
    "She opened the door and saw",
    "The recipe needs two eggs,",
    "Photosynthesis is the process by which",
    "1, 1, 2, 3, 5, 8,",
    "The opposite of hot is",
    "My favourite book is",
    "Monday, Tuesday, Wednesday,",
    "The stock market fell today because",
    "If all cats are animals and Tom is a cat, then",
    "<html>\n<head>\n<title>",
    "The quick brown fox",
    "Our meeting tomorrow is about",
    "A haiku about the sea:\n",
    "The speed of light in a vacuum is",
    "for (int i = 0; i < n; i++) {",
    "He could not remember where he had",
    "The main ingredients of bread are",
    "Summary: The company reported",
    "In the northern hemisphere, winter begins in",
    "Two plus two equals four, and three plus three equals",
    "Once the rain had stopped,",
    "The doctor advised her to",
    "schema: singer ( name, country, age )\nquestion: how many singers are there\nsql:",
    "passage: Kivel was a weaver. Nesen sold a mirror.\nquestion: who sold a mirror\nanswer:",
    "To be, or not to be,",
)
RULES = ("coupled", "search")
KEYS = ("round", "threads", "rule", "draft", "batch_size")
COUNTS = ("text", "tokens", "logprobs")


class Pair:
    """The target and the drafts, loaded once and shared by all engines."""

    def __init__(self, target: str, drafts: Sequence[str], dtype: str, numerics: Any) -> None:
        """drafts: none, names of drafters without a model, or models."""
        models = [name for name in drafts if name != "none" and name not in DRAFTERS]
        spec = ModelSpec(target, dtype=dtype, numerics=numerics)
        self.first = dsbd_cli.load(spec, models[0] if models else None)
        self.models: dict[str, ForestModel | None] = dict.fromkeys(models[:1], self.first.draft)
        for name in models[1:]:
            self.models[name] = with_draft(self.first, ModelSpec(name, "draft", dtype), spec).draft

    def engine(self, rule: Any, draft: str, batch_size: int, shape: dict[str, int]) -> Engine:
        """shape: num_beams, drafts_per_layer and depth."""
        settings: dict[str, Any] = {**shape, "rule": rule}
        if draft == "none":
            settings["depth"] = 0
        elif draft in DRAFTERS:
            settings["drafter"] = draft
        method = MethodConfig.of(settings)
        return self.first.replace(draft=self.models.get(draft), method=method, batch_size=batch_size)


def signature(result: RequestResult) -> tuple[object, object, object]:
    """Best text, token ids and bits of the log-probabilities of all hypotheses."""
    if result.error is not None:
        raise result.error
    beams = result.hypotheses
    return beams[0].text, [beam.token_ids for beam in beams], [beam.logprob.hex() for beam in beams]


def decode(engine: Engine, requests: Sequence[Request]) -> list[tuple[object, object, object]]:
    """A signature per row."""
    return [signature(result) for result in engine.run(requests)]


def rows_of(prompts: Sequence[str], seed: int, sampling: SamplingConfig) -> list[Request]:
    """One round: every prompt with this seed."""
    return [
        Request(prompt, id=str(index), seed=derive_seed(seed, str(index)), sampling=sampling)
        for index, prompt in enumerate(prompts)
    ]


def measure(
    pair: Pair, requests: Sequence[Request], number: int, options: argparse.Namespace, done: set[tuple[Any, ...]]
) -> Iterator[dict[str, Any]]:
    """One round: a line per comparison that is not done."""
    shape = {name: getattr(options, name) for name in ("num_beams", "drafts_per_layer", "depth")}
    every = [setting for setting in itertools.product(options.draft, options.batch_size) if setting != ("none", 1)]
    if options.in_turn:
        every = [every[number % len(every)]]
    for threads, rule in itertools.product(options.threads, options.rules):
        wanted = [setting for setting in every if (number, threads, rule, *setting) not in done]
        if not wanted or (rule == "search" and number):
            continue  # search has no seeds: every round would be the first one again
        torch.set_num_threads(threads)
        plain = decode(pair.engine(rule, "none", 1, shape), requests)
        for draft, batch_size in wanted:
            start = time.perf_counter()
            signatures = decode(pair.engine(rule, draft, batch_size, shape), requests)
            pairs = list(zip(plain, signatures, strict=True))
            yield {
                **dict(zip(KEYS, (number, threads, rule, draft, batch_size), strict=True)),
                "rows": len(requests),
                **{name: sum(a[i] != b[i] for a, b in pairs) for i, name in enumerate(COUNTS)},
                "differing_rows": [request.id for request, (a, b) in zip(requests, pairs, strict=True) if a[0] != b[0]],
                "seconds": time.perf_counter() - start,
            }


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """A table row per comparison, over all rounds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["rule"], run["threads"], run["draft"], run["batch_size"]), []).append(run)
    table = []
    for (rule, threads, draft, batch_size), some in groups.items():
        rows = sum(run["rows"] for run in some)
        counts = {name: sum(run[name] for run in some) for name in COUNTS}
        table.append(
            {
                "rule": rule,
                "threads": str(threads),
                "draft": Path(draft).name,
                "batch": str(batch_size),
                "best text": f"{counts['text']} of {rows}",
                f"token ids of all {runs[0]['settings']['num_beams']}": f"{counts['tokens']} of {rows}",
                "log-probability bits": f"{counts['logprobs']} of {rows}",
            }
        )
    return table


def write(folder: Path, runs: Sequence[dict[str, Any]], rounds: int) -> None:
    """runs.jsonl, env.json and report.md of the rounds until now."""
    env, settings = environment(), runs[0]["settings"]
    begun = 1 + max(run["round"] for run in runs)
    said = ", ".join(f"{name} {value}" for name, value in settings.items())
    text = (
        f"# Rows that differ from plain decoding alone\n\n`{env['command']}` on {env['device']}, "
        f"commit {env['commit']}: {said}.\n\nIn round {begun} of {rounds}. Held against the same rule without a draft, "
        f"one row at a time, with the same number of threads.\n\n{markdown_table(summary(runs))}"
    )
    write_results(folder, runs, text)


def earlier(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The comparisons of an earlier run of the same command."""
    path = folder / "runs.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return lines if all(line["settings"] == settings for line in lines) else []


def read_prompts(path: Path | None) -> list[str]:
    """Of a file of JSON lines with `prompt`, else those above."""
    if path is None:  # behind some of the others, so that lengths differ: 5 to 400 tokens
        others = (
            "\n".join((*PROMPTS[index + 1 :], *PROMPTS[:index]))[: 61 * index % 1500] for index in itertools.count()
        )
        return [f"{before}\n{prompt}" for before, prompt in zip(others, PROMPTS, strict=False)]
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def words(text: str) -> list[str]:
    """a,b -> [a, b]."""
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin:target")
    parser.add_argument("--draft", type=words, default=["none", "ngram", "builtin:draft"])
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--numerics", choices=NUMERICS, default="invariant")
    parser.add_argument("--prompts", type=Path, help="JSON lines with prompt (default: forty of this file)")
    parser.add_argument("--records", type=int, help="prompts at most")
    parser.add_argument("--seeds", type=int, default=1, help="rounds: each decodes every prompt with another seed")
    parser.add_argument(
        "--in-turn", action="store_true", help="a round is of one draft and batch size, the next in turn"
    )
    parser.add_argument("--rules", type=words, default=list(RULES))
    parser.add_argument("--batch-size", type=numbers, default=[1, 3, 8])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--drafts-per-layer", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--name", default="", help="name of the results folder, or its absolute path")
    options = parser.parse_args()
    prompts = read_prompts(options.prompts)[: options.records]
    kept = (
        "target",
        "draft",
        "dtype",
        "numerics",
        "rules",
        "batch_size",
        "threads",
        "num_beams",
        "drafts_per_layer",
        "depth",
        "in_turn",
    )
    settings = {name: getattr(options, name) for name in (*kept, "new_tokens")}
    settings |= {"prompts": str(options.prompts or "built in"), "records": len(prompts)}
    folder = results_folder(options.name or f"invariance-{Path(options.target).name.replace(':', '-')}-{options.dtype}")
    runs = earlier(folder, settings)
    if runs:
        print(f"{len(runs)} comparisons are in {folder}, going on after them", flush=True)
    sampling = SamplingConfig(max_new_tokens=options.new_tokens, n_best=options.num_beams)
    pair = Pair(options.target, options.draft, options.dtype, options.numerics)
    done = {tuple(run[key] for key in KEYS) for run in runs}
    for number in range(options.seeds):
        for run in measure(pair, rows_of(prompts, number, sampling), number, options, done):
            runs.append({**run, "settings": settings})
            write(folder, runs, options.seeds)
            print(
                f"round {number + 1} of {options.seeds}, {run['rule']}, {run['threads']} threads, {run['draft']}, "
                f"batch {run['batch_size']}: of {run['rows']} rows {run['text']} differ in the best text, "
                f"{run['tokens']} in token ids, {run['logprobs']} in log-probability bits ({run['seconds']:.0f} s)",
                flush=True,
            )
    if runs:
        print(markdown_table(summary(runs)))


if __name__ == "__main__":
    main()
