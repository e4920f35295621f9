"""How a draft does on prompts that it was not trained on: what passes, layer by layer, and what that is worth here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.lab.distillation.record import Acceptance, Speed
from dsbd_cli.lab.profiling.budget import Budget
from dsbd_cli.lab.profiling.profile import ProfileSpec, take_profile
from dsbd_cli.lab.profiling.runs import ProfiledPair
from dsbd_cli.lab.reports.profile_data import Prediction
from dsbd_cli.requests import Request

__all__ = ["expected_speed", "measure_acceptance"]

PERCENT = 100


def measure_acceptance(
    engine: Engine, requests: Sequence[Request], told: Callable[[int], None] = lambda number: None
) -> Acceptance | None:
    """The engine on these requests; requests that fail are left out. None where nothing was drafted. told: after each,
    how many are done."""
    engine.log_steps = True
    depth = engine.method.depth
    reached, passed, steps, calls = [0] * depth, [0] * depth, 0, 0
    for number, result in enumerate(engine.run(requests), 1):
        told(number)
        if result.error is not None:
            continue
        steps, calls = steps + result.stats.steps, calls + result.stats.target_calls
        for step in result.stats.step_log:
            for place, layer in enumerate(step.layers):
                reached[place] += 1
                passed[place] += layer.passed
    if not calls or not reached[0]:
        return None
    return Acceptance(steps / calls, tuple(p / r for p, r in zip(passed, reached, strict=True) if r))


def expected_speed(engine: Engine, requests: Sequence[Request], budget: Budget) -> Speed | None:
    """What `dsbd profile` predicts for the engine's pair, within the budget; None where there was no time for a
    prediction."""
    assert engine.draft is not None
    assert engine.info is not None
    names, rows = (engine.info.target, engine.info.draft), min(engine.batch_size, len(requests))
    pair = ProfiledPair(engine.target, engine.draft, engine.codec, tuple(requests), rows, names, budget)
    profile = take_profile(
        ProfileSpec(pair, engine.method, 0, "", engine.info.dtype, None, lambda setting: setting.label)
    )
    found = profile.predictions if profile is not None else ()
    drafted = [one for one in found if one.setting.depth]
    if not drafted:
        return None
    best = max(drafted, key=lambda one: one.tokens_per_s)
    plain = next(one.tokens_per_s for one in found if not one.setting.depth)
    return Speed(plain, best.tokens_per_s, best.setting.label, _pays_from(drafted, plain))


def _pays_from(drafted: Sequence[Prediction], plain: float) -> float | None:
    for percent in range(1, PERCENT + 1):
        if max(_with_chance(one, percent / PERCENT) for one in drafted) > plain:
            return percent / PERCENT
    return None


def _with_chance(one: Prediction, chance: float) -> float:
    """tokens/s of the setting if every layer passed with this chance."""
    steps = sum(chance**layer for layer in range(one.setting.depth + 1))
    return one.tokens_per_s * steps / one.steps_per_call
