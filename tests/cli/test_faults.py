"""The short form of benchmarks/faults.py: every row exactly once, whatever happened to the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import faults


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    result = faults.kill_at_random(faults.Folder(tmp_path / "job", 100), 5)
    assert result["kills"] == 5


@pytest.mark.parametrize("name", faults.FAULTS)
def test_fault(name: str, tmp_path: Path) -> None:
    faults.FAULTS[name](faults.Folder(tmp_path / "job", 100))


def test_a_lost_or_doubled_row_would_be_noticed(tmp_path: Path) -> None:
    """The check itself: a file from which a record is missing, that has one twice, or one that differs."""
    folder = faults.Folder(tmp_path / "job", 20)
    folder.finish()
    expected = (folder.records(), folder.stats.read_bytes().splitlines())
    lines = folder.output.read_bytes().splitlines(keepends=True)
    for broken in ([*lines, lines[0]], [lines[1], lines[0], *lines[2:]], [lines[0].replace(b"!0", b"?0"), *lines[1:]]):
        folder.output.write_bytes(b"".join(broken))
        with pytest.raises(faults.Fault):
            faults.complete(folder, expected)
