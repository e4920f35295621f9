"""Files that a measuring command writes besides its tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dsbd_cli.errors import UsageError
from dsbd_cli.job.data.jsonl import check_new
from dsbd_cli.lab.reports.style import require_plots

__all__ = ["check_report_files"]


def check_report_files(files: Mapping[str, Path | None], *, existing: str | None) -> None:
    """Everything about output files, by option, that can be known before anything is measured. Raises UsageError."""
    named = [(name, path) for name, path in files.items() if path is not None]
    if existing == "overwrite" and not named:
        *first, last = files
        raise UsageError(f"--existing overwrite replaces {', '.join(first)} and {last}, but none is given: drop it")
    for place, (name, path) in enumerate(named):
        check_new(path, option=name, overwrite=existing == "overwrite")
        for other, taken in named[:place]:
            if path.resolve() == taken.resolve():
                raise UsageError(f"{other} and {name} are both {path}: name two files")
    if (plot := files.get("--plot")) is not None:
        require_plots("--plot", plot)
