"""Workers that are Ray actors: started, given rows, and replaced when they die.

Ray gives places, processes and messages. The window decides what is sent where, and how often. A dead worker is
replaced by a new actor, wherever Ray finds room for it. A dead Ray of our own is started again, once in a run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsbd_cli.config.variant import Exactness
from dsbd_cli.errors import DsbdError, NoWorkersError, RowError, UsageError, WorkerLostError, plural, shorten
from dsbd_cli.models.checkpoints.hub import locate
from dsbd_cli.requests import MOST_FAILED, EngineInfo, NumberedRequests, Request, RequestResult
from dsbd_cli.scale.cluster import Cluster
from dsbd_cli.scale.window import MAX_DEATHS, Window
from dsbd_cli.scale.worker import Exchange, Failure, Worker, WorkerInfo, WorkerSetup
from dsbd_cli.stats import RequestStats
from dsbd_cli.threads import processors

if TYPE_CHECKING:
    import ray
    from ray.actor import ActorHandle

HELD_BATCHES = 2  # rows at a worker, in batches: one that runs, one that waits in its inbox
AHEAD = 8  # rows that are read ahead to keep the input's order, as a multiple of what all workers can hold
AGAIN_S = 0.5  # before a dead worker is replaced: its node may shut down, or Ray itself, which takes a moment
WAIT_S = 0.5  # for an answer; a signal is heeded after this time
IDLE_S = 0.01
USELESS_DEATHS = 32  # so many before the first answer end the run; with more than ten workers MAX_DEATHS for each
SLOW_START_S = 30.0  # where workers are still missing after this time, a warning says what they wait for


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Number of workers, their place and their resources.

    Attributes:
        least, most: workers; the run begins when `least` have loaded. most None: as many as the GPUs allow.
        address: of a running Ray (`auto`: the one of this machine); None: start one and stop it in the end.
        gpus: of each worker; None: one for each of its processes, where Ray has any.
        processes: of each worker, see ModelSpec.tensor_parallel.
        timeout_s: a worker that gives no sign of life for this time is replaced.
    """

    least: int
    most: int | None
    address: str | None = None
    gpus: int | None = None
    processes: int = 1
    timeout_s: float = 600.0


@dataclass(slots=True)
class WorkerReport:
    """Report of what one worker did. A worker that was replaced keeps its number.

    seconds: since its last start, or of its life where it has ended, loading included.
    """

    worker: int
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    deaths: int = 0
    host: str | None = None
    device: str | None = None


@dataclass(slots=True, eq=False)
class _WorkerSlot:
    """A worker as the driver sees it."""

    report: WorkerReport
    actor: ActorHandle[Worker] | None = None  # None: not started, or to be started again
    lost: str | None = None  # why Ray takes its process for dead
    lost_at: float = 0.0
    started_at: float = 0.0
    call: ray.ObjectRef[object] | None = None
    called: float = 0.0
    alive: bool = False  # this actor has answered, so silence means that it hangs
    joined: bool = False  # it is loaded and takes rows
    gone: bool = False  # given up, or given back
    deaths_without_answer: int = 0  # deaths one after the other without a row answered
    steps_before: int = 0  # of rows that earlier actors have finished
    steps_finished: int = 0  # of rows that this one has finished
    steps: int = 0  # of this one, of unfinished rows too

    @property
    def number(self) -> int:
        return self.report.worker


