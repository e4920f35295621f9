"""A finished run of `dsbd distill` in words: one line for a milestone, a table, and whether the draft pays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dsbd_cli.errors import plural
from dsbd_cli.lab.reports.units import DASH
from dsbd_cli.train.run_record import DraftAcceptance, Form, Measurement, Milestone, Record, Speed

EXPLAINED = (
    "loss: how far the draft's distribution is from the target's; 0: it is the same",
    "layers that pass: how often the target keeps the 1st, the 2nd, .. drafted layer, of the times that it gets there",
    "steps per target call: tokens by which one run of the target makes each beam longer; 1 without a draft",
    "tokens/s: measured here on a few of the held-out prompts, one at a time, with the draft at the fastest D and K",
)


def show(record: Record, folder: Path, held: int, command: str) -> None:
    """Print what a finished run came to: measurements before and after, a verdict, and the command that uses the draft.

    held: held-out prompts that it was measured on. command: what runs the draft.
    """
    from dsbd_cli.lab.reports.screen import Screen, before_and_after

    table, ends = before_and_after(), (record.milestones[0], record.milestones[-1])
    last = ends[-1]
    table.add_row("loss, nats per token", DASH, DASH if last.loss is None else f"{last.loss:.3f}")
    rows = _rows("", [one.measured for one in ends])
    if last.one_beam is not None:
        rows += _rows("one beam: ", [one.one_beam or Measurement(None) for one in ends])
    for row in rows:
        table.add_row(*row)
    console = Screen(sys.stdout)
    console.print(table)
    for line in EXPLAINED:
        console.say(line)
    for found, beams in ((last.measured, ""), (last.one_beam, "with one beam ")):
        if found is not None and found.speed is not None:
            console.say(beams + verdict(found.speed, record.plan.form))
    console.say(f"{folder} is written, measured on {plural(held, 'held-out prompt')}: {command}")


def milestone_line(one: Milestone) -> str:
    """Return the acceptance of a milestone, with W beams and with one."""
    said = _acceptance_line(one.measured)
    return said if one.one_beam is None else f"{said}; with one beam {_acceptance_line(one.one_beam)}"


def verdict(speed: Speed, form: Form) -> str:
    """Say whether the draft makes the target faster on this machine."""
    speeds = f"{speed.drafted:.1f} tokens/s with it ({speed.label}), {speed.plain:.1f} without"
    if speed.drafted > speed.plain:
        return f"this draft pays: {speeds}"
    fewer = ", or fewer --layers" if form == "model" else ""
    return f"this draft does not pay: {speeds}; give more prompts and --steps{fewer}"


def _rows(beams: str, ends: Sequence[Measurement]) -> list[tuple[str, ...]]:
    passed, speeds = [one.acceptance for one in ends], [one.speed for one in ends]
    return [
        (f"{beams}layers that pass", *(_shares(one) if one else DASH for one in passed)),
        (f"{beams}steps per target call", *(f"{one.steps_per_call:.2f}" if one else DASH for one in passed)),
        (f"{beams}tokens/s with the draft", *(f"{one.drafted:.1f}" if one else DASH for one in speeds)),
        (f"{beams}tokens/s without a draft", *(f"{one.plain:.1f}" if one else DASH for one in speeds)),
    ]


def _acceptance_line(found: Measurement) -> str:
    if found.acceptance is None:
        return "nothing was drafted"
    return f"layers that pass: {_shares(found.acceptance)}; {found.acceptance.steps_per_call:.2f} steps per call"


def _shares(found: DraftAcceptance) -> str:
    return " ".join(f"{share:.0%}" for share in found.by_depth)
