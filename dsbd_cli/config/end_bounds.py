"""Bounds on the ends of texts: by how many tokens one more token can lengthen the shortest completion of a text.

The bounds come from the grammar alone, and from what tokens there are. They say how long before the limit a text need
not be led to its end: as long as no token can put the end out of reach. They may be too large, but not too small. For
JSON schemas they are in config/schema_ends.py, for regular expressions here. For Lark grammars nothing is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EndBounds:
    """By how many tokens a text's shortest completion grows with one more token, at most.

    Attributes:
        step: wherever the text stands. level: in addition, for each container that is open.
        opened: number of containers that one token opens, at most.
    """

    step: float
    level: float = 0
    opened: int = 0

    def unchecked(self, left: int, completion: int, levels: int) -> int:
        """Return how many tokens may follow one another, each being any legal one, before one could leave no
        completion within the limit.

        left: tokens left. completion: length of the shortest completion. levels: containers that are open.
        """
        tokens, grown = 0, completion + self.step + self.level * levels
        while grown + tokens + 1 <= left:
            tokens += 1
            grown += self.step + self.level * (levels + self.opened * tokens)
        return tokens


def pattern_bounds(pattern: str) -> EndBounds:
    """Return the bounds of a regular expression: from any place in it, its end is near."""
    return EndBounds(pattern_ends(pattern)[1])


ATOM = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\p.|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]|.",
    re.DOTALL,
)
GROUP = re.compile(r"\((?:\?(?:P?<\w+>|[a-zA-Z-]*:))?")
REPEAT = re.compile(r"(?:([*+?])|\{\s*(\d+)\s*(?:,\s*\d*\s*)?\}|\{\s*,\s*\d+\s*\})[?+]?")
LETTER_BYTES = 4  # of a letter in UTF-8, at most


def pattern_ends(pattern: str) -> tuple[float, float]:
    """Return the length in bytes of a short text that matches, and the longest way to an end from any place in the
    expression. Anchors count as letters."""
    place = 0

    def alternatives() -> tuple[float, float]:
        nonlocal place
        branches = [sequence()]
        while pattern[place : place + 1] == "|":
            place += 1
            branches.append(sequence())
        return min(short for short, _ in branches), max(far for _, far in branches)

    def sequence() -> tuple[float, float]:
        nonlocal place
        parts: list[tuple[float, float]] = []
        while place < len(pattern) and pattern[place] not in "|)":
            if pattern[place] == "(":
                place = _end(GROUP, pattern, place)
                part = alternatives()
                place += 1
            else:
                start, place = place, _end(ATOM, pattern, place)
                part = (1.0 if pattern[start:place].isascii() else float(LETTER_BYTES), float(LETTER_BYTES))
            while found := REPEAT.match(pattern, place):
                place = found.end()
                count = int(found[2]) if found[2] else int(found[1] == "+")
                part = (part[0] * count, part[1] + part[0] * max(0, count - 1))
            parts.append(part)
        short = far = 0.0
        for one_short, one_far in reversed(parts):
            far = max(far, one_far + short)
            short += one_short
        return short, far

    found = alternatives()
    while place < len(pattern):  # a bracket too many: it is refused elsewhere
        place += 1
        more = alternatives()
        found = (found[0] + more[0], found[1] + more[1])
    return found


def _end(expression: re.Pattern[str], text: str, place: int) -> int:
    match = expression.match(text, place)
    return match.end() if match else place + 1
