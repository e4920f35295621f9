"""Distributions of answers and the divergence from them, against plain sums; batches; targets that take no head."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import ModelError, UnsupportedModelError, UsageError
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.load_model import load_model
from dsbd_cli.train import distributions
from dsbd_cli.train.distributions import Teacher, answer_logits, divergence
from dsbd_cli.train.draft_head import draft_head_vocabulary
from dsbd_cli.train.target_answers import AnswerTokens
from dsbd_cli.train.training import Recipe
from tests.helpers.answers import chain
from tests.helpers.checkpoints import save
from tests.helpers.tiny import V, build

ANSWERS = [
    chain((5, 9, 11), (7, 3, 20, 2)),
    chain((5,), (8, 8)),
    chain((30, 31, 32, 33, 34, 35), (40, 41, 42)),
    chain((12, 13), (50,)),
]


def spec_of(path: Path) -> ModelSpec:
    return ModelSpec(str(path), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"))


def plain_logs(model: Any, answer: AnswerTokens) -> Tensor:
    """[n, V] of a transformers model without any of our code."""
    ids = torch.tensor([[*answer.prompt, *answer.tokens]])
    logs: Tensor = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    return logs[len(answer.prompt) - 1 :]


def teacher_of(target: Any, kept_bytes: int | None = None) -> Teacher:
    """A teacher of heads that keep all tokens."""
    return Teacher(target, [0], torch.arange(target.vocab_size), kept_bytes)


@pytest.mark.parametrize("family", ["llama", "gemma3 window", "lfm2", "mamba2"])
def test_logits_are_the_targets(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards prefill, chunks of an answer, recurrent layers, and which token a distribution belongs to."""
    monkeypatch.setattr(distributions, "CHUNK", 2)
    target = load_model(Checkpoint.open(spec_of(save(tmp_path / "model", family)))).model
    model = build(family).to(torch.bfloat16).float()
    for answer in ANSWERS:
        logits = torch.cat(list(answer_logits(target, answer)))
        torch.testing.assert_close(logits.log_softmax(-1), plain_logs(model, answer), atol=2e-4, rtol=1e-4)