class RayEngine:
    """The workers together, with the interface of one Engine: `run`, `stop`, `steps`, `info`, `exactness`."""

    def __init__(
        self,
        setup: WorkerSetup,
        config: PoolConfig,
        warn: Callable[[str], None],
        give_up: Callable[[str], None],
    ) -> None:
        """Silence Ray until `close`. warn: called with a message on deaths and slow starts. give_up: called in a thread
        with what of Ray has died, where that holds the main thread; it has to end the process."""
        self._setup, self._config, self._warn = setup, config, warn
        self._stopping = self._ray_restarted = False
        self._cluster = Cluster(config.address, give_up)
        self._workers: list[_WorkerSlot] = []
        self._capacity = HELD_BATCHES * setup.batch_size  # rows at one worker
        self._window = Window(self._capacity, None)  # empty until `run` makes its own
        self._info: WorkerInfo | None = None
        self._weaker_exactness: Exactness | None = None
        self._last_death = ""
        self._told = set[str]()  # lines of workers

    def start(self) -> None:
        """Start Ray and the workers, and wait until enough of them have loaded.

        Raises UsageError where the machine has too little for them, or the workers differ; the error of a worker that
        cannot load; DsbdError where Ray cannot be reached; NoWorkersError where it cannot be started, or all is lost.
        """
        if self._config.address is None:  # with a Ray of other machines, this one may be without the models
            for model in self._setup.models:
                locate(model)
        try:
            nodes = self._cluster.start(self._cpus_of_ray)
        except DsbdError as error:
            if self._config.address is not None:
                raise
            nodes = self._restart_ray(self._cluster.death or str(error))
        self._share_out(nodes)
        self._wait_for_workers()

    @property
    def info(self) -> EngineInfo | None:
        """Info of the first worker's engine. The others have the same models, dtypes and kind of device."""
        return self._loaded.engine

    @property
    def exactness(self) -> Exactness:
        """Exactness of the output, compared with plain decoding.

        It is that of the loaded workers, or a weaker one where a kernel has failed since in some worker's engine.
        """
        return self._weaker_exactness or self._loaded.exactness

    @property
    def allowed(self) -> str | None:
        """Description of what the catalogues hold."""
        return self._loaded.allowed

    @property
    def _loaded(self) -> WorkerInfo:
        """Facts of the first worker."""
        assert self._info is not None
        return self._info

    @property
    def steps(self) -> int:
        """Steps taken so far, those of unfinished requests included."""
        return sum(worker.steps_before + worker.steps for worker in self._workers)

    @property
    def reports(self) -> list[WorkerReport]:
        """Reports of what each worker did."""
        for worker in self._workers:
            if worker.actor is not None:
                worker.report.seconds = round(time.monotonic() - worker.started_at, 3)
        return [worker.report for worker in self._workers]

    def describe(self) -> str:
        """Return the state of the workers, as in `3 of 4 workers, 1 death`."""
        if not self._workers:
            return "Ray starts"
        deaths = sum(report.deaths for report in self.reports)
        text = f"{sum(worker.joined for worker in self._workers)} of {len(self._workers)} workers"
        return text + (f", {plural(deaths, 'death')}" if deaths else "")

    def stop(self) -> None:
        """Ask `run` to end, for good. Requests that are not done give no result."""
        self._stopping = True

    def close(self) -> None:
        """End the workers, and Ray where it was started here. May be called twice."""
        for worker in self._workers:
            self._end(worker)
        self._cluster.close()

    def run(
        self, requests: Iterable[Request | str | RowError | None], *, ordered: bool = True
    ) -> Iterator[RequestResult]:
        """Run requests as Engine.run does. A request that was out at the deaths of three workers fails with
        WorkerLostError.

        Raises NoWorkersError when no worker is left, too many died before the first answer, or Ray has died for good.
        """
        ahead = AHEAD * self._capacity * len(self._workers)
        self._window = Window(self._capacity, ahead if ordered else None)
        for worker in self._workers:
            if worker.joined:
                self._window.join(worker.number)
        numbered = NumberedRequests(requests)
        while not self._stopping:
            starved = self._read(numbered)
            for _, result in self._window.ready():
                yield result
            if numbered.exhausted() and self._window.finished:
                return
            self._send(ended=numbered.exhausted())
            self._receive(0.0 if starved else WAIT_S)

    # Rows

    def _read(self, numbered: NumberedRequests) -> bool:
        """Read the requests that there is room for, and no more than MOST_FAILED that have failed already. Return True
        where the input has nothing ready, or the results of these are to go out first."""
        window, failed = self._window, 0
        while window.room > 0 and not numbered.exhausted():
            item = numbered.next()
            if item is None:
                return not numbered.exhausted()
            number, request = item
            if not isinstance(request, RowError):
                window.read(request)
                continue
            window.add_answered(RequestResult(Request("", id=str(number)), (), 0, RequestStats(), request))
            failed += 1
            if failed == MOST_FAILED:
                return True
        return False

    def _send(self, *, ended: bool) -> None:
        """Call every worker that has no open call: with rows, for answers, or to ask whether it is loaded. Those that
        have died are replaced. ended: there are no more rows to read, so that a worker with nothing to do is given
        back."""
        window = self._window
        if (death := self._cluster.death) is not None:
            self._restart_ray(death)
        for worker in self._workers:
            if worker.gone or worker.call is not None:
                continue
            if worker.lost is not None:
                if time.monotonic() - worker.lost_at >= AGAIN_S:
                    self._died(worker, worker.lost)
            elif worker.actor is None:
                self._begin(worker)
            elif not worker.joined:
                self._open_call(worker, worker.actor.hello.remote())
            elif (rows := window.take(worker.number)) or window.holds(worker.number):
                self._open_call(worker, worker.actor.exchange.remote(rows))
            elif ended and not window.waits:
                window.leave(worker.number)
                self._end(worker)
                worker.gone = True

    def _open_call(self, worker: _WorkerSlot, call: ray.ObjectRef[object]) -> None:
        worker.call, worker.called = call, time.monotonic()

    def _receive(self, wait_s: float) -> None:
        """Take what the workers have answered, and replace those that hang."""
        import ray

        calls = {worker.call: worker for worker in self._workers if worker.call is not None}
        ready: list[ray.ObjectRef[object]] = []
        if calls:
            ready, rest = ray.wait(list(calls), num_returns=1, timeout=wait_s)
            if ready and rest:
                ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        else:
            time.sleep(min(wait_s, IDLE_S))
        for call in ready:
            worker = calls[call]
            worker.call = None
            try:
                answer = ray.get(call)
            except ray.exceptions.RayError as error:
                worker.lost, worker.lost_at = _reason(error), time.monotonic()
                continue
            worker.alive = True
            if isinstance(answer, Exchange):
                self._answered(worker, answer)
            elif isinstance(answer, WorkerInfo):
                self._joined(worker, answer)
            elif isinstance(answer, Failure):
                self._failed(worker, answer)
        for worker in self._workers:
            if worker.call is not None and worker.alive:
                silence = time.monotonic() - worker.called
                if silence > self._config.timeout_s:
                    self._died(worker, f"it gave no sign of life for {silence:.0f} s")

    def _answered(self, worker: _WorkerSlot, exchange: Exchange) -> None:
        window = self._window
        for line in exchange.lines:
            if line not in self._told:
                self._told.add(line)
                self._warn(line)
        if exchange.exactness not in (None, self._loaded.exactness):
            self._weaker_exactness = exchange.exactness
        for number, answer in exchange.answers:
            if not window.is_out(worker.number, number):
                continue
            result = replace(answer, request=window.request(number))
            window.answer(worker.number, number, result)
            worker.deaths_without_answer = 0
            worker.steps_finished += result.stats.steps
            worker.report.rows += 1
            worker.report.tokens += sum(beam.num_tokens for beam in result.hypotheses[:1])
        worker.steps = exchange.steps
        if exchange.failure is not None:
            self._failed(worker, exchange.failure)

    # Workers

    def _joined(self, worker: _WorkerSlot, info: WorkerInfo) -> None:
        """Let a worker that has loaded take rows. Raises UsageError where it differs from the first one."""
        if self._info is None:
            self._info = info
        elif difference := self._info.difference(info):
            raise UsageError(
                f"worker {worker.number} on {info.host} would not give the same texts as the others: {difference}: "
                "install the same dsbd, and the same models, on all nodes"
            )
        worker.joined = True
        worker.report.host = info.host
        worker.report.device = None if info.engine is None else info.engine.device
        self._window.join(worker.number)

    def _failed(self, worker: _WorkerSlot, failure: Failure) -> None:
        """Handle the end of a worker's engine. An error of ours ends the run, as it would in one process. Another one
        may come from the machine, and counts as a death."""
        if (error := failure.error) is not None:
            raise error
        self._died(worker, str(failure))

    def _died(self, worker: _WorkerSlot, reason: str) -> None:
        """Replace a worker that is gone or of no use, and send its rows again.

        Raises NoWorkersError if no worker is left, or too many died before a row was answered: a model that always ends
        its process would be loaded again for every row.
        """
        self._drop(worker)
        rows = self._window.holds(worker.number)
        given_up = self._window.lose(worker.number)
        for number in given_up:
            request = self._window.request(number)
            error = WorkerLostError(f"{MAX_DEATHS} workers died on this row, the last one: {reason}")
            self._window.give_up(number, RequestResult(request, (), 0, RequestStats(), error))
        worker.report.deaths += 1
        worker.deaths_without_answer += 1
        self._last_death = f"worker {worker.number}: {reason}"
        reports = [worker_slot.report for worker_slot in self._workers]
        deaths = sum(report.deaths for report in reports)
        most = max(USELESS_DEATHS, MAX_DEATHS * len(reports))
        if deaths >= most and not any(report.rows for report in reports):
            raise NoWorkersError(
                f"{deaths} workers died before a row was answered, the last one was {self._last_death}"
            )
        # a worker that dies of its rows answers none either, but each row is given up after three deaths
        worker.gone = worker.deaths_without_answer >= MAX_DEATHS and rows == 0
        if worker.gone:
            self._warn(f"{self._last_death}; it is given up after {MAX_DEATHS} deaths without a row answered")
        else:
            again = f"{rows - len(given_up)} of its rows are sent again" if rows else "it is started again"
            self._warn(f"{self._last_death}; {again}")
        if all(slot.gone for slot in self._workers):
            raise NoWorkersError(f"no worker is left, the last one to die was {self._last_death}")

    def _drop(self, worker: _WorkerSlot) -> None:
        """End a worker that another one is to replace."""
        self._end(worker)
        worker.alive, worker.lost = False, None
        worker.steps_before, worker.steps, worker.steps_finished = worker.steps_before + worker.steps_finished, 0, 0

    def _end(self, worker: _WorkerSlot) -> None:
        """Kill the actor, if there is one. Ray sends a signal to a process that does not answer within some seconds. We
        send none, because a host name and a process id may mean another process."""
        import ray

        if worker.actor is None:
            return
        worker.report.seconds = round(time.monotonic() - worker.started_at, 3)
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(worker.actor)
        worker.actor = worker.call = None
        worker.joined = False

    def _begin(self, worker: _WorkerSlot) -> None:
        import ray

        made = ray.remote(Worker).options(num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=0, max_task_retries=0)
        worker.actor = made.remote(self._setup)  # type: ignore[assignment]
        worker.started_at = time.monotonic()

    # Ray

    @property
    def _cpus_of_ray(self) -> int:
        """Processors of a Ray of our own. Workers share them where there are more workers."""
        return max(processors(), (self._config.most or 1) * self._config.processes)

    def _restart_ray(self, death: str) -> list[dict[str, float]]:
        """Start Ray and all workers again, and send their rows again, which are not to blame. Return the resources of
        each node.

        death: of one of Ray's processes, or why Ray did not start. Raises NoWorkersError the second time, or if Ray is
        that of others or cannot be started.
        """
        if self._config.address is not None:
            raise NoWorkersError(f"--workers: {death}")
        if self._ray_restarted:
            raise NoWorkersError(f"{death}, after Ray had been started again once")
        self._ray_restarted = True
        rows = sum(self._window.recall(worker.number) for worker in self._workers)
        again = f", and {plural(rows, 'row')} {'is' if rows == 1 else 'are'} sent again" if rows else ""
        self._warn(f"{death}; Ray is started again{again}")
        for worker in self._workers:
            self._drop(worker)
        self._cluster.stop()
        try:
            return self._cluster.start(self._cpus_of_ray)
        except DsbdError as error:
            raise NoWorkersError(f"{death}, and then: {error}") from error

    def _share_out(self, nodes: list[dict[str, float]]) -> None:
        """Settle the number of workers, and what each gets of the resources of Ray's nodes. Raises UsageError."""
        gpus = sum(int(node.get("GPU", 0)) for node in nodes)
        processes = self._config.processes
        self._gpus = min(1, gpus) * processes if self._config.gpus is None else self._config.gpus
        most = self._config.most
        if most is None:
            if not self._gpus or gpus < self._gpus:
                raise UsageError("--workers auto counts GPUs, but Ray sees none: give a number")
            most = gpus // self._gpus
        if self._config.address is None and self._gpus * most > gpus:
            raise UsageError(
                f"--workers is {most} with {plural(self._gpus, 'GPU')} each, "
                f"but there {'is' if gpus == 1 else 'are'} {gpus}: take fewer"
            )
        cpus = [int(node.get("CPU", 0)) for node in nodes]
        self._cpus = processes if self._gpus else max(processes, cpus_each(cpus, most))
        self._workers = [_WorkerSlot(WorkerReport(number)) for number in range(most)]

    def _wait_for_workers(self) -> None:
        """Wait until as many workers as the run needs have loaded. Raises DsbdError where too few are left."""
        import ray

        begun, warned = time.monotonic(), False
        least = min(self._config.least, len(self._workers))
        while sum(worker.joined for worker in self._workers) < least and not self._stopping:
            self._send(ended=False)
            self._receive(WAIT_S)
            if sum(not worker.gone for worker in self._workers) < least:
                raise NoWorkersError(f"fewer than {least} workers are left, the last one to die was {self._last_death}")
            if not warned and time.monotonic() - begun > SLOW_START_S and not all(slot.alive for slot in self._workers):
                warned = True
                free = ray.available_resources()  # type: ignore[no-untyped-call]
                self._warn(
                    f"{sum(slot.alive for slot in self._workers)} of {len(self._workers)} workers have a place so far; "
                    f"each needs {self._cpus} CPU and {self._gpus} GPU, Ray has {free.get('CPU', 0):.0f} CPU and "
                    f"{free.get('GPU', 0):.0f} GPU free"
                )


def cpus_each(nodes: Sequence[int], workers: int) -> int:
    """Return the most processors that each of `workers` workers can get; 1 where there are fewer processors than
    workers.

    nodes: processors of each node. A worker lies on one node.
    """
    return next((cpus for cpus in range(max(nodes), 1, -1) if sum(node // cpus for node in nodes) >= workers), 1)


def _reason(error: BaseException) -> str:
    """Return one line of the many that Ray reports on a death."""
    text = str(error)
    if "ModuleNotFoundError" in text or "ImportError" in text:
        return shorten(next(line.strip() for line in reversed(text.splitlines()) if "Error" in line))
    return "its process died"
