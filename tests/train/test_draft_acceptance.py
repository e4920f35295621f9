"""The speed of a draft as `dsbd distill` tells it: with which shapes, on which prompts, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.lab.profiling.budget import Budget
from dsbd_cli.requests import Request, RequestResult
from dsbd_cli.train.draft_acceptance import measured_speed, shapes
from tests.helpers.toys import NumberCodec, table_pair

VOCABULARY, TOKENS = 12, 20


def engine_of(num_beams: int) -> Engine:
    target, draft = table_pair(1, VOCABULARY, 0.0)
    method = MethodConfig(rule="search", num_beams=num_beams, depth=4)
    return Engine(target, draft, NumberCodec(VOCABULARY, ()), method)


def requests(number: int) -> list[Request]:
    sampling = SamplingConfig(max_new_tokens=TOKENS)
    return [Request(id=str(i), prompt_ids=(i, 3), sampling=sampling) for i in range(number)]


@pytest.mark.parametrize("num_beams", [1, 4])
def test_the_fastest_shape_counts_and_the_first_prompt_does_not(
    monkeypatch: pytest.MonkeyPatch, num_beams: int
) -> None:
    fastest = shapes(num_beams)[1].label
    asked = list[tuple[str, str]]()
    now, real = [0.0], Engine.run

    def run(self: Engine, rows: list[Request]) -> Iterator[RequestResult]:
        shape = f"D={self.method.depth} K={self.method.drafts_per_layer}" if self.method.depth else "no draft"
        asked.append((shape, rows[0].id))
        now[0] += 3.0 if rows[0].id == "0" else {"no draft": 2.0, fastest: 1.0}.get(shape, 4.0)
        return real(self, rows)

    monkeypatch.setattr(Engine, "run", run)
    speed = measured_speed(engine_of(num_beams), requests(9), Budget(50.0, clock=lambda: now[0]))
    assert speed is not None
    assert (speed.plain, speed.drafted, speed.label) == (TOKENS / 2, TOKENS / 1, fastest)
    # 12 s for the first prompt and 11 for each other one: after the fourth too little time is left
    assert [label for label, _ in asked[:4]] == ["no draft", *(shape.label for shape in shapes(num_beams))]
    assert asked[-1][1] == "3"


@pytest.mark.parametrize(("budget", "rounds"), [(150.0, 3), (100.0, 0)])
def test_a_slow_warm_up_does_not_end_it_before_the_budget_does(
    monkeypatch: pytest.MonkeyPatch, budget: float, rounds: int
) -> None:
    """Guards a first prompt, which compiles and takes memory, whose time is taken for that of the next; and a round
    that goes on when no time is left."""
    now, asked, real = [0.0], list[str](), Engine.run

    def run(self: Engine, rows: list[Request]) -> Iterator[RequestResult]:
        asked.append(rows[0].id)
        now[0] += 30.0 if rows[0].id == "0" else 3.0
        return real(self, rows)

    monkeypatch.setattr(Engine, "run", run)
    speed = measured_speed(engine_of(1), requests(9), Budget(budget, clock=lambda: now[0]))
    # 120 s for the first prompt, 12 for each other one
    assert (speed is not None, asked) == (
        rounds > 0,
        [str(number) for number in range(max(1, rounds)) for _ in range(4)],
    )


def test_one_prompt_is_too_few_and_a_failing_one_is_left_out() -> None:
    budget = Budget(1e6)
    assert measured_speed(engine_of(1), requests(1), budget) is None
    failing = Request(id="f", prompt_ids=(99,), sampling=SamplingConfig(max_new_tokens=TOKENS))
    assert measured_speed(engine_of(1), [*requests(1), failing], budget) is None
    assert measured_speed(engine_of(1), [failing, *requests(2)], budget) is not None


def test_a_signal_ends_it() -> None:
    budget = Budget(1e6)
    budget.stop()
    assert measured_speed(engine_of(1), requests(4), budget) is None
