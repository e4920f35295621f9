"""What it costs to answer in several processes.

    python -m benchmarks.scale                      all of it, on a quiet machine: about ten minutes
    python -m benchmarks.scale --only driver merge  some of it

driver    rows per second of `dsbd generate --workers 2` whose workers (tests/helpers/fake.py) answer at once, and what
the
          driver alone could do: rows per second of its own processor time. The aim is 10,000.
first     seconds from the start of the command to its first record, with a Ray worker and without.
overhead  the built-in pair over --rows rows, one Ray worker against none, interleaved; the aim is 10 % at most.
scaling   one worker against two, of one thread each.
merge     1,000,000 small records of 16 parts: seconds, records per second, peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import environment, markdown_table, results_folder, write_results

ROOT = Path(__file__).parents[1]
FAKE, REAL = [sys.executable, "-m", "tests.helpers.fake"], [sys.executable, "-m", "dsbd_cli"]
WORDS = "the table of singers holds name, country and age; how many are there "
Run = dict[str, Any]


def write_prompts(path: Path, rows: int, *, short: bool = False) -> Path:
    """Rows with ids; of 400 bytes, or such as the built-in pair knows."""
    with path.open("w") as stream:
        for number in range(rows):
            prompt = f"question: what did Nesen number {number} do\nanswer:\n" if short else f"{number} {WORDS * 6}"
            stream.write(json.dumps({"id": f"r{number}", "prompt": prompt}) + "\n")
    return path


def generate(command: list[str], source: Path, *options: str) -> tuple[Run, float]:
    """The --set summary of one run, and the driver's own processor seconds."""
    with tempfile.TemporaryDirectory() as name:
        summary = Path(name) / "summary.json"
        call = [*command, "generate", "-i", str(source), "-o", f"{name}/out.jsonl", "--set", f"summary={summary}", "-q"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DSBD_TARGET": "builtin:target", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([*call, *options], cwd=ROOT, env=environment)
        _, status, used = os.wait4(process.pid, 0)  # of this process alone: Ray's are not waited for by it
        assert os.waitstatus_to_exitcode(status) == 0, "the run failed"
        run: Run = json.loads(summary.read_text())
        return run, used.ru_utime + used.ru_stime


def per_second(summary: Run) -> float:
    """Rows per second since the workers were loaded."""
    return float(summary["rows"]["written"] / summary["seconds"]["total_s"])


def driver(folder: Path, rows: int, repeats: int) -> list[Run]:
    """The driver with workers that answer at once."""
    source, few = write_prompts(folder / "many.jsonl", rows * 10), write_prompts(folder / "few.jsonl", 10)
    measurements = []
    for workers in ("0", "2"):
        options = () if workers == "0" else ("--workers", workers, "--batch-size", "64")
        _, idle = generate(FAKE, few, *options)
        runs = [generate(FAKE, source, *options) for _ in range(repeats)]
        measurements.append(
            {
                "what": "driver",
                "case": f"{workers} workers, {rows * 10} rows",
                "rows_per_s": round(median(per_second(summary) for summary, _ in runs)),
                "rows_per_driver_cpu_s": round(median(rows * 10 / max(used - idle, 1e-3) for _, used in runs)),
            }
        )
    return measurements


def first(folder: Path, rows: int, repeats: int) -> list[Run]:
    """Seconds to the first record."""
    source = write_prompts(folder / "first.jsonl", 20)
    measurements = []
    for workers in ((), ("--workers", "1")):
        seconds = []
        for _ in range(repeats):
            begun = time.perf_counter()
            call = [*FAKE, "generate", "-q", "-i", str(source), *workers]
            with subprocess.Popen(
                call, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "DSBD_TARGET": "builtin:target"}
            ) as process:
                assert process.stdout is not None
                process.stdout.readline()
                seconds.append(time.perf_counter() - begun)
        case = "one Ray worker" if workers else "no workers"
        measurements.append({"what": "first record", "case": case, "seconds": round(median(seconds), 2)})
    return measurements


def compared(what: str, folder: Path, rows: int, repeats: int, cases: dict[str, tuple[str, ...]]) -> list[Run]:
    """The built-in pair in several ways, interleaved."""
    source = write_prompts(folder / f"{what}.jsonl", rows, short=True)
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, options in cases.items():
            summary, _ = generate(REAL, source, "--max-new-tokens", "16", *options)
            speeds[name].append(per_second(summary))
    base = median(next(iter(speeds.values())))
    return [
        {
            "what": what,
            "case": name,
            "rows_per_s": round(median(values), 2),
            "of_the_first": round(median(values) / base, 3),
        }
        for name, values in speeds.items()
    ]


def overhead(folder: Path, rows: int, repeats: int) -> list[Run]:
    """One Ray worker against none."""
    return compared("overhead", folder, rows, repeats, {"no workers": (), "one Ray worker": ("--workers", "1")})


def scaling(folder: Path, rows: int, repeats: int) -> list[Run]:
    """Two workers against one."""
    return compared(
        "scaling", folder, rows, repeats, {f"{workers} of one thread": ("--workers", workers) for workers in ("1", "2")}
    )


def merge(folder: Path, rows: int, repeats: int) -> list[Run]:
    """Sixteen parts put together."""
    records, parts = rows * 500, 16
    names = []
    for part in range(parts):
        path = folder / f"m.jsonl.{part}-of-{parts}"
        names.append(str(path))
        with path.open("w") as stream:
            for index in range(part, records, parts):
                stream.write(f'{{"schema": "dsbd.output/1", "index": {index}, "text": "{WORDS}"}}\n')
        settings = {"shard": f"{part}/{parts}", "input_bytes": 1, "input_head": ""}
        end = {"rows": records, "input_digest": ""}
        content = {"schema": "dsbd.run/1", "created": 1, "settings": settings, **end}
        Path(f"{path}.dsbd-run").write_text(json.dumps(content))
    # a small process in between, because a child's peak begins with its parent's memory
    wrapper = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    call = [sys.executable, "-c", wrapper, *REAL, "merge", *names, "-o", str(folder / "merged.jsonl"), "-q"]
    begun = time.perf_counter()
    done = subprocess.run(call, check=True, cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    peak = int(done.stdout) / 1024
    return [
        {
            "what": "merge",
            "case": f"{records} records, {parts} parts",
            "seconds": round(seconds, 1),
            "rows_per_s": round(records / seconds),
            "peak_mib": round(peak, 1),
        }
    ]


PARTS: dict[str, Callable[[Path, int, int], list[Run]]] = {
    "merge": merge,
    "driver": driver,
    "first": first,
    "overhead": overhead,
    "scaling": scaling,
}


def main() -> None:
    """Measure, print and keep the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True)
    chosen = parser.parse_args()
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="dsbd-scale-") as name:
        for part, measure in PARTS.items():
            if part in chosen.only:
                runs += measure(Path(name), chosen.rows, chosen.repeats)
                print(json.dumps(runs[-1]), flush=True)
    keys = list(dict.fromkeys(key for run in runs for key in run))
    table = markdown_table([{key: str(run.get(key, "")) for key in keys} for run in runs])
    report = f"# Several processes\n\n{(__doc__ or '').strip()}\n\n    {environment()['command']}\n\n{table}"
    print(report)
    if chosen.keep:
        write_results(results_folder("scale"), runs, report)


if __name__ == "__main__":
    main()
