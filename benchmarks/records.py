"""Throughput and memory of reader and writer alone: lines in, an answer made up at once, records out.

    python -m benchmarks.records [--rows 100000] [--repeats 5]

The way is that of a run without its models: LineReader -> RowReader -> a result -> record -> LineWriter (a file, one
write per record). MB/s counts bytes in plus bytes out, by the clock (median, least and most of the passes) and per
second of processor time, which other work on the machine disturbs less. Each pass is a process of its own; the peak is
its resident memory. A pass over a tenth of the rows shows whether memory grows with the file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.io.lines.compression import open_input
from dsbd_cli.io.lines.jsonl import LineWriter
from dsbd_cli.io.lines.line_reader import LineReader
from dsbd_cli.io.records.native_record import native_record
from dsbd_cli.io.records.openai_record import openai_record
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.io.records.record_parts import MethodRecord
from dsbd_cli.io.records.row import Row
from dsbd_cli.requests import Hypothesis, Request, RequestResult
from dsbd_cli.stats import RequestStats

BAR_MB_PER_S = 50
STATS = RequestStats(31, 124, 128, 992, 310, 512, 640, 0.123456, 0.234567, 0.012345, 0.4)
WORDS = 'the table of singers holds name, country and age; "select count(*)" asks how many: '
ANSWER = " SELECT country, count(*) FROM singer WHERE age > 20 GROUP BY country\n"


def flat(number: int, prompt: str) -> object:
    """A row as most people write it."""
    return {"id": f"row-{number}", "prompt": prompt}


def envelope(number: int, prompt: str) -> object:
    """A line of an OpenAI batch file."""
    body = {
        "model": "m",
        "messages": [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": prompt}],
        "max_tokens": 64,
        "temperature": 0.7,
        "metadata": {"source": "bench", "place": str(number)},
    }
    return {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


CASES: dict[str, tuple[Callable[[int, str], object], int, str, str]] = {
    "flat, 400 B prompts": (flat, 400, ".jsonl", "native"),
    "flat, 1 KB prompts": (flat, 1000, ".jsonl", "native"),
    "flat, 4 KB prompts": (flat, 4000, ".jsonl", "native"),
    "OpenAI batch, 1 KB prompts": (envelope, 1000, ".jsonl", "openai"),
    "flat, 1 KB prompts, .zst": (flat, 1000, ".jsonl.zst", "native"),
}


def make_input(path: Path, case: str, rows: int) -> None:
    """The rows of a case; every prompt is different."""
    shape, size, _, _ = CASES[case]
    with LineWriter.create(path, overwrite=True) as writer:
        for number in range(rows):
            prompt = f"question {number}: {WORDS * (size // len(WORDS) + 1)}"[:size]
            writer.write(orjson.dumps(shape(number, prompt)))


def answer(request: Request) -> RequestResult:
    """What an engine would return."""
    beam = Hypothesis(f"{ANSWER}-- {request.id}", tuple(range(40)), "stop", -12.345678901234, -0.308641972530)
    return RequestResult(request, (beam,), 250, STATS)


def run_once(case: str, source_path: Path, output_path: Path) -> dict[str, float]:
    """One pass in this process."""
    reader = RowReader()
    method = MethodRecord(MethodConfig(depth=4), "builtin:target", "builtin:draft")
    form = CASES[case][3]
    rows = size_out = size_in = 0
    begin, cpu = time.perf_counter(), time.process_time()
    with (
        open_input(source_path) as stream,
        LineReader(stream, "bench") as source,
        LineWriter.create(output_path, overwrite=True) as writer,
    ):
        for item in source:
            if item is None:
                continue
            number, line = item
            row: Row = reader.read(line, index=rows, number=number)
            assert row.request is not None
            assert isinstance(line, bytes)
            result = answer(row.request)
            record = native_record(row, result, method) if form == "native" else openai_record(row, result, method)
            writer.write(record)
            rows += 1
            size_in += len(line) + 1
            size_out += len(record) + 1
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    # not ru_maxrss, which a process inherits from the one that started it
    status = Path("/proc/self/status").read_text().split()
    peak = int(status[status.index("VmHWM:") + 1]) / 1024
    return {"rows": rows, "bytes_in": size_in, "bytes_out": size_out, "s": seconds, "cpu_s": cpu, "peak_mib": peak}


def measure(case: str, rows: int, repeats: int) -> dict[str, Any]:
    """Median of `repeats` passes, each in a process of its own, and the peak over a tenth of the rows."""
    suffix = CASES[case][2]
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / f"in{suffix}", Path(folder) / f"out{suffix}"
        make_input(source, case, rows // 10)
        small = _child(case, source, output)
        make_input(source, case, rows)
        passes = [_child(case, source, output) for _ in range(repeats)]
    rates = sorted((result["bytes_in"] + result["bytes_out"]) / result["s"] / 1e6 for result in passes)
    last, seconds = passes[-1], median([result["s"] for result in passes])
    return {
        "case": case,
        "rows": rows,
        "mb_in": last["bytes_in"] / 1e6,
        "mb_out": last["bytes_out"] / 1e6,
        "mb_per_s": median(rates),
        "mb_per_s_min": rates[0],
        "mb_per_s_max": rates[-1],
        "mb_in_per_s": last["bytes_in"] / 1e6 / seconds,
        "mb_per_cpu_s": median(
            [(result["bytes_in"] + result["bytes_out"]) / result["cpu_s"] / 1e6 for result in passes]
        ),
        "us_per_row": seconds / rows * 1e6,
        "peak_mib": max(result["peak_mib"] for result in passes),
        "peak_mib_of_a_tenth": small["peak_mib"],
        "bar_mb_per_s": BAR_MB_PER_S,
    }


def _child(case: str, source: Path, output: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.records", "--pass", case, str(source), str(output)]
    done = subprocess.run(command, capture_output=True, check=True)
    result: dict[str, float] = orjson.loads(done.stdout)
    return result


def table(runs: list[dict[str, Any]]) -> str:
    """For people."""
    from benchmarks.common import markdown_table

    return markdown_table(
        [
            {
                "rows": run["case"],
                "MB in": f"{run['mb_in']:.0f}",
                "MB out": f"{run['mb_out']:.0f}",
                "MB/s in + out": f"{run['mb_per_s']:.1f} ({run['mb_per_s_min']:.1f}-{run['mb_per_s_max']:.1f})",
                "MB/s in": f"{run['mb_in_per_s']:.1f}",
                "MB per CPU s": f"{run['mb_per_cpu_s']:.1f}",
                "us per row": f"{run['us_per_row']:.1f}",
                "peak MiB": f"{run['peak_mib']:.1f}",
                "of a tenth": f"{run['peak_mib_of_a_tenth']:.1f}",
            }
            for run in runs
        ]
    )


def main() -> None:
    """All cases; results/<date>-<device>/records, and one JSON line on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    runs = []
    for case in CASES:
        runs.append(measure(case, arguments.rows, arguments.repeats))
        print(orjson.dumps(runs[-1]).decode(), file=sys.stderr)
    from benchmarks.common import results_folder, write_results

    load = f"Load average of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    report = f"# Reader and writer alone\n\n{(__doc__ or '').split(chr(10) * 2)[-1].strip()}\n\n{table(runs)}\n{load}\n"
    write_results(results_folder("records"), runs, report)
    print(orjson.dumps({run["case"]: round(run["mb_per_s"], 1) for run in runs}).decode())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--pass"]:  # a process that has not imported torch, so that its peak is its own
        sys.stdout.buffer.write(orjson.dumps(run_once(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))))
    else:
        main()
