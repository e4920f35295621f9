"""Measurements of a draft on prompts that it was not trained on: which layers pass, and how fast it is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.lab.profiling.budget import Budget
from dsbd_cli.lab.profiling.profile import ProfileSpec, depth_rates, take_profile
from dsbd_cli.lab.profiling.runs import ProfiledPair
from dsbd_cli.lab.reports.profile_data import NO_DRAFT
from dsbd_cli.requests import Request
from dsbd_cli.stats import RequestStats
from dsbd_cli.train.run_record import DraftAcceptance, Speed


def measure_acceptance(
    engine: Engine, requests: Sequence[Request], on_answer: Callable[[int], None]
) -> DraftAcceptance | None:
    """Run the engine on these requests and return the acceptance; requests that fail are left out. Return None where
    nothing was drafted. on_answer: called after each request with how many are done."""
    engine.log_steps = True
    answers = []
    for number, result in enumerate(engine.run(requests), 1):
        on_answer(number)
        if result.error is None:
            answers.append(result.stats)
    stats = RequestStats.total(answers)
    rates = [rate for rate in depth_rates(stats, engine.method.depth) if rate.reached]
    if not rates:
        return None
    return DraftAcceptance(stats.steps_per_call, tuple(rate.passed / rate.reached for rate in rates))


def measured_speed(engine: Engine, requests: Sequence[Request], budget: Budget) -> Speed | None:
    """Measure runs without and with the draft, as `dsbd profile` makes them, within the budget. Return None where there
    was no time for both."""
    assert engine.draft is not None
    pair = ProfiledPair(engine, tuple(requests), min(engine.batch_size, len(requests)), budget)
    profile = take_profile(ProfileSpec(pair, engine.method, 1, "", None, lambda setting: setting.label))
    if profile is None:
        return None
    speeds = {one.setting: one.tokens_per_s.median for one in (profile.now, *profile.tried)}
    plain = speeds.pop(NO_DRAFT, None)
    if plain is None:
        return None
    best = max(speeds, key=lambda setting: speeds[setting])
    return Speed(plain, speeds[best], best.label)
