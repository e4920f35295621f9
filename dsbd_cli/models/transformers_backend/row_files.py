"""Files that requests name: sound and pictures. Whatever is at a path, opening it does not wait and reading it ends."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from dsbd_cli.errors import MAX_SHOWN, DsbdError, InvalidRowError, one_line, shorten

MOST_BYTES = 1 << 28  # of a file: 256 MiB


@contextmanager
def open_file(field: str, path: str, most: int | None = None) -> Iterator[BinaryIO]:
    """Open an ordinary file of at most `most` bytes; None: MOST_BYTES. field: name of the request's field, for
    messages.

    Raises InvalidRowError for any other file, and in place of what libraries raise inside.
    """
    with readable(field, path):
        _ordinary_size(field, path, os.stat(path))  # opening a device may do something
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a named pipe may have come since
        with os.fdopen(descriptor, "rb") as file:
            if (size := _ordinary_size(field, path, os.fstat(descriptor))) > (most := most or MOST_BYTES):
                raise InvalidRowError(f"{field} is {shown(path)}, which has {size} bytes, but must have at most {most}")
            yield file


@contextmanager
def readable(field: str, path: str) -> Iterator[None]:
    """Turn every exception that is raised inside into an InvalidRowError, because libraries raise many kinds. Our own
    errors pass."""
    try:
        yield
    except DsbdError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InvalidRowError(f"{field} is {shown(path)}, which cannot be read: {reason}") from None


def shown(written: str) -> str:
    """Return a value as it appears in an error message. A path begins at the working folder where that is shorter, and
    is cut to its end where it is long. Other values are cut to their beginning."""
    if not os.path.isabs(written):
        return shorten(written)
    path = min(written, os.path.relpath(written), key=len)
    return shorten(path if len(path) < MAX_SHOWN - 2 else f"…{path[4 - MAX_SHOWN :]}")


def _ordinary_size(field: str, path: str, status: os.stat_result) -> int:
    """Return the bytes of a file. Raises InvalidRowError for pipes, devices and folders."""
    if not stat.S_ISREG(status.st_mode):
        raise InvalidRowError(f"{field} is {shown(path)}, which is no file")
    return status.st_size