def test_a_distribution_is_the_targets(checkpoint: Path) -> None:
    target = load_model(Checkpoint.open(spec_of(checkpoint))).model
    model, teacher = build("llama").to(torch.bfloat16).float(), teacher_of(target)
    for answer in ANSWERS:
        distribution, plain = teacher.distribution(answer), plain_logs(model, answer)
        best = plain.topk(distributions.TOP, -1)
        assert distribution.logs.shape == (answer.learnt, distributions.TOP)
        torch.testing.assert_close(distribution.logs, best.values, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(plain.gather(1, distribution.ids.long()), distribution.logs, atol=2e-4, rtol=1e-4)


def test_a_distribution_has_the_same_bits_whenever_it_is_computed(checkpoint: Path) -> None:
    target = load_model(Checkpoint.open(spec_of(checkpoint))).model
    kept, forgetful = teacher_of(target), teacher_of(target, kept_bytes=0)
    first = [kept.distribution(answer) for answer in ANSWERS]
    for answer, distribution in reversed(list(zip(ANSWERS, first, strict=True))):
        assert kept.distribution(answer) is distribution
        again = forgetful.distribution(answer)
        assert again is not distribution
        assert torch.equal(again.ids, distribution.ids)
        assert torch.equal(again.logs, distribution.logs)


def test_distributions_are_kept_in_a_third_of_the_free_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_model(Checkpoint.open(spec_of(checkpoint))).model
    size = teacher_of(target).distribution(ANSWERS[0]).held_bytes
    monkeypatch.setattr(distributions, "free_bytes", lambda _: 3 * size)
    teacher = teacher_of(target)
    first, second = (teacher.distribution(answer) for answer in ANSWERS[:2])
    assert teacher.distribution(ANSWERS[0]) is first
    assert teacher.distribution(ANSWERS[1]) is not second


def test_a_forward_that_fails_leaves_no_cache(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_model(Checkpoint.open(spec_of(checkpoint))).model
    calls = []

    def fail(*_: object, **__: object) -> None:
        calls.append("forward")
        raise torch.OutOfMemoryError

    monkeypatch.setattr(target, "forward", fail)
    monkeypatch.setattr(target, "release", lambda: calls.append("release"))
    with pytest.raises(torch.OutOfMemoryError):
        teacher_of(target).distribution(ANSWERS[0])
    assert calls == ["release", "forward", "release"]


def plain_divergence(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("kept", [3, 9])
def test_the_divergence_is_that_of_the_kept_tokens_and_the_rest(kept: int) -> None:
    """In float64 by hand: the tokens of the target's distribution one by one, all others together."""
    generator = torch.Generator().manual_seed(3)
    target, draft = torch.randn(2, 5, 12, generator=generator)
    best = target.log_softmax(-1).topk(kept, -1)
    divergences = divergence(draft, best.indices.to(torch.int32), best.values)
    for row in range(5):
        p, q = (logits[row].double().softmax(-1)[best.indices[row]].tolist() for logits in (target, draft))
        wanted = plain_divergence([*p, 1 - sum(p)], [*q, 1 - sum(q)])
        assert divergences[row].item() == pytest.approx(wanted, rel=2e-4)
    same = divergence(target, best.indices, best.values)
    assert same.abs().max().item() < 1e-5


def test_all_tokens_kept_leave_no_number_undefined() -> None:
    logits = torch.tensor([[0.0, 1.0, 60.0]])
    best = logits.log_softmax(-1).topk(3, -1)
    draft = logits.clone().requires_grad_()
    divergence(draft, best.indices, best.values).sum().backward()  # type: ignore[no-untyped-call]
    assert draft.grad is not None
    assert bool(draft.grad.isfinite().all())


def test_every_answer_is_learnt_once_before_any_twice() -> None:
    recipe = Recipe(100, 1e-3, 7, autocast=False)
    places = [index for step in range(20) for index in recipe.places(step, 20)]
    for epoch in range(8):
        assert sorted(places[20 * epoch : 20 * (epoch + 1)]) == list(range(20))
    assert places[:20] != places[20:40]
    assert recipe.places(3, 20) == Recipe(100, 1e-3, 7, autocast=False).places(3, 20)
    assert recipe.places(3, 20) != Recipe(100, 1e-3, 8, autocast=False).places(3, 20)


def test_the_learning_rate_rises_stays_and_falls() -> None:
    recipe = Recipe(100, 1.0, 0, autocast=False)
    assert [recipe.rate(step) for step in (0, 4, 49, 75, 99)] == pytest.approx([0.2, 1.0, 1.0, 0.5, 0.02])
    assert Recipe(1, 1.0, 0, autocast=False).rate(0) == 1.0


def test_targets_and_sizes_that_take_no_head(tmp_path: Path, checkpoint: Path) -> None:
    spec = spec_of(checkpoint)
    assert (draft_head_vocabulary(spec, None), draft_head_vocabulary(spec, 64)) == (V, 64)
    with pytest.raises(UsageError, match="--vocab is 63, but must be 64 or more"):
        draft_head_vocabulary(spec, 63)
    other = spec_of(save(tmp_path / "other", "gpt2"))
    with pytest.raises(UnsupportedModelError, match="a head begins as a layer of a standard decoder, but "):
        draft_head_vocabulary(other, None)
    folder = save(tmp_path / "one", num_hidden_layers=1)
    config = folder / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"model_type"', '"quantization_config": {"quant_method": "gptq"}, "model_type"'))
    with pytest.raises(ModelError, match="is quantized, and quantized layers cannot be trained"):
        draft_head_vocabulary(spec_of(folder), None)
    config.write_text(text.replace('"model_type": "llama"', '"model_type": "t5", "num_layers": 1'))
    with pytest.raises(UnsupportedModelError, match="has an encoder"):
        draft_head_vocabulary(spec_of(folder), None)
