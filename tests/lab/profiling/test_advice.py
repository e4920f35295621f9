"""What a profile makes of its numbers: recommendations, notes, and floors, on numbers done by hand."""

from __future__ import annotations

import dataclasses

import pytest

from dsbd_cli import MethodConfig
from dsbd_cli.engine.planning.timing import FittedLine
from dsbd_cli.lab.profiling import advice
from dsbd_cli.lab.profiling.advice import choose
from dsbd_cli.lab.profiling.profile import neighbours
from dsbd_cli.lab.reports.profile_data import (
    NO_DRAFT,
    ForestSize,
    Machine,
    MeasuredSetting,
    Roofline,
    Spread,
    TargetForward,
    spread_of,
)


def line(*points: tuple[int, float]) -> FittedLine:
    made = FittedLine()
    for nodes, seconds in points:
        made.add(nodes, seconds)
    return made


def test_a_line_between_and_beyond_its_points() -> None:
    timed = line((4, 1.0), (8, 2.0))
    assert [timed.at(n) for n in (4, 6, 8, 12)] == pytest.approx([1.0, 1.5, 2.0, 3.0])
    assert line((4, 1.0)).at(99) == 1.0
    falling = line((4, 2.0), (8, 1.0))
    assert falling.at(99) == falling.at(4) == pytest.approx(1.5, abs=0.02), "noise leads nowhere below the mean"


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (MethodConfig(num_beams=4, drafts_per_layer=8, depth=4), [(2, 8), (8, 8), (4, 4), (4, 16)]),
        (MethodConfig(num_beams=4, drafts_per_layer=5, depth=1), [(2, 5), (1, 4), (1, 10)]),
        (
            MethodConfig(num_beams=4, drafts_per_layer=8, depth=4, rule="rejection", width="threshold:min=2"),
            [(2, 8, 2), (8, 8, 2), (4, 4, 2), (4, 16, 2)],
        ),
        (MethodConfig(num_beams=4, depth=0), []),
    ],
)
def test_settings_beside_the_one_in_use(method: MethodConfig, expected: list[tuple[int, ...]]) -> None:
    """A layer needs as many drafts as it has live beams, or it never passes."""
    assert neighbours(method) == [ForestSize(*size) for size in expected]


def test_settings_that_the_drafter_does_not_take_are_not_run() -> None:
    method = MethodConfig(num_beams=2, drafts_per_layer=3, depth=2, drafter="beam+ngram:share=2")
    assert [setting.label for setting in neighbours(method)] == ["D=1 K=3", "D=4 K=3", "D=2 K=6"], (
        "K=2 leaves beam no draft"
    )


def test_the_floor_is_the_larger_of_memory_and_arithmetic() -> None:
    roofline = Roofline(1_000_000, 2_000_000, 1000, 1e9, 1e10)
    assert roofline.floor(2, 100) == (pytest.approx((1_000_000 + 100 * 1000) / 1e9), "memory")
    floor, bound = roofline.floor(200, 100)
    assert (floor, bound) == (pytest.approx(2_000_000 * 200 / 1e10), "arithmetic")
    assert TargetForward(2.0, 200.0, 100.0, 0.5, floor, bound).share_of_floor == pytest.approx(0.08)
    assert TargetForward(2.0, 200.0, 100.0, 0.5).share_of_floor is None


def test_the_fastest_is_chosen_and_of_varying_widths_the_widest_near_it() -> None:
    fixed = [(ForestSize(2, 8), 10.0), (ForestSize(4, 8), 10.2), (NO_DRAFT, 9.9)]
    assert choose(fixed, 4) == ForestSize(4, 8)
    dynamic = [
        (ForestSize(2, 8, 1), 10.0),
        (ForestSize(2, 8, 2), 9.6),
        (ForestSize(2, 8, 3), 9.4),
        (ForestSize(1, 8, 2), 9.7),
    ]
    assert choose(dynamic, 4) == ForestSize(1, 8, 2)
    assert choose([*dynamic, (NO_DRAFT, 9.6)], 4) == NO_DRAFT
    assert choose([*dynamic, (NO_DRAFT, 9.0)], 4) == ForestSize(1, 8, 2)


FAST = TargetForward(1.0, 4.0, 40.0, 0.1, 0.12, "arithmetic")


def measured(setting: ForestSize, speed: float, low: float = 1.0, high: float = 1.0) -> MeasuredSetting:
    forward = TargetForward(1.0, 4.0, 40.0, 0.1)
    return MeasuredSetting(setting, Spread(1.0, low, high, 3), 100, spread_of([speed]), 2.0, 50, 4.0, (), forward, None)


def test_notes_say_when_speculation_does_not_pay() -> None:
    now, plain = measured(ForestSize(4, 8), 10.0), measured(NO_DRAFT, 20.0)
    told = " ".join(advice.notes(now, [plain], NO_DRAFT))
    assert "no draft is 2.00 times as fast" in told
    assert "no D and K that was run with this drafter is faster: use no draft" in told
    told = " ".join(advice.notes(now, [plain, measured(ForestSize(2, 8), 21.0)], ForestSize(2, 8)))
    assert "no draft is 2.00 times as fast" in told
    assert "use no draft" not in told
    told = " ".join(advice.notes(now, [measured(NO_DRAFT, 8.0)], ForestSize(4, 8)))
    assert "speculation pays: 1.25 times" in told
    assert "the settings in use are the recommended ones" in told


def test_warnings_of_a_busy_machine_and_of_spread() -> None:
    quiet = Machine("cpu", 2, 2, 0.3, {})
    assert advice.warnings(quiet, [measured(ForestSize(4, 8), 10.0)]) == []
    busy = Machine("cpu", 2, 2, 1.4, {})
    assert "load average 1.4" in advice.warnings(busy, [])[0]
    [note] = advice.warnings(quiet, [dataclasses.replace(measured(ForestSize(4, 8), 10.0), forward=FAST)])
    assert note.startswith("forwards of D=4 K=8 took less than their floor")
    assert "spread by 50%" in advice.warnings(quiet, [measured(ForestSize(4, 8), 10.0, 0.8, 1.3)])[0]


def test_notes_say_why_a_slower_run_without_a_draft_is_recommended() -> None:
    now, plain = measured(ForestSize(4, 8, 1), 52.4), measured(NO_DRAFT, 51.1)
    best = choose([(run.setting, run.tokens_per_s.median) for run in (now, plain)], 4)
    told = " ".join(advice.notes(now, [plain], best))
    assert "speculation pays: 1.03 times" in told
    assert "no draft is recommended all the same: it is within 5% of the fastest" in told
    assert "use no draft" not in told
