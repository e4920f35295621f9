"""Methods that choose one of several candidates: what they choose, and what they say it has cost."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from dsbd_cli import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import UsageError
from dsbd_cli.lab.bench.methods import METHODS
from dsbd_cli.lab.bench.prepare import BenchConfig, Prompt
from dsbd_cli.lab.bench.runners import BestAnswer, make_runner
from dsbd_cli.lab.bench.sweep import plan
from dsbd_cli.lab.tasks.record import TaskRecord
from tests.helpers.toys import NumberCodec, table_pair

SHORT = SamplingConfig(max_new_tokens=6)


def answers(method: str, beams: int, runs: object = None) -> list[BestAnswer]:
    target, _ = table_pair(1, 9, 0.0, {2: 1.0})
    pair = Engine(target, None, NumberCodec(9, (2,)))
    prompts = [Prompt(TaskRecord(f"r{i}", "", "", {}), (i, 3, 4), runs) for i in range(4)]  # type: ignore[arg-type]
    setting = plan([method], {"num_beams": [beams]}).settings[0]
    bench_config = BenchConfig((), (setting,), records=4, rounds=1, batch_size=3, sampling=SHORT, seed=5)
    return make_runner(pair, setting, bench_config).run(prompts)


PICKING = [name for name, method in METHODS.items() if method.pick is not None]


@pytest.mark.parametrize("name", PICKING)
def test_what_a_choice_has_cost(name: str) -> None:
    """Beams share a row's calls; samples are rows of their own."""
    chosen = answers(name, 4, runs=lambda text: True)
    assert len(chosen) == 4
    for answer in chosen:
        assert answer.stats is not None
        calls = answer.stats.target_calls
        assert (4 <= calls <= 24) if METHODS[name].independent else (1 <= calls <= 6)


def test_the_likeliest_of_more_samples_is_likelier() -> None:
    single, many = answers("best-of-n", 1), answers("best-of-n", 16)
    assert all(b.logprob is not None and a.logprob is not None for a, b in zip(single, many, strict=True))
    assert sum((b.logprob or 0) / b.tokens for b in many) > sum((a.logprob or 0) / a.tokens for a in single)


def test_only_mbr_needs_the_package_of_its_utility(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra `pick`, bench ended with every method of ours."""
    monkeypatch.setitem(sys.modules, "fastchrf", None)
    assert len(answers("beam-search", 2)) == len(answers("self-consistency", 2)) == 4
    with pytest.raises(UsageError, match="needs fastchrf"):
        answers("mbr", 2)


def test_the_first_that_runs() -> None:
    every = answers("beams-exec", 4, runs=lambda text: True)
    none = answers("beams-exec", 4, runs=lambda text: False)
    best = [answer.text for answer in answers("beam-search", 4)]
    assert [answer.text for answer in every] == [answer.text for answer in none] == best
    other = answers("beams-exec", 4, runs=lambda text: text not in best)
    assert all(answer.text not in best for answer in other)


def test_one_sample_is_one_answer() -> None:
    single = answers("self-consistency", 1)
    assert [replace(answer, stats=None) for answer in single] == [
        replace(answer, stats=None) for answer in answers("best-of-n", 1)
    ]
