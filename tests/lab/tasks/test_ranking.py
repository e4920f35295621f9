"""hit@K, ndcg@K and mrr against numbers worked out by hand, and the lines they are taken from."""

from __future__ import annotations

import json
from math import log2
from pathlib import Path

import pytest

from dsbd_cli.errors import UsageError
from dsbd_cli.lab.tasks.choose import open_dataset
from dsbd_cli.lab.tasks.ranking import ranked_scores, read_metrics

NAMES = read_metrics("hit@1, hit@3, ndcg@3, ndcg@10,mrr")


def test_numbers_by_hand() -> None:
    scores = ranked_scores(NAMES, frozenset({"b", "d"}), ["a", "b", "c", "d"])
    assert scores["hit@1"] == 0.0
    assert scores["hit@3"] == 1.0
    assert scores["ndcg@3"] == pytest.approx((1 / log2(3)) / (1 + 1 / log2(3)))
    assert scores["ndcg@10"] == pytest.approx((1 / log2(3) + 1 / log2(5)) / (1 + 1 / log2(3)))
    assert scores["mrr"] == 0.5


def test_best_worst_and_doubles() -> None:
    assert set(ranked_scores(NAMES, frozenset({"a"}), ["a", "b"]).values()) == {1.0}
    assert set(ranked_scores(NAMES, frozenset({"z"}), ["a", "b"]).values()) == {0.0}
    assert set(ranked_scores(NAMES, frozenset({"z"}), []).values()) == {0.0}
    assert ranked_scores(("mrr",), frozenset({"b"}), ["a", "a", "b"]) == {"mrr": 0.5}


@pytest.mark.parametrize("text", ["hit", "hit@0", "ndcg@", "mrr@5", "map", "hit@1,hit@1", ""])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--metric"):
        read_metrics(text)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_lines_with_relevant_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "x", "relevant": [3, "b"]}, {"prompt": "y", "relevant": ["c"]})
    data = open_dataset("jsonl", path, metric="hit@1,mrr")
    assert data.metrics == ("hit@1", "mrr")
    assert data.ranks is not None
    first, second = data.records()
    assert data.ranks(first, ["b", "3"]) == {"hit@1": 1.0, "mrr": 1.0}
    assert data.ranks(second, ["b", "c"]) == {"hit@1": 0.0, "mrr": 0.5}
    assert open_dataset("jsonl", path).metrics == ("hit@10", "ndcg@10", "mrr")


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    good = {"prompt": "x", "relevant": ["a"]}
    for rows, message in (
        ((good, {"prompt": "y"}), "line 2: relevant is on some lines only"),
        (({**good, "reference": "r"},), "line 1: reference and relevant are both given"),
        (({**good, "relevant": []},), r"line 1: relevant is \[\], but must be a list of ids"),
        (({**good, "relevant": "a"},), "line 1: relevant is 'a', but must be a list of ids"),
    ):
        with pytest.raises(UsageError, match=message):
            open_dataset("jsonl", write(tmp_path / "b.jsonl", *rows))
    with pytest.raises(UsageError, match="--metric mrr needs relevant"):
        open_dataset("jsonl", write(tmp_path / "c.jsonl", {"prompt": "x"}), metric="mrr")
    with pytest.raises(UsageError, match="--metric mrr is for prompts of --input"):
        open_dataset("sql", None, metric="mrr")
