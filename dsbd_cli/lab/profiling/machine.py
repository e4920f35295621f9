"""The machine: its name, its load, and the highest rates that were measured on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from dsbd_cli.lab.metrics.environment import cpu_name, own_commit, versions
from dsbd_cli.lab.metrics.memory import synchronise
from dsbd_cli.lab.reports.profile_data import Machine
from dsbd_cli.threads import processors

MIB = 1 << 20


def describe_machine(device: torch.device) -> Machine:
    """Describe the machine as it is now. Call this before anything is measured, because it reads the load."""
    try:
        load: float | None = os.getloadavg()[0]
    except (AttributeError, OSError):
        load = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return Machine(name, torch.get_num_threads(), processors(), load, versions(), own_commit())


def _fastest(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the seconds of the fastest of several rounds, after one round to warm up."""
    seconds = []
    for _ in range(rounds + 1):
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def machine_rates(device: torch.device, dtype: torch.dtype, working_bytes: int) -> tuple[float, float]:
    """Measure the copy bandwidth, in bytes read + written per second, and the matmul rate, in operations per second.

    The copy has the size of the weights, between 1 MiB and 1 GiB. Processor caches count there, as they do for the
    model. The matrices are square, with 1024 (CPU) or 4096 rows.
    """
    size = min(max(working_bytes, MIB), 1024 * MIB)
    from_buffer = torch.ones(size, dtype=torch.uint8, device=device)
    to_buffer = torch.empty_like(from_buffer)
    copying = _fastest(lambda: to_buffer.copy_(from_buffer), device, 8)
    side = 4096 if device.type == "cuda" else 1024
    left = torch.ones(side, side, dtype=dtype, device=device)
    multiplying = _fastest(lambda: left @ left, device, 5)
    return 2 * size / copying, 2 * side**3 / multiplying
