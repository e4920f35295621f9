"""The user's cache folder: what is found once is kept there for later runs. No torch here."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder in which results are kept for later runs. Raises FileNotFoundError for a user without a home,
    as in many containers."""
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if cache.startswith("~"):
        raise FileNotFoundError("there is no home folder: set HOME or XDG_CACHE_HOME")
    return Path(cache) / "dsbd"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of the cache folder, whole or not at all. Raises OSError."""
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:  # nothing is left where the disk is full
        part.unlink(missing_ok=True)
