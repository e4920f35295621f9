"""A bench run as a picture: for each task the quality of every method against its speed.

Each family of methods has one of Okabe and Ito's colours (distinguishable with every kind of colour vision). Names are
joined to their points by lines, so that nothing depends on the colours. The figure is made without pyplot, so that
nothing global changes and no display is needed.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsbd_cli.errors import UsageError, require_package
from dsbd_cli.lab.reports.bench_data import STOPPED, BenchReport, BenchRow, pareto_front, task_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#222222", "#777777", "#DDDDDD"
FAMILIES = {
    "dsbd-coupled": "#0072B2",
    "dsbd-search": "#009E73",
    "dsbd-rejection": "#D55E00",
    "dsbd-memory-saving": "#D55E00",
    "dsbd-with-replacement": "#CC79A7",
    "dsbd-fuzzy": "#E69F00",
}
FORMATS = (".png", ".svg", ".pdf")
DPI = 160
LEAST_POINTS = 5.0
WIDTH = 5.2  # inches: width of a panel, without names
LETTER, AXES = 0.072, 0.8  # inches: a letter of a name, and the axis labels beside a panel
TITLE_LETTER, TITLE_POINTS = 0.098, 11.0
ROW, MARGIN, LEAST = 0.23, 1.3, 4.0  # inches of a task's height: per row, for the margins, and at least
MAX_ROWS = 40
LABEL_POINTS = 8.0
CAPTION = (
    "Bars: quality with its 95 % interval, speed with the middle half of the windows.\n"
    "Bold: no other method is both faster and better."
)


def require_plots(option: str, path: Path) -> None:
    """Check, before anything is measured, that matplotlib is there and the name has a known ending. Raises
    UsageError."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{option} {path}: the name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    require_package(option, "matplotlib", "plots")


def bench_figure(report: BenchReport) -> Figure:
    """Draw a panel for each task that has a row."""
    tasks = report.tasks
    shown = {task: _shown(report.of(task)) for task in tasks}
    heights = [max(LEAST, MARGIN + ROW * len(shown[task])) for task in tasks]
    letters = max((len(row.name) for rows in shown.values() for row in rows), default=0)
    title = _title(report)
    figure = _new_figure(max(WIDTH + AXES + LETTER * letters, TITLE_LETTER * len(title)), sum(heights))
    figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE_POINTS, fontweight="bold", color=INK, parse_math=False)
    caption = CAPTION if report.complete else f"{CAPTION}\n{STOPPED}"
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=LABEL_POINTS, color=MUTED)
    panels = figure.subplots(len(tasks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, task, height in zip(panels, tasks, heights, strict=True):
        _quality(axes, shown[task], report.of(task), task, height - MARGIN)
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
    return [levels[index][0] for index in pareto_front([(row.tokens_per_s.value, level) for row, level in levels])]


def _quality_value(row: BenchRow) -> float | None:
    """Return the main score in percent, else the log-probability per token."""
    return 100 * row.quality.value if row.quality is not None else row.logprob_per_token


def _quality(axes: Axes, shown: Sequence[BenchRow], rows: Sequence[BenchRow], task: str, height: float) -> None:
    """Draw scores with their intervals, or log-probabilities, against speeds with their middle halves. Rows that no
    other one beats in both have bold names. height: of the panel, in inches."""
    metric = next((row.metric for row in shown if row.metric), None)
    some = f" (best {len(shown)} of {len(rows)} settings)" if len(shown) < len(rows) else ""
    quality = f"{metric} (%)" if metric else "log-probability per token"
    _plain_axes(axes, f"{task_title(task, rows)}: quality against speed", f"tokens per second{some}", quality)
    front = {row.name for row in _front(rows)}
    drawn = [(level, row.tokens_per_s.value, row) for row in shown if (level := _quality_value(row)) is not None]
    drawn.sort(key=lambda point: (point[0], -point[1]))  # on one level the slower point has name and line above
    for level, speed, row in drawn:
        colour = _colour_of(row.method)
        axes.hlines(level, row.tokens_per_s.low, row.tokens_per_s.high, color=colour, alpha=0.35, linewidth=2)
        if row.quality is not None:
            axes.vlines(speed, 100 * row.quality.low, 100 * row.quality.high, color=colour, alpha=0.35, linewidth=2)
        axes.plot(speed, level, "o", color=colour, markersize=6, clip_on=False, label=row.name)
    axes.set_xlim(left=0)
    if metric:
        _score_limits(axes)
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


def _colour_of(method: str) -> str:
    """Return the colour of the method's family: a rule with all its widths and drafters, the methods of others, or our
    methods without a draft."""
    if method.startswith(("hf-", "ct2-", "llama-cpp-")):
        return MUTED
    return next((colour for name, colour in FAMILIES.items() if method.startswith(name)), INK)


def _new_figure(width: float, height: float) -> Figure:
    """Make a figure of this size in inches that lays itself out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr,call-arg]
    FigureCanvasAgg(figure)
    return figure


def _plain_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Give the axes a title, labels and a light grid, and no frame above and to the right."""
    # the name of a file may hold dollars, which begin no formula
    axes.set_title(title, loc="left", color=INK, fontweight="bold", fontsize=11, parse_math=False)
    axes.set_xlabel(x, color=INK, fontsize=10)
    axes.set_ylabel(y, color=INK, fontsize=10)
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)


def _score_limits(axes: Axes) -> None:
    """Set the limits of an axis of percents once everything is drawn. They begin at 0 or above, and nearly equal values
    do not look far apart."""
    low, high = axes.get_ylim()
    spare = max(0.0, LEAST_POINTS - (high - low)) / 2
    axes.set_ylim(max(0.0, low - spare), max(high + spare, LEAST_POINTS))


def spread_labels(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places of labels near the given places: in the same order, at least `gap` from each other, and between
    `low` and `high` as long as there is room."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    shifts = [0.0] * len(places)
    below = low - gap
    for index in order:
        shifts[index] = below = max(places[index], below + gap)
    above = high + gap
    for index in reversed(order):
        shifts[index] = above = min(shifts[index], above - gap)
    return shifts


def picture_bytes(figure: Figure, suffix: str = ".png") -> bytes:
    """Return the picture as a file of this kind: .png, .svg or .pdf."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a file's name: a box is drawn for a letter
        figure.savefig(buffer, format=suffix.lower().removeprefix("."), dpi=DPI)
    return buffer.getvalue()
