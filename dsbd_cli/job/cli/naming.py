"""Messages of the library in the words of the command line: its fields as the options that were typed."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields

__all__ = ["as_typed", "names_of"]

BEFORE = r"(?:^|(?<=: )|(?<=\buse )|(?<=\braise )|(?<=\bbut )|(?<=, )(?=[a-z]+ was ))"


def names_of(*groups: type) -> frozenset[str]:
    """Fields of groups of options."""
    return frozenset(item.name for group in groups for item in fields(group))


def as_typed(message: str, options: Collection[str]) -> str:
    """`min_width is 5, ...; use width fixed` as `--min-width is 5, ...; use --width fixed`.

    options: names of fields that are options of the command. A field of one word is only taken where it stands as a
    setting: first, after a colon, or after `use`, `raise` and the like.
    """
    long = "|".join(sorted((name for name in options if "_" in name), key=len, reverse=True))
    short = "|".join(sorted(name for name in options if "_" not in name))
    if "index" in options:
        message = message.replace("needs an index: make one", "needs --index FILE: make one")
    if long:
        message = re.sub(rf"(?<![\w-])({long})(?!\w)", _option, message)
    if short:
        message = re.sub(rf"{BEFORE}({short})(?![\w-])(?!:)", _option, message)
    return message


def _option(found: re.Match[str]) -> str:
    return "--" + found[0].replace("_", "-")
