"""One JSON line per method and setting, each complete by itself."""

from __future__ import annotations

import dataclasses

import orjson

from dsbd_cli.reports.bench_data import SCHEMA, BenchReport, BenchRow

__all__ = ["json_lines"]


def json_lines(report: BenchReport) -> bytes:
    """All rows. What was not measured is null."""
    return b"".join(orjson.dumps(_record(report, row)) + b"\n" for row in report.rows)


def _record(report: BenchReport, row: BenchRow) -> dict[str, object]:
    fields = dataclasses.asdict(row)
    energy = fields.pop("energy")
    return {
        "schema": SCHEMA,
        **fields,
        "tokens_per_s_pooled": row.tokens / row.seconds if row.seconds else None,
        "energy_source": energy.pop("source"),
        "energy": energy,
        "complete": report.complete,
        "run": report.run,
        **report.environment,
    }
