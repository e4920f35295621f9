"""One small Ray for all tests of this folder, and a real `dsbd` with the fake engine that works on it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.fake import Gate

ROOT = Path(__file__).parents[2]
HANG_S = 600  # only so that a fault does not hang the suite
MOST = 240  # rows of a test


def prompts(rows: int) -> list[dict[str, object]]:
    """`row 0`, `row 1`, ..; some fail."""
    return [{"id": f"r{n}", "prompt": "fail" if n % 50 == 7 else f"row {n}"} for n in range(rows)]


def without_times(value: object) -> object:
    """A record without what is measured."""
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if not name.endswith("_s")}
    return [without_times(item) for item in value] if isinstance(value, list) else value


@dataclass
class Job:
    """Files of one job, and the command over them. gate: rows that its workers hold back, see `Gate`."""

    folder: Path
    address: str
    rows: list[dict[str, object]]
    module: str = "tests.helpers.fake"

    def __post_init__(self) -> None:
        self.input, self.output = self.folder / "in.jsonl", self.folder / "out.jsonl"
        self.input.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self.gate = Gate(self.folder)

    def start(self, *more: str, workers: str | None = "2", **options: object) -> subprocess.Popen[str]:
        """The command; without workers in its own process."""
        scale = () if workers is None else ("--workers", f"{workers},ray={self.address}")
        files = ("-i", str(self.input), "-o", str(self.output), "--batch-size", "4", "--existing", "resume")
        call = [sys.executable, "-m", self.module, "generate", *files, *scale, *more]
        extra: dict[str, str] = options.pop("environment", {})  # type: ignore[assignment]
        environment = {**os.environ, **extra, "FAKE_GATE": str(self.folder), "DSBD_TARGET": "builtin:target"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        return subprocess.Popen(call, cwd=ROOT, env=environment, text=True, **pipes)  # type: ignore[call-overload, no-any-return]

    def finish(self, *more: str, workers: str | None = "2", **options: object) -> tuple[int, str, str]:
        """Run it to its end: exit code, standard output, standard error."""
        return self.end(self.start(*more, workers=workers, **options))

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=HANG_S)
        return process.returncode, out, err

    def records(self) -> list[object]:
        """What is written, without times."""
        return [without_times(json.loads(line)) for line in self.output.read_text().splitlines()]

    def written(self) -> int:
        """Records."""
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def wait_for(self, process: subprocess.Popen[str], rows: int) -> None:
        """Until so many records are written."""
        wait_until(lambda: self.written() >= rows, process)

    def reach(self, process: subprocess.Popen[str], rows: int, below: int) -> None:
        """Until so many records are written, with two workers below a process. Rows from there on wait, and more of
        them go on where both workers wait: a row that is sent again may stand behind one that waits."""
        first = rows
        self.gate.hold(first)

        def reached() -> bool:
            nonlocal first
            if len(self.gate.holders() & set(workers_below(below))) == 2 and self.written() < rows:
                first += 8
                self.gate.hold(first)
            return self.written() >= rows

        wait_until(reached, process)

    def holders(self, process: subprocess.Popen[str], below: int) -> list[int]:
        """Workers below a process, once there are any, that hold rows which wait at the gate."""
        wait_until(lambda: bool(self.gate.holders() & set(workers_below(below))), process)
        return sorted(self.gate.holders() & set(workers_below(below)))


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """While the command runs."""
    limit = time.monotonic() + HANG_S
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)


def kill(process: int) -> None:
    """At once; it is gone when this returns."""
    os.kill(process, signal.SIGKILL)
    wait_until_ended(process)


def wait_until_ended(process: int) -> None:
    """Dead, whether or not its parent has heard of it."""
    import psutil

    limit = time.monotonic() + HANG_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < limit, f"process {process} lives"
            time.sleep(0.01)


def workers_below(process: int) -> list[int]:
    """Processes of workers that this one, or a Ray that it has started, has begun."""
    import psutil

    pids = []
    for child in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = child.cmdline()
            if command and command[0].startswith("ray::Worker"):
                pids.append(child.pid)
    return pids


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[object]]:
    """undisturbed(count): the records of so many rows that one process writes whom nobody disturbs."""
    made = Job(tmp_path_factory.mktemp("undisturbed"), "", prompts(MOST))
    code, _, err = made.finish(workers=None)
    assert code == 3, err
    records = made.records()
    assert len(records) == MOST
    return lambda count: records[:count]


@pytest.fixture(scope="session")
def ray_folder() -> Iterator[Path]:
    """A short path, because sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="dsbd-t-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(ray_folder: Path) -> Iterator[object]:
    """A Ray of one node with two processors, ended however the tests end."""
    pytest.importorskip("ray")
    import psutil

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(ray_folder)}
    from ray.cluster_utils import Cluster

    # else Ray's handler stays, and a signal of a later test ends the process of all tests
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "object_store_memory": 80 << 20,
            "include_dashboard": False,
            "include_log_monitor": False,  # a process each, and nothing that a test needs
            "no_monitor": True,
        },
    )
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield made
    finally:
        made.shutdown()
        for child in psutil.Process().children(recursive=True):
            if child.pid not in before:
                os.kill(child.pid, signal.SIGKILL)


@pytest.fixture
def job(cluster: object, tmp_path: Path) -> Callable[..., Job]:
    """job(rows) on the cluster."""

    def make(rows: list[dict[str, object]] | int = 60) -> Job:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        address: str = cluster.address  # type: ignore[attr-defined]
        return Job(folder, address, prompts(rows) if isinstance(rows, int) else rows)

    return make
