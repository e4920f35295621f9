"""Joules from the hardware's own counters: NVML on NVIDIA GPUs, RAPL (Linux powercap) on CPUs, else nothing.

A counter moves in steps. So a window shorter than a few of its periods cannot be measured, and counts as not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol

POWERCAP = Path("/sys/class/powercap")
UNAVAILABLE = "unavailable"


class _Nvml(Protocol):
    """The functions of nvidia-ml-py (module pynvml) that are used."""

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object: ...  # noqa: N802

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int: ...  # noqa: N802


NVML: Callable[[], _Nvml] = partial(import_module, "pynvml")


@dataclass(frozen=True, slots=True)
class EnergyWindow:
    """Energy used in a window. joules: None where not measured."""

    joules: float | None
    seconds: float

    @property
    def watts(self) -> float | None:
        """Mean power of the window; None where it was not measured."""
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds


class NvmlReader:
    """A reader of the total-energy counter (millijoules since the driver was loaded) of one GPU, Volta or newer."""

    source = "nvml"  # for records
    min_window_s = 0.5  # the counter moves every 20 to 100 ms

    def __init__(self, nvml: _Nvml, uuid: str) -> None:
        """uuid: `GPU-...` or `MIG-...` as the driver writes it, because indexes of CUDA and NVML may differ.

        Raises whatever NVML raises where the driver or the counter is missing.
        """
        nvml.nvmlInit()
        self._nvml, self._handle = nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
        self.joules()

    def joules(self) -> float:
        """Return the joules since the driver was loaded."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3


class RaplReader:
    """A reader of the package (or psys) energy counters of Linux powercap, which wrap around at max_energy_range_uj.

    It must be read more often than a counter wraps, which takes minutes at full load.
    """

    min_window_s = 0.05  # the counters move every millisecond or so

    def __init__(self, root: Path) -> None:
        """Find the counters. Raises OSError where there is none, or it may not be read (only root may, since 2020)."""
        self._zones = _zones(root)
        if not self._zones:
            raise FileNotFoundError(f"no RAPL counters under {root}")
        self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in self._zones]
        self._last = self._read()
        self._total = 0
        self.source = "rapl:" + "+".join((zone / "name").read_text().strip() for zone in self._zones)

    def joules(self) -> float:
        """Return the joules since this reader was made, over all zones. Wrapped counters are unwrapped."""
        now = self._read()
        self._total += sum(
            (new - old) % (size + 1) if new < old else new - old
            for new, old, size in zip(now, self._last, self._ranges, strict=True)
        )
        self._last = now
        return self._total / 1e6

    def _read(self) -> list[int]:
        return [int((zone / "energy_uj").read_text()) for zone in self._zones]


def _zones(root: Path) -> list[Path]:
    """Return the top-level zones without double counting: all packages. Where there are none, the first zone is taken
    (psys, the whole board, which would include the packages)."""
    if not root.is_dir():
        return []
    zones = [
        zone
        for zone in sorted(root.iterdir())
        # intel-rapl:0 is a package, intel-rapl:0:1 a part of it; intel-rapl-mmio repeats the same packages
        if zone.name.count(":") == 1 and zone.name.startswith("intel-rapl:") and (zone / "energy_uj").exists()
    ]
    packages = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
    return packages or zones[:1]


class EnergyMeter:
    """A meter of windows over one reader. Without a reader its source is `unavailable`."""

    def __init__(
        self,
        reader: NvmlReader | RaplReader | None,
        *,
        reason: str = "",
        synchronize: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """reason: why there is no reader. synchronize: waits until the device has finished the work queued on it."""
        self._reader, self.reason = reader, reason
        self._synchronize, self._clock = synchronize, clock
        self._began: tuple[float, float | None] = (0.0, None)
        self.idle_watts: float | None = None

    @property
    def source(self) -> str:
        """Source of the joules."""
        return UNAVAILABLE if self._reader is None else self._reader.source

    @property
    def available(self) -> bool:
        """Whether joules are measured at all."""
        return self._reader is not None

    def start(self) -> None:
        """Begin a window, after waiting for the work queued before."""
        self._synchronize()
        joules = self._joules()
        self._began = self._clock(), joules

    def stop(self) -> EnergyWindow:
        """End the window, after waiting for the work queued in it."""
        self._synchronize()
        seconds = self._clock() - self._began[0]
        before, after = self._began[1], self._joules()
        short = self._reader is None or seconds < self._reader.min_window_s
        joules = None if short or before is None or after is None else after - before
        return EnergyWindow(joules, seconds)

    def measure_idle(self, seconds: float = 2.0, sleep: Callable[[float], None] = time.sleep) -> float | None:
        """Measure the watts while the machine is given nothing to do, and keep them in idle_watts. Return them; return
        None at once where nothing can be measured."""
        if self._reader is not None:
            self.start()
            sleep(seconds)
            self.idle_watts = self.stop().watts
        return self.idle_watts

    def _joules(self) -> float | None:
        """Read the counter. One that fails during the run is not used again, and no value is made up for it."""
        if self._reader is None:
            return None
        try:
            return self._reader.joules()
        except Exception as error:  # NVML raises classes of its own
            self._reader, self.reason = None, f"the counter failed: {error}"
            return None


def _cuda_uuid(device: str) -> str | None:
    """Return the UUID of a torch device as NVML writes it (`GPU-...` or `MIG-...`), or None where torch has none."""
    import torch

    bare = str(getattr(torch.cuda.get_device_properties(device), "uuid", "") or "")
    if not bare:
        return None
    return bare if bare.startswith(("GPU-", "MIG-")) else f"GPU-{bare}"


def find_meter(
    device: str,
    *,
    load_nvml: Callable[[], _Nvml] = NVML,
    find_uuid: Callable[[str], str | None] = _cuda_uuid,
    powercap: Path = POWERCAP,
    synchronize: Callable[[], None] = lambda: None,
) -> EnergyMeter:
    """Return the meter for models on a torch device (`cpu`, `cuda:0`). Without counters, its `reason` says why."""
    if device.startswith("cuda"):
        try:
            uuid = find_uuid(device)
            if uuid is None:
                raise LookupError("torch does not tell the GPU's UUID")
            return EnergyMeter(NvmlReader(load_nvml(), uuid), synchronize=synchronize)
        except ImportError:
            return EnergyMeter(None, reason="nvidia-ml-py is not installed: pip install 'dsbd[energy]'")
        except Exception as error:  # NVML raises classes of its own
            return EnergyMeter(None, reason=f"NVML: {' '.join(str(error).split())}")
    try:
        return EnergyMeter(RaplReader(powercap), synchronize=synchronize)
    except PermissionError:
        return EnergyMeter(None, reason=f"the RAPL counters under {powercap} may be read by root only")
    except (OSError, ValueError) as error:
        return EnergyMeter(None, reason=str(error))
