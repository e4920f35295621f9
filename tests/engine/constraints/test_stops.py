"""Stop strings as an automaton over token bytes. Guards: a stop that spans tokens, overlaps itself or hides inside
one token."""

from __future__ import annotations

import random

import pytest
import torch

from dsbd_cli.answer_forms import Reasoning, ReasoningMarks
from dsbd_cli.engine.constraints import stops as stop_tables
from dsbd_cli.engine.constraints.stops import StopSet, StopTable, find_stop

TOKENS = [b"a", b"b", b"ab", b"ba", b"aab", b"", b"c", b"\n", "é".encode(), "é".encode()[:1], "é".encode()[1:]]


def stopped_at(stops: tuple[str, ...], ids: list[int]) -> int | None:
    """Number of the token that completes a stop string, by the table."""
    table = StopTable(TOKENS, len(TOKENS), torch.device("cpu"))
    state = torch.tensor([[table.start(StopSet(stops))]])
    for number, token in enumerate(ids):
        state = table.step(state, torch.tensor([[token]]))
        if int(state) == 0:
            return number
    return None


def test_random_texts_stop_where_a_search_finds_them() -> None:
    draw = random.Random(0)
    stopped = 0
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
        stopped += expected is not None
        assert stopped_at(stops, ids) == expected
    assert 100 < stopped < 400


def test_a_character_split_over_two_tokens() -> None:
    assert stopped_at(("é",), [0, 9, 10, 0]) == 2
    assert stopped_at(("é",), [0, 10, 9, 0]) is None


def test_sets_of_several_requests_do_not_mix() -> None:
    table = StopTable(TOKENS, len(TOKENS), torch.device("cpu"))
    starts = torch.tensor([[table.start(StopSet(("ab",)))], [table.start(StopSet(("c",)))], [table.start(StopSet())]])
    assert table.start(StopSet(("ab",))) == int(starts[0])
    after = table.step(starts, torch.tensor([[2], [2], [2]]))
    assert (after == 0).flatten().tolist() == [True, False, False]
    assert (table.step(after, torch.tensor([[6], [6], [6]])) == 0).flatten().tolist() == [True, True, False]


def test_rows_of_dropped_sets_are_used_again_and_held_sets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose rows have stop strings of their own does not grow the table without end."""
    monkeypatch.setattr(stop_tables, "MOST_KEPT", 600)
    table = StopTable(TOKENS, len(TOKENS), torch.device("cpu"))
    draw, held, sizes = random.Random(1), list[tuple[StopSet, int]](), list[int]()
    for _ in range(300):
        stops = StopSet(("".join(draw.choice("abc") for _ in range(draw.randint(1, 6))),))
        held = held[-2:]
        table.forget({stops for stops, _ in held})
        held.append((stops, table.start(stops)))
        sizes.append(len(table.table))
        for earlier, first in held:  # those that an earlier row began with
            fresh = StopTable(TOKENS, len(TOKENS), torch.device("cpu"))
            states = torch.tensor([[first], [fresh.start(earlier)]])
            for token in (draw.randrange(len(TOKENS)) for _ in range(6)):
                tokens = torch.tensor([token])
                states = torch.stack([table.step(states[0], tokens), fresh.step(states[1], tokens)])
                assert (states[0] == 0) == (states[1] == 0)
    assert sizes[-1] == sizes[100] <= 120


def test_long_sets_of_rows_that_are_done_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 sets of 256 bytes were kept, of 150 MB each with a vocabulary of 152,000, and as much again as room."""
    monkeypatch.setattr(stop_tables, "MOST_KEPT", 20_000)
    table = StopTable(TOKENS, len(TOKENS), torch.device("cpu"))
    for number in range(60):
        stops = StopSet((f"{number:03}" + "ab" * 126,))
        table.forget({stops})
        table.start(stops)
    assert table.table.nbytes < 60_000  # a set takes 11,264


def test_text_is_cut_before_the_stop_that_completes_first() -> None:
    assert find_stop(b"one two three", ["three", "two"]) == (4, 7)
    assert find_stop(b"abcd", ["bcd", "c"]) == (2, 3)
    assert find_stop(b"abcd", ["cd", "bcd"]) == (1, 4)
    assert find_stop(b"abcd", []) is None


MARKED = [b"a", b"b", b"<t>", b"</t>", b"<", b"t>", b"</", b"/t>a", b" ", b"\n", b"<t>a", b"b</t>"]


