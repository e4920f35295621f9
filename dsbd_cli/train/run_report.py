"""A finished run of `dsbd distill` in words: one line for a milestone, a table, and whether the draft pays."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.errors import plural
from dsbd_cli.lab.reports.units import DASH
from dsbd_cli.train.run_record import DraftAcceptance, Measurement, Milestone, Record, Speed, TrainingPlan

EXPLAINED = (
    "loss: how far the draft's distribution is from the target's; 0: it is the same",
    "layers that pass: how often the target keeps the 1st, the 2nd, .. drafted layer, of the times that it gets there",
    "steps per target call: tokens by which one run of the target makes each beam longer; 1 without a draft",
    "tokens/s: measured here on a few of the held-out prompts, one at a time, with the draft at the fastest D and K",
)


def show(record: Record, folder: Path, held: int, *, trusted: bool) -> None:
    """Print what a finished run came to: measurements before and after, a verdict, and the command that uses the draft.

    held: held-out prompts that it was measured on. trusted: the target's checkpoint may run its code.
    """
    from dsbd_cli.lab.reports.screen import Screen, before_and_after

    table, ends = before_and_after(), (record.milestones[0], record.milestones[-1])
    last = ends[-1]
    table.add_row("loss, nats per token", DASH, DASH if last.loss is None else f"{last.loss:.3f}")
    rows = _rows("", [milestone.measured for milestone in ends])
    if last.one_beam is not None:
        rows += _rows("one beam: ", [milestone.one_beam or Measurement(None) for milestone in ends])
    for row in rows:
        table.add_row(*row)
    console = Screen(sys.stdout)
    console.print(table)
    for line in EXPLAINED:
        console.say(line)
    for measurement, beams in ((last.measured, ""), (last.one_beam, "with one beam ")):
        if measurement is not None and measurement.speed is not None:
            console.say(beams + verdict(measurement.speed))
    command = generate_words(record.plan, folder, trusted=trusted)
    console.say(f"{folder} is written, measured on {plural(held, 'held-out prompt')}: {shlex.join(command)}")


def generate_words(plan: TrainingPlan, folder: Path, *, trusted: bool) -> list[str]:
    """Return the command that runs the target as it was run here, with the draft. Defaults are left out."""
    words = ["dsbd", "generate", "--target", plan.target, "--draft", str(folder), *(["--chat"] if plan.chat else [])]
    for name, value, default in (
        ("--dtype", plan.dtype, "auto"),
        ("--quantize", plan.quantize, None),
        ("--decode", plan.decode, "sample"),
        ("--num-beams", plan.num_beams, MethodConfig().num_beams),
    ):
        words += [] if value == default else [name, str(value)]
    return [*words, "--trust-remote-code", "target"] if trusted else words


def milestone_line(milestone: Milestone) -> str:
    """Return the acceptance of a milestone, with W beams and with one."""
    said = _acceptance_line(milestone.measured)
    return said if milestone.one_beam is None else f"{said}; with one beam {_acceptance_line(milestone.one_beam)}"


def verdict(speed: Speed) -> str:
    """Say whether the draft makes the target faster on this machine."""
    speeds = f"{speed.drafted:.1f} tokens/s with it ({speed.label}), {speed.plain:.1f} without"
    if speed.drafted > speed.plain:
        return f"this draft pays: {speeds}"
    return f"this draft does not pay: {speeds}; give more prompts and --steps"


def milestone_said(milestone: Milestone, steps: int, held: int, seconds: float) -> Iterator[str]:
    """Yield lines on a milestone of a run of `steps` steps: loss, acceptance, and at the first and the last step the
    speed. held: held-out prompts. seconds: how long the speed was measured for."""
    loss = "" if milestone.loss is None else f"loss {milestone.loss:.3f}, "
    yield f"step {milestone.step} of {steps}: {loss}{milestone_line(milestone)}"
    if milestone.step not in (0, steps):
        return
    if held < 2:
        there = "one" if held else "none"
        yield f"the speed is not measured, because that takes two held-out prompts or more, and there is {there}"
        return
    for measured, beams in ((milestone.measured, ""), (milestone.one_beam, " with one beam")):
        if measured is None or measured.acceptance is None:
            continue
        if (speed := measured.speed) is None:
            yield f"{seconds:.0f} s were too short to measure the speed{beams}: dsbd profile --seconds takes longer"
        else:
            speeds = f"{speed.plain:.1f} tokens/s without a draft, {speed.drafted:.1f} with it ({speed.label})"
            yield f"measured here{beams}: {speeds}"


def _rows(beams: str, ends: Sequence[Measurement]) -> list[tuple[str, ...]]:
    passed, speeds = [measurement.acceptance for measurement in ends], [measurement.speed for measurement in ends]
    return [
        (f"{beams}layers that pass", *(_shares(acceptance) if acceptance else DASH for acceptance in passed)),
        (
            f"{beams}steps per target call",
            *(f"{acceptance.steps_per_call:.2f}" if acceptance else DASH for acceptance in passed),
        ),
        (f"{beams}tokens/s with the draft", *(f"{speed.drafted:.1f}" if speed else DASH for speed in speeds)),
        (f"{beams}tokens/s without a draft", *(f"{speed.plain:.1f}" if speed else DASH for speed in speeds)),
    ]


def _acceptance_line(measurement: Measurement) -> str:
    acceptance = measurement.acceptance
    if acceptance is None:
        return "nothing was drafted"
    return f"layers that pass: {_shares(acceptance)}; {acceptance.steps_per_call:.2f} steps per call"


def _shares(acceptance: DraftAcceptance) -> str:
    return " ".join(f"{share:.0%}" for share in acceptance.by_depth)
