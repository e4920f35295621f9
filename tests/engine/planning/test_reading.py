"""What the draft has to read counts when its depth is chosen. Guards drafting for short answers to long prompts, whose
reading costs more than drafting brings, and probes that make the draft read all prompts as often as cheap ones."""

from __future__ import annotations

import pytest

from dsbd_cli.engine.planning.acceptance import Acceptance, RequestLengths
from dsbd_cli.engine.planning.planner import AdaptivePlanner, DraftWork, Observation
from tests.helpers.worlds import World, method


def test_lives_are_those_of_the_requests_that_ended() -> None:
    lives, long = RequestLengths(32.0), Acceptance()
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
    chosen, read = list[int](), False
    for number in range(iterations):
        if number % life == 0:
            world.request, read = Acceptance(), False
        shape = world.iterate(planner, DraftWork(0, 0 if read else prompt, prompt))
        read |= shape.depth > 0
        chosen.append(shape.depth)
    return chosen[iterations // 2 :]


def test_a_long_prompt_is_not_read_for_a_short_answer() -> None:
    assert sum(depth > 0 for depth in depths(8, 4)) > 550
    assert sum(depth > 0 for depth in depths(8, 1200)) < 60
    assert sum(depth > 0 for depth in depths(300, 1200)) > 500


def test_a_long_answer_drafts_although_its_prompt_was_long() -> None:
    """Guards prompts still to come that are charged as if every request were as short as was believed at first."""
    for node, prompt in ((0.002, 2000), (0.002, 4000), (0.0005, 8000)):
        planner, world = AdaptivePlanner(method()), World((0.09, 0.001), 0.008, 0.85, node=node)
        used = [world.iterate(planner, DraftWork(0, 0 if number > 1 else prompt, prompt)) for number in range(1000)]
        assert sum(shape.depth > 0 for shape in used) > 800


def test_the_first_reading_says_nothing_about_the_next() -> None:
    """A first forward sets things up, on a GPU for seconds."""
    planner, world = AdaptivePlanner(method()), World((0.015, 0.0), 0.0015, 0.9, node=0.00002)
    depths = []
    for number in range(600):
        shown = world.at(planner.choose([world.request], DraftWork(0, 0 if number > 1 else 500, 500)))
        if number == 0:
            shown[3]["read"] = 2.0
        planner.observe(Observation(*shown, DraftWork(0, 500 if number == 0 else 0, 500)))
        depths.append(shown[0].depth)
    assert sum(depth > 0 for depth in depths) > 550


def test_requests_that_start_over_have_not_ended() -> None:
    lives, running = RequestLengths(32.0), [Acceptance() for _ in range(8)]
    for _ in range(3):
        lives.see(running)
    lives.restart()
    lives.see(running[:4])
    assert lives.expected == 32 == lives.now()


def test_probes_that_read_prompts_are_rarer() -> None:
    def probes(reading: DraftWork) -> int:
        planner, world = AdaptivePlanner(method()), World((0.05, 0.002), 0.02, 0.0, node=0.0001)
        return sum(world.iterate(planner, reading).depth > 0 for _ in range(6000))

    assert 0 < 2 * probes(DraftWork(0, 4000, 4000)) < probes(DraftWork())
