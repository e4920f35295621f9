"""The accuracy-runtime curve of rule fuzzy: dev and test records in one panel, the chosen threshold ringed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsbd_cli.reports.bench_data import BenchReport, BenchRow, Choice
from dsbd_cli.reports.style import COLOURS, INK, MUTED, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["curve_panel"]

HUES = [COLOURS[name] for name in ("vermillion", "blue", "green", "purple", "orange", "sky", "black")]
MAX_KEYS = 12


def curve_panel(axes: Axes, report: BenchReport, task: str) -> None:
    """Score against speed of every curve of the task, from the smallest threshold to the largest."""
    choices = [choice for choice in report.choices if choice.task == task]
    rows, dev = report.of(task), report.dev_of(task)
    metric = next((row.metric for row in rows if row.metric), None)
    plain_axes(axes, f"{task}: thresholds of rule fuzzy", "tokens per second (delivered)", f"{metric} (%)")
    if not choices:
        axes.text(0.5, 0.5, "no threshold was chosen", transform=axes.transAxes, ha="center", color=MUTED)
        return
    test = {row.name: row for row in rows}
    for number, choice in enumerate(choices):
        colour, name = HUES[number % len(HUES)], _common_name(choice)
        for label, found, style, filled in (("test", test, "-", True), ("dev", dev, ":", False)):
            shown = [found[one] for one in choice.curve if one in found]
            key = f"{name}, {label}" if number < MAX_KEYS else None
            axes.plot(
                *_points(shown), f"o{style}", color=colour, markerfacecolor=colour if filled else "white", label=key
            )
            if choice.chosen in found:
                axes.plot(*_points([found[choice.chosen]]), "o", color=INK, markersize=13, markerfacecolor="none")
            if choice.reference in found:
                face = colour if filled else "white"
                axes.plot(*_points([found[choice.reference]]), "*", color=colour, markersize=12, markerfacecolor=face)
        for one in choice.curve:
            if one in test and len(choices) == 1:
                x, y = _points([test[one]])
                text = one.rsplit(" ", 1)[-1]
                axes.annotate(text, (x[0], y[0]), xytext=(5, 6), textcoords="offset points", fontsize=8, color=INK)
    axes.plot([], [], "*", color=MUTED, markersize=10, linestyle="", label=f"held against: {choices[0].reference}")
    axes.plot([], [], "o", color=INK, markersize=11, markerfacecolor="none", linestyle="", label="chosen on dev")
    axes.margins(0.12, 0.15)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False, fontsize=8.5, labelcolor=INK, ncols=2)


def _points(rows: Sequence[BenchRow]) -> tuple[list[float], list[float]]:
    return [row.tokens_per_s.value for row in rows], [100 * row.quality.value for row in rows if row.quality]


def _common_name(choice: Choice) -> str:
    """The settings' name without the threshold, which ends it."""
    return choice.curve[0].rsplit(" ", 1)[0]
