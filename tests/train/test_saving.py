"""A head's folder is the old one or the new one, wherever its writing ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsbd_cli.errors import OutputError
from dsbd_cli.train import saving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a head of one file stands."""
    made = tmp_path / "draft"
    save(made, "float32")
    return made


def save(folder: Path, dtype: str) -> None:
    head: Any = SimpleNamespace(write=lambda folder, dtype: (folder / "config.json").write_text(dtype))
    saving.save_draft_head(head, folder, dtype)


def content(folder: Path) -> list[tuple[str, str]]:
    """Every file beside and below, and what it says."""
    return [
        (str(path.relative_to(folder.parent)), path.read_text())
        for path in folder.parent.rglob("*.*")
        if path.is_file()
    ]


def test_a_whole_head_takes_the_place_of_the_old_one(folder: Path) -> None:
    save(folder, "bfloat16")
    assert content(folder) == [("draft/config.json", "bfloat16")]


@pytest.mark.parametrize("failing", [1, 2], ids=["the old one cannot go", "the new one cannot come"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_rename_that_fails_is_undone(
    folder: Path, failing: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a draft that stands under a hidden name after a failed save."""
    rename, done = Path.replace, 0

    def replace(path: Path, target: Path) -> Path:
        nonlocal done
        done += 1
        if done == failing:
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    wanted = OutputError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(wanted):
        save(folder, "bfloat16")
    assert content(folder) == [("draft/config.json", "float32")]


def test_a_save_that_was_killed_between_its_renames_is_repaired(folder: Path) -> None:
    """As a run that goes on finds it, and as the next save does."""
    before = folder.with_name(".draft.before")
    folder.replace(before)
    folder.with_name(".draft.unfinished").mkdir()
    saving.recover(folder)
    assert content(folder) == [("draft/config.json", "float32")]
    folder.replace(before)
    save(folder, "bfloat16")
    assert content(folder) == [("draft/config.json", "bfloat16")]
    assert not before.exists()
    saving.recover(folder)  # nothing to do
    assert content(folder) == [("draft/config.json", "bfloat16")]
