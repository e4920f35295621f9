"""Sentences on what the numbers of a profile show, and the choice of the recommended setting."""

from __future__ import annotations

from collections.abc import Sequence

from dsbd_cli.lab.profiling.budget import Budget
from dsbd_cli.lab.profiling.measurements import EngineMeasurement, drafts_nodes
from dsbd_cli.lab.reports.profile_data import ForestSize, Machine, MeasuredSetting

WIDE_SPREAD = 0.25
BUSY = 0.5
NEAR = 0.95


def warnings(machine: Machine, measured: Sequence[MeasuredSetting]) -> list[str]:
    """Return reasons to trust the timings less."""
    notes = []
    load = machine.load_average
    if load is not None and load > BUSY * machine.cores:
        notes.append(
            f"load average {load:.1f} on {machine.cores} cores before the first measurement: "
            "other processes share the machine, so the timings say little"
        )
    for setting in measured:
        if setting.seconds.relative > WIDE_SPREAD:
            notes.append(
                f"runs of {setting.setting.label} spread by {setting.seconds.relative:.0%} "
                f"({setting.seconds.low:.2f} to {setting.seconds.high:.2f} s): measure again on a quiet machine"
            )
    if faster := [setting.setting.label for setting in measured if (setting.forward.share_of_floor or 0) > 1]:
        notes.append(
            f"forwards of {', '.join(faster)} took less than their floor: the copy and the matrix product that it is "
            "computed from ran slower than the model, so roofline says too much"
        )
    return notes


def drafting(measurement: EngineMeasurement) -> list[str]:
    """Return notes on what each of two drafters brought, and on the phase `draft` where it does not consist of forwards
    of a draft model over the forest's nodes."""
    method = measurement.method
    shares = [
        f"{name} {drafter.accepted} of {drafter.drafted} nodes"
        + (f" ({drafter.accepted / drafter.drafted:.0%})" if drafter.drafted else "")
        for name, drafter in measurement.stats.drafters.items()
    ]
    both = [f"accepted: {', '.join(shares)}; a node that both proposed is the first one's"] if shares else []
    if not method.depth or drafts_nodes(method):
        return both
    if not method.bridges:
        return [*both, f"drafter {method.drafter} runs no draft model: its phase draft is look-ups in tensors"]
    calls = measurement.stats.draft_calls / max(measurement.stats.target_calls, 1)
    return [
        "drafter bridge reads the host in its phase draft by design: the beams once an iteration and the best tokens "
        "after each draft forward, because text lives there",
        f"its draft runs {calls:.1f} forwards an iteration; the rest of the phase is reading, tokenizing and spelling",
    ]


def missing(budget: Budget) -> list[str]:
    """Return notes on what was not measured, and why."""
    notes = []
    if budget.left_out:
        notes.append(
            f"left out, because --seconds is {budget.seconds:g}: {'; '.join(budget.left_out)}; "
            "a larger number measures them too"
        )
    if budget.stopped:
        notes.append("stopped early: this is what was measured until then")
    return notes


def notes(now: MeasuredSetting, tried: Sequence[MeasuredSetting], best: ForestSize) -> list[str]:
    """Return notes on what the measurements show about the setting in use and the recommended one."""
    notes = []
    plain = next((setting for setting in tried if not setting.setting.depth), None)
    if plain is not None and now.setting.depth:
        ratio = now.tokens_per_s.median / plain.tokens_per_s.median
        if ratio < 1:
            notes.append(f"speculation does not pay as set: no draft is {1 / ratio:.2f} times as fast (measured)")
        else:
            notes.append(f"speculation pays: {ratio:.2f} times the tokens/s of no draft (measured)")
        drafted = [setting.tokens_per_s.median for setting in (now, *tried) if setting.setting.depth]
        if not best.depth and max(drafted) < plain.tokens_per_s.median:
            notes.append("no D and K that was run with this drafter is faster: use no draft")
        elif not best.depth and ratio >= 1:
            notes.append(
                f"no draft is recommended all the same: it is within {1 - NEAR:.0%} of the fastest, and all beams live "
                "without a draft, where narrow layers lose text"
            )
    if best == now.setting and tried:
        notes.append("the settings in use are the recommended ones")
    return notes


def choose(speeds: Sequence[tuple[ForestSize, float]], num_beams: int) -> ForestSize:
    """Choose the fastest of several settings, which are given with their tokens/s.

    Where the width varies, choose the widest setting within 5 % of the fastest, because narrow beams lose text. Without
    a draft the width is W, because all beams live.
    """
    fastest, speed = max(speeds, key=lambda pair: pair[1])
    if all(setting.min_width is None for setting, _ in speeds):
        return fastest

    def width(setting: ForestSize) -> int:
        return num_beams if not setting.depth else setting.min_width or 0

    return max((pair for pair in speeds if pair[1] >= NEAR * speed), key=lambda pair: (width(pair[0]), pair[1]))[0]
