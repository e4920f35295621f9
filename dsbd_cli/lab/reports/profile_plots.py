"""A profile as a picture: phases of the settings that were run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsbd_cli.errors import plural
from dsbd_cli.lab.reports.profile_data import Profile
from dsbd_cli.lab.reports.style import COLOURS, new_figure, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# phases in their order: told apart by hatch as well as by colour
LOOKS = {
    "tokenise": ("sky", ""),
    "prefill": ("orange", "//"),
    "draft": ("green", ""),
    "target": ("blue", "\\\\"),
    "verify": ("vermillion", ""),
    "compact": ("purple", "xx"),
    "detokenise": ("yellow", ""),
    "write": ("sky", ".."),
    "other": ("black", ""),
}
MILLI = 1e3
LEAST_SHARE = 0.002  # phases below are too narrow to be seen


def profile_figure(profile: Profile) -> Figure:
    """Needs matplotlib; see style.require_plots and style.picture_bytes."""
    settings = 1 + len(profile.tried)
    figure = new_figure(11, 2.0 + 0.5 * settings)
    grid = figure.add_gridspec(2, 1, height_ratios=(0.5 * settings, 0.25))
    bars, legend = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    _phases(bars, profile)
    legend.axis("off")
    handles, labels = bars.get_legend_handles_labels()
    legend.legend(handles, labels, loc="center", ncols=len(LOOKS), fontsize=9, frameon=False)
    models = profile.target + (f" with {profile.draft}" if profile.draft else ", no draft model")
    figure.suptitle(
        f"{models}, {profile.dtype}, {profile.rule}, W={profile.num_beams}, "
        + (f"drafter {profile.drafter}, " if profile.drafter else "")
        + f"{plural(profile.prompts, 'prompt')}; "
        f"{profile.machine.device}, threads: {profile.machine.threads}",
        fontsize=10,
    )
    return figure


def _phases(axes: Axes, profile: Profile) -> None:
    """Stacked bars: milliseconds per token of every setting that was run."""
    labels = []
    shares: dict[str, float] = {}
    for phase in (phase for one in (profile.now, *profile.tried) for phase in one.phases):
        shares[phase.name] = max(shares.get(phase.name, 0.0), phase.share)
    named: set[str] = set()
    for row, one in enumerate((profile.now, *profile.tried)):
        left = 0.0
        for phase in one.phases:
            colour, hatch = LOOKS[phase.name]
            value = phase.total_s / max(one.tokens, 1) * MILLI
            axes.barh(
                row,
                value,
                left=left,
                height=0.62,
                color=COLOURS[colour],
                hatch=hatch,
                edgecolor="white",
                linewidth=0.5,
                label=phase.name if phase.name not in named and shares[phase.name] >= LEAST_SHARE else None,
            )
            named.add(phase.name)
            left += value
        used = ", in use" if not row else ""
        labels.append(f"{one.setting.label}{used}\n{one.tokens_per_s.median:.0f} tokens/s")
    plain_axes(axes, "Where the time of a token goes (measured)", "milliseconds a token", "")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
