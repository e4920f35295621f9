"""Drafters that look up text, beside no draft, on five jobs: tokens a second, steps and nodes per call.

    python -m benchmarks.suffix --target models/qwen2.5-coder-1.5b-instruct --quantize int8 --drafters suffix,ngram

The jobs are questions for SQL (`sql`), the same questions a day later with other names, numbers and dates
(`sql-again`), extraction to JSON by a schema (`json`), edits of Python functions (`edit`) and chat (`chat`). Every
variant answers the same prompts in turn, and another one begins at each prompt. A variant keeps its engine during a
job, and so what its drafter has seen. For `sql-again` a drafter that keeps finished rows answers `sql` first, untimed.
One more prompt of each job warms up. A variant whose beams differ from those without a draft, in a token or a
log-probability, ends the run.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from benchmarks.common import markdown_table, numbers, publish, whole
from benchmarks.suffix_jobs import JOBS
from dsbd_cli import Engine, MethodConfig, Request, RequestResult, SamplingConfig, load
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.stats import RequestStats

NONE, GRAMMAR = "none", "grammar"
KEEPS_ROWS = "suffix"  # the drafter that looks up what finished rows hold


@dataclass
class Variant:
    """One engine and what it has done.

    Attributes:
        seconds: whole and decoding, of each batch. cut: answers that ended at the limit of new tokens.
    """

    engine: Engine
    seconds: list[tuple[float, float]] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    cut: int = 0

    def answer(self, requests: Sequence[Request]) -> list[RequestResult]:
        """Answer a batch, and count."""
        start = time.perf_counter()
        results = list(self.engine.run(requests))
        taken = time.perf_counter() - start
        for result in results:
            result.check()
            best = result.hypotheses[0]
            self.stats.add(result.stats)
            self.texts.append(best.text)
            self.tokens += best.num_tokens
            self.cut += best.finish_reason == "length"
        parts = [result.stats for result in results]
        self.seconds.append((taken, sum(part.draft_s + part.target_s + part.verify_s for part in parts)))
        return results

    def row(self, name: str, base: Variant) -> dict[str, str]:
        """Return its line of the table, beside a variant on the same prompts."""
        stats, cells = self.stats, dict[str, str]()
        for part, label in enumerate(("", "decoding ")):
            theirs, ours = ([seconds[part] for seconds in some.seconds] for some in (base, self))
            ratios = [one / other for one, other in zip(theirs, ours, strict=True)]
            cells[f"{label}tokens/s"] = f"{self.tokens / sum(ours):.1f}"
            cells[f"{label}by none"] = f"{statistics.median(ratios):.2f}"
            cells[f"{label}in all"] = f"{sum(theirs) / sum(ours):.2f}"
        shares = {source: part.accepted / max(1, stats.accepted) for source, part in stats.drafters.items()}
        return {
            "draft": name,
            **cells,
            "steps per call": f"{stats.steps_per_call:.2f}",
            "nodes per call": f"{stats.drafted / stats.target_calls:.1f}",
            "accepted": "-" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.0%}",
            "sources": ", ".join(f"{source} {share:.0%}" for source, share in shares.items()) or "-",
        }


def spelled(text: str) -> list[str]:
    """Return the drafters of a list. A comma before a setting, as in `A:4,share=2`, does not split."""
    return re.split(r",(?![a-z-]+=)", text)


def depth(text: str) -> int | None:
    """Return a number of layers; None for auto."""
    return None if text == "auto" else whole(text)


def limits(text: str) -> dict[str, int]:
    """Return new tokens by job: edit=200,chat=64."""
    pairs = [part.partition("=") for part in text.split(",")]
    return {jobs(name)[0]: whole(count) for name, _, count in pairs}


def jobs(text: str) -> list[str]:
    """Return names of jobs."""
    if unknown := set(text.split(",")) - set(JOBS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: the jobs are {', '.join(JOBS)}")
    return text.split(",")


def requests(name: str, beams: int, options: argparse.Namespace) -> list[Request]:
    """Return the prompts of a job, the first of which warms up."""
    job = JOBS[name]
    sampling = SamplingConfig(max_new_tokens=options.new_tokens.get(name, job.tokens), n_best=beams)
    found = islice(job.conversations(), None if options.rows is None else options.rows + 1)
    return [
        Request(id=f"{name}-{number}", messages=tuple(messages), sampling=sampling, grammar=job.grammar)
        for number, messages in enumerate(found)
    ]


def variants(base: Engine, name: str, beams: int, options: argparse.Namespace) -> dict[str, Variant]:
    """Return an engine for each variant of a job, which share their model."""
    shape = {"depth": options.depth, "drafts_per_layer": options.drafts_per_layer}
    methods = {NONE: MethodConfig(rule="search", num_beams=beams, depth=0)}
    if JOBS[name].grammar is not None:  # as the command drafts where nothing is asked for
        methods[GRAMMAR] = MethodConfig(rule="search", num_beams=beams, drafter=GRAMMAR)
    for drafter in options.drafters:
        if drafter not in methods:
            methods[drafter] = MethodConfig(rule="search", num_beams=beams, drafter=drafter, **shape)
    return {
        drafter: Variant(base.replace(method=method, draft=base.draft if method.needs_draft else None))
        for drafter, method in methods.items()
    }


def compare(base: Engine, name: str, beams: int, options: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Return a table of all variants on one job, and a line for each."""
    every, prompts, size = variants(base, name, beams, options), requests(name, beams, options), options.batch_size
    for drafter, variant in every.items():
        before = JOBS[name].before
        if before is not None and KEEPS_ROWS in variant.engine.method.drafter_names:
            variant.answer(requests(before, beams, options))
        variant.answer(prompts[:1])
        every[drafter] = Variant(variant.engine)
    order = list(every)
    for start in range(1, len(prompts), size):
        batch = prompts[start : start + size]
        answers = {
            drafter: [
                [(beam.token_ids, beam.logprob) for beam in result.hypotheses]
                for result in every[drafter].answer(batch)
            ]
            for drafter in order
        }
        order = [*order[1:], order[0]]
        for drafter, answer in answers.items():
            if answer != answers[NONE]:
                raise SystemExit(f"{batch[0].id}: {drafter} gives other beams than {NONE}")
    plain = every[NONE]
    title = (
        f"**{name}, {beams} beam{'s' * (beams > 1)}: {len(plain.texts)} prompts, "
        f"{plain.tokens / len(plain.texts):.0f} tokens an answer, {plain.cut} cut**"
    )
    runs = [
        {"job": name, "beams": beams, "draft": drafter, "seconds": variant.seconds, "tokens": variant.tokens,
         "stats": asdict(variant.stats), "texts": variant.texts if drafter == NONE else None}
        for drafter, variant in every.items()
    ]  # fmt: skip
    table = markdown_table([variant.row(drafter, plain) for drafter, variant in every.items()])
    print(f"{title}\n\n{table}\n", flush=True)
    return f"{title}\n\n{table}", runs


