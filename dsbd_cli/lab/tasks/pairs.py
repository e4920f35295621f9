"""Tasks of encoder-decoder models: translation, summaries, speech and pictures; scored by libraries that papers cite.

Scores are of one answer each, and reports average them. A corpus-wide BLEU or chrF is another number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from dsbd_cli.errors import UsageError
from dsbd_cli.io.records.reader import RowReader
from dsbd_cli.lab.tasks.dataset import Dataset, Score
from dsbd_cli.lab.tasks.lines import jsonl_dataset
from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.lab.tasks.scores import as_share, score_library

Metrics = tuple[tuple[str, ...], Score]


def paired_dataset(name: str, path: Path, files_under: Path | None, rows: RowReader) -> Dataset:
    """Read lines that have `prompt`, `audio` or `image`, and `reference`, as the data of one of PAIRED_TASKS. Raises
    UsageError where they have no references, or a library is missing."""
    metrics, score = PAIRED_TASKS[name]()
    data = jsonl_dataset(path, files_under=files_under, rows=rows)
    if not data.metrics or data.ranks is not None:
        raise UsageError(f"{path}: task {name} scores against a reference: give one to every line")
    return dataclasses.replace(data, name=name, metrics=metrics, score=score)


def _translation() -> Metrics:
    """Return chrF and BLEU of a sentence, by sacrebleu, from 0 to 1."""
    metrics = score_library("sacrebleu.metrics")
    scorers = {"chrF": metrics.CHRF(), "BLEU": metrics.BLEU(effective_order=True)}

    def score(record: TaskRecord, text: str) -> Mapping[str, float]:
        return {
            name: as_share(scorer.sentence_score(text, [record.reference]).score) for name, scorer in scorers.items()
        }

    return tuple(scorers), score


def _summary() -> Metrics:
    """Return the F measures of ROUGE-1, -2 and -L, by rouge-score."""
    scorer = score_library("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    names = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}

    def score(record: TaskRecord, text: str) -> Mapping[str, float]:
        scored = scorer.score(record.reference, text)
        return {names[name]: score.fmeasure for name, score in scored.items()}

    return tuple(names.values()), score


def _words() -> Metrics:
    """Return 1 - WER by jiwer, 0 at least. Where every word is one phoneme or one character, WER is their error
    rate."""
    jiwer = score_library("jiwer")

    def score(record: TaskRecord, text: str) -> Mapping[str, float]:
        return {"1 - WER": max(0.0, 1.0 - jiwer.wer(record.reference, text))}

    return ("1 - WER",), score


PAIRED_TASKS = {"translation": _translation, "summary": _summary, "words": _words}
