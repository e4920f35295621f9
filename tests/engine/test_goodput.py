"""`--depth auto` on machines and pairs made of numbers: near the best fixed shape of hindsight in each.

Guards a planner that is right on the machine it was written on: drafts at a loss, reads long prompts for short answers,
mixes up unlike requests, believes first iterations, or wastes the run on probes or on shapes that do not fit.
"""

from __future__ import annotations

import pytest

from benchmarks.planner import METHOD, WORLDS, best_fixed, serve
from dsbd_cli.engine.decoding.planner import AdaptivePlanner

LEAST = {"little memory": 0.88, "first iterations slow": 0.92, "captured as graphs": 0.92}
"""Where finding out is dear; runs of a few seconds too."""
LEAST |= {"long prompts, short answers": 0.87, "short run": 0.93, "short run, never pays": 0.9}


@pytest.mark.parametrize("name", WORLDS)
def test_the_planner_finds_the_fastest_shape(name: str) -> None:
    world = WORLDS[name]
    found = serve(world, AdaptivePlanner(METHOD)).goodput
    assert found > LEAST.get(name, 0.96) * best_fixed(world).goodput
