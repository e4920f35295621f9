"""A Chrome trace of a few iterations, by torch's profiler."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.decoding.engine import Engine
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.errors import OutputError
from dsbd_cli.io.lines.resume import write_atomically
from dsbd_cli.lab.metrics.memory import synchronise
from dsbd_cli.lab.profiling.runs import ProfiledPair
from dsbd_cli.lab.profiling.timers import RunLog

TRACED_ITERATIONS = 8


class _FirstIterations(RunLog):
    """Names the phases, and ends the run of an engine after some iterations."""

    def __init__(self, engine: Engine, devices: Sequence[torch.device]) -> None:
        super().__init__(devices, name_scopes=True)
        self._engine = engine

    def iterated(self, jobs: Mapping[int, RequestState], nodes: int, seconds: Mapping[str, float]) -> None:
        """One iteration more."""
        super().iterated(jobs, nodes, seconds)
        if self.iterations >= TRACED_ITERATIONS:
            self._engine.stop()


@contextmanager
def _without_stderr() -> Iterator[None]:
    """The profiler's C++ side says there when it begins and ends."""
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def write_trace(bench: ProfiledPair, method: MethodConfig, path: Path) -> int:
    """Trace the first iterations of the first batch into a file; phases stand in it by name. No CUDA graphs run.

    Opens in chrome://tracing or ui.perfetto.dev; with a name that ends in .gz it is compressed. Returns the
    iterations that are in it. Raises OutputError.
    """
    activities = [ProfilerActivity.CPU]
    if any(device.type == "cuda" for device in bench.devices):
        activities.append(ProfilerActivity.CUDA)
    engine = bench.engine(method, cuda_graphs=False)
    log = _FirstIterations(engine, bench.devices)
    engine.observe(log)
    profiler = profile(activities=activities, acc_events=True)
    with _without_stderr():
        profiler.start()
    try:
        with bench.budget.running(engine.stop):
            for _ in engine.run(bench.requests[: bench.batch_size]):
                pass
    finally:
        synchronise(*bench.devices)
        with _without_stderr():
            profiler.stop()
    try:
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / f"trace{path.suffix}"  # the suffix decides on compression
            profiler.export_chrome_trace(str(part))
            data = part.read_bytes()
    except (OSError, RuntimeError) as error:
        raise OutputError(f"cannot write {path}: {error}") from error
    write_atomically(path, data)
    return log.iterations
