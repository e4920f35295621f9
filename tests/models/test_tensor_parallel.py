"""Tensor parallelism over two processes on this machine's processor, by gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
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
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.tensor_parallel import ShardedForestModel, check_ranks
from tests.helpers.checkpoints import save

SHOTS = " ".join(f"w{5 + number % 70}" for number in range(100))  # the second prompt that begins so copies it
PROMPTS = ["w5 w9 w11 w30", "w7 w8", "w40 w41 w42 w43 w44 w45", f"{SHOTS} w7", f"{SHOTS} w9 w11"]
REQUESTS = [Request(prompt, sampling=SamplingConfig(max_new_tokens=12, n_best=2)) for prompt in PROMPTS]
RULES = ("search", "coupled")


def method_of(rule: str) -> MethodConfig:
    return MethodConfig(rule=rule, num_beams=3, depth=2, drafts_per_layer=4)


def engines_of(target: ModelSpec, draft: ModelSpec) -> dict[str, Engine]:
    """One for each rule, over the same models."""
    first = dsbd_cli.load(target, draft, method=method_of(RULES[0]), batch_size=2)
    others = {rule: first.replace(method=method_of(rule)) for rule in RULES[1:]}
    return {RULES[0]: first, **others}


def answers(engine: Engine) -> tuple[list[list[tuple[str, float]]], int]:
    """Texts and log-probabilities, and how many prompt tokens were copied."""
    results = list(engine.run(REQUESTS))
    texts = [[(beam.text, beam.logprob) for beam in result.hypotheses] for result in results]
    return texts, sum(result.stats.prompt_tokens_reused for result in results)


@pytest.fixture
def closing() -> Iterator[list[Engine]]:
    """Engines whose ranks end with the test."""
    made: list[Engine] = []
    yield made
    for engine in made:
        assert isinstance(engine.target, ShardedForestModel)
        engine.target.close()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2 window"])
def test_two_ranks_give_the_text_of_one_until_one_dies(family: str, tmp_path: Path, closing: list[Engine]) -> None:
    """Families with tied and untied heads, with and without windows; the draft lies on rank 0 alone. Without a rank
    the run ends with a line. One test, because a rank takes seconds to start."""
    folder = str(save(tmp_path / "target", family))
    draft = ModelSpec(str(save(tmp_path / "draft", "llama", seed=1)), role="draft", device="cpu")
    target = ModelSpec(folder, dtype="float32", device="cpu")
    whole = engines_of(target, draft)
    split = engines_of(replace(target, tensor_parallel=2), draft)
    sharded = split["search"].target
    closing.append(split["search"])
    for rule in RULES:
        (wanted, _), (texts, reused) = answers(whole[rule]), answers(split[rule])
        assert reused == 64
        assert [[text for text, _ in row] for row in texts] == [[text for text, _ in row] for row in wanted]
        for row, other in zip(texts, wanted, strict=True):
            assert [logprob for _, logprob in row] == pytest.approx([logprob for _, logprob in other], abs=1e-3)
    assert not sharded.capturable
    assert sharded.kv_bytes_per_slot() * 2 == whole["search"].target.kv_bytes_per_slot()
    assert isinstance(sharded, ShardedForestModel)
    assert sharded._ranks is not None
    process = sharded._ranks._processes[0]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(ModelError, match=r"rank 1 of the target .* killed by signal 9"):
        list(split["search"].run(REQUESTS))


def test_what_cannot_be_split_is_refused_before_anything_starts(tmp_path: Path) -> None:
    odd = str(save(tmp_path / "odd", "llama one kv head"))
    with pytest.raises(UnsupportedModelError, match="1 key-value heads and 4 heads, which 2 ranks cannot share"):
        check_ranks(Checkpoint.open(ModelSpec(odd, device="cpu", tensor_parallel=2)))
    for family in ("opt", "mamba"):  # the second has no heads
        plain = str(save(tmp_path / family, family))
        with pytest.raises(UnsupportedModelError, match="no plan to split"):
            check_ranks(Checkpoint.open(ModelSpec(plain, device="cpu", tensor_parallel=2)))
    with pytest.raises(UsageError, match="drop one of them"):
        check_ranks(Checkpoint.open(ModelSpec(odd, device_map="balanced", tensor_parallel=2)))
    with pytest.raises(UsageError, match="tensor_parallel is 0, but must be 1 or more"):
        ModelSpec(odd, tensor_parallel=0)
    with pytest.raises(UsageError, match="1 of a draft"):
        ModelSpec(odd, role="draft", tensor_parallel=2)
