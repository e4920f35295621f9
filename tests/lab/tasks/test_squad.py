"""SQuAD files and scores, against answers scored by hand as the official scripts would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsbd_cli.errors import UsageError
from dsbd_cli.lab.tasks.dataset import Dataset
from dsbd_cli.lab.tasks.squad import squad_dataset

DATA = Path(__file__).parent / "data"


def scores(dataset: Dataset, name: str, text: str) -> tuple[float, float]:
    record = next(record for record in dataset.records() if record.id == name)
    metrics = dataset.score(record, text)
    return metrics["exact match"], metrics["F1"]


def test_v1_is_read() -> None:
    dataset = squad_dataset(DATA / "squad-v1.json")
    first, second = dataset.records()
    assert dataset.metrics == ("exact match", "F1")
    assert (first.id, second.id) == ("v1-1", "v1-2")
    assert first.prompt == (
        "passage: The Amber River flows from the Northern Hills to the sea near Port Venn. It is 412 km long.\n"
        "question: Where does the Amber River flow from?\nanswer:"
    )


@pytest.mark.parametrize(
    ("text", "exact", "f1"),
    [
        ("the Northern Hills", 1.0, 1.0),
        (" THE northern, hills! ", 1.0, 1.0),
        ("Hills", 1.0, 1.0),  # the third gold answer
        ("Northern", 0.0, 2 / 3),  # of "northern hills": precision 1, recall 1/2
        ("from the Northern Hills near Venn", 0.0, 2 * (2 / 5) * 1 / (2 / 5 + 1)),
        ("northern northern", 0.0, 0.5),  # a word counts as often as the gold has it
        ("Southern Plains", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("the", 0.0, 0.0),
    ],
)
def test_v1_takes_the_best_gold_answer(text: str, exact: float, f1: float) -> None:
    assert scores(squad_dataset(DATA / "squad-v1.json"), "v1-1", text) == (exact, pytest.approx(f1))


@pytest.mark.parametrize(
    ("name", "text", "exact", "f1"),
    [
        ("v2-1", "near Port Venn", 1.0, 1.0),
        ("v2-1", "Port Venn", 0.0, 0.8),
        ("v2-1", "", 0.0, 0.0),  # the gold "the" normalises to nothing and does not count
        ("v2-1", "unanswerable", 0.0, 0.0),
        ("v2-2", "", 1.0, 1.0),
        ("v2-2", "Unanswerable.", 1.0, 1.0),
        ("v2-2", "Port Venn", 0.0, 0.0),  # plausible, and wrong
    ],
)
def test_v2_has_questions_without_an_answer(name: str, text: str, exact: float, f1: float) -> None:
    assert scores(squad_dataset(DATA / "squad-v2.json"), name, text) == (exact, pytest.approx(f1))


def test_v2_prompts_allow_no_answer() -> None:
    assert all("unanswerable" in record.prompt for record in squad_dataset(DATA / "squad-v2.json").records())


def broken(tmp_path: Path, change: object) -> Path:
    document = json.loads((DATA / "squad-v1.json").read_text())
    assert callable(change)
    change(document)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version="3"), r"version is '3', but must be 1.1 or v2.0"),
        (lambda d: d.pop("data"), "has no field data"),
        (lambda d: d.update(data=[]), "holds no question"),
        (lambda d: d["data"][0]["paragraphs"][0].pop("context"), r"data\[0\].paragraphs\[0\] has no field context"),
        (lambda d: d["data"][0]["paragraphs"][0]["qas"][1].update(id=7), r"qas\[1\].id is 7, but must be a string"),
        (lambda d: d["data"][0]["paragraphs"][0]["qas"][1].update(answers=[]), r"qas\[1\].answers is empty"),
    ],
)
def test_a_broken_file_is_told_by_place_and_field(change: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        squad_dataset(broken(tmp_path, change))


def test_no_file_no_json(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        squad_dataset(tmp_path / "none.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        squad_dataset(tmp_path / "x.json")
    for text in ("9" * 5000, "[" * 100_000):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(UsageError, match=r"x\.json cannot be read: a value has too many digits or levels"):
            squad_dataset(tmp_path / "x.json")
