"""The scheduler, which decides which request gets which row, and when it is read. It holds requests on the host, and no
tensors of an iteration."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.cache.caches import Caches
from dsbd_cli.engine.decoding.batch import Batch, most_steps
from dsbd_cli.engine.decoding.encode import Encoder
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.iteration.request_state import RequestState, Results
from dsbd_cli.engine.planning.memory_limit import REQUESTS_SEEN, fitting_rows
from dsbd_cli.engine.planning.planner import deepest
from dsbd_cli.errors import RowError
from dsbd_cli.requests import MOST_FAILED, NumberedRequests, Request, RequestResult
from dsbd_cli.stats import RequestStats

READ_AHEAD = 4  # batches


class RequestQueue:
    """Requests of one run: read from its source, encoded, and waiting for a row.

    Attributes:
        waiting: encoded requests, in order. results: receives the errors of requests that cannot be decoded.
    """

    def __init__(
        self, requests: NumberedRequests, encoder: Encoder, results: Results[object], observer: Observer
    ) -> None:
        self.waiting, self.results = deque[RequestState](), results
        self._requests, self._encoder, self._observer = requests, encoder, observer

    @property
    def exhausted(self) -> bool:
        """Whether the end of the source has been seen."""
        return self._requests.exhausted()

    @property
    def finished(self) -> bool:
        """Whether no request waits and none is to come."""
        return self.exhausted and not self.waiting

    def read(self, count: int) -> None:
        """Read up to `count` requests that can be decoded. A request that cannot be gets its result at once, and
        MOST_FAILED of them end the reading, so that their results go out before more are read."""
        failed = 0
        while count > 0 and failed < MOST_FAILED and (item := self._requests.next()) is not None:
            number, request = item
            if isinstance(request, RowError):
                self.results.put(number, RequestResult(Request("", id=str(number)), (), 0, RequestStats(), request))
                failed += 1
                continue
            try:
                with self._observer.span("tokenise"):
                    job = self._encoder.job(number, request)
                self.waiting.append(job)
                count -= 1
            except RowError as error:
                self.results.put(number, RequestResult(request, (), 0, RequestStats(), error))
                failed += 1


class Scheduler:
    """Policy of how many requests run together, and of how far ahead they are read.

    Attributes:
        batch_size: rows of a batch as asked for, or as many as fit into memory once requests were seen.
        rows: most rows of the next batch; out of memory lowers it.
        steps: taken by all requests so far, including unfinished ones.
    """

    def __init__(self, caches: Caches, method: MethodConfig, batch_size: int | None) -> None:
        """batch_size: None for as many rows as fit into memory."""
        self._caches, self._method = caches, method
        self.batch_size = self.rows = batch_size or 1
        self.steps = 0
        self._fit_batch = batch_size is None
        self._most_rows_run = 1  # most rows that have run

    def fill(self, queue: RequestQueue) -> None:
        """Read a whole batch. The first batch decides how many rows fit into memory, where no batch size was given."""
        if self._fit_batch:
            queue.read(REQUESTS_SEEN)
            self._fit_rows(queue.waiting)
            if self._fit_batch:  # all of these have failed: their results go out before more are read
                return
        queue.read(self.rows - len(queue.waiting))

    def ending(self, queue: RequestQueue, batch: Batch) -> bool:
        """Return whether a running batch takes no further requests: it began small, because little was ready, and ends
        so that a larger one can begin."""
        return len(batch.jobs) < self.rows and not queue.exhausted

    def refill(self, queue: RequestQueue, batch: Batch) -> None:
        """Read requests for the free rows of a running batch."""
        if not self.ending(queue, batch) and queue.results.held < READ_AHEAD * self.batch_size:
            queue.read(len(batch.free) - len(queue.waiting))

    def ran(self, batch: Batch) -> None:
        """Record that this many rows have run together."""
        self._most_rows_run = max(self._most_rows_run, len(batch.jobs))

    def retry(self, queue: RequestQueue, jobs: Sequence[RequestState]) -> None:
        """Put requests whose batch has ended back to the front of the queue. They begin again."""
        for job in jobs:
            self.steps -= job.stats.steps
            job.stats = RequestStats()
        queue.waiting.extendleft(reversed(jobs))

    def lower_rows(self, count: int) -> None:
        """Halve the batch: take half of `count`, the rows that ran out of memory. Where count is 0, take as many rows
        as have run before, because a row that fails alone says nothing about how many others fit."""
        self.rows = max(1, count // 2) if count else self._most_rows_run

    def nodes(self, jobs: Iterable[RequestState]) -> int:
        """Return the most nodes of one row in an iteration of these requests."""
        return deepest(self._method, most_steps(jobs)).nodes(self._method.num_beams)

    def _fit_rows(self, seen: Sequence[RequestState]) -> None:
        """Set the batch size to what memory allows, judged by the requests seen first."""
        if seen:
            nodes = self.nodes(seen)
            slots = self._caches.round_slots(max(len(job.prompt) + job.max_new for job in seen) + 2 * nodes)
            encoder_bytes = max(self._caches.encoder_bytes(job.encoder_input) for job in seen)
            self.batch_size = self.rows = fitting_rows(self._caches.models, slots, nodes, beside=encoder_bytes)
            self._fit_batch = False
