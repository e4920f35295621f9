"""docs/cli.md is what the commands say, on any width of terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def generate(*arguments: str, columns: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": columns, "FORCE_COLOR": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "docs" / "generate_cli.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_page_is_current() -> None:
    for columns in ("40", "200"):
        done = generate("--check", columns=columns)
        assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
