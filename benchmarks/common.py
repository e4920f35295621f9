"""What every benchmark shares: where results go, what machine they come from, and tables."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dsbd_cli import __version__

__all__ = ["environment", "markdown_table", "results_folder", "write_results"]


def device_name() -> str:
    """The GPU's name, or the processor's with its core count."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {torch.get_num_threads()} threads"


def environment() -> dict[str, Any]:
    """Versions, device, commit and the command that is running."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    packages = ("torch", "transformers", "tokenizers", "typer", "numpy")
    return {
        "command": " ".join(["python -m", *_module(), *sys.argv[1:]]),
        "dsbd": __version__,
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "device": device_name(),
        **{name: _version(name) for name in packages},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _module() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [spec.name] if spec is not None else [sys.argv[0]]


def device_kind() -> str:
    """gpu or cpu."""
    return "gpu" if torch.cuda.is_available() else "cpu"


def results_folder(name: str) -> Path:
    """benchmarks/results/<date>-<device kind>/<name>, made if missing."""
    folder = Path(__file__).parent / "results" / f"{date.today().isoformat()}-{device_kind()}" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_results(folder: Path, runs: Sequence[dict[str, Any]], report: str) -> None:
    """runs.jsonl, env.json and report.md of one measurement."""
    (folder / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs), encoding="utf-8")
    (folder / "env.json").write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(report, encoding="utf-8")


def markdown_table(rows: Sequence[dict[str, str]]) -> str:
    """Rows of equal keys as a markdown table with aligned columns; the first column left, the others right."""
    names = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in names]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(names), rule, *(line([row[name] for name in names]) for row in rows)]) + "\n"
