"""How a profile keeps to its time. The clock is moved by the models' forwards alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from dsbd_cli import Engine, MethodConfig, Request, SamplingConfig
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import UsageError
from dsbd_cli.lab.profiling import advice
from dsbd_cli.lab.profiling.budget import Budget, CutOffError
from dsbd_cli.lab.profiling.measurements import ProfiledPair
from dsbd_cli.lab.profiling.profile import _one_forward, take_profile
from dsbd_cli.lab.reports.profile_data import ForestSize, Profile
from dsbd_cli.lab.reports.profile_table import print_profile
from dsbd_cli.lab.reports.screen import Screen
from dsbd_cli.requests import EngineInfo
from tests.helpers.toys import NumberCodec, table_pair
from tests.lab.profiling.conftest import HandClock, SlowLM

METHOD = MethodConfig(num_beams=2, drafts_per_layer=4, depth=2)


@cache
def profiled(per_node: float, seconds: float, method: MethodConfig = METHOD) -> tuple[Profile, HandClock, list[str]]:
    """Of eight prompts with up to 40 new tokens. per_node: seconds of the target; a tenth of that of the draft."""
    clock, told = HandClock(), list[str]()
    pair = table_pair(2, 8, 0.5)
    target, draft = (SlowLM(seed, clock, per_node / part) for seed, part in zip(pair, (1, 10), strict=True))
    sampling = SamplingConfig(top_k=0, max_new_tokens=40)
    requests = tuple(Request(id=str(i), seed=i, prompt=f"{i % 8} 1 2", sampling=sampling) for i in range(8))
    budget = Budget(seconds, told.append, clock)
    info = EngineInfo("t", "d" if method.depth else None, "float32", "cpu")
    engine = Engine(target, draft if method.depth else None, NumberCodec(8, (3,)), method, info=info)
    bench = ProfiledPair(engine, requests, 8, budget)

    def render(setting: ForestSize) -> str:
        return setting.label

    profile = take_profile(bench, method, 3, "dsbd profile", render)
    assert profile is not None
    return profile, clock, told


@pytest.mark.parametrize("limit", [None, 20])
def test_the_nodes_of_a_timed_forward_are_a_forest(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that saw each other were no forest: the kernels of recurrent layers wrote past their memory."""
    batches: list[ForestInput] = []
    model, _ = table_pair(2, 8, 0.5)
    monkeypatch.setattr(type(model), "max_positions", limit)
    monkeypatch.setattr(model, "forward", batches.append)
    _one_forward(model, 32, 5, lambda: 0.0)
    for batch in batches:
        seen = batch.mask[0].gather(1, batch.slots.expand(5, -1))
        assert torch.equal(seen, torch.eye(5, dtype=torch.bool))  # themselves alone
        last = 27 if limit is None else limit - 1
        assert batch.positions.tolist() == [[last] * 5]
        before = batch.mask[0] & (batch.slot_positions[0] < last)
        assert before.sum(1).tolist() == [last] * 5  # and all that stands before them
    assert len(batches) == 2


def test_fast_models_are_measured_whole() -> None:
    profile, clock, _ = profiled(1e-6, 60)
    assert (profile.left_out, profile.repeats, profile.prompts, profile.complete) == ((), 3, 8, True)
    assert clock.now < 60
    assert {run.setting.label for run in profile.tried} == {"no draft", "D=1 K=4", "D=4 K=4", "D=2 K=2", "D=2 K=8"}


@pytest.mark.parametrize("per_node", [0.01, 0.1])
@pytest.mark.parametrize("method", [METHOD, replace(METHOD, depth=0)])
def test_slow_models_keep_to_the_time_and_say_what_is_missing(per_node: float, method: MethodConfig) -> None:
    """At a tenth of a second per node a single forward of the forest takes a second, and one run of all prompts an
    hour."""
    profile, clock, told = profiled(per_node, 60, method)
    assert clock.now <= 66, "what a run takes is an estimate"
    assert profile.now.tokens > 0
    assert profile.left_out or not method.depth
    assert not profile.left_out or any("left out, because --seconds is 60: " in note for note in profile.notes)
    assert told[:3] == ["timing one forward", "warming up", *told[2:3]]
    if method.depth:
        assert "no draft" in [run.setting.label for run in profile.tried], "it is worth most"


def test_a_profile_of_a_single_run_can_be_shown() -> None:
    print_profile(replace(profiled(0.1, 12)[0], tried=()), Screen(io.StringIO()))


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal(width: int) -> None:
    """Guards cells that are cut and numbers that are wrapped."""
    wide = MethodConfig(rule="rejection", num_beams=4, drafts_per_layer=8, depth=6, width="threshold:min=2")
    profile, _, _ = profiled(1e-6, 60, wide)
    stream = io.StringIO()
    screen = Screen(stream)
    screen.width = width
    print_profile(profile, screen)
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    (line,) = [line for line in text.splitlines() if line.startswith((">D", ">*D"))]
    assert profile.now.setting.label in line
    cells = "speed", "range", "steps", "width", "draft", "target", "verify", "other", "floor", "peak"
    assert len(line.partition("W_min=2")[2].split()) == len(cells), "on one line"


def test_more_time_measures_more() -> None:
    short, long = profiled(0.1, 30)[0], profiled(0.1, 6000)[0]
    assert short.prompts < long.prompts
    assert len(short.left_out) > len(long.left_out)
    assert len(short.tried) < len(long.tried)


def test_where_time_is_short_a_setting_that_was_run_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one is the fastest goes by this machine's clock; test_advice.py says which is chosen of given speeds."""
    compared, choose = list[list[tuple[ForestSize, float]]](), advice.choose

    def seen(speeds: list[tuple[ForestSize, float]], beams: int) -> ForestSize:
        compared.append(speeds)
        return choose(speeds, beams)

    monkeypatch.setattr(advice, "choose", seen)
    profile, _, _ = profiled.__wrapped__(0.1, 30)
    assert {setting for setting, _ in compared[-1]} <= {run.setting for run in (profile.now, *profile.tried)}
    assert profile.best == choose(compared[-1], METHOD.num_beams)
    assert profile.recommended_command == profile.best.label


def test_a_budget_counts_from_its_start() -> None:
    clock, told = HandClock(), list[str]()
    budget = Budget(10, told.append, clock)
    clock.now = 100
    budget.start()
    clock.now = 104
    assert budget.left == 6
    assert budget.affords("a", 6)
    assert not budget.affords("b", 6.5)
    assert not budget.affords("c", 20)
    assert budget.left_out == ["b (about 6 s)", "c (about 20 s)"]
    budget.tell("d", 5.4)
    budget.tell("e")
    assert told == ["d, about 5 s", "e"]


def test_what_is_running_is_stopped_and_nothing_begins_afterwards() -> None:
    stopped = []
    budget = Budget()
    with budget.running(lambda: stopped.append(1)):
        budget.stop()
    begun = []
    with pytest.raises(CutOffError), budget.running(lambda: stopped.append(2)):
        begun.append(2)
    assert (stopped, begun) == ([1], [])
    with pytest.raises(CutOffError):
        budget.tell("more")


def test_an_engine_that_is_stopped_before_it_begins_is_cut_off_and_no_wrong_usage() -> None:
    """Guards the moment between the question whether a signal has come and the first iteration."""

    def run(budget: Budget, before: Callable[[], None]) -> None:
        with budget.running(lambda: None):
            before()
            raise UsageError("this engine was stopped and answers nothing any more")

    cut = Budget()
    with pytest.raises(CutOffError):
        run(cut, cut.stop)
    with pytest.raises(UsageError):
        run(Budget(), lambda: None)
