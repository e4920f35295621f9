"""One JSON line per method, setting and split, each complete by itself."""

from __future__ import annotations

import dataclasses

import orjson

from dsbd_cli.reports.bench_data import SCHEMA, BenchReport, BenchRow

__all__ = ["json_lines"]


def json_lines(report: BenchReport) -> bytes:
    """All rows, those of dev records last. What was not measured is null."""
    pairs = [("test", row) for row in report.rows] + [("dev", row) for row in report.dev_rows]
    return b"".join(orjson.dumps(_record(report, row, split)) + b"\n" for split, row in pairs)


def _record(report: BenchReport, row: BenchRow, split: str) -> dict[str, object]:
    fields = dataclasses.asdict(row)
    energy = fields.pop("energy")
    return {
        "schema": SCHEMA,
        "split": split,
        "choice": _choice(report, row),
        **fields,
        "tokens_per_s_pooled": row.tokens / row.seconds if row.seconds else None,
        "energy_source": energy.pop("source"),
        "energy": energy,
        "complete": report.complete,
        "run": report.run,
        **report.environment,
    }


def _choice(report: BenchReport, row: BenchRow) -> dict[str, object] | None:
    """How the threshold of this row's curve was chosen; null where the row is on none."""
    for choice in report.choices:
        if row.task == choice.task and row.name in choice.curve:
            return {**dataclasses.asdict(choice), "rule": choice.rule, "is_chosen": row.name == choice.chosen}
    return None
