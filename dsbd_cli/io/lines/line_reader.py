"""Lines from a file or a pipe, read ahead by a thread that never holds more than a bounded part of them."""

from __future__ import annotations

import io
import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO, Self

from dsbd_cli.errors import DsbdError, one_line
from dsbd_cli.io.lines.encoding import check_encoding
from dsbd_cli.io.lines.jsonl import BLOCK_BYTES, NumberedLine, ReadLines, read_lines
from dsbd_cli.io.records.row import held_bytes

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_HELD_LINES = 2048
MAX_HELD_BYTES = 4 << 20
WAIT_S = 0.02
BUSY_S = 0.005


class LineReader:
    """An iterator over (line number, line), or None when no line has come within about 20 ms.

        with LineReader(stream, "prompts.jsonl") as source:
            for item in source:  # tuple[int, Line] | None

    Pass the line as it is to RowReader.read or read_text. A read error ends the iteration like the end of the file, so
    that the lines before it can still be answered. Then `check()`, or leaving the `with` block without an exception,
    raises it as a DsbdError.

    The reader holds at most 2048 lines or 4 MiB, whichever is reached first, and one line more. As many may have been
    taken from it already.
    """

    def __init__(self, stream: BinaryIO, name: str, *, read: ReadLines = read_lines) -> None:
        """stream: borrowed, not closed; see `open_input`. name: for messages."""
        self._name, self._read_lines = name, read
        self._changed = threading.Condition()
        self._held: deque[NumberedLine] = deque()
        self._held_bytes = 0
        self._ended = self._closed = False
        self.complete = False  # whether all lines were given out, and no error ended the reading early
        self._error: DsbdError | None = None
        self._stream = _Stoppable(stream)
        # A daemon, because a read from a stream that cannot be polled may never return.
        self._thread = threading.Thread(target=self._read, name="dsbd-input", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[NumberedLine | None]:
        left = None  # time at which the consumer was given a None
        while True:
            # A consumer that computed meanwhile is not kept waiting; one that comes back at once has nothing to do.
            busy = left is not None and time.monotonic() - left > BUSY_S
            lines = self._take(0.0 if busy else WAIT_S)
            left = None if lines else time.monotonic()
            if not lines:
                if self._ended and not self._held:
                    self.complete = self._error is None
                    return
                yield None
            while lines and not self._closed:
                yield lines.popleft()

    def _take(self, wait_s: float) -> deque[NumberedLine]:
        """Take all lines that are held; return none if none has come in time, and at the end."""
        with self._changed:
            if not self._held and not self._ended and wait_s:
                self._changed.wait_for(lambda: self._held or self._ended, wait_s)
            lines, self._held, self._held_bytes = self._held, deque(), 0
            if lines:
                self._changed.notify_all()
            return lines

    def _read(self) -> None:
        """Read lines until the end. This runs in the thread."""
        number = 0
        try:
            for line in self._read_lines(io.BufferedReader(self._stream, BLOCK_BYTES)):
                number = line[0]
                if number == 1:
                    check_encoding(held_bytes(line[1]), self._name)
                if not self._offer(line):
                    break
        except DsbdError as error:
            self._error = error
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._error = DsbdError(f"cannot read {self._name} behind line {number}: {reason}")
        except MemoryError:
            self._error = DsbdError(f"cannot read {self._name} behind line {number}: out of memory")
        except Exception as error:  # without an error, the end of the thread would pass for the end of the input
            reason = f"{type(error).__name__}: {one_line(error)}"
            self._error = DsbdError(f"cannot read {self._name} behind line {number}: {reason} (unexpected)")
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _offer(self, line: NumberedLine) -> bool:
        """Wait for room and hold the line; return False if the reader is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (len(self._held) < MAX_HELD_LINES and self._held_bytes < MAX_HELD_BYTES)
            )
            if self._closed:
                return False
            self._held.append(line)
            self._held_bytes += len(held_bytes(line[1]))
            self._changed.notify_all()
            return True

    def check(self) -> None:
        """Raise the error that ended the reading early, if there was one."""
        if self._error is not None and not self._closed:
            raise self._error

    def close(self) -> None:
        """Stop the thread. May be called twice."""
        with self._changed:
            self._closed = self._ended = True
            self._held.clear()
            self._changed.notify_all()
        self._stream.stop()
        self._thread.join(timeout=WAIT_S if self._stream.may_block else None)
        if not self._thread.is_alive():
            self._stream.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.close()


class _Stoppable(io.RawIOBase):
    """A stream whose reading can be stopped while no data come: it is polled, together with a pipe of our own.

    A thread that is blocked in a read of standard input would hold its lock, and Python could not exit.
    """

    def __init__(self, stream: BinaryIO) -> None:
        read1 = getattr(stream, "read1", None)
        self._read1: Callable[[int], bytes] = stream.read if read1 is None else read1
        self._poll: select.poll | None = None
        self._pipe: tuple[int, int] | None = None
        plain = isinstance(getattr(stream, "raw", stream), io.FileIO)
        self.may_block = not plain and not isinstance(stream, io.BytesIO)
        if plain and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            self._pipe = os.pipe()
            self._poll = select.poll()
            self._poll.register(self._pipe[0], select.POLLIN)
            self._poll.register(stream.fileno(), select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read as the stream does, as soon as there is a byte; return 0 once the stream is stopped."""
        if self._poll is not None and self._pipe is not None:
            ready = self._poll.poll()
            if any(fd == self._pipe[0] for fd, _ in ready):
                return 0
        view = memoryview(buffer).cast("B")
        data = self._read1(len(view))
        view[: len(data)] = data
        return len(data)

    def stop(self) -> None:
        """Wake up a reader that waits."""
        if self._pipe is not None:
            os.write(self._pipe[1], b".")

    def release(self) -> None:
        """Close the pipe. Call this only when nobody reads any more."""
        if self._pipe is not None:
            for end in self._pipe:
                os.close(end)
            self._pipe = None
