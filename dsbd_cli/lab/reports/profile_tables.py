"""A profile as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dsbd_cli.errors import plural
from dsbd_cli.lab.reports.profile_data import Profile
from dsbd_cli.lab.reports.units import DASH, bytes_text, seconds_text

BAR = 24
MARKS = {">": "in use", "*": "recommended"}


def _table(*columns: str) -> Table:
    """Make a table with the first column left-aligned, and numbers on the right."""
    # narrow gaps, so that eighty columns suffice
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, header_style="")
    for place, column in enumerate(columns):
        # ranges, too, stay on one line; only notes, in columns without a heading, are wrapped
        table.add_column(column, justify="right" if place else "left", no_wrap=bool(column) or not place)
    return table


def _part(title: str, table: Table, caption: str = "") -> Group:
    """Return a table with a title above and a caption below. The caption may be wider than the table."""
    below = [Text(caption, style="dim")] if caption else []
    return Group(Text(title, style="bold"), table, *below, Text())


def profile_tables(profile: Profile) -> Iterator[RenderableType]:
    """Yield what is printed on the terminal, from top to bottom."""
    yield Group(_head(profile))
    yield _phases(profile)
    if profile.acceptance:
        yield _acceptance(profile)
    yield _settings(profile)
    yield _forwards(profile)
    yield _memory(profile)
    yield Group(*[Text(f"- {note}") for note in profile.notes], Text())
    yield Text("Recommended for these prompts on this machine:", style="bold")
    # Text alone is not wrapped: this is a line to be copied
    yield Text(f"  {profile.recommended_command}\n", style="bold green")


def _head(profile: Profile) -> Text:
    machine, load = profile.machine, profile.machine.load_average
    models = f"{profile.target}" + (f" with {profile.draft}" if profile.draft else ", no draft model")
    text = Text()
    text.append(f"{models}, {profile.dtype}\n", style="bold")
    text.append(
        f"{profile.rule}, W={profile.num_beams}, {_drafting(profile)}, width {profile.width}; "
        f"{plural(profile.prompts, 'prompt')} of {plural(profile.prompt_tokens, 'token')} in all, "
        f"{plural(profile.batch_size, 'row')} at most together\n"
    )
    loaded = "" if load is None else f", load average {load:.2f}"
    text.append(
        f"{machine.device}, {plural(machine.threads, 'thread')} on {plural(machine.cores, 'core')}{loaded}\n",
        style="dim",
    )
    return text


def _drafting(profile: Profile) -> str:
    """Return the drafter and the size of its forest."""
    name = profile.drafter or ""
    if profile.tree is not None:
        name = name.replace("dynamic-tree", f"dynamic-tree ({profile.tree})")
    who = f"{name} " if name else ""
    return who + profile.now.setting.label


def _phases(profile: Profile) -> RenderableType:
    now = profile.now
    table = _table("phase", "run", "iteration", "share", "")
    table.columns[-1].justify = "left"
    for phase in now.phases:
        bar = "█" * round(phase.share * BAR) or ("▏" if phase.share > 0.001 else "")
        table.add_row(
            phase.name, seconds_text(phase.total_s), seconds_text(phase.per_iteration_s), f"{phase.share:.1%}", bar
        )
    return _part(
        f"Time by phase, {now.setting.label} (measured)",
        table,
        f"{plural(now.iterations, 'iteration')}, {plural(now.tokens, 'token')} in "
        f"{seconds_text(now.seconds.median)}: "
        f"{now.tokens_per_s.median:.1f} tokens/s ({now.tokens_per_s.low:.1f} to {now.tokens_per_s.high:.1f})",
    )


def _acceptance(profile: Profile) -> RenderableType:
    table = _table("layer", "reached", "passed", "chance", "")
    table.columns[-1].justify = "left"
    for rate in profile.acceptance:
        chance = rate.passed / rate.reached if rate.reached else None
        table.add_row(
            str(rate.depth),
            str(rate.reached),
            str(rate.passed),
            DASH if chance is None else f"{chance:.0%}",
            "" if chance is None else "█" * round(chance * BAR),
        )
    return _part(
        f"Acceptance by depth, {profile.now.setting.label} (measured)",
        table,
        "chance that a layer passes once it is reached" + _by_drafter(profile),
    )


def _by_drafter(profile: Profile) -> str:
    """Return a sentence on the accepted nodes of each of two drafters in the setting in use; empty without two."""
    if not profile.drafters:
        return ""
    rates = [
        f"{one.name} {one.accepted} of {one.drafted} nodes"
        + (f" ({one.accepted / one.drafted:.0%})" if one.drafted else "")
        for one in profile.drafters
    ]
    return f"\naccepted: {', '.join(rates)}; a node that both proposed is the first one's"


def _settings(profile: Profile) -> RenderableType:
    table = _table("setting", "tokens/s", "range", "steps/call", "width", "runs")
    for one in (profile.now, *profile.tried):
        mark = (">" if one is profile.now else "") + ("*" if one.setting == profile.best else "")
        table.add_row(
            mark + one.setting.label,
            f"{one.tokens_per_s.median:.1f}",
            f"{one.tokens_per_s.low:.1f} - {one.tokens_per_s.high:.1f}",
            f"{one.steps_per_call:.2f}",
            f"{one.mean_width:.2f}",
            str(one.seconds.count),
        )
    key = ", ".join(f"{sign} {name}" for sign, name in MARKS.items())
    return _part("Settings that were run (measured)", table, key)


def _forwards(profile: Profile) -> RenderableType:
    """Return the table of the mean target forward of every setting that was run, beside the roofline if known."""
    table = _table("setting", "rows", "nodes", "slots", "forward", "floor", "bound by", "roofline")
    for one in (profile.now, *profile.tried):
        forward = one.forward
        floor, share = forward.floor_s, forward.share_of_floor
        table.add_row(
            one.setting.label,
            f"{forward.rows:.1f}",
            f"{forward.nodes:.0f}",
            f"{forward.slots:.0f}",
            seconds_text(forward.seconds),
            DASH if floor is None else seconds_text(floor),
            forward.bound or DASH,
            DASH if share is None else f"{share:.0%}",
        )
    roof = profile.roofline
    caption = "means of all rows together"
    if roof is not None:
        caption += (
            f"; weights read per forward {bytes_text(roof.weight_bytes)}, KV {bytes_text(roof.kv_bytes_per_slot)} a "
            f"slot;\nmeasured: copy {roof.copy_bytes_per_s / 1e9:.1f} GB/s, matmul "
            f"{roof.matmul_flops_per_s / 1e9:.0f} GFLOP/s"
        )
    return _part("Target forwards against their roofline (measured)", table, caption)


def _memory(profile: Profile) -> RenderableType:
    table = _table("owner", "bytes", "")
    table.columns[-1].justify = "left"
    for owner in profile.memory:
        table.add_row(owner.name, bytes_text(owner.bytes), escape(owner.note))
    return _part("Memory by owner at the peak (measured)", table)
