"""Peak memory in bytes, of the process on a CPU and of torch's allocator on a GPU, and a wait for devices."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PROC = Path("/proc/self")


def synchronise(*devices: torch.device) -> None:
    """Wait until the devices have finished the work queued on them."""
    for device in devices:
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)


def resident_bytes(name: str = "VmRSS", proc: Path = PROC) -> int | None:
    """Return the resident memory of this process now, or another number of its /proc status (`name`); None where the
    system does not report it."""
    try:
        lines = (proc / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def peak_rss_bytes(proc: Path = PROC) -> int:
    """Return the highest resident memory of this process since it began, or since reset_peak_rss."""
    peak = resident_bytes("VmHWM", proc)
    if peak is not None:
        return peak
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def reset_peak_rss(proc: Path) -> bool:
    """Reset the peak to what is resident now. Return False where the system cannot do that (Linux can)."""
    try:
        (proc / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


class PeakMemory:
    """Peak memory of a window: call start(), do the work, then call peak().

    On a CPU this is the whole resident memory of the process, weights and libraries included. Where the peak cannot be
    reset, that of a single window is unknown, and peak() returns None.
    """

    def __init__(self, device: torch.device, proc: Path = PROC) -> None:
        self._device, self._proc = device, proc
        self._fresh = False

    @property
    def source(self) -> str:
        """Kind of memory: `cuda` (allocated by torch) or `rss` (resident memory of the process)."""
        return "cuda" if self._device.type == "cuda" else "rss"

    def start(self) -> None:
        """Begin a window."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
            self._fresh = True
        else:
            self._fresh = reset_peak_rss(self._proc)

    def peak(self) -> int | None:
        """Return the bytes at the highest point since start(); None where they are unknown."""
        if not self._fresh:
            return None
        if self._device.type == "cuda":
            import torch

            return int(torch.cuda.max_memory_allocated(self._device))
        return peak_rss_bytes(self._proc)
