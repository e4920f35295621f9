"""The pages of --help on narrow terminals."""

from __future__ import annotations

import re

import pytest

from dsbd_cli.cli import app

PAGES = [
    "",
    "demo",
    "generate",
    "bench",
    "profile",
    "index",
    "merge",
    "schema",
    "distill",
    "trim-draft",
    "doctor",
    "models",
    "models add",
]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_whole_names_and_no_type_of_a_switch(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    assert app.run([*page.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "<bool>" not in text
    assert not re.search(r"--[a-z-]*\u2026", text), "a name is cut off"
    assert max(map(len, text.splitlines())) <= 80
    assert "list[" not in text, "the type of an argument in Python"
    assert "[default: " not in text, "other pages say (default: ..)"


def test_paragraphs_are_as_wide_as_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards lines that end where they end in the source."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 100)
    assert app.run(["--help"]) == 0
    assert "143 stopped, 141 nobody reads" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 160)
    assert app.run(["doctor", "--help"]) == 0
    assert "the tokenizers and configs are enough" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["generate", "bench", "profile"])
def test_what_most_runs_set_stands_first(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run([page, "--help"]) == 0
    panels = re.findall(r"╭─ (.*?) ─", capsys.readouterr().out)
    assert panels[:2] == ["Options", "Main options"]


def test_a_switch_can_still_be_taken_back_after_its_page_was_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["generate", "--help"]) == 0
    assert app.run(["generate", "--print-config", "--set", "memory-saving=true", "--set", "memory-saving=false"]) == 0
    assert "memory_saving = false" in capsys.readouterr().out
