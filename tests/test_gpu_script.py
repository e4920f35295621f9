"""The shell of benchmarks/gpu.sh, with a python that does nothing or fails: each part is reached, failures count."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


def run(tmp_path: Path, rules: str, **more: str) -> tuple[int, str, dict[str, str]]:
    """Exit code, what was printed, and the logs by name."""
    python = tmp_path / "python"
    python.write_text(FAKE.format(rules=rules))
    python.chmod(0o755)
    out = tmp_path / "out"
    environment = {**os.environ, "OUT": str(out), **more}
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


def test_the_limits_of_all_parts_are_nine_minutes_at_most() -> None:
    script = (ROOT / "benchmarks" / "gpu.sh").read_text()
    limits = [int(limit) for limit in re.findall(r"^ *part (\d+) ", script, re.MULTILINE)]
    assert len(limits) == len(PARTS) + 1  # and racecheck
    assert sum(limits) + 5 * len(limits) <= 9 * 60


def test_without_triton_what_needs_it_is_named(tmp_path: Path) -> None:
    sanitizer = tmp_path / "bin" / "compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.write_text("#!/bin/sh\nexit 1\n")
    sanitizer.chmod(0o755)
    path = f"{sanitizer.parent}{os.pathsep}{os.environ['PATH']}"
    code, printed, logs = run(tmp_path, "*'import triton'*) exit 1;;", PATH=path)
    assert code == 0
    assert "not run: kernels racecheck" in printed
    assert "triton is not installed" in logs["racecheck"]
    code, printed, _ = run(tmp_path, "none) ;;", PATH=path)
    assert (code, printed.splitlines()[-1]) == (1, "== failed: racecheck")


def test_a_machine_without_a_gpu_is_told_in_one_line(tmp_path: Path) -> None:
    """With the real torch, to which no GPU is shown. Guards a traceback."""
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu.sh"), sys.executable],
        capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "OUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "no CUDA device: nothing is measured"
    assert "Traceback" not in done.stderr


def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    code, _, logs = run(tmp_path, "*is_available*) exit 1;;")
    assert (code, logs) == (1, {})
