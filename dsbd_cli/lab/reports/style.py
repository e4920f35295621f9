"""One style for all plots: Okabe and Ito's colours (distinguishable with every kind of colour vision), plain axes.

Figures are made without pyplot, so that nothing global changes and no display is needed.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsbd_cli.errors import UsageError, require_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "black": "#000000",
}
INK, MUTED, GRID = "#222222", "#777777", "#DDDDDD"
FORMATS = (".png", ".svg", ".pdf")
DPI = 160
LEAST_POINTS = 5.0


def require_plots(option: str, path: Path) -> None:
    """Check, before anything is measured, that matplotlib is there and the name has a known ending. Raises
    UsageError."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{option} {path}: the name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    require_package(option, "matplotlib", "plots")


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of this size in inches that lays itself out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr,call-arg]
    FigureCanvasAgg(figure)
    return figure


def plain_axes(axes: Axes, title: str, x: str, y: str) -> None:
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


def score_limits(axes: Axes) -> None:
    """Set the limits of an axis of percents once everything is drawn. They begin at 0 or above, and nearly equal values
    do not look far apart."""
    low, high = axes.get_ylim()
    spare = max(0.0, LEAST_POINTS - (high - low)) / 2
    axes.set_ylim(max(0.0, low - spare), max(high + spare, LEAST_POINTS))


def spread_labels(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places of labels near the given places: in the same order, at least `gap` from each other, and between
    `low` and `high` as long as there is room."""
    order = sorted(range(len(places)), key=lambda place: places[place])
    found = [0.0] * len(places)
    below = low - gap
    for place in order:
        found[place] = below = max(places[place], below + gap)
    above = high + gap
    for place in reversed(order):
        found[place] = above = min(found[place], above - gap)
    return found


def picture_bytes(figure: Figure, suffix: str = ".png") -> bytes:
    """Return the picture as a file of this kind: .png, .svg or .pdf."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a file's name: a box is drawn for a letter
        figure.savefig(buffer, format=suffix.lower().removeprefix("."), dpi=DPI)
    return buffer.getvalue()
