"""--summary: one JSON file that says what a run did, with what, and how it ended; written however it ends."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import orjson

from dsbd_cli._version import __version__
from dsbd_cli.errors import DsbdError, OutputError
from dsbd_cli.job.cli.messages import utc_now
from dsbd_cli.job.cli.signals import StoppedError
from dsbd_cli.job.cli.totals import Totals
from dsbd_cli.job.data.jsonl import ClosedOutputError
from dsbd_cli.job.data.resume import write_atomically

if TYPE_CHECKING:
    from dsbd_cli.scale.pool import WorkerReport
    from dsbd_cli.scale.worker import EngineNames

__all__ = ["SUMMARY_SCHEMA", "Summary", "rows_exit_code"]

SUMMARY_SCHEMA = "dsbd.summary/1"
PACKAGES = ("torch", "transformers", "tokenizers")
ROWS_FAILED = 3


def rows_exit_code(totals: Totals) -> int:
    """Of a run that came to its end: 3 where a row of the output has failed, now or earlier."""
    return ROWS_FAILED if totals.failed or totals.skipped_failed else 0


class Summary:
    """A `with` block around the run; on leaving it, the file is written."""

    def __init__(self, path: Path | None, totals: Totals, settings: dict[str, object]) -> None:
        self.info: EngineNames | None = None
        self.workers: Callable[[], Sequence[WorkerReport]] | None = None
        self._path, self._totals, self._settings = path, totals, settings
        self._started = utc_now()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._path is None:
            return
        try:
            write_atomically(self._path, orjson.dumps(self._content(error), option=orjson.OPT_INDENT_2) + b"\n")
        except OutputError:
            if error is None:
                raise

    def _content(self, error: BaseException | None) -> dict[str, object]:
        info = self.info
        ending, code = _ending(error, self._totals)
        return {
            "schema": SUMMARY_SCHEMA,
            "ending": ending,
            "exit_code": code,
            "message": " ".join(str(error).split()) if error is not None else None,
            "started": self._started,
            "ended": utc_now(),
            **self._totals.numbers(),
            "energy_j": None,
            "energy_source": "unavailable",
            "settings": self._settings,
            "device": None
            if info is None
            else {
                "device": info.device,
                "dtype": info.dtype,
                "draft_device": info.draft_device,
                "draft_dtype": info.draft_dtype,
                "kernels": list(info.kernels),
            },
            **({} if self.workers is None else {"workers": [asdict(report) for report in self.workers()]}),
            "versions": {"dsbd": __version__, "python": platform.python_version(), **_versions()},
        }


def _ending(error: BaseException | None, totals: Totals) -> tuple[str, int]:
    if error is None:
        return "complete", rows_exit_code(totals)
    if isinstance(error, StoppedError):
        return "stopped", error.exit_code
    if isinstance(error, ClosedOutputError):
        return "output closed", 0
    return "failed", error.exit_code if isinstance(error, DsbdError) else 1


def _versions() -> dict[str, str | None]:
    """As installed: nothing is imported for it."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
