"""Where files that rows name may lie: under one folder, links included."""

from __future__ import annotations

import os
from pathlib import Path

from dsbd_cli.errors import InvalidRowError, shorten

FILE_FIELDS = ("audio", "image")
MOST_CHARACTERS = 4096  # of a path; base64 data by themselves would be a path of many folders
DATA = "data:"  # begins what is no path, but the contents themselves


def files_root(files_under: Path | None, source: Path | None) -> str:
    """The folder that rows may read from, without links: the one that is named, else that of the file with the rows,
    else the working folder. source: None for standard input."""
    folder = files_under if files_under is not None else Path() if source is None else source.parent
    return os.path.realpath(folder)


def file_of_row(root: str, field: str, path: str) -> str:
    """A row's path without links, taken from the root where it is relative; a picture's data stay.

    Raises InvalidRowError for a path outside.
    """
    if field == "image" and path.startswith(DATA):
        return path
    try:
        found = os.path.realpath(os.path.join(root, path)) if len(path) <= MOST_CHARACTERS else None
    except (OSError, ValueError):  # a NUL, or links in a circle
        found = None
    if found is None:
        hint = f": contents are written as {DATA}image/png;base64,..." if field == "image" else ""
        raise InvalidRowError(f"{field} is {shorten(path)}, which is no path{hint}")
    if os.path.commonpath((root, found)) != root:
        raise InvalidRowError(
            f"{field} is {shorten(path)}, which is not under {root}: rows may read files there alone (--files-under "
            "names another folder)"
        )
    return found
