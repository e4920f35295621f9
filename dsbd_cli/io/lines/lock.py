"""One writer per file: an advisory lock that ends with the process, however it ends."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from pathlib import Path
from typing import BinaryIO

from dsbd_cli.errors import OutputError

_TRIES = 5
_NO_LOCKS_HERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def open_locked(path: Path, *, create_only: bool) -> io.FileIO:
    """Open a file for reading and writing at its start, and lock it. Its content is not changed.

    create_only: refuse a file that was created meanwhile. Raises OutputError if it cannot be written, or another
    process has locked it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if create_only else 0)
    for _ in range(_TRIES):
        try:
            stream = io.FileIO(os.open(path, flags, 0o666), "rb+")
        except OSError as error:
            dangling = path.is_symlink() and not path.exists()
            reason = "it is a link that leads nowhere" if dangling else error.strerror
            raise OutputError(f"cannot write {path}: {reason}") from error
        try:
            lock(stream, path)
            if _is_still_at(stream, path):
                return stream
        except BaseException:
            stream.close()
            raise
        stream.close()  # a resumed run has just replaced it
    raise OutputError(f"cannot write {path}: it is replaced again and again by somebody else")


def open_shared(path: Path) -> BinaryIO:
    """Open a file for reading, so that nobody writes it meanwhile. Raises OSError, or OutputError if somebody writes it
    now."""
    stream = path.open("rb")
    try:
        lock(stream, path, shared=True)
    except BaseException:
        stream.close()
        raise
    return stream


def lock(stream: io.FileIO | BinaryIO, path: Path, *, shared: bool = False) -> None:
    """Take the lock, or raise OutputError at once. On a file system without locks the file is used unlocked.

    shared: others may read the file too, and none may write it.
    """
    try:
        fcntl.flock(stream.fileno(), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"{path} is being written by another process: wait for it, or name another file") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise OutputError(f"cannot lock {path}: {error.strerror}") from error


def _is_still_at(stream: io.FileIO, path: Path) -> bool:
    try:
        there, here = path.stat(), os.fstat(stream.fileno())
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
