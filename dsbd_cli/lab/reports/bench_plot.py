"""A bench run as a picture. For each task it has the quality of every method against its speed, and acceptance by depth
where something was drafted.

Each family of methods has a colour. Names are joined to their points by lines, so that nothing depends on the colours.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsbd_cli.lab.reports.bench_cells import task_title
from dsbd_cli.lab.reports.bench_curve import curve_panel
from dsbd_cli.lab.reports.bench_data import STOPPED, BenchReport, BenchRow, pareto_front
from dsbd_cli.lab.reports.style import COLOURS, INK, MUTED, new_figure, plain_axes, score_limits, spread_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DEPTH_WIDTH, CURVE_WIDTH = 5.2, 3.8, 4.2  # inches: widths of the panels, without names
LETTER, AXES = 0.072, 0.8  # inches: a letter of a name, and the axis labels beside a panel
TITLE_LETTER, TITLE_POINTS = 0.098, 11.0
ROW, MARGIN, LEAST = 0.23, 1.3, 4.0  # inches of a task's height: per row, for the margins, and at least
MAX_ROWS = 40
LABEL_POINTS = 8.0
CAPTION = (
    "Bars: quality with its 95 % interval, speed with the middle half of the windows.\n"
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
    """Return the colour of the method's family: a rule with all its widths and drafters, the methods of others, or our
    methods without a draft."""
    if method.startswith(("hf-", "ct2-", "llama-cpp-")):
        return MUTED
    name = next((name for name in FAMILIES if method.startswith(name)), None)
    return COLOURS[FAMILIES[name]] if name else INK


def bench_figure(report: BenchReport) -> Figure:
    """Draw one row of panels for each task that has a row. Where a threshold was chosen, it includes the curve."""
    tasks = report.tasks
    drafted = any(row.drafted for row in report.rows)
    widths = [WIDTH, *([DEPTH_WIDTH] if drafted else []), *([CURVE_WIDTH] if report.choices else [])]
    shown = {task: _shown(report.of(task)) for task in tasks}
    heights = [max(LEAST, MARGIN + ROW * len(shown[task])) for task in tasks]
    letters = max((len(row.name) for rows in shown.values() for row in rows), default=0)
    title = _title(report)
    width = sum(widths) + AXES * len(widths) + LETTER * letters * (2 if drafted else 1)
    figure = new_figure(max(width, TITLE_LETTER * len(title)), sum(heights))
    figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE_POINTS, fontweight="bold", color=INK, parse_math=False)
    caption = CAPTION if report.complete else f"{CAPTION}\n{STOPPED}"
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=LABEL_POINTS, color=MUTED)
    panels = figure.subplots(len(tasks), len(widths), squeeze=False, width_ratios=widths, height_ratios=heights)
    for (left, *more), task, height in zip(panels, tasks, heights, strict=True):
        rows = report.of(task)
        _quality(left, shown[task], rows, task, height - MARGIN)
        if drafted:
            _depth(more.pop(0), rows, task, height - MARGIN)
        for axes in more:
            curve_panel(axes, report, task, {row.method: _colour_of(row.method) for row in rows})
    return figure


def _title(report: BenchReport) -> str:
    """Return the title: file, models and machine."""
    run, env = report.run, report.environment
    target, draft = run.get("target"), run.get("draft")
    models = f"{_short(target)} with {_short(draft)}" if draft else _short(target)
    return f"{_short(run.get('data')) or ', '.join(report.tasks)}: {models}, on {env.get('device')}"


def _short(source: object) -> str:
    """Return the name of a file or folder without its parents, or another source as it is. None gives an empty text."""
    text = "" if source is None else str(source)
    return Path(text).name if text.startswith((".", "/", "~")) else text


def _shown(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the rows to draw, the fastest first. Of a large sweep only those settings are kept that no other setting
    of the same method beats in speed and quality."""
    kept = list(rows)
    if len(rows) > MAX_ROWS:
        kept = []
        for method in dict.fromkeys(row.method for row in rows):
            own = [row for row in rows if row.method == method]
            kept += _front(own) or own
    return sorted(kept, key=lambda row: -row.tokens_per_s.value)[:MAX_ROWS]


