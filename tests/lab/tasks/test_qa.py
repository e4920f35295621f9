"""The QA task: scoring after SQuAD normalisation, and what its generator promises."""

from __future__ import annotations

from itertools import islice

import pytest

from dsbd_cli.lab.tasks.qa import QA, f1, normalize
from dsbd_cli.lab.tasks.record import TaskRecord
from training.tasks import QaGenerator


def record(gold: str) -> TaskRecord:
    """A record with this answer."""
    return TaskRecord("x", "", gold, {})


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("a red mill", "a red mill", True),
        ("a red mill", "The Red  Mill.", True),
        ("a red mill", "a red mill with two bells", False),
        ("a red mill", "a mill red", False),
        ("a red mill", "", False),
        ("Taman Veren and Roza Manor", "Taman Veren", False),
        ("on 14 March 1987", "on 14 March 1978", False),
    ],
)
def test_score(gold: str, answer: str, right: bool) -> None:
    assert QA.score(record(gold), answer)["exact match"] == right


def test_normalize() -> None:
    assert normalize(" An  apple, the\nPEAR; a-b theme. ") == "apple pear ab theme"


@pytest.mark.parametrize(
    ("gold", "answer", "value"),
    [("a red mill", "red mill", 1.0), ("red mill", "red boat", 0.5), ("red", "blue", 0.0), ("red mill", "red", 2 / 3)],
)
def test_f1(gold: str, answer: str, value: float) -> None:
    assert f1(gold, answer) == pytest.approx(value)


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_gold_is_a_span_and_scores_right(split: str) -> None:
    for r in islice(QaGenerator().records(split, 3), 200):
        passage = r.prompt.split("\nquestion:")[0].lower()
        assert r.reference.lower() in passage
        assert QA.score(r, r.reference) == {"exact match": 1.0, "F1": 1.0}


def test_prompt_shape() -> None:
    for r in islice(QA.records(), 50):
        assert r.prompt.startswith("passage: ")
        assert r.prompt.endswith("\nanswer:")
