"""Solved records in front of every prompt."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from dsbd_cli.errors import UsageError
from dsbd_cli.lab.tasks.dataset import with_shots
from dsbd_cli.lab.tasks.lines import jsonl_dataset
from dsbd_cli.lab.tasks.sql import SQL


def test_solved_records_stand_before_the_question() -> None:
    """Shots come from dev, are no test records, and reach models with and without a chat template."""
    plain, shown = SQL, with_shots(SQL, 2)
    own, record = next(plain.records()), next(shown.records())
    assert plain.dev is not None
    dev = list(itertools.islice(plain.dev.records(), 2))
    assert record.prompt == "".join(f"{shot.prompt} {shot.reference.strip()}\n\n" for shot in dev) + own.prompt
    turns = [(turn["role"], turn["content"]) for turn in record.meta["messages"]]  # type: ignore[attr-defined]
    assert turns[:2] == [("user", dev[0].prompt), ("assistant", dev[0].reference.strip())]
    assert turns[-1] == ("user", own.prompt)
    assert shown.score(record, record.reference)["execution accuracy"] == 1


def test_shots_need_answered_dev_records(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(UsageError, match="jsonl has no dev records to show: drop it, or give --dev-data"):
        with_shots(jsonl_dataset(lines), 1)
    unsolved = replace(jsonl_dataset(lines), dev=jsonl_dataset(lines))
    with pytest.raises(UsageError, match="dev record 0 has no reference to show as its answer"):
        with_shots(unsolved, 1)
    with pytest.raises(UsageError, match="jsonl has 2 dev records: ask for as many or fewer"):
        with_shots(unsolved, 3)


def test_conversations_are_not_told_as_text(tmp_path: Path) -> None:
    """Guards a target without a chat template, which would be given the answers without their questions."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"messages": [{"role": "user", "content": "a"}], "reference": "b"}\n')
    record = next(with_shots(replace(jsonl_dataset(lines), dev=jsonl_dataset(lines)), 1).records())
    assert record.prompt == ""
    assert [turn["content"] for turn in record.meta["messages"]] == ["a", "b", "a"]  # type: ignore[attr-defined]


def test_speech_takes_no_examples(tmp_path: Path) -> None:
    """Guards shots that are said to stand in front of speech, where they do nothing."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"audio": "a.wav", "reference": "b"}\n')
    with pytest.raises(UsageError, match="record 0 is speech, which takes no examples: drop --shots"):
        with_shots(replace(jsonl_dataset(lines), dev=jsonl_dataset(lines)), 1)
