"""Measurements of a draft on prompts that it was not trained on: which layers pass, and how fast it is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dsbd_cli.config.method import DEFAULT_DEPTH, MethodConfig
from dsbd_cli.config.model import DTYPES, ModelSpec
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.lab.profiling.budget import Budget, CutOffError
from dsbd_cli.lab.profiling.measurements import method_for
from dsbd_cli.lab.profiling.profile import depth_rates
from dsbd_cli.lab.reports.profile_data import NO_DRAFT, ForestSize
from dsbd_cli.requests import Request
from dsbd_cli.stats import RequestStats
from dsbd_cli.train.compare import with_draft
from dsbd_cli.train.run_record import DraftAcceptance, Speed
from dsbd_cli.train.training import compute_dtype


def with_draft_head(engine: Engine, folder: Path, target: ModelSpec) -> Engine:
    """Return an engine with the head in a folder, which computes in the dtype of the target's plain layers.
    target: how the engine's target was loaded."""
    plain, dtype = engine.method, compute_dtype(engine)
    method = MethodConfig(rule=plain.rule, num_beams=plain.num_beams, depth=DEFAULT_DEPTH)
    spec = replace(target.of_draft(str(folder)), dtype=dtype if dtype in DTYPES else "auto")
    return with_draft(engine, spec, target, method)


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


def shapes(num_beams: int) -> list[ForestSize]:
    """Return the shapes that a draft is timed with: those that paid best where heads and drafts of a family were
    measured (docs/beams-and-drafts.md). With several beams a layer passes only if it holds all of them."""
    if num_beams == 1:
        return [ForestSize(3, 1), ForestSize(2, 2), ForestSize(3, 3)]
    return [ForestSize(1, num_beams), ForestSize(1, 2 * num_beams), ForestSize(2, 2 * num_beams)]


def measured_speed(engine: Engine, requests: Sequence[Request], budget: Budget) -> Speed | None:
    """Answer requests one at a time, each without the draft and with it in every shape, until the budget ends. The
    first request warms up. Return None where there was no time for a second one."""
    settings = [NO_DRAFT, *shapes(engine.method.num_beams)]
    engines = [
        engine.replace(
            draft=engine.draft if setting.depth else None,
            method=method_for(engine.method, setting),
            batch_size=1,
            log_steps=False,
        )
        for setting in settings
    ]
    rounds: list[list[tuple[int, float]]] = []  # of each request, by engine: tokens and seconds
    budget.start()
    with suppress(CutOffError):
        for request in requests:
            start, timed = budget.clock(), list[tuple[int, float]]()
            for one in engines:
                began = budget.clock()
                with budget.running(one.stop):
                    made = [result.hypotheses[0].num_tokens for result in one.run([request]) if result.hypotheses]
                timed += [(tokens, budget.clock() - began) for tokens in made]
                if budget.left <= 0:
                    break
            if len(timed) == len(engines):  # else the request fails, or there was no time for all
                rounds.append(timed)
            # the first round takes longer than those to come
            if budget.left < (budget.clock() - start if len(rounds) > 1 else 0.0):
                break
    if len(rounds) < 2:
        return None
    by_engine = zip(*rounds[1:], strict=True)
    plain, *drafted = (sum(tokens for tokens, _ in some) / sum(seconds for _, seconds in some) for some in by_engine)
    best = max(range(len(drafted)), key=drafted.__getitem__)
    return Speed(plain, drafted[best], settings[1 + best].label)
