"""Settings of DSBD against each other on both built-in tasks, and the defaults that a rule picks from them.

    python -m benchmarks.sweep --records 200

Every window of records is answered by every setting in turn. The rule: of the settings of the methods in --candidates
at --num-beams, those within 5 % of the fastest stay; of these the best quality wins. Speed is the median over both
tasks' windows of the ratio to beam sampling without a draft, combined over the tasks by the geometric mean; quality
is the mean of the tasks' main scores. Equal quality is decided by log-probability per token, then by speed.

Writes runs.jsonl, env.json, report.md and sweep.png to benchmarks/results/<date>-<device>/sweep.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from benchmarks.common import results_folder
from dsbd_cli import SamplingConfig, load
from dsbd_cli.lab.bench.prepare import BenchSpec
from dsbd_cli.lab.bench.run import Bench
from dsbd_cli.lab.bench.sweep import choose_methods, plan, read_values
from dsbd_cli.lab.reports.bench_data import BenchReport, BenchRow
from dsbd_cli.lab.reports.bench_json import json_lines
from dsbd_cli.lab.reports.bench_markdown import markdown_page
from dsbd_cli.lab.reports.bench_plot import bench_figure
from dsbd_cli.lab.reports.style import picture_bytes
from dsbd_cli.lab.tasks.choose import open_dataset

BASELINE = "beam-sampling"
REFERENCES = "greedy,beam-search,beam-sampling,hf-beam-search,hf-beam-sampling"
CANDIDATES = (
    "dsbd-coupled,dsbd-search,dsbd-coupled-auto,dsbd-search-auto,dsbd-rejection,dsbd-coupled-threshold,dsbd-rejection-threshold,"
    "dsbd-with-replacement-threshold,dsbd-memory-saving"
)
TOLERANCE = 0.05
LISTS = {"num_beams": "4", "drafts_per_layer": "4,8", "depth": "2,4", "width_threshold": "0.7,0.9"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting over all tasks: speed as ratio to the baseline, quality from 0 to 1, nats per token."""

    name: str
    speed: float
    quality: float
    logprob: float


def candidates(report: BenchReport, names: Sequence[str]) -> list[Candidate]:
    """Settings that every task has measured next to the baseline."""
    found = []
    rows: dict[str, list[BenchRow]] = {}
    for row in report.rows:
        if row.method in names and BASELINE in row.ratios and row.quality is not None:
            rows.setdefault(row.name, []).append(row)
    for name, mine in rows.items():
        if len(mine) == len(report.tasks):
            speed = math.exp(statistics.fmean(math.log(row.ratios[BASELINE].value) for row in mine))
            quality = statistics.fmean(row.quality.value for row in mine if row.quality is not None)
            logprob = statistics.fmean(row.logprob_per_token or 0.0 for row in mine)
            found.append(Candidate(name, speed, quality, logprob))
    return found


def choose(found: Sequence[Candidate], tolerance: float = TOLERANCE) -> list[Candidate]:
    """The settings within `tolerance` of the fastest, the chosen one first."""
    fastest = max(one.speed for one in found)
    near = [one for one in found if one.speed >= (1 - tolerance) * fastest]
    return sorted(near, key=lambda one: (-one.quality, -one.logprob, -one.speed))


def chosen_text(found: Sequence[Candidate], title: str) -> str:
    """The choice as markdown."""
    near = choose(found)
    lines = [
        f"## {title}\n",
        f"Of {len(found)} settings {len(near)} are within {TOLERANCE:.0%} of the fastest; best quality first:\n",
        "| setting | speed over beam sampling | quality | log-prob/token |",
        "| :------ | -----------------------: | ------: | -------------: |",
        *(f"| {c.name} | {c.speed:.2f}x | {100 * c.quality:.1f} % | {c.logprob:.3f} |" for c in near),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=200, help="records of each task")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--references", default=REFERENCES, help=f"methods to compare with; must hold {BASELINE}")
    parser.add_argument("--candidates", default=CANDIDATES, help="methods that the rule chooses from")
    parser.add_argument("--name", default="sweep", help="folder of the results")
    for axis, values in LISTS.items():
        parser.add_argument(f"--{axis.replace('_', '-')}", default=values)
    options = parser.parse_args()
    sweep = {axis: read_values(f"--{axis}", axis, getattr(options, axis)) for axis in LISTS}
    chosen_from, _ = choose_methods(options.candidates)
    planned = plan([*choose_methods(options.references)[0], *chosen_from], sweep)
    spec = BenchSpec(
        datasets=[open_dataset(task, None) for task in ("sql", "qa")],
        settings=planned.settings,
        records=options.records,
        rounds=options.rounds,
        batch_size=options.batch_size,
        sampling=SamplingConfig(max_new_tokens=options.max_new_tokens),
        seed=options.seed,
        notes=planned.notes,
    )
    running = Bench(load(), spec, command=sys.argv[1:])
    print(f"{len(planned.settings)} settings, {running.units} windows", flush=True)
    report = running.run(_told)
    command = shlex.join(["python", "-m", "benchmarks.sweep", *sys.argv[1:]])
    report = dataclasses.replace(report, environment={**report.environment, "command": command})
    _write(report, chosen_from, options.name)


def _told(done: int, total: int, name: str, left_s: float | None) -> None:
    if done % 20 == 0:
        left = "" if left_s is None else f", about {left_s / 60:.0f} minutes left"
        print(f"{done} of {total}{left}: {name}", flush=True)


def _write(report: BenchReport, chosen_from: Sequence[str], name: str) -> None:
    folder = results_folder(name)
    found = candidates(report, chosen_from)
    exact = candidates(report, [one for one in chosen_from if one in ("dsbd-coupled", "dsbd-search")])
    page = markdown_page(report, "Settings of DSBD on the built-in tasks")
    page += "\n" + chosen_text(found, "Chosen by the rule, among all candidates")
    if exact and len(exact) < len(found):
        page += "\n" + chosen_text(exact, "Chosen by the rule, among settings whose text is that of plain decoding")
    page += "\n![quality against speed, acceptance by depth](sweep.png)\n"
    (folder / "runs.jsonl").write_bytes(json_lines(report))
    about = {**report.environment, "run": report.run}
    (folder / "env.json").write_bytes(orjson.dumps(about, option=orjson.OPT_INDENT_2) + b"\n")
    (folder / "report.md").write_text(page, encoding="utf-8")
    (folder / "sweep.png").write_bytes(picture_bytes(bench_figure(report)))
    print(page)


if __name__ == "__main__":
    main()
