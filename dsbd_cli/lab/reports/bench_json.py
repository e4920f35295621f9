"""One JSON line per task, method and setting, each complete by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dsbd_cli.config.variants import DRAFTERS, FUSION, WIDTHS
from dsbd_cli.io.schemas.contracts import BENCH
from dsbd_cli.lab.reports.bench_data import BenchReport, BenchRow


def json_lines(report: BenchReport) -> bytes:
    """Return all rows as JSON lines. What was not measured is null, and so is a setting that has no effect."""
    return b"".join(BENCH.line(_record(report, row)) + b"\n" for row in report.rows)


def _record(report: BenchReport, row: BenchRow) -> dict[str, object]:
    fields = dataclasses.asdict(row)
    energy = fields.pop("energy")
    fields["settings"] = _acting(row.settings)
    return {
        "schema": BENCH.id,
        **fields,
        "tokens_per_s_pooled": row.tokens / row.seconds if row.seconds else None,
        "energy_source": energy.pop("source"),
        "energy": energy,
        "complete": report.complete,
        "run": report.run,
        **report.environment,
    }


def _acting(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a method of ours, null where another setting keeps them from having an effect. Settings of
    others' code are returned as they are."""
    if "depth" not in settings:
        return dict(settings)
    of_forest = {"drafts_per_layer", "width", "adaptive_depth", "drafter"}
    of_forest |= {setting.field for some in (*WIDTHS.values(), *DRAFTERS.values(), FUSION) for setting in some.settings}
    drafts = bool(settings["depth"])
    every = {**dict.fromkeys(sorted(of_forest)), **settings}
    return {name: value if drafts or name not in of_forest else None for name, value in every.items()}
