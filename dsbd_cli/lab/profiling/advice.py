"""What the numbers say, in sentences. Predictions are called so."""

from __future__ import annotations

from collections.abc import Sequence

from dsbd_cli.lab.profiling.budget import Budget
from dsbd_cli.lab.profiling.predict import NEAR
from dsbd_cli.lab.profiling.runs import Run, drafts_nodes, phases_of
from dsbd_cli.lab.reports.profile_data import ForestSize, Machine, MeasuredSetting, Prediction

__all__ = ["drafting", "missing", "neighbours", "notes", "prediction_of", "warnings"]

WIDE_SPREAD = 0.25
BUSY = 0.5
OFF = 0.15
WORTH = 0.03


def warnings(machine: Machine, measured: Sequence[MeasuredSetting]) -> list[str]:
    """Reasons to trust the timings less."""
    told = []
    load = machine.load_average
    if load is not None and load > BUSY * machine.cores:
        told.append(
            f"load average {load:.1f} on {machine.cores} cores before the first measurement: "
            "other processes share the machine, so the timings say little"
        )
    for one in measured:
        if one.seconds.relative > WIDE_SPREAD:
            told.append(
                f"runs of {one.setting.label} spread by {one.seconds.relative:.0%} "
                f"({one.seconds.low:.2f} to {one.seconds.high:.2f} s): measure again on a quiet machine"
            )
    return told


def drafting(run: Run) -> list[str]:
    """What the phase draft is where it is not forwards of a draft model over the forest's nodes."""
    method = run.method
    if not method.depth or drafts_nodes(method):
        return []
    fitted = "what it costs by D and K is fitted to whole runs"
    if not method.bridges:
        return [
            f"drafter {method.drafter} runs no draft model, so there is no T_draft(K): its phase draft is look-ups in "
            f"tensors, and {fitted}"
        ]
    log = run.log
    forwards = log.of("draft")
    phase = next(one.total_s for one in phases_of(run) if one.name == "draft")
    share = log.forward_s("draft", "forest") / phase if phase else 0.0
    return [
        "drafter bridge reads the host in its phase draft by design: the beams once an iteration and the best tokens "
        "after each draft forward, because text lives there",
        f"of its phase draft {share:.0%} are forwards of the draft, {len(forwards) / max(log.iterations, 1):.1f} an "
        f"iteration; the rest is reading, tokenizing and spelling; {fitted}",
    ]


def missing(budget: Budget) -> list[str]:
    """What was not measured, and why."""
    told = []
    if budget.left_out:
        told.append(
            f"left out, because --seconds is {budget.seconds:g}: {'; '.join(budget.left_out)}; "
            "a larger number measures them too"
        )
    if budget.stopped:
        told.append("stopped early: this is what was measured until then")
    return told


def neighbours(
    now: Prediction, found: Sequence[Prediction], measured: MeasuredSetting, without: MeasuredSetting | None
) -> list[str]:
    """Whether a longer or a wider draft would pay, each alone and held against no draft too, as predicted.

    measured: the setting in use; without: no draft, as measured.
    """
    here = now.setting
    same = [one for one in found if one.setting.depth and one.setting.min_width == here.min_width]
    gain = without.tokens_per_s.median / measured.tokens_per_s.median - 1 if without is not None else None
    told = []
    for field, other, words in (
        ("depth", "drafts_per_layer", (("longer", 1), ("shorter", -1))),
        ("drafts_per_layer", "depth", (("wider", 1), ("narrower", -1))),
    ):
        line = [one for one in same if getattr(one.setting, other) == getattr(here, other)]
        for word, side in words:
            further = [one for one in line if side * (getattr(one.setting, field) - getattr(here, field)) > 0]
            if further:
                best = max(further, key=lambda one: one.tokens_per_s)
                told.append(f"a {word} draft {_verdict(best, now.tokens_per_s, gain)}")
    return told


def _verdict(best: Prediction, now: float, gain: float | None) -> str:
    """What another draft would do to the speed. now: predicted tokens/s as set; gain: of no draft over that, as
    measured."""
    change = best.tokens_per_s / now - 1
    label = best.setting.label
    if abs(change) <= WORTH:
        return f"would change little: {label} is predicted within {WORTH:.0%} of the speed as set"
    predicted = f"{label} is predicted to change speed by {change:+.0%}"
    if change < 0:
        return f"would not pay: {predicted}"
    if gain is not None and change < gain:
        without = f"no draft was measured to change it by {gain:+.0%}"
        return f"would be faster than as set, but still slower than no draft: {predicted}, {without}"
    return f"would pay: {predicted}"


def notes(
    now: MeasuredSetting, tried: Sequence[MeasuredSetting], best: ForestSize, *, predicted: bool = True
) -> list[str]:
    """What the runs say about the recommended setting and about the predictions. predicted: there are some."""
    told = []
    plain = next((one for one in tried if not one.setting.depth), None)
    if plain is not None and now.setting.depth:
        ratio = now.tokens_per_s.median / plain.tokens_per_s.median
        if ratio < 1:
            told.append(f"speculation does not pay as set: no draft is {1 / ratio:.2f} times as fast (measured)")
        else:
            told.append(f"speculation pays: {ratio:.2f} times the tokens/s of no draft (measured)")
        if not best.depth and ratio < 1 and predicted:
            told.append("with this drafter no D and K was both predicted and measured to be faster: use no draft")
        elif not best.depth and ratio >= 1:
            told.append(
                f"no draft is recommended all the same: it is within {1 - NEAR:.0%} of the fastest, and all beams live "
                "without a draft, where narrow layers lose text"
            )
    for one in (now, *tried):
        if one.predicted is None:
            continue
        off = one.predicted.tokens_per_s / one.tokens_per_s.median - 1
        if abs(off) > OFF:
            told.append(
                f"the prediction for {one.setting.label} was off by {off:+.0%}: "
                "take the predicted numbers as an order, not as speeds"
            )
    if best == now.setting and tried:
        told.append("the settings in use are the recommended ones")
    return told


def prediction_of(setting: ForestSize, found: Sequence[Prediction]) -> Prediction | None:
    """The prediction of one setting; None where it is not in the grid."""
    return next((one for one in found if one.setting == setting), None)
