"""The pages of --help on narrow terminals."""

from __future__ import annotations

import re

import pytest

from dsbd_cli.cli import app

PAGES = ["", "demo", "generate", "bench", "profile", "index", "distill", "trim-draft", "doctor", "models", "models add"]


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


def test_a_switch_can_still_be_taken_back_after_its_page_was_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["generate", "--help"]) == 0
    assert app.run(["generate", "--print-config", "--set", "memory-saving=true", "--set", "memory-saving=false"]) == 0
    assert "memory_saving = false" in capsys.readouterr().out
