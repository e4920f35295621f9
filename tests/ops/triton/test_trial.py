"""Kernels that differ, raise, or end their process: each is named and left out, the others run."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from dsbd_cli.cli.run import messages
from dsbd_cli.engine.checks import kernels
from dsbd_cli.engine.core import distribution
from dsbd_cli.engine.iteration import devices
from dsbd_cli.ops import reference, select
from dsbd_cli.ops.select import ITERATION_KERNELS as NAMES
from dsbd_cli.ops.triton import KernelCheck, attention, layers, products, trial
from tests.ops.triton import DEVICE

CPU, GPU = torch.device("cpu"), torch.device("cuda")
KERNELS = (*layers.KERNELS, *products.KERNELS, *attention.KERNELS)
GATED = next(kernel for kernel in KERNELS if kernel.name == "gated")
ALL = sorted(kernel.name for kernel in KERNELS)
TRIED = sorted(trial.kernels())
# what another process says: a line per kernel, noise of libraries between, and its end at one of them
SCRIPT = """
import json, os, sys, time
{start}
print(json.dumps(["", None]), flush=True)
for name in sys.argv[1:]:
    print("a library says something")
    if name == {at!r}:
        {end}
    print(json.dumps([name, {fault!r} if name == "norm" else None]), flush=True)
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dsbd"


def faults(at: str | None = None, end: str = "pass", fault: str | None = None, start: str = "") -> dict[str, str]:
    script = SCRIPT.format(at=at, end=end, fault=fault, start=start)
    return trial.faults.__wrapped__(
        CPU, (sys.executable, "-ISc", script)
    )  # starts at once: one case has a limit of time


def other(both: torch.Tensor, gelu: bool) -> torch.Tensor:
    return GATED.reference(both, gelu) * 1.1  # type: ignore[operator]


def breaks(both: torch.Tensor, gelu: bool) -> torch.Tensor:
    raise RuntimeError("out of resource: shared memory,\n required 300000")


def test_a_kernel_that_is_right_has_no_fault() -> None:
    assert trial.tried(GATED, DEVICE) is None


def test_a_kernel_that_differs_or_raises_has_one() -> None:
    def fault(op: object) -> str:
        return trial.tried(dataclasses.replace(GATED, op=op), DEVICE) or ""  # type: ignore[arg-type]

    assert fault(other).startswith("differs from the tensor code: case 0, result 0")
    assert fault(breaks) == "fails: RuntimeError: out of resource: shared memory, required 300000"


def test_all_are_tried_and_the_result_is_kept(empty_cache: Path) -> None:
    assert faults() == {}
    assert [json.loads(file.read_text()) for file in empty_cache.glob("kernels-*.json")] == [{}]
    assert faults("gated", "sys.exit(1)") == {}, "tried again though it was kept"


def test_another_reference_is_tried_anew() -> None:
    """Guards a verdict that outlives what a kernel was compared with: references and cases are in other folders."""
    assert {Path(file.__file__) for file in (reference, kernels, distribution, layers)} <= set(trial._modules())


def test_a_line_tells_of_the_first_compilation_alone(capsys: pytest.CaptureFixture[str]) -> None:
    messages.set_style()
    faults()
    line = capsys.readouterr().err
    assert line.startswith(f"dsbd: compiling {len(TRIED)} GPU kernels (once, 5 minutes at most; kept in ")
    assert line.count("\n") == 1
    faults()
    assert capsys.readouterr().err == ""


