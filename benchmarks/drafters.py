"""Every drafter under every rule on the built-in tasks and on a copy-heavy one: where which one wins.

    python -m benchmarks.drafters --shape tinyllama-1.1b --draft-shape llama-68m --dtype bfloat16 --requests 6

Models are the built-in pair, or the pair inflated to a larger shape (benchmarks/inflate.py): shapes, cost and
acceptance are real, weights are not. The copy-heavy task asks again what was asked and answered further up in the same
prompt: half of it quotes a passage (QA), half edits a query of the same schema (code). The corpus of `retrieval` is of
the tasks' train split; prompts are of the test split. `bridge` goes through text although the pair shares a tokenizer:
its row shows what that detour costs. Rounds are interleaved; steps per call and acceptance depend on the seed alone.

Cases are tasks x rules x drafters, each with an engine of its own. At a large shape choose some of them, names
with commas between: --tasks qa,copy --rules search --drafters "no draft,beam,bridge".
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, markdown_table, results_folder, write_results
from benchmarks.inflate import SHAPES
from benchmarks.speed import Bench, prepare
from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.engine.drafting.bridge.bridged import BridgedDraft
from dsbd_cli.engine.drafting.index import CorpusTokens, write_index
from dsbd_cli.models.checkpoints.vocabulary import markers
from dsbd_cli.models.tokenizer import HFCodec
from dsbd_cli.requests import RequestResult, derive_seed
from training.tasks import GENERATORS

NEW_TOKENS = 48
WARM_UP_TOKENS = 4
CORPUS_RECORDS = 2000

NO_DRAFT: dict[str, Any] = {"depth": 0}
DRAFTED: dict[str, dict[str, Any]] = {
    "beam": {"drafter": "beam"},
    "rsd-c": {"drafter": "rsd-c"},
    "rsd-s": {"drafter": "rsd-s"},
    "dynamic-tree greedy": {"drafter": "dynamic-tree"},
    "dynamic-tree threshold": {"drafter": "dynamic-tree", "tree": "threshold"},
    "dynamic-tree top-k": {"drafter": "dynamic-tree", "tree": "top-k"},
    "ngram": {"drafter": "ngram"},
    "retrieval": {"drafter": "retrieval"},
    "trigram": {"drafter": "trigram"},
    "retrieval+ngram": {"drafter": "retrieval+ngram"},
    "beam+ngram": {"drafter": "beam+ngram"},
    "beam+retrieval": {"drafter": "beam+retrieval"},
    "rsd-s+ngram": {"drafter": "rsd-s+ngram"},
    "bridge": {"drafter": "bridge"},
}
RULES = ("coupled", "rejection", "search")


@dataclass(frozen=True, slots=True)
class Case:
    """One bar of the picture."""

    task: str
    rule: str
    drafter: str


@dataclass(slots=True)
class Sums:
    """What the rounds of a case gave; counters are of the last round, because they are the same in all."""

    tokens_per_s: list[float] = field(default_factory=list)
    draft_ms_per_call: list[float] = field(default_factory=list)
    steps_per_call: float = 0.0
    nodes_per_call: float = 0.0
    accepted_by_depth: list[float] = field(default_factory=list)
    passed_by_depth: list[float] = field(default_factory=list)


CHOICES: dict[str, tuple[str, ...]] = {
    "tasks": (*GENERATORS, "copy"),
    "rules": RULES,
    "drafters": ("no draft", *DRAFTED),
}


def chosen_names(words: Sequence[str], known: Sequence[str]) -> list[str]:
    """Names from words that may hold several with commas. Raises ValueError for unknown and repeated ones."""
    names = [name.strip() for word in words for name in word.split(",")]
    for place, name in enumerate(names):
        if name not in known:
            raise ValueError(f"there is no {name!r}: choose of {', '.join(known)}")
        if name in names[:place]:
            raise ValueError(f"{name} stands there twice")
    return names


def copying(seed: int) -> Iterator[tuple[str, str]]:
    """Ids and prompts: two records of one context with their answers, then the first question once more."""
    groups = [GENERATORS[name].groups("test", seed, 2, 1) for name in sorted(GENERATORS)]
    for number in itertools.count():
        first, second = next(groups[number % len(groups)])
        told = [f"{record.prompt} {record.reference}\n\n" for record in (first, second)]
        yield f"copy-{number}", "".join(told) + first.prompt


def prompts_of(task: str, count: int) -> list[tuple[str, str]]:
    """Ids and prompts of a task."""
    if task == "copy":
        return list(itertools.islice(copying(1), count))
    return [(record.id, record.prompt) for record in itertools.islice(GENERATORS[task].records("test", 1), count)]


def make_index(path: Path, codec: HFCodec) -> None:
    """Records of the train split with their answers."""
    corpus = CorpusTokens()
    for task in GENERATORS.values():
        records = itertools.islice(task.records("train", 1), CORPUS_RECORDS)
        for ids in codec.encode_pieces([f"{record.prompt} {record.reference}" for record in records]):
            corpus.extend(ids)
            corpus.end_document()
    write_index(path, corpus, codec.token_bytes())


def make_engine(bench: Bench, case: Case, index: Path, options: argparse.Namespace) -> Engine:
    """The engine of one case."""
    chosen = NO_DRAFT if case.drafter == "no draft" else dict(DRAFTED[case.drafter])
    if "retrieval" in case.drafter:
        chosen["index"] = str(index)
    shape = {} if case.drafter == "no draft" else {"drafts_per_layer": options.drafts_per_layer, "depth": options.depth}
    rule: Any = case.rule
    method = MethodConfig.of({"rule": rule, "num_beams": options.num_beams, "width": "fixed", **shape, **chosen})
    draft: Any = bench.draft if method.needs_draft else None
    if method.drafter == "bridge":
        draft = BridgedDraft(bench.draft, bench.codec, bench.codec, markers(bench.codec, bench.codec))
    return Engine(bench.target, draft, bench.codec, method, batch_size=options.batch_size, log_steps=True)


def add_round(sums: Sums, engine: Engine, requests: Sequence[Request]) -> None:
    """Decode all requests once."""
    start = time.perf_counter()
    results = list(engine.run(requests))
    seconds = time.perf_counter() - start
    for result in results:
        if result.error is not None:
            raise result.error
    calls = sum(result.stats.target_calls for result in results)
    sums.tokens_per_s.append(sum(result.hypotheses[0].num_tokens for result in results) / seconds)
    sums.draft_ms_per_call.append(1e3 * sum(result.stats.draft_s for result in results) / calls)
    sums.steps_per_call = sum(result.stats.steps for result in results) / calls
    sums.nodes_per_call = sum(result.stats.drafted for result in results) / calls
    sums.accepted_by_depth, sums.passed_by_depth = by_depth(results, engine.method.depth)


def by_depth(results: Sequence[RequestResult], depth: int) -> tuple[list[float], list[float]]:
    """Of the layers that were reached at each depth: share of drafted nodes taken, and share that passed."""
    layers = [layer for result in results for step in result.stats.step_log for layer in step.layers]
    accepted, passed = [], []
    for number in range(1, depth + 1):
        here = [layer for layer in layers if layer.layer == number]
        drafted = sum(layer.drafted for layer in here)
        accepted.append(sum(layer.accepted for layer in here) / drafted if drafted else 0.0)
        passed.append(sum(layer.passed for layer in here) / len(here) if here else 0.0)
    return accepted, passed


def measure(bench: Bench, cases: Sequence[Case], index: Path, options: argparse.Namespace) -> dict[Case, Sums]:
    """Interleaved rounds, after a few tokens of one request to warm each engine up."""
    engines = {case: make_engine(bench, case, index, options) for case in cases}
    sampling = SamplingConfig(max_new_tokens=options.new_tokens)
    requests = {
        task: [Request(id=name, seed=derive_seed(0, name), prompt=text, sampling=sampling) for name, text in prompts]
        for task in {case.task for case in cases}
        for prompts in [prompts_of(task, options.requests)]
    }
    sums = {case: Sums() for case in cases}
    for case, engine in engines.items():
        first = replace(requests[case.task][0], sampling=SamplingConfig(max_new_tokens=WARM_UP_TOKENS))
        list(engine.run([first]))
    for number in range(options.rounds):
        for case, engine in engines.items():
            add_round(sums[case], engine, requests[case.task])
            done = sums[case]
            print(
                f"round {number + 1}: {case.task}, {case.rule}, {case.drafter}: {done.steps_per_call:.2f} steps/call, "
                f"{done.tokens_per_s[-1]:.1f} tokens/s",
                flush=True,
            )
    return sums


def report(sums: dict[Case, Sums], options: dict[str, Any]) -> None:
    """One table per task; ratios to no draft under the same rule are taken within a round."""
    env = environment()
    parts = [
        f"# Drafters: {options['shape']} with {options['draft_shape']}, {options['dtype']}, W {options['num_beams']}, "
        f"K {options['drafts_per_layer']}, D {options['depth']}\n\n`{env['command']}` on {env['device']}, commit "
        f"{env['commit']}. Passed: share of the layers reached at depth 1, 2, .. that gave all their beams.\n"
    ]
    for task in dict.fromkeys(case.task for case in sums):
        rows = [row_of(case, done, sums) for case, done in sums.items() if case.task == task]
        parts.append(f"## {task}\n\n{markdown_table(rows)}")
    runs = [
        {"task": case.task, "rule": case.rule, "drafter": case.drafter, **_fields(done), **options}
        for case, done in sums.items()
    ]
    text = "\n".join(parts)
    write_results(results_folder(options["name"]), runs, text)
    print(text)


def row_of(case: Case, done: Sums, sums: dict[Case, Sums]) -> dict[str, str]:
    """A line of the table."""
    plain = sums.get(Case(case.task, case.rule, "no draft"))
    ratio = ""
    if plain is not None:
        pairs = zip(done.tokens_per_s, plain.tokens_per_s, strict=True)
        ratio = f"{statistics.median(a / b for a, b in pairs):.2f}x"
    return {
        "rule, drafter": f"{case.rule}, {case.drafter}",
        "steps/call": f"{done.steps_per_call:.2f}",
        "nodes/call": f"{done.nodes_per_call:.1f}",
        "draft ms/call": f"{statistics.median(done.draft_ms_per_call):.2f}",
        "tokens/s": f"{statistics.median(done.tokens_per_s):.2f}",
        "vs no draft": ratio,
        "passed by depth": " ".join(f"{share:.2f}" for share in done.passed_by_depth),
    }


def _fields(done: Sums) -> dict[str, Any]:
    return {name: getattr(done, name) for name in done.__slots__}


def main() -> None:
    parser = argparse.ArgumentParser(description="Drafters x rules on the built-in pair.")
    parser.add_argument("--shape", choices=("small", *SHAPES), default="small")
    parser.add_argument("--draft-shape", choices=("small", *SHAPES), default="small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    for name, known in CHOICES.items():
        told = f"some of {', '.join(known)}, with commas"
        parser.add_argument(f"--{name}", nargs="+", default=list(known), help=told)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="at most, of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--drafts-per-layer", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--name", help="folder of the results; by default of the shape and W")
    options = parser.parse_args()
    for name, known in CHOICES.items():
        try:
            setattr(options, name, chosen_names(getattr(options, name), known))
        except ValueError as error:
            parser.error(f"--{name}: {error}")
    options.name = options.name or f"drafters-{options.shape}-w{options.num_beams}"
    bench = prepare(options.shape, options.draft_shape, getattr(torch, options.dtype), 2)
    cases = [Case(*names) for names in itertools.product(options.tasks, options.rules, options.drafters)]
    tokens = len(cases) * options.rounds * options.requests * options.new_tokens
    print(
        f"{len(cases)} cases, {options.rounds} rounds of {options.requests} requests: {tokens} tokens at most",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "corpus.index"
        make_index(index, bench.codec)
        with torch.inference_mode():
            report(measure(bench, cases, index, options), vars(options))


if __name__ == "__main__":
    main()
