"""Files that are replaced in one step: the whole new file or the whole old one is there, whatever happens."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dsbd_cli.errors import OutputError, writing
from dsbd_cli.io.lines.lock import open_locked


def check_replaceable(path: Path) -> None:
    """Raise OutputError if `write_atomically` could not write a file of this name."""
    if path.exists() and not path.is_file():
        return
    temporary = _temporary_path(path)
    # the name is taken where another run replaces the file just now
    with writing(path), suppress(FileExistsError):
        temporary.open("xb").close()
        temporary.unlink()


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step.

    A symbolic link stays one. A device or a pipe is written to. Raises OutputError.
    """
    if path.exists() and not path.is_file():
        with writing(path):
            path.write_bytes(data)
        return
    with replacing(path) as stream:
        left = memoryview(data)
        while left:  # one call writes as much as there is room for
            left = left[stream.write(left) :]
    stream.close()


@contextmanager
def replacing(path: Path) -> Iterator[io.FileIO]:
    """Yield a new, locked file that replaces the one at `path` in one step, when the block ends and all is on the disk.

    The new file stays open. If anything is raised in the block, the old file stays. Raises OutputError.
    """
    if path.exists() and not path.is_file():  # a device must not lose its place to a file
        raise OutputError(f"cannot write {path}: it is no ordinary file")
    temporary = _temporary_path(path)
    try:
        stream = open_locked(temporary, create_only=False)
    except OutputError as error:
        raise OutputError(str(error).replace(str(temporary), str(path))) from error
    try:
        with writing(path):
            stream.truncate(0)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            temporary.replace(os.path.realpath(path))
    except BaseException:
        temporary.unlink(missing_ok=True)  # while it is still locked
        stream.close()
        raise


def _temporary_path(path: Path) -> Path:
    """Return the path at which the new file is written before it replaces the old one."""
    real = Path(os.path.realpath(path))
    return real.with_name(f".{real.name}.tmp")
