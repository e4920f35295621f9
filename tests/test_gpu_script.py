"""The shell of benchmarks/gpu.sh, with a python that does nothing or fails: each part is reached, failures count."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE = """#!/bin/sh
case "$*" in
{rules}
esac
echo "ran $*"
"""
PARTS = ("doctor", "kernels", "gpu-tests", "same-texts", "overhead", "speed-7b", "speed-7b-batch", "speed-13b", "wide")


def run(tmp_path: Path, rules: str) -> tuple[int, str, dict[str, str]]:
    """Exit code, what was printed, and the logs by name."""
    python = tmp_path / "python"
    python.write_text(FAKE.format(rules=rules))
    python.chmod(0o755)
    out = tmp_path / "out"
    environment = {**os.environ, "OUT": str(out)}
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu.sh"), str(python)],
        capture_output=True, text=True, env=environment, check=False, timeout=600,
    )  # fmt: skip
    return done.returncode, done.stdout, {file.stem: file.read_text() for file in out.glob("*.log")}


def test_every_part_is_run(tmp_path: Path) -> None:
    code, printed, logs = run(tmp_path, "none) ;;")
    assert code == 0
    assert set(logs) >= set(PARTS)
    assert "all parts passed" in printed


@pytest.mark.parametrize(
    ("rules", "name"),
    [("*doctor*) exit 1;;", "doctor"), ("*overhead*) kill -9 $$;;", "overhead")],
    ids=["fails", "dies"],
)
def test_a_part_that_fails_leaves_the_others(rules: str, name: str, tmp_path: Path) -> None:
    code, printed, logs = run(tmp_path, rules)
    assert code == 1
    assert printed.rstrip().endswith(f"== failed: {name}")
    assert set(logs) >= set(PARTS)
    assert "ran -m benchmarks.wide" in logs["wide"]


def test_without_pytest_its_parts_are_named_and_the_others_run(tmp_path: Path) -> None:
    code, printed, logs = run(tmp_path, "*'import pytest'*) exit 1;;")
    assert code == 0
    assert "all parts passed, but not run: kernels gpu-tests" in printed
    assert "not run: pytest is not installed" in logs["kernels"]
    assert "ran -m benchmarks.speed" in logs["speed-7b"]


def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    code, _, logs = run(tmp_path, "*is_available*) exit 1;;")
    assert (code, logs) == (1, {})
