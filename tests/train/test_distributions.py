"""Distributions of answers and the divergence from them, against plain sums; batches; students of several families."""

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
from dsbd_cli.train import distributions, training
from dsbd_cli.train.distributions import Teacher, TopDistribution, divergence
from dsbd_cli.train.student import StudentShape, new_student, student_shape
from dsbd_cli.train.target_answers import AnswerTokens
from dsbd_cli.train.training import Recipe, Training
from tests.helpers.checkpoints import save
from tests.helpers.tiny import V, build

ANSWERS = [
    AnswerTokens((5, 9, 11), (7, 3, 20, 2)),
    AnswerTokens((5,), (8, 8)),
    AnswerTokens((30, 31, 32, 33, 34, 35), (40, 41, 42)),
    AnswerTokens((12, 13), (50,)),
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
    return logs[len(answer.prompt) - 1 : -1]


@pytest.mark.parametrize("family", ["llama", "gemma3 window", "lfm2", "mamba2"])
def test_a_distribution_is_the_targets(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards prefill, chunks of an answer, recurrent layers, and which token a distribution belongs to."""
    monkeypatch.setattr(distributions, "CHUNK", 2)
    target = load_model(Checkpoint.open(spec_of(save(tmp_path / "model", family)))).model
    model = build(family).to(torch.bfloat16).float()
    teacher = Teacher(target)
    for answer in ANSWERS:
        distribution, plain = teacher.distribution(answer), plain_logs(model, answer)
        best = plain.topk(distributions.TOP, -1)
        assert distribution.logs.shape == (len(answer.tokens), distributions.TOP)
        torch.testing.assert_close(distribution.logs, best.values, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(plain.gather(1, distribution.ids.long()), distribution.logs, atol=2e-4, rtol=1e-4)


def test_a_distribution_has_the_same_bits_whenever_it_is_computed(checkpoint: Path) -> None:
    target = load_model(Checkpoint.open(spec_of(checkpoint))).model
    kept, forgetful = Teacher(target), Teacher(target, kept_bytes=0)
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
    size = Teacher(target).distribution(ANSWERS[0]).held_bytes
    monkeypatch.setattr(distributions, "free_bytes", lambda _: 3 * size)
    teacher = Teacher(target)
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
        Teacher(target).distribution(ANSWERS[0])
    assert calls == ["release", "forward", "release"]


def plain_divergence(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("kept", [3, 9])
def test_the_divergence_is_that_of_the_kept_tokens_and_the_rest(kept: int) -> None:
    """In float64 by hand: the tokens of the target's distribution one by one, all others together."""
    generator = torch.Generator().manual_seed(3)
    target, draft = torch.randn(2, 5, 12, generator=generator)
    best = target.log_softmax(-1).topk(kept, -1)
    found = divergence(draft, best.indices.to(torch.int32), best.values)
    for row in range(5):
        p, q = (logits[row].double().softmax(-1)[best.indices[row]].tolist() for logits in (target, draft))
        wanted = plain_divergence([*p, 1 - sum(p)], [*q, 1 - sum(q)])
        assert found[row].item() == pytest.approx(wanted, rel=2e-4)
    same = divergence(target, best.indices, best.values)
    assert same.abs().max().item() < 1e-5


def test_all_tokens_kept_leave_no_number_undefined() -> None:
    logits = torch.tensor([[0.0, 1.0, 60.0]])
    best = logits.log_softmax(-1).topk(3, -1)
    draft = logits.clone().requires_grad_()
    divergence(draft, best.indices, best.values).sum().backward()  # type: ignore[no-untyped-call]
    assert draft.grad is not None
    assert bool(draft.grad.isfinite().all())


class Known(Teacher):
    """A teacher whose distributions are given."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]

    def _compute(self, answer: AnswerTokens) -> TopDistribution:
        generator = torch.Generator().manual_seed(sum(answer.tokens))
        best = torch.randn(len(answer.tokens), V, generator=generator).log_softmax(-1).topk(8, -1)
        return TopDistribution(best.indices.to(torch.int32), best.values)


def test_a_step_does_not_depend_on_how_its_answers_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward for all answers, padded, or one for each: the same loss and gradients."""
    monkeypatch.setattr(training, "BATCH", len(ANSWERS))
    found = []
    for most in (1 << 30, 1):
        monkeypatch.setattr(training, "LOGIT_BYTES", most)
        student = build("llama").requires_grad_(True)
        run = Training(student, Known(), ANSWERS, Recipe(10, 1e-3, 0, autocast=False))
        found.append((len(run._parts(list(ANSWERS))), run.run_step(), student.get_input_embeddings().weight.detach()))
    (one, loss, weights), (many, other_loss, others) = found
    assert (one, many) == (1, len(ANSWERS))
    assert loss == pytest.approx(other_loss, rel=1e-5)
    torch.testing.assert_close(weights, others, atol=1e-4, rtol=1e-4)
    by_hand = sum(
        divergence(plain_logs(build("llama"), one), distribution.ids, distribution.logs).sum().item()
        for one in ANSWERS
        for distribution in [Known().distribution(one)]
    )
    assert loss == pytest.approx(by_hand / sum(len(one.tokens) for one in ANSWERS), rel=1e-4)


def test_every_answer_is_learnt_once_before_any_twice() -> None:
    recipe = Recipe(100, 1e-3, 7, autocast=False)
    places = [place for step in range(20) for place in recipe.places(step, 20)]
    for epoch in range(8):
        assert sorted(places[20 * epoch : 20 * (epoch + 1)]) == list(range(20))
    assert places[:20] != places[20:40]
    assert recipe.places(3, 20) == Recipe(100, 1e-3, 7, autocast=False).places(3, 20)
    assert recipe.places(3, 20) != Recipe(100, 1e-3, 8, autocast=False).places(3, 20)


def test_the_learning_rate_rises_stays_and_falls() -> None:
    recipe = Recipe(100, 1.0, 0, autocast=False)
    assert [recipe.rate(step) for step in (0, 4, 49, 75, 99)] == pytest.approx([0.2, 1.0, 1.0, 0.5, 0.02])
    assert Recipe(1, 1.0, 0, autocast=False).rate(0) == 1.0


FAMILIES = ["llama", "gpt2", "opt", "gemma3 window", "gpt-oss window", "qwen3", "lfm2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_student_has_the_targets_own_weights(family: str, tmp_path: Path) -> None:
    more = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    if "window" in family:
        more["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]  # type: ignore[assignment]
    spec = spec_of(save(tmp_path / "model", family, **more))
    target = build(family, **more).to(torch.bfloat16).float().state_dict()
    student = new_student(spec, student_shape(spec, 2, None), 0)
    kept = student.state_dict()
    assert 0 < len(kept) < len(target)
    for name, weights in kept.items():
        assert torch.equal(weights, target[name]), name
    assert all(one.requires_grad for one in student.parameters())


def test_a_small_llama_begins_with_the_targets_embeddings(checkpoint: Path) -> None:
    """Distances between tokens survive on 16 of 32 axes as well as on any: the projection is the best there is."""
    spec = spec_of(checkpoint)
    shape = student_shape(spec, None, 16)
    assert shape == StudentShape(2, 16)
    student, again = (new_student(spec, shape, seed) for seed in (1, 1))
    for one, other in zip(student.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    table = student.get_input_embeddings().weight.detach()  # type: ignore[operator]
    full = build("llama").to(torch.bfloat16).float().get_input_embeddings().weight
    assert table.shape == (V, 16)
    inner, wanted = table @ table.T, full @ full.T
    inner = inner * (inner * wanted).sum() / inner.square().sum()
    values = torch.linalg.svdvals(full.double())
    left_out = (values[16:] ** 4).sum().sqrt()  # Eckart and Young
    assert (inner - wanted).double().norm().item() == pytest.approx(left_out.item(), rel=0.05)


def test_sizes_that_make_no_draft(tmp_path: Path, checkpoint: Path) -> None:
    spec = spec_of(checkpoint)
    for layers, size, message in [
        (2, None, "--layers is 2, but the target has 2: a draft of its own layers has fewer"),
        (0, None, "--layers is 0, but must be 1 or more"),
        (None, 20, "--hidden-size is 20, but must be a multiple of 16, at most the target's 32"),
        (None, 48, "--hidden-size is 48, but must be a multiple of 16, at most the target's 32"),
    ]:
        with pytest.raises(UsageError, match=message):
            student_shape(spec, layers, size)
    assert student_shape(spec, None, None) == StudentShape(1, None, V)
    assert student_shape(spec, None, None, "model") == StudentShape(1, None)
    one = save(tmp_path / "one", num_hidden_layers=1)
    with pytest.raises(UsageError, match="has 1 layer, so no draft can be cut from it: give --hidden-size"):
        student_shape(spec_of(one), None, None, "model")
    config = one / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"model_type"', '"quantization_config": {"quant_method": "gptq"}, "model_type"'))
    with pytest.raises(ModelError, match="is quantized, and quantized layers cannot be trained"):
        student_shape(spec_of(one), None, None, "model")
    config.write_text(text.replace('"model_type": "llama"', '"model_type": "t5", "num_layers": 1'))
    with pytest.raises(UnsupportedModelError, match="has an encoder"):
        student_shape(spec_of(one), None, None, "model")
