"""Which cases benchmarks/drafters.py runs."""

from __future__ import annotations

import pytest

from benchmarks.drafters import CHOICES, DRAFTED, chosen_names
from dsbd_cli.config.variants import DRAFTERS


def test_every_drafter_has_a_row() -> None:
    # without a grammar drafter grammar has nothing to draft
    assert set(DRAFTERS) - {"grammar"} == {name for chosen in DRAFTED.values() for name in chosen["drafter"].split("+")}


def test_names_with_commas_or_spaces_between() -> None:
    known = CHOICES["drafters"]
    assert chosen_names(["no draft,beam", "bridge"], known) == ["no draft", "beam", "bridge"]
    for words, message in ((["beam,beam"], "stands there twice"), (["beam,"], "no ''"), (["beams"], "no 'beams'")):
        with pytest.raises(ValueError, match=message):
            chosen_names(words, known)
