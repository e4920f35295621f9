"""Handling of Ctrl-C, SIGTERM and SIGHUP (the terminal is gone). The first signal ends the run after the present
iteration, a second Ctrl-C or SIGTERM at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from dsbd_cli.cli.run.messages import write_from_signal

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.5  # until an exception that was lost is raised again


class StoppedError(BaseException):
    """A signal ended the run; its exit code is 128 + the signal's number.

    It is no Exception, because libraries catch those, and no KeyboardInterrupt, because typer has an exit code of its
    own for it.
    """

    def __init__(self, number: int, *, early: bool = False) -> None:
        """early: nothing has been printed about the run yet."""
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.early = early
        self.exit_code = 128 + number


class StopSignals:
    """A `with` block that catches the first signal. It raises StoppedError, or calls `on_stop` once that is set."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.on_stop: Callable[[], None] | None = None
        self._old_handlers: dict[int, object] = {}
        self._old_hook: Callable[[sys.UnraisableHookArgs], object] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                # a shell starts jobs in the background with SIGINT ignored, nohup with SIGHUP: they stay ignored
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._old_handlers[number] = signal.signal(number, self._on_first_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self.number is not None and self._old_hook is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            sys.unraisablehook = self._old_hook
        if self.number is not None and self.on_stop is None and isinstance(error, Exception):
            # a library has turned the interrupt of its import into an error of its own
            raise StoppedError(self.number, early=True) from error

    def _on_first_signal(self, number: int, frame: FrameType | None) -> None:
        for handled in self._old_handlers:
            # a closed terminal sends SIGHUP twice (shell and kernel), and systemd may send it after SIGTERM
            signal.signal(handled, signal.SIG_IGN if handled == signal.SIGHUP else signal.SIG_DFL)
        self.number = number
        if self.on_stop is None:
            self._old_hook, sys.unraisablehook = sys.unraisablehook, self._tell_others
            signal.signal(signal.SIGALRM, self._raise_again)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
            raise StoppedError(number, early=True)
        write_from_signal("stopping after this iteration; Ctrl-C or SIGTERM once more stops at once")
        self.on_stop()

    def _tell_others(self, lost: sys.UnraisableHookArgs) -> None:
        """Tell of lost exceptions, but not of StoppedError."""
        if self._old_hook is not None and not isinstance(lost.exc_value, StoppedError):
            self._old_hook(lost)

    def _raise_again(self, number: int, frame: FrameType | None) -> None:
        """Raise StoppedError once more if the first one was lost, as exceptions are in callbacks of C code (LLVM calls
        some while it compiles) and of weak references."""
        on_its_way = isinstance(sys.exc_info()[1], StoppedError)
        if self.number is not None and self.on_stop is None and not on_its_way:
            raise StoppedError(self.number, early=True)
