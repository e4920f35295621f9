"""Tensor parallelism over two processes on this machine's processor, by gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsbd_cli
from dsbd_cli import (
    Engine,
    MethodConfig,
    ModelError,
    ModelSpec,
    Request,
    SamplingConfig,
    UnsupportedModelError,
    UsageError,
)
from dsbd_cli.engine.models.ranks import ShardedForestModel, check_ranks
from tests.models.conftest import save

PROMPTS = ["w5 w9 w11 w30", "w7 w8", "w40 w41 w42 w43 w44 w45"]
REQUESTS = [Request(prompt, sampling=SamplingConfig(max_new_tokens=12, n_best=2)) for prompt in PROMPTS]
RULES = ("search", "coupled")


def engine_of(target: ModelSpec, draft: ModelSpec, rule: str) -> Engine:
    method = MethodConfig(rule=rule, num_beams=3, depth=2, drafts_per_layer=4)
    return dsbd_cli.load(target, draft, method=method, batch_size=2)


def answers(engine: Engine) -> list[list[tuple[str, float]]]:
    return [[(one.text, one.logprob) for one in result.hypotheses] for result in engine.run(REQUESTS)]


@pytest.fixture
def closing() -> Iterator[list[Engine]]:
    """Engines whose ranks end with the test."""
    made: list[Engine] = []
    yield made
    for engine in made:
        assert isinstance(engine.target, ShardedForestModel)
        engine.target.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2 window"])
def test_two_ranks_give_the_text_of_one(family: str, tmp_path: Path, closing: list[Engine]) -> None:
    """Families with tied and untied heads, with and without windows; the draft lies on rank 0 alone. At the end rank 1
    is killed, which ends a run with a line: the ranks of another test would take seconds to start."""
    folder = str(save(tmp_path / "target", family))
    draft = ModelSpec(str(save(tmp_path / "draft", "llama", seed=1)), role="draft", device="cpu")
    target = ModelSpec(folder, dtype="float32", device="cpu")
    wanted = {rule: answers(engine_of(target, draft, rule)) for rule in RULES}
    split = ModelSpec(folder, dtype="float32", device="cpu", tensor_parallel=2)
    engine = engine_of(split, draft, "search")
    closing.append(engine)
    for rule in RULES:
        if rule != "search":  # the same ranks serve another method
            method = MethodConfig(rule=rule, num_beams=3, depth=2, drafts_per_layer=4)
            engine = Engine(engine.target, engine.draft, engine.codec, method, batch_size=2)
        found = answers(engine)
        assert [[text for text, _ in row] for row in found] == [[text for text, _ in row] for row in wanted[rule]]
        for row, other in zip(found, wanted[rule], strict=True):
            assert [logprob for _, logprob in row] == pytest.approx([logprob for _, logprob in other], abs=1e-3)
    assert isinstance(engine.target, ShardedForestModel)
    assert not engine.target.capturable
    assert engine.target.kv_bytes_per_slot() * 2 == engine_of(target, draft, "search").target.kv_bytes_per_slot()
    assert engine.target._ranks is not None
    process = engine.target._ranks._processes[0]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(ModelError, match=r"rank 1 of the target .* killed by signal 9"):
        list(engine.run(REQUESTS))


def test_what_cannot_be_split_is_refused_before_anything_starts(tmp_path: Path) -> None:
    odd = str(save(tmp_path / "odd", "llama one kv head"))
    with pytest.raises(UnsupportedModelError, match="1 key-value heads and 4 heads, which 2 ranks cannot share"):
        check_ranks(ModelSpec(odd, device="cpu", tensor_parallel=2))
    plain = str(save(tmp_path / "plain", "opt"))
    with pytest.raises(UnsupportedModelError, match="no plan to split"):
        check_ranks(ModelSpec(plain, device="cpu", tensor_parallel=2))
    with pytest.raises(UsageError, match="drop one of them"):
        check_ranks(ModelSpec(odd, device_map="balanced", tensor_parallel=2))
    with pytest.raises(UsageError, match="tensor_parallel is 0, but must be 1 or more"):
        ModelSpec(odd, tensor_parallel=0)
    with pytest.raises(UsageError, match="1 of a draft"):
        ModelSpec(odd, role="draft", tensor_parallel=2)
