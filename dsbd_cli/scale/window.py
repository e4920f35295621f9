"""The rows between input and output: which wait, which are out at which worker, and which may be given out. There is no
Ray and no clock here, so that tests can run all of it with random deaths."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dsbd_cli.requests import Request, RequestResult

MAX_DEATHS = 3  # deaths of workers that held a row, after which the row has failed
ALONE_AFTER = MAX_DEATHS - 1  # deaths after which a row is sent to a worker that holds nothing else


@dataclass(slots=True)
class _PendingRow:
    """A row that has been read and not answered yet. deaths: of workers that held it."""

    request: Request
    deaths: int = 0


class Window:
    """The rows between an input and several workers that may die. Rows are numbered from 0 as they are read.

    Every number is given out exactly once, with an answer or as given up, in input order or as answers come.
    """

    def __init__(self, capacity: int, ahead: int | None) -> None:
        """capacity: most rows at one worker. ahead: most rows that are read and not given out; answers are then given
        out in input order. None: they are given out as they come, without this limit."""
        assert capacity >= 1
        assert ahead is None or ahead >= 1
        self.capacity, self._ahead = capacity, ahead
        self._rows: dict[int, _PendingRow] = {}
        self._waiting: list[int] = []  # a heap: the oldest row goes first
        self._alone: list[int] = []  # a heap of the rows to be sent alone
        self._out: dict[int, set[int]] = {}  # by worker: numbers of the rows that it holds
        self._quarantine: int | None = None  # the worker that gets the rows to be sent alone
        self._answered: dict[int, RequestResult] = {}
        self._read = self._given_out = 0  # how many rows were read, and given out

    # Input and output

    @property
    def room(self) -> int:
        """Number of rows that may be read now: as many as the workers can take, and no further ahead than allowed."""
        free = sum(self.capacity - len(out) for out in self._out.values()) - len(self._waiting) - len(self._alone)
        return max(0, free if self._ahead is None else min(free, self._ahead - (self._read - self._given_out)))

    @property
    def finished(self) -> bool:
        """Whether all rows that were read have been given out."""
        return self._read == self._given_out

    @property
    def waits(self) -> bool:
        """Whether a row waits for a worker."""
        return bool(self._waiting or self._alone)

    def read(self, request: Request) -> int:
        """Add a row of the input and return its number."""
        number = self._number()
        self._rows[number] = _PendingRow(request)
        heapq.heappush(self._waiting, number)
        return number

    def add_answered(self, answer: RequestResult) -> int:
        """Add a row of the input that needs no worker, because its answer is known, and return its number."""
        number = self._number()
        self._answered[number] = answer
        return number

    def ready(self) -> Iterator[tuple[int, RequestResult]]:
        """Yield the answers whose turn has come, with the numbers of their rows, each once."""
        while self._answered:
            number = next(iter(self._answered)) if self._ahead is None else self._given_out
            if number not in self._answered:
                return
            self._given_out += 1
            yield number, self._answered.pop(number)

    def _number(self) -> int:
        self._read += 1
        return self._read - 1

    # Workers

    def join(self, worker: int) -> None:
        """Let this worker take rows from now on."""
        assert worker not in self._out
        self._out[worker] = set()

    def holds(self, worker: int) -> int:
        """Return the number of rows that are out at this worker."""
        return len(self._out.get(worker, ()))

    def take(self, worker: int) -> list[tuple[int, Request]]:
        """Return the rows to be sent to this worker now, so that all workers hold about equally many."""
        out = self._out[worker]
        if self._alone and self._quarantine is None:
            self._quarantine = worker
        if worker == self._quarantine:
            if self._alone and not out:
                return [self._sent(worker, heapq.heappop(self._alone))]
            if self._alone or any(self._rows[number].deaths >= ALONE_AFTER for number in out):
                return []
            self._quarantine = None
        others = [held for worker, held in self._out.items() if worker != self._quarantine]
        rows_each = -(-(len(self._waiting) + sum(map(len, others))) // len(others))
        count = min(self.capacity, rows_each) - len(out)
        return [self._sent(worker, heapq.heappop(self._waiting)) for _ in range(min(count, len(self._waiting)))]

    def _sent(self, worker: int, number: int) -> tuple[int, Request]:
        self._out[worker].add(number)
        return number, self._rows[number].request

    def is_out(self, worker: int, number: int) -> bool:
        """Return whether the row is out at this worker, so that the worker's answer counts."""
        return number in self._out.get(worker, ())

    def answer(self, worker: int, number: int, answer: RequestResult) -> None:
        """Take a worker's answer to a row that is out at it."""
        self._out[worker].remove(number)
        del self._rows[number]
        self._answered[number] = answer

    def request(self, number: int) -> Request:
        """Return the request of a row that is not answered."""
        return self._rows[number].request

    def lose(self, worker: int) -> list[int]:
        """Remove a worker that died. Its rows wait again, except those that have seen too many deaths. The numbers of
        these are returned, and `give_up` has to be called for each."""
        out = self._taken_from(worker)
        for number in out:
            self._rows[number].deaths += 1
        given_up = [number for number in out if self._rows[number].deaths >= MAX_DEATHS]
        self._wait(set(out).difference(given_up))
        return given_up

    def recall(self, worker: int) -> int:
        """Remove a worker that is gone through no fault of its rows, and return their number. They wait again."""
        out = self._taken_from(worker)
        self._wait(out)
        return len(out)

    def _taken_from(self, worker: int) -> list[int]:
        """Remove a worker and return the numbers of its rows."""
        if self._quarantine == worker:
            self._quarantine = None
        return sorted(self._out.pop(worker, ()))

    def _wait(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            heapq.heappush(self._alone if self._rows[number].deaths >= ALONE_AFTER else self._waiting, number)

    def give_up(self, number: int, answer: RequestResult) -> None:
        """Set the answer of a row that `lose` has given up."""
        del self._rows[number]
        self._answered[number] = answer

    def leave(self, worker: int) -> None:
        """Remove a worker that holds nothing and is not needed any more."""
        assert not self._out[worker]
        del self._out[worker]
        if self._quarantine == worker:
            self._quarantine = None
