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
    position = 0

    def alternatives() -> tuple[float, float]:
        nonlocal position
        branches = [sequence()]
        while pattern[position : position + 1] == "|":
            position += 1
            branches.append(sequence())
        return min(short for short, _ in branches), max(far for _, far in branches)

    def sequence() -> tuple[float, float]:
        nonlocal position
        parts: list[tuple[float, float]] = []
        while position < len(pattern) and pattern[position] not in "|)":
            if pattern[position] == "(":
                position = _end(GROUP, pattern, position)
                part = alternatives()
                position += 1
            else:
                start, position = position, _end(ATOM, pattern, position)
                part = (1.0 if pattern[start:position].isascii() else float(LETTER_BYTES), float(LETTER_BYTES))
            while repeat := REPEAT.match(pattern, position):
                position = repeat.end()
                count = int(repeat[2]) if repeat[2] else int(repeat[1] == "+")
                part = (part[0] * count, part[1] + part[0] * max(0, count - 1))
            parts.append(part)
        short = far = 0.0
        for one_short, one_far in reversed(parts):
            far = max(far, one_far + short)
            short += one_short
        return short, far

    bounds = alternatives()
    while position < len(pattern):  # a bracket too many: it is refused elsewhere
        position += 1
        more = alternatives()
        bounds = (bounds[0] + more[0], bounds[1] + more[1])
    return bounds


def _end(expression: re.Pattern[str], text: str, position: int) -> int:
    match = expression.match(text, position)
    return match.end() if match else position + 1
