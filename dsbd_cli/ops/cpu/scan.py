"""CPU kernels for recurrent layers. numba, which compiles kernels/scan.py, is imported when they are needed."""

from __future__ import annotations

from types import ModuleType


def compiled() -> ModuleType:
    """Return the kernels, made at the first call."""
    from dsbd_cli.ops.cpu.kernels import scan

    return scan