def _front(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the rows that no other one beats in both speed and quality."""
    levels = [(row, level) for row in rows if (level := _quality_value(row)) is not None]
    return [levels[place][0] for place in pareto_front([(row.tokens_per_s.value, level) for row, level in levels])]


def _quality_value(row: BenchRow) -> float | None:
    """Return the main score in percent, else the log-probability per token."""
    return 100 * row.quality.value if row.quality is not None else row.logprob_per_token


def _quality(axes: Axes, shown: Sequence[BenchRow], rows: Sequence[BenchRow], task: str, height: float) -> None:
    """Draw scores with their intervals, or log-probabilities, against speeds with their middle halves. Rows that no
    other one beats in both have bold names. height: of the panel, in inches."""
    metric = next((row.metric for row in shown if row.metric), None)
    some = f" (best {len(shown)} of {len(rows)} settings)" if len(shown) < len(rows) else ""
    quality = f"{metric} (%)" if metric else "log-probability per token"
    plain_axes(axes, f"{task_title(task, rows)}: quality against speed", f"tokens per second{some}", quality)
    front = {row.name for row in _front(rows)}
    drawn = [(level, row.tokens_per_s.value, row) for row in shown if (level := _quality_value(row)) is not None]
    drawn.sort(key=lambda one: (one[0], -one[1]))  # on one level the slower point has name and line above
    for level, speed, row in drawn:
        colour = _colour_of(row.method)
        axes.hlines(level, row.tokens_per_s.low, row.tokens_per_s.high, color=colour, alpha=0.35, linewidth=2)
        if row.quality is not None:
            axes.vlines(speed, 100 * row.quality.low, 100 * row.quality.high, color=colour, alpha=0.35, linewidth=2)
        axes.plot(speed, level, "o", color=colour, markersize=6, clip_on=False, label=row.name)
    axes.set_xlim(left=0)
    if metric:
        score_limits(axes)
    _name_points(
        axes,
        [(speed, level, row.name, _colour_of(row.method)) for level, speed, row in drawn],
        1.05 * axes.get_xlim()[1],
        height,
        bold=front,
    )


def _name_points(
    axes: Axes,
    points: Sequence[tuple[float, float, str, str]],
    column_x: float,
    height: float,
    bold: Container[str] = (),
) -> None:
    """Write the names in a column beside the panel, each with a thin line from its point, so that none overlaps
    another.

    points: x, y, name and colour. column_x: x of the column. height: of the panel, in inches. bold: names in bold type.
    """
    low, high = axes.get_ylim()
    gap = min((high - low) * LABEL_POINTS * 1.45 / 72 / height, (high - low) / max(1, len(points)))
    label_ys = spread_labels([y for _, y, _, _ in points], gap, low, high)
    for (x, y, name, colour), label_y in zip(points, label_ys, strict=True):
        axes.annotate(
            name,
            (x, y),
            xytext=(column_x, label_y),
            fontsize=LABEL_POINTS,
            fontweight="bold" if name in bold else "normal",
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "relpos": (0, 0.5)},
        )


def _depth(axes: Axes, rows: Sequence[BenchRow], task: str, height: float) -> None:
    """Draw the share of target calls in which each layer passed, for the deepest setting of each method with each
    drafter. height: of the panel, in inches."""
    from matplotlib.ticker import MaxNLocator

    chosen: dict[tuple[str, object], BenchRow] = {}
    for row in (one for one in rows if one.drafted):
        key = row.method, row.settings.get("drafter")
        if len(row.passed_by_depth) > len(chosen[key].passed_by_depth if key in chosen else ()):
            chosen[key] = row
    swept = any(row.setting for row in chosen.values())
    title = f"{task}: layers passed, by depth" + (" (deepest settings)" if swept else "")
    plain_axes(axes, title, "layer of the drafted forest", "target calls in which it passed (%)")
    axes.set_ylim(0, 100)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not chosen:
        axes.set_visible(False)  # something was drafted on another task only
        return
    drawn = [(row, _until_zero(row)) for row in chosen.values()]
    hues = [_colour_of(row.method) for row, _ in drawn]
    for place, ((row, shares), colour) in enumerate(zip(drawn, hues, strict=True)):
        style, marker = STYLES[hues[:place].count(colour) % len(STYLES)]
        layers = range(1, len(shares) + 1)
        axes.plot(layers, shares, style, marker=marker, color=colour, linewidth=1.6, label=row.name, clip_on=False)
    deepest = max(len(shares) for _, shares in drawn)
    axes.set_xlim(0.8, deepest + 0.1)
    ends = [(len(shares), shares[-1], row.name, hue) for (row, shares), hue in zip(drawn, hues, strict=True)]
    _name_points(axes, ends, 1.12 * deepest, height)


def _until_zero(row: BenchRow) -> list[float]:
    """Return the percentages of the layers. The list ends one layer below the last one that passed in at least one call
    of a hundred."""
    shares = [100 * share for share in row.passed_by_depth]
    passed = [place for place, share in enumerate(shares) if share >= 1]
    return shares[: (passed[-1] if passed else 0) + 2]