def begins_to_count(written: bytes, opened: bool, message: bytes) -> int | None:
    """Oracle: the byte from which on stop strings count; None where that is not decided, or the text is reasoning."""
    lead = len(written) - len(written.lstrip())
    if not opened and not written[lead:].startswith(b"<t>"):
        return None if b"<t>".startswith(written[lead:]) else 0
    _, mark, behind = written[lead:].partition(b"</t>")
    if message and mark:
        _, mark, behind = behind.partition(message)
    return len(written) - len(behind.lstrip()) if mark else None


@pytest.mark.parametrize("message", ["", "b", "<t"])
@pytest.mark.parametrize("opened", [False, True])
def test_stop_strings_wait_for_the_end_of_the_reasoning(opened: bool, message: str) -> None:
    """message: what the answer stands behind once the reasoning has ended."""
    draw, counts = random.Random(1), dict.fromkeys(("never", "at once", "behind the reasoning", "late"), 0)
    reasoning = Reasoning(ReasoningMarks("<t>", ("</t>",), message=message), opened)
    for _ in range(500):
        stops = tuple({"".join(draw.choice("ab<t>/ \n") for _ in range(draw.randint(1, 3))) for _ in range(2)})
        table = StopTable(MARKED, len(MARKED), torch.device("cpu"))
        state = torch.tensor([[table.start(StopSet(stops, reasoning=reasoning))]])
        written, complete = b"", False
        for _ in range(9):
            token = draw.randrange(len(MARKED))
            state = table.step(state, torch.tensor([[token]]))
            # the automaton reads byte by byte, so a stop string counts wherever it is complete in the token
            complete = False
            for byte in MARKED[token]:
                written += bytes([byte])
                at = begins_to_count(written, opened, message.encode())
                assert at is None or reasoning.stops_at(written) == at
                complete |= at is not None and any(stop.encode() in written[at:] for stop in stops)
            assert (int(state) == 0) is complete, (written, stops)
            if complete:
                break
        inside = b"</t>" in written and (opened or written.lstrip().startswith(b"<t>"))
        late = not opened and written.lstrip().startswith(b"<") and not inside
        kind = "never" if not complete else "behind the reasoning" if inside else "late" if late else "at once"
        counts[kind] += 1
    del counts["at once" if opened else "never"], counts["late" if opened else "behind the reasoning"]
    assert min(counts.values()) > 15, counts


def test_what_was_written_before_counts_for_the_reasoning() -> None:
    """A text in two parts ends where the whole does, wherever it is parted: inside of a mark, behind it, in whitespace.
    The first part, as a prefix or in the prompt, ends nothing by itself."""
    draw, counts = random.Random(2), dict.fromkeys(("inside", "behind"), 0)
    for _ in range(600):
        marks = ReasoningMarks("<t>", ("</t>",), message=draw.choice(("", "<b>")))
        whole = b"<t>" + b"".join(draw.choice((b"a", b"</t>", b"</t><b>", b" ", b"<", b"b")) for _ in range(6))
        part = draw.randrange(3, len(whole) + 1)
        reasoning, stop = Reasoning(marks, False), draw.choice(("a", "b", " ", "<", "ab"))
        rest = reasoning.after(whole[:part])
        if rest is None:
            continue
        at = reasoning.stops_at(whole)
        position = -1 if at is None else whole.find(stop.encode(), at)
        expected = None if position < 0 else position + len(stop) - 1 - part
        table = StopTable([bytes([code]) for code in range(128)], 128, torch.device("cpu"))
        state, ended = torch.tensor([[table.start(StopSet((stop,), reasoning=rest))]]), None
        for number, byte in enumerate(whole[part:]):
            state = table.step(state, torch.tensor([[byte]]))
            if int(state) == 0:
                ended = number
                break
        assert ended == expected, (whole, part, stop)
        assert rest.stops_at(whole[part:]) == (None if at is None else at - part)
        counts["behind" if rest.before.startswith(b"</t>") else "inside"] += ended is not None and bool(rest.before)
    assert min(counts.values()) > 5, counts


def test_sets_with_reasoning_lie_beside_others() -> None:
    """Guards rows of the table: a set that waits, the same that has opened, and one that does not wait."""
    table = StopTable(MARKED, len(MARKED), torch.device("cpu"))
    marks = ReasoningMarks("<t>", ("</t>", "<b>"), calls=("b",))
    waiting = [StopSet(("a",), reasoning=Reasoning(marks, opened)) for opened in (False, True)]
    sets = [StopSet(("a",)), *waiting]
    state = torch.tensor([[table.start(stops)] for stops in sets])
    assert len(set(state.flatten().tolist())) == 3
    seen = []
    for token in (2, 0, 1, 0):  # <t>, a, b, a: the b ends the reasoning
        state = table.step(state, torch.full((3, 1), token))
        seen.append((state == 0).flatten().tolist())
    assert seen == [[False] * 3, [True, False, False], [True, False, False], [True, True, True]]
