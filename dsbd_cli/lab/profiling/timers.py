"""A log of one measurement: an observer that times its parts, and counts rows, nodes and cache slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from dsbd_cli.engine.iteration.devices import current, events
from dsbd_cli.engine.iteration.observer import Observer
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.engine.iteration.stepper import PHASES
from dsbd_cli.engine.planning.timing import PhaseTimer

HOST, DEVICE = ("tokenise", "detokenise"), ("prefill", "compact")


class EngineLog(Observer):
    """The log of one measurement.

    Attributes:
        phases: seconds of draft, target and verify, summed over the iterations.
        iterations: number of iterations of the engine. rows, nodes, slots: sums over the iterations, of all rows:
            requests, N, and cache slots that a target forward sees.
    """

    def __init__(self, devices: Sequence[torch.device], *, captured: bool = False) -> None:
        """captured: iterations may be CUDA graphs, within which no clock may run."""
        self._devices, self._captured = devices, captured
        self._spans: dict[str, list[list[PhaseTimer]]] = {name: [] for name in (*HOST, *DEVICE)}
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.iterations = self.rows = self.nodes = self.slots = 0

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

    def iterated(self, jobs: Mapping[int, RequestState], nodes: int, seconds: Mapping[str, float]) -> None:
        """Add the times and counts of an iteration."""
        for name, value in seconds.items():
            self.phases[name] += value
        self.iterations += 1
        self.rows += len(jobs)
        self.nodes += len(jobs) * nodes
        self.slots += sum(job.used for job in jobs.values()) + len(jobs) * nodes

    def span_s(self, name: str) -> float:
        """Return the seconds of all spans of a name. Where there are several devices, the longest time counts."""
        return sum(max(timer.seconds()[name] for timer in span) for span in self._spans[name])
