"""The folder that the files named by rows must lie in, links included."""

from __future__ import annotations

import os
from pathlib import Path

from dsbd_cli.errors import InvalidRowError, shorten

FILE_FIELDS = ("audio", "image")
MOST_CHARACTERS = 4096  # of a path; base64 data without their prefix would be a path of many folders
DATA = "data:"  # begins a file's contents that are given in the place of its path


def files_root(files_under: Path | None, source: Path | None) -> str:
    """Return the folder that rows may read files from, with links resolved.

    This is files_under where it is given, else the folder of the file with the rows, else the working folder. source:
    the file with the rows; None for standard input.
    """
    folder = files_under if files_under is not None else Path() if source is None else source.parent
    return os.path.realpath(folder)


def file_of_row(root: str, field: str, path: str) -> str:
    """Return the path of a row's file with links resolved; a picture's inline data are returned as they are.

    A relative path begins at the root. Raises InvalidRowError for a path outside it.
    """
    if field == "image" and path.startswith(DATA):
        return path
    try:
        real_path = os.path.realpath(os.path.join(root, path)) if len(path) <= MOST_CHARACTERS else None
    except (OSError, ValueError):  # a NUL, or links in a circle
        real_path = None
    if real_path is None:
        hint = f": contents are written as {DATA}image/png;base64,..." if field == "image" else ""
        raise InvalidRowError(f"{field} is {shorten(path)}, which is no path{hint}")
    if os.path.commonpath((root, real_path)) != root:
        raise InvalidRowError(
            f"{field} is {shorten(path)}, which is not under {root}: rows may read files there alone (--files-under "
            "names another folder)"
        )
    return real_path
