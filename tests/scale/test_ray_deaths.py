"""Each of Ray's own processes is killed. Its library would wait for ever, or end the command without a word."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.scale.conftest import Job, kill, prompts, wait_until, wait_until_ended

pytest.importorskip("ray")

Undisturbed = Callable[[int], list[object]]
ROWS = 100
VITAL = {
    "gcs_server": "GCS server",
    "raylet": "raylet",
    "ray::RuntimeEnvAgent": "raylet",  # which ends with its agents
    "ray::DashboardAgent": "raylet",
}
NOT_NEEDED = ("_private/log_monitor.py", "_private/monitor.py", "dashboard/dashboard.py")


def below(process: int) -> list[psutil.Process]:
    return psutil.Process(process).children(recursive=True)


def named(name: str, processes: list[psutil.Process]) -> list[int]:
    """Those that live and have this name, or a command that has it. The dead ones of the Ray before keep their name
    until their parent has heard of them."""
    pids = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.name() == name or any(name in word for word in process.cmdline()[:3]):
                pids.append(process.pid)
    return pids


class OwnRay(Job):
    """A job on a Ray that the command starts. seen: all processes that `find` has come across."""

    def begin(self) -> subprocess.Popen[str]:
        self.tmp, self.seen = self.folder / "tmp", set[psutil.Process]()
        self.tmp.mkdir()
        own = {"TMPDIR": str(self.tmp)}
        return self.start("--workers", "2", workers=None, environment=own, start_new_session=True)

    def find(self, process: subprocess.Popen[str], name: str) -> int:
        """The process of Ray with this name, once there is one."""
        pids: list[int] = []

        def look() -> bool:
            tree = below(process.pid)
            self.seen.update(tree)
            pids[:] = named(name, tree)
            return bool(pids)

        wait_until(look, process)
        return pids[0]

    def kill_at(self, process: subprocess.Popen[str], rows: int, name: str) -> None:
        """Kill a process of Ray when so many records are written."""
        self.gate.hold(rows)
        self.wait_for(process, rows)
        kill(self.find(process, name))

    def wait_for_restart(self, process: subprocess.Popen[str]) -> str:
        """Until Ray is started again; returns what has been said up to there."""
        assert process.stderr is not None
        said = ""
        while "Ray is started again" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        return said

    def check_nothing_left(self) -> None:
        for process in self.seen:
            wait_until_ended(process.pid)
        assert not list(self.tmp.glob("dsbd-ray-*"))


@pytest.fixture
def own(tmp_path: Path) -> OwnRay:
    return OwnRay(tmp_path, "", prompts(ROWS))


@pytest.mark.parametrize("name", VITAL)
def test_a_death_after_which_ray_is_started_again(name: str, own: OwnRay, undisturbed: Undisturbed) -> None:
    process = own.begin()
    own.kill_at(process, 20, name)
    said = own.wait_for_restart(process)
    own.gate.release()
    code, out, err = own.end(process)
    assert (code, out) == (3, ""), err
    assert own.records() == undisturbed(ROWS)
    assert f"dsbd: warning: Ray's {VITAL[name]} has died; Ray is started again, and " in said
    assert "is started again" not in err
    assert all(line.startswith("dsbd: ") for line in (said + err).splitlines()), said + err
    own.check_nothing_left()


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_a_death_that_does_not_matter(name: str, own: OwnRay, undisturbed: Undisturbed) -> None:
    """A worker can be replaced afterwards, too."""
    process = own.begin()
    own.kill_at(process, 20, name)
    kill(own.holders(process, process.pid)[0])
    own.gate.release()
    code, _, err = own.end(process)
    assert code == 3, err
    assert own.records() == undisturbed(ROWS)
    assert "its process died" in err
    assert "Ray is started again" not in err
    own.check_nothing_left()


def test_a_second_death_ends_the_run_which_can_be_resumed(own: OwnRay, undisturbed: Undisturbed) -> None:
    process = own.begin()
    own.kill_at(process, 20, "raylet")
    own.wait_for_restart(process)  # rows up to 60 may else come from the old Ray, and its GCS server is killed
    own.kill_at(process, 60, "gcs_server")
    code, _, err = own.end(process)
    assert code == 1, err
    last = err.splitlines()[-1]
    assert last.startswith("dsbd: error: Ray's GCS server has died, after Ray had been started again once; ")
    assert "go on with: dsbd generate" in last
    own.check_nothing_left()
    own.gate.release()
    code, _, err = own.finish(workers=None)
    assert code == 3, err
    assert own.records() == undisturbed(ROWS)


def test_a_death_while_ray_starts(own: OwnRay, undisturbed: Undisturbed) -> None:
    """Ray's library notices none, or ends the process after a minute: it is started again, or the run ends in time."""
    process = own.begin()
    kill(own.find(process, "gcs_server"))
    code, _, err = own.end(process)
    assert "Ray's GCS server has died" in err or "Ray cannot be started" in err
    own.check_nothing_left()
    if code == 1:
        assert "go on with: dsbd generate" in err
        code, _, err = own.finish(workers=None)
    assert code == 3, err
    assert own.records() == undisturbed(ROWS)


def test_an_interrupt_while_ray_is_started_again(own: OwnRay) -> None:
    process = own.begin()
    own.kill_at(process, 20, "raylet")
    own.wait_for_restart(process)
    os.killpg(process.pid, signal.SIGINT)
    own.gate.release()
    code, _, err = own.end(process)
    assert code == 130, err
    assert "go on with: dsbd generate" in err
    assert "Traceback" not in err
    own.check_nothing_left()


@pytest.fixture
def others(ray_folder: Path) -> Iterator[tuple[str, Callable[[], list[psutil.Process]]]]:
    """The address of a Ray that `ray start` has started, and a function that returns its processes."""
    folder = ray_folder / "others"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", f"--port={port}"]
    sizes = ["--num-cpus=2", f"--object-store-memory={80 << 20}", "--include-dashboard=false"]
    options = ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--dashboard-agent-listen-port=0", *sizes]

    def processes() -> list[psutil.Process]:
        living = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(folder) in word for word in process.cmdline()):
                    living.update([process, *process.children(recursive=True)])
        return list(living)

    subprocess.run([*ray, *options], env={**os.environ, "RAY_TMPDIR": str(ray_folder)}, check=True, capture_output=True)
    seen = processes()
    try:
        yield f"127.0.0.1:{port}", processes
    finally:
        for process in {*seen, *processes()}:
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.mark.parametrize("name", VITAL)
def test_a_death_in_a_ray_of_others_ends_the_run(
    name: str, others: tuple[str, Callable[[], list[psutil.Process]]], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    address, processes = others
    made = Job(tmp_path, address, prompts(ROWS))
    made.gate.hold(20)
    process = made.start()
    made.wait_for(process, 20)
    [victim] = named(name, processes())
    kill(victim)
    code, _, err = made.end(process)
    assert code == 1, err
    said = "Ray's GCS server at" if name == "gcs_server" else "the raylet of this machine has died"
    assert err.splitlines()[-1].startswith(f"dsbd: error: --workers: {said}"), err
    assert "go on with: dsbd generate" in err
    made.gate.release()
    code, _, err = made.finish(workers=None)
    assert code == 3, err
    assert made.records() == undisturbed(ROWS)
