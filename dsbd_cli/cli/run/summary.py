"""`--set summary`: one JSON file that says what a run did, with what, and how it ended; written however it ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dsbd_cli.cli.run.messages import utc_now
from dsbd_cli.cli.run.signals import StoppedError
from dsbd_cli.errors import DsbdError, OutputError, plural
from dsbd_cli.io.lines.jsonl import OUTPUT_CLOSED, ClosedOutputError
from dsbd_cli.io.lines.replace import check_replaceable, write_atomically
from dsbd_cli.io.lines.resume import Found
from dsbd_cli.io.records.native_record import draft_fields, phase_seconds
from dsbd_cli.io.schemas.contracts import SUMMARY
from dsbd_cli.lab.metrics.environment import versions
from dsbd_cli.requests import EngineInfo, RequestResult
from dsbd_cli.stats import RequestStats

if TYPE_CHECKING:
    from dsbd_cli.scale.workers import WorkerReport

ROWS_FAILED = 3
ENGINE_FIELDS = ("device", "dtype", "draft_device", "draft_dtype", "draft_form", "threads", "processor")


def rows_exit_code(totals: Totals) -> int:
    """Return the exit code of a run that came to its end: 3 if a row of the output failed, now or earlier, else 0."""
    return ROWS_FAILED if totals.failed or totals.skipped_failed else 0


class Summary:
    """A `with` block around the run; on leaving it, the file is written."""

    def __init__(self, path: Path | None, totals: Totals, settings: dict[str, object]) -> None:
        self.info: EngineInfo | None = None
        self.workers: Callable[[], Sequence[WorkerReport]] | None = None
        self._path, self._totals, self._settings = path, totals, settings
        self._started = utc_now()

    def __enter__(self) -> Self:
        """Check that the file can be written in the end. Raises OutputError."""
        if self._path is not None:
            check_replaceable(self._path)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._path is None:
            return
        try:
            write_atomically(self._path, SUMMARY.page(self._content(error)))
        except OutputError:
            if error is None:
                raise

    def _content(self, error: BaseException | None) -> dict[str, object]:
        info = self.info
        ending, code = _ending(error, self._totals)
        return {
            "schema": SUMMARY.id,
            "ending": ending,
            "exit_code": code,
            "message": " ".join(str(error).split()) if error is not None else None,
            "started": self._started,
            "ended": utc_now(),
            **self._totals.numbers(),
            "energy_j": None,
            "energy_source": "unavailable",
            "settings": self._settings,
            "device": None if info is None else _engine(info),
            **({} if self.workers is None else {"workers": [asdict(report) for report in self.workers()]}),
            "versions": versions(),
        }


def _engine(info: EngineInfo) -> dict[str, object]:
    ops = [dict(zip(("op", "backend", "reason"), op, strict=True)) for op in info.ops]
    return {**{name: getattr(info, name) for name in ENGINE_FIELDS}, "ops": ops}


def _ending(error: BaseException | None, totals: Totals) -> tuple[str, int]:
    if error is None:
        return "complete", rows_exit_code(totals)
    if isinstance(error, StoppedError):
        return "stopped", error.exit_code
    if isinstance(error, ClosedOutputError):
        return "output closed", OUTPUT_CLOSED
    return "failed", error.exit_code if isinstance(error, DsbdError) else 1


class Totals:
    """Counts of one run. Times are intervals of the monotonic clock. may_draft: a drafter serves the run, so the line
    says where it was never asked."""

    def __init__(self) -> None:
        self.may_draft = False
        self.started = time.perf_counter()
        self.rows = self.failed = self.skipped = self.skipped_failed = self.retried = self.duplicates = 0
        self.prompt_tokens = self.tokens = self.all_tokens = self.truncated_rows = self.invalid_rows = 0
        self.overruled_rows = self.cut_rows = 0
        self.stats = RequestStats()
        self.errors: Counter[str] = Counter()

    def add(self, result: RequestResult) -> None:
        """Count the tokens and the statistics of one result."""
        self.prompt_tokens += result.prompt_tokens
        counts = [beam.num_tokens for beam in result.hypotheses]
        self.tokens += counts[0] if counts else 0
        self.all_tokens += sum(counts)
        self.truncated_rows += result.truncated_tokens > 0
        self.invalid_rows += result.invalid
        self.cut_rows += result.invalid and result.hypotheses[0].finish_reason == "length"
        self.stats.add(result.stats)

    def skip(self, record: Found) -> None:
        """Count a row that an earlier run has written a record of."""
        self.skipped += 1
        self.skipped_failed += record == "failed"

    @property
    def seconds(self) -> float:
        """Seconds since the first row could start."""
        return max(time.perf_counter() - self.started, 1e-9)

    def line(self, unfinished: int = 0, *, counts_rows: bool = True) -> str:
        """Return one line of the rows, the tokens/s of the best texts, the steps per target call and the acceptance.

        unfinished: tokens of rows that are not written yet. counts_rows: the line begins with the number of rows.
        """
        stats, tokens = self.stats, self.tokens + unfinished
        parts = [plural(self.rows, "row")] if counts_rows else []
        if tokens:
            parts += [plural(tokens, "token"), f"{tokens / self.seconds:.1f} tokens/s"]
        if stats.target_calls:
            parts.append(f"{stats.steps_per_call:.2f} steps per call")
        if stats.prompt_tokens_reused:
            parts.append(f"{stats.prompt_tokens_reused} prompt tokens reused")
        if stats.acceptance_rate is not None:
            rates = [(name, part.acceptance_rate) for name, part in stats.drafters.items()]
            apart = ", ".join(f"{name} {rate:.0%}" for name, rate in rates if rate is not None)
            parts.append(f"{stats.acceptance_rate:.0%} accepted" + (f" ({apart})" if apart else ""))
        elif self.may_draft and stats.target_calls:
            parts.append("nothing drafted")
        if self.invalid_rows:
            cut, others = self.cut_rows, self.invalid_rows - self.cut_rows
            parts += [f"{cut} cut before they matched their grammar (raise --max-new-tokens)"] if cut else []
            parts += [f"{others} not valid under their schema"] if others else []
        if self.overruled_rows:
            parts.append(f"{self.overruled_rows} asked for sampling (not used: --decode search)")
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.skipped:
            parts.append(f"{self.skipped} done before")
        if self.skipped_failed:
            parts.append(f"{self.skipped_failed} of them failed (--existing retry answers them again)")
        return ", ".join(parts)

    def numbers(self) -> dict[str, object]:
        """Return the same counts and more, by name; times are in seconds."""
        stats, seconds = self.stats, self.seconds
        return {
            "rows": {
                "written": self.rows,
                "answered": self.rows - self.failed,
                "failed": self.failed,
                "done_before": self.skipped,
                "failed_before": self.skipped_failed,
                "retried": self.retried,
                "duplicate_ids": self.duplicates,
                "truncated": self.truncated_rows,
                "invalid": self.invalid_rows,
            },
            "errors": dict(sorted(self.errors.items())),
            "tokens": {
                "prompt": self.prompt_tokens,
                "prompt_reused": stats.prompt_tokens_reused,
                "best_texts": self.tokens,
                "all_beams": self.all_tokens,
                "best_texts_per_s": round(self.tokens / seconds, 3),
            },
            "steps": stats.steps,
            "target_calls": stats.target_calls,
            "draft_calls": stats.draft_calls,
            "steps_per_call": round(stats.steps_per_call, 6) if stats.target_calls else None,
            **draft_fields(stats),
            "seconds": {"total_s": round(seconds, 6), **phase_seconds(stats)},
        }
