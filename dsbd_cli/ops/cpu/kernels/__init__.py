"""Kernels for a CPU, which numba compiles: vectors, and one file for each operation."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from dsbd_cli.ops.processor import current, plain, possible


def _import_numba() -> Any:
    """Import numba without the package `coverage`, and return its configuration.

    numba looks for that package, and cannot be imported where Python instead finds a coverage.py, or a folder of that
    name, beside the program.
    """
    modules: dict[str, Any] = sys.modules
    hidden = {"coverage": modules["coverage"]} if "coverage" in modules else {}
    modules["coverage"] = None  # an import of it fails
    try:
        return importlib.import_module("numba.core.config")
    finally:
        del modules["coverage"]
        modules.update(hidden)


config = _import_numba()


def _limit_numba() -> None:
    """Have numba compile for the processor that DSBD_CPU names, unless its own variables say for which. Its first
    function settles that, so this comes before all files here.

    Raises RuntimeError where it would compile for less: LLVM ends the process at an instruction that is missing.
    """
    from numba.core.codegen import get_host_cpu_features

    needed = current().instructions
    flags = (get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES).split(",")
    if not needed <= {plain(flag[1:]) for flag in flags if flag.startswith("+")}:
        variables = "NUMBA_CPU_NAME, NUMBA_CPU_FEATURES or NUMBA_ENABLE_AVX"
        raise RuntimeError(f"{variables} allows less than {current()}: set DSBD_CPU, too")
    if config.CPU_FEATURES is None and current() < possible()[-1]:
        dropped = {
            flag for flag in flags if flag[1:].startswith(("avx", "amx", "fma")) and plain(flag[1:]) not in needed
        }
        config.CPU_FEATURES = ",".join(f"-{flag[1:]}" if flag in dropped else flag for flag in flags)


_limit_numba()
