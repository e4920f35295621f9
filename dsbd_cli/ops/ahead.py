"""Memory for packed weights, whose pages a thread touches while modules are imported. No torch here.

A page of fresh memory takes space when it is first written to. The host of a virtual machine may need milliseconds for
each page, so seconds for a model, while the imports before keep one processor busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator

HUGE = 2**21  # bytes of a huge page
PIECE = 64 * HUGE  # bytes that are touched at once, without the interpreter's lock
LEAST = 2**25  # bytes; fewer are not worth a thread


def map_zeros(size: int) -> mmap.mmap:
    """Return `size` bytes of zeros, in pages of 2 MiB where the system has them. Raises OSError."""
    taken = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without such pages
        taken.madvise(mmap.MADV_HUGEPAGE)
    return taken


class TouchedMemory:
    """A block of memory whose pages a thread touches, one after the other, until parts of it are used.

    Attributes:
        memory: the block. It is freed when this object and all views of its parts are gone.
    """

    def __init__(self, size: int) -> None:
        """size: most bytes to touch. Raises OSError or RuntimeError where the system gives no memory or no thread."""
        self.memory = map_zeros(size + HUGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._used = -self._address % HUGE  # place of the next part
        self._touched, self._end = self._used, self._used + size
        self._stopped = False
        self._thread = threading.Thread(target=self._touch, daemon=True)
        self._thread.start()

    def _touch(self) -> None:
        while not self._stopped and self._touched < self._end:
            count = min(PIECE, self._end - self._touched)
            ctypes.memset(self._address + self._touched, 0, count)
            self._touched += count

    def cut(self, size: int) -> int | None:
        """Return where `size` bytes of zeros stand that belong to the caller; None where so many are not touched, which
        ends the touching."""
        if self._used + size > self._touched:
            self._stop()
        if self._used + size > self._touched:
            return None
        start, self._used = self._used, self._used + size
        return start

    def give_back(self) -> None:
        """Give the pages that no part uses back to the system. There are no further parts."""
        self._stop()
        first, last = (-(-end // mmap.PAGESIZE) * mmap.PAGESIZE for end in (self._used, self._touched))
        self._touched = self._used
        if first < last:
            with contextlib.suppress(OSError):  # memory that the process has locked
                self.memory.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _stop(self) -> None:
        self._stopped = True
        self._thread.join()


_begun: list[TouchedMemory] = []  # one at most
_lock = threading.Lock()  # of the list and of its block


@contextlib.contextmanager
def touching(size: int) -> Iterator[None]:
    """Let a thread touch up to `size` bytes for packed weights, and give back what they have not used when the block
    ends. Where another thread of the program is in such a block, both use its memory."""
    with _lock:
        if size >= LEAST and not _begun and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError, RuntimeError):
                _begun.append(TouchedMemory(size))
    try:
        yield
    finally:
        end_touching()


def cut_touched(size: int) -> tuple[mmap.mmap, int] | None:
    """Return a block and the place in it where `size` bytes of zeros belong to the caller; None where there are not so
    many."""
    with _lock:
        start = _begun[0].cut(size) if _begun else None
        return None if start is None else (_begun[0].memory, start)


def end_touching() -> None:
    """Give back what the weights have not used."""
    with _lock:
        while _begun:
            _begun.pop().give_back()