def arguments() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft", help="for drafters that run a model, as beam+suffix")
    parser.add_argument("--quantize", choices=["int8"])
    parser.add_argument("--num-beams", type=numbers, default=[1, 4], metavar="W,W")
    parser.add_argument("--jobs", type=jobs, default=list(JOBS), metavar="JOB,JOB", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--rows", type=whole, help="first rows of each job, one more warms up; default: all")
    parser.add_argument("--new-tokens", type=limits, default={}, metavar="JOB=N,JOB=N", help="at most")
    parser.add_argument(
        "--drafters", type=spelled, default=["ngram"], metavar="A,B", help="as dsbd --drafter takes them"
    )
    parser.add_argument("--depth", type=depth, metavar="D", help="auto, the default, or a number of layers")
    parser.add_argument("--drafts-per-layer", type=whole, metavar="K")
    parser.add_argument("--batch-size", type=whole, default=1)
    parser.add_argument("--name", default="suffix", help="folder of the results")
    return parser


def main() -> None:
    """Measure, and write the report."""
    options = arguments().parse_args()
    target = ModelSpec(options.target, dtype="bfloat16", quantize=options.quantize)
    draft = options.draft and ModelSpec(options.draft, "draft", dtype="bfloat16", quantize=options.quantize)
    method = MethodConfig(rule="search", num_beams=max(options.num_beams), depth=1 if draft else 0)
    base = load(target, draft, method=method, batch_size=options.batch_size)
    parts, runs = [], []
    for beams in options.num_beams:
        for name in options.jobs:
            part, lines = compare(base, name, beams, options)
            parts.append(part)
            runs += lines
    about = (
        f"Prompts by {options.batch_size}. Ratios to none: the median of the prompts, and in all, by the sum of the "
        "seconds. Decoding: without the prompts. Sources: whose nodes were accepted."
    )
    publish(options.name, runs, "Drafters that look up text", about, *parts)


if __name__ == "__main__":
    main()
