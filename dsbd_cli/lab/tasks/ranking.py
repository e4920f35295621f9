"""Scores of a ranked list of answers against the relevant answers: hit@K, ndcg@K, mrr. Relevance is yes or no."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from dsbd_cli.errors import UsageError, shorten

DEFAULT_METRICS = "hit@10,ndcg@10,mrr"
METRIC = re.compile(r"(?:hit|ndcg)@[1-9][0-9]{0,5}|mrr")


def read_metrics(text: str) -> tuple[str, ...]:
    """Return the metrics that a comma list names. Raises UsageError."""
    names = tuple(name.strip() for name in text.split(","))
    for index, name in enumerate(names):
        if not METRIC.fullmatch(name):
            raise UsageError(f"--metric: {shorten(name)} is none: give hit@K, ndcg@K or mrr, with commas")
        if name in names[:index]:
            raise UsageError(f"--metric: {name} stands there twice: drop one")
    return names


def ranked_scores(names: Sequence[str], relevant: frozenset[str], ranked: Sequence[str]) -> Mapping[str, float]:
    """Return each metric, from 0 to 1. ranked: answers, best first; one that was returned twice counts at its first
    place.

    hit@K: whether a relevant answer is among the first K. ndcg@K: the sum of 1 / log2(1 + place) over the relevant
    answers among the first K, divided by that sum in the best order. mrr: 1 / place of the first relevant answer, 0
    where none was returned.
    """
    order = list(dict.fromkeys(ranked))
    places = [rank for rank, item in enumerate(order, 1) if item in relevant]
    scores = {}
    for name in names:
        kind, _, count = name.partition("@")
        if kind == "mrr":
            scores[name] = 1 / places[0] if places else 0.0
            continue
        inside = [rank for rank in places if rank <= int(count)]
        if kind == "hit":
            scores[name] = float(bool(inside))
        else:
            best = sum(1 / math.log2(1 + rank) for rank in range(1, min(int(count), len(relevant)) + 1))
            scores[name] = sum(1 / math.log2(1 + rank) for rank in inside) / best
    return scores
