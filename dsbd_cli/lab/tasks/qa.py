"""Extractive question answering on short passages, scored by exact match and F1."""

from __future__ import annotations

import re
import string
from collections import Counter

from dsbd_cli.lab.tasks.record import Task, TaskRecord

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case without punctuation, articles and repeated spaces (SQuAD)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def f1(gold: str, found: str) -> float:
    """The F1 of the normalised words (SQuAD)."""
    gold_words, found_words = normalize(gold).split(), normalize(found).split()
    common = sum((Counter(gold_words) & Counter(found_words)).values())
    if not common:
        return float(gold_words == found_words)
    precision, recall = common / len(found_words), common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


class QaTask(Task):
    """Questions about passages of made-up people never seen in training; the answer is a span."""

    name = "qa"
    metric = "exact match"

    def score(self, record: TaskRecord, text: str) -> bool:
        """Whether the answers are the same after normalisation."""
        return normalize(text) == normalize(record.reference)

    def f1(self, record: TaskRecord, text: str) -> float:
        """The F1 of the words that the answers share."""
        return f1(record.reference, text)
