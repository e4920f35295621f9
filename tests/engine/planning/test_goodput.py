"""`--depth auto` on machines and pairs made of numbers: near the best fixed shape of hindsight in each.

Guards a planner that is right on the machine it was written on: drafts at a loss, reads long prompts for short answers,
mixes up unlike requests, believes first iterations, takes a change of the machine's speed for the price of nodes, or
wastes the run on probes or on shapes that do not fit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.planner import BEAMS, METHOD, WORLDS, best_fixed, planner_of, serve, serve_fixed
from dsbd_cli.engine.planning.planner import Planner, Shape

LEAST = {"little memory": 0.88, "first iterations slow": 0.92, "captured as graphs": 0.92}
"""Where finding out is dear; runs of a few seconds too."""
LEAST |= {"long prompts, short answers": 0.87, "short run": 0.93, "short run, never pays": 0.9}
"""A draft model behind several beams is not tried before its price is small beside the run."""
LEAST |= {name: 0.985 for name in WORLDS if "answers, small model" in name or name == "four answers, head"}
LEAST |= {"many answers, good head": 0.9}


best, planned = cache(best_fixed), cache(lambda world: serve(world, planner_of(world)).goodput)


@pytest.mark.parametrize("name", WORLDS)
def test_the_planner_finds_the_fastest_shape(name: str) -> None:
    assert planned(WORLDS[name]) > LEAST.get(name, 0.96) * best(WORLDS[name]).goodput


def test_drafts_that_are_sure_pay_where_drafts_do_not() -> None:
    world = WORLDS["sure ones pay"]
    assert not best(world).drafting
    assert planned(world) > 1.04 * serve(world, planner_of(world, gated=False)).goodput


@pytest.mark.parametrize("shape", [Shape(0, 8), Shape(1, 5), Shape(3, 8)])
@pytest.mark.parametrize("name", [name for name, world in WORLDS.items() if not world.sure and world.slow == 1])
def test_hindsight_sees_what_a_planner_of_one_shape_would(name: str, shape: Shape) -> None:
    """On a few requests of each world; equal to the last bit."""
    world = replace(WORLDS[name], requests=9, answer=min(WORLDS[name].answer, 30))
    if not shape.depth or world.rows * shape.nodes(BEAMS) <= world.room:
        method = replace(METHOD, depth=shape.depth, drafts_per_layer=shape.drafts_per_layer, adaptive_depth=False)
        assert serve_fixed(world, shape) == serve(world, Planner(method))
