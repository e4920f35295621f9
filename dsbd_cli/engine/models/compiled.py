"""Kernels of numba that are compiled when their file is imported, and kept on disk where there is room."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from numba import cfunc, njit, types
from numba.core.event import Event, Listener, install_listener

__all__ = ["Compiler"]

_logger = logging.getLogger(__name__)


class Compiler:
    """Makes kernels of the functions of one file. A line says when the first of them is not found on disk and has to be
    compiled, and one when they cannot be kept.

    what: that they compute, for these lines.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._kept, self._listener = True, _Told(what)

    def __call__(self, signature: Any) -> Callable[[Any], Any]:
        """Make a kernel with this signature, for Python. Other threads of Python run beside it."""
        return lambda function: self._made(njit, signature, function, nogil=True)

    def addressed(self, function: Any) -> Any:
        """Make a kernel for `native.Kernel`, which takes the address of its arguments."""
        return self._made(cfunc, types.void(types.int64), function)

    def _made(self, decorator: Any, signature: Any, function: Any, **options: Any) -> Any:
        options["error_model"] = "numpy"
        with install_listener("numba:run_pass", self._listener):
            if self._kept:
                try:
                    return decorator(signature, cache=True, **options)(function)
                except (OSError, RuntimeError) as error:  # a full folder; no folder that numba may write to
                    self._kept = False
                    said = " ".join(str(error).split())[:160]
                    _logger.warning("every run compiles the kernels of %s: they cannot be kept (%s)", self.what, said)
            return decorator(signature, **options)(function)


class _Told(Listener):  # type: ignore[misc]
    """Hears numba compile, which it does not for what it finds on disk."""

    def __init__(self, what: str) -> None:
        self._what, self._told = what, False

    def on_start(self, event: Event) -> None:
        if not self._told:
            self._told = True
            _logger.warning("compiling the kernels of %s", self._what)

    def on_end(self, event: Event) -> None:
        pass
