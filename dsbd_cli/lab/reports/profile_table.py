"""A profile on the terminal: one table of the settings that were run, notes, and the recommended command."""

from __future__ import annotations

from rich import box
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from dsbd_cli.errors import plural
from dsbd_cli.lab.reports.profile_data import MeasuredSetting, Profile
from dsbd_cli.lab.reports.screen import Screen
from dsbd_cli.lab.reports.units import DASH, bytes_text, figure

MARKS = {">": "in use", "*": "recommended"}
ROOMY = 100  # columns of a terminal from which gaps are wider
FORWARDS = ("draft", "target", "verify")  # phases with a column; all others share one


def print_profile(profile: Profile, console: Screen) -> None:
    """Print what a profile found out, from top to bottom. The command stands on a line of its own, to be copied."""
    _print_title(profile, console)
    console.show(_table(profile, console.width))
    console.print(Text(_caption(profile), style="dim"))
    console.print()
    for note in profile.notes:
        console.print(Text(f"- {note}"))
    console.print()
    console.print(Text("Recommended for these prompts on this machine:", style="bold"))
    console.print(Text(f"  {profile.recommended_command}\n", style="bold green"), soft_wrap=True)


def _print_title(profile: Profile, console: Screen) -> None:
    machine, load = profile.machine, profile.machine.load_average
    models = profile.target + (f" with {profile.draft}" if profile.draft else ", no draft model")
    console.print(Text(f"{models}, {profile.dtype}", style="bold"))
    console.print(
        Text(
            f"{profile.rule}, W={profile.num_beams}, {_drafting(profile)}, width {profile.width}; "
            f"{plural(profile.prompts, 'prompt')} of {plural(profile.prompt_tokens, 'token')} in all, "
            f"{plural(profile.batch_size, 'row')} at most together"
        )
    )
    loaded = "" if load is None else f", load average {load:.2f}"
    there = f"{machine.device}, {plural(machine.threads, 'thread')} on {plural(machine.cores, 'core')}{loaded}"
    console.print(Text(f"{there}\n", style="dim"))


def _drafting(profile: Profile) -> str:
    """Return the drafter and the size of its forest."""
    name = profile.drafter or ""
    if profile.tree is not None:
        name = name.replace("dynamic-tree", f"dynamic-tree ({profile.tree})")
    return f"{name} {profile.now.setting.label}".strip()


def _table(profile: Profile, width: int) -> Table:
    """Return the table. Up to eighty columns suffice where gaps are narrow."""
    gap = int(width >= ROOMY)
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, padding=(0, gap), header_style=""
    )
    every = (profile.now, *profile.tried)
    columns = {
        "setting": [_mark(profile, setting) + setting.setting.label for setting in every],
        "tokens/s": [_speed(setting) for setting in every],
        "steps/ call": [f"{setting.steps_per_call:.2f}" for setting in every],
    }
    if any(setting.setting.min_width is not None for setting in every):
        columns["width"] = [f"{setting.mean_width:.2f}" for setting in every]
    parts = zip(*(_milliseconds(setting) for setting in every), strict=True)
    columns |= {f"{name} ms": list(cells) for name, cells in zip((*FORWARDS, "other"), parts, strict=True)}
    shares, peaks = (
        [setting.forward.share_of_floor for setting in every],
        [setting.peak_memory_bytes for setting in every],
    )
    columns["floor %"] = [DASH if share is None else f"{100 * share:.0f}" for share in shares]
    columns["peak MiB"] = [DASH if peak is None else f"{peak / 2**20:.0f}" for peak in peaks]
    for heading, cells in columns.items():
        least = max(map(len, (*heading.split(), *cells)))
        justify: JustifyMethod = "right" if table.columns else "left"
        table.add_column(heading, justify=justify, vertical="bottom", width=least)
    for line in zip(*columns.values(), strict=True):
        table.add_row(*line)
    return table


def _mark(profile: Profile, measured: MeasuredSetting) -> str:
    return (">" if measured is profile.now else "") + ("*" if measured.setting == profile.best else "")


def _speed(measured: MeasuredSetting) -> str:
    """Return tokens per second, and half the width of their range where there are several runs."""
    speed = measured.tokens_per_s
    return figure(speed.median) + (f" ±{speed.relative / 2:.0%}" if speed.count > 1 else "")


def _milliseconds(measured: MeasuredSetting) -> list[str]:
    """Return the milliseconds of an iteration in each of FORWARDS, and in all other phases together."""
    seconds = {phase.name: phase.per_iteration_s for phase in measured.phases}
    parts = [seconds.pop(name, None) for name in FORWARDS]
    return [DASH if part is None else figure(1000 * part) for part in (*parts, sum(seconds.values()))]


def _caption(profile: Profile) -> str:
    """Return lines that explain the columns."""
    signs = ", ".join(f"{sign} {name}" for sign, name in MARKS.items())
    lines = [f"{signs}; ms: of an iteration; other: prompts, compaction, tokenizer, writing, scheduling"]
    roof, bound = profile.roofline, profile.now.forward.bound
    if roof is not None:
        lines.append(
            f"floor %: least time of a target forward (setting in use: bound by {bound}) by the measured one;\n"
            f"weights {bytes_text(roof.weight_bytes)} a forward, KV {bytes_text(roof.kv_bytes_per_slot)} a slot, copy "
            f"{roof.copy_bytes_per_s / 1e9:.1f} GB/s, matmul {roof.matmul_flops_per_s / 1e9:.0f} GFLOP/s"
        )
    return "\n".join(lines)
