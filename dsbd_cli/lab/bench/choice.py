"""The choice of a threshold of rule fuzzy on dev records, for a report on test records (Holsman et al. 2025, section
4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.variants import FUZZY_THRESHOLD
from dsbd_cli.lab.bench.sweep import SweepSetting
from dsbd_cli.lab.reports.bench_data import BenchRow, ChosenThreshold

DEFAULT_TOLERANCE = 0.02
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class _ThresholdCurve:
    """Settings of rule fuzzy that differ in their threshold alone, the smallest first.

    Attributes:
        reference: the setting that draws from the target's own distribution with as many beams; None where none is run.
    """

    settings: tuple[SweepSetting, ...]
    reference: SweepSetting | None


def curves(settings: Sequence[SweepSetting]) -> tuple[_ThresholdCurve, ...]:
    """Return every curve of two thresholds or more. A sweep has one for each combination of W, K and D."""
    found: dict[tuple[object, ...], list[SweepSetting]] = {}
    for setting in settings:
        fields = setting.fields()
        if fields.get("rule") == "fuzzy":
            fields.pop(FUZZY_THRESHOLD.field)
            found.setdefault((setting.method, *fields.values()), []).append(setting)
    return tuple(
        _ThresholdCurve(tuple(sorted(some, key=_threshold)), reference_of(some[0], settings))
        for some in found.values()
        if len(some) > 1
    )


def reference_of(fuzzy: SweepSetting, settings: Sequence[SweepSetting]) -> SweepSetting | None:
    """Return a setting with the target's own distribution and as many beams; None where there is none. Rule rejection
    is preferred, otherwise the first such setting is taken."""
    exact = [one for one in settings if _is_exact(one) and one.config.num_beams == fuzzy.config.num_beams]
    return min(exact, key=lambda one: one.fields()["rule"] != "rejection", default=None)


def without_reference(settings: Sequence[SweepSetting]) -> bool:
    """Return whether some curve has no reference that its scores could be compared with."""
    return any(curve.reference is None for curve in curves(settings))


def choose(task: str, curve: _ThresholdCurve, rows: Mapping[str, BenchRow], tolerance: float) -> ChosenThreshold:
    """Choose the threshold with the most steps per target call; of equal ones the smallest.

    Only thresholds whose score is at most `tolerance` below the reference's are considered.

    rows: for each setting's name its row on dev records, the reference's included. Steps per call decide, not tokens/s,
    because within a curve a call costs the same, and steps do not depend on the clock.
    """
    assert curve.reference is not None
    least = _score(rows[curve.reference.name]) - tolerance - ROUNDING
    good = [one for one in curve.settings if _score(rows[one.name]) >= least]
    chosen = max(good, key=lambda one: (rows[one.name].steps_per_call or 0.0, -_threshold(one)), default=None)
    names = tuple(one.name for one in curve.settings)
    return ChosenThreshold(task, names, curve.reference.name, tolerance, None if chosen is None else chosen.name)


def doubts(task: str, curve: _ThresholdCurve, rows: Mapping[str, BenchRow], tolerance: float) -> list[str]:
    """Return notes where the dev scores are too few or too low to choose by. rows: as for `choose`."""
    assert curve.reference is not None
    reference = rows[curve.reference.name]
    score, records = _score(reference), reference.records
    found = []
    if score <= tolerance:
        found.append(
            f"{task}: {reference.name} scores {score:.1%} on dev records, so no threshold can lose more than "
            f"{100 * tolerance:g} points: the choice was made by steps per target call alone"
        )
    elif records * tolerance < 1:
        found.append(
            f"{task}: with {records} dev records one answer is {100 / records:.1f} points, more than the "
            f"{100 * tolerance:g} that may be lost: the choice allowed no loss at all; raise --dev-records"
        )
    return found


def _is_exact(setting: SweepSetting) -> bool:
    config = setting.config
    return (
        isinstance(config, MethodConfig)
        and config.rule in ("rejection", "coupled")
        and config.exactness in ("same-text", "same-law")
    )


def _threshold(setting: SweepSetting) -> float:
    assert isinstance(setting.config, MethodConfig)
    return setting.config.value(FUZZY_THRESHOLD) or 0.0


def _score(row: BenchRow) -> float:
    assert row.quality is not None, "thresholds are chosen where answers are scored"
    return row.quality.value
