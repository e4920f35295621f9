"""Kernels for a CPU, which numba compiles: vectors, and one file for each operation."""

from __future__ import annotations

from llvmlite import binding
from numba.core import config

from dsbd_cli.ops.processor import current, plain, possible


def _limit_numba() -> None:
    """Have numba compile for the processor that DSBD_CPU names, unless its own variables say for which. Its first
    function settles that, so this comes before all files here.

    Raises RuntimeError where it would compile for less: LLVM ends the process at an instruction that is missing.
    """
    needed = current().instructions
    if config.CPU_FEATURES is None and current() < possible()[-1]:
        flags = binding.get_host_cpu_features().items()
        kept = {flag for flag, _ in flags if plain(flag) in needed or not flag.startswith(("avx", "amx", "fma"))}
        config.CPU_FEATURES = ",".join(f"{'+' if here and flag in kept else '-'}{flag}" for flag, here in sorted(flags))
    if config.CPU_FEATURES is not None:
        targeted = {plain(flag[1:]) for flag in config.CPU_FEATURES.split(",") if flag.startswith("+")}
        if not needed <= targeted:
            raise RuntimeError(f"NUMBA_CPU_FEATURES has less than {current()}: set DSBD_CPU, too")


_limit_numba()
