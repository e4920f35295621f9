"""A bench run as a picture: per task the speed and the quality of every method, a row each, and acceptance by depth.

Colours are those of a family of methods; names stand at what they name, so that nothing depends on the colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsbd_cli.lab.reports.bench_curve import curve_panel
from dsbd_cli.lab.reports.bench_data import BenchReport, BenchRow, Interval, pareto_front
from dsbd_cli.lab.reports.style import COLOURS, INK, MUTED, new_figure, plain_axes, score_limits, spread_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTHS = (3.4, 2.6, 3.8)  # inches of the panels, without names and labels
CURVE_WIDTH = 4.2
LETTER, AXES = 0.072, 1.6  # inches of a letter of a name, and of what stands between the panels
ROW, MARGIN, LEAST = 0.23, 1.3, 4.0  # inches of a task's height
MAX_ROWS = 40
LABEL_POINTS = 8.0
CAPTION = (
    "Speed: median and middle half of the windows. Quality: with its 95 % interval. "
    "Bold: no other method is both faster and better."
)
FAMILIES = {
    "dsbd-coupled": "blue",
    "dsbd-search": "green",
    "dsbd-rejection": "vermillion",
    "dsbd-memory-saving": "vermillion",
    "dsbd-with-replacement": "purple",
    "dsbd-fuzzy": "orange",
}
STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))


def _colour_of(method: str) -> str:
    """Return the colour of the family: a rule with all its widths and drafters, the methods of others, or what has no
    beams of ours."""
    if method.startswith(("hf-", "ct2-", "llama-cpp-")):
        return MUTED
    name = next((name for name in FAMILIES if method.startswith(name)), None)
    return COLOURS[FAMILIES[name]] if name else INK


def bench_figure(report: BenchReport) -> Figure:
    """One row of panels per task that has a row; where a threshold was chosen, with its curve."""
    tasks = report.tasks
    widths = (*WIDTHS, CURVE_WIDTH) if report.choices else WIDTHS
    shown = {task: _shown(report.of(task)) for task in tasks}
    heights = [max(LEAST, MARGIN + ROW * len(shown[task])) for task in tasks]
    letters = max((len(row.name) for rows in shown.values() for row in rows), default=0)
    figure = new_figure(sum(widths) + AXES + 2 * LETTER * letters, sum(heights))
    figure.supxlabel(CAPTION, x=0.01, ha="left", fontsize=LABEL_POINTS, color=MUTED)
    panels = figure.subplots(len(tasks), len(widths), squeeze=False, width_ratios=widths, height_ratios=heights)
    for (left, middle, right, *more), task, height in zip(panels, tasks, heights, strict=True):
        rows = report.of(task)
        _speed(left, shown[task], rows, task)
        _quality(middle, shown[task], task)
        _depth(right, rows, task, height - MARGIN)
        for axes in more:
            curve_panel(axes, report, task, {row.method: _colour_of(row.method) for row in rows})
    return figure


def _shown(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The fastest first. Of a large sweep the settings that no other one of the same method beats in speed and
    quality."""
    kept = list(rows)
    if len(rows) > MAX_ROWS:
        kept = []
        for method in dict.fromkeys(row.method for row in rows):
            own = [row for row in rows if row.method == method]
            kept += _front(own) or own
    return sorted(kept, key=lambda row: -row.tokens_per_s.value)[:MAX_ROWS]


def _front(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Rows that no other one beats in both speed and quality."""
    levels = [(row, level) for row in rows if (level := _level(row)) is not None]
    return [levels[place][0] for place in pareto_front([(row.tokens_per_s.value, level) for row, level in levels])]


def _level(row: BenchRow) -> float | None:
    """The main score in percent, else the log-probability."""
    return 100 * row.quality.value if row.quality is not None else row.logprob_per_token


def _speed(axes: Axes, shown: Sequence[BenchRow], rows: Sequence[BenchRow], task: str) -> None:
    """Medians and middle halves; the names of the front are bold."""
    records = max(row.records for row in rows)
    some = f" (best {len(shown)} of {len(rows)} settings)" if len(shown) < len(rows) else ""
    plain_axes(axes, f"{task}, {records} records: speed", f"tokens per second{some}", "")
    for place, row in enumerate(shown):
        _range(axes, place, row, row.tokens_per_s.value, row.tokens_per_s)
    axes.set_yticks(range(len(shown)), [row.name for row in shown])
    front = {row.name for row in _front(rows)}
    for label, row in zip(axes.get_yticklabels(), shown, strict=True):
        label.set_fontsize(LABEL_POINTS + 0.5)
        label.set_fontweight("bold" if row.name in front else "normal")
    axes.set_xlim(left=0)
    _rows(axes, len(shown))


def _quality(axes: Axes, shown: Sequence[BenchRow], task: str) -> None:
    """Scores with their intervals, or log-probabilities, in the rows of the speeds."""
    metric = next((row.metric for row in shown if row.metric), None)
    label = f"{metric} (%)" if metric else "log-probability per token"
    plain_axes(axes, f"{task}: quality", label, "")
    for place, row in enumerate(shown):
        if (level := _level(row)) is not None:
            _range(axes, place, row, level, row.quality, 100)
    axes.set_yticks(range(len(shown)), [""] * len(shown))
    _rows(axes, len(shown))
    if metric:
        score_limits(axes, "x")


def _range(axes: Axes, place: int, row: BenchRow, value: float, around: Interval | None, scale: float = 1) -> None:
    """Draw a dot in a row, and a bar for the range around it."""
    colour = _colour_of(row.method)
    if around is not None:
        axes.hlines(place, scale * around.low, scale * around.high, color=colour, alpha=0.4, linewidth=3)
    axes.plot(value, place, "o", color=colour, markersize=6, clip_on=False)


def _rows(axes: Axes, count: int) -> None:
    """The first row at the top; no marks at the names."""
    axes.set_ylim(max(count, 1) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _depth(axes: Axes, rows: Sequence[BenchRow], task: str, height: float) -> None:
    """Share of target calls in which a layer passed, for the deepest setting of each method with each drafter. height:
    of the panel, in inches."""
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
        return
    drawn = [(row, _until_zero(row)) for row in chosen.values()]
    hues = [_colour_of(row.method) for row, _ in drawn]
    for place, ((row, shares), colour) in enumerate(zip(drawn, hues, strict=True)):
        style, marker = STYLES[hues[:place].count(colour) % len(STYLES)]
        layers = range(1, len(shares) + 1)
        axes.plot(layers, shares, style, marker=marker, color=colour, linewidth=1.6, label=row.name, clip_on=False)
    deepest = max(len(shares) for _, shares in drawn)
    axes.set_xlim(0.8, deepest + 0.1)
    gap = min(100 * LABEL_POINTS * 1.45 / 72 / height, 100 / len(drawn))
    stands = spread_labels([shares[-1] for _, shares in drawn], gap, 0, 100)
    for (row, shares), colour, stand in zip(drawn, hues, stands, strict=True):
        axes.annotate(
            row.name,
            (len(shares), shares[-1]),
            xytext=(1.12 * deepest, stand),
            fontsize=LABEL_POINTS,
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "relpos": (0, 0.5)},
        )


def _until_zero(row: BenchRow) -> list[float]:
    """Percents of the layers, up to the first one below the last that passed in one call of a hundred."""
    shares = [100 * share for share in row.passed_by_depth]
    passed = [place for place, share in enumerate(shares) if share >= 1]
    return shares[: (passed[-1] if passed else 0) + 2]
