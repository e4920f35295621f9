"""What is read when, and how many run together; without models.

Guards requests that change places after a failure, steps counted twice, and reading ahead without bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.decoding.scheduler import READ_AHEAD, RequestQueue, Scheduler
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.iteration.request_state import CompletionOrder, RequestState
from dsbd_cli.errors import InvalidRowError, RowError
from dsbd_cli.requests import MOST_FAILED, NumberedRequests, Request
from tests.helpers.toys import NumberCodec, table_pair

BAD = 3


class Encoder:
    """Refuses one request."""

    def job(self, number: int, request: Request) -> RequestState:
        if number == BAD:
            raise InvalidRowError("bad")
        return RequestState(number, request, [1, 2])


def queue(count: int, held: int = 0) -> tuple[RequestQueue, list[int]]:
    """A queue of so many requests, and the numbers of those that were read. held: results that wait."""
    read: list[int] = []

    def requests() -> Iterator[Request]:
        for number in range(count):
            read.append(number)
            yield Request("a", id=str(number), seed=number)

    results: Any = CompletionOrder()
    results.held = held
    return RequestQueue(NumberedRequests(requests()), Encoder(), results, Observer()), read  # type: ignore[arg-type]


def scheduler(rows: int) -> Scheduler:
    return Scheduler(SimpleNamespace(), MethodConfig(depth=0), rows)  # type: ignore[arg-type]


def batch(rows: int, taken: int) -> Any:
    return SimpleNamespace(jobs=[object()] * rows, free=list(range(taken, rows)))


def numbers(some: RequestQueue) -> list[int]:
    return [job.number for job in some.waiting]


def test_a_batch_is_read_and_no_more_and_a_bad_request_takes_no_row() -> None:
    some, read = queue(9)
    scheduler(4).fill(some)
    assert (numbers(some), read) == ([0, 1, 2, 4], [0, 1, 2, 3, 4])
    assert [result.request.id for result in some.results.ready()] == ["3"]  # type: ignore[attr-defined]
    assert not some.exhausted


def test_results_of_requests_that_fail_go_out_before_all_are_read() -> None:
    """A file of bad lines was read to its end, and held in memory, before the first record was written."""
    made = Engine(table_pair(1, 12, 0.5)[0], None, NumberCodec(12, (2,)), MethodConfig(num_beams=2, depth=0))
    read = list[int]()

    def requests() -> Iterator[Request | RowError]:
        for number in range(3000):
            read.append(number)
            yield Request("1 2") if number == 0 else Request("") if number % 2 else InvalidRowError("bad")

    for ordered in (True, False):
        read.clear()
        for index, _ in enumerate(made.run(requests(), ordered=ordered)):
            assert len(read) < index + 1000
        assert index + 1 == 3000


def test_requests_that_fail_first_do_not_decide_how_many_rows_fit() -> None:
    """A batch of one row was taken for the whole run where 256 bad requests came first."""
    made = Engine(
        table_pair(1, 12, 0.5)[0], None, NumberCodec(12, (2,)), MethodConfig(num_beams=2, depth=0), batch_size=None
    )
    bad: list[Request | RowError] = [InvalidRowError("bad")] * MOST_FAILED
    results = list(made.run([*bad, *(Request("1 2") for _ in range(8))]))
    assert [result.error is None for result in results] == [False] * len(bad) + [True] * 8
    assert made.batch_size > 1


def test_free_rows_are_filled_unless_too_many_results_wait_or_a_larger_batch_can_begin() -> None:
    made = scheduler(4)
    for held, rows, wanted in ((0, 4, [0, 1]), (READ_AHEAD * 4, 4, []), (0, 3, [])):
        some, _ = queue(9, held)
        made.refill(some, batch(rows, taken=rows - 2))
        assert numbers(some) == wanted


def test_requests_of_a_failed_batch_come_first_in_their_order_and_begin_anew() -> None:
    made, (some, _) = scheduler(2), queue(9)
    made.fill(some)
    running = [some.waiting.popleft(), some.waiting.popleft()]
    some.read(1)
    running[0].stats.steps, made.steps = 5, 7
    made.retry(some, running)
    assert numbers(some) == [0, 1, 2]
    assert (made.steps, running[0].stats.steps) == (2, 0)


def test_half_as_many_rows_run_after_out_of_memory_and_one_at_least() -> None:
    made = scheduler(8)
    made.ran(batch(5, 5))
    for count, rows in ((5, 2), (1, 1), (0, 5)):
        made.lower_rows(count)
        assert made.rows == rows
    assert made.batch_size == 8
