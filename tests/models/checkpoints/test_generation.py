"""Generation settings of a checkpoint: which rules they ask for, and what is said of values that are none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsbd_cli.config.token_rules import TokenRules
from dsbd_cli.errors import ModelError
from dsbd_cli.models.checkpoints.generation import checkpoint_rules, positions_of, read_settings, settings_notes


def model(**settings: Any) -> Any:
    return SimpleNamespace(generation_config=SimpleNamespace(**settings), config=SimpleNamespace())


def test_rules_are_read() -> None:
    """Guards numbers that transformers takes for no rule, and a rule that no checkpoint may ask for."""
    rules = checkpoint_rules(
        model(
            suppress_tokens=[3, -1],
            bad_words_ids=[[5], [6, 7]],
            forced_eos_token_id=[2],
            forced_bos_token_id=-1,
            min_length=10**30,
            no_repeat_ngram_size=-1,
            repetition_penalty=2,
            timestamps=1,
            presence_penalty=1.5,
        )
    )
    want = {"suppress_tokens": (3,), "bad_words_ids": ((5,), (6, 7)), "forced_eos_token_id": 2, "min_length": 2**31 - 1}
    assert rules == TokenRules(**want, repetition_penalty=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", 5),
        ("suppress_tokens", ["a"]),
        ("begin_suppress_tokens", [None]),
        ("bad_words_ids", 5),
        ("bad_words_ids", [5]),
        ("bad_words_ids", [["a"]]),
        ("forced_eos_token_id", ["a"]),
        ("forced_bos_token_id", {}),
        ("min_length", "a"),
        ("no_repeat_ngram_size", 2.5),
        ("repetition_penalty", "a"),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", 0),
    ],
)
def test_a_rule_that_is_none_is_one_line(name: str, value: object) -> None:
    """Guards tracebacks at load, also of a target that applies no rules."""
    with pytest.raises(ModelError, match=rf"generation settings of the checkpoint: {name} is .*, which it cannot be"):
        settings_notes(model(**{name: value}))


def test_a_note_is_one_line() -> None:
    (note,) = settings_notes(model(stop_strings="\n\n", guidance_scale=3))
    assert r"guidance_scale 3, stop_strings '\n\n', which is not supported" in note


def test_settings_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    for text in ("{", "[" * 5000, "[]"):
        file.write_text(text)
        with pytest.raises(ModelError, match=r"generation_config.json (cannot be read|is no object)"):
            read_settings(file)


def test_positions_that_are_none_are_no_limit() -> None:
    """Guards -1, which some configs write for no limit, against a tensor of -1 tokens."""
    for limit, expected in ((-1, None), (0, None), (None, None), (7, 7)):
        assert positions_of(SimpleNamespace(max_position_embeddings=limit)) == expected
