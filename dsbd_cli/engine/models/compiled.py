"""Kernels of numba that are compiled when their file is imported, and kept on disk where there is room."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from numba import njit

__all__ = ["Compiler"]

_logger = logging.getLogger(__name__)


class Compiler:
    """Makes kernels of the functions of one file. The first that is not found on disk is told: all together may take a
    quarter of a minute. So a small one comes first.

    what: whose kernels they are, for that line.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._kept, self._told = True, False

    def __call__(self, signature: Any) -> Callable[[Any], Any]:
        """Make a kernel with this signature. Other threads of Python run beside it."""
        return lambda function: self._made(function, signature)

    def _made(self, function: Any, signature: Any) -> Any:
        options = {"nogil": True, "error_model": "numpy"}
        made = None
        if self._kept:
            try:
                made = njit(signature, cache=True, **options)(function)
            except (OSError, RuntimeError):  # RuntimeError: no folder that numba may write; OSError: one that is full
                self._kept = False
        found = made is not None and bool(made.stats.cache_hits)
        if not found and not self._told:
            _logger.warning(
                "compiling the kernels of %s%s",
                self.what,
                "; later runs load them" if self._kept else ", which no folder can keep",
            )
            self._told = True
        return njit(signature, **options)(function) if made is None else made
