"""Stop strings that wait for the end of the reasoning: an automaton of stop strings, extended by the states before the
answer."""

from __future__ import annotations

import numpy as np

from dsbd_cli.answer_forms import WHITESPACE_BYTES, Reasoning

HIT = -1  # stands for a stop string that is complete, in a text that may still turn out to be a mark


def wait(
    goto: np.ndarray, complete: np.ndarray, ends: tuple[np.ndarray, np.ndarray], reasoning: Reasoning
) -> tuple[np.ndarray, np.ndarray]:
    """Return an automaton in which stop strings are looked for in the answer alone. Its first state is its beginning.

    goto, complete: the automaton of the stop strings, [states, 256] and [states]. ends: that of the marks which end the
    reasoning. The text may begin with the mark of its reasoning, behind whitespace. Until that is decided a stop string
    ends nothing; where there is no mark, one that was complete ends the text at the byte that shows so.
    """
    end_goto, end_complete = ends
    begin = b"" if reasoning.opened else reasoning.marks.begin.encode()
    undecided = _undecided(goto, complete, begin) if begin else []
    first_end = len(undecided)
    first_stop = first_end + len(end_goto)
    states = np.concatenate((np.zeros((first_stop, 256), dtype=np.int64), goto + first_stop))
    # a mark that ends the reasoning leads to the first state of the stop strings
    states[first_end:first_stop] = np.where(end_complete[end_goto], first_stop, end_goto + first_end)
    inside = 0  # state of the marks that end the reasoning, once the first mark is read, in which one may have begun
    for byte in begin:
        inside = int(end_goto[inside, byte])
    dead = first_stop + int(np.flatnonzero(complete)[0])
    numbers = {state: number for number, state in enumerate(undecided)}
    for (matched, stop), number in numbers.items():
        for byte in range(256):
            after = _after(goto, complete, stop, byte)
            if byte == begin[matched] and matched + 1 == len(begin):
                states[number, byte] = first_end + inside
            elif byte == begin[matched]:
                states[number, byte] = numbers[matched + 1, after]
            elif not matched and byte in WHITESPACE_BYTES:
                states[number, byte] = numbers[0, after]
            else:
                states[number, byte] = dead if after == HIT else after + first_stop
    return states, np.concatenate((np.zeros(first_stop, dtype=np.bool_), complete))


def _undecided(goto: np.ndarray, complete: np.ndarray, begin: bytes) -> list[tuple[int, int]]:
    """Return the states of a text that may still be the first mark: (bytes of the mark, state of the stop strings)."""
    found = [(0, 0)]
    for matched, stop in found:  # it grows
        following = [(byte, 0) for byte in WHITESPACE_BYTES] if not matched else []
        if matched + 1 < len(begin):
            following.append((begin[matched], matched + 1))
        for byte, then in following:
            state = then, _after(goto, complete, stop, byte)
            if state not in found:
                found.append(state)
    return found


def _after(goto: np.ndarray, complete: np.ndarray, stop: int, byte: int) -> int:
    """Return the state of the stop strings after one more byte."""
    if stop == HIT:
        return HIT
    after = int(goto[stop, byte])
    return HIT if complete[after] else after
