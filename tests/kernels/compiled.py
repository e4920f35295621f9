"""Compile a kernel ahead of time, without a GPU: what ptxas says of registers, spills and shared memory.

Run as a program, because a process that interprets kernels cannot compile them: python -m tests.kernels.compiled CASES
prints a line of JSON per case and architecture. A case is [module, kernel, signature, constants, warps].
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ARCHITECTURES = (80, 90)
Case = tuple[str, str, dict[str, str], dict[str, object], int]


def compile_all(cases: Sequence[Case]) -> list[dict[str, object]]:
    """What each case needs on each architecture, in another process."""
    import os

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", json.dumps(cases)],
        capture_output=True, text=True, env=environment, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _compile(case: Case, architecture: int) -> dict[str, object]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name, signature, constants, warps = case
    kernel = getattr(importlib.import_module(module), name)
    types: Mapping[str, str] = signature | dict.fromkeys(constants, "constexpr")
    ordered = {argument: types[argument] for argument in kernel.arg_names}
    source = ASTSource(
        fn=kernel, signature=ordered, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()}
    )
    target = GPUTarget("cuda", architecture, 32)
    made = triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": False})
    ptxas = next(
        path
        for path in sorted(Path(triton.__file__).parent.rglob("ptxas*"))
        if path.is_file() and path.stat().st_mode & 0o111
    )
    text = made.asm["ptx"]
    found = re.search(r"\.target (sm_\w+)", text)
    assert found is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        said = subprocess.run(
            [str(ptxas), "-v", f"--gpu-name={found[1]}", file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    spills = sum(int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", said))
    registers = int(re.search(r"Used (\d+) registers", said)[1])  # type: ignore[index]
    shared = made.metadata.shared
    return {
        "kernel": name,
        "constants": constants,
        "sm": architecture,
        "spills": spills,
        "registers": registers,
        "shared": shared,
    }


if __name__ == "__main__":
    for one in json.loads(sys.argv[1]):
        for architecture in ARCHITECTURES:
            print(json.dumps(_compile(tuple(one), architecture)), flush=True)
