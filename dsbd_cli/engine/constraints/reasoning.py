"""Stop strings that wait for the end of the reasoning: an automaton of stop strings, extended by the states before the
answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsbd_cli.answer_forms import WHITESPACE_BYTES, Reasoning

HIT = -1  # stands for a stop string that is complete, in a text that may still turn out to be a mark


def wait(
    goto: np.ndarray,
    complete: np.ndarray,
    marks: Sequence[tuple[np.ndarray, np.ndarray]],
    reasoning: Reasoning,
) -> tuple[np.ndarray, np.ndarray]:
    """Return an automaton in which stop strings are looked for in the answer alone. Its first state is its beginning.

    goto, complete: the automaton of the stop strings, [states, 256] and [states]. marks: automata of the marks that
    lead to the answer, one after another: those that end the reasoning, and that of the message where there is one.
    Whitespace behind them is no part of the answer. The text may begin with the mark of its reasoning, behind
    whitespace. Until that is decided a stop string ends nothing; where there is no mark, one that was complete ends the
    text at the byte that shows so.
    """
    begin = b"" if reasoning.opened else reasoning.marks.begin.encode()
    undecided = _undecided(goto, complete, begin) if begin else []
    first_end = len(undecided)
    lead = first_end + sum(len(mark_goto) for mark_goto, _ in marks)  # the state of the whitespace before the answer
    first_stop = lead + 1
    states = np.concatenate((np.zeros((first_stop, 256), dtype=np.int64), goto + first_stop))
    first = first_end
    for mark_goto, mark_complete in marks:
        behind = first + len(mark_goto)  # a mark leads to the first state of what follows
        states[first:behind] = np.where(mark_complete[mark_goto], behind, mark_goto + first)
        first = behind
    states[lead] = states[first_stop]
    states[lead, list(WHITESPACE_BYTES)] = lead
    inside = _walk(states, first_end, begin)  # where the reasoning begins: its first mark may begin one that ends it
    dead = first_stop + int(np.flatnonzero(complete)[0])
    numbers = {state: number for number, state in enumerate(undecided)}
    for (matched, stop), number in numbers.items():
        for byte in range(256):
            after = _after(goto, complete, stop, byte)
            if byte == begin[matched] and matched + 1 == len(begin):
                states[number, byte] = inside
            elif byte == begin[matched]:
                states[number, byte] = numbers[matched + 1, after]
            elif not matched and byte in WHITESPACE_BYTES:
                states[number, byte] = numbers[0, after]
            else:
                states[number, byte] = dead if after == HIT else after + first_stop
    complete = np.concatenate((np.zeros(first_stop, dtype=np.bool_), complete))
    start = _walk(states, 0, reasoning.before)
    return (np.roll(states, -start, axis=0) - start) % len(states), np.roll(complete, -start)


def _walk(states: np.ndarray, state: int, read: bytes) -> int:
    """Return the state after more bytes."""
    for byte in read:
        state = int(states[state, byte])
    return state


def _undecided(goto: np.ndarray, complete: np.ndarray, begin: bytes) -> list[tuple[int, int]]:
    """Return the states of a text that may still be the first mark: (bytes of the mark, state of the stop strings)."""
    starts = [(0, 0)]
    for matched, stop in starts:  # it grows
        following = [(byte, 0) for byte in WHITESPACE_BYTES] if not matched else []
        if matched + 1 < len(begin):
            following.append((begin[matched], matched + 1))
        for byte, then in following:
            state = then, _after(goto, complete, stop, byte)
            if state not in starts:
                starts.append(state)
    return starts


def _after(goto: np.ndarray, complete: np.ndarray, stop: int, byte: int) -> int:
    """Return the state of the stop strings after one more byte."""
    if stop == HIT:
        return HIT
    after = int(goto[stop, byte])
    return HIT if complete[after] else after
