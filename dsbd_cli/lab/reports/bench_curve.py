"""The accuracy-work curve of rule fuzzy: dev and test records in one panel, the chosen threshold ringed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dsbd_cli.lab.reports.bench_data import BenchReport, BenchRow, ChosenThreshold
from dsbd_cli.lab.reports.style import COLOURS, INK, MUTED, plain_axes, score_limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HUES = [COLOURS[name] for name in ("vermillion", "blue", "green", "purple", "orange", "sky", "black")]
MAX_KEYS = 12
BELOW_LABEL = 4.2  # letters of the legend: its distance from the panel, in which the axis has its numbers and label
LETTER, NEAR_Y = 0.022, 0.06  # shares of the panel: the width of a label's letter, and the height of a label


def curve_panel(axes: Axes, report: BenchReport, task: str, colours: Mapping[str, str]) -> None:
    """Draw the score against steps per target call, by which thresholds are chosen, for every curve of the task, from
    the smallest threshold to the largest.

    colours: of the methods in the other panels. Further curves of a method take colours that no method has.
    """
    choices = [choice for choice in report.choices if choice.task == task]
    rows, dev = report.of(task), report.dev_of(task)
    metric = next((row.metric for row in rows if row.metric), None)
    plain_axes(axes, f"{task}: thresholds of rule fuzzy", "beam-sampling steps per target call", f"{metric} (%)")
    if not choices:
        axes.text(0.5, 0.5, "no threshold was chosen", transform=axes.transAxes, ha="center", color=MUTED)
        return
    test = {row.name: row for row in rows}
    for number, (choice, colour) in enumerate(zip(choices, _hues(choices, colours, rows), strict=False)):
        name = choice.curve[0].rsplit(" ", 1)[0]  # without the threshold at its end
        for found, style, filled in ((test, "-", True), (dev, ":", False)):
            shown = [found[one] for one in choice.curve if one in found]
            face = colour if filled else "white"
            key = name if filled and number < MAX_KEYS else None
            # without clipping an empty line would leave the layout no room
            axes.plot(*_points(shown), f"o{style}", color=colour, markerfacecolor=face, label=key, clip_on=not shown)
            if choice.chosen in found:
                ring = _points([found[choice.chosen]])
                axes.plot(*ring, "o", color=INK, markersize=13, markerfacecolor="none", clip_on=False)
    for reference in dict.fromkeys(choice.reference for choice in choices):
        for found, filled in ((test, True), (dev, False)):
            if reference in found:
                face, star = MUTED if filled else "white", _points([found[reference]])
                axes.plot(*star, "*", color=MUTED, markersize=12, markerfacecolor=face, clip_on=False)
    for style, label, face in (("o-", "filled: test", MUTED), ("o:", "open: dev", "white")):
        axes.plot([], [], style, color=MUTED, markerfacecolor=face, label=label)
    axes.plot([], [], "*", color=MUTED, markersize=10, linestyle="", label=f"held against: {choices[0].reference}")
    axes.plot([], [], "o", color=INK, markersize=11, markerfacecolor="none", linestyle="", label="chosen on dev")
    axes.margins(0.12, 0.15)
    score_limits(axes)
    if len(choices) == 1:
        for found, below in ((test, False), (dev, True)):
            _label(axes, [found[one] for one in choices[0].curve if one in found], below=below)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=BELOW_LABEL, frameon=False, fontsize=8.5,
        labelcolor=INK, ncols=2,
    )  # fmt: skip


def _hues(choices: Sequence[ChosenThreshold], colours: Mapping[str, str], rows: Sequence[BenchRow]) -> Iterator[str]:
    """Yield a colour for each curve: the method's for its first curve, and for further ones a colour of no method."""
    methods = {row.name: row.method for row in rows}
    free = itertools.cycle([hue for hue in HUES if hue not in colours.values()] or HUES)
    seen: set[str] = set()
    for choice in choices:
        method = next((methods[one] for one in choice.curve if one in methods), "")
        yield colours[method] if method in colours and method not in seen else next(free)
        seen.add(method)


def _label(axes: Axes, rows: Sequence[BenchRow], *, below: bool) -> None:
    """Write the thresholds at their points. Points that lie side by side share one label."""
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    groups: list[list[tuple[float, float, str]]] = []
    for row, x, y in sorted(zip(rows, *_points(rows), strict=True), key=lambda one: one[1]):
        value = row.name.rsplit("=", 1)[-1]
        for group in groups:
            # half of the group's label and half of this one, from middle to middle
            letters = (sum(len(text) + 2 for _, _, text in group) + len(value)) / 2
            middle = sum(at for at, _, _ in group) / len(group)
            if x - middle < LETTER * letters * (right - left) and abs(y - group[-1][1]) < NEAR_Y * (top - bottom):
                group.append((x, y, value))
                break
        else:
            groups.append([(x, y, value)])
    for group in groups:
        place = sum(x for x, _, _ in group) / len(group), group[0][1]
        values = ", ".join(sorted((text for _, _, text in group), key=float))
        axes.annotate(
            f"T={values}" if group is groups[0] else values,
            place,
            xytext=(0, -17 if below else 10),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=INK,
        )


def _points(rows: Sequence[BenchRow]) -> tuple[list[float], list[float]]:
    """Return steps per call and scores in percent. Both exist wherever a threshold was chosen."""
    return [row.steps_per_call or 0.0 for row in rows], [100 * row.quality.value for row in rows if row.quality]
