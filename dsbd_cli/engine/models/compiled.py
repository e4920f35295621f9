"""Kernels of numba, compiled when their file is imported, and kept on disk where there is a place for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

__all__ = ["compiled"]


def compiled(signature: Any) -> Callable[[Any], Any]:
    """Make a kernel of a function with this signature. Other threads run beside it.

    A folder for compiled kernels that cannot be written or is full costs only the time to compile again.
    """

    def made(function: Any) -> Any:
        try:
            return njit(signature, nogil=True, error_model="numpy", cache=True)(function)
        except (OSError, RuntimeError):  # RuntimeError: numba found no folder that it may write
            return njit(signature, nogil=True, error_model="numpy")(function)

    return made
