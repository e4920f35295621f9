"""A log of one run: an observer that times its parts, and counts rows, nodes and cache slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from dsbd_cli.engine.iteration.devices import current, events
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.engine.iteration.stepper import PHASES
from dsbd_cli.engine.planning.timing import PhaseTimer
from dsbd_cli.lab.profiling.probe import SlotPeak

HOST, DEVICE = ("tokenise", "detokenise"), ("prefill", "compact")


class RunLog(Observer):
    """The log of one run.

    Attributes:
        phases: seconds of draft, target and verify, summed over the iterations.
        iterations: number of iterations of the engine. rows, nodes, slots: sums over the iterations, of all rows:
            requests, N, and cache slots that a target forward sees.
        peak: slots at the iteration that used the most. most_slots: the largest product of rows and slots that the
            caches had.
    """

    def __init__(self, devices: Sequence[torch.device], *, captured: bool = False) -> None:
        """captured: iterations may be CUDA graphs, within which no clock may run."""
        self._devices, self._captured = devices, captured
        self._spans: dict[str, list[list[PhaseTimer]]] = {name: [] for name in (*HOST, *DEVICE)}
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.iterations = self.rows = self.nodes = self.slots = self.most_slots = 0
        self.peak = SlotPeak()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block, unless it is a phase of an iteration. `iterated` is called with the seconds of those."""
        clocks = [torch.device("cpu")] if name in HOST else self._devices if name in DEVICE else []
        if name == "compact" and self._captured:
            clocks = []
        timers = {device: PhaseTimer(events(device)) for device in clocks}
        for device, timer in timers.items():
            with current(device):
                timer.start()
        yield
        for device, timer in timers.items():
            with current(device):
                timer.lap(name)
        if timers:
            self._spans[name].append([*timers.values()])

    def reserved(self, rows: int, slots: int) -> None:
        """Keep the largest product of rows and slots."""
        self.most_slots = max(self.most_slots, rows * slots)

    def iterated(self, jobs: Mapping[int, RequestState], nodes: int, seconds: Mapping[str, float]) -> None:
        """Add the times and counts of an iteration."""
        for name, value in seconds.items():
            self.phases[name] += value
        common_prefix = sum(job.common_prefix for job in jobs.values())
        suffix = sum(job.used for job in jobs.values()) - common_prefix
        path = sum(len(job.prompt) + job.stats.steps for job in jobs.values())
        now = SlotPeak(common_prefix, suffix, len(jobs) * nodes, path)
        self.iterations += 1
        self.rows += len(jobs)
        self.nodes += now.in_flight
        self.slots += now.total
        if now.total > self.peak.total:
            self.peak = now

    def span_s(self, name: str) -> float:
        """Return the seconds of all spans of a name. Where there are several devices, the longest time counts."""
        return sum(max(timer.seconds()[name] for timer in one) for one in self._spans[name])
