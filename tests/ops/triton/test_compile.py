"""Every kernel compiles for an A100 (sm_80) and an H100 (sm_90), without one: no spills, at most 48 KB of shared
memory, which every GPU gives a block. Guards: what only the interpreter takes, and shapes that need too many
registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = 48 * 1024


@pytest.mark.parametrize("capability", [80, 90])
def test_every_shape_in_use_compiles_without_spills(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.shapes", str(capability)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["capability"] for kernel in made} == {capability}
    names = {kernel["kernel"].removesuffix("_kernel") for kernel in made}
    iteration = {"candidates", "begin", "extend", "verify", "commit", "move"}
    assert names == iteration | {"norm", "gated", "rotate", "linear", "summed", "prompt", "suffix"}
    assert [kernel for kernel in made if kernel["spilled"] or kernel["shared"] > SHARED] == []
