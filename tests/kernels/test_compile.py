"""Every kernel compiles for an H100 (sm_90), without one: no spills, at most 48 KB of shared memory, which every GPU
gives a block. Guards: what only the interpreter takes, and shapes that need too many registers. The same for an A100,
by hand: `python -m tests.kernels.shapes 80`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = 48 * 1024


@pytest.mark.slow
def test_every_shape_in_use_compiles_without_spills() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.shapes", "90"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    names = {one["kernel"].removesuffix("_kernel") for one in made}
    iteration = {"candidates", "begin", "extend", "walk", "commit", "move"}
    assert names == iteration | {"norm", "gated", "rotate", "linear", "summed", "prompt", "tail"}
    assert [one for one in made if one["spilled"] or one["shared"] > SHARED] == []
