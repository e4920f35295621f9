"""An engine made from another one: the same models and arguments, but for those that are named."""

from __future__ import annotations

import pytest

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.errors import UsageError
from dsbd_cli.requests import EngineInfo, Request
from tests.helpers.toys import NumberCodec, table_pair

REQUESTS = [
    Request(id=str(i), seed=i, prompt_ids=(1, i), sampling=SamplingConfig(max_new_tokens=8, n_best=2)) for i in range(6)
]


def engine() -> Engine:
    target, draft = table_pair(1, 12, 0.5)
    info = EngineInfo("target", "draft", "float32", "cpu")
    method = MethodConfig(num_beams=3, drafts_per_layer=6, depth=3)
    return Engine(target, draft, NumberCodec(12, (2,)), method, batch_size=2, info=info, on_too_long="truncate-left")


def answers(some: Engine) -> list[tuple[tuple[int, ...], ...]]:
    return [tuple(beam.token_ids for beam in result.hypotheses) for result in some.generate(REQUESTS)]


def test_all_that_is_not_named_stays() -> None:
    first = engine()
    first.log_steps = True  # what was changed since counts
    second = first.replace()
    for name in ("target", "draft", "codec", "method", "batch_size", "info", "log_steps", "catalogues"):
        assert getattr(second, name) == getattr(first, name), name
    assert second._encoder.on_too_long == "truncate-left"
    assert second is not first
    assert answers(second) == answers(first)


def test_what_is_named_changes_and_the_first_engine_stays_as_it_was() -> None:
    first = engine()
    method = MethodConfig(rule="search", num_beams=2, depth=0)
    second = first.replace(draft=None, method=method, batch_size=5, info=None)
    assert (second.method.rule, second.batch_size, second.draft, second.info) == ("search", 5, None, None)
    assert (first.method.rule, first.batch_size) == ("coupled", 2)
    assert first.draft is not None
    assert answers(second) == answers(Engine(first.target, None, first.codec, method))


def test_engines_that_share_models_do_not_run_at_once() -> None:
    """Guards texts that are wrong without a word, because the models' caches hold the rows of one run."""
    first = engine()
    second = first.replace(draft=None, method=MethodConfig(rule="search", num_beams=2, depth=0))
    running = first.run(REQUESTS)
    next(running)
    with pytest.raises(UsageError, match="the models of this engine are in use by another run"):
        next(second.run(REQUESTS))
    with pytest.raises(UsageError, match="in use by another run"):
        next(first.run(REQUESTS))
    running.close()  # type: ignore[attr-defined]
    assert len(answers(second)) == len(answers(engine())) == 6


def test_a_replaced_engine_is_checked_as_any_other() -> None:
    with pytest.raises(UsageError, match="batch_size is 0"):
        engine().replace(batch_size=0)
    with pytest.raises(UsageError):
        engine().replace(draft=None)
