"""Places for results, facts of the machine that they come from, and tables."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.lab.metrics.environment import cpu_name, own_commit, versions
from dsbd_cli.requests import Request, RequestResult

__all__ = [
    "device_name",
    "environment",
    "markdown_table",
    "numbers",
    "own_memory",
    "publish",
    "results_folder",
    "step_seconds",
    "whole",
    "write_results",
]


def device_name() -> str:
    """The GPU's name, or the processor's with its threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    limit = f", limited to {name}" if (name := os.environ.get("DSBD_CPU")) else ""
    return f"{cpu_name()}{limit}, {torch.get_num_threads()} threads"


def environment() -> dict[str, Any]:
    """Versions, device, commit and the command that is running."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return {
        "command": " ".join(["python -m", sys.argv[0] if spec is None else spec.name, *sys.argv[1:]]),
        "commit": own_commit(),
        "device": device_name(),
        **versions(),
    }


def results_folder(name: str) -> Path:
    """benchmarks/results/<date>-<device kind>/<name>, made if missing."""
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    folder = Path(__file__).parent / "results" / f"{date.today().isoformat()}-{kind}" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_results(folder: Path, runs: Sequence[dict[str, Any]], report: str) -> None:
    """runs.jsonl, env.json and report.md of one measurement."""
    (folder / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs), encoding="utf-8")
    (folder / "env.json").write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(report, encoding="utf-8")


def publish(name: str, runs: Sequence[dict[str, Any]], title: str, about: str, *parts: str) -> None:
    """Write and print a report in the folder `name`: its command, device and commit, what it is about, and tables."""
    env = environment()
    software = f"commit {env['commit']}, torch {env['torch']}, transformers {env['transformers']}"
    origin = f"`{env['command']}` on {env['device']}, {software}. {about}".rstrip()
    report = "\n\n".join((f"# {title}", origin, *parts))
    write_results(results_folder(name), runs, report)
    print(report, flush=True)


def markdown_table(rows: Sequence[dict[str, str]]) -> str:
    """Rows of equal keys as a markdown table, aligned so that it can be read as text; the first column left, the others
    right."""
    names = list(rows[0])
    lines = [
        [cell.replace("|", "\\|") for cell in line]
        for line in (names, *([row[name] for name in names] for row in rows))
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    rule = ["-" * (width + 1) + (":" if column else "-") for column, width in enumerate(widths)]
    padded = [
        [
            f" {cell:{'>' if column else '<'}{width}} "
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return "\n".join(f"|{'|'.join(line)}|" for line in (padded[0], rule, *padded[1:])) + "\n"


def numbers(text: str) -> list[int]:
    """1,2,4 -> [1, 2, 4]."""
    return [int(part) for part in text.split(",")]


def whole(text: str) -> int:
    """A count of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def own_memory(process: int) -> int:
    """Bytes of memory that belong to a process alone (RssAnon); 0 where it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def step_seconds(engine: Engine, requests: Iterable[Request]) -> tuple[list[float], list[RequestResult]]:
    """Answer requests: seconds of every iteration, and the results."""
    step, seconds = engine.stepper.step, list[float]()

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = step(*arguments)  # ends with a read of the counters: the device is done
        seconds.append(time.perf_counter() - start)
        return result

    engine.stepper.step = timed  # type: ignore[method-assign]
    try:
        results = list(engine.run(requests))
    finally:
        engine.stepper.step = step  # type: ignore[method-assign]
    for result in results:
        result.check()
    return seconds, results
