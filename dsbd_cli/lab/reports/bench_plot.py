"""A bench run as a picture: per task quality against speed with its Pareto front, acceptance by depth, and a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsbd_cli.lab.reports.bench_curve import curve_panel
from dsbd_cli.lab.reports.bench_data import BenchReport, BenchRow, pareto_front
from dsbd_cli.lab.reports.style import COLOURS, INK, MUTED, new_figure, plain_axes, score_limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = ["bench_figure"]

WIDTH, HEIGHT = 14.0, 5.0
RATIOS = (5.0, 4.0, 3.4)
MARKERS = "osD^vP*X"
SIZES = {"*": 12, "X": 9, "P": 9}
HUES = [COLOURS[name] for name in ("blue", "vermillion", "green", "purple", "orange", "sky", "black")]
MAX_BARS = 20  # with more points their error bars would hide them
WIDE_RANGE = 12.0
KEY_LINES = 24

STYLES = ("-", "--", ":", "-.")

Look = dict[tuple[str, str], tuple[str, str]]


def bench_figure(report: BenchReport) -> Figure:
    """One row of panels per task that has a row; where a threshold was chosen, with its curve."""
    tasks = report.tasks
    ratios = (*RATIOS, RATIOS[0]) if report.choices else RATIOS
    figure = new_figure(WIDTH * sum(ratios) / sum(RATIOS), HEIGHT * len(tasks))
    look, by_setting = _look(report.rows)
    colours = {method: colour for (method, _), (colour, _) in look.items()}
    panels = figure.subplots(len(tasks), len(ratios), squeeze=False, width_ratios=ratios)
    for (left, middle, right, *more), task in zip(panels, tasks, strict=True):
        rows = report.of(task)
        front = _quality(left, rows, task, look)
        _depth(middle, rows, task, look)
        _key(right, rows, front, look, by_setting=by_setting)
        for axes in more:
            curve_panel(axes, report, task, colours)
    return figure


def _look(rows: Sequence[BenchRow]) -> tuple[Look, bool]:
    """Colour and marker by method and setting, and whether settings have markers of their own."""
    methods = list(dict.fromkeys(row.method for row in rows))
    settings = list(dict.fromkeys(["", *(row.setting for row in rows)]))
    if 1 < len(settings) <= len(MARKERS) and len(methods) <= len(HUES):
        return {
            (row.method, row.setting): (HUES[methods.index(row.method)], MARKERS[settings.index(row.setting)])
            for row in rows
        }, True
    # 7 colours and 8 markers have no common factor: 56 methods look different
    looks = {name: (HUES[i % len(HUES)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(methods)}
    return {(row.method, row.setting): looks[row.method] for row in rows}, False


def _quality(axes: Axes, rows: Sequence[BenchRow], task: str, look: Look) -> list[BenchRow]:
    """Points, error bars where there is room, the front; returns the rows on the front, fastest first."""
    metric = next((row.metric for row in rows if row.metric), None)
    title = f"{task}: quality against speed, {max(row.records for row in rows)} records"
    plain_axes(axes, title, "tokens per second (delivered)", f"{metric} (%)" if metric else "log-probability per token")
    shown = [row for row in rows if _level(row) is not None]
    points = [(row.tokens_per_s.value, _level(row) or 0.0) for row in shown]
    if not shown:
        return []
    order = pareto_front(points)
    axes.plot(*zip(*(points[i] for i in order), strict=True), color=MUTED, linestyle="--", linewidth=1.2, zorder=1)
    for row, (x, y) in zip(shown, points, strict=True):
        colour, marker = look[row.method, row.setting]
        if row.quality is not None and len(shown) <= MAX_BARS:
            axes.vlines(x, 100 * row.quality.low, 100 * row.quality.high, color=colour, alpha=0.35, linewidth=1.5)
        axes.plot(
            x,
            y,
            marker,
            color=colour,
            markersize=SIZES.get(marker, 8),
            markeredgecolor="white",
            markeredgewidth=0.8,
            zorder=3,
            clip_on=False,
        )
    for number, index in enumerate(order[::-1], 1):
        axes.annotate(
            str(number), points[index], xytext=(6, 6), textcoords="offset points", fontsize=9, color=INK, zorder=4
        )
    speeds = [x for x, _ in points]
    if min(speeds) > 0 and max(speeds) / min(speeds) > WIDE_RANGE:
        axes.set_xscale("log")
    axes.margins(0.08, 0.1)
    if metric:
        score_limits(axes)
    return [shown[index] for index in order[::-1]]


def _level(row: BenchRow) -> float | None:
    """What is drawn upwards: the main score in percent, else the log-probability."""
    return 100 * row.quality.value if row.quality is not None else row.logprob_per_token


def _depth(axes: Axes, rows: Sequence[BenchRow], task: str, look: Look) -> None:
    """Share of target calls in which a layer passed, for the deepest setting of each method with each
    drafter."""
    from matplotlib.ticker import MaxNLocator

    chosen: dict[tuple[str, object], BenchRow] = {}
    for row in rows:
        key = row.method, row.settings.get("drafter")
        if len(row.passed_by_depth) > len(chosen[key].passed_by_depth if key in chosen else ()):
            chosen[key] = row
    swept = any(row.setting for row in chosen.values())
    title = f"{task}: layers passed, by depth" + (" (deepest settings)" if swept else "")
    plain_axes(axes, title, "layer of the drafted forest", "target calls in which it passed (%)")
    axes.set_ylim(0, 100)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not chosen:
        axes.text(0.5, 0.5, "nothing was drafted", transform=axes.transAxes, ha="center", color=MUTED)
        axes.set_xticks([])
    methods = [method for method, _ in chosen]
    for place, row in enumerate(chosen.values()):
        colour, marker = look[row.method, row.setting]
        style = STYLES[methods[:place].count(row.method) % len(STYLES)]
        shares = [100 * share for share in row.passed_by_depth]
        layers = range(1, len(shares) + 1)
        axes.plot(layers, shares, style, marker=marker, color=colour, linewidth=1.6, markersize=6, label=row.name)
    if swept:
        axes.legend(loc="upper right", frameon=False, fontsize=7.5, labelcolor=INK)


def _key(axes: Axes, rows: Sequence[BenchRow], front: Sequence[BenchRow], look: Look, *, by_setting: bool) -> None:
    """Which mark is which method, or which colour the method and which mark the setting, and the numbered points of
    the front."""
    from matplotlib.lines import Line2D

    axes.axis("off")
    firsts = {row.method: look[row.method, row.setting] for row in reversed(rows)}
    names = list(dict.fromkeys(row.method for row in rows))
    marks: list[Line2D] = [
        Line2D([], [], color=firsts[name][0], linewidth=6, solid_capstyle="butt", label=name)
        if by_setting
        else Line2D([], [], color=firsts[name][0], marker=firsts[name][1], linestyle="", markersize=7, label=name)
        for name in names
    ]
    if by_setting:
        settings = {row.setting: look[row.method, row.setting][1] for row in rows if row.setting}
        marks += [
            Line2D([], [], color=MUTED, marker=marker, linestyle="", markersize=7, label=setting)
            for setting, marker in settings.items()
        ]
    room = max(1, KEY_LINES - len(marks) - 3)
    listed = [f"{number}  {_point(row)}" for number, row in enumerate(front, 1)][:room]
    if len(front) > room:
        listed.append(f"… and {len(front) - room} slower ones")
    marks.append(Line2D([], [], color=MUTED, linestyle="--", label="Pareto front, fastest first:"))
    marks += [Line2D([], [], linestyle="", label=text) for text in listed]
    axes.legend(
        handles=marks, loc="upper left", bbox_to_anchor=(-0.08, 1.03), frameon=False, fontsize=8.5, labelcolor=INK
    )


def _point(row: BenchRow) -> str:
    level = _level(row)
    quality = f"{level:.1f} %" if row.quality is not None else f"{level:.3f}"
    return f"{row.name}: {quality}, {row.tokens_per_s.value:.0f}/s"
