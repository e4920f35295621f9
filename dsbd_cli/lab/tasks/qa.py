"""Questions about short passages on made-up people never seen in training; the answer is a span, scored by exact match
and F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping

from dsbd_cli.lab.tasks.dataset import builtin_dataset
from dsbd_cli.lab.tasks.record import TaskRecord

METRICS = ("exact match", "F1")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and repeated spaces (SQuAD)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def f1(gold: str, answer: str) -> float:
    """Return the F1 of the normalised words (SQuAD)."""
    gold_words, found_words = normalize(gold).split(), normalize(answer).split()
    common = sum((Counter(gold_words) & Counter(found_words)).values())
    if not common:
        return float(gold_words == found_words)
    precision, recall = common / len(found_words), common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def _score(record: TaskRecord, text: str) -> Mapping[str, float]:
    """Return whether the answers are the same after normalisation, and the F1 of the words that they share."""
    same = normalize(text) == normalize(record.reference)
    return {"exact match": float(same), "F1": f1(record.reference, text)}


QA = builtin_dataset("qa", METRICS, _score)
