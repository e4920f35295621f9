"""The window over random schedules of answers and deaths: every number is given out exactly once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsbd_cli.scale.window import ALONE_AFTER, MAX_DEATHS, Window

Given = list[tuple[int, str]]


def drive(
    rows: int, workers: int, capacity: int, ahead: int | None, seed: int, deadly: frozenset[int], death: float
) -> tuple[Given, Window, dict[int, int]]:
    """Work everything off. Workers die with probability `death` per step, and always of a deadly row that has begun."""
    dice = random.Random(seed)
    window = Window(capacity, ahead)
    out: dict[int, list[int]] = {}
    answers, read, deaths = Given(), 0, dict.fromkeys(range(rows), 0)
    for _ in range(200_000):
        while read < rows and window.room:
            number = window.add_answered("known") if read % 7 == 3 else window.read(read)
            assert number == read
            read += 1
        assert window.room == 0 or read == rows or not out
        answers += window.ready()
        if read == rows and window.finished:
            return answers, window, deaths
        worker = dice.randrange(workers)
        if worker not in out:
            if dice.random() < 0.5:
                window.join(worker)
                out[worker] = []
            continue
        for number, request in window.take(worker):
            assert number == request
            out[worker].append(number)
        held = out[worker]
        assert len(held) == window.holds(worker) <= capacity
        suspects = [number for number in held if deaths[number] >= ALONE_AFTER]
        assert not suspects or len(held) == 1
        begun = [number for number in held[: max(1, capacity // 2)] if number in deadly]
        if dice.random() < death / 4:  # Ray itself has died, which counts against no row
            assert window.recall(worker) == len(held)
            del out[worker]
        elif begun or dice.random() < death:
            for number in held:
                deaths[number] += 1
            for number in window.lose(worker):
                assert deaths[number] == MAX_DEATHS
                window.give_up(number, "given up")
            del out[worker]
        elif held:
            done = held.pop(dice.randrange(min(len(held), max(1, capacity // 2))))
            assert window.is_out(worker, done)
            window.answer(worker, done, "answered")
            assert not window.is_out(worker, done)
    raise AssertionError("the window stands still")


SCHEDULES = given(
    rows=st.integers(0, 60),
    workers=st.integers(1, 5),
    capacity=st.integers(1, 6),
    ahead=st.integers(1, 40),
    ordered=st.booleans(),
    seed=st.integers(0, 2**32),
    death=st.sampled_from([0.0, 0.05, 0.3]),
    deadly=st.frozensets(st.integers(0, 59), max_size=3),
)


@SCHEDULES
def test_every_number_is_given_out_once(
    rows: int, workers: int, capacity: int, ahead: int, ordered: bool, seed: int, death: float, deadly: frozenset[int]
) -> None:
    deadly = frozenset(number for number in deadly if number % 7 != 3)
    answers, window, deaths = drive(rows, workers, capacity, ahead if ordered else None, seed, deadly, death)
    numbers = [number for number, _ in answers]
    assert (numbers if ordered else sorted(numbers)) == list(range(rows))
    assert not window.waits
    for number, answer in answers:
        wanted = "known" if number % 7 == 3 else "given up" if deaths[number] == MAX_DEATHS else "answered"
        assert answer == wanted
        assert number not in deadly or answer == "given up"


def test_one_poisonous_row_takes_no_other_with_it() -> None:
    """Guards against giving up the neighbours of a row that kills its workers: they were out at the same deaths."""
    answers, _, deaths = drive(20, 2, 8, 1000, 0, frozenset({5}), 0.0)
    assert [number for number, answer in answers if answer == "given up"] == [5]
    assert max(deaths[number] for number in range(20) if number != 5) <= ALONE_AFTER


def test_a_window_that_gives_up_at_the_second_death_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr("dsbd_cli.scale.window.MAX_DEATHS", 2)
    monkeypatch.setattr("dsbd_cli.scale.window.ALONE_AFTER", 2)
    window = Window(2, None)
    window.join(0)
    lost = []
    for number in range(2):
        window.read(number)
    for _ in range(2):
        window.take(0)
        lost += window.lose(0)
        window.join(0)
    assert lost == [0, 1]


def test_all_workers_hold_about_as_much() -> None:
    """Guards against a first worker that takes all rows of a short input."""
    window = Window(16, None)
    for worker in range(4):
        window.join(worker)
    for number in range(10):
        window.read(number)
    assert [len(window.take(worker)) for worker in range(4)] == [3, 3, 3, 1]


def test_the_oldest_rows_go_first() -> None:
    window = Window(2, 10)
    window.join(0)
    window.join(1)
    assert window.room == 4
    for number in range(4):
        window.read(number)
    assert [number for number, _ in window.take(0)] == [0, 1]
    assert [number for number, _ in window.take(1)] == [2, 3]
    assert window.lose(0) == []
    window.answer(1, 2, "")
    window.answer(1, 3, "")
    assert list(window.ready()) == []  # 0 and 1 are still to come
    assert [number for number, _ in window.take(1)] == [0, 1]


def test_nothing_is_read_further_ahead_than_allowed() -> None:
    window = Window(2, 3)
    window.join(0)
    for number in range(2):
        window.read(number)
    window.take(0)
    window.answer(0, 1, "")
    assert window.room == 1
    window.read(2)
    window.take(0)
    window.answer(0, 2, "")
    assert window.room == 0  # 0 is still out, 1 and 2 wait for it
    window.answer(0, 0, "")
    assert [number for number, _ in window.ready()] == [0, 1, 2]
    assert window.room == 2
