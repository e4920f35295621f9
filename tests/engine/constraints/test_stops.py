"""Stop strings as an automaton over token bytes. Guards: a stop that spans tokens, overlaps itself or hides inside
one token."""

from __future__ import annotations

import random

import torch

from dsbd_cli.engine.constraints.stops import StopTable, find_stop

TOKENS = [b"a", b"b", b"ab", b"ba", b"aab", b"", b"c", b"\n", "é".encode(), "é".encode()[:1], "é".encode()[1:]]


def stopped_at(stops: tuple[str, ...], ids: list[int]) -> int | None:
    """Number of the token that completes a stop string, by the table."""
    table = StopTable(TOKENS, len(TOKENS), torch.device("cpu"))
    state = torch.tensor([[table.start(stops)]])
    for number, token in enumerate(ids):
        state = table.step(state, torch.tensor([[token]]))
        if int(state) == 0:
            return number
    return None


def test_random_texts_stop_where_a_search_finds_them() -> None:
    draw = random.Random(0)
    found = 0
    for _ in range(400):
        stops = tuple(
            {"".join(draw.choice("abc") for _ in range(draw.randint(1, 4))) for _ in range(draw.randint(1, 3))}
        )
        ids = [draw.randrange(len(TOKENS)) for _ in range(8)]
        expected, text = None, b""
        for number, token in enumerate(ids):
            text += TOKENS[token]
            if any(stop.encode() in text for stop in stops):
                expected = number
                break
        found += expected is not None
        assert stopped_at(stops, ids) == expected
    assert 100 < found < 400


def test_a_character_split_over_two_tokens() -> None:
    assert stopped_at(("é",), [0, 9, 10, 0]) == 2
    assert stopped_at(("é",), [0, 10, 9, 0]) is None


def test_sets_of_several_requests_do_not_mix() -> None:
    table = StopTable(TOKENS, len(TOKENS), torch.device("cpu"))
    starts = torch.tensor([[table.start(("ab",))], [table.start(("c",))], [table.start(())]])
    assert table.start(("ab",)) == int(starts[0])
    after = table.step(starts, torch.tensor([[2], [2], [2]]))
    assert (after == 0).flatten().tolist() == [True, False, False]
    assert (table.step(after, torch.tensor([[6], [6], [6]])) == 0).flatten().tolist() == [True, True, False]


def test_text_is_cut_before_the_stop_that_completes_first() -> None:
    assert find_stop(b"one two three", ["three", "two"]) == 4
    assert find_stop(b"abcd", ["bcd", "c"]) == 2
    assert find_stop(b"abcd", ["cd", "bcd"]) == 1
    assert find_stop(b"abcd", []) is None
