"""Bounds on the ends of texts, against what trying all texts finds."""

from __future__ import annotations

import itertools
import re

import pytest

from dsbd_cli.config.end_bounds import EndBounds, pattern_ends

LONGEST = 9
PATTERNS = [
    *(
        "a",
        "abc",
        "a|bcd",
        "a*",
        "a*b",
        "(ab)+c",
        "(a|bb)*c",
        "a{3}",
        "a{2,}b",
        "a{1,2}(b|ccc)",
        "(a{2}b){2}",
        "[ab]{2}c?",
    ),
    *("(?:ab|c)d", "(?P<x>a)b", r"\x61b", r"a\+", "a(bc|d(a|bbb))", "(a|)b", "((a))", "[^b]b", "a??b", "(?i:a)b"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_place_in_an_expression_is_farther_from_an_end(pattern: str) -> None:
    """Every beginning of every text of up to LONGEST letters."""
    texts = ["".join(text) for size in range(LONGEST) for text in itertools.product("abcd+", repeat=size) if size < 7]
    whole = [text for text in texts if re.fullmatch(pattern, text)]
    assert whole
    beginnings = {text[:size] for text in whole for size in range(min(len(text), 4) + 1)}
    farthest = max(
        min(len(text) for text in whole if text.startswith(beginning)) - len(beginning) for beginning in beginnings
    )
    short, far = pattern_ends(pattern)
    assert short >= min(map(len, whole))
    assert far >= farthest
    assert far <= 4 * (len(pattern) + 6), "nor is the bound useless"


def test_what_may_follow_unchecked() -> None:
    """By steps: as long as the next token, too, leaves an end, whatever it adds."""
    for step, level, opened in itertools.product((0, 1, 5), (0, 3), (0, 2)):
        bounds = EndBounds(step, level, opened)
        for left, completion, levels in itertools.product((1, 9, 40, 200), (0, 4, 30), (0, 3)):
            free, longest, open_ = 0, float(completion), levels
            while True:
                longest += step + level * open_
                open_ += opened
                if longest > left - free - 1:
                    break
                free += 1
            assert bounds.unchecked(left, completion, levels) == free
