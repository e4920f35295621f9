"""Joules from fake counters: NVML by UUID, RAPL with wrap-around and without permission, and nothing at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsbd_cli.lab.metrics.energy import EnergyMeter, NvmlReader, RaplReader, find_meter


class FakeNvml:
    """Two GPUs, whose NVML order is not CUDA's."""

    def __init__(self) -> None:
        self.millijoules = {"GPU-a": 5_000, "GPU-b": 900_000}
        self.started = False

    def nvmlInit(self) -> None:  # noqa: N802
        self.started = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:  # noqa: N802
        assert self.started
        if uuid not in self.millijoules:
            raise RuntimeError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:  # noqa: N802
        assert isinstance(handle, str)
        return self.millijoules[handle]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def zone(root: Path, name: str, label: str, energy: int, size: int = 1_000_000_000) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for file, text in (("name", label), ("energy_uj", str(energy)), ("max_energy_range_uj", str(size))):
        (folder / file).write_text(f"{text}\n")
    return folder


def test_nvml_reads_the_gpu_of_this_uuid_in_joules() -> None:
    nvml = FakeNvml()
    clock = Clock()
    meter = EnergyMeter(NvmlReader(nvml, "GPU-b"), clock=clock)
    meter.start()
    nvml.millijoules["GPU-b"] += 12_500
    nvml.millijoules["GPU-a"] += 999_999
    clock.now += 2.5
    window = meter.stop()
    assert (window.joules, window.seconds, window.watts, meter.source) == (12.5, 2.5, 5.0, "nvml")


def test_a_window_shorter_than_the_counters_steps_is_not_measured() -> None:
    nvml, clock = FakeNvml(), Clock()
    meter = EnergyMeter(NvmlReader(nvml, "GPU-a"), clock=clock)
    meter.start()
    clock.now += 0.4
    assert meter.stop().joules is None


def test_both_ends_of_a_window_wait_for_the_device() -> None:
    waited: list[str] = []
    meter = EnergyMeter(NvmlReader(FakeNvml(), "GPU-a"), synchronize=lambda: waited.append("wait"))
    meter.start()
    meter.stop()
    assert waited == ["wait", "wait"]


def test_rapl_sums_packages_once_and_unwraps(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 900, size=1000)
    zone(tmp_path, "intel-rapl:0:0", "core", 10**6)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 5_000_000)
    zone(tmp_path, "intel-rapl:2", "psys", 7)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 7)
    reader = RaplReader(tmp_path)
    assert reader.source == "rapl:package-0+package-1"
    before = reader.joules()
    (first / "energy_uj").write_text("100\n")  # 900 -> 1000, then 0 -> 100: 201 steps of a counter with 1001 values
    (second / "energy_uj").write_text("6000000\n")
    assert reader.joules() - before == pytest.approx((201 + 1_000_000) / 1e6)
    assert reader.joules() - before == pytest.approx((201 + 1_000_000) / 1e6)


def test_rapl_without_permission_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)

    def refuse(path: Path, *args: object, **options: object) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return "package-0" if path.name == "name" else "1000"

    monkeypatch.setattr(Path, "read_text", refuse)
    meter = find_meter("cpu", powercap=tmp_path)
    assert not meter.available
    assert "root only" in meter.reason


def no_nvml() -> object:
    raise ImportError("pynvml")


@pytest.mark.parametrize(
    ("meter", "reason"),
    [
        (lambda root: find_meter("cpu", powercap=root / "none"), "no RAPL counters"),
        (lambda root: find_meter("cuda:0", load_nvml=no_nvml, find_uuid=lambda _: "GPU-a"), "pip install"),
        (lambda root: find_meter("cuda:0", load_nvml=FakeNvml, find_uuid=lambda _: "GPU-c"), "Not Found"),
        (lambda root: find_meter("cuda:0", load_nvml=FakeNvml, find_uuid=lambda _: None), "UUID"),
    ],
)
def test_without_a_counter_nothing_is_made_up(meter: object, reason: str, tmp_path: Path) -> None:
    assert callable(meter)
    counter = meter(tmp_path)
    counter.start()
    window = counter.stop()
    assert (window.joules, window.watts, counter.source) == (None, None, "unavailable")
    assert counter.measure_idle() is None
    assert reason in counter.reason


def test_idle_power_is_measured_over_its_own_window() -> None:
    nvml, clock = FakeNvml(), Clock()
    meter = EnergyMeter(NvmlReader(nvml, "GPU-a"), clock=clock)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        nvml.millijoules["GPU-a"] += int(30_000 * seconds)

    assert meter.measure_idle(2.0, sleep) == 30.0
    assert meter.idle_watts == 30.0


def test_a_counter_that_breaks_in_mid_run_is_given_up() -> None:
    nvml, clock = FakeNvml(), Clock()
    meter = EnergyMeter(NvmlReader(nvml, "GPU-a"), clock=clock)
    meter.start()
    del nvml.millijoules["GPU-a"]
    clock.now += 2
    assert meter.stop().joules is None
    assert (meter.source, meter.available) == ("unavailable", False)