def test_each_kernel_has_the_whole_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards kernels that are left out because those before them took long to compile."""
    monkeypatch.setattr(trial, "LIMIT_S", 2.0)
    slow = (
        "import json, sys, time\nfor name in sys.argv[1:]: time.sleep(0.4), print(json.dumps([name, None]), flush=True)"
    )
    assert len(TRIED) * 0.4 > trial.LIMIT_S
    assert trial.faults.__wrapped__(CPU, (sys.executable, "-ISc", slow)) == {}


def test_a_fault_that_may_pass_is_not_kept(empty_cache: Path) -> None:
    """Guards a kernel that is left out for ever because another process held the GPU's memory once."""
    assert list(faults("gated", "sys.exit('CUDA error: out of memory')")) == ["gated"]
    assert list(empty_cache.glob("kernels-*.json")) == []
    assert faults() == {}


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit('CUDA error: an illegal memory access was encountered')", "an illegal memory access"),
        ("os.kill(os.getpid(), 11)", "ends its process (exit -11)"),
        ("time.sleep(60)", "does not end within 2 s"),
    ],
    ids=["error", "crash", "hang"],
)
def test_the_one_at_which_the_process_ended_is_to_blame(end: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LIMIT_S", 2.0)
    faulty = faults("gated", end, fault="differs")
    assert faulty.pop("norm") == "differs"
    assert list(faulty) == ["gated"]
    assert said in faulty["gated"]


def test_a_process_that_cannot_start_is_started_once(empty_cache: Path, tmp_path: Path) -> None:
    """Guards a minute of waiting per kernel where torch cannot reach the GPU from another process."""
    log = tmp_path / "starts"
    faulty = faults(start=f"open({str(log)!r}, 'a').write('x'); sys.exit('CUDA error: no device for this process')")
    assert log.read_text() == "x"
    assert faulty.keys() == set(TRIED)
    assert len(set(faulty.values())) == 1
    assert "no device for this process" in faulty["verify"]
    assert list(empty_cache.glob("kernels-*.json")) == []


def test_a_process_that_is_late_is_started_again_at_the_next_load(
    monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    """Guards kernels that are left out for ever because the machine was busy when they were to be tried."""
    monkeypatch.setattr(trial, "LIMIT_S", 0.5)
    faulty = faults(start="time.sleep(60)")
    assert faulty.keys() == set(TRIED)
    assert "cannot be tried, its process does not start within" in faulty["verify"]
    assert list(empty_cache.glob("kernels-*.json")) == []


def test_the_process_finds_what_this_one_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards a package that is known to this process alone, as in a notebook: all kernels would be left out; and
    another torch, which stands behind in the path of this process and came first in that one's. What is no string means
    nothing to an import."""
    order = [str(tmp_path), os.getcwd(), *sys.path]
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", Path("of an import hook"), *sys.path])
    assert faults(start=f"assert os.environ['PYTHONPATH'].split(os.pathsep) == {order!r}") == {}


@pytest.mark.parametrize("hangs", [False, True])
def test_all_together_have_a_limit_of_time(hangs: bool, monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    """Guards a load that waits two minutes for each kernel of a GPU on which all hang. What was too slow may be tried
    again, because compiled kernels are kept; where one hangs each load would wait as long."""
    monkeypatch.setattr(trial, "TOTAL_S", 1.5)
    monkeypatch.setattr(trial, "LIMIT_S", 0.8 if hangs else 9.0)
    faulty = faults("rotate", "time.sleep(60)")
    assert faulty.keys() >= {"rotate"} if hangs else faulty.keys() == set(TRIED) - {"norm", "gated"}
    assert ("does not end within" in faulty["rotate"]) == hangs
    assert hangs or all("all of them together took" in fault for fault in faulty.values())
    assert len(list(empty_cache.glob("kernels-*.json"))) == hangs


def test_a_gpu_that_triton_is_not_made_for_runs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards ten processes that crash one after another in the compiler."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(trial, "_try_all", lambda *arguments: pytest.fail("tried"))
    faulty = trial.faults.__wrapped__(GPU)
    assert faulty.keys() == set(TRIED)
    assert set(faulty.values()) == {"needs a GPU of compute capability 8.0, and this one has 7.5"}


def test_what_cannot_be_tried_does_not_run() -> None:
    assert trial.faults.__wrapped__(CPU, ("/no/such/program",)).keys() == set(TRIED)
    assert trial.faults.__wrapped__(torch.device("meta"), (sys.executable, "-c", "")).keys() == set(TRIED)


def test_the_process_itself_says_what_it_finds(capfd: pytest.CaptureFixture[str]) -> None:
    trial._main([str(DEVICE), "gated"])
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()] == [["", None], ["gated", None]]


def test_a_kernel_with_a_fault_is_not_in_use_and_a_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_triton(kernels: bool | None) -> set[str]:
        select.ops_for.cache_clear()
        return set(devices.iteration_ops(GPU, kernels).by("triton"))

    monkeypatch.setattr(select, "faults", lambda device: {"verify": "differs from the tensor code: case 0"})
    assert by_triton(None) == set(NAMES) - {"verify"}
    reasons = {choice.op: choice.reason for choice in devices.iteration_ops(GPU, None).report}
    assert reasons["verify"] == "differs from the tensor code: case 0"
    (line,) = select.rejected_kernels(GPU, None)
    assert "the kernel verify is left out" in line
    assert select.rejected_kernels(GPU, False) == select.rejected_kernels(CPU, None) == ()
    monkeypatch.setattr(select, "faults", lambda device: dict.fromkeys(("verify", "move"), "fails: no C compiler"))
    assert select.rejected_kernels(GPU, None) == (
        "the kernels verify, move are left out, and tensor code runs in their place: each fails: no C compiler",
    )
    assert by_triton(False) == set()
    select.ops_for.cache_clear()


def test_names_are_one_kernel_each() -> None:
    """Guards a kernel that an engine uses and nobody tries."""
    assert set(TRIED) == {*ALL, *NAMES}
    assert all(isinstance(kernel, KernelCheck) for kernel in trial.kernels().values())
