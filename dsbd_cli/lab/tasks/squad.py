"""SQuAD v1.1 and v2.0 from the official JSON files, scored as the official scripts do (Rajpurkar et al. 2016, 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from dsbd_cli.errors import UsageError
from dsbd_cli.lab.tasks.dataset import Dataset
from dsbd_cli.lab.tasks.qa import METRICS, f1, normalize
from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.lab.tasks.task_files import field, items, read_json

NO_ANSWER = "unanswerable"


def squad_dataset(path: Path) -> Dataset:
    """Read every question of a SQuAD file, in its order. Raises UsageError naming what is wrong with the file.

    In v2 files the prompt allows the answer `unanswerable`, which counts as the official empty prediction.
    """
    document = read_json(path)
    articles = items(document, "data", str(path))
    version = document.get("version") if isinstance(document, dict) else None
    if not isinstance(version, str) or version.removeprefix("v").split(".")[0] not in ("1", "2"):
        raise UsageError(f"{path}.version is {version!r}, but must be 1.1 or v2.0")
    second = version.removeprefix("v").startswith("2")
    records = tuple(_records(articles, second))
    if not records:
        raise UsageError(f"{path} holds no question")
    return Dataset("squad", METRICS, lambda: iter(records), partial(_score_squad, second=second))


def _records(articles: list[tuple[str, object]], second: bool) -> Iterator[TaskRecord]:
    for article_place, article in articles:
        for paragraph_place, paragraph in items(article, "paragraphs", article_place):
            context = field(paragraph, "context", str, paragraph_place)
            for where, asked in items(paragraph, "qas", paragraph_place):
                yield _record(context, asked, where, second)


def _record(context: str, asked: object, where: str, second: bool) -> TaskRecord:
    answers = [field(answer, "text", str, where) for where, answer in items(asked, "answers", where)]
    if not answers and not second:
        raise UsageError(f"{where}.answers is empty, but a v1.1 question has an answer")
    # as in the v2 script, answers that normalise to nothing do not count
    golds = tuple(text for text in answers if normalize(text)) if second else tuple(answers)
    question = " ".join(field(asked, "question", str, where).split())
    hint = f" ({NO_ANSWER} if the passage does not say)" if second else ""
    prompt = f"passage: {' '.join(context.split())}\nquestion: {question}{hint}\nanswer:"
    return TaskRecord(field(asked, "id", str, where), prompt, golds[0] if golds else "", {"golds": golds or ("",)})


def _score_squad(record: TaskRecord, text: str, *, second: bool) -> Mapping[str, float]:
    """Return exact match and F1, each the best over the gold answers. second: score as the v2 script does."""
    answer = text.strip()
    if second and normalize(answer) == NO_ANSWER:
        answer = ""
    golds = record.meta["golds"]
    assert isinstance(golds, tuple)
    exact = max(float(normalize(answer) == normalize(gold)) for gold in golds)
    return {"exact match": exact, "F1": max(_f1(gold, answer, second) for gold in golds)}


def _f1(gold: str, answer: str, second: bool) -> float:
    """Return the F1 of the official script. The scripts differ where nothing is left after normalisation: v1.1 gives 0,
    v2 compares."""
    if not second and not (normalize(gold) and normalize(answer)):
        return 0.0
    return f1(gold, answer)
