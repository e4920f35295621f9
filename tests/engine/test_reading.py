"""What the draft has to read counts when its depth is chosen. Guards drafting for short answers to long prompts, whose
reading costs more than drafting brings, and probes that make the draft read all prompts as often as cheap ones."""

from __future__ import annotations

import pytest

from dsbd_cli.decoding.acceptance import Acceptance, Lives
from dsbd_cli.decoding.planner import AdaptivePlanner, Reading
from tests.engine.worlds import World, method


def test_lives_are_those_of_the_requests_that_ended() -> None:
    lives, long = Lives(32.0), Acceptance()
    for number in range(400):
        short = Acceptance()
        for _ in range(4):
            lives.see([long, short])
        if number == 1:
            assert lives.expected == (32 + 4) / 2
    assert lives.expected == pytest.approx(4, abs=0.1)
    lives.see([short])  # the long one has ended, the last short one has not
    assert lives.expected == pytest.approx(4 + 0.03 * 1600, rel=0.05)


def depths(life: int, prompt: int, iterations: int = 1200) -> list[int]:
    """Of requests that take so many iterations each, one at a time."""
    planner, world = AdaptivePlanner(method()), World((0.02, 0.001), 0.001, 0.9, node=0.0005)
    found, read = list[int](), False
    for number in range(iterations):
        if number % life == 0:
            world.request, read = Acceptance(), False
        shape = world.iterate(planner, Reading(0, 0 if read else prompt, prompt))
        read |= shape.depth > 0
        found.append(shape.depth)
    return found[iterations // 2 :]


def test_a_long_prompt_is_not_read_for_a_short_answer() -> None:
    assert sum(depth > 0 for depth in depths(8, 4)) > 550
    assert sum(depth > 0 for depth in depths(8, 1200)) < 60
    assert sum(depth > 0 for depth in depths(300, 1200)) > 500


def test_probes_that_read_prompts_are_rarer() -> None:
    def probes(reading: Reading) -> int:
        planner, world = AdaptivePlanner(method()), World((0.05, 0.002), 0.02, 0.0, node=0.0001)
        return sum(world.iterate(planner, reading).depth > 0 for _ in range(6000))

    assert 0 < 2 * probes(Reading(0, 4000, 4000)) < probes(Reading())
