"""Which settings an output file was made with: what must be the same for a run to go on where another one stopped."""

from __future__ import annotations

from collections.abc import Mapping

from dsbd_cli.errors import shorten
from dsbd_cli.job.records.output import MethodRecord
from dsbd_cli.job.records.reader import WARP_FIELDS, RowReader
from dsbd_cli.job.records.row import Fields
from dsbd_cli.variants import RULES

__all__ = ["fingerprint_difference", "run_fingerprint"]


def run_fingerprint(method: MethodRecord, rows: RowReader, **others: str | int | float | bool | None) -> Fields:
    """Settings that a row's result depends on besides the row itself, as plain JSON values in a fixed order.

    What does not act is null (the seed and the warps under rule search). Batch size and devices are left out, since
    they change no result. others: further settings of the run that matter, such as dtype and on_too_long.
    """
    searching = not RULES[rows.rule].samples
    settings = method.fields()
    for name in rows.sampling.__dataclass_fields__:
        value = getattr(rows.sampling, name)
        idle = searching and name in WARP_FIELDS
        settings[name] = None if idle else list(value) if isinstance(value, tuple) else value
    settings["seed"] = None if searching else rows.seed
    settings.update(others)
    return settings


def fingerprint_difference(
    old: Mapping[str, object], new: Mapping[str, object], typed: Mapping[str, str] | None = None
) -> str | None:
    """`temperature was 0.7 and is 1.0, seed was 0 and is 3`, or None where nothing differs. typed: what a setting is
    called where it is typed."""
    told = []
    for name in dict.fromkeys([*new, *old]):
        before, now = old.get(name), new.get(name)
        if before != now or isinstance(before, bool) is not isinstance(now, bool):
            shown = (typed or {}).get(name, _shown(name))
            told.append(f"{shown} was {_value(before)} and is {_value(now)}")
    return ", ".join(told) or None


def _value(value: object) -> str:
    return "not set" if value is None else shorten(value)


def _shown(name: str) -> str:
    return name if name.isidentifier() else shorten(name)
