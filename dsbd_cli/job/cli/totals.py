"""Sums over the rows of a run, as a line for people and as numbers for --summary."""

from __future__ import annotations

import time
from collections import Counter

from dsbd_cli.job.records.native import drafter_fields
from dsbd_cli.requests import RequestResult
from dsbd_cli.stats import DrafterStats

__all__ = ["Totals"]


class Totals:
    """Counts of one run. Times are intervals of the monotonic clock."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.rows = self.failed = self.skipped = self.skipped_failed = self.retried = self.duplicates = 0
        self.prompt_tokens = self.tokens = self.all_tokens = self.truncated_rows = 0
        self.steps = self.target_calls = self.draft_calls = self.drafted = self.accepted = 0
        self.draft_s = self.target_s = self.verify_s = 0.0
        self.drafters: dict[str, DrafterStats] = {}
        self.errors: Counter[str] = Counter()

    def add(self, result: RequestResult) -> None:
        """Count what one result cost and gave."""
        self.prompt_tokens += result.prompt_tokens
        self.tokens += sum(beam.num_tokens for beam in result.hypotheses[:1])
        self.all_tokens += sum(beam.num_tokens for beam in result.hypotheses)
        self.truncated_rows += result.truncated_tokens > 0
        stats = result.stats
        for name in ("steps", "target_calls", "draft_calls", "drafted", "accepted", "draft_s", "target_s", "verify_s"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        for name, part in stats.drafters.items():
            self.drafters.setdefault(name, DrafterStats()).add(part)

    @property
    def seconds(self) -> float:
        """Since the first row could start."""
        return max(time.perf_counter() - self.started, 1e-9)

    def line(self, unfinished: int = 0) -> str:
        """Rows, tokens/s of the best texts, steps per target call, acceptance. unfinished: tokens of rows to come."""
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        tokens = self.tokens + unfinished
        parts = [rows, f"{tokens} tokens", f"{tokens / self.seconds:.1f} tokens/s"]
        if self.target_calls:
            parts.append(f"{self.steps / self.target_calls:.2f} steps per call")
        if self.drafted:
            rates = [(name, part.acceptance_rate) for name, part in self.drafters.items()]
            apart = ", ".join(f"{name} {rate:.0%}" for name, rate in rates if rate is not None)
            parts.append(f"{self.accepted / self.drafted:.0%} accepted" + (f" ({apart})" if apart else ""))
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.skipped:
            parts.append(f"{self.skipped} done before")
        if self.skipped_failed:
            parts.append(f"{self.skipped_failed} of them failed (--existing retry answers them again)")
        return ", ".join(parts)

    def numbers(self) -> dict[str, object]:
        """The same and more, by name; times in seconds."""
        seconds = self.seconds
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
            },
            "errors": dict(sorted(self.errors.items())),
            "tokens": {
                "prompt": self.prompt_tokens,
                "best_texts": self.tokens,
                "all_beams": self.all_tokens,
                "best_texts_per_s": round(self.tokens / seconds, 3),
            },
            "steps": self.steps,
            "target_calls": self.target_calls,
            "draft_calls": self.draft_calls,
            "steps_per_call": round(self.steps / self.target_calls, 6) if self.target_calls else None,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": round(self.accepted / self.drafted, 6) if self.drafted else None,
            **drafter_fields(self.drafters),
            "seconds": {
                "total_s": round(seconds, 6),
                "draft_s": round(self.draft_s, 6),
                "target_s": round(self.target_s, 6),
                "verify_s": round(self.verify_s, 6),
            },
        }
